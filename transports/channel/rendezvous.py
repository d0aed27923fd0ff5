"""Connects two processes over an authenticated socket, whose end-of-file later reports the peer's death.

The connector allocates memory and descriptors only after the listener has proved the key, so an unauthenticated caller costs a listener one
socket and some bytes. A name `x` under scheme `s` is the abstract unix socket `flowrt/s/x`: it leaves nothing in the file system, and the
kernel reports the user at the other end; processes of other users are refused. `127.0.0.1:port` and `[::1]:port` are TCP over loopback.
Other addresses need an option, with which the transport encrypts what follows, or which names their network as trusted: an eavesdropper can
read names and limits from the handshake, but cannot change it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

from flowrt.transports.channel.queued import QueuedChannel, QueuedListener
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.errors import AddressError, HandshakeError, TransportError, UnavailableError
from flowrt.transports.wire.address import split_port, with_port
from flowrt.transports.wire.codec import WireError
from flowrt.transports.wire.handshake import EVICTED, EvictedError, Handshake, RefusedError, Role

HANDSHAKE_SECONDS = 10.0  # time limit of a handshake on the listener's side
MAX_CALLERS = 64  # concurrent handshakes of one listener
FULL_TABLE_SECONDS = 1.0  # time limit of a handshake while the table of callers is full
MAX_EVICTIONS = 10  # attempts of a connector that a listener evicts
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.01, 1.0  # between attempts to accept while this process has no descriptor left
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
MAX_DESCRIPTORS = 4
IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_READY = b"\x01"
_READ_BYTES = 4096
_HOST_AND_PORT = re.compile(r".*:(\d{1,5}|\*)")
_CONNECT_AGAIN_SECONDS, _UNREACHABLE_SECONDS = 0.005, 0.1


class Meeting(NamedTuple):
    """A handshake over `sock`. On the listener's side, `descriptors` are those that the connector has passed."""

    sock: socket.socket
    handshake: Handshake
    option: str  # of the address, see LocalEnd
    descriptors: list[int]

    @property
    def peer(self) -> Identity:
        return self.handshake.peer

    @property
    def limits(self) -> Limits:
        return self.handshake.limits


class Offer(NamedTuple):
    """What a connector sends with its proof, and how it makes its end of the channel once the listener is ready."""

    payload: bytes
    descriptors: list[int]
    make_channel: Callable[[Meeting], QueuedChannel]


class LocalEnd(NamedTuple):
    """The part of one process in a rendezvous: the address, and what its handshake declares.

    `option` is that of the address, "" without one: it encrypts all traffic after the handshake ("curve"), or names the network as trusted
    ("trusted=10.1.0.0/16"). It may name the ports at which both ends may listen: "curve:7000-7099".
    """

    scheme: str
    name: str
    option: str
    limits: Limits
    key: bytes
    identity: Identity

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}"

    def handshake(self, role: Role, payload: Callable[[Limits], bytes] | None = None) -> Handshake:
        return Handshake(role, self.key, self.identity, self.limits, scheme=self.scheme, payload=payload)


def socket_address(scheme: str, name: str, option: str = "") -> tuple[int, str | tuple[str, int]]:
    """Returns the family and address of the socket for `name`. Raises AddressError for an address that is not on this host.

    With an `option` (see LocalEnd), every address but 0.0.0.0, :: and link-local ones of IPv6 is accepted, and plain names are refused.
    """
    host, port = split_port(name) or (None, 0)
    if host is not None and (option or host.is_loopback):
        if host.is_unspecified or (host.version == 6 and host.is_link_local):
            raise AddressError(f"{scheme}://{name}: write the one address that the others reach this host by, and not a link-local one")
        return socket.AF_INET if host.version == 4 else socket.AF_INET6, (str(host), port)
    if option:
        raise AddressError(f"{scheme}://{name}: {option} is for an IP address and a port: {scheme}://10.0.0.5:7000?{option}")
    if _HOST_AND_PORT.fullmatch(name):
        raise AddressError(f"{scheme}://{name} is not on this host; only 127.0.0.1:port, [::1]:port and plain names work without an option")
    if sys.platform != "linux":
        raise AddressError(f"{scheme}://{name}: names need Linux; use {scheme}://127.0.0.1:port here")
    path = f"\0flowrt/{scheme}/{name}"
    if len(path.encode()) > 107:
        raise AddressError(f"the name {name[:64]!r} is too long for a unix socket")
    return socket.AF_UNIX, path


def ports_of(option: str) -> range:
    """The ports at which a process may listen, from the address option (see LocalEnd); 0 means any."""
    first, _, last = option.partition(":")[2].partition("-")
    return range(int(first), int(last) + 1) if last else range(1)


def is_port_range(text: str) -> bool:
    """Whether it is FROM-TO."""
    first, _, last = text.partition("-")
    return first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last) < 1 << 16


def _break_when_silent(sock: socket.socket, seconds: int) -> None:
    """Let the kernel probe the other host while no data comes, and give up the connection, or the attempt to connect, when it does not
    respond for about so long. The host of a stopped process responds."""
    if seconds and sock.family in IP_FAMILIES and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        pause = max(1, seconds // 3)
        for option, value in ((socket.TCP_KEEPIDLE, pause), (socket.TCP_KEEPINTVL, pause), (socket.TCP_USER_TIMEOUT, 1000 * seconds)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def free_name() -> str:
    """An unused random name."""
    return secrets.token_hex(8) if sys.platform == "linux" else "127.0.0.1:0"


def _bind_socket(sock: socket.socket, address: str | tuple[str, int], ports: range) -> None:
    """Bind to the address; in place of port 0, to the first free port of `ports`."""
    if isinstance(address, str) or address[1]:
        ports = range(1)
    for port in ports:
        try:
            sock.bind((address[0], port) if port else address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                raise
        else:
            return


class SocketListener(QueuedListener):
    """Listens on a socket and turns each connector that has proved the key into a channel through `make_channel`.

    `make_channel` takes ownership of the meeting's socket and descriptors, or raises and leaves them. An error besides OSError, WireError
    and TransportError is also reported to the event loop.

    At most MAX_CALLERS connectors are in the handshake. While the table is full, the oldest is evicted after FULL_TABLE_SECONDS.
    """

    def __init__(self, end: LocalEnd, make_channel: Callable[[Meeting], Channel]) -> None:
        family, address = socket_address(end.scheme, end.name, end.option)
        self._loop = asyncio.get_running_loop()
        self._callers: dict[_Caller, None] = {}  # oldest first
        self._alarm: asyncio.TimerHandle | None = None  # the next eviction, or the end of a pause
        self._pause_seconds = MIN_PAUSE_SECONDS
        self._make_channel = make_channel
        self._end = end
        end.handshake("listener")  # raises now for a bad key or identity of this listener
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            _bind_socket(self._socket, address, ports_of(end.option))
            self._socket.listen(1024)
        except OSError as error:
            self._socket.close()
            if error.errno == errno.EADDRINUSE:
                if len(ports := ports_of(end.option)) > 1:
                    raise AddressError(f"no port from {ports[0]} to {ports[-1]} is free for {end}; give a wider range") from error
                raise AddressError(f"another process listens at {end} already") from error
            raise AddressError(f"cannot listen at {end}: {error.strerror}") from error
        bound = self._socket.getsockname()
        place = f"{end.scheme}://{with_port(*bound[:2])}" if family in IP_FAMILIES else str(end)
        super().__init__(f"{place}?{end.option}" if end.option else place)
        self._watch()

    def _stop(self) -> None:
        self._unwatch()
        self._socket.close()
        self._cancel_alarm()
        for caller in self._callers:
            caller.hang_up()
        self._callers.clear()

    def _watch(self) -> None:
        """Accepts connections while there is room. When the table of callers is full, schedules the eviction of the oldest one."""
        self._cancel_alarm()
        if self._socket.fileno() < 0:
            return
        is_table_full = len(self._callers) >= MAX_CALLERS
        if is_table_full:
            oldest = next(iter(self._callers))
            self._alarm = self._loop.call_at(oldest.since + FULL_TABLE_SECONDS, oldest.evict)
        if is_table_full or self.full:
            self._unwatch()
        else:
            self._loop.add_reader(self._socket.fileno(), self._on_call)

    _on_room = _watch

    def _unwatch(self) -> None:
        self._loop.remove_reader(self._socket.fileno())

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _on_call(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError as error:  # usually the caller has already disconnected
            if error.errno in _NO_DESCRIPTOR:  # the listening socket stays readable, so the loop would spin
                self._unwatch()
                self._alarm = self._loop.call_later(self._pause_seconds, self._watch)
                self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)
            return
        self._pause_seconds = MIN_PAUSE_SECONDS
        sock.setblocking(False)
        _break_when_silent(sock, self._end.limits.silent_seconds)
        if not _same_user(sock):
            self.rejected += 1
            sock.close()
            return
        self._callers[_Caller(self, Meeting(sock, self._end.handshake("listener"), self._end.option, []))] = None
        self._watch()

    def settle(self, caller: _Caller, meeting: Meeting | None) -> None:
        """Removes a caller whose handshake has succeeded, or failed (`meeting` is None)."""
        del self._callers[caller]
        try:
            channel = None if meeting is None else self._make_channel(meeting)
        except Exception as error:
            channel = None
            caller.release()
            if not isinstance(error, OSError | WireError | TransportError):
                self._loop.call_exception_handler({"message": f"{self.address} could not make a channel", "exception": error})
        if meeting is None or channel is None:
            self.rejected += 1
        else:
            with contextlib.suppress(OSError):  # already disconnected; the channel reports it
                meeting.sock.send(_READY)
            self.put(channel)
        self._watch()


class _Caller:
    """A connection in the handshake, on the listener's side. It uses callbacks only, so that a silent peer costs no task."""

    def __init__(self, listener: SocketListener, meeting: Meeting) -> None:
        self._listener = listener
        self._meeting = meeting
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        self._timer = self._loop.call_at(self.since + HANDSHAKE_SECONDS, self._fail)
        self._loop.add_reader(meeting.sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        sock, handshake = self._meeting.sock, self._meeting.handshake
        try:
            data = self._read()
            if not data:
                raise RefusedError("the caller has closed the connection")
            reply = handshake.receive(data)
            if reply and sock.send(reply) != len(reply):
                raise RefusedError("the caller does not read")
        except BlockingIOError:
            return
        except (OSError, HandshakeError) as error:
            if isinstance(error, RefusedError) and error.reply:
                with contextlib.suppress(OSError):
                    sock.send(error.reply)
            self._fail()
            return
        if handshake.done:
            self._unwatch()
            self._listener.settle(self, self._meeting)

    def _read(self) -> bytes:
        sock, descriptors = self._meeting.sock, self._meeting.descriptors
        if sock.family in IP_FAMILIES:
            return sock.recv(_READ_BYTES)
        data, passed, flags, _ = socket.recv_fds(sock, _READ_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        descriptors += passed
        if flags & socket.MSG_CTRUNC or len(descriptors) > MAX_DESCRIPTORS:
            raise RefusedError("too many descriptors")
        return data

    def evict(self) -> None:
        """Closes the connection to make room, unless the proof has arrived. Sends EVICTED, so that the caller may connect again."""
        self._on_readable()
        if self._meeting.sock.fileno() >= 0 and not self._meeting.handshake.done:
            with contextlib.suppress(OSError):
                self._meeting.sock.send(EVICTED)
            self._fail()

    def _unwatch(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._meeting.sock.fileno())

    def _fail(self) -> None:
        self.hang_up()
        self._listener.settle(self, None)

    def hang_up(self) -> None:
        self._unwatch()
        self.release()

    def release(self) -> None:
        """Closes the connection and the descriptors that came over it."""
        while self._meeting.descriptors:
            os.close(self._meeting.descriptors.pop())
        self._meeting.sock.close()


async def meet(end: LocalEnd, offer: Callable[[Meeting], Offer]) -> Meeting:
    """Connects to the listener at the address of `end` and completes the handshake.

    `offer` is called once the listener has proved the key and the limits are agreed on; its caller still owns the descriptors that it
    returns. Raises AddressError (no listener), HandshakeError, UnavailableError (no descriptor), and any exception of
    `offer`. Connects again, at most MAX_EVICTIONS times in all, when the listener evicts this connector.
    """
    for _ in range(MAX_EVICTIONS):
        sock = await _connect(end)
        try:
            if not _same_user(sock):
                raise HandshakeError(f"{end} belongs to another user")
            return await _shake_hands(sock, end, offer)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise HandshakeError(f"{end} closed the connection in the handshake: {error.strerror}") from error
            if not isinstance(error, EvictedError):
                raise
        await asyncio.sleep(_CONNECT_AGAIN_SECONDS)
    raise HandshakeError(f"{end} has too many callers in the handshake and evicted this one {MAX_EVICTIONS} times")


async def _shake_hands(sock: socket.socket, end: LocalEnd, offer: Callable[[Meeting], Offer]) -> Meeting:
    """The connector's side of the handshake."""
    descriptors: list[int] = []

    def payload(_: Limits) -> bytes:
        offered = offer(meeting)
        descriptors.extend(offered.descriptors)
        return offered.payload

    handshake = end.handshake("connector", payload)
    meeting = Meeting(sock, handshake, end.option, [])
    with contextlib.suppress(ConnectionError):  # `_read` reports the reason
        sock.send(handshake.start())
    while not handshake.done:
        reply = handshake.receive(await _read(sock))
        if reply and (socket.send_fds(sock, [reply], descriptors) if descriptors else sock.send(reply)) != len(reply):
            raise HandshakeError("the listener does not read")
    if await _read(sock, len(_READY)) != _READY:  # exactly these bytes: the bytes after them belong to the channel
        raise HandshakeError("the listener sent invalid data at the end of the handshake")
    return meeting


async def _connect(end: LocalEnd) -> socket.socket:
    """Returns a socket that is connected to the listener. A host that cannot be reached is tried for `silent_seconds`, as long as one that
    does not respond: for seconds after a link is back, the kernel still reports what it found while the link was down."""
    family, address = socket_address(end.scheme, end.name, end.option)
    give_up_at = asyncio.get_running_loop().time() + end.limits.silent_seconds
    while True:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise UnavailableError(f"cannot connect to {end}: {error.strerror}") from error
        try:
            sock.setblocking(False)
            _break_when_silent(sock, end.limits.silent_seconds)
            if family in IP_FAMILIES:
                await asyncio.get_running_loop().sock_connect(sock, address)
            else:
                sock.connect(address)
            return sock
        except BlockingIOError:  # the backlog of a unix socket is full
            sock.close()
            pause = _CONNECT_AGAIN_SECONDS
        except OSError as error:
            sock.close()
            if isinstance(error, ConnectionRefusedError | FileNotFoundError):
                raise AddressError(f"no process listens at {end}") from error
            if error.errno not in _UNREACHABLE or asyncio.get_running_loop().time() >= give_up_at:
                failure = UnavailableError if error.errno in _NO_DESCRIPTOR else AddressError
                raise failure(f"cannot connect to {end}: {os.strerror(error.errno or 0)}") from error
            pause = _UNREACHABLE_SECONDS
        except BaseException:
            sock.close()
            raise
        await asyncio.sleep(pause)


async def _read(sock: socket.socket, max_bytes: int = _READ_BYTES) -> bytes:
    loop = asyncio.get_running_loop()
    while True:
        try:
            data = sock.recv(max_bytes)
        except (BlockingIOError, InterruptedError):
            readable = asyncio.Event()
            loop.add_reader(sock.fileno(), readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(sock.fileno())
            continue
        except ConnectionError:
            data = b""
        if not data:
            raise HandshakeError("the listener closed the connection in the handshake: it has another key, or refuses this process")
        return data


def _same_user(sock: socket.socket) -> bool:
    if sock.family != socket.AF_UNIX:
        return True  # the key decides
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.geteuid())
