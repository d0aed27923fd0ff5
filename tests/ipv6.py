"""Whether this system has IPv6. Not a test itself."""

from __future__ import annotations

import socket


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
