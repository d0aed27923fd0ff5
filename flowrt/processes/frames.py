"""The protocol between the launcher and the fork server: small frames on a unix stream socket, some with descriptors attached.

A frame is 4 bytes of length (little-endian) and a MessagePack map. Its descriptors travel with its first byte (SCM_RIGHTS), so frames and
descriptors arrive in the same order: each frame owns the next `num_fds` descriptors received.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from flowrt.transports.contract import HostAddress

MAX_FRAME_BYTES = 1 << 20
MAX_FDS = 253  # the kernel's bound per message
_LENGTH = struct.Struct("<I")


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Base of all frames; `num_fds` descriptors accompany the frame."""

    num_fds: int = 0


class ForkRequest(Frame, frozen=True, kw_only=True):
    """Fork an OS process called `host`. Descriptors: the target of its stdout and stderr, one control connection per worker, those
    named in `descriptors`, and the memory of its exit lock if it `holds_exit_lock`.

    `number` identifies this start in every later frame. `worker` is the "module:function" that each of `workers` runs; `threads` is the
    number of compute threads that they share; `host_address` as in Seams.
    """

    number: int
    host: str
    workers: tuple[str, ...]
    worker: str
    threads: int
    log_level: str
    holds_exit_lock: bool = False
    descriptors: tuple[str, ...] = ()
    host_address: HostAddress = HostAddress()


class Loaded(Frame, frozen=True, kw_only=True):
    """The fork server has imported what workers need and serves. `num_threads` should be 1: forking copies no other thread. `error`: it
    ends, because a package of this machine cannot be imported; the text for the user."""

    num_threads: int
    error: str = ""


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


Report = Loaded | Forked | NotForked | Exited
F = TypeVar("F", bound=Frame)


def encode(frame: Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return _LENGTH.pack(len(body)) + body


def send_blocking(sock: socket.socket, frame: Frame, fds: Sequence[int] = ()) -> None:
    """Send the whole frame on a blocking socket."""
    data = encode(frame)
    sock.sendall(data[socket.send_fds(sock, [data], list(fds)) :])


class MissingDescriptorsError(ValueError):
    """Fewer descriptors arrived than a frame announced: the kernel drops those for which the receiver has no free descriptor number."""


class FrameReader(Generic[F]):
    """Splits the bytes of a socket into frames that `decoder` decodes, and keeps the received descriptors in order."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[F]) -> None:
        self._sock, self._decoder = sock, decoder
        self._data = bytearray()
        self._fds: deque[int] = deque()

    def feed(self) -> bool:
        """Read once. Returns False at end-of-file and on ConnectionError. Raises BlockingIOError when a non-blocking socket has no data."""
        try:
            data, fds, _flags, _address = socket.recv_fds(self._sock, 1 << 16, MAX_FDS)
        except ConnectionError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds.extend(fds)
        self._data += data
        return bool(data)

    def frames(self) -> Iterator[F]:
        """Yield the whole frames fed so far. Raises ValueError above MAX_FRAME_BYTES."""
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes on the fork server's connection: at most {MAX_FRAME_BYTES} are allowed")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield self._decoder.decode(body)

    def take_fds(self, count: int) -> list[int]:
        """The next `count` descriptors; the caller owns them. Raises MissingDescriptorsError when fewer have arrived."""
        if count > len(self._fds):
            raise MissingDescriptorsError(f"a frame announced {count} descriptors, {len(self._fds)} came")
        return [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close the descriptors that were not taken."""
        while self._fds:
            os.close(self._fds.popleft())
