"""Implements the `zmq` transport: ZeroMQ between two processes.

Between two processes of one Linux host, data goes over an abstract ipc endpoint, which is ZeroMQ's fastest path and leaves no file. With
an address of TCP, data goes over TCP. Traffic between hosts is encrypted: `zmq://10.0.0.5:7000?curve`. Addresses beyond loopback without
`?curve` are refused before anything is bound.

The connector binds a PAIR under a random name and sends the name under its proof, and the listener connects. Each channel has a socket of
its own, so no message is routed, or dropped for an unknown or slow peer, and closing one channel touches no other. A process that returns
under an old name is another incarnation with its own sockets. The first message each way proves that the session is the one of the
handshake. libzmq's own queues are unbounded; the credit window bounds their content. Connections are not made again: a lost one is a
broken channel, which the socket's monitor reports.

Frame 0 is `uint8 kind, 3 zero bytes, uint32 envelope bytes` and the body. The body of a MESSAGE is the envelope and, if they are no more
than INLINE_BYTES together, the tensors; larger ones follow as a frame each. The other kinds are as in stream.py, with GREETING (the
proof) and CLOSED (the response to CLOSE, after which every queue is empty). Within a host, acknowledgements (TAKEN) take the socket of the
handshake, where they wait behind no payload. They take the PAIR when that socket is full, and between hosts, because the PAIR is encrypted.
A tensor of LENT_BYTES or more is not copied on its way out: libzmq's I/O thread writes it into the kernel in place, and it is kept until
libzmq has finished with it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import struct
import weakref
from contextlib import ExitStack
from ipaddress import ip_address
from typing import Any, ClassVar

from flowrt.transports.channel.greeted import GreetedChannel
from flowrt.transports.channel.peer_watch import PeerWatch
from flowrt.transports.channel.rendezvous import IP_FAMILIES, Meeting, Offer, is_port_range, ports_of
from flowrt.transports.channel.socket_transport import SocketTransport
from flowrt.transports.contract import Capabilities, ChannelStatistics, HostAddress
from flowrt.transports.errors import AddressError, UnavailableError
from flowrt.transports.wire.address import split_port, with_port
from flowrt.transports.wire.codec import Part, WireError, decode_envelope, is_repeat, split_buffers
from flowrt.transports.zeromq.acknowledgements import AcknowledgementSocket
from flowrt.transports.zeromq.sockets import INLINE_BYTES, CurveKeys, SharedContext, bind, missing, pair_and_monitor, shared_context

if missing is None:
    import zmq

_missing = missing
LENT_BYTES = 1 << 17  # frames of this size or more are lent, not copied; for smaller frames a loan costs more
DEATH_SECONDS = 0.5  # longest time between the end of the socket and the end of libzmq's connection, in either order
_FRAME = struct.Struct("<B3xI")
_TAKEN = struct.Struct("<QQ")
_MESSAGE_KIND, _TAKEN_KIND, _WAITING_KIND, _CLOSE_KIND, _CLOSED_KIND, _GREETING_KIND = range(1, 7)
_IPC_ENDPOINT = re.compile(r"ipc://@flowrt/zmq-data/[0-9a-f]{32}")
CURVE = "curve"  # the one option of an address; it may be followed by a range of ports
_OPTION = re.compile(CURVE + r"(?::(\d{1,5}-\d{1,5}))?")
_MESSAGES_AT_ONCE = 64  # read before the event loop turns
if missing is None:  # an operation on pyzmq's enums takes half a microsecond, on integers a fortieth
    _NOBLOCK, _SNDMORE, _POLLIN, _POLLOUT = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN), int(zmq.POLLOUT)


class ZeroMQChannel(GreetedChannel):
    """One end of a channel: a PAIR socket, its monitor, and the socket of the handshake."""

    scheme = "zmq"

    def __init__(self, meeting: Meeting, context: SharedContext, pair: zmq.Socket[bytes], monitor: zmq.Socket[Any]) -> None:
        super().__init__(meeting)
        self._context, self._pair = context, pair
        self._monitor = monitor
        self._frames: list[zmq.Frame] = []
        self._held: set[weakref.ref[object]] = set()  # frames that received tensors alias
        greetings = [meeting.handshake.session_key(f"zmq {role}") for role in ("connector", "listener")]
        self._peer_greeting, self._own_greeting = greetings if self._is_listener else reversed(greetings)
        self._reading_soon = False
        self._connections: set[int] = set()  # libzmq's descriptors, as the monitor reports them
        self._is_disconnected = self._is_socket_closed = False
        self._death_timer: asyncio.TimerHandle | None = None
        self._descriptors = (int(pair.get(zmq.FD)), int(monitor.get(zmq.FD)))
        self._loop.add_reader(self._descriptors[0], self._read)
        self._loop.add_reader(self._descriptors[1], self._read_monitor)
        if self._is_listener:
            self._write(_GREETING_KIND, self._own_greeting)
        self._read_soon()
        self._loop.call_soon(self._read_monitor)  # the monitor's descriptor also reports changes only

    def _watch_peer(self, sock: socket.socket) -> PeerWatch:
        is_within_host = sock.family == getattr(socket, "AF_UNIX", None)
        self._acknowledgements = AcknowledgementSocket(sock, self._on_peer_end, self._on_acknowledgement) if is_within_host else None
        return self._acknowledgements or super()._watch_peer(sock)

    def statistics(self) -> ChannelStatistics:
        self._counters.held_buffers = len(self._held)
        return super().statistics()

    # Sending.

    def _send_message(self, parts: list[Part], payload_bytes: int) -> None:
        head = _FRAME.pack(_MESSAGE_KIND, len(parts[0]))
        if payload_bytes <= INLINE_BYTES:
            self._send_frames([b"".join((head, *parts))])
        else:
            self._send_frames([head + parts[0], *parts[1:]])

    def _send_frames(self, frames: list[Part]) -> None:
        """Passes the frames to libzmq, which copies small frames and borrows large ones."""
        last = len(frames) - 1
        lender = self._context.lender
        try:
            for index, frame in enumerate(frames):
                flags = _NOBLOCK | _SNDMORE if index < last else _NOBLOCK
                if len(frame) < LENT_BYTES or lender is None:
                    self._pair.send(frame, flags)
                else:
                    lender.send(self._pair, frame, flags)
        except zmq.Again:  # the connection has ended, but the messages that the peer sent before are read first
            if self._broken is None:
                self._loop.call_soon(self._disconnect)
            return
        except zmq.ZMQError as error:
            self._fail(f"the connection is lost: {error}")
            return
        if not self._reading_soon and (self._is_disconnected or self._events() & _POLLIN):
            self._read_soon()

    def _events(self) -> int:
        """libzmq's descriptor reports changes only, and any call on the socket may consume one: read this after each call."""
        return int(self._pair.get(zmq.EVENTS))

    def _write(self, kind: int, body: bytes = b"") -> None:
        self._send_frames([_FRAME.pack(kind, 0) + body])

    def _send_taken(self, messages: int, payload_bytes: int) -> None:
        if self._acknowledgements is None or not self._acknowledgements.send(messages, payload_bytes):
            self._write(_TAKEN_KIND, _TAKEN.pack(messages, payload_bytes))

    def _send_waiting(self) -> None:
        self._write(_WAITING_KIND)

    # Receiving.

    def _read_soon(self) -> None:
        """Checks the socket in the next turn of the loop."""
        self._reading_soon = True
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reading_soon = False
        if self._pair.closed:
            return
        try:
            for _ in range(_MESSAGES_AT_ONCE):
                events = self._events()
                if not events & _POLLIN:
                    if self._is_disconnected and not events & _POLLOUT:
                        self._fail(self._cut_reason)
                    return
                self._read_message()
        except (zmq.ZMQError, WireError) as error:
            self._fail(str(error), nonsense=isinstance(error, WireError))
            return
        self._read_soon()

    def _read_message(self) -> None:
        """Reads one whole message; libzmq returns all of its frames or none."""
        frames = self._frames
        frames.clear()
        more = True
        while more:
            frame = self._pair.recv(_NOBLOCK, copy=False)
            more = frame.more
            if len(frames) <= self.limits.max_tensors:
                frames.append(frame)
            elif not more:
                raise WireError("a message of too many frames")
        body = frames[0].bytes
        if len(body) < _FRAME.size or self._broken is not None:
            raise WireError("a frame that is too short")
        kind, envelope_bytes = _FRAME.unpack_from(body)
        if not self.greeted.done():
            if kind != _GREETING_KIND or not secrets.compare_digest(body[_FRAME.size :], self._peer_greeting):
                raise WireError("another process than the peer of the handshake is at the other end")
            self._greet()
        elif kind == _MESSAGE_KIND:
            self._read_data(body, envelope_bytes, frames)
        elif kind == _TAKEN_KIND and len(body) == _FRAME.size + _TAKEN.size:
            self._on_totals(*_TAKEN.unpack_from(body, _FRAME.size))
        elif kind == _WAITING_KIND:
            self._on_waiting()
        elif kind == _CLOSE_KIND:
            self._write(_CLOSED_KIND)
            self._end()
            self._finish()
        elif kind == _CLOSED_KIND:
            self._finish()
        else:
            raise WireError(f"a frame of kind {kind}")
        frames.clear()

    def _on_totals(self, messages: int, payload_bytes: int) -> None:
        """Handles an acknowledgement. The two ways overtake each other, so older totals have no effect. Raises WireError."""
        if messages >= self._sending.taken_messages:
            self._on_taken(messages, payload_bytes)
        if self._context.lender is not None:
            self._context.lender.collect()

    def _on_acknowledgement(self, messages: int, payload_bytes: int) -> None:
        try:
            self._on_totals(messages, payload_bytes)
        except WireError as error:
            self._fail(str(error), nonsense=True)

    def _greet(self) -> None:
        self.greeted.set_result(None)
        if not self._is_listener:
            self._write(_GREETING_KIND, self._own_greeting)

    def _read_data(self, body: bytes, envelope_bytes: int, frames: list[zmq.Frame]) -> None:
        end = _FRAME.size + envelope_bytes
        envelope, sizes = decode_envelope(body[_FRAME.size : end], self.limits)
        payload_bytes = sum(sizes)
        if len(frames) == 1:
            if end + payload_bytes != len(body):
                raise WireError(f"tensors of {payload_bytes} bytes were announced, {len(body) - end} came")
            buffers = split_buffers(body, end, sizes)
        else:
            if len(body) != end or sizes != [len(frame) for frame in frames[1:]]:
                raise WireError(f"tensors of {sizes[:16]} bytes were announced, other sizes came")
            buffers = [self._alias(frame, size) for frame, size in zip(frames[1:], sizes, strict=True)]
        if not is_repeat(envelope.sequence, self._expected):
            self._receiving.arrived(payload_bytes)
        self._deliver(envelope, buffers, payload_bytes)

    def _alias(self, frame: zmq.Frame, size: int) -> object:
        if size <= INLINE_BYTES:  # small frames are unaligned in libzmq's read buffer and would keep the whole buffer alive
            return bytearray(frame.bytes)
        self._held.add(weakref.ref(frame, self._held.discard))
        view: memoryview = memoryview(frame)  # type: ignore[arg-type]  # it does export its buffer
        return view

    # Closing.

    def _read_monitor(self) -> None:
        """Processes all pending events of libzmq about the connection together. The end of a foreign connection may be reported after the
        peer's greeting has arrived, and before the peer's connection is reported."""
        ended = False
        while not self._monitor.closed and int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            description = self._monitor.recv_multipart(zmq.NOBLOCK)[0]
            event, value = struct.unpack("=Hi", description)
            if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
                self._connections.add(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections.discard(value)
                ended = True
            elif self._is_listener and event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._on_death()
            elif self._is_listener:
                self._fail("the peer of the handshake refuses the keys of this channel")
        if (
            ended and not self._connections and (self.greeted.done() or self._is_listener)
        ):  # before the greeting, the ended connection may have been a foreign one
            self._disconnect()

    def _on_peer_end(self, reason: str | None) -> None:
        """Handles the end of the meeting's socket. Messages that the peer sent before may still be in libzmq's queues."""
        self._is_socket_closed = True
        if reason is not None:
            self._fail(reason)
        else:
            self._expect_death()
        self._finish()

    def _disconnect(self) -> None:
        """Handles the end of libzmq's connection. When libzmq cuts the connection because of invalid input, it reports the end before
        it returns the messages received earlier; they are all returned once the socket is not writable. A socket that connected to a peer
        that died stays writable, without a receiver."""
        self._is_disconnected = True
        if not self._pair.closed:
            self._expect_death()

    def _expect_death(self) -> None:
        """Marks the peer dead, at once when no message can be in flight, otherwise after DEATH_SECONDS or at the end of the queue."""
        if self._is_disconnected and (self._is_socket_closed or not self._events() & _POLLOUT):
            self._on_death()
        elif not self._ended and self._broken is None and self._death_timer is None:
            self._death_timer = self._loop.call_later(DEATH_SECONDS, self._on_death)
            self._read_soon()  # reading EVENTS may have consumed the notification of a message

    def _on_death(self) -> None:
        self._read()
        if self._reading_soon and self._broken is None and not self._ended:
            self._loop.call_soon(self._on_death)  # messages are left for another turn
            return
        if not self._ended:
            self._fail(self._cut_reason)
        self._finish()

    def _send_close(self) -> None:
        self._write(_CLOSE_KIND)

    async def _shut(self) -> None:
        try:
            if self.greeted.done() or self._is_listener:  # the listener greets first, so the peer may already use the channel
                await self._close_in_order()
        finally:
            if self._death_timer is not None:
                self._death_timer.cancel()
            for descriptor in self._descriptors:
                self._loop.remove_reader(descriptor)
            self._peer_watch.close()
            self._frames.clear()
            self._context.close(self._pair, self._monitor)


class ZeroMQTransport(SocketTransport):
    """`zmq://name` over ipc on one Linux host, `zmq://127.0.0.1:port` over TCP, `zmq://10.0.0.5:port?curve` encrypted over TCP; with
    `?curve:7000-7099`, all ports at which either end listens are of this range."""

    scheme: ClassVar[str] = "zmq"
    capabilities: ClassVar[Capabilities] = Capabilities(borrows_sender=True, between_hosts="encrypted")

    @classmethod
    def unavailable_reason(cls) -> str | None:
        if _missing is not None:
            return f"zmq needs the package pyzmq ({_missing}); install it with: pip install pyzmq"
        return None

    def address_at(self, host: HostAddress) -> str:
        return f"zmq://{with_port(host.address, 0)}?{CURVE}{f':{host.ports}' if host.ports else ''}" if host.address else "zmq://"

    def _split_name(self, rest: str) -> tuple[str, str]:
        name, separator, option = rest.partition("?")
        if not separator and re.fullmatch(r".*:(\d{1,5}|\*)", name) and not name.startswith(("127.", "[::1]")):
            raise AddressError(f"zmq://{name[:80]} is not on this host and would not be encrypted; write zmq://ADDRESS:PORT?{CURVE}")
        if separator and not _is_option(option):
            raise AddressError(f"zmq://{rest[:80]}: the only option is ?{CURVE}, or ?{CURVE}:FROM-TO with the ports to listen at")
        if separator and not zmq.has("curve"):
            raise UnavailableError("this libzmq was built without encryption (CURVE); the wheels of pyzmq have it: pip install pyzmq")
        return name, option

    def _offer(self, meeting: Meeting, on_failure: ExitStack) -> Offer:
        context = shared_context()
        try:
            pair, monitor = pair_and_monitor(context, meeting.limits)
            on_failure.callback(context.close, pair, monitor)
            if meeting.option:
                context.encrypt_server(pair, CurveKeys.derive(meeting.handshake))
            host = meeting.sock.getsockname()[0] if meeting.sock.family in IP_FAMILIES else None
            endpoint = bind(pair, host, ports_of(meeting.option))
        except zmq.ZMQError as error:
            raise UnavailableError(f"zmq cannot bind a socket: {error}") from error
        return Offer(f"{endpoint}?{meeting.option}".encode(), [], lambda meeting: ZeroMQChannel(meeting, context, pair, monitor))

    def _accept(self, meeting: Meeting) -> ZeroMQChannel:
        """Connects to the endpoint that the connector sent under its proof."""
        endpoint, _, option = meeting.handshake.payload.decode("ascii", "replace").partition("?")
        if not _is_endpoint_of(endpoint, meeting.sock):
            raise WireError(f"{endpoint!r} is not an endpoint of the caller")
        if option != meeting.option:
            raise WireError("one end requires encryption and the other does not")
        context = shared_context()
        with ExitStack() as on_failure:
            try:
                pair, monitor = pair_and_monitor(context, meeting.limits)
                on_failure.callback(context.close, pair, monitor)
                if meeting.option:
                    context.encrypt_client(pair, CurveKeys.derive(meeting.handshake))
                pair.set(zmq.IPV6, int(meeting.sock.family == socket.AF_INET6))
                pair.connect(endpoint)
            except zmq.ZMQError as error:
                raise WireError(str(error)) from error
            channel = ZeroMQChannel(meeting, context, pair, monitor)
            on_failure.pop_all()
        return channel


def _is_endpoint_of(text: str, sock: socket.socket) -> bool:
    """Whether a channel's endpoint can be one of the peer of its handshake."""
    if sock.family not in IP_FAMILIES:
        return _IPC_ENDPOINT.fullmatch(text) is not None
    offered = split_port(text.removeprefix("tcp://"))
    return text.startswith("tcp://") and offered is not None and offered[0] == ip_address(sock.getpeername()[0])


def _is_option(text: str) -> bool:
    match = _OPTION.fullmatch(text)
    return match is not None and (match[1] is None or is_port_range(match[1]))
