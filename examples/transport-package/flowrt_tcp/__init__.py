"""tcp://127.0.0.1:port: whole messages as frames over a plain TCP socket, in a package of its own.

flowrt provides listening, connecting and the proofs of the key (SocketTransport), the credit window and the queue of waiting senders
(FlowControlledChannel), and the encoding of messages (codec). This file adds frames, and reading and writing a socket. It is written to
be read; flowrt's own transports copy less.

A frame is `uint32 length, uint8 kind` and a body. The body of a MESSAGE is `uint32 length` of the envelope, the envelope, the tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import ClassVar

from flowrt.transports.channel.flow_controlled import FlowControlledChannel
from flowrt.transports.channel.rendezvous import Meeting
from flowrt.transports.channel.socket_transport import SocketTransport
from flowrt.transports.contract import LINGER_SECONDS, Capabilities, Identity, Limits
from flowrt.transports.wire.codec import Part, WireError, decode_envelope, is_repeat

FRAME, LENGTH, TAKEN = struct.Struct("<IB"), struct.Struct("<I"), struct.Struct("<QQ")
MESSAGE, TAKEN_KIND, WAITING, CLOSE = range(1, 5)
READ_BYTES, READS_AT_ONCE = 1 << 18, 8  # then the loop turns


class TcpChannel(FlowControlledChannel):
    """One end. Both ends read as soon as bytes arrive; the window bounds what can."""

    scheme = "tcp"

    def __init__(self, sock: socket.socket, limits: Limits, peer: Identity) -> None:
        super().__init__(limits, peer)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._received = bytearray()
        self._unsent = bytearray()
        self._flushed: asyncio.Future[None] | None = None
        self._most = LENGTH.size + limits.max_header_bytes + limits.max_message_bytes
        self._loop.add_reader(sock.fileno(), self._on_readable)

    # What FlowControlledChannel requires.

    def _send_message(self, parts: list[Part], payload_bytes: int) -> None:
        self._write(MESSAGE, b"".join((LENGTH.pack(len(parts[0])), *parts)))

    def _send_taken(self, messages: int, payload_bytes: int) -> None:
        self._write(TAKEN_KIND, TAKEN.pack(messages, payload_bytes))

    def _send_waiting(self) -> None:
        self._write(WAITING)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def _shut(self) -> None:
        try:
            if not self._ended and self._broken is None:
                self._write(CLOSE)
                if self._unsent:
                    self._flushed = self._loop.create_future()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LINGER_SECONDS):
                            await self._flushed
        finally:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._inbox.clear()
            self._socket.close()

    # Bytes out.

    def _write(self, kind: int, body: bytes = b"") -> None:
        if not self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)
        self._unsent += FRAME.pack(len(body), kind) + body
        self._on_writable()

    def _on_writable(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            sent = len(self._unsent)  # the peer is gone; reading reports it after the data that arrived before
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())
            if self._flushed is not None and not self._flushed.done():
                self._flushed.set_result(None)

    # Bytes in.

    def _on_readable(self) -> None:
        try:
            for _ in range(READS_AT_ONCE):
                data = self._socket.recv(READ_BYTES)
                if not data:
                    raise ConnectionError(f"{self.peer.name} died: its connection closed without a word")
                self._received += data
                self._read_frames()
                if self._ended:
                    return
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, WireError) as error:
            self._loop.remove_reader(self._socket.fileno())
            self._break(str(error), nonsense=isinstance(error, WireError))

    def _read_frames(self) -> None:
        start = 0
        while not self._ended and len(self._received) - start >= FRAME.size:
            size, kind = FRAME.unpack_from(self._received, start)
            if size > self._most:
                raise WireError(f"a frame of {size} bytes; at most {self._most} are allowed")
            if len(self._received) - start < FRAME.size + size:
                break
            body = memoryview(self._received)[start + FRAME.size : start + FRAME.size + size]
            try:
                self._read_frame(kind, body)
            finally:
                body.release()
            start += FRAME.size + size
        del self._received[:start]

    def _read_frame(self, kind: int, body: memoryview) -> None:
        if kind == MESSAGE and len(body) >= LENGTH.size:
            self._read_message(body[LENGTH.size :], LENGTH.unpack_from(body)[0])
        elif kind == TAKEN_KIND and len(body) == TAKEN.size:
            self._on_taken(*TAKEN.unpack(body))
        elif kind == WAITING and not body:
            self._on_waiting()
        elif kind == CLOSE and not body:
            self._loop.remove_reader(self._socket.fileno())
            self._end()
        else:
            raise WireError(f"a frame of kind {kind} and {len(body)} bytes")

    def _read_message(self, body: memoryview, envelope_bytes: int) -> None:
        envelope, sizes = decode_envelope(bytes(body[:envelope_bytes]), self.limits)
        if envelope_bytes + sum(sizes) != len(body):
            raise WireError(f"tensors of {sizes} bytes were announced, {len(body) - envelope_bytes} bytes came")
        if not is_repeat(envelope.sequence, self._expected):
            self._receiving.arrived(sum(sizes))  # raises for a peer that had no credit
        buffers, place = [], envelope_bytes
        for size in sizes:
            buffers.append(bytearray(body[place : place + size]))
            place += size
        self._deliver(envelope, buffers, sum(sizes))


class TcpTransport(SocketTransport):
    """The scheme. SocketTransport does the handshake on the socket that then carries the frames."""

    scheme: ClassVar[str] = "tcp"
    capabilities: ClassVar[Capabilities] = Capabilities()

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    def _split_name(self, rest: str) -> tuple[str, str]:
        return rest or "127.0.0.1:0", ""

    def _accept(self, meeting: Meeting) -> TcpChannel:
        return TcpChannel(meeting.sock, meeting.limits, meeting.peer)
