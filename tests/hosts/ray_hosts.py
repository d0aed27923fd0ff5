"""Real runs on several hosts, each with its own Ray node; tests/hosts/network.py makes them and runs this file in the first one."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from end_to_end.test_expert_failover import Story, kill_once, tokens_of
from hosts.faults import server_of
from hosts.network import IS_IPV6, PREFIX, address, cut, cut_between, host_of
from left_processes import left_processes
from processes.backend_checks import CHECKS, Check, Owner, run_check
from served_models import Served, make_served

import flowrt
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.settings import HostSettings
from flowrt.hosts.backend import HostsBackend
from flowrt.processes.leftover import marked_processes
from flowrt.seams import Seams
from flowrt.transports.contract import HostAddress, Identity, Limits
from flowrt.transports.errors import BrokenChannelError
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.wire.message import Message

NUM_HOSTS = int(os.environ.get("FLOWRT_TEST_HOSTS", "0"))
pytestmark = pytest.mark.skipif(NUM_HOSTS == 0, reason="needs several hosts; run by make test-hosts")
KEY = bytes(32)
TRUSTED = ["10.77.0.0/24"]
needs_ucx = pytest.mark.skipif(IS_IPV6 or unavailable_reason("ucx") is not None, reason=f"{unavailable_reason('ucx')}, or no IPv4")
networks = pytest.mark.parametrize("trusted", [[], pytest.param(TRUSTED, marks=needs_ucx)], ids=["zmq", "ucx"])
SILENT = Limits(silent_seconds=2)
ECHO = f"""
import asyncio, sys
from flowrt.transports.contract import Identity, Limits
from flowrt.transports.errors import TransportError
from flowrt.transports.registry import get_transport

async def echo(scheme, address):
    try:
        async with await get_transport(scheme).connect(address, Limits(silent_seconds=2), {KEY!r}, Identity("there")) as channel:
            while True:
                await channel.send(await channel.recv())
    except TransportError as error:
        print(type(error).__name__)

asyncio.run(echo(*sys.argv[1:]))
"""
UNREACHABLE = """
import errno, socket, sys

while True:
    try:
        socket.create_connection((sys.argv[1], 9), timeout=20).close()
    except OSError as error:
        if error.errno == errno.EHOSTUNREACH:
            break
"""
NAMES = ("pair", "a", "b", "c", "same", "former", "standby", "cancelled", "kept")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """In place of the check of that name: Ray's driver keeps descriptors and threads. Processes are counted by each test."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"), seed=3)


def write(served: Served, folder: Path, **hosts: Any) -> Path:
    deploy = {"attention": {"groups": NUM_HOSTS}, "experts": {"servers": NUM_HOSTS, "replicas": 2}}
    settings = {"engine": "ray", "count": NUM_HOSTS, **hosts}
    return served.write(folder, deploy, numerics="strict", hosts=settings, reliability={"hedge": False}, limits={"max_tokens": 200})


def pids_of(run_id: str) -> list[int]:
    return [marked.pid for marked in marked_processes() if marked.run_id.startswith(run_id)]


@pytest.mark.parametrize("check", [check for check in CHECKS if "renamed" not in check.__name__], ids=lambda check: check.__name__)
async def test_ray_engine(check: Check) -> None:
    run_id = f"checks of ray of {os.getpid()}"
    place = dict.fromkeys(NAMES, "host.1")
    graph = Graph({}, {}, hosts=HostSettings(), process_hosts=place)
    spawn = lambda task, name: asyncio.create_task(task, name=name)  # noqa: E731

    async def open_backend(owner: Owner) -> HostsBackend:
        return await HostsBackend.open(graph, Seams(), "zmq", spawn, run_id, owner, ("processes.backend_checks",), 3, 60.0)

    await run_check(check, open_backend)
    assert not left_processes(pids_of(run_id))


@networks
async def test_tokens_are_exact_and_each_edge_has_its_transport(served: Served, tmp_path: Path, trusted: list[str]) -> None:
    async with flowrt.open(write(served, tmp_path, trusted=trusted)) as running:
        graph, run_id = running.launcher.graph, running.launcher.run_id
        assert set(graph.process_hosts.values()) == {f"host.{number}" for number in range(NUM_HOSTS)}
        for edge in graph.edges.values():
            ends = {graph.host_of(end) for end in graph.ends_of(edge)}
            assert edge.transport in (("local", "shm") if len(ends) == 1 else ("ucx",) if trusted else ("zmq",))
        assert await tokens_of(running, served.prompts, lambda count: None) == served.expected
        listening = {
            connection.laddr.ip
            for pid in pids_of(run_id)
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening <= {address(number) for number in range(NUM_HOSTS)}
        pids = pids_of(run_id)
    assert not left_processes(pids)


async def test_a_cluster_without_tokens_is_refused(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(UserError, match=r"no token authentication .* hosts\.insecure: true"):
        async with flowrt.open(write(served, tmp_path)):
            pass


@networks
@pytest.mark.parametrize("victim", ["host server", "ray actor", "worker"])
async def test_a_death_changes_no_token_and_its_processes_rejoin(served: Served, tmp_path: Path, victim: str, trusted: list[str]) -> None:
    story = Story()
    async with flowrt.open(write(served, tmp_path, trusted=trusted), on_event=story.note) as running:
        run_id, process_hosts = running.launcher.run_id, running.launcher.graph.process_hosts
        lost = sorted(name for name, host in process_hosts.items() if host == "host.1")
        server = server_of(run_id, "host.1")
        pid = {"host server": server, "ray actor": psutil.Process(server).ppid(), "worker": _worker(server)}[victim]
        assert await tokens_of(running, served.prompts[:4], kill_once(pid)) == served.expected[:4]
        await story.until(lambda story: story.lost and sorted(story.back) == sorted(story.lost))
        assert sorted(story.lost) == lost if victim != "worker" else len(story.lost) == 1
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == served.expected[:4]
        pids = pids_of(run_id)
    assert not left_processes(pids)


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("scheme", ["zmq", pytest.param("ucx", marks=needs_ucx)])
async def test_a_channel_to_a_host_that_is_silent_breaks_at_both_ends(scheme: str, one_way: bool) -> None:
    transport = get_transport(scheme)
    where = transport.address_at(HostAddress(address=address(0), trusted=tuple(TRUSTED)))
    async with await transport.listen(where, SILENT, KEY, Identity("here")) as listener:
        command = ("ip", "netns", "exec", f"{PREFIX}-1", sys.executable, "-c", ECHO, scheme, listener.address)
        other = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(60), await listener.accept() as channel:
            await channel.send(Message("here"))
            assert (await channel.recv()).kind == "here"
            with cut(1, one_way):
                with pytest.raises(BrokenChannelError):
                    await channel.recv()
                printed, _ = await other.communicate()
            assert printed.decode().split() == ["BrokenChannelError"]


async def test_a_channel_opens_as_soon_as_the_link_to_the_host_is_back() -> None:
    """Meanwhile the kernel of the other host has found this one unreachable, which ends an attempt to connect at once."""
    patient_echo = ECHO.replace("silent_seconds=2", "silent_seconds=60")
    transport = get_transport("zmq")
    async with await transport.listen(transport.address_at(HostAddress(address=address(0))), SILENT, KEY, Identity("here")) as listener:
        with cut(1):
            python = ("ip", "netns", "exec", f"{PREFIX}-1", sys.executable, "-c")
            command = (*python, patient_echo, "zmq", listener.address)
            other = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            # The state of the neighbour is FAILED too briefly to be seen where another process tries at once again.
            probe = await asyncio.create_subprocess_exec(*python, UNREACHABLE, address(0))
            assert await probe.wait() == 0
        async with asyncio.timeout(60), await listener.accept():
            pass
        printed, _ = await other.communicate()
        assert printed.decode().split() == ["EndOfChannel"]


@networks
@pytest.mark.parametrize("one_way", [False, True])
async def test_a_partition_changes_no_token_and_the_host_rejoins(served: Served, tmp_path: Path, one_way: bool, trusted: list[str]) -> None:
    story = Story()
    async with flowrt.open(write(served, tmp_path, dead_seconds=2.0, trusted=trusted), on_event=story.note) as running:
        run_id, process_hosts = running.launcher.run_id, running.launcher.graph.process_hosts
        lost = sorted(name for name, host in process_hosts.items() if host == "host.1")
        server = server_of(run_id, "host.1")
        before = [server, *(child.pid for child in psutil.Process(server).children())]
        begun = asyncio.Event()

        async def part() -> None:
            await begun.wait()
            with cut(host_of(server), one_way):
                await story.until(lambda story: sorted(story.lost) == lost)
                assert not left_processes(before)  # the host ends them by itself

        parting = asyncio.create_task(part())
        assert await tokens_of(running, served.prompts[:4], lambda count: begun.set() if count >= 20 else None) == served.expected[:4]
        await parting
        await story.until(lambda story: sorted(story.back) == lost)
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == served.expected[:4]
        pids = pids_of(run_id)
    assert not left_processes(pids)


@pytest.mark.skipif(NUM_HOSTS < 3, reason="needs three hosts")
@networks
async def test_a_partition_between_two_other_hosts_changes_no_token(served: Served, tmp_path: Path, trusted: list[str]) -> None:
    """The launcher reaches both, so neither is lost: links between them break, and a process of each ends or goes on without the other."""
    story = Story()
    async with flowrt.open(write(served, tmp_path, dead_seconds=2.0, trusted=trusted), on_event=story.note) as running:
        run_id, process_hosts = running.launcher.run_id, running.launcher.graph.process_hosts
        servers = [server_of(run_id, host) for host in ("host.1", "host.2")]
        reached = sorted(name for name, host in process_hosts.items() if host in ("host.1", "host.2"))
        begun, heals = asyncio.Event(), asyncio.Event()

        async def part() -> None:
            await begun.wait()
            with cut_between(*map(host_of, servers)):
                await heals.wait()

        parting = asyncio.create_task(part())
        assert await tokens_of(running, served.prompts[:4], lambda count: begun.set() if count >= 20 else None) == served.expected[:4]
        await story.until(lambda story: bool(story.lost))
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == served.expected[:4]
        heals.set()
        await parting
        assert {*story.lost} <= {*reached}
        assert all(psutil.pid_exists(server) for server in servers), "the hosts stay"
        await story.until(lambda story: sorted(story.back) == sorted(story.lost))
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == served.expected[:4]
        pids = pids_of(run_id)
    assert not left_processes(pids)


def _worker(server: int) -> int:
    return next(child.pid for child in psutil.Process(server).children() if child.name().startswith("fr:experts"))
