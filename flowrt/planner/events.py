"""Runs the exchange of a deployment in modelled time, part by part: attention, NICs, servers that take what waits. Pure.

The rules are those of the runtime: there is no barrier; a server that is free takes a batch of the parts that wait, by the selection policy
of its node; a NIC is shared like a fluid by the messages in flight (transports/emulation). Credits never bind here: an edge has more of
them than a group has micro-batches (graph/checks.py).

A rank stands for `weight` equal ranks that act alike, so that large deployments take the time of small ones: each message then stands for
one to or from each of them.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from flowrt.costs.links import LinkProfile
from flowrt.costs.work import FiringLoad
from flowrt.dataflow.selection import SelectionPolicy
from flowrt.planner.deployment import Deployment, RankTimes, RowBytes
from flowrt.planner.parts import Draws, PartLoad, num_experts_of
from flowrt.transports.wire.message import Tag

NOW, AFTER = 0, 1  # of what happens at one time: first messages arrive, then ranks choose what to compute
ROUNDING = 1e-12


class Events:
    """The queue of events. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Callable[..., None], Any]] = []
        self._count = count()

    def at(self, time: float, call: Callable[[Any], None], argument: Any, order: int = NOW) -> None:
        heappush(self._heap, (time, order, next(self._count), call, argument))

    def run(self, is_done: Callable[[], bool]) -> None:
        """Go on until `is_done()`, or until nothing more happens."""
        heap = self._heap
        while heap and not is_done():
            self.now, _, _, call, argument = heappop(heap)
            call(argument)


class NicDirection:
    """One direction of the NIC of a rank: all messages in it share it equally, like a fluid."""

    __slots__ = ("_alarm", "_events", "_finishes", "_num_sharing", "_served", "_time")

    def __init__(self, events: Events) -> None:
        self._events = events
        self._time = self._served = self._num_sharing = 0.0
        self._finishes: list[tuple[float, int, float, Callable[[], None]]] = []
        self._alarm = 0

    def add(self, work: float, weight: float, on_passed: Callable[[], None], then_arm: bool = True) -> None:
        """Let `weight` equal messages begin now, each of which would alone occupy the direction for `work` seconds."""
        self._advance()
        heappush(self._finishes, (self._served + work, next(self._events._count), weight, on_passed))
        self._num_sharing += weight
        if then_arm:
            self.arm()

    def arm(self) -> None:
        """Look again when the next message has passed."""
        self._alarm += 1
        if self._finishes:
            left = max(0.0, self._finishes[0][0] - self._served)
            self._events.at(self._time + left * self._num_sharing, self._look, self._alarm)

    def _advance(self) -> None:
        now = self._events.now
        if self._finishes:
            self._served += (now - self._time) / self._num_sharing
        else:
            self._served = 0.0
        self._time = now

    def _look(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._advance()
        finishes, passed = self._finishes, []
        self._served = max(self._served, finishes[0][0])
        while finishes and finishes[0][0] <= self._served + ROUNDING:
            _, _, weight, on_passed = heappop(finishes)
            self._num_sharing -= weight
            passed.append(on_passed)
        if not finishes:
            self._num_sharing = 0.0
        self.arm()
        for each in passed:
            each()


class SharedDevices:
    """The devices of a node that more ranks share. A call occupies one to its end, as it takes less time than a scheduler's slice; others
    wait in order."""

    def __init__(self, events: Events, num: int) -> None:
        self._events, self._num_free, self._waiting = events, num, deque[tuple[float, Callable[[], None]]]()

    def add(self, seconds: float, then: Callable[[], None]) -> None:
        self._waiting.append((seconds, then))
        self._start()

    def _start(self) -> None:
        while self._num_free and self._waiting:
            self._num_free -= 1
            seconds, then = self._waiting.popleft()
            self._events.at(self._events.now + seconds, self._end, then)

    def _end(self, then: Callable[[], None]) -> None:
        self._num_free += 1
        then()
        self._start()


class Flight:
    """One message on its way. It arrives when both NICs have let it pass."""

    __slots__ = ("_events", "_latency", "_received", "_sent", "_start", "_to", "deliver", "work")

    def __init__(self, events: Events, latency: float, work: float, deliver: Callable[[float], None]) -> None:
        self._events, self._latency, self.work, self.deliver = events, latency, work, deliver
        self._start = events.now
        self._sent = self._received = math.nan

    def on_sent(self) -> None:
        self._sent = self._events.now
        if self._received == self._received:
            self._events.at(max(self._received, self._sent + self._latency), self._arrive, None)

    def on_received(self) -> None:
        self._received = now = self._events.now
        if self._sent == self._sent:
            due = self._sent + self._latency
            if due <= now:
                self._arrive(None)
            else:
                self._events.at(due, self._arrive, None)

    def _arrive(self, _: None) -> None:
        self.deliver(self._events.now - self._start)


@dataclass(slots=True)
class Waiting:
    """A part that waits at a server, or the turn of a micro-batch at its group. A selection policy reads its tag."""

    tag: Tag
    part: PartLoad | None
    respond: Callable[[], None]


@dataclass
class Counts:
    """Seconds of single messages of one kind, from the send to the arrival, or of calls; 0.0 without any."""

    num: int = 0
    total: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def note(self, seconds: float) -> None:
        self.least, self.most = min(self.least, seconds) if self.num else seconds, max(self.most, seconds)
        self.num += 1
        self.total += seconds

    @property
    def mean(self) -> float:
        return self.total / self.num if self.num else 0.0


@dataclass
class Observed:
    """What is counted while `is_on`."""

    is_on: bool = False
    dispatch: Counts = field(default_factory=Counts)
    combine: Counts = field(default_factory=Counts)
    edges: defaultdict[tuple[str, str], Counts] = field(default_factory=lambda: defaultdict(Counts))
    busy: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by rank
    operators: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by operator, times ranks
    expert_calls: Counts = field(default_factory=Counts)


class ModelledRank:
    """One process, or `weight` equal ones: its NIC and what it computes, one call at a time."""

    def __init__(self, events: Events, observed: Observed, name: str, weight: float = 1.0, devices: SharedDevices | None = None) -> None:
        """`devices`: those that it shares with other ranks; None: it has one of its own."""
        self.events, self.observed, self.name, self.weight = events, observed, name, weight
        self.out, self.into, self._devices = NicDirection(events), NicDirection(events), devices
        self.policies: dict[str, SelectionPolicy] = {}
        self.calls: dict[str, Callable[[list[Waiting]], None]] = {}  # begins a call of a node; `end_call` follows
        self._ready: dict[str, list[Waiting]] = {}
        self._is_busy = self._is_looking = False

    def put(self, node: str, waiting: Waiting) -> None:
        """Let a firing of this node wait for its turn."""
        self._ready.setdefault(node, []).append(waiting)
        if not self._is_busy and not self._is_looking:
            self._is_looking = True
            self.events.at(self.events.now, self._look, None, AFTER)

    def spend(self, seconds: float, then: Callable[[Any], None], argument: Any = None) -> None:
        """Compute for so long, then call `then`."""
        if self.observed.is_on:
            self.observed.busy[self.name] += seconds
        if self._devices is None:
            self.events.at(self.events.now + seconds, then, argument)
        else:
            self._devices.add(seconds, partial(then, argument))

    def end_call(self) -> None:
        self._is_busy = False
        if self._ready:
            self._look(None)

    def _look(self, _: None) -> None:
        self._is_looking = False
        if self._is_busy:
            return
        wake_at = math.inf
        for node, waiting in self._ready.items():
            policy = self.policies.get(node)
            if policy is None:
                batch = [waiting[0]]
            else:
                selected = policy.select(waiting, self.events.now)  # type: ignore[arg-type]
                if isinstance(selected, float):
                    wake_at = min(wake_at, selected)
                    continue
                batch = list(selected)  # type: ignore[arg-type]
            taken = set(map(id, batch))
            left = [each for each in waiting if id(each) not in taken]
            del self._ready[node]
            if left:
                self._ready[node] = left  # at the end: other nodes get their turn first
            self._is_busy = True
            self.calls[node](batch)
            return
        if wake_at < math.inf:
            self.events.at(wake_at, self._look, None, AFTER)


@dataclass(slots=True)
class Outgoing:
    """A message to the rank `target`, or several equal ones: `num_sent` from each sender, `num_received` by each receiver, of `num_bytes`
    each. `deliver` is called on arrival with the seconds that it took."""

    target: ModelledRank
    num_bytes: float
    deliver: Callable[[float], None]
    num_sent: float = 1.0
    num_received: float = 1.0


class Exchange:
    """Sends messages between ranks on links of one profile."""

    def __init__(self, events: Events, link: LinkProfile) -> None:
        self._events, self._link = events, link
        self._is_free = not link.seconds(1 << 20)

    def send(self, source: ModelledRank, messages: Iterable[Outgoing]) -> None:
        """Send messages now. What stays in a process arrives at once."""
        flights = []
        for message in messages:
            if self._is_free or (message.target is source and source.weight == 1):
                message.deliver(0.0)
                continue
            flight = Flight(self._events, self._link.latency_seconds, self._link.busy_seconds(message.num_bytes), message.deliver)
            source.out.add(flight.work, message.num_sent, flight.on_sent, then_arm=False)
            flights.append((flight, message))
        if flights:
            source.out.arm()
            self._events.at(self._events.now + self._link.latency_seconds, _enter, flights)


def _enter(flights: Sequence[tuple[Flight, Outgoing]]) -> None:
    for flight, message in flights:
        message.target.into.add(flight.work, message.num_received, flight.on_received)


def request_to(source: ModelledRank, target: ModelledRank, part: PartLoad, size: RowBytes, deliver: Callable[[float], None]) -> Outgoing:
    """The message of a part, of which each of the groups that `source` stands for has an equal share."""
    num_bytes = size.of(part.rows, part.pairs) / (source.weight * part.messages)
    return Outgoing(target, num_bytes, deliver, part.messages * target.weight, part.messages * source.weight)


class ServerNodes:
    """The node `experts` of a rank, and, of a trampoline, `forward` and `merge`. `ranks`: of all servers, by number."""

    def __init__(
        self,
        rank: ModelledRank,
        times: RankTimes,
        policy: SelectionPolicy,
        num_held: float,
        exchange: Exchange,
        ranks: Sequence[ModelledRank],
        sizes: tuple[RowBytes, RowBytes],
    ) -> None:
        self.rank, self._times, self._num_held = rank, times, num_held
        self._exchange, self._ranks, (self._request, self._response) = exchange, ranks, sizes
        rank.policies["experts"] = policy
        rank.calls |= {"experts": self._experts, "forward": self._forward, "merge": self._merge}

    def _experts(self, batch: list[Waiting]) -> None:
        layers: dict[int, list[Waiting]] = {}
        for waiting in batch:
            layers.setdefault(waiting.tag.layer, []).append(waiting)
        self._next_layer([*layers.values()][::-1])

    def _next_layer(self, layers: list[list[Waiting]]) -> None:
        """Each layer is a call of its own; its responses leave before the next one is computed."""
        parts = [waiting.part for waiting in layers[-1] if waiting.part is not None]
        seconds = self._times.seconds("experts", FiringLoad(sum(part.pairs for part in parts), num_experts_of(parts, self._num_held)))
        seconds += self._times.exchange_seconds(2 * len(parts))
        observed = self.rank.observed
        if observed.is_on:
            observed.operators["experts"] += seconds * self.rank.weight
            observed.expert_calls.note(seconds)
        self.rank.spend(seconds, self._end, layers)

    def _end(self, layers: list[list[Waiting]]) -> None:
        for waiting in layers.pop():
            waiting.respond()
        if layers:
            self._next_layer(layers)
        else:
            self.rank.end_call()

    def _forward(self, batch: list[Waiting]) -> None:
        waiting = batch[0]
        part = waiting.part
        assert part is not None
        seconds = self._times.seconds("forward", FiringLoad(part.rows)) + self._times.exchange_seconds(2 + 2 * len(part.behind))
        self.rank.spend(seconds, self._forwarded, waiting)

    def _forwarded(self, waiting: Waiting) -> None:
        part, rank = waiting.part, self.rank
        assert part is not None
        left = [len(part.behind)]

        def on_response(_: float) -> None:
            left[0] -= 1
            if not left[0]:
                rank.put("merge", waiting)

        messages = []
        for inner in part.behind:
            target = self._ranks[inner.server]

            def deliver(_: float, inner: PartLoad = inner, target: ModelledRank = target) -> None:
                def respond() -> None:
                    self._exchange.send(target, [Outgoing(rank, self._response.of(inner.rows, inner.pairs), on_response)])

                target.put("experts", Waiting(waiting.tag, inner, respond))

            messages.append(Outgoing(target, self._request.of(inner.rows, inner.pairs), deliver))
        self._exchange.send(rank, messages)
        rank.end_call()

    def _merge(self, batch: list[Waiting]) -> None:
        waiting = batch[0]
        part = waiting.part
        assert part is not None
        seconds = self._times.seconds("merge", FiringLoad(max(part.rows, sum(inner.rows for inner in part.behind))))
        self.rank.spend(seconds, self._merged, waiting)

    def _merged(self, waiting: Waiting) -> None:
        waiting.respond()
        self.rank.end_call()


@dataclass(frozen=True)
class GroupCall:
    """What a group computes in one call, from the responses of a layer with experts to the parts of the next one: seconds before the parts
    leave, and after. `layer`: that of the parts; None for the end of a step."""

    layer: int | None
    before: float
    after: float = 0.0


@dataclass
class Turn:
    """How far a micro-batch is."""

    step: int = 0
    at: int = 0  # its segment
    num_parts: int = 0  # of the layer
    num_missing: int = 0  # of their responses
    num_rows: float = 0.0  # of all responses of the layer
    sent: float = math.nan  # when its latest parts were sent
    ends: list[float] = field(default_factory=list)  # of its steps
    num_warm: int = 0  # of them, before the measured ones


class GroupNodes:
    """A group: for each micro-batch the segments of a step, again and again. `number`: of the group in `draws`. `layer_seconds` counts the
    times from layer to layer within steps."""

    def __init__(
        self,
        rank: ModelledRank,
        source: str,
        number: int,
        segments: Sequence[Sequence[GroupCall]],
        combine_seconds: Callable[[float, int], float],
        draws: Draws,
        exchange: Exchange,
        servers: Sequence[ModelledRank],
        sizes: tuple[RowBytes, RowBytes],
        deployment: Deployment,
        on_step: Callable[[Turn], None],
    ) -> None:
        self.rank, self._number, self._segments, self._combine_seconds = rank, number, segments, combine_seconds
        self._draws, self._exchange, self._servers, (self._request, self._response) = draws, exchange, servers, sizes
        self._gap_seconds, self._early, self._on_step = deployment.gap_seconds, deployment.early, on_step
        self.turns = [Turn() for _ in segments]
        self.layer_seconds = Counts()
        self._waiting = [Waiting(Tag(source, 0, micro_batch), None, lambda: None) for micro_batch in range(len(segments))]
        rank.calls |= {"embed": self._begin, "combine": self._begin}

    def start_at(self, places: Sequence[float]) -> None:
        """Let each micro-batch begin at this share of its first step."""
        for turn, waiting, segments, place in zip(self.turns, self._waiting, self._segments, places, strict=True):
            turn.at = int(place * len(segments))
            self.rank.put("combine" if turn.at else "embed", waiting)

    def start_after(self, delays: Sequence[float]) -> None:
        """Let each micro-batch begin after so many seconds."""
        for micro_batch, delay in enumerate(delays):
            self.rank.events.at(delay, self._restart, micro_batch)

    def _begin(self, batch: list[Waiting]) -> None:
        micro_batch = batch[0].tag.micro_batch
        turn = self.turns[micro_batch]
        segment = self._segments[micro_batch][turn.at]
        before = segment.before + (self._combine_seconds(turn.num_rows, turn.num_parts) if turn.at else 0.0)
        if self._early and segment.after:
            self.rank.spend(before, self._send_early, (micro_batch, segment.after))
        else:
            self.rank.spend(before + segment.after, self._end, micro_batch)

    def _send_early(self, sending: tuple[int, float]) -> None:
        micro_batch, after = sending
        self._send(micro_batch)
        self.rank.spend(after, self._end_early)

    def _end_early(self, _: None) -> None:
        self.rank.end_call()

    def _end(self, micro_batch: int) -> None:
        turn = self.turns[micro_batch]
        if self._segments[micro_batch][turn.at].layer is not None:
            self._send(micro_batch)
        else:
            events = self.rank.events
            turn.ends.append(events.now)
            turn.step, turn.at, turn.sent = turn.step + 1, 0, math.nan
            self._on_step(turn)
            if self._gap_seconds:
                events.at(events.now + self._gap_seconds, self._restart, micro_batch)
            else:
                self._restart(micro_batch)
        self.rank.end_call()

    def _restart(self, micro_batch: int) -> None:
        self.rank.put("embed", self._waiting[micro_batch])

    def _send(self, micro_batch: int) -> None:
        turn, rank = self.turns[micro_batch], self.rank
        now, observed = rank.events.now, rank.observed
        layer = self._segments[micro_batch][turn.at].layer
        assert layer is not None
        if observed.is_on and turn.sent == turn.sent:
            self.layer_seconds.note(now - turn.sent)
        turn.sent = now
        parts = self._draws.draw(self._number, micro_batch, layer, turn.step + layer)
        turn.num_parts, turn.num_missing, turn.num_rows = len(parts), len(parts), sum(part.rows for part in parts) / rank.weight
        turn.at += 1
        tag = Tag(self._waiting[micro_batch].tag.source, 0, micro_batch, turn.step, layer)

        def on_response(source: ModelledRank, seconds: float) -> None:
            if observed.is_on:
                observed.combine.note(seconds)
                observed.edges[source.name, rank.name].note(seconds)
            turn.num_missing -= 1
            if not turn.num_missing:
                rank.put("combine", self._waiting[micro_batch])

        def arriving(part: PartLoad, target: ModelledRank) -> Callable[[float], None]:
            def respond() -> None:
                num_bytes = self._response.of(part.rows, part.pairs) / (rank.weight * part.messages)
                back = Outgoing(rank, num_bytes, partial(on_response, target), part.messages * rank.weight, part.messages * target.weight)
                self._exchange.send(target, (back,))

            def deliver(seconds: float) -> None:
                if observed.is_on:
                    observed.dispatch.note(seconds)
                    observed.edges[rank.name, target.name].note(seconds)
                target.put("forward" if part.behind else "experts", Waiting(tag, part, respond))

            return deliver

        self._exchange.send(
            rank,
            [
                request_to(rank, target, part, self._request, arriving(part, target))
                for part in parts
                for target in (self._servers[part.server],)
            ],
        )
