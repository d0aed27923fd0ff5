"""The engine of one group: turns requests, cancels and finished steps into tokens, ends and new steps.

It is pure (no await, no torch, no clock): the same events in the same order give the same decisions. A worker passes it an event, carries
out the returned decisions in order, and starts the steps that `next_steps()` returns. The scheduler selects the sequences of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from itertools import islice

from flowrt.actors.control import Crashed, Ended, KvCompleted, KvLost, KvPulled, Request, RunsAlone
from flowrt.actors.outputs import Logprobs, TokenEvent
from flowrt.engine.batch import Batch, Part, build_batch, num_scores, produces_token
from flowrt.engine.constraint import Constraint
from flowrt.engine.group_memory import GroupMemory
from flowrt.engine.micro_batches import MicroBatchCount
from flowrt.engine.offered_prompt import OfferedPrompt
from flowrt.engine.scheduler import Scheduler
from flowrt.engine.sequence import Sequence, SequenceState
from flowrt.engine.transfers import Hold, Pull, offered_prompts
from flowrt.engine.validation import refusal
from flowrt.graph.settings import GraphLimits
from flowrt.histogram import Histogram
from flowrt.reliability.fault_table import STEP_AGAIN, FaultKind, Redo, redo
from flowrt.sampling_params import FinishReason

MAX_REMEMBERED = 4096  # ended or cancelled attempts: a repeated Submit or Cancel of one does nothing

NOT_FINITE = "the model's logits for output token {} were not finite (NaN or infinity) twice{}; check the weights, or run in a wider dtype"


Decision = TokenEvent | Ended | Crashed | KvPulled | KvLost | Hold  # for the gateway


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts since the start, and current numbers (waiting, running, free pages)."""

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_pages: int
    step_rows: Histogram  # rows of each committed step
    num_preemptions: int
    num_prefix_queries: int  # tokens looked up in the prefix cache
    num_prefix_hits: int  # those found
    num_micro_batches: int  # in use


@dataclass(frozen=True, slots=True)
class StartStep:
    """Run this batch, then call `step_done`, `fail_steps` or `roll_back`.

    The steps of a micro-batch are numbered 0, 1, 2 ...; a rollback does not reset the numbers, so a late response to a step of an older
    epoch is never taken for one to a newer step. The step's tags carry (epoch, micro_batch, step).
    """

    epoch: int
    micro_batch: int
    step: int
    batch: Batch
    request_id: str | None = None  # of its one request; None: it has rows of several
    alone: Sequence | None = None  # its one sequence, a suspect of this group or of the gateway; no other step of the group runs


def reports_of(before: Sequence | None, alone: Sequence | None) -> list[RunsAlone]:
    """What the gateway must know before a step of `alone` (None: of several) runs, which follows steps of `before`. One that is computed
    again waits for memory, and a suspect that is older goes first: other rows may then be the cause of a crash."""
    if alone is before:
        return []
    over = [RunsAlone(before.request.id, before.request.attempt, is_over=True)] if before is not None and before.runs_alone else []
    return over + ([RunsAlone(alone.request.id, alone.request.attempt)] if alone is not None else [])


@dataclass(frozen=True, slots=True)
class RunningStep:
    number: int
    parts: list[Part]
    batch: Batch
    num_logprobs: int  # of samples and tokens of prompts
    began: float  # in seconds


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What an engine has, for observers: they change none of it, and read it before the engine goes on. `steps`: by micro-batch. `claim`:
    the sequence that gets the next free page."""

    running: ListLike[Sequence]
    pulling: ListLike[Sequence]
    held: ListLike[Sequence]
    waiting: ListLike[Sequence]
    memory: GroupMemory
    steps: ListLike[RunningStep | None]
    claim: Sequence | None
    page_size: int


class Engine:
    """`max_num_seqs`, `kv_pages` and so on of `limits` are this group's; `chunk_tokens` > 0 is for strict numerics (scheduler.py).
    `streams`: groups may pull the KV of a prompt while this prefill worker computes it. `has_recurrent_layers`: the model does."""

    def __init__(
        self,
        limits: GraphLimits,
        num_micro_batches: int,
        max_position_embeddings: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        *,
        chunk_tokens: int = 0,
        streams: bool = False,
        has_recurrent_layers: bool = False,
    ) -> None:
        self._limits, self._streams, self.is_strict = limits, streams, chunk_tokens > 0
        self._max_position_embeddings = max_position_embeddings
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self._scheduler = Scheduler(limits, num_micro_batches, chunk_tokens, limits.num_state_slots if has_recurrent_layers else 0)
        self._micro_batches = MicroBatchCount(num_micro_batches) if limits.dynamic_micro_batches else None
        self._alive: dict[str, list[Sequence]] = {}  # by request: the choices that have not ended of its one attempt that has not
        self._ended: dict[tuple[str, int], bool] = {}  # (request, attempt) -> its ends were sent; oldest first, bounded
        self._steps: list[RunningStep | None] = [None] * num_micro_batches
        self._next_step = [0] * num_micro_batches
        self._epoch = 0
        self._draining = False
        self._begun: set[tuple[str, int]] = set()  # attempts whose pull was returned by `new_pulls`
        self._num_sequences = 0

    @property
    def epoch(self) -> int:
        """The number of rollbacks of this group. Receivers drop messages of older epochs."""
        return self._epoch

    @property
    def idle(self) -> bool:
        """Whether no request is alive and no step runs."""
        return not self._alive and not any(self._steps)

    @property
    def is_working(self) -> bool:
        """Whether sequences run: a step does, or one is due."""
        return bool(self._scheduler.running)

    @property
    def drained(self) -> bool:
        return self._draining and self.idle

    # Requests

    def submit(self, request: Request, constraints: Mapping[int, Constraint] = {}, error: str | None = None) -> list[Decision]:
        """Take a request. One that cannot be served ends at once with reason "error"; a repeated one is ignored. `constraints`: those of
        its choices, which know the committed tokens. `error`: why there are none."""
        key = (request.id, request.attempt)
        known = self._alive.get(request.id, [])
        attempt = known[0].request.attempt if known else None
        if self._ended.get(key) or attempt == request.attempt:
            return []
        if key in self._ended or (attempt is not None and attempt > request.attempt):
            return [self._refuse(request, "abort")]
        # The gateway ignores the older attempt of a request that was placed again.
        decisions: list[Decision] = [self._end(sequence, "abort") for sequence in list(known)]
        error = refusal(request, self._limits, self._max_position_embeddings, self._vocab_size) or error
        if error is None and self._draining:
            error = "the group is draining and takes no new requests"
        if error is not None:
            return [*decisions, self._refuse(request, "error", error)]
        return decisions + self._begin(request, constraints)

    def _begin(self, request: Request, constraints: Mapping[int, Constraint]) -> list[Decision]:
        choices = [choice for choice in range(request.params.n) if choice not in request.ended_choices]
        if request.stage == "prefill":
            del choices[1:]  # one sequence has all
        siblings: list[Sequence] = []
        for choice in choices:
            self._num_sequences += 1
            siblings.append(Sequence(request, self._num_sequences, choice, self._eos_token_ids, constraints.get(choice), siblings))
        self._alive[request.id] = siblings
        decisions, all_choices = list[Decision](), list(siblings)
        for sequence in all_choices:
            self._scheduler.add(sequence)
            if (reason := sequence.end_reason()) is not None:  # its committed tokens are its whole output
                decisions.append(self._end(sequence, reason))
        return decisions + _unused_kv(each for each in all_choices if each not in siblings)

    def cancel(self, request_id: str, attempt: int, choice: int | None = None) -> list[Decision]:
        """End an attempt, or one choice of it, with reason "abort". No-op after the attempt ended. A cancel that arrives before its Submit
        is remembered. Its pages are free at once, or when the step that it takes part in is over."""
        siblings = self._alive.get(request_id, [])
        if siblings and siblings[0].request.attempt == attempt:
            for sequence in siblings:
                sequence.open_choices.difference_update(sequence.open_choices if choice is None else (choice,))
            ended = [sequence for sequence in siblings if not sequence.open_choices]
            return [*[self._end(sequence, "abort") for sequence in ended], *_unused_kv(ended)]
        if choice is None and (request_id, attempt) not in self._ended:
            self._remember((request_id, attempt), was_reported=False)
        return []

    def drain(self) -> None:
        """Refuse new requests from now on and finish the accepted ones; then `drained` is true."""
        self._draining = True

    # Steps

    def next_step(self, micro_batch: int, now: float = 0.0) -> StartStep | None:
        """Begin the next step of the micro-batch. None when one of its steps runs, or when it has nothing to do now. `now`: in seconds."""
        if self._steps[micro_batch] is not None:
            return None
        parts = self._scheduler.schedule(micro_batch)
        if not parts:
            return None
        batch = build_batch(parts, self._limits.page_size, is_strict=self.is_strict)
        number = self._next_step[micro_batch]
        self._next_step[micro_batch] += 1
        num_logprobs = sum(each.params.logprobs is not None for each in batch.samples)
        self._steps[micro_batch] = RunningStep(number, parts, batch, num_logprobs + len(batch.scores), now)
        first = parts[0][0]
        request_id = first.request.id if all(each.request is first.request for each, _ in parts) else None
        return StartStep(self._epoch, micro_batch, number, batch, request_id, first if first.runs_alone else None)

    def next_steps(self, now: float = 0.0) -> list[StartStep]:
        """Begin a step in every free micro-batch that has something to do. Call it after every event: one micro-batch may wait for pages
        that an event of another one frees."""
        return [step for each in range(len(self._steps)) if (step := self.next_step(each, now)) is not None]

    def new_pulls(self) -> list[Pull]:
        """The transfers that the steps which began last have admitted."""
        pulling = {(each.request.id, each.request.attempt): each for each in self._scheduler.pulling}
        new = [key for key in pulling if key not in self._begun]
        self._begun = {*pulling}
        found = [(key, pulling[key]) for key in new]
        return [
            Pull(*key, each.kv, tuple(each.holding.pages), each.num_computed_tokens, each.holding.pulled_slot)
            for key, each in found
            if each.kv is not None
        ]

    def is_alive(self, request_id: str, attempt: int) -> bool:
        return any(each.request.attempt == attempt for each in self._alive.get(request_id, ()))

    def is_pulling(self, request_id: str, attempt: int) -> bool:
        """Whether the attempt still waits for its KV."""
        return self._pulling(request_id, attempt) is not None

    def pulled(self, request_id: str, attempt: int) -> list[Decision]:
        """The KV of a prompt is in the pages of the attempt, all of it checked. No-op for an attempt that does not wait for it."""
        if (sequence := self._pulling(request_id, attempt)) is None:
            return []
        sequence.is_pulled = True
        return self._use_pulled(sequence)

    def complete_kv(self, completed: KvCompleted) -> list[Decision]:
        """The prefill worker has computed the prompt of an attempt that pulls it. No-op for an attempt that knows this or has ended."""
        sequence = next(iter(self._alive.get(completed.request_id, ())), None)
        if sequence is None or sequence.request.attempt != completed.attempt or sequence.kv is None or sequence.kv.is_complete:
            return []
        if sequence.state is SequenceState.PULLING and sequence.kv.number != completed.kv.number:
            return self.pull_failed(completed.request_id, completed.attempt, f"{completed.kv.worker} has computed the prompt again")
        sequence.kv = completed.kv
        for token_id in completed.committed_token_ids[sequence.num_output_tokens :]:
            sequence.append(token_id)
        if (reason := sequence.end_reason()) is not None:
            return [self._end(sequence, reason), *_unused_kv([sequence])]
        return self._use_pulled(sequence)

    def _use_pulled(self, sequence: Sequence) -> list[Decision]:
        """Let a sequence decode that has the KV of its prompt, and the first token behind it."""
        if not sequence.is_pulled or sequence.kv is None or not sequence.kv.is_complete:
            return []
        self._scheduler.pulled(sequence)
        return [KvPulled(sequence.request.id, sequence.request.attempt)]

    def pull_failed(self, request_id: str, attempt: int, why: str) -> list[Decision]:
        """Drop an attempt whose KV did not arrive. No-op for one that does not wait for it."""
        if (sequence := self._pulling(request_id, attempt)) is None:
            return []
        for each in list(sequence.siblings):
            self._end(each, "abort")
        return [KvLost(request_id, attempt, why)]

    def offered_prompts(self) -> list[OfferedPrompt]:
        """The prompts of this prefill worker that groups may pull now, and how far they are computed."""
        running = {(self._epoch, at, step.number): step.parts for at, step in enumerate(self._steps) if step is not None}
        return offered_prompts(self._alive.values(), running, self._epoch, self._limits.page_size, self._streams)

    def _pulling(self, request_id: str, attempt: int) -> Sequence | None:
        waiting = (each for each in self._alive.get(request_id, ()) if each.state is SequenceState.PULLING)
        return next((each for each in waiting if each.request.attempt == attempt), None)

    def step_done(
        self,
        micro_batch: int,
        step: int,
        token_ids: ListLike[int],
        logprobs: ListLike[Logprobs] = (),
        degraded: bool = False,
        not_finite: str = "",
        now: float = 0.0,
    ) -> list[Decision]:
        """Commit a step: its KV counts, and `token_ids` (one per sample row, in order) are its sequences' next tokens. `logprobs` has
        one entry for each of these sequences that requests them, then those of prompts. `degraded`: some expert was missing, as it is in
        what later steps of its sequences read of it. A negative token id means that the row's logits were not finite: its sequence alone
        is computed again, and a second time in a row ends its request with an error. `not_finite`: the first part that was not, as
        text. `now`, in seconds, is for the choice of micro-batches by the load, and for steps composed to a target time.

        A step that is not running (repeated, or rolled back) is ignored. ValueError for a wrong number of tokens or logprobs.
        """
        running = self._steps[micro_batch]
        if running is None or running.number != step:
            return []
        batch, num_samples = running.batch, len(running.batch.samples)
        if len(token_ids) != num_samples:
            raise ValueError(f"expected {num_samples} tokens, got {len(token_ids)} (step {step} of micro-batch {micro_batch})")
        if len(logprobs) != running.num_logprobs:
            raise ValueError(f"expected {running.num_logprobs} logprobs, got {len(logprobs)} (step {step} of micro-batch {micro_batch})")
        self._steps[micro_batch] = None
        decisions: list[Decision] = []
        tokens, logprobs_left, scores_left = iter(token_ids), iter(logprobs), islice(logprobs, len(logprobs) - len(batch.scores), None)
        for sequence, num_rows in running.parts:
            sequence.in_step = False
            sequence.is_degraded = sequence.is_degraded or degraded
            drawn = list(islice(tokens, len(sequence.choices))) if produces_token(sequence, num_rows) else []
            has_logprobs = sequence.request.params.logprobs is not None
            own = list(islice(logprobs_left, len(drawn))) if has_logprobs else [None] * len(drawn)
            is_finite = not batch.scores or sequence.add_prompt_logprobs(islice(scores_left, num_scores(sequence, num_rows)))
            sequence.num_computed_tokens += num_rows
            self._scheduler.memory.commit(sequence)
            if sequence.cancelled:
                self._scheduler.remove(sequence)
            elif not is_finite or min(drawn, default=0) < 0:
                decisions += self._redo_sequence(sequence, not_finite)
            elif drawn:
                self._scheduler.memory.cache(sequence)
                decisions += self._append(sequence, drawn, own)
        self._scheduler.step_rows.observe(batch.num_rows)
        if self._limits.target_step_seconds:
            self._scheduler.step_times.observe(batch.num_rows, sum(batch.kv_lengths), now - running.began)
        if self._micro_batches is not None:
            num_running, is_decode = len(self._scheduler.running), batch.num_rows == len({*batch.sample_rows})
            self._scheduler.used_micro_batches = self._micro_batches.step_done(now, batch.num_rows, num_running, is_decode)
        return decisions

    def roll_back(self) -> None:
        """Drop the steps of all micro-batches and begin a new epoch. Committed tokens stay; the dropped rows are computed again.

        What a dropped step wrote is overwritten and never read (state_memory.py). Call it when no message of the old epoch can still write
        into this group's memory.
        """
        self._epoch += 1
        for micro_batch, running in enumerate(self._steps):
            self._steps[micro_batch] = None
            for sequence, _ in running.parts if running is not None else ():
                sequence.in_step = False
                if sequence.cancelled:
                    self._scheduler.remove(sequence)

    def fail_steps(self, steps: Collection[tuple[int, int]], error: str, *, crashed: bool = False, counts: bool = True) -> list[Decision]:
        """Steps (micro_batch, step) have failed, or may have crashed a server (`crashed`): roll back, and compute them again. Their
        sequences become suspects and run one by one. A suspect whose step fails ends its request with this error; one that ran alone
        while a server crashed goes back to the gateway, which counts, unless something else may be the cause (not `counts`). Steps that do
        not run are ignored."""
        running = [found for micro_batch, step in sorted(steps) if (found := self._steps[micro_batch]) is not None and found.number == step]
        if not running:
            return []
        self.roll_back()
        decisions: list[Decision] = []
        for sequence, _ in (part for found in running for part in found.parts):
            request = sequence.request
            if crashed and redo(FaultKind.CRASHED_SERVER, int(sequence.runs_alone and counts)) is not Redo.STEP and not sequence.cancelled:
                self._fail(request, error)
                decisions.append(Crashed(request.id, request.attempt, error))
            elif not crashed and STEP_AGAIN[sequence.is_suspect] is Redo.END and not sequence.cancelled:
                decisions += self._fail(request, error)
            sequence.is_suspect = True
        return decisions

    def fail_all(self, error: str) -> list[Decision]:
        """Roll back, and end every request with this error."""
        self.roll_back()
        return [ended for siblings in list(self._alive.values()) for ended in self._fail(siblings[0].request, error)]

    def statistics(self) -> EngineStatistics:
        scheduler = self._scheduler
        return EngineStatistics(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_free_pages=scheduler.memory.pages.num_free,
            num_pages=scheduler.memory.pages.units.num_pages,
            step_rows=scheduler.step_rows,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_micro_batches=scheduler.used_micro_batches,
        )

    def snapshot(self) -> EngineSnapshot:
        each, size = self._scheduler, self._limits.page_size
        return EngineSnapshot(each.running, each.pulling, each.held, each.waiting, each.memory, self._steps, each.claim, size)

    def leftovers(self) -> list[str]:
        """What is left when all requests have ended."""
        counts, left = self.statistics(), list[str]()
        if not self.idle or counts.num_running or counts.num_waiting:
            left.append(f"{counts.num_running} running, {counts.num_waiting} waiting sequences")
        if counts.num_free_pages != counts.num_pages:
            left.append(f"{counts.num_free_pages} of {counts.num_pages} pages free")
        if (slots := self._scheduler.memory.slots) is not None and slots.num_free != slots.units.num_pages:
            left.append(f"{slots.num_free} of {slots.units.num_pages} slots of recurrent state free")
        return left

    # Ends

    def _append(self, sequence: Sequence, token_ids: ListLike[int], logprobs: ListLike[Logprobs | None]) -> list[Decision]:
        """Take the tokens that were drawn from the last row of a sequence, one for each of its `choices`."""
        request, index, decisions = sequence.request, sequence.num_output_tokens, list[Decision]()
        num_cached_tokens = 0 if index else sequence.num_cached_tokens
        of_prompt, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
        sequence.append(token_ids[0])
        for choice, token_id, found in zip(sequence.choices, token_ids, logprobs, strict=True):
            if choice not in sequence.open_choices or (sequence.prefills and request.committed(choice)):
                continue  # it was cancelled, or the client has this token
            own = () if found is None else (Logprobs(found.token, found.top[: request.params.logprobs]),)
            scores = of_prompt if choice == 0 else ()
            degraded, attempt = sequence.is_degraded, request.attempt
            decisions.append(TokenEvent(request.index, index, (token_id,), "", choice, own, degraded, scores, num_cached_tokens, attempt))
            if (reason := sequence.end_reason(token_id)) is not None:
                sequence.open_choices.discard(choice)
                decisions.append(Ended(request.id, request.attempt, reason, None, choice, sequence.num_output_tokens))
        if not sequence.open_choices:
            self._end(sequence, "stop")
        elif sequence.prefills:
            self._scheduler.hold(sequence)
            decisions.append(Hold(request.id, request.attempt, sequence.num_prompt_tokens, sequence.is_degraded))
        return decisions

    def _redo_sequence(self, sequence: Sequence, cause: str) -> list[Decision]:
        """Compute a sequence without finite logits again from its first token: an earlier row may be the reason. One that has no token left
        that it may continue with ends its request."""
        if sequence.constraint is not None and sequence.constraint.error:
            return self._fail(sequence.request, sequence.constraint.error, sequence.constraint.param)
        self._scheduler.memory.forget(sequence)
        if redo(FaultKind.NOT_FINITE, sequence.num_redone) is Redo.SEQUENCE:
            sequence.num_redone += 1
            sequence.num_proven_tokens = 0  # of a suspect: the gateway knows that it runs alone, which it does until it has a token
            self._scheduler.recompute(sequence)
            return []
        return self._fail(sequence.request, NOT_FINITE.format(sequence.num_output_tokens, f" ({cause})" if cause else ""))

    def _end(self, sequence: Sequence, reason: FinishReason) -> Ended:
        if sequence.in_step:
            sequence.cancelled = True
        else:
            self._scheduler.remove(sequence)
        request = sequence.request
        sequence.siblings.remove(sequence)
        if not sequence.siblings:
            del self._alive[request.id]
            self._remember((request.id, request.attempt), was_reported=True)
        return Ended(request.id, request.attempt, reason, None, sequence.choice, sequence.num_output_tokens)

    def _fail(self, request: Request, error: str, param: str = "") -> list[Decision]:
        """End all choices of a request with one error."""
        for sequence in list(self._alive[request.id]):
            self._end(sequence, "error")
        return [Ended(request.id, request.attempt, "error", error, param=param)]

    def _refuse(self, request: Request, reason: FinishReason, error: str | None = None) -> Ended:
        self._remember((request.id, request.attempt), was_reported=True)
        return Ended(request.id, request.attempt, reason, error)

    def _remember(self, key: tuple[str, int], was_reported: bool) -> None:
        self._ended[key] = was_reported
        while len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]


def _unused_kv(ended: Iterable[Sequence]) -> list[Decision]:
    """The prefill worker need not keep the KV that one of these choices was to pull: the others of its request compute the prompt."""
    return [KvPulled(each.request.id, each.request.attempt) for each in ended if each.kv is not None and each.siblings]
