"""Checks the modelled times of emulated hardware while a case runs: nothing is faster than its model (I10).

The checks watch the emulation of each worker from outside, and count rows and bytes themselves.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from flowrt.actors.links import LinkPlan
from flowrt.costs.links import profile_of
from flowrt.costs.work import FiringLoad
from flowrt.graph.kinds import kind_of
from flowrt.graph.model import Graph
from flowrt.graph.settings import Emulation
from flowrt.kinds.emulated_costs import CallCosts, MessageBytes, link_share
from flowrt.launcher.model_facts import config_of
from flowrt.seams import Compute
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.world import World
from flowrt.transports.contract import Channel, Limits
from flowrt.transports.emulation.channel import EmulatedChannel, Overtaking, Stamp
from flowrt.transports.emulation.nic import Nic
from flowrt.transports.wire.message import Message

ROUNDING_SECONDS = 1e-7  # of sums of times
MAX_RECENT = 64  # messages of a direction of a NIC whose times are kept
STEP_LAYOUT = "flowrt.operators.step_layout"  # imports torch, so it is imported when used
Key = tuple[Any, Any, int]  # of a message: sender, receiver, number


class ModelledTimeChecks:
    """Checks one run; without an emulation there is nothing to check.

    A computation lasts at least as long as the graph file says for its rows, and is charged that time. What leaves it before its end does
    so no earlier than what came first in it was computed. A message arrives no earlier than
    its link permits after the call of `send`, and in no interval does a direction of a NIC pass more than it can. A worker counts no more
    modelled time than its calls took.
    """

    def __init__(self, world: World, graph: Graph) -> None:
        self.now, self._num_seen = world.loop.time, world.num_faults
        self._offered: dict[Key, tuple[float, Any]] = {}  # of messages on their way: when each was first offered, and the sender's channel
        self._recent: dict[Any, deque[tuple[float, float, float]]] = defaultdict(lambda: deque(maxlen=MAX_RECENT))
        self._wrong: list[str] = []
        if graph.emulation is not None:
            self._graph, self._emulation = graph, graph.emulation
            self._checkpoint = None if graph.model is None else config_of(graph.model)
            self.num_bytes, self._num_like = MessageBytes(graph, self._checkpoint), link_share(graph, self._checkpoint)
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
        call = _Call(self._emulation, CallCosts(self._graph, worker.start.name, self._checkpoint), emulated.compute)

        def charged_and_noted(functions: Mapping[str, Any]) -> dict[str, Any]:
            operators = {node.name: node.operator for node in worker.graph.nodes_of(worker.start.name)}
            return {name: call.noting(operators[name], function) for name, function in charged(functions).items()}

        def wrapped_and_watched(plan: Any, channel: Any) -> Any:
            emulated.links.new_channel = partial(_WatchedChannel, self, identity, plan)
            return wrap(plan, channel)

        emulated.charged, emulated.links.wrap = charged_and_noted, wrapped_and_watched
        self._watch_compute(emulated.compute, identity[0], call)

    def _watch_compute(self, compute: Any, name: str, call: _Call) -> None:
        run, run_inline, at_modelled_time = compute.run, compute.run_inline, compute.at_modelled_time
        begin = busy_seconds = 0.0
        leaving = deque[float]()  # when what leaves the call in progress before its end may be sent

        async def watched(label: str, function: Any, bound_seconds: float | None = None) -> Any:
            nonlocal begin, busy_seconds
            call.seconds, begin = 0.0, self.now()
            leaving.clear()
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

        def watched_early(send: Any) -> Any:
            def checked(outputs: Any) -> None:
                early_seconds = leaving.popleft() - self.now()
                self._num_seen["modelled early send"] += 1
                if early_seconds > ROUNDING_SECONDS:
                    self._wrong.append(f"{name}: outputs left a call {early_seconds:.6f} s before what came first was computed")
                send(outputs)

            hold = at_modelled_time(checked)

            def watched_hold(outputs: Any) -> None:
                leaving.append(begin + call.seconds * self._emulation.dilation)
                hold(outputs)

            return watched_hold

        compute.run, compute.run_inline, compute.at_modelled_time = watched, watched_inline, watched_early

    def note_sent(self, key: Key, first: float, channel: Any) -> None:
        """A message was first offered to its sender's channel at `first`, and passes the NIC now."""
        self._offered.setdefault(key, (first, channel))

    def note_overtaking(self) -> None:
        self._num_seen["modelled overtaking message"] += 1

    def note_taken(self, key: Key, plan: LinkPlan, num_bytes: float, is_final: bool) -> None:
        """A message arrives now. `is_final`: the receiver's channel has ended."""
        if (sent := self._offered.pop(key, None)) is not None:
            is_certain = not is_final and not sent[1].closed  # else the times of the sender's NIC are an estimate
            self._check_arrival(key[0], key[1], plan, sent[0], num_bytes, is_certain)

    def _check_arrival(self, sender: Any, receiver: Any, plan: LinkPlan, offered: float, num_bytes: float, is_certain: bool) -> None:
        """A message arrives now that was offered to the sender's channel at `offered`."""
        link, now = plan.link or "", self.now()
        profile = profile_of(link).shared_by(self._emulation.processes_per_nic)
        dilation = self._emulation.dilation * (1 if plan.carries_kv else self._num_like)
        latency = profile.latency_seconds * dilation
        self._num_seen["modelled message"] += 1
        # At the receiver's NIC a message is for its latency later; links of one kind may differ in it.
        for nic, shift in ((("out of", sender, link), 0.0), (("into", receiver, link), latency)):
            if not shift and not is_certain:
                continue
            recent = self._recent[nic]
            recent.append((offered + shift, profile.busy_seconds(num_bytes) * dilation, now - latency + shift))
            work, passed = 0.0, 0.0
            for since, each, passed_by in sorted(recent, reverse=True):
                work, passed = work + each, max(passed, passed_by)
                if work > passed - since + ROUNDING_SECONDS:
                    took = f"{passed - since:.6f} s for messages of {work:.6f} s"
                    self._wrong.append(f"{nic[0]} {nic[1][0]} link {link} took {took}, beside its latency")
                    return


class _WatchedChannel(EmulatedChannel):
    """The end of an emulated link at the incarnation `own`."""

    def __init__(
        self,
        checks: ModelledTimeChecks,
        own: tuple[str, str],
        plan: LinkPlan,
        inner: Channel,
        nic: Nic,
        limits: Limits,
        has_priority: Callable[[Message], bool],
    ) -> None:
        super().__init__(inner, nic, limits, has_priority)
        self._checks, self._own, self._plan, self._other = checks, own, plan, (self.peer.name, self.peer.incarnation)
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

    def _overtaking_frame(self, message: Message, start: float, passed: float) -> Message:
        frame, now = super()._overtaking_frame(message, start, passed), self._checks.now()
        assert isinstance(frame.header, Overtaking)
        self._checks.note_overtaking()
        self._checks.note_sent((self._own, self._other, frame.header.number), now, self)
        return frame

    def _take(self) -> Message | None:
        number = self._inbox[0].number if self._inbox else -1
        message = super()._take()
        if message is not None:
            num_bytes, is_final = self._checks.num_bytes(message), self._final is not None
            self._checks.note_taken((self._other, self._own, number), self._plan, num_bytes, is_final)
        return message


class _Call:
    """The model's time of the call in progress of one worker."""

    def __init__(self, emulation: Emulation, on_device: CallCosts, compute: Compute) -> None:
        self._costs, self._on_device, self._compute = emulation.compute, on_device, compute
        self._layout = import_module(STEP_LAYOUT).StepLayout
        self.seconds = 0.0  # undilated

    def noting(self, operator: str, function: Any) -> Any:
        """`function`, whose firings count as one batch for each layer."""
        cost = self._costs.get(operator)
        if not self._on_device.charges(operator):
            return function

        def run(firings: Sequence[Any]) -> Any:
            for layer in {firing.tag.layer for firing in firings}:
                inputs = [firing.inputs for firing in firings if firing.tag.layer == layer]
                load = self._load(operator, inputs)
                if cost is None:
                    seconds = self._on_device.seconds(operator, layer, load, len(inputs))
                else:
                    rest = cost.expert_seconds * load.num_experts + cost.kv_token_seconds * load.num_kv_tokens
                    seconds = cost.fixed_seconds + cost.row_seconds * load.num_rows + rest
                self.seconds += seconds * self._compute.slowness
            return function(firings)

        return run

    def _load(self, operator: str, inputs: Sequence[Mapping[str, Any]]) -> FiringLoad:
        if kind_of(operator).holds_experts:
            pairs = [expert for each in inputs for expert in each["rows"].tensors[2].tolist()]
            return FiringLoad(len(pairs), len(set(pairs)))
        if "sampling" in kind_of(operator).inputs:
            return FiringLoad(sum(tensors[0].shape[1] + tensors[-1].shape[1] for tensors in (each["sampling"].tensors for each in inputs)))
        num_rows = sum(max(_num_rows(payload) for payload in each.values()) for each in inputs)
        if "layout" not in kind_of(operator).inputs:
            return FiringLoad(num_rows)
        layouts = [self._layout.from_tensors(each["layout"].tensors) for each in inputs]
        lengths = [pair for layout in layouts for pair in zip(layout.query_lengths, layout.kv_lengths, strict=True)]
        scores = sum(sum(range(kv - query + 1, kv + 1)) for query, kv in lengths)
        return FiringLoad(num_rows, 0, sum(kv for _, kv in lengths), scores)


def _num_rows(payload: Any) -> int:
    payloads: Iterable[Any] = payload if isinstance(payload, list) else [payload]
    return sum(len(each.tensors[0]) if each.tensors and each.tensors[0].dim() else 1 for each in payloads)
