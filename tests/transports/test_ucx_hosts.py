"""UCX between hosts of a trusted network, which the loopback plays: the whole contract, and what is refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt.transports.conformance.channel_checks import CHANNEL_CHECKS
from flowrt.transports.conformance.connection_checks import CONNECTION_CHECKS, HERE, KEY, SMALL, THERE, pair_maker
from flowrt.transports.conformance.kit import check_numbered, numbered, opened, within
from flowrt.transports.conformance.process_checks import PROCESS_CHECKS
from flowrt.transports.contract import HostAddress, Listener
from flowrt.transports.errors import AddressError, TransportError, UnavailableError
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.ucx import devices
from flowrt.transports.ucx import transport as ucx
from flowrt.transports.ucx.transport import UCXTransport

pytestmark = pytest.mark.skipif(unavailable_reason("ucx") is not None, reason=str(unavailable_reason("ucx")))
NETWORK = "127.0.0.0/8"
ADDRESS = f"ucx://127.0.0.1:0?trusted={NETWORK}"


@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
async def test_channel(check: Any) -> None:
    await check(pair_maker("ucx", ADDRESS))


@pytest.mark.parametrize("check", [*CONNECTION_CHECKS, *PROCESS_CHECKS], ids=lambda check: check.__name__)
async def test_transport(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = UCXTransport.listen

    async def listen_for_hosts(self: UCXTransport, address: str, *arguments: Any) -> Listener:
        return await listen(self, ADDRESS if address == "ucx://" else address, *arguments)

    monkeypatch.setattr(UCXTransport, "listen", listen_for_hosts)
    await check("ucx")


async def test_ports_are_of_the_range_and_of_one_interface() -> None:
    own = psutil.Process()
    before = {each.laddr for each in own.net_connections("tcp")}
    transport = get_transport("ucx")
    host = HostAddress(address="127.0.0.2", ports="24100-24199", trusted=("10.99.0.0/16", NETWORK))
    async with await transport.listen(transport.address_at(host), SMALL, KEY, HERE) as listener:
        assert listener.address.startswith("ucx://127.0.0.2:241")
        assert listener.address.endswith("?trusted=127.0.0.0/8:24100-24199")
        accepting = asyncio.ensure_future(listener.accept())
        async with await transport.connect(listener.address, SMALL, KEY, THERE) as one, await accepting as two:
            await one.send(numbered(0, 50_000))
            check_numbered(await within(two.recv(), "recv"), 0, 50_000)
            new = [each for each in own.net_connections("tcp") if each.laddr not in before and each.status == psutil.CONN_LISTEN]
            assert len(new) >= 3, "the listener, and UCX at both ends"
            assert {each.laddr.ip for each in new} <= {"127.0.0.1", "127.0.0.2"}
            assert all(24100 <= each.laddr.port <= 24199 for each in new)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("ucx://127.0.0.1:7000?curve", r"the only option is \?trusted=NETWORK"),
        ("ucx://127.0.0.1:7000?trusted", r"the only option is \?trusted=NETWORK"),
        ("ucx://127.0.0.1:7000?trusted=127.0.0.1/8", r"the only option is \?trusted=NETWORK"),
        ("ucx://127.0.0.1:7000?trusted=127.0.0.0/8:9-8", r"the only option is \?trusted=NETWORK"),
        ("ucx://10.1.2.3:7000", "is not on this host"),
        ("ucx://a-name?trusted=127.0.0.0/8", "is for an IP address and a port"),
        ("ucx://0.0.0.0:7000?trusted=127.0.0.0/8", "the one address that the others reach this host by"),
    ],
)
async def test_addresses_that_are_refused(address: str, text: str) -> None:
    with pytest.raises(AddressError, match=text):
        await get_transport("ucx").listen(address, SMALL, KEY, HERE)
    with pytest.raises(AddressError, match=text):
        await get_transport("ucx").connect(address, SMALL, KEY, THERE)


async def test_an_end_outside_of_the_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector reaches the listener from an address that the graph does not name."""
    async with await get_transport("ucx").listen(ADDRESS, SMALL, KEY, HERE) as listener:
        monkeypatch.setattr(ucx, "is_in", lambda address, network: False)
        with pytest.raises(UnavailableError, match=r"from 127\.0\.0\.1, which is not in the trusted network 127\.0\.0\.0/8"):
            await get_transport("ucx").connect(listener.address, SMALL, KEY, THERE)


@pytest.mark.parametrize("ours", ["", f"?trusted={NETWORK}"])
async def test_one_end_alone_cannot_decide_about_the_network(ours: str) -> None:
    theirs = "" if ours else f"?trusted={NETWORK}"
    async with await get_transport("ucx").listen(f"ucx://127.0.0.1:0{theirs}", SMALL, KEY, HERE) as listener, asyncio.timeout(60):
        with pytest.raises(TransportError):
            await get_transport("ucx").connect(listener.address.partition("?")[0] + ours, SMALL, KEY, THERE)


def test_the_address_of_a_host_is_in_its_trusted_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "addresses", lambda: {"lo": "127.0.0.1", "eth0": "192.168.0.4", "eth1": "10.1.0.4"})
    transport = UCXTransport()
    assert transport.address_at(HostAddress()) == "ucx://"
    assert transport.address_at(HostAddress(address="192.168.0.4")) == "ucx://"
    trusted = HostAddress(address="192.168.0.4", trusted=("10.1.0.0/16",))
    assert transport.address_at(trusted) == "ucx://10.1.0.4:0?trusted=10.1.0.0/16"
    with pytest.raises(UnavailableError, match=r"in 10\.2\.0\.0/16 \(hosts\.trusted\), and 192\.168\.0\.4 has no address there"):
        transport.address_at(HostAddress(address="192.168.0.4", trusted=("10.2.0.0/16",)))
    with pytest.raises(UnavailableError, match="not the first address of an interface"):
        devices.devices_of("10.9.9.9")


def test_the_rdma_device_of_an_interface_is_used_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "addresses", lambda: {"eth0": "192.168.0.4", "eth1": "10.1.0.4"})
    monkeypatch.setattr(devices, "INTERFACES", tmp_path)
    (tmp_path / "eth1" / "device" / "infiniband" / "mlx5_3").mkdir(parents=True)
    (tmp_path / "eth1" / "dev_port").write_text("1\n")
    assert devices.devices_of("10.1.0.4") == "eth1,mlx5_3:2"
    assert devices.devices_of("192.168.0.4") == "eth0"


async def test_links_within_a_host_are_as_before_beside_one_between_hosts() -> None:
    """Each kind has its own UCX context in a process."""
    for _ in range(2):
        async with opened(pair_maker("ucx", ADDRESS)) as far, opened(pair_maker("ucx")) as near:
            for one, two in (far, near):
                await one.send(numbered(0, 100_000))
                check_numbered(await within(two.recv(), "recv"), 0, 100_000)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"ucx_shm_{os.getpid()}")]
