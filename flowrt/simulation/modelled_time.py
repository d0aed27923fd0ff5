"""Checks the modelled times of emulated hardware while a case runs: nothing is faster than its model (I10).

The checks watch the emulation of each worker from outside, and count rows and bytes themselves.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from flowrt.costs.links import profile_of
from flowrt.graph.kinds import kind_of
from flowrt.graph.settings import Emulation
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.world import World
from flowrt.transports.contract import Channel, Limits
from flowrt.transports.emulation.channel import EmulatedChannel, Stamp
from flowrt.transports.emulation.nic import Nic
from flowrt.transports.wire.message import Message

ROUNDING_SECONDS = 1e-7  # of sums of times
MAX_RECENT = 64  # messages of a direction of a NIC whose times are kept
STEP_LAYOUT = "flowrt.operators.step_layout"  # imports torch, so it is imported when used
Key = tuple[Any, Any, int]  # of a message: sender, receiver, number


class ModelledTimeChecks:
    """Checks one run; without an emulation there is nothing to check.

    A computation lasts at least as long as the graph file says for its rows, and is charged that time. A message arrives no earlier than
    its link permits after the call of `send`, and in no interval does a direction of a NIC pass more than it can. A worker counts no more
    modelled time than its calls took.
    """

    def __init__(self, world: World, emulation: Emulation | None) -> None:
        self.now, self._num_seen = world.loop.time, world.num_faults
        self._offered: dict[Key, tuple[float, Any]] = {}  # of messages on their way: when each was first offered, and the sender's channel
        self._recent: dict[Any, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=MAX_RECENT))
        self._wrong: list[str] = []
        if emulation is not None:
            self._emulation = emulation
            world.loop.watchers.append(self._look)

    def _look(self) -> None:
        if self._wrong:
            raise InvariantError("I10", self._wrong[0])

    def watch(self, worker: Any) -> None:
        """Watch a worker, before it loads."""
        if worker.emulated is None:
            return
        emulated, identity = worker.emulated, (worker.start.name, worker.start.incarnation)
        charged, wrap = emulated.charged, emulated.links.wrap
        call = _Call(self._emulation)

        def charged_and_noted(functions: Mapping[str, Any]) -> dict[str, Any]:
            operators = {node.name: node.operator for node in worker.graph.nodes_of(worker.start.name)}
            return {name: call.noting(operators[name], function) for name, function in charged(functions).items()}

        def wrapped_and_watched(plan: Any, channel: Any) -> Any:
            emulated.links.new_channel = partial(_WatchedChannel, self, identity, plan.link)
            return wrap(plan, channel)

        emulated.charged, emulated.links.wrap = charged_and_noted, wrapped_and_watched
        self._watch_compute(emulated.compute, identity[0], call)

    def _watch_compute(self, compute: Any, name: str, call: _Call) -> None:
        run, run_inline = compute.run, compute.run_inline
        busy_seconds = 0.0

        async def watched(label: str, function: Any, bound_seconds: float | None = None) -> Any:
            nonlocal busy_seconds
            call.seconds, begin = 0.0, self.now()
            result = await run(label, function, bound_seconds)
            took, modelled = self.now() - begin, call.seconds * self._emulation.dilation
            busy_seconds += took
            self._num_seen["modelled call"] += modelled > 0
            if took < modelled - ROUNDING_SECONDS:
                self._wrong.append(f"{name}: a call of {label} took {took:.6f} s, modelled are {modelled:.6f} s")
            if abs(compute.charged_seconds - modelled) > ROUNDING_SECONDS:
                self._wrong.append(f"{name}: {label} was charged {compute.charged_seconds:.6f} s, modelled are {modelled:.6f} s")
            if compute.lateness.modelled_seconds > busy_seconds + ROUNDING_SECONDS:
                counted = compute.lateness.modelled_seconds
                self._wrong.append(f"{name} counts {counted:.6f} s of modelled computing, its calls took {busy_seconds:.6f} s")
            return result

        def watched_inline(label: str, function: Any) -> Any:
            call.seconds = 0.0
            result = run_inline(label, function)
            if call.seconds:
                self._wrong.append(f"{name}: {label} took no time, modelled are {call.seconds * self._emulation.dilation:.6f} s")
            return result

        compute.run, compute.run_inline = watched, watched_inline

    def note_sent(self, key: Key, first: float, channel: Any) -> None:
        """A message was first offered to its sender's channel at `first`, and passes the NIC now."""
        self._offered.setdefault(key, (first, channel))

    def note_taken(self, key: Key, link: str, num_bytes: int, is_final: bool) -> None:
        """A message arrives now. `is_final`: the receiver's channel has ended."""
        if (sent := self._offered.pop(key, None)) is not None:
            is_certain = not is_final and not sent[1].closed  # else the times of the sender's NIC are an estimate
            self._check_arrival(key[0], key[1], link, sent[0], num_bytes, is_certain)

    def _check_arrival(self, sender: Any, receiver: Any, link: str, offered: float, num_bytes: int, is_certain: bool) -> None:
        """A message arrives now that was offered to the sender's channel at `offered`."""
        profile, dilation, now = profile_of(link).shared_by(self._emulation.processes_per_nic), self._emulation.dilation, self.now()
        latency = profile.latency_seconds * dilation
        self._num_seen["modelled message"] += 1
        for nic in (("out of", sender, link), ("into", receiver, link)):
            if nic[0] == "out of" and not is_certain:
                continue
            recent = self._recent[nic]
            recent.append((offered, profile.busy_seconds(num_bytes) * dilation))
            work = 0.0
            for since, each in sorted(recent, reverse=True):
                work += each
                if work > now - since - latency + ROUNDING_SECONDS:
                    took = f"{now - since - latency:.6f} s for messages of {work:.6f} s"
                    self._wrong.append(f"{nic[0]} {nic[1][0]} link {link} took {took}, beside its latency")
                    return


class _WatchedChannel(EmulatedChannel):
    """The end of an emulated link at the incarnation `own`."""

    def __init__(self, checks: ModelledTimeChecks, own: tuple[str, str], link: str, inner: Channel, nic: Nic, limits: Limits) -> None:
        super().__init__(inner, nic, limits)
        self._checks, self._own, self._link, self._other = checks, own, link, (self.peer.name, self.peer.incarnation)
        self._first: dict[int, float] = {}  # when a message that waits was first offered, by its id

    def _transmit(self, message: Message) -> bool:
        self._first.setdefault(id(message), self._checks.now())
        return super()._transmit(message)

    def _next_frame(self, message: Message, start: float) -> Message:
        frame = super()._next_frame(message, start)
        first = self._first.pop(id(message), self._checks.now())
        assert isinstance(frame.header, Stamp)
        self._checks.note_sent((self._own, self._other, frame.header.number), first, self)
        return frame

    def _take(self) -> Message | None:
        number = self._inbox[0].number if self._inbox else -1
        message = super()._take()
        if message is not None:
            self._checks.note_taken((self._other, self._own, number), self._link, message.payload_bytes, self._final is not None)
        return message


class _Call:
    """The model's time of the call in progress of one worker."""

    def __init__(self, emulation: Emulation) -> None:
        self._costs = emulation.compute
        self._kv_lengths = import_module(STEP_LAYOUT).KV_LENGTHS
        self.seconds = 0.0  # undilated

    def noting(self, operator: str, function: Any) -> Any:
        """`function`, whose firings count as one batch for each layer."""
        cost = self._costs.get(operator)
        if cost is None:
            return function

        def run(firings: Sequence[Any]) -> Any:
            for layer in {firing.tag.layer for firing in firings}:
                inputs = [firing.inputs for firing in firings if firing.tag.layer == layer]
                if kind_of(operator).holds_experts:
                    pairs = [expert for each in inputs for expert in each["rows"].tensors[2].tolist()]
                    num_rows, extra = len(pairs), cost.expert_seconds * len(set(pairs))
                else:
                    num_rows = sum(max(_num_rows(payload) for payload in each.values()) for each in inputs)
                    lengths = [each["layout"].tensors[self._kv_lengths] for each in inputs] if cost.kv_token_seconds else []
                    extra = cost.kv_token_seconds * sum(int(each.sum()) for each in lengths)
                self.seconds += cost.fixed_seconds + cost.row_seconds * num_rows + extra
            return function(firings)

        return run


def _num_rows(payload: Any) -> int:
    payloads: Iterable[Any] = payload if isinstance(payload, list) else [payload]
    return sum(len(each.tensors[0]) if each.tensors and each.tensors[0].dim() else 1 for each in payloads)
