"""The source of an attention worker: carries out the steps that its engine decides.

Group turns control messages into engine events, steps into emitted tags, and sampled tokens into messages for the gateway.
flowrt/engine makes the decisions (pure); the runner computes. Each DP group has one: a pipeline that schedules its steps without
any other process (xDeepServe section 4.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from flowrt.actors.control import (
    Cancel,
    Control,
    Crashed,
    Drain,
    Drained,
    Ended,
    KvCompleted,
    KvLost,
    KvOffer,
    KvPulled,
    Prefilled,
    Prefilling,
    Request,
    Statistics,
    Submit,
    Tokens,
)
from flowrt.actors.outputs import Logprobs, TokenEvent
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.runner import Runner
from flowrt.engine.engine import Decision, Engine, EngineSnapshot, EngineStatistics, StartStep, reports_of
from flowrt.engine.sequence import Sequence
from flowrt.engine.transfers import Hold
from flowrt.errors import OperatorError
from flowrt.exchange.expert_client import ExpertClient
from flowrt.exchange.kv_transfer import KvPack, KvUnpack
from flowrt.graph.model import Node
from flowrt.seams import Compute, Running, ThreadCompute
from flowrt.transports.wire.message import Tag
from flowrt.workers.constraint_work import Constraints, ConstraintWork
from flowrt.workers.model_nodes import batch_payloads, sampling_payload

MAX_STEPS_OF_ONE = 256  # the latest, which are remembered


class Group:
    """Connects one engine to its runner and the client of its expert servers. All methods but `run` are synchronous. `build` returns the
    constraints of a request, in a thread that `new_compute` makes."""

    def __init__(
        self,
        node: Node,
        incarnation: str,
        engine: Engine,
        runner: Runner,
        send: Callable[[Control], None],
        when_sent: Callable[[Callable[[], None]], None],
        page_size: int,
        device: torch.device,
        client: ExpertClient | None = None,
        pack: KvPack | None = None,
        unpack: KvUnpack | None = None,
        now: Callable[[], float] = lambda: 0.0,
        build: Callable[[Request], Constraints] = lambda request: {},
        new_compute: Callable[[str], Compute] = ThreadCompute,
    ) -> None:
        self._node = node.name
        self._new_kv_offer = partial(KvOffer, node.process, incarnation, is_strict=engine.is_strict)
        self._source = f"{node.name}@{incarnation}"
        self._num_layers: int = node.options["num_layers"]
        self._engine = engine
        self._runner = runner
        self._send, self._when_sent = send, when_sent
        self._page_size = page_size
        self._device = device
        self._client, self._pack, self._unpack = client, pack, unpack
        self._now = now
        self._is_draining = self._is_writing_stale = False
        self._starts: deque[StartStep] = deque()  # steps that wait until all messages have left
        self._alone: Sequence | None = None  # the suspect that runs alone, as reported
        self._steps_of_one: dict[tuple[int, int, int], str] = {}  # (epoch, micro-batch, step) -> the request that has all its rows
        self.on_begin: Callable[[], None] = lambda: None  # called with each step that begins
        self._refusal: str | None = None
        self._work = WorkTimes()
        self._constraint_work = ConstraintWork(build, lambda start: sampling_payload(start.batch, device), new_compute)

    @property
    def is_idle(self) -> bool:
        """Whether no request is alive and no step runs."""
        return self._engine.idle and self._constraint_work.is_idle

    @property
    def running(self) -> tuple[Running | None, ...]:
        """The running call of each thread beside the compute thread."""
        return self._constraint_work.running

    def snapshot(self) -> GroupSnapshot:
        offers = {} if self._pack is None else self._pack.offers()
        return GroupSnapshot(self._source, self._engine.snapshot(), self._engine.statistics(), offers, self._alone)

    def leftovers(self) -> list[str]:
        """What is left when all requests have ended and no message is in flight."""
        left = [f"engine: {line}" for line in self._engine.leftovers()]
        return left if self._pack is None else left + self._pack.leftovers()

    async def run(self) -> None:
        """Do what the group does beside its loop, until cancelled."""
        await self._constraint_work.run(self._act, self._emit_sampling, self._fail_sampling)

    def with_counts(self, statistics: Statistics) -> Statistics:
        """`statistics` with the counts of the engine."""
        self._note_work()
        engine = self._engine.statistics()
        return msgspec.structs.replace(
            statistics,
            num_steps=engine.step_rows.count,
            num_rows=int(engine.step_rows.total),
            step_row_counts=tuple(engine.step_rows.counts),
            num_preemptions=engine.num_preemptions,
            num_prefix_queries=engine.num_prefix_queries,
            num_prefix_hits=engine.num_prefix_hits,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_pages=engine.num_pages,
            num_free_pages=engine.num_free_pages,
            num_micro_batches=engine.num_micro_batches,
            working_seconds=self._work.working_seconds,
            bubble_seconds=self._work.bubble_seconds,
        )

    def _note_work(self) -> None:
        self._work.note(self._now(), self._runner.statistics.compute_seconds, self._engine.is_working)

    def on_control(self, control: Control) -> None:
        """Handle Submit, Cancel, KvCompleted and Drain; ignore all other messages."""
        if not self._constraint_work.keep(control):
            self._act(control)

    def _act(self, control: Control, constraints: Constraints | None = None, error: str | None = None) -> None:
        match control:
            case Submit(request) if self._refusal is not None:
                self._send(Ended(request.id, request.attempt, "error", self._refusal))
            case Submit(request):
                self._carry_out(self._engine.submit(request, constraints or {}, error))
            case Cancel(request_id, attempt, choice):
                self._carry_out(self._engine.cancel(request_id, attempt, choice))
            case KvCompleted():
                self._carry_out(self._engine.complete_kv(control))
            case Drain():
                self._engine.drain()
                self._is_draining = True
                self._carry_out([])

    def roll_back(self) -> None:
        """Drop the running steps and compute their rows again in a new epoch."""
        self._engine.roll_back()
        self._begin_epoch([])

    def drop_cancelled(self) -> None:
        """Drop the step of a suspect alone that was cancelled: its parts, which may crash another server, are not sent again."""
        if self._alone is not None and self._alone.cancelled and self._alone.in_step:
            self.roll_back()

    def fail_step(self, tag: Tag, error: OperatorError) -> None:
        """Handle a failed step of this group: compute it once more, then end its requests."""
        if self._pack is not None and tag.source == self._source:
            self._pack.on_failed(tag, str(error))
        self.fail_steps([tag], f"a step of this request failed twice: {error}")

    def fail_steps(self, tags: Collection[Tag], error: str, *, crashed: bool = False, left: Collection[Tag] = ()) -> None:
        """Handle steps of this group that failed, or that may have crashed a server. `left`: rolled back before, with parts there; unless
        all their rows are of the suspect that runs alone, they may be the cause, so that the crash does not count for it."""
        steps = {(tag.micro_batch, tag.step) for tag in tags if tag.source == self._source and tag.epoch == self._engine.epoch}
        if steps:
            alone = None if self._alone is None else self._alone.request.id
            counts = all(
                self._steps_of_one.get((tag.epoch, tag.micro_batch, tag.step)) == alone for tag in left if tag.source == self._source
            )
            epoch, decisions = self._engine.epoch, self._engine.fail_steps(steps, error, crashed=crashed, counts=counts)
            if self._engine.epoch != epoch:  # else these steps have ended, and nothing was rolled back
                self._begin_epoch(decisions)

    def refuse(self, error: str) -> None:
        """End every request with this error, and each new one until `accept`. A repeated call replaces the error."""
        refusing, self._refusal = self._refusal is not None, error
        if refusing:
            return
        self._begin_epoch(self._engine.fail_all(error))

    def _begin_epoch(self, decisions: ListLike[Decision]) -> None:
        self._starts.clear()
        self._runner.roll_back(self._source, self._engine.epoch)
        self._is_writing_stale = True
        self._runner.when_idle(self._end_stale)
        if self._client is not None:
            self._client.roll_back(self._source, self._engine.epoch)
        self._carry_out(decisions)

    def _end_stale(self) -> None:
        self._is_writing_stale = False
        self._begin_pulls()

    def _begin_pulls(self) -> None:
        """Begin the transfers that were admitted. After a rollback not before the call that still runs has ended: it may write to pages
        that are theirs now."""
        if self._unpack is not None and not self._is_writing_stale:
            for pull in self._engine.new_pulls():
                self._unpack.begin(pull.request_id, pull.attempt, pull.kv, pull.pages, pull.first, pull.slot)

    def on_pulled(self, request_id: str, attempt: int) -> None:
        """The KV of a request's prompt is in its pages."""
        self._carry_out(self._engine.pulled(request_id, attempt))

    def on_pull_failed(self, request_id: str, attempt: int, why: str) -> None:
        self._carry_out(self._engine.pull_failed(request_id, attempt, why))

    def accept(self) -> None:
        self._refusal = None

    def on_step_end(self, firing: Firing) -> None:
        """Handle the tokens of a step. The runner has already dropped steps of an older epoch."""
        tag = firing.tag
        tokens, *logprobs = (tensor.tolist() for tensor in firing.inputs["tokens"].tensors)
        values = [Logprobs(own, tuple(zip(ids, top, strict=True))) for own, ids, top in zip(*logprobs, strict=True)]
        step = Tag(tag.source, tag.epoch, tag.micro_batch, tag.step - 1)
        is_degraded, not_finite = False, ""
        if self._client is not None:
            is_degraded, not_finite = self._client.servers.omitted.take_degraded(step), self._client.take_not_finite(step)
        self._carry_out(self._engine.step_done(tag.micro_batch, step.step, tokens, values, is_degraded, not_finite, self._now()))

    def _carry_out(self, decisions: ListLike[Decision]) -> None:
        tokens = [each for each in decisions if isinstance(each, TokenEvent)]
        small = tuple(each for each in tokens if not each.prompt_logprobs)
        for message in (small, *((each,) for each in tokens if each.prompt_logprobs)):
            if message:
                self._send(Tokens(message))
        for each in decisions:
            match each:
                case Ended() | Crashed() | KvPulled() | KvLost():
                    self._send(each)
                case Hold():
                    self._offer(each)
        if self._pack is not None:
            self._update_offers(self._pack)
            self._pack.extras.forget_ended(self._engine.is_alive)
        if self._unpack is not None:
            self._unpack.drop_ended(self._engine.is_pulling)
        self._note_work()
        self._when_sent(self._start_steps)
        if self._is_draining and self._engine.drained:
            self._is_draining = False
            self._send(Drained())

    def _start_steps(self) -> None:
        """Start the next steps, now that all messages have left. A step may crash this process. Then the gateway has every token that the
        step was computed from, so the next attempt computes them again. It also knows whether the step was of a suspect alone."""
        if not self._starts:
            self._starts.extend(self._engine.next_steps(self._now()))
            self._note_work()
            self._begin_pulls()
        while self._starts:
            alone = self._starts[0].alone
            reports, self._alone = reports_of(self._alone, alone), alone
            if reports:
                for report in reports:
                    self._send(report)
                self._when_sent(self._start_steps)
                return
            self._emit(self._starts.popleft())
        if self._pack is not None:
            self._update_offers(self._pack)

    def _offer(self, hold: Hold) -> None:
        if self._pack is None:
            raise ValueError(f"{self._node}: {hold.request_id} is for a prefill worker")
        self._update_offers(self._pack)
        number = self._pack.number_of(hold.request_id, hold.attempt)
        self._send(Prefilled(hold.request_id, hold.attempt, self._new_kv_offer(number, hold.num_tokens, hold.is_degraded)))

    def _update_offers(self, pack: KvPack) -> None:
        for prompt, number in pack.update(self._engine.offered_prompts()):
            if not prompt.is_complete:
                kv = self._new_kv_offer(number, prompt.num_tokens, is_complete=False)
                self._send(Prefilling(prompt.request_id, prompt.attempt, kv))

    def _tag_of(self, start: StartStep, layer: int = 0) -> Tag:
        return Tag(self._source, start.epoch, start.micro_batch, start.step, layer)

    def _emit(self, start: StartStep) -> None:
        """Emit a step's tags: the layout for every layer, the sampling rows, and last the tokens, which start the step. Sampling rows with
        masks follow later."""
        self.on_begin()
        if start.request_id is not None:
            self._steps_of_one[start.epoch, start.micro_batch, start.step] = start.request_id
            if len(self._steps_of_one) > MAX_STEPS_OF_ONE:
                del self._steps_of_one[next(iter(self._steps_of_one))]
        if self._client is not None:
            self._client.computes_alone = start.alone is not None
        if self._pack is not None:
            last_rows = dict(zip(start.batch.sampled_requests, start.batch.sample_rows, strict=True))
            self._pack.extras.begin_step((start.epoch, start.micro_batch, start.step), last_rows)
        payloads = batch_payloads(start.batch, self._page_size, self._device)
        tags = [self._tag_of(start, layer) for layer in range(self._num_layers)]
        for tag in tags:
            self._runner.emit(self._node, tag, {"layout": payloads["layout"]})
        if any(sample.constraint is not None for sample in start.batch.samples):
            self._runner.emit(self._node, tags[0], {"tokens": payloads["tokens"]})
            self._constraint_work.compute(start)
        else:
            payloads["sampling"] = sampling_payload(start.batch, self._device)
            self._runner.emit(self._node, tags[0], {"sampling": payloads["sampling"], "tokens": payloads["tokens"]})

    def _emit_sampling(self, start: StartStep, payload: Payload) -> None:
        """Emit the sampling rows of a step that has begun, when its masks are there, unless it was rolled back meanwhile."""
        if start.epoch == self._engine.epoch:
            self._runner.emit(self._node, self._tag_of(start), {"sampling": payload})

    def _fail_sampling(self, start: StartStep, error: str) -> None:
        self.fail_steps([self._tag_of(start)], f"a step of this request failed twice: {error}")


@dataclass(frozen=True)
class GroupSnapshot:
    """What a group has, for observers. `source`: of its tags. `offers`: the number of the offer of each prompt, by request and attempt.
    `alone`: the suspect that runs alone."""

    source: str
    engine: EngineSnapshot
    counts: EngineStatistics
    offers: Mapping[tuple[str, int], int]
    alone: Sequence | None


class WorkTimes:
    """`working_seconds`: time in which sequences ran. `bubble_seconds`: of it, time in which the process did not compute, because every
    micro-batch waited for experts, for a message, or for its next step. Both only rise."""

    def __init__(self) -> None:
        self.working_seconds = self.bubble_seconds = 0.0
        self._idle_seconds = 0.0  # below bubble_seconds while a computation that began before counts at its end
        self._since = self._computed = 0.0
        self._is_working = False

    def note(self, now: float, compute_seconds: float, is_working: bool) -> None:
        """From `now` on, in seconds, sequences run or do not. `compute_seconds`: what the process has computed since its start."""
        if self._is_working:
            passed = now - self._since
            self.working_seconds += passed
            self._idle_seconds += passed - (compute_seconds - self._computed)
            self.bubble_seconds = max(self.bubble_seconds, self._idle_seconds)
        self._since, self._computed, self._is_working = now, compute_seconds, is_working
