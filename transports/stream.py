"""Implements `StreamChannel`, a channel over a stream socket that is already connected, as between a parent and its worker.

The socket is inherited, so there is no address and no key to prove. Payloads are copied once on the way out and read straight into their
final memory on the way in. A frame is `uint8 kind, 3 zero bytes, uint32 length` and a body of that length, little-endian:

    MESSAGE  the envelope; the tensors' bytes follow the body, their sizes are in the envelope
    TAKEN    uint64 messages, uint64 bytes: how much the receiver's user has taken since the start
    WAITING  (empty) the sender waits for room and requests a TAKEN as soon as there is more
    CLOSE    (empty) the orderly end; end-of-file anywhere else means that the peer died or the connection was cut

Both ends read as soon as bytes arrive; the credit window (flow_control.py) bounds what can arrive, and a peer that exceeds it is
disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from collections import deque
from collections.abc import Generator
from typing import ClassVar, Self

from flowrt.transports.channel.flow_controlled import FlowControlledChannel
from flowrt.transports.contract import LINGER_SECONDS, Identity, Limits
from flowrt.transports.wire.codec import Part, WireError, decode_envelope, is_repeat

_FRAME = struct.Struct("<B3xI")
_TAKEN = struct.Struct("<QQ")
_MESSAGE_KIND, _TAKEN_KIND, _WAITING_KIND, _CLOSE_KIND = 1, 2, 3, 4
_SCRATCH_BYTES = 1 << 16
_READ_BYTES_AT_ONCE = 1 << 20  # then the event loop turns before the next read


class StreamChannel(FlowControlledChannel):
    """One end of a socket pair, or of any connected stream socket. Use `from_socket` to create it."""

    scheme = "pipe"
    body_bytes: ClassVar[dict[int, int]] = {_TAKEN_KIND: _TAKEN.size, _WAITING_KIND: 0, _CLOSE_KIND: 0}

    def __init__(self, sock: socket.socket, limits: Limits, peer: Identity) -> None:
        super().__init__(limits, peer)
        sock.setblocking(False)
        self._socket = sock
        self._fd = sock.fileno()
        self._outbox: deque[memoryview] = deque()  # bytes that the kernel has not accepted yet; bounded by the credit window
        self._flushed: asyncio.Future[None] | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._scratch_start = self._scratch_end = 0
        self._targets = self._read_frames()
        self._target = next(self._targets)
        self._filled = 0  # bytes of it
        self._loop.add_reader(self._fd, self._on_readable)

    @classmethod
    async def from_socket(cls, sock: socket.socket, limits: Limits, peer: Identity) -> Self:
        """Returns a channel that owns `sock`. Both ends must use the same `limits`. `peer` is not verified."""
        return cls(sock, limits, peer)

    # Sending.

    def _send_message(self, parts: list[Part], payload_bytes: int) -> None:
        self._write([_FRAME.pack(_MESSAGE_KIND, len(parts[0])), *parts])

    def _send_taken(self, messages: int, payload_bytes: int) -> None:
        self._write([_FRAME.pack(_TAKEN_KIND, _TAKEN.size), _TAKEN.pack(messages, payload_bytes)])

    def _send_waiting(self) -> None:
        self._write([_FRAME.pack(_WAITING_KIND, 0)])

    def _write(self, parts: list[Part]) -> None:
        """Writes `parts` to the socket and copies the bytes that it does not accept. Only reads detect a dead peer."""
        sent = 0
        if not self._outbox:
            try:
                sent = self._socket.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                return
        for part in parts:
            if sent >= len(part):
                sent -= len(part)
                continue
            if not self._outbox:
                self._loop.add_writer(self._fd, self._on_writable)
            self._outbox.append(memoryview(bytes(part[sent:])))
            sent = 0

    def _on_writable(self) -> None:
        try:
            sent = self._socket.sendmsg([self._outbox[index] for index in range(min(len(self._outbox), 64))])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._outbox.clear()
            sent = 0
        while self._outbox and sent >= len(self._outbox[0]):
            sent -= len(self._outbox.popleft())
        if self._outbox:
            self._outbox[0] = self._outbox[0][sent:]
            return
        self._loop.remove_writer(self._fd)
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)

    # Receiving.

    def _on_readable(self) -> None:
        self._receive_available(_READ_BYTES_AT_ONCE)

    def _receive_available(self, budget: float) -> None:
        try:
            while budget > 0:
                received = self._receive()
                if received < 0:
                    return
                if received == 0:
                    raise ConnectionError(self._cut_reason)
                budget -= received
                self._parse()
                if self._ended or self._closed:
                    return
        except (OSError, WireError) as error:
            self._stop_reading()
            self._break(str(error), nonsense=isinstance(error, WireError))

    def receive_rest(self) -> None:
        """The peer's process has died: receive what it has sent, then break the channel. The kernel closes its end only after it has freed
        the memory of the process."""
        if not (self._closed or self._ended or self._broken is not None):
            self._receive_available(math.inf)
            self._stop_reading()
            self._break(self._cut_reason)

    def _receive(self) -> int:
        """Reads into the target if it is large, otherwise into the scratch buffer. Returns -1 without available data, 0 at end-of-file."""
        try:
            if len(self._target) - self._filled >= _SCRATCH_BYTES:
                received = self._socket.recv_into(self._target[self._filled :])
                self._filled += received
                return received
            self._scratch_start = 0
            self._scratch_end = 0  # _parse has consumed all bytes
            self._scratch_end = self._socket.recv_into(self._scratch)
            return self._scratch_end
        except (BlockingIOError, InterruptedError):
            return -1

    def _parse(self) -> None:
        while not self._ended:
            missing = len(self._target) - self._filled
            if missing:
                count = min(missing, self._scratch_end - self._scratch_start)
                if not count:
                    return
                end = self._scratch_start + count
                self._target[self._filled : self._filled + count] = self._scratch[self._scratch_start : end]
                self._scratch_start = end
                self._filled += count
                if count < missing:
                    return
            self._target = next(self._targets)
            self._filled = 0

    def _read_frames(self) -> Generator[memoryview, None, None]:
        """Yields the memory of the next bytes, and processes them when it is full. Raises WireError."""
        head = memoryview(bytearray(_FRAME.size))
        while True:
            yield head
            kind, length = _FRAME.unpack(head)
            if kind == _MESSAGE_KIND and length <= self.limits.max_header_bytes:
                body = bytearray(length)
                yield memoryview(body)
                envelope, sizes = decode_envelope(bytes(body), self.limits)
                payload_bytes = sum(sizes)
                if not is_repeat(envelope.sequence, self._expected):
                    self._receiving.arrived(payload_bytes)  # checks the credit before memory is allocated
                buffers = [bytearray(size) for size in sizes]
                for buffer in buffers:
                    yield memoryview(buffer)
                self._deliver(envelope, buffers, payload_bytes)
            elif self.body_bytes.get(kind) == length:
                body = bytearray(length)
                yield memoryview(body)
                self._on_frame(kind, body)
            else:
                raise WireError(f"a frame of kind {kind} and {length} bytes")

    def _on_frame(self, kind: int, body: bytearray) -> None:
        """Processes a frame of a kind in `body_bytes`."""
        if kind == _TAKEN_KIND:
            self._on_taken(*_TAKEN.unpack(body))
        elif kind == _WAITING_KIND:
            self._on_waiting()
        else:
            self._stop_reading()
            self._end()

    def _stop_reading(self) -> None:
        self._loop.remove_reader(self._fd)

    # Closing.

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def _shut(self) -> None:
        try:
            if not self._ended and self._broken is None:
                self._write([_FRAME.pack(_CLOSE_KIND, 0)])
                if self._outbox:
                    self._flushed = self._loop.create_future()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LINGER_SECONDS):
                            await self._flushed
        finally:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._outbox.clear()
            self._inbox.clear()
            self._targets.close()
            self._socket.close()
