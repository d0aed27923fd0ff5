"""Opens the socket that all front ends share, before anything starts: an address that cannot be bound is one line of error."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowrt.errors import UserError, shown

WRITE_SECONDS = 120.0  # without progress of a client that reads slowly: it is cut off
BACKLOG = 1024  # connections that wait until a front end accepts them, also while one restarts
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class HttpListener:
    """A listening socket. `url` is for people. `is_public`: others than this machine's users may reach it. `hosts`: names that clients on
    this machine use for it; () where any name will do."""

    socket: socket.socket
    url: str
    is_public: bool
    hosts: tuple[str, ...] = ()
    path: str = ""  # of a unix socket

    def close(self) -> None:
        self.socket.close()
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)


def open_tcp_listener(host: str, port: int, scheme: str = "http") -> HttpListener:
    """Raises UserError when the address cannot be bound, caused by the OSError. An IPv6 address may have brackets, as in a URL."""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError):
        raise UserError(f"--host {shown(host)} is not an address of this machine; give --host 127.0.0.1, or 0.0.0.0 with a key") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it: the kernel ends those whose client reads nothing
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_SECONDS * 1000))
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"{host}:{port} is in use by another program; give another --port") from error
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{host}:{port} cannot be bound: {reason}; give another --host or --port") from error
    bound = listener.getsockname()
    is_public = not ipaddress.ip_address(bound[0].partition("%")[0]).is_loopback
    shown_host = f"[{bound[0]}]" if family == socket.AF_INET6 else bound[0]
    hosts = () if is_public else tuple(dict.fromkeys((*_LOOPBACK_NAMES, shown_host, host.lower())))
    return HttpListener(listener, f"{scheme}://{shown_host}:{bound[1]}", is_public, hosts)


def open_unix_listener(path: Path, origin: str = "--uds") -> HttpListener:
    """A socket that only this user may connect to. It replaces one that no process listens on. `origin`: what has named the path. Raises
    UserError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        remove_stale(path)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space is left for the socket {path}; free some, or give another path with {origin}") from None
        raise UserError(f"{origin} {path} cannot be bound: {(error.strerror or str(error)).lower()}; give another path") from None
    finally:
        os.umask(before)
    return HttpListener(listener, f"unix:{path}", is_public=False, path=str(path))


def remove_stale(path: Path) -> None:
    """Remove a unix socket that no process listens on. Raises OSError."""
    if _is_stale(path):
        path.unlink()


def _is_stale(path: Path) -> bool:
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
