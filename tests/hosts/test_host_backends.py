"""A host server that the local engine starts passes the checks of process backends; its loss is the loss of its processes only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine
from typing import Any
from unittest.mock import MagicMock

import msgspec
import psutil
import pytest
from left_processes import left_processes
from processes.backend_checks import CHECKS, Check, Owner, close, run_check, spec, talk

from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import Graph
from flowrt.graph.settings import HostSettings
from flowrt.hosts.backend import HostsBackend
from flowrt.hosts.local_engine import LocalHostProcess
from flowrt.hosts.messages import HostReply
from flowrt.processes.leftover import marked_processes
from flowrt.seams import Seams

NAMES = ("pair", "a", "b", "c", "same", "former", "standby", "cancelled", "kept")
RUN_ID = f"checks of hosts of {os.getpid()}"
GRAPH = Graph({}, {}, hosts=HostSettings(engine="local"), process_hosts=dict.fromkeys(NAMES, "host.1"))


def spawn(task: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(task, name=name)


async def open_backend(owner: Owner, graph: Graph = GRAPH) -> HostsBackend:
    return await HostsBackend.open(graph, Seams(), "zmq", spawn, RUN_ID, owner, ("processes.backend_checks",), 3, 60.0)


def pids() -> list[int]:
    return [marked.pid for marked in marked_processes() if marked.run_id.startswith(RUN_ID)]


def server_pid() -> int:
    return next(pid for pid in pids() if "flowrt.hosts.server" in psutil.Process(pid).cmdline())


@pytest.mark.parametrize("check", [check for check in CHECKS if "renamed" not in check.__name__], ids=lambda check: check.__name__)
async def test_local_engine(check: Check) -> None:
    await run_check(check, open_backend)
    assert not left_processes(pids())


async def test_the_loss_of_a_host_is_the_end_of_its_processes_and_it_opens_again() -> None:
    owner = Owner()
    backend = await open_backend(owner, GRAPH.replace(process_hosts={"a": "host.1", "b": "host.1"}))
    first, second, here = [await backend.start(spec(name)) for name in ("a", "b", "c")]
    for process in (first, second, here):
        await talk(process)
    os.kill(server_pid(), signal.SIGKILL)
    for process in (first, second):
        assert (await owner.wait_exit(process)).startswith("was lost with host.1, which ")
    await talk(here)
    back = None
    while back is None:
        with contextlib.suppress(WorkerDiedError):  # the host server takes longer to start than one attempt may
            back = await backend.start(spec("a"))
    await talk(back)
    assert owner.lost == []
    await backend.aclose()
    await close(first, second, here, back)
    assert not left_processes(pids())


async def test_a_host_that_stops_is_lost_and_ends_its_processes_when_it_goes_on() -> None:
    owner = Owner()
    graph = GRAPH.replace(hosts=HostSettings(engine="local", dead_seconds=1.0))
    backend = await open_backend(owner, graph)
    process = await backend.start(spec("a"))
    await talk(process)
    server = server_pid()
    workers = [child.pid for child in psutil.Process(server).children()]
    assert workers
    os.kill(server, signal.SIGSTOP)
    assert await owner.wait_exit(process) == "was lost with host.1, which sent nothing for 1 s"
    os.kill(server, signal.SIGCONT)
    assert not left_processes([server, *workers])
    await backend.aclose()
    await close(process)


async def test_a_host_that_cannot_be_used_is_one_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.hosts.remote_host.own_version", lambda: "0.0.1")
    with pytest.raises(UserError, match=r"host\.1: has flowrt .*, and the launcher's host 0\.0\.1; install the same version on both"):
        await open_backend(Owner())
    await asyncio.sleep(0)
    assert not left_processes(pids())


async def test_a_host_that_cannot_be_reached_is_one_error_with_both_ends_and_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    start = LocalHostProcess.start
    with socket.socket() as silent:
        silent.bind(("127.0.0.2", 0))
        port = silent.getsockname()[1]

        async def start_elsewhere(self: LocalHostProcess, line: bytes) -> bytes:
            reply = msgspec.json.decode(await start(self, line), type=HostReply)
            return msgspec.json.encode(msgspec.structs.replace(reply, address=f"zmq://127.0.0.2:{port}?curve"))

        monkeypatch.setattr(LocalHostProcess, "start", start_elsewhere)
        with pytest.raises(UserError) as raised:
            await open_backend(Owner())
    text = f"host.1 cannot be reached at zmq://127.0.0.2:{port}?curve from 127.0.0.1: no process listens at zmq://127.0.0.2:{port}"
    assert str(raised.value) == f"{text}; let TCP connections between these two pass"
    assert not left_processes(pids())


async def test_without_ray_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        UserError, match=r"^hosts\.engine is ray, which is not installed: pip install -e \"\.\[ray\]\" in the clone of flowrt$"
    ):
        await open_backend(Owner(), GRAPH.replace(hosts=HostSettings()))


@pytest.mark.parametrize("finds", [True, False])
async def test_a_start_on_ray_that_is_left_gives_its_reservation_back(finds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the hosts are found meanwhile, or not yet."""
    ray, waits, may_find, loop = MagicMock(), asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    ray.is_initialized.return_value = False
    ray.get_runtime_context().get_node_id.return_value = "n"
    ray.nodes.return_value = [{"NodeID": "n", "NodeManagerAddress": "10.0.0.1"}]

    def wait(seconds: float) -> bool:
        loop.call_soon_threadsafe(waits.set)
        return may_find.wait(20) and finds

    ray.util.placement_group().wait = wait
    monkeypatch.setitem(sys.modules, "ray", ray)
    starting = asyncio.create_task(open_backend(Owner(), GRAPH.replace(hosts=HostSettings(insecure=True))))
    await waits.wait()
    starting.cancel()
    loop.call_later(0.1, may_find.set)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ray.util.remove_placement_group.call_count == ray.shutdown.call_count == 1


def test_no_other_engine_imports_ray() -> None:
    code = "import sys, flowrt.cli.app, flowrt.hosts.backend, flowrt.hosts.server; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


async def hold() -> None:
    """Run by the next test in another process: start a process on another host, print its run id, and wait."""
    owner = Owner()
    backend = await open_backend(owner)
    await talk(await backend.start(spec("a")))
    print(RUN_ID, flush=True)
    await asyncio.Event().wait()


@pytest.mark.parametrize("cause", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_the_launcher_ends_every_host(cause: signal.Signals) -> None:
    code = "import asyncio; from hosts.test_host_backends import hold; asyncio.run(hold())"
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        assert launcher.stdout is not None
        run_id = launcher.stdout.readline().strip()
        left = [marked.pid for marked in marked_processes() if marked.run_id.startswith(f"{run_id}.")]
        assert len(left) == 3  # host server, fork server, worker
        launcher.send_signal(cause)
        assert not left_processes(left)
    finally:
        launcher.kill()
        launcher.communicate()
