"""A transport between simulated nodes: real bytes, seeded delays, nothing of the world.

Here: NetworkConditions, SimulatedNetwork (who listens where, how long a frame takes), SimulatedTransport, its listener and channel.
Not here: which node does what (world.py). The channels keep every promise of transports/contract.py, and pass its checks.

Each message is encoded by transports/codec.py and decoded again on arrival. Frames of one direction never overtake each other, those
of different channels do. A frame may arrive twice (a sender that tried again); the sequence number drops the second. The window runs
the protocol of the real schemes, so that the word "taken" takes its time as well.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec

from flowrt.simulation.loop import VirtualLoop, current_node
from transports.address import expect_scheme
from transports.codec import Part, WireError, decode, encode, is_repeat
from transports.contract import Capabilities, Channel, Identity, Limits, Listener, Transport
from transports.endpoint import Backlog, Endpoint
from transports.errors import AddressError, HandshakeError
from transports.handshake import NONCE_BYTES, Handshake, check_key
from transports.message import Message
from transports.window import ReceiveWindow, SendWindow

_ALIGNMENT = 64

FrameKind = Literal["message", "taken", "waiting", "close", "broken"]


@dataclass(frozen=True)
class NetworkConditions:
    """How the network behaves. Times in seconds; `one_in` counts frames (or channels), 0 means never."""

    least_delay_seconds: float = 20e-6
    most_delay_seconds: float = 400e-6
    slow_one_in: int = 50  # frames that take `slow_seconds` on top
    slow_seconds: float = 20e-3
    duplicate_one_in: int = 40
    bytes_per_second: float = 10e9
    tiny_one_in: int = 0  # channels that hold a single message, whatever their limits allow


class SimulatedNetwork:
    """Everything between the nodes of one run."""

    def __init__(self, loop: VirtualLoop, seed: int, conditions: NetworkConditions | None = None) -> None:
        self.loop = loop
        self.conditions = NetworkConditions() if conditions is None else conditions
        self.listeners: dict[str, SimulatedListener] = {}
        self.num_frames = 0
        self.num_duplicates = 0
        self._random = random.Random(f"network {seed}")
        self._num_addresses = 0
        self._num_channels = 0

    def transport(self, scheme: str) -> Transport:
        """What stands in for `scheme`: every name is this one network, under the name that was asked for."""
        return _class_for(scheme)(self)

    def delay_seconds(self, num_bytes: int = 0) -> float:
        """How long a frame of `num_bytes` takes, drawn anew each time."""
        conditions = self.conditions
        delay = (
            self._random.uniform(conditions.least_delay_seconds, conditions.most_delay_seconds) + num_bytes / conditions.bytes_per_second
        )
        return delay + conditions.slow_seconds if self._hit(conditions.slow_one_in) else delay

    def duplicates(self) -> bool:
        """Whether the next frame arrives twice."""
        if not self._hit(self.conditions.duplicate_one_in):
            return False
        self.num_duplicates += 1
        return True

    def nonce(self) -> bytes:
        return self._random.randbytes(NONCE_BYTES)

    def free_address(self, scheme: str) -> str:
        self._num_addresses += 1
        return f"{scheme}://simulated-{self._num_addresses}"

    def channel_number(self) -> int:
        self._num_channels += 1
        return self._num_channels

    def shrink(self, limits: Limits) -> Limits:
        """`limits` of a new channel, now and then with room for a single message."""
        return msgspec.structs.replace(limits, capacity_messages=1) if self._hit(self.conditions.tiny_one_in) else limits

    def _hit(self, one_in: int) -> bool:
        return one_in > 0 and self._random.randrange(one_in) == 0


class SimulatedChannel(Endpoint):
    """One end. `_other` is the end at the peer; only `_arrive` of it is ever called, from a timer of its node."""

    scheme: ClassVar[str] = "simulated"

    def __init__(self, network: SimulatedNetwork, node: str, name: str, limits: Limits, peer: Identity) -> None:
        super().__init__(limits, peer)
        self.node = node
        self._network = network
        self._name = name.encode()
        self._other: SimulatedChannel = self
        self._sending = SendWindow(limits)
        self._receiving = ReceiveWindow(limits)
        self._expected = 0
        self._inbox: deque[tuple[Message, int]] = deque()
        self._last_arrival = 0.0
        self._asked_for_room = False

    @classmethod
    def pair(
        cls, network: SimulatedNetwork, first: tuple[Identity, str], second: tuple[Identity, str], limits: Limits
    ) -> tuple[SimulatedChannel, SimulatedChannel]:
        """Two connected ends, each given as (who it belongs to, its node): `first`'s, whose peer is `second`, and the other way round."""
        number = network.channel_number()
        one = cls(network, first[1], f"{number}>", limits, second[0])
        two = cls(network, second[1], f"{number}<", limits, first[0])
        one._other, two._other = two, one
        return one, two

    def sever(self) -> None:
        """This end dies as by a power cut: nothing more is sent, the peer finds out after all that was on its way has arrived."""
        self._send_frame("broken")
        self._break("this end was severed")

    def _transmit(self, message: Message) -> bool:
        parts = encode(message, self._sending.sent_messages, self.limits)
        size = sum(map(len, parts)) - len(parts[0])
        if not self._sending.fits(size):
            return False
        self._sending.add(size)
        self._counters.messages_sent += 1
        self._counters.bytes_sent += size
        wire: list[Part] = [bytes(parts[0]), *map(_aligned, parts[1:])]
        self._send_frame("message", wire)
        if self._network.duplicates():
            self._send_frame("message", wire)
        return True

    def _expect_room(self) -> bool:
        if not self._asked_for_room:
            self._asked_for_room = True
            self._send_frame("waiting")
        return False

    def _take(self) -> Message | None:
        if not self._inbox:
            return None
        message, size = self._inbox.popleft()
        if self._receiving.took(size):
            self._tell_taken()
        self._counters.messages_received += 1
        self._counters.bytes_received += size
        return message

    def _tell_taken(self) -> None:
        if not self._ended and self._broken is None:
            self._send_frame("taken", [b"%d %d" % self._receiving.told()])

    def _send_frame(self, kind: FrameKind, parts: list[Part] | None = None) -> None:
        network, parts = self._network, parts or []
        network.num_frames += 1
        network.loop.note(self._name, kind.encode(), *parts)
        arrival = network.loop.time() + network.delay_seconds(sum(map(len, parts)))
        self._last_arrival = max(self._last_arrival, arrival)  # never before what went ahead
        network.loop.call_at_node(self._last_arrival, self._other.node, self._other._arrive, kind, parts)

    def _arrive(self, kind: FrameKind, parts: list[Part]) -> None:
        if self._closed or self._broken is not None:
            return
        try:
            if kind == "message":
                self._arrive_message(parts)
            elif kind == "taken":
                messages, size = bytes(parts[0]).split()
                self._sending.update(int(messages), int(size))
                self._asked_for_room = False
                self._wake_sender()
            elif kind == "waiting":
                self._receiving.sender_waits = True
                if self._receiving.taken_messages > self._receiving.told_messages:
                    self._tell_taken()
            elif kind == "close":
                self._end()
            else:
                self._break(f"{self.peer.name or 'the peer'} died")
        except WireError as error:
            self._break(str(error))

    def _arrive_message(self, parts: list[Part]) -> None:
        message, sequence = decode(parts, self.limits)
        if is_repeat(sequence, self._expected):
            self._counters.messages_dropped += 1
            return
        self._expected += 1
        size = message.payload_bytes
        self._receiving.arrived(size)
        self._inbox.append((message, size))
        self._wake_receiver()

    async def _shut(self) -> None:
        self._inbox.clear()
        if not self._ended and self._broken is None:
            self._send_frame("close")


class SimulatedListener(Listener):
    """Accepts channels for the node that made it."""

    def __init__(self, network: SimulatedNetwork, address: str, limits: Limits, key: bytes, identity: Identity) -> None:
        self.address = address
        self.backlog = Backlog()
        self.limits, self.key, self.identity = limits, key, identity
        self.node = current_node.get()
        self.num_rejected = 0
        self._network = network

    async def accept(self) -> Channel:
        return await self.backlog.accept()

    @property
    def rejected(self) -> int:
        return self.num_rejected

    async def aclose(self) -> None:
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]
        await self.backlog.aclose()


class SimulatedTransport(Transport):
    """Stands in for any scheme; `SimulatedNetwork.transport` makes one that bears that scheme's name."""

    scheme: ClassVar[str] = "simulated"
    capabilities: ClassVar[Capabilities] = Capabilities(between_hosts=True)

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    async def listen(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Listener:
        check_key(key)
        if not expect_scheme(address, self.scheme):
            address = self._network.free_address(self.scheme)
        if address in self._network.listeners:
            raise AddressError(f"somebody listens at {address} already")
        listener = self._network.listeners[address] = SimulatedListener(self._network, address, limits, key, identity)
        return listener

    async def connect(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Channel:
        check_key(key)
        expect_scheme(address, self.scheme)
        network = self._network
        ours = Handshake("connector", key, identity, limits, scheme=self.scheme, nonce=network.nonce())
        hello = ours.start()
        await asyncio.sleep(network.delay_seconds(len(hello)))
        listener = self._find(address)
        theirs = Handshake("listener", listener.key, listener.identity, listener.limits, scheme=self.scheme, nonce=network.nonce())
        try:
            answer = theirs.receive(hello)
            await asyncio.sleep(network.delay_seconds(len(answer)))
            proof = ours.receive(answer)
            await asyncio.sleep(network.delay_seconds(len(proof)))
            theirs.receive(proof)
        except BaseException:
            listener.num_rejected += 1  # a connection that came to nothing, whatever it came to
            raise
        if self._find(address) is not listener:
            raise HandshakeError(f"{address} changed hands during the handshake")
        return self._join(listener, ours, theirs, network.shrink(ours.limits))

    def _find(self, address: str) -> SimulatedListener:
        listener = self._network.listeners.get(address)
        if listener is None:
            raise AddressError(f"nobody listens at {address}")
        if listener.backlog.full:
            raise AddressError(f"{address} has {listener.backlog.capacity} connections that nobody has accepted yet")
        return listener

    def _join(self, listener: SimulatedListener, ours: Handshake, theirs: Handshake, limits: Limits) -> Channel:
        first, second = (theirs.peer, current_node.get()), (ours.peer, listener.node)
        near, far = SimulatedChannel.pair(self._network, first, second, limits)
        listener.backlog.put(far)
        return near


def _aligned(data: Part) -> memoryview:
    """A copy of `data` at a multiple of 64: some kernels compute other bits elsewhere, and where is the memory's choice, not the seed's."""
    buffer = bytearray(len(data) + _ALIGNMENT)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % _ALIGNMENT
    view = memoryview(buffer)[start : start + len(data)]
    view[:] = data
    return view


def _class_for(scheme: str) -> type[SimulatedTransport]:
    """`scheme` is a property of the class in the contract, hence a class per name."""
    return type(f"Simulated[{scheme}]", (SimulatedTransport,), {"scheme": scheme})
