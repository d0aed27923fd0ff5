"""With `hosts.ports`, whatever a run on several hosts listens at is of that range."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import psutil
import pytest
from end_to_end.test_expert_failover import tokens_of
from served_models import Served

import flowrt
from flowrt.api.opening import read_graph
from flowrt.errors import UserError
from flowrt.processes.leftover import marked_processes
from flowrt.transports.contract import HostAddress, Identity, Limits
from flowrt.transports.errors import AddressError
from flowrt.transports.registry import get_transport

FIRST, LAST = 21_000, 21_199
KEY, HERE = bytes(32), "127.0.0.1"


def listening(pid: int) -> set[tuple[str, int]]:
    found = psutil.Process(pid).net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


async def test_both_ends_of_a_channel_listen_in_the_range() -> None:
    transport, own, host = get_transport("zmq"), psutil.Process().pid, HostAddress(address=HERE, ports="22000-22002")
    before = listening(own)
    with socket.create_server((HERE, 22_000)):  # is not free
        async with await transport.listen(transport.address_at(host), Limits(), KEY, Identity("there")) as listener:
            assert listener.address == f"zmq://{HERE}:22001?curve:22000-22002"
            accepting = asyncio.ensure_future(listener.accept())
            async with await transport.connect(listener.address, Limits(), KEY, Identity("here")), await accepting:
                assert {port for _, port in listening(own) - before} == {22_000, 22_001, 22_002}
                with pytest.raises(AddressError, match=r"no port from 22000 to 22002 is free for zmq://127\.0\.0\.1:0; give a wider range"):
                    await transport.listen(transport.address_at(host), Limits(), KEY, Identity("there"))


@pytest.mark.parametrize("option", ["curve:", "curve:7000", "curve:7001-7000", "curve:0-9", "curve:1-70000", "curve:7000-7001-", "plain"])
async def test_an_option_that_is_no_range_is_refused(option: str) -> None:
    with pytest.raises(AddressError, match=r"the only option is \?curve, or \?curve:FROM-TO"):
        await get_transport("zmq").connect(f"zmq://{HERE}:7000?{option}", Limits(), KEY, Identity("here"))


async def test_processes_of_all_hosts_listen_in_the_range(served: Served, tmp_path: Path) -> None:
    deploy = {"attention": {"groups": 2}, "experts": {"servers": 2, "replicas": 2}}
    path = served.write(tmp_path, deploy, hosts={"engine": "local", "count": 2, "ports": f"{FIRST}-{LAST}"})
    async with flowrt.open(path) as running:
        assert await tokens_of(running, served.prompts[:2], lambda count: None) == served.expected[:2]
        pids = [marked.pid for marked in marked_processes() if marked.run_id.startswith(running.launcher.run_id)]
        found = {address for pid in pids for address in listening(pid)}
    assert {host for host, _ in found} == {"127.0.0.1", "127.0.0.2"}
    assert all(FIRST <= port <= LAST for _, port in found)


@pytest.mark.parametrize("ports", ["80-90", "7000-7000", "7000-70000", "7000", "7000-7001-7002", "a-b"])
def test_a_range_that_cannot_be_used_is_refused(ports: str, served: Served, tmp_path: Path) -> None:
    path = served.write(tmp_path, {"attention": {"groups": 2}}, hosts={"engine": "local", "count": 2, "ports": ports})
    with pytest.raises(UserError, match=r"hosts\.ports: .* is not a range of ports; write FROM-TO, between 1024 and 65535"):
        read_graph(path)
