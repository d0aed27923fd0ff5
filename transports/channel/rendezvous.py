"""Connects two processes of one host over an authenticated socket, whose end-of-file later reports the peer's death.

The connector allocates memory and descriptors only after the listener has proved the key, so an unauthenticated caller costs a listener one
socket and some bytes. A name `x` under scheme `s` is the abstract unix socket `flowrt/s/x`: it leaves nothing in the file system, and the
kernel reports the user at the other end; processes of other users are refused. `127.0.0.1:port` is TCP over loopback. Other TCP addresses
are only for transports that encrypt what follows: an eavesdropper can read names and limits from the handshake, but cannot change it.
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

from flowrt.transports.channel.queued import Backlog
from flowrt.transports.contract import Channel, Identity, Limits, Listener
from flowrt.transports.errors import AddressError, HandshakeError, TransportError, UnavailableError
from flowrt.transports.wire.codec import WireError
from flowrt.transports.wire.handshake import EVICTED, EvictedError, Handshake, RefusedError

HANDSHAKE_SECONDS = 10.0  # time limit of a handshake on the listener's side
MAX_CALLERS = 64  # concurrent handshakes of one listener
FULL_TABLE_SECONDS = 1.0  # time limit of a handshake while the table of callers is full
MAX_EVICTIONS = 10  # attempts of a connector that a listener evicts
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.01, 1.0  # between attempts to accept while this process has no descriptor left
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MAX_DESCRIPTORS = 4
_READY = b"\x01"
_READ_BYTES = 4096
_ADDRESS_AND_PORT = re.compile(r"(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}):(\d{1,5})")
_HOST_AND_PORT = re.compile(r".*:(\d{1,5}|\*)")
_CONNECT_AGAIN_SECONDS = 0.005


class Meeting(NamedTuple):
    """The result of a handshake: the socket, the peer's identity, the agreed limits, the connector's payload and descriptors."""

    line: socket.socket
    peer: Identity
    limits: Limits
    payload: bytes
    descriptors: list[int]
    handshake: Handshake


def socket_address(scheme: str, name: str, encryption: str = "") -> tuple[int, str | tuple[str, int]]:
    """Returns the family and address of the socket for `name`. Raises AddressError for an address that is not on this host.

    `encryption` is the address option that encrypts all traffic after the handshake. With it, every IPv4 address but 0.0.0.0 is
    accepted, and plain names are refused.
    """
    if (match := _ADDRESS_AND_PORT.fullmatch(name)) and (encryption or match[1].startswith("127.")):
        if match[1] == "0.0.0.0":
            raise AddressError(f"{scheme}://{name}: write the one address that the others reach this host by")
        return socket.AF_INET, (match[1], int(match[2]))
    if encryption:
        raise AddressError(f"{scheme}://{name}: {encryption} is for an IPv4 address and a port: {scheme}://10.0.0.5:7000?{encryption}")
    if _HOST_AND_PORT.fullmatch(name):
        raise AddressError(f"{scheme}://{name} is not on this host; only 127.0.0.1:port and plain names work without encryption")
    if sys.platform != "linux":
        raise AddressError(f"{scheme}://{name}: names need Linux; use {scheme}://127.0.0.1:port here")
    path = f"\0flowrt/{scheme}/{name}"
    if len(path.encode()) > 107:
        raise AddressError(f"the name {name[:64]!r} is too long for a unix socket")
    return socket.AF_UNIX, path


def free_name() -> str:
    """An unused random name."""
    return secrets.token_hex(8) if sys.platform == "linux" else "127.0.0.1:0"


class SocketListener(Listener):
    """Listens on a socket and turns each connector that has proved the key into a channel through `make_channel`.

    `make_channel` takes ownership of the meeting's line and descriptors, or raises (OSError, WireError, TransportError) and leaves them.

    At most MAX_CALLERS connectors are in the handshake. While the table is full, the oldest is evicted after FULL_TABLE_SECONDS.
    """

    def __init__(
        self,
        scheme: str,
        name: str,
        limits: Limits,
        key: bytes,
        identity: Identity,
        make_channel: Callable[[Meeting], Channel],
        *,
        encryption: str = "",
    ) -> None:
        family, address = socket_address(scheme, name, encryption)
        self._loop = asyncio.get_running_loop()
        self._backlog = Backlog(on_room=self._watch)
        self._callers: dict[_Caller, None] = {}  # oldest first
        self._alarm: asyncio.TimerHandle | None = None  # the next eviction, or the end of a pause
        self._pause_seconds = MIN_PAUSE_SECONDS
        self._rejected = 0
        self._make_channel = make_channel
        self._handshake_arguments = (key, identity, limits, scheme)
        self._new_handshake()  # raises now for a bad key or identity of this listener
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(address)
            self._socket.listen(1024)
        except OSError as error:
            self._socket.close()
            if error.errno == errno.EADDRINUSE:
                raise AddressError(f"somebody listens at {scheme}://{name} already") from error
            raise AddressError(f"cannot listen at {scheme}://{name}: {error.strerror}") from error
        bound = self._socket.getsockname()
        self.address = f"{scheme}://{name}" if family != socket.AF_INET else f"{scheme}://{bound[0]}:{bound[1]}"
        self.address += f"?{encryption}" if encryption else ""
        self._watching = False
        self._watch()

    async def accept(self) -> Channel:
        return await self._backlog.accept()

    @property
    def rejected(self) -> int:
        return self._rejected

    async def aclose(self) -> None:
        if self._socket.fileno() >= 0:
            self._unwatch()
            self._socket.close()
            self._cancel_alarm()
            for caller in self._callers:
                caller.hang_up()
            self._callers.clear()
        await self._backlog.aclose()

    def _new_handshake(self) -> Handshake:
        key, identity, limits, scheme = self._handshake_arguments
        return Handshake("listener", key, identity, limits, scheme=scheme)

    def _watch(self) -> None:
        """Accepts connections while there is room. When the table of callers is full, schedules the eviction of the oldest one."""
        self._cancel_alarm()
        if self._socket.fileno() < 0:
            return
        is_table_full = len(self._callers) >= MAX_CALLERS
        if is_table_full:
            oldest = next(iter(self._callers))
            self._alarm = self._loop.call_at(oldest.since + FULL_TABLE_SECONDS, oldest.evict)
        if is_table_full or self._backlog.full:
            self._unwatch()
        elif not self._watching:
            self._watching = True
            self._loop.add_reader(self._socket.fileno(), self._on_call)

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._socket.fileno())

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _on_call(self) -> None:
        try:
            line, _ = self._socket.accept()
        except OSError as error:  # usually the caller has already disconnected
            if error.errno in _NO_DESCRIPTOR:  # the listening socket stays readable, so the loop would spin
                self._unwatch()
                self._alarm = self._loop.call_later(self._pause_seconds, self._watch)
                self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)
            return
        self._pause_seconds = MIN_PAUSE_SECONDS
        line.setblocking(False)
        if not _same_user(line):
            self._rejected += 1
            line.close()
            return
        self._callers[_Caller(self, line, self._new_handshake())] = None
        self._watch()

    def settle(self, caller: _Caller, meeting: Meeting | None) -> None:
        """Removes a caller whose handshake has succeeded, or failed (`meeting` is None)."""
        del self._callers[caller]
        if meeting is None:
            self._rejected += 1
        else:
            try:
                channel = self._make_channel(meeting)
            except (OSError, WireError, TransportError):
                self._rejected += 1
                _close_all(meeting.descriptors)
                meeting.line.close()
            else:
                with contextlib.suppress(OSError):  # already disconnected; the channel reports it
                    meeting.line.send(_READY)
                self._backlog.put(channel)
        self._watch()


class _Caller:
    """A connection in the handshake, on the listener's side. It uses callbacks only, so that a silent peer costs no task."""

    def __init__(self, listener: SocketListener, line: socket.socket, handshake: Handshake) -> None:
        self._listener = listener
        self._line = line
        self._handshake = handshake
        self._descriptors: list[int] = []
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        self._timer = self._loop.call_at(self.since + HANDSHAKE_SECONDS, self._fail)
        self._loop.add_reader(line.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = self._read()
            if not data:
                raise RefusedError("the caller hung up")
            answer = self._handshake.receive(data)
            if answer and self._line.send(answer) != len(answer):
                raise RefusedError("the caller does not read")
        except BlockingIOError:
            return
        except (OSError, HandshakeError) as error:
            if isinstance(error, RefusedError) and error.reply:
                with contextlib.suppress(OSError):
                    self._line.send(error.reply)
            self._fail()
            return
        if self._handshake.done:
            self._leave()
            shake = self._handshake
            self._listener.settle(self, Meeting(self._line, shake.peer, shake.limits, shake.payload, self._descriptors, shake))

    def _read(self) -> bytes:
        if self._line.family == socket.AF_INET:
            return self._line.recv(_READ_BYTES)
        data, found, flags, _ = socket.recv_fds(self._line, _READ_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        self._descriptors += found
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > MAX_DESCRIPTORS:
            raise RefusedError("too many descriptors")
        return data

    def evict(self) -> None:
        """Closes the connection to make room, unless the proof has arrived. Sends EVICTED, so that the caller may connect again."""
        self._on_readable()
        if self._line.fileno() >= 0 and not self._handshake.done:
            with contextlib.suppress(OSError):
                self._line.send(EVICTED)
            self._fail()

    def _leave(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._line.fileno())

    def _fail(self) -> None:
        self.hang_up()
        self._listener.settle(self, None)

    def hang_up(self) -> None:
        self._leave()
        _close_all(self._descriptors)
        self._line.close()


async def meet(
    scheme: str,
    name: str,
    limits: Limits,
    key: bytes,
    identity: Identity,
    bring: Callable[[Limits], tuple[bytes, list[int]]],
    *,
    encryption: str = "",
    begin: Callable[[socket.socket, Handshake], None] | None = None,
) -> Meeting:
    """Connects to the listener at `name` and completes the handshake.

    `bring` is called with the agreed limits once the listener has proved the key; it returns the payload to send and the descriptors to
    pass, which the caller still owns. `begin` is called earlier, with the connected line and the handshake. Raises AddressError (no
    listener), HandshakeError, UnavailableError (no descriptor), and any exception of `bring`. Connects again, at most MAX_EVICTIONS times
    in all, when the listener evicts this connector.
    """
    for _ in range(MAX_EVICTIONS):
        with contextlib.suppress(EvictedError):
            return await _meet(scheme, name, limits, key, identity, bring, encryption, begin)
        await asyncio.sleep(_CONNECT_AGAIN_SECONDS)
    raise HandshakeError(f"{scheme}://{name} has too many callers in the handshake and evicted this one {MAX_EVICTIONS} times")


async def _meet(
    scheme: str,
    name: str,
    limits: Limits,
    key: bytes,
    identity: Identity,
    bring: Callable[[Limits], tuple[bytes, list[int]]],
    encryption: str,
    begin: Callable[[socket.socket, Handshake], None] | None,
) -> Meeting:
    descriptors: list[int] = []

    def payload(agreed: Limits) -> bytes:
        told, given = bring(agreed)
        descriptors.extend(given)
        return told

    handshake = Handshake("connector", key, identity, limits, scheme=scheme, payload=payload)
    family, address = socket_address(scheme, name, encryption)
    try:
        line = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UnavailableError(f"cannot connect to {scheme}://{name}: {error.strerror}") from error
    try:
        line.setblocking(False)
        await _connect(line, address, f"{scheme}://{name}")
        if not _same_user(line):
            raise HandshakeError(f"{scheme}://{name} belongs to another user")
        if begin is not None:
            begin(line, handshake)
        with contextlib.suppress(ConnectionError):  # `_read` reports the reason
            line.send(handshake.start())
        while not handshake.done:
            answer = handshake.receive(await _read(line))
            if answer:
                _send_with(line, answer, descriptors)
        if await _read(line, len(_READY)) != _READY:  # exactly these bytes: the bytes after them belong to the channel
            raise HandshakeError("the listener answered nonsense at the end of the handshake")
    except BaseException as error:
        line.close()
        if isinstance(error, OSError):
            raise HandshakeError(f"{scheme}://{name} hung up in the handshake: {error.strerror}") from error
        raise
    return Meeting(line, handshake.peer, handshake.limits, handshake.payload, descriptors, handshake)


class Lifeline:
    """Watches the socket of a meeting. Calls `on_gone` once: with None when the peer's end is closed, with a reason when it sends data."""

    def __init__(self, line: socket.socket, on_gone: Callable[[str | None], None]) -> None:
        self._line = line
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(line.fileno(), self._on_readable)
        self._watching = True

    def close(self) -> None:
        """Closes the socket, which notifies the peer. Idempotent."""
        self._unwatch()
        self._line.close()

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._line.fileno())

    def _on_readable(self) -> None:
        reason = None
        try:
            if self._line.recv(_READ_BYTES):
                reason = "the peer spoke on a line that is only kept to see whether it lives"
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass  # a reset counts as closed
        self._unwatch()
        self._on_gone(reason)


async def _connect(line: socket.socket, address: str | tuple[str, int], shown: str) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            if line.family == socket.AF_INET:
                await loop.sock_connect(line, address)
            else:
                line.connect(address)
            return
        except BlockingIOError:  # the backlog of a unix socket is full
            await asyncio.sleep(_CONNECT_AGAIN_SECONDS)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise AddressError(f"nobody listens at {shown}") from error
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                raise UnavailableError(f"cannot connect to {shown}: {error.strerror}") from error
            raise AddressError(f"cannot connect to {shown}: {error.strerror}") from error


async def _read(line: socket.socket, most: int = _READ_BYTES) -> bytes:
    loop = asyncio.get_running_loop()
    while True:
        try:
            data = line.recv(most)
        except (BlockingIOError, InterruptedError):
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(line.fileno(), _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(line.fileno())
            continue
        except ConnectionError:
            data = b""
        if not data:
            raise HandshakeError("the listener hung up in the handshake: it has another key, or refuses this process")
        return data


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _send_with(line: socket.socket, data: bytes, descriptors: list[int]) -> None:
    sent = socket.send_fds(line, [data], descriptors) if descriptors else line.send(data)
    if sent != len(data):
        raise HandshakeError("the listener does not read")


def _same_user(line: socket.socket) -> bool:
    if line.family != socket.AF_UNIX:
        return True  # the key decides
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.geteuid())


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()
