"""The protocol between the launcher and the fork server: small frames on a unix stream socket, some with descriptors attached.

A frame is 4 bytes of length (little-endian) and a MessagePack map. Its descriptors travel with its first byte (SCM_RIGHTS), so frames and
descriptors arrive in the same order: each frame owns the next `num_fds` descriptors received.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

import msgspec

MAX_FRAME_BYTES = 1 << 20
MAX_FDS = 253  # the kernel's bound per message
_LENGTH = struct.Struct("<I")


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Base of all frames; `num_fds` descriptors accompany the frame."""

    num_fds: int = 0


class Fork(Frame, frozen=True, kw_only=True):
    """Fork an OS process called `host`. Descriptors: the target of its stdout and stderr, one control connection per worker, and the memory
    of its exit lock if it `holds_exit_lock`.

    `number` identifies this start in every later frame. `worker` is the "module:function" that each of `workers` runs; `threads` is the
    number of compute threads that they share.
    """

    number: int
    host: str
    workers: tuple[str, ...]
    worker: str
    threads: int
    log_level: str
    holds_exit_lock: bool = False


class Kill(Frame, frozen=True, kw_only=True):
    """Send a signal to an OS process; no-op once it was reaped."""

    number: int
    signal: int


class Loaded(Frame, frozen=True, kw_only=True):
    """The fork server has imported what workers need and serves. `num_threads` should be 1: forking copies no other thread."""

    num_threads: int


class Forked(Frame, frozen=True, kw_only=True):
    """The process runs. Descriptors: its pidfd, where the platform has them."""

    number: int
    pid: int


class NotForked(Frame, frozen=True, kw_only=True):
    """The kernel refused to fork."""

    number: int
    error: str


class Exited(Frame, frozen=True, kw_only=True):
    """The process has ended and was reaped. `status` as in subprocess: the exit status, or minus the signal's number."""

    number: int
    status: int


Request = Fork | Kill
Report = Loaded | Forked | NotForked | Exited
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_encoder = msgspec.msgpack.Encoder()


def encode(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    return _requests.decode(body)


def decode_report(body: bytes) -> Report:
    return _reports.decode(body)


def send_first(sock: socket.socket, data: bytes, fds: Sequence[int]) -> int:
    """Call sendmsg once with `fds` attached. Returns how many bytes of `data` were sent. BlockingIOError: nothing was sent."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return sock.sendmsg([data], ancillary)


def send_blocking(sock: socket.socket, frame: Frame, fds: Sequence[int] = ()) -> None:
    """Send the whole frame on a blocking socket."""
    data = encode(frame)
    sent = send_first(sock, data, fds)
    if sent < len(data):
        sock.sendall(data[sent:])


class MissingDescriptorsError(ValueError):
    """Fewer descriptors arrived than a frame announced: the kernel drops those for which the receiver has no free descriptor number."""


class FrameReader:
    """Splits the bytes of a socket into frames, and keeps the received descriptors in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def feed(self) -> bool:
        """Read once. Returns False at end-of-file and on ConnectionError. Raises BlockingIOError when a non-blocking socket has no data."""
        try:
            data, ancillary, _flags, _address = self._sock.recvmsg(1 << 16, socket.CMSG_LEN(MAX_FDS * array.array("i").itemsize))
        except ConnectionError:
            return False
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._fds.extend(received)
        for fd in self._fds:
            os.set_inheritable(fd, False)
        self._data += data
        return bool(data)

    def next_body(self) -> bytes | None:
        """The MessagePack bytes of the next whole frame, or None until more is fed. Raises ValueError above MAX_FRAME_BYTES."""
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes on the fork server's line: at most {MAX_FRAME_BYTES} are allowed")
        if len(self._data) < _LENGTH.size + length:
            return None
        body = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
        del self._data[: _LENGTH.size + length]
        return body

    def take_fds(self, count: int) -> list[int]:
        """The next `count` descriptors; the caller owns them. Raises MissingDescriptorsError when fewer have arrived."""
        if count > len(self._fds):
            raise MissingDescriptorsError(f"a frame announced {count} descriptors, {len(self._fds)} came")
        return [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        while self._fds:
            os.close(self._fds.popleft())
