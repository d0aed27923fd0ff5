"""Finds the network interface of an address of this host, and the devices with which UCX uses its network."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, ip_address
from pathlib import Path

from flowrt.transports.errors import UnavailableError

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_NAME_BYTES = 15
_ADDRESS = slice(20, 24)  # of the response
INTERFACES = Path("/sys/class/net")


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface, by name; the first one where there are several, which is the one that UCX uses."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                response = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:_NAME_BYTES]))
                found[name] = socket.inet_ntoa(response[_ADDRESS])
    return found


def address_in(networks: Sequence[str], preferred: str) -> tuple[str, str]:
    """An address of this host in one of the networks, and that network. Raises UnavailableError."""
    for network in networks:
        for address in (preferred, *addresses().values()):
            if is_in(address, network):
                return address, network
    raise UnavailableError(f"ucx reaches other hosts in {', '.join(networks)} (hosts.trusted), and {preferred} has no address there")


def is_in(address: str, network: str) -> bool:
    return ip_address(address) in IPv4Network(network)


def devices_of(address: str) -> str:
    """UCX's names of the interface with this address, and of the RDMA device behind it, if there is one. Raises UnavailableError."""
    wanted = IPv4Address(address)
    for name, own in addresses().items():
        if own == address or (wanted.is_loopback and IPv4Address(own).is_loopback):
            return ",".join([name, *_rdma_devices(INTERFACES / name)])
    raise UnavailableError(f"ucx cannot listen at {address}: it is not the first address of an interface of this host")


def _rdma_devices(interface: Path) -> list[str]:
    try:
        port = int((interface / "dev_port").read_text()) + 1
        return [f"{each.name}:{port}" for each in sorted((interface / "device" / "infiniband").iterdir())]
    except (OSError, ValueError):
        return []
