"""Implements a transport between simulated nodes with real bytes, seeded delays and no real I/O.

The channels pass the conformance suite of the transport contract.

Each message is encoded by transports/wire/codec.py and decoded again on arrival. Frames of one direction never overtake each other, those
of different channels do. A frame may arrive twice (a sender that tried again); the sequence number drops the second. The window runs
the protocol of the real schemes, so that window updates are delayed as well.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import ClassVar, Literal

import msgspec

from flowrt.simulation.loop import VirtualLoop
from flowrt.simulation.network_conditions import LinkState, NetworkConditions, is_hit
from flowrt.simulation.waitables import current_node, set_error, set_result
from flowrt.transports.channel.flow_controlled import FlowControlledChannel
from flowrt.transports.channel.queued import QueuedListener
from flowrt.transports.contract import Capabilities, Channel, Identity, Limits, Listener, Transport
from flowrt.transports.errors import AddressError, HandshakeError
from flowrt.transports.wire.address import expect_scheme
from flowrt.transports.wire.codec import Part, WireError, decode, is_repeat
from flowrt.transports.wire.handshake import NONCE_BYTES, Handshake, check_key

_ALIGNMENT = 64

FrameKind = Literal["message", "taken", "waiting", "close", "broken"]


class SimulatedNetwork:
    """Everything between the nodes of one run."""

    def __init__(self, loop: VirtualLoop, seed: int, conditions: NetworkConditions | None = None) -> None:
        self.loop = loop
        self.conditions = NetworkConditions() if conditions is None else conditions
        self.listeners: dict[str, SimulatedListener] = {}
        self.tiny_nodes: set[str] = set()  # their channels hold a single message each
        self._random = random.Random(f"network {seed}")
        self.addresses, self.channel_numbers = count(1), count(1)
        self._channels: list[SimulatedChannel] = []
        self._links: defaultdict[tuple[str, str], LinkState] = defaultdict(LinkState)
        self._trips: list[tuple[str, str, asyncio.Future[None]]] = []

    def transport(self, scheme: str) -> Transport:
        """The simulated transport under the name of `scheme`: every scheme is this one network."""
        return _class_for(scheme)(self)

    # effects of faults

    def links(self, one: str, other: str) -> list[LinkState]:
        """The directions there and back between two nodes, to put a fault on them."""
        return [self._links[one, other], self._links[other, one]]

    def link(self, source: str, target: str) -> LinkState:
        """The faults on the direction from one node to another."""
        return self._links[source, target]

    def open_channels(self, *nodes: str) -> list[SimulatedChannel]:
        """Ends that are neither closed nor broken, at one of `nodes` (none: anywhere)."""
        self._channels = [channel for channel in self._channels if not channel.closed]
        return [channel for channel in self._channels if not nodes or channel.node in nodes]

    def lose(self, node: str) -> None:
        """Handle death of `node`: remove its listeners, end the channels of its peers after the usual delay, refuse pending connects."""
        for address, listener in list(self.listeners.items()):
            if listener.node == node:
                del self.listeners[address]
        for channel in self.open_channels(node):
            channel.sever()
        for source, target, trip in self._trips:
            if node in (source, target) and not trip.done():
                self.loop.call_at_node(self.loop.time() + self.delay_seconds(), source, set_error, trip, AddressError(f"{node} died"))

    def reset(self, one: str, other: str) -> int:
        """Break every channel between two nodes; messages in flight are lost. Returns the number of channels."""
        between = [channel for channel in self.open_channels(one, other) if {channel.node, channel.other_node} == {one, other}]
        for channel in between:
            self.loop.call_at_node(self.loop.time(), channel.node, channel.reset)
        return len(between) // 2

    # frames

    def depart(self, source: str, target: str, send: Callable[[float, int], None]) -> None:
        """Call `send(delay factor, number of frames)` when the link between the nodes carries frames: now, unless it is cut."""
        state = self._links[source, target]
        if state.num_cuts:
            state.held.append(lambda: self.depart(source, target, send))
        elif state.duplicate_one_in or state.slow_factors:
            num_frames = 1 + any(is_hit(self._random, one_in) for one_in in state.duplicate_one_in)
            send(state.slowness, num_frames)
        else:
            send(1.0, 1)

    async def trip(self, source: str, target: str, num_bytes: int) -> None:
        """Wait as long as `num_bytes` of a handshake take from node to node. Raises AddressError when one of the nodes dies."""
        future: asyncio.Future[None] = self.loop.create_future()
        self._trips.append((source, target, future))

        def send(factor: float, _: int) -> None:
            when = self.loop.time() + factor * self.delay_seconds(num_bytes)
            self.loop.call_at_node(when, target, set_result, future, None)

        try:
            self.depart(source, target, send)
            await future
        finally:
            self._trips.remove((source, target, future))

    def joined(self, *channels: SimulatedChannel) -> None:
        self._channels += channels

    def delay_seconds(self, num_bytes: int = 0) -> float:
        """How long a frame of `num_bytes` takes, drawn for each frame."""
        conditions = self.conditions
        delay = self._random.uniform(conditions.min_delay_seconds, conditions.max_delay_seconds) + num_bytes / conditions.bytes_per_second
        return delay + conditions.slow_seconds if is_hit(self._random, conditions.slow_one_in) else delay

    def duplicates(self) -> bool:
        """Whether the next frame arrives twice."""
        return is_hit(self._random, self.conditions.duplicate_one_in)

    def nonce(self) -> bytes:
        return self._random.randbytes(NONCE_BYTES)

    def shrink(self, limits: Limits, *nodes: str) -> Limits:
        """`limits` of a new channel between `nodes`, now and then with room for a single message."""
        tiny = is_hit(self._random, self.conditions.tiny_one_in) or not self.tiny_nodes.isdisjoint(nodes)
        return msgspec.structs.replace(limits, capacity_messages=1) if tiny else limits


class SimulatedChannel(FlowControlledChannel):
    """One end. `_other` is the end at the peer; only `_arrive_next` of it is ever called, from a timer of its node."""

    scheme = "simulated"
    copies_at_once = True

    def __init__(self, network: SimulatedNetwork, node: str, name: str, limits: Limits, peer: Identity) -> None:
        super().__init__(limits, peer)
        self.node = node
        self._network = network
        self._name = name.encode()
        self._other: SimulatedChannel = self
        self._last_arrival = 0.0
        self._on_the_way: deque[tuple[FrameKind, list[Part]]] = deque()  # frames to this end

    @classmethod
    def pair(
        cls, network: SimulatedNetwork, first: tuple[Identity, str], second: tuple[Identity, str], limits: Limits
    ) -> tuple[SimulatedChannel, SimulatedChannel]:
        """Two connected ends, of `first` and of `second`, each given as (identity, node)."""
        number = next(network.channel_numbers)
        one = cls(network, first[1], f"{number}>", limits, second[0])
        two = cls(network, second[1], f"{number}<", limits, first[0])
        one._other, two._other = two, one
        network.joined(one, two)
        return one, two

    @property
    def other_node(self) -> str:
        return self._other.node

    @property
    def label(self) -> str:
        return f"{self.node} to {self.other_node}"

    @property
    def num_unread(self) -> int:
        """Messages to this end that can still be received."""
        on_the_way = 0 if self.closed else sum(kind == "message" for kind, _ in self._on_the_way)
        return len(self._inbox) + on_the_way

    @property
    def slowness(self) -> float:  # type: ignore[override]
        return self._network.link(self._other.node, self.node).slowness

    def reset(self) -> None:
        """Break this end; messages in flight to it are lost."""
        self._break("the connection was reset")

    def sever(self) -> None:
        """End this end as by a power cut: it sends nothing more; the peer is notified after all messages in flight have arrived."""
        self._send_frame("broken")
        self._break("this end was severed")

    def receive_rest(self) -> None:
        """See StreamChannel: what the dead peer has sent is in the socket's buffer already."""
        while self._on_the_way:
            self._arrive_next()
        self._arrive("broken", [])

    def _send_message(self, parts: list[Part], payload_bytes: int) -> None:
        self._send_frame("message", [parts[0], *_aligned(parts[1:])] if payload_bytes else [*map(bytes, parts)])

    def _send_waiting(self) -> None:
        self._send_frame("waiting")

    def _send_taken(self, messages: int, payload_bytes: int) -> None:
        self._send_frame("taken", [b"%d %d" % (messages, payload_bytes)])

    def _send_frame(self, kind: FrameKind, parts: list[Part] | None = None) -> None:
        network, wire = self._network, parts or []
        num_bytes = sum(map(len, wire))
        network.loop.note(self._name, kind.encode(), *wire)

        def send(factor: float, num_frames: int) -> None:
            for _ in range(num_frames if kind == "message" else 1):
                arrival = network.loop.time() + factor * network.delay_seconds(num_bytes)
                self._last_arrival = max(self._last_arrival, arrival)  # never before an earlier frame
                self._other._on_the_way.append((kind, wire))
                network.loop.call_at_node(self._last_arrival, self._other.node, self._other._arrive_next)

        network.depart(self.node, self._other.node, send)
        if kind == "message" and network.duplicates():
            network.depart(self.node, self._other.node, send)

    def _arrive_next(self) -> None:
        if self._on_the_way:
            self._arrive(*self._on_the_way.popleft())

    def _arrive(self, kind: FrameKind, parts: list[Part]) -> None:
        if self._closed or self._broken is not None:
            return
        try:
            if kind == "message":
                self._arrive_message(parts)
            elif kind == "taken":
                messages, size = bytes(parts[0]).split()
                self._on_taken(int(messages), int(size))
            elif kind == "waiting":
                self._on_waiting()
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
        size = sum(map(len, parts)) - len(parts[0])
        self._receiving.arrived(size)
        self._inbox.append((message, size))
        self._wake_receiver()

    async def _shut(self) -> None:
        self._inbox.clear()
        if not self._ended and self._broken is None:
            self._send_frame("close")


class SimulatedListener(QueuedListener):
    """Accepts channels for the node that made it."""

    def __init__(self, network: SimulatedNetwork, address: str, limits: Limits, key: bytes, identity: Identity) -> None:
        super().__init__(address)
        self.limits, self.key, self.identity = limits, key, identity
        self.node = current_node.get()
        self._network = network

    def _stop(self) -> None:
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]


class SimulatedTransport(Transport):
    """Stands in for any scheme; `SimulatedNetwork.transport` makes one that bears that scheme's name."""

    scheme: ClassVar[str] = "simulated"
    capabilities: ClassVar[Capabilities] = Capabilities(between_hosts="encrypted")

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    async def listen(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Listener:
        check_key(key)
        if not expect_scheme(address, self.scheme):
            address = f"{self.scheme}://simulated-{next(self._network.addresses)}"
        if address in self._network.listeners:
            raise AddressError(f"another listener is at {address} already")
        listener = self._network.listeners[address] = SimulatedListener(self._network, address, limits, key, identity)
        return listener

    async def connect(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Channel:
        check_key(key)
        expect_scheme(address, self.scheme)
        network = self._network
        ours = Handshake("connector", key, identity, limits, scheme=self.scheme, nonce=network.nonce())
        hello = ours.start()
        listener, here = self._find(address), current_node.get()
        await network.trip(here, listener.node, len(hello))
        theirs = Handshake("listener", listener.key, listener.identity, listener.limits, scheme=self.scheme, nonce=network.nonce())
        try:
            response = theirs.receive(hello)
            await network.trip(listener.node, here, len(response))
            proof = ours.receive(response)
            await network.trip(here, listener.node, len(proof))
            theirs.receive(proof)
        except BaseException:
            listener.rejected += 1  # whatever the reason
            raise
        if self._find(address) is not listener:
            raise HandshakeError(f"another listener took {address} during the handshake")
        return self._join(listener, ours, theirs, network.shrink(ours.limits, here, listener.node))

    def _find(self, address: str) -> SimulatedListener:
        listener = self._network.listeners.get(address)
        if listener is None:
            raise AddressError(f"no listener is at {address}")
        if listener.full:
            raise AddressError(f"{address} has {listener.capacity} connections that were not accepted yet")
        return listener

    def _join(self, listener: SimulatedListener, ours: Handshake, theirs: Handshake, limits: Limits) -> Channel:
        first, second = (theirs.peer, current_node.get()), (ours.peer, listener.node)
        near, far = SimulatedChannel.pair(self._network, first, second, limits)
        listener.put(far)
        return near


def _aligned(parts: Sequence[Part]) -> list[memoryview]:
    """Copies at multiples of 64: some kernels give other bits at other alignments, and the seed does not fix addresses."""
    buffer = bytearray(sum(map(len, parts)) + _ALIGNMENT * len(parts))
    views, whole, address = [], memoryview(buffer), ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start = -address % _ALIGNMENT
    for part in parts:
        end = start + len(part)
        view = whole[start:end]
        view[:] = part
        views.append(view)
        start = end + -(address + end) % _ALIGNMENT
    return views


@cache
def _class_for(scheme: str) -> type[SimulatedTransport]:
    """`scheme` is a property of the class in the contract, hence a class per name."""
    return type(f"Simulated[{scheme}]", (SimulatedTransport,), {"scheme": scheme})
