"""Implements the `ucx` transport: UCX between two processes of one host, or of two hosts in a trusted network.

UCX is not used before the key is proved: the connector sends its worker's address under its proof; the listener responds over UCX with
its own address and a second proof. Both tags are secrets of that handshake. The socket of the rendezvous stays open: its end-of-file
reports the peer's death. The event loop watches UCX's descriptor, armed when no work is left, so no loop spins.

UCX does not encrypt, and takes messages of strangers that reach its port. So it reaches other hosts only within a network that the address
names as trusted, `ucx://10.1.0.5:7000?trusted=10.1.0.0/16`: both ends must have an address there, and UCX uses no other interface.

There are two message streams with one tag each. *Regions* (regions.py) carry large payloads. *Frames* are small, so that UCX copies them
into the peer's ring at once, and credits never wait behind a payload:

    uint8 kind, 3 zero bytes, uint32 envelope bytes, uint64 a, uint64 b, uint64 frames read so far; then the body
    MESSAGE   the envelope and the tensors                    TAKEN                        a: messages, b: bytes, as in stream.py
    REGION    the envelope; the tensors go as a region        WAITING, CLOSE, CLOSED, READ, GREETING (proof and address)
    ENVELOPE  the part of an envelope that does not fit in a REGION frame, ahead of it

The sender never lets UCX's ring fill up (FRAMES_AHEAD, PIECES_AHEAD), because it could only wait for a full one by spinning.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import struct
from collections import deque
from contextlib import ExitStack
from ipaddress import IPv4Network
from typing import Any, ClassVar

from flowrt.transports.channel.blocks import BlockPool
from flowrt.transports.channel.greeted import GreetedChannel
from flowrt.transports.channel.rendezvous import Meeting, Offer, is_port_range
from flowrt.transports.channel.socket_transport import SocketTransport
from flowrt.transports.contract import Capabilities, ChannelStatistics, HostAddress
from flowrt.transports.errors import AddressError, UnavailableError
from flowrt.transports.ucx.devices import address_in, devices_of, is_in
from flowrt.transports.ucx.endpoint import (
    IN_PROGRESS,
    WITHIN_HOST,
    LostError,
    Settings,
    UCXLink,
    between_hosts,
    check_status,
    unavailable_reason,
)
from flowrt.transports.ucx.regions import MessageArrival, RegionReceiver, RegionSender
from flowrt.transports.wire.codec import Part, WireError, decode_envelope, is_repeat, split_buffers

FRAME_BYTES = 7936  # a whole frame: fits one slot of UCX's ring
FRAMES_AHEAD = 96  # frames that the peer has not reported as read; UCX's ring has 256 slots
READ_EVERY = 32  # frames between two reports to the peer
TURNS = 16  # calls of progress before the event loop turns
DEATH_SECONDS = 0.5  # longest time from the end of the socket to that of UCX's connection between hosts, which may still bring frames
_TRUSTED = "trusted="  # the one option of an address; a range of ports may follow the network
_OPTION = re.compile(_TRUSTED + r"(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}/\d{1,2})(?::(\d{1,5}-\d{1,5}))?")
_HEAD = struct.Struct("<B3xIQQQ")
_HEAD_BYTES = _HEAD.size
_READ_SO_FAR = struct.Struct("<Q")  # the head's last field
_MESSAGE, _REGION, _TAKEN, _WAITING, _CLOSE, _CLOSED, _READ, _GREETING, _ENVELOPE = range(1, 10)
_BODY_BYTES = FRAME_BYTES - _HEAD_BYTES
_PROOF_BYTES = 32


class UCXChannel(GreetedChannel):
    """One end of a channel: a UCX link and the socket of the handshake."""

    scheme = "ucx"

    def __init__(self, meeting: Meeting, link: UCXLink) -> None:
        super().__init__(meeting)
        self._link = link
        secret = meeting.handshake.session_key("ucx tags")
        self._tag = link.tag(int.from_bytes(secret[:8], "little"))
        bulk_tag = link.tag(int.from_bytes(secret[8:16], "little"))
        self._proof = meeting.handshake.session_key("ucx greeting")
        self._pool = BlockPool(meeting.limits.capacity_bytes * 9 // 8)
        self._regions_out = RegionSender(link, bulk_tag)
        self._regions_in = RegionReceiver(link, self._pool, bulk_tag, meeting.sock)
        self._arrivals: deque[MessageArrival] = deque()  # incomplete messages, and the messages behind them
        self._envelope = b""  # the parts of an envelope that arrived before its REGION frame
        self._outbox: deque[bytes] = deque()  # frames that wait for a slot; bounded by the credit window
        self._frames_sent = self._frames_confirmed = 0  # confirmed: reported as read by the peer
        self._frames_read = self._frames_acknowledged = 0
        self._sent_frames: deque[tuple[Any, bytearray]] = deque()  # frames whose bytes UCX still reads
        self._out = bytearray(FRAME_BYTES)
        self._out_arrays: dict[int, Any] = {}  # n -> the library's array of the first n bytes of _out
        self._in = memoryview(bytearray(FRAME_BYTES))
        self._in_array = link.array(self._in)
        self._in_request = link.receive(self._in_array, self._tag)
        self._scheduled = False
        self._open = True
        self._is_between_hosts = bool(meeting.option)
        self._death_timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(link.descriptor, self._turn)
        if self._is_listener:
            self.greeted.set_result(None)
            address = link.address()
            self._write(_GREETING, envelope_bytes=len(address), body=self._proof + address)
        self._turn_soon()

    def statistics(self) -> ChannelStatistics:
        self._counters.held_buffers = self._pool.num_leases
        return super().statistics()

    # Sending.

    def _send_message(self, parts: list[Part], payload_bytes: int) -> None:
        envelope = parts[0]
        if _HEAD_BYTES + len(envelope) + payload_bytes <= FRAME_BYTES:
            self._write(_MESSAGE, len(envelope), 0, 0, envelope if len(parts) == 1 else b"".join(parts))
        else:
            while len(envelope) > _BODY_BYTES:
                self._write(_ENVELOPE, _BODY_BYTES, body=envelope[:_BODY_BYTES])
                envelope = envelope[_BODY_BYTES:]
            self._write(_REGION, len(envelope), body=envelope)
            self._regions_out.send(parts[1:])
            self._turn_soon()

    def _write(self, kind: int, envelope_bytes: int = 0, a: int = 0, b: int = 0, body: Part = b"") -> None:
        """Sends a frame, or queues it until the peer's ring has a free slot."""
        if not self._open:
            return
        if self._outbox or self._frames_sent - self._frames_confirmed >= FRAMES_AHEAD:
            self._outbox.append(_HEAD.pack(kind, envelope_bytes, a, b, 0) + body)
            return
        self._frames_sent += 1
        end = _HEAD_BYTES + len(body)
        _HEAD.pack_into(self._out, 0, kind, envelope_bytes, a, b, self._frames_read)
        self._out[_HEAD_BYTES:end] = body
        self._send_out(end)

    def _send_out(self, nbytes: int) -> None:
        """Sends the first `nbytes` of `_out` as a frame."""
        self._frames_acknowledged = self._frames_read
        array = self._out_arrays.get(nbytes)
        if array is None:
            array = self._out_arrays[nbytes] = self._link.array(memoryview(self._out)[:nbytes])
        request = self._link.send(array, self._tag)
        status = request.status
        if not status:
            return
        if status == IN_PROGRESS:  # happens only until the link is established
            self._sent_frames.append((request, self._out))
            self._out = bytearray(FRAME_BYTES)
            self._out_arrays = {}
            self._turn_soon()
        else:
            self._fail(f"UCX could not send (status {int(status)})")

    def _empty_outbox(self) -> None:
        while self._outbox and self._frames_sent - self._frames_confirmed < FRAMES_AHEAD:
            frame = self._outbox.popleft()
            self._frames_sent += 1
            self._out[: len(frame)] = frame
            _READ_SO_FAR.pack_into(self._out, _HEAD_BYTES - _READ_SO_FAR.size, self._frames_read)
            self._send_out(len(frame))

    def _send_taken(self, messages: int, payload_bytes: int) -> None:
        self._write(_TAKEN, 0, messages, payload_bytes)

    def _send_waiting(self) -> None:
        self._write(_WAITING)

    # Progress.

    def _turn_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Runs UCX and processes arrived data until no work is left and UCX's descriptor is armed, or for TURNS rounds."""
        self._scheduled = True
        link = self._link
        try:
            for _ in range(TURNS):
                if not self._open:
                    return
                link.progress()
                self._look()
                if self._death_timer is not None and not link.is_connected:
                    self._on_death()
                if self._open and link.arm():  # False may only mean that a signal was consumed: call progress before the next attempt
                    self._scheduled = False
                    return
        except WireError as error:
            self._fail(str(error), nonsense=not isinstance(error, LostError))
            return
        self._loop.call_soon(self._turn)

    def _look(self) -> None:
        """Processes arrived frames and completed requests. Raises WireError."""
        while (status := self._in_request.status) != IN_PROGRESS:
            if status:
                raise WireError(f"a frame that cannot be read (status {int(status)})")  # longer than any valid frame
            self._read_frame()
            if not self._open:
                return
        if self._arrivals:
            self._regions_in.look(keep=not self._closed)
            self._deliver_complete()
        if self._regions_out.sent:
            self._regions_out.look()
        while self._sent_frames and (status := self._sent_frames[0][0].status) != IN_PROGRESS:
            check_status(status)
            self._sent_frames.popleft()
        if self._frames_read - self._frames_acknowledged >= READ_EVERY:
            _HEAD.pack_into(self._out, 0, _READ, 0, 0, 0, self._frames_read)
            self._send_out(_HEAD_BYTES)  # not counted: a frame that makes room must not wait for room

    # Receiving.

    def _read_frame(self) -> None:
        kind, envelope_bytes, a, b, read = _HEAD.unpack_from(self._in)
        if not self._frames_confirmed <= read <= self._frames_sent:
            raise WireError(f"the peer reports {read} frames as read, {self._frames_sent} were sent")
        self._frames_confirmed = read
        if kind == _MESSAGE:
            self._frames_read += 1
            self._read_message(envelope_bytes)
        else:
            self._frames_read += kind != _READ
            nbytes = envelope_bytes + _PROOF_BYTES * (kind == _GREETING)
            body = bytes(self._in[_HEAD_BYTES : _HEAD_BYTES + nbytes]) if envelope_bytes else b""
            self._in_request = self._link.receive(self._in_array, self._tag)
            self._read_control(kind, envelope_bytes, a, b, body)
        if self._outbox:
            self._empty_outbox()

    def _read_control(self, kind: int, envelope_bytes: int, a: int, b: int, body: bytes) -> None:
        if kind == _GREETING or not self.greeted.done():
            self._read_greeting(kind, envelope_bytes, body)
        elif kind == _REGION:
            envelope, sizes = decode_envelope(self._envelope + body, self.limits)
            self._envelope = b""
            self._receiving.arrived(sum(sizes))  # checks the credit before memory is allocated
            self._arrivals.append(self._regions_in.expect(envelope, sizes))
            self._deliver_complete()  # a region without bytes is complete at once
        elif kind == _ENVELOPE:
            self._envelope += body
            if not body or len(self._envelope) > self.limits.max_header_bytes:
                raise WireError(f"an envelope of more than {self.limits.max_header_bytes} bytes")
        elif kind == _TAKEN:
            self._on_taken(a, b)
        elif kind == _WAITING:
            self._on_waiting()
        elif kind == _CLOSE:
            self._arrivals.append(MessageArrival())
            self._deliver_complete()
        elif kind == _CLOSED:
            self._finish()
        elif kind != _READ:
            raise WireError(f"a frame of kind {kind}")

    def _read_greeting(self, kind: int, address_bytes: int, body: bytes) -> None:
        if kind != _GREETING or self.greeted.done() or not hmac.compare_digest(body[:_PROOF_BYTES], self._proof):
            raise WireError("the greeting is not that of the handshake's peer")
        self._link.connect(body[_PROOF_BYTES : _PROOF_BYTES + address_bytes])
        self.greeted.set_result(None)

    def _read_message(self, envelope_bytes: int) -> None:
        start = _HEAD_BYTES + envelope_bytes
        envelope, sizes = decode_envelope(bytes(self._in[_HEAD_BYTES:start]), self.limits)
        payload_bytes = sum(sizes)
        if start + payload_bytes > FRAME_BYTES:
            raise WireError(f"tensors of {payload_bytes} bytes do not fit a frame")
        buffers = split_buffers(self._in, start, sizes)
        self._in_request = self._link.receive(self._in_array, self._tag)
        if not is_repeat(envelope.sequence, self._expected + len(self._arrivals)):
            self._receiving.arrived(payload_bytes)
        if self._arrivals:
            self._arrivals.append(MessageArrival(payload_bytes, envelope, buffers))
        else:
            self._deliver(envelope, buffers, payload_bytes)

    def _deliver_complete(self) -> None:
        while self._arrivals and not self._arrivals[0].missing_bytes:
            arrival = self._arrivals.popleft()
            if arrival.envelope is not None:
                self._deliver(arrival.envelope, arrival.tensors, arrival.payload_bytes)
            else:  # the peer's CLOSE
                self._write(_CLOSED)
                self._end()
                self._finish()

    # Closing.

    def _on_peer_end(self, reason: str | None) -> None:
        """Handles the end of the handshake's socket. Between hosts, frames that the peer has sent may still be on their way."""
        if self._is_between_hosts and reason is None and self._open and self._link.is_connected:
            self._death_timer = self._loop.call_later(DEATH_SECONDS, self._on_death)
            self._finish()
        else:
            self._on_death(reason)

    def _on_death(self, reason: str | None = None) -> None:
        """Processes the frames that have arrived, then breaks the channel."""
        try:
            read = -1
            while self._open and read != self._frames_read:
                read = self._frames_read
                self._link.progress()
                self._look()
        except WireError as error:
            reason = reason or str(error)
        if not self._ended:
            self._fail(reason or self._cut_reason)
        self._finish()

    def _fail(self, reason: str, nonsense: bool = False) -> None:
        super()._fail(reason, nonsense)
        self._stop()

    def _stop(self) -> None:
        """Stops all turns; later events of UCX are ignored."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._link.descriptor)

    def _send_close(self) -> None:
        self._write(_CLOSE)

    async def _shut(self) -> None:
        try:
            if self.greeted.done():
                await self._close_in_order()
        finally:
            if self._death_timer is not None:
                self._death_timer.cancel()
            self._stop()
            self._peer_watch.close()  # before memory that the peer may be reading is freed
            self._in_request = None  # cancels the request
            self._link.close()
            self._regions_out.clear()
            self._regions_in.clear()
            self._sent_frames.clear()
            self._arrivals.clear()
            self._outbox.clear()
            self._inbox.clear()
            self._pool.close()


class UCXTransport(SocketTransport):
    """`ucx://name`, between processes of one user on one Linux host; `ucx://10.1.0.5:port?trusted=10.1.0.0/16`, between processes of hosts
    with addresses in this network. With `?trusted=10.1.0.0/16:7000-7099`, all ports at which either end listens are of this range."""

    scheme: ClassVar[str] = "ucx"
    capabilities: ClassVar[Capabilities] = Capabilities(borrows_sender=True, between_hosts="trusted")

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return unavailable_reason()

    def address_at(self, host: HostAddress) -> str:
        if not host.trusted:
            return "ucx://"
        address, network = address_in(host.trusted, host.address)
        return f"ucx://{address}:0?{_TRUSTED}{network}{f':{host.ports}' if host.ports else ''}"

    def _split_name(self, rest: str) -> tuple[str, str]:
        name, separator, option = rest.partition("?")
        if not separator:
            return name, ""
        if (match := _OPTION.fullmatch(option)) is None or not _is_network(match[1]) or (match[2] and not is_port_range(match[2])):
            text = f"the only option is ?{_TRUSTED}NETWORK, such as {_TRUSTED}10.1.0.0/16, or {_TRUSTED}NETWORK:FROM-TO with the ports"
            raise AddressError(f"ucx://{rest[:80]}: {text} to listen at")
        return name, option

    def _settings(self, meeting: Meeting) -> Settings:
        """Raises UnavailableError when this end has no address in the trusted network."""
        if not meeting.option:
            return WITHIN_HOST
        network, _, ports = meeting.option.removeprefix(_TRUSTED).partition(":")
        own = meeting.sock.getsockname()[0]
        if not is_in(own, network):
            raise UnavailableError(f"this host reaches the peer from {own}, which is not in the trusted network {network}")
        return between_hosts(devices_of(own), ports)

    def _offer(self, meeting: Meeting, on_failure: ExitStack) -> Offer:
        link = UCXLink(self._settings(meeting))
        on_failure.callback(link.close)
        return Offer(link.address(), [], lambda meeting: UCXChannel(meeting, link))

    def _accept(self, meeting: Meeting) -> UCXChannel:
        """Connects to the worker whose address the connector sent under its proof."""
        link = UCXLink(self._settings(meeting))
        try:
            link.connect(meeting.handshake.payload)
            return UCXChannel(meeting, link)
        except BaseException:
            link.close()
            raise


def _is_network(text: str) -> bool:
    try:
        IPv4Network(text)
    except ValueError:
        return False
    return True
