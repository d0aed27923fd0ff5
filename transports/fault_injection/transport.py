"""Implements a transport that injects planned faults over any other (`faulty+SCHEME?PLAN`), for tests and chaos.

`faulty+shm://` without a plan changes nothing and conforms to the contract. Faults at one end suffice: "in" applies to the messages that
this end receives, "out" to the messages that it sends. To truncate a message or flip a bit, this transport encodes it with the codec,
damages the bytes and decodes them, whatever the scheme.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import ClassVar, NamedTuple

from flowrt.transports.contract import Channel, ChannelStatistics, HostAddress, Identity, Limits, Listener, Transport
from flowrt.transports.errors import AddressError, BrokenChannelError, BusyChannelError, ClosedChannelError, InvalidMessageError
from flowrt.transports.fault_injection.plan import TIMED, Direction, FaultPlan, MessageFault, parse_plan
from flowrt.transports.wire.codec import WireError, decode, encode
from flowrt.transports.wire.message import Message

PREFIX = "faulty+"
_MAX_RECORDED = 10_000
_MAX_LOGGED = 20  # per channel; the record has the rest
log = logging.getLogger("flowrt.transports.faulty")


class Injected(NamedTuple):
    """An injected fault: it affected message `number` in `direction` of the `channel`-th channel of this process over `scheme`."""

    scheme: str
    channel: int
    direction: Direction
    number: int
    kind: str
    detail: str = ""


injected: deque[Injected] = deque(maxlen=_MAX_RECORDED)  # of this process, oldest first


class FaultyChannel(Channel):
    """One end over `inner`, which it owns. `number` identifies the channel within its process, in the plan and in the record."""

    scheme = ""

    def __init__(self, inner: Channel, plan: FaultPlan, limits: Limits, scheme: str, number: int = 0) -> None:
        self.peer = inner.peer
        self.scheme = scheme  # a name of its own for each plan
        self._inner = inner
        self._plan = plan
        self._limits = limits
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._faulty_out, self._faulty_in = plan.concerns("out"), plan.concerns("in")
        self._num_out = self._num_in = 0
        self._send_turn = asyncio.Lock()
        self._received: deque[Message] = deque()  # held back until `_due`
        self._due = 0.0
        self._closing = asyncio.Event()
        self._receiving = False
        self._failure: str | None = None
        self._num_logged = 0

    # Out.

    async def send(self, message: Message) -> None:
        if not self._faulty_out:
            await self._inner.send(message)
            return
        async with self._send_turn:
            self._raise_if_over()
            faults = self._plan.faults_of(self._number, "out", self._num_out)
            seconds = sum(fault.seconds for fault in faults)
            if seconds:
                self._note("out", self._num_out, faults[0].kind, f"{seconds} s")
                await asyncio.sleep(seconds)
                self._raise_if_over()
            for each in self._apply(faults, message, "out", self._num_out):
                await self._inner.send(each)
            self._num_out += 1

    def send_nowait(self, message: Message) -> bool:
        if not self._faulty_out:
            return self._inner.send_nowait(message)
        self._raise_if_over()
        if self._send_turn.locked():
            return False
        faults = self._plan.faults_of(self._number, "out", self._num_out)
        if faults or not self._inner.send_nowait(message):  # `send` applies them, and waits for room
            return False
        self._num_out += 1
        return True

    # In.

    async def recv(self) -> Message:
        if not self._faulty_in:
            return await self._inner.recv()
        self._raise_if_receiving()
        self._receiving = True
        try:
            while (message := self._take()) is None:
                if self._received:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._due - self._loop.time()):
                            await self._closing.wait()
                else:
                    self._admit(await self._inner.recv())
            return message
        finally:
            self._receiving = False

    def recv_nowait(self) -> Message | None:
        if not self._faulty_in:
            return self._inner.recv_nowait()
        self._raise_if_receiving()
        while (message := self._take()) is None and not self._received and (received := self._inner.recv_nowait()) is not None:
            self._admit(received)
        return message

    def _raise_if_receiving(self) -> None:
        if self._receiving:
            raise BusyChannelError("another task is in recv of this channel")

    def _take(self) -> Message | None:
        """The next received message, if it is due. A broken channel still delivers the messages before it broke."""
        if not self._received or self._closing.is_set():
            self._raise_if_over()
        elif self._due <= self._loop.time():
            return self._received.popleft()
        return None

    def _admit(self, message: Message) -> None:
        """Applies the plan to a received message and queues the resulting messages (none, or one or more)."""
        number, self._num_in = self._num_in, self._num_in + 1
        faults = self._plan.faults_of(self._number, "in", number)
        seconds = sum(fault.seconds for fault in faults)
        if seconds:
            self._note("in", number, faults[0].kind, f"{seconds} s")
            self._due = self._loop.time() + seconds
        self._received.extend(self._apply(faults, message, "in", number))

    def _apply(self, faults: list[MessageFault], message: Message, direction: Direction, number: int) -> list[Message]:
        """Injects the faults that change what is sent or received. Returns the resulting messages: none, or one or more."""
        messages = [message]
        for fault in faults:
            detail = ""
            if fault.kind in TIMED:
                continue
            if fault.kind == "duplicate":
                messages += messages[:1]
            elif fault.kind in ("drop", "cut"):
                messages = []
                if fault.kind == "drop":
                    self.abort(f"the connection was dropped at message {number}")
            else:
                messages, detail = self._damage(messages, direction, number, fault)
            self._note(direction, number, fault.kind, detail)
        return messages

    def _damage(self, messages: list[Message], direction: Direction, number: int, fault: MessageFault) -> tuple[list[Message], str]:
        if not messages:
            return [], "lost before"
        try:
            parts = [bytearray(part) for part in encode(messages[0], number)]
        except InvalidMessageError as error:
            return messages, f"not done: {error}"
        place = int(self._plan.draw("place", self._number, direction, number) * sum(map(len, parts)))
        if fault.kind == "truncate":
            parts = _truncated(parts, place)
        else:
            _flip(parts, place, 1 << int(8 * self._plan.draw("bit", self._number, direction, number)))
        try:
            damaged, sequence = decode(list(parts), self._limits)
            if sequence != number:
                raise WireError(f"message {sequence} came where {number} was due")
        except WireError as error:
            self.abort(f"message {number} is damaged: {error}")
            return [], f"byte {place}: the channel is broken"
        return [damaged, *messages[1:]], f"byte {place}: another message"

    def _note(self, direction: Direction, number: int, kind: str, detail: str = "") -> None:
        done = Injected(self.scheme, self._number, direction, number, kind, detail)
        injected.append(done)
        self._num_logged += 1
        if self._num_logged <= _MAX_LOGGED:
            channel = f"{self.scheme}, channel {self._number} to {self.peer.name}, {direction}"
            log.warning("%s: %s at message %d%s", channel, kind, number, detail and f", {detail}")

    # Closing.

    def _raise_if_over(self) -> None:
        if self._closing.is_set():
            raise ClosedChannelError("this channel was closed")
        if self._failure is not None:
            raise BrokenChannelError(self._failure)

    def abort(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        self._inner.abort(reason)

    async def aclose(self) -> None:
        self._closing.set()
        self._received.clear()
        await self._inner.aclose()

    @property
    def closed(self) -> bool:
        return self._closing.is_set() or self._failure is not None or self._inner.closed

    def statistics(self) -> ChannelStatistics:
        return self._inner.statistics()


class _FaultyListener(Listener):
    def __init__(self, inner: Listener, wrap: Callable[[Channel], Channel]) -> None:
        self._inner = inner
        self._wrap = wrap
        self.address = PREFIX + inner.address

    async def accept(self) -> Channel:
        return self._wrap(await self._inner.accept())

    @property
    def rejected(self) -> int:
        return self._inner.rejected

    async def aclose(self) -> None:
        await self._inner.aclose()


class FaultyTransport(Transport):
    """The base class of faulty transports; `faulty_transport` makes a subclass for an inner transport and a plan."""

    inner: ClassVar[type[Transport]]
    plan: ClassVar[FaultPlan]
    _num_channels = 0  # of this transport in this process

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return cls.inner.unavailable_reason()

    def address_at(self, host: HostAddress) -> str:
        return PREFIX + self.inner().address_at(host)

    async def listen(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Listener:
        listener = await self.inner().listen(self._inner_address(address), limits, key, identity)
        return _FaultyListener(listener, lambda channel: self._wrap(channel, limits))

    async def connect(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Channel:
        return self._wrap(await self.inner().connect(self._inner_address(address), limits, key, identity), limits)

    def _wrap(self, channel: Channel, limits: Limits) -> Channel:
        number, type(self)._num_channels = self._num_channels, self._num_channels + 1
        return FaultyChannel(channel, self.plan, limits, self.scheme, number)

    def _inner_address(self, address: str) -> str:
        """`faulty+shm?drop@3://x` and `faulty+shm://x` both name shm://x."""
        scheme, separator, rest = address.partition("://")
        if not separator or scheme.partition("?")[0] != PREFIX + self.inner.scheme:
            raise AddressError(f"{address[:80]!r} is not an address of {self.scheme}; one starts with {PREFIX}{self.inner.scheme}://")
        return f"{self.inner.scheme}://{rest}"


def faulty_transport(scheme: str, inner: type[Transport], plan: FaultPlan) -> type[FaultyTransport]:
    """Returns a transport class named `scheme` that applies `plan` to the channels of `inner`."""
    members = {"scheme": scheme, "capabilities": inner.capabilities, "inner": inner, "plan": plan}
    return type("FaultyTransport", (FaultyTransport,), members)


def from_scheme(scheme: str, find: Callable[[str], type[Transport]]) -> type[Transport]:
    """Returns the class for `faulty+SCHEME` or `faulty+SCHEME?PLAN`; `find` returns the class of SCHEME. Raises AddressError."""
    name, _, plan = scheme.removeprefix(PREFIX).partition("?")
    if name.startswith(PREFIX):
        raise AddressError(f"{scheme[:64]!r}: one plan is enough; separate its faults with commas")
    return faulty_transport(scheme, find(name), parse_plan(plan))


def _truncated(parts: list[bytearray], length: int) -> list[bytearray]:
    """The first `length` bytes of `parts`."""
    starts = accumulate(map(len, parts), initial=0)
    return [part[: max(0, length - start)] for part, start in zip(parts, starts, strict=False)]


def _flip(parts: list[bytearray], place: int, bit: int) -> None:
    for part in parts:
        if place < len(part):
            part[place] ^= bit
            return
        place -= len(part)
