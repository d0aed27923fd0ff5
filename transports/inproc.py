"""The `inproc` transport: both ends live in one event loop, and messages pass by reference, without copies."""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import Callable
from contextvars import Context
from itertools import count
from typing import ClassVar
from weakref import WeakValueDictionary

from flowrt.transports.channel.queued import QueuedChannel, QueuedListener
from flowrt.transports.contract import Capabilities, Channel, Identity, Limits, Listener, Transport
from flowrt.transports.errors import AddressError, HandshakeError, InvalidMessageError, LimitError
from flowrt.transports.wire.address import expect_scheme
from flowrt.transports.wire.codec import check_limits
from flowrt.transports.wire.handshake import check_key
from flowrt.transports.wire.message import DTYPE_BYTES, Message

_listeners: dict[str, InprocListener] = {}
_free_names = count(1)
_turns: WeakValueDictionary[int, _Turns] = WeakValueDictionary()  # by the id of its loop, which it keeps alive as long as its channels do


class _Turns:
    """Calls in order, several in one turn of the loop: what one call sends, the next one takes in the same turn."""

    MAX_CALLS = 16

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()

    def call_soon(self, call: Callable[[], None]) -> None:
        if not self._calls:
            self._loop.call_soon(self._run)
        self._calls.append(call)

    def _run(self) -> None:
        calls = self._calls
        try:
            for _ in range(self.MAX_CALLS):
                calls[0]()
                calls.popleft()
                if not calls:
                    return
        except BaseException:
            calls.popleft()
            raise
        finally:
            if calls:
                self._loop.call_soon(self._run)


class InprocChannel(QueuedChannel):
    """One end; `_other` is the other one. `_inbox` holds (message, payload bytes) that the other end has sent."""

    scheme = "inproc"
    yields = False

    def __init__(self, limits: Limits, peer: Identity) -> None:
        super().__init__(limits, peer)
        self._other = self
        self._turns = _turns.setdefault(id(self._loop), _Turns(self._loop))
        self._inbox: deque[tuple[Message, int]] = deque()
        self._inbox_bytes = 0
        self._capacity_messages = limits.capacity_messages
        self._capacity_bytes = limits.capacity_bytes

    @classmethod
    def pair(cls, limits: Limits, first: Identity, second: Identity) -> tuple[InprocChannel, InprocChannel]:
        """Two connected ends: `first`'s, whose peer is `second`, and the other way round."""
        one, two = cls(limits, second), cls(limits, first)
        one._other, two._other = two, one
        return one, two

    def _transmit(self, message: Message) -> bool:
        other = self._other
        inbox = other._inbox
        size = self._payload_bytes(message) if message.tensors or type(message.header) is bytes else 0
        if inbox and (len(inbox) >= self._capacity_messages or other._inbox_bytes + size > self._capacity_bytes):
            return False
        inbox.append((message, size))
        other._inbox_bytes += size
        counters = self._counters
        counters.messages_sent += 1
        counters.bytes_sent += size
        if other._receiver is not None:
            other._receiver()
        return True

    def _take(self) -> Message | None:
        if not self._inbox:
            return None
        message, size = self._inbox.popleft()
        self._inbox_bytes -= size
        counters = self._counters
        counters.messages_received += 1
        counters.bytes_received += size
        other = self._other
        if other._room is not None:
            other._wake_sender()
        return message

    def _payload_bytes(self, message: Message) -> int:
        try:
            size = message.payload_bytes
        except KeyError as error:
            raise InvalidMessageError(f"unknown dtype {str(error.args[0])[:32]!r}; known: {', '.join(DTYPE_BYTES)}") from None
        limits = self.limits
        if size > limits.max_message_bytes or len(message.tensors) > limits.max_tensors:
            check_limits(message, size, limits)
        if type(message.header) is bytes and len(message.header) > limits.max_header_bytes:
            raise LimitError(f"the header of a {message.kind!r} message takes {len(message.header)} bytes of {limits.max_header_bytes}")
        return size

    def _call_soon(self, call: Callable[[], None], context: Context) -> None:
        self._turns.call_soon(call)

    def _hang_up(self) -> None:
        self._other._break(f"{self._other.peer.name or 'the peer'} hung up")

    async def _shut(self) -> None:
        self._inbox.clear()
        self._inbox_bytes = 0
        self._other._end()


class InprocListener(QueuedListener):
    """Accepts channels from the same event loop."""

    def __init__(self, address: str, limits: Limits, key: bytes, identity: Identity) -> None:
        super().__init__(address)
        self.limits = limits
        self.identity = identity
        self.loop = asyncio.get_running_loop()
        self._key = key

    def admit(self, limits: Limits, key: bytes, identity: Identity) -> Channel:
        """The connecting side's end of a new channel."""
        if not hmac.compare_digest(key, self._key):
            self.rejected += 1
            raise HandshakeError("the peer does not know the key of this run")
        if self.full:
            raise AddressError(f"{self.address} has {self.capacity} connections that were not accepted yet")
        ours, theirs = InprocChannel.pair(limits.smaller(self.limits), self.identity, identity)
        self.put(ours)
        return theirs

    def _stop(self) -> None:
        if _listeners.get(self.address) is self:
            del _listeners[self.address]


class InprocTransport(Transport):
    """`inproc://name`, for actors that share a process and an event loop."""

    scheme: ClassVar[str] = "inproc"
    capabilities: ClassVar[Capabilities] = Capabilities(between_processes=False)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    async def listen(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Listener:
        check_key(key)
        name = expect_scheme(address, self.scheme)
        if not name:
            address = f"inproc://free-{next(_free_names)}"
        held = _listeners.get(address)
        if held is not None and not held.loop.is_closed():
            raise AddressError(f"another listener is at {address} already")
        listener = _listeners[address] = InprocListener(address, limits, key, identity)
        return listener

    async def connect(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Channel:
        check_key(key)
        expect_scheme(address, self.scheme)
        listener = _listeners.get(address)
        if listener is None or listener.loop is not asyncio.get_running_loop():
            raise AddressError(f"no listener is at {address} in this event loop")
        return listener.admit(limits, key, identity)
