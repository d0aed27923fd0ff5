"""Addresses of transports, `scheme://rest`: splits and joins them; each scheme interprets `rest`. In it, an IPv6 address has brackets."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from flowrt.transports.errors import AddressError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,31}")
_HOST_AND_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):(\d{1,5})")
MAX_ADDRESS_CHARACTERS = 512


class Address(NamedTuple):
    """`scheme` and what follows `://`, possibly empty (any free address on this host)."""

    scheme: str
    rest: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.rest}"


def parse_address(text: str) -> Address:
    """Split `scheme://rest`. Raises AddressError naming what is wrong."""
    scheme, separator, rest = text.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        raise AddressError(f"{text[:80]!r} is not an address; one looks like scheme://rest, for example inproc://gate")
    if len(text) > MAX_ADDRESS_CHARACTERS or not rest.isprintable():
        raise AddressError(f"address {text[:80]!r} must be printable and at most {MAX_ADDRESS_CHARACTERS} characters")
    return Address(scheme, rest)


def expect_scheme(text: str, scheme: str) -> str:
    """The rest of `text`, which must be an address of `scheme`; AddressError otherwise."""
    address = parse_address(text)
    if address.scheme != scheme:
        raise AddressError(f"{text!r} is not an address of {scheme}; one starts with {scheme}://")
    return address.rest


def split_port(text: str) -> tuple[IPv4Address | IPv6Address, int] | None:
    """The address and port of `10.0.0.5:7000` or `[fd00::5]:7000`; None for anything else. An IPv6 address has no zone."""
    if (match := _HOST_AND_PORT.fullmatch(text)) is None:
        return None
    try:
        host = IPv6Address(match[1]) if match[1] else IPv4Address(match[2])
    except ValueError:
        return None
    return host, int(match[3])


def with_port(host: str, port: int | str) -> str:
    """`10.0.0.5:7000`, `[fd00::5]:7000`. `host`: a numeric address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
