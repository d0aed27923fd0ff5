"""Selects the sequences of a micro-batch's next step, and gives them memory. It is pure; only the engine calls it.

Every sequence makes progress, because all rules go by `order` (age):
- Admission is first come, first served, from free pages only. A sequence needs the pages of all its tokens, and one page of headroom
  for each running sequence that may still grow; else a preempted sequence would be re-admitted only to be preempted again.
- With recurrent layers, a sequence also takes two slots for its state when it is admitted, and keeps that many: a running sequence never
  waits for one.
- Choices of one request share the pages that the prompt fills. A choice is admitted when one of its siblings has computed them, and
  computes the rest of the prompt in a page of its own: at most a page (strict: or a chunk) of rows. While it waits for that, other
  sequences may be admitted.
- A decoding sequence that needs a page preempts the youngest sequence that is younger than itself and in no step. The preempted
  sequence goes back to its place in the queue and is computed again later.
- When all younger sequences are in steps, it claims the next free page: until then no younger one gets any. So the oldest sequence
  always proceeds; alone it fits (validation.py), so every sequence ends.
- With `limits.target_step_seconds`, a step has the rows that it computes in this time (step_times.py). Decoding sequences that it leaves
  out come first in the next step, and in each step at least one prompt advances.
- A suspect, whose latest step failed, runs alone. One whose group crashed replays beside others what it had computed, then runs alone.
- A sequence begins with the pages of the prefix cache that have its tokens, unless the logprobs of its prompt are wanted. Pages that are
  in the cache alone count as free.
- A sequence whose prompt's KV is elsewhere is admitted like any other, and then pulls it into its pages. It takes part in steps when it has
  arrived. Its pages, and those that are held for a group, are never taken from it. It waits for no page meanwhile: docs/kv-transfer.md
  has the argument why such waits end.
"""

from __future__ import annotations

from bisect import insort

from flowrt.engine.batch import Part
from flowrt.engine.group_memory import GroupMemory
from flowrt.engine.sequence import Sequence, SequenceState
from flowrt.engine.step_times import StepBudget, StepTimes
from flowrt.graph.settings import GraphLimits
from flowrt.histogram import Histogram

STEP_ROW_EDGES = (1.0, *(8.0 * 2**power for power in range(12)))  # as in vLLM


def _age(sequence: Sequence) -> int:
    return sequence.order


class Scheduler:
    """`chunk_tokens` > 0 (strict numerics) cuts prompts at its multiples from position 0, so that the cuts do not depend on other
    sequences, and never puts tokens of prompt and output into one step (batch.py); 0 cuts wherever the step is full."""

    def __init__(self, limits: GraphLimits, num_micro_batches: int, chunk_tokens: int = 0, num_slots: int = 0) -> None:
        if num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {num_micro_batches}, it must be at least 1")
        if not 0 <= chunk_tokens <= limits.max_num_batched_tokens:
            raise ValueError(
                f"chunk_tokens is {chunk_tokens}, it must be from 0 to limits.max_num_batched_tokens ({limits.max_num_batched_tokens})"
            )
        self.memory = GroupMemory(limits, chunk_tokens, num_slots)
        self.waiting: list[Sequence] = []  # both lists oldest first
        self.running: list[Sequence] = []
        self.pulling: list[Sequence] = []  # in the order of admission, as `held`
        self.held: list[Sequence] = []
        self.step_rows = Histogram(STEP_ROW_EDGES)  # of committed steps
        self.num_preemptions = 0
        self.num_prefix_queries = self.num_prefix_hits = 0  # tokens looked up in the prefix cache, and those found
        self.step_times = StepTimes()
        self._num_taken = 0  # parts of all steps
        self._limits = limits
        self._num_micro_batches = num_micro_batches
        self.used_micro_batches = num_micro_batches  # sequences are in the first ones; see micro_batches.py
        self._chunk_tokens = chunk_tokens
        self.claim: Sequence | None = None

    def add(self, sequence: Sequence) -> None:
        kv = sequence.request.kv
        sequence.prefix.is_weaker = self._chunk_tokens > 0 and kv is not None and not kv.is_strict
        insort(self.waiting, sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ended and free its memory. It must not be in a step."""
        self._release(sequence)
        sequence.state = SequenceState.ENDED

    def schedule(self, micro_batch: int) -> list[Part]:
        """The sequences of the micro-batch's next step, each with its number of rows, marked `in_step`; empty when there is nothing to do.

        Decoding sequences come first, one row each, then chunks of those whose tokens are not all computed, oldest first. Call it
        only for a micro-batch that runs no step. A suspect runs alone: no other sequence of any micro-batch is in a step meanwhile.
        """
        self._admit()
        self._balance()
        if (suspect := next((sequence for sequence in self.running if sequence.runs_alone), None)) is not None:
            if suspect.micro_batch != micro_batch or any(sequence.in_step for sequence in self.running):
                return []
            suspect.in_step = True  # it has the pages: for the step that failed, or since it was admitted once more
            return [(suspect, self._chunk(suspect, self._limits.max_num_batched_tokens))]
        budget = StepBudget(self._limits.max_num_batched_tokens, self._limits.target_step_seconds, self.step_times.cost, self._chunk_tokens)
        parts: list[Part] = []
        # The micro-batch runs no step, so none of these is in one.
        idle = [each for each in self.running if each.micro_batch == micro_batch and not each.waits_for_siblings]
        decoding = [sequence for sequence in idle if sequence.decodes]
        if budget.has_target:
            decoding.sort(key=lambda sequence: sequence.latest_step)  # those that the target left out of a step come first in the next
        for sequence in decoding:
            if not budget.num_rows or (parts and not budget.has_room(len(sequence.tokens))):
                break
            if sequence.state is SequenceState.RUNNING and self._grow(sequence):  # it may have been preempted for one before it
                self._take(parts, budget, sequence, 1)
        for sequence in idle:
            if sequence.decodes or sequence.state is not SequenceState.RUNNING:
                continue
            num_rows = self._chunk(sequence, budget.num_prompt_rows(sequence.num_computed_tokens))
            if not num_rows:
                break
            self._take(parts, budget, sequence, num_rows)
        return parts

    def _take(self, parts: list[Part], budget: StepBudget, sequence: Sequence, num_rows: int) -> None:
        parts.append((sequence, num_rows))
        budget.take(num_rows, sequence.num_computed_tokens + num_rows)
        sequence.in_step = True
        self._num_taken += 1
        sequence.latest_step = self._num_taken

    def _admit(self) -> None:
        at = 0
        while at < len(self.waiting) and len(self.running) + len(self.pulling) < self._limits.max_num_seqs:
            sequence = self.waiting[at]
            reuse = self.memory.find(sequence)
            if reuse is None:
                at += 1
                continue
            if not self._may_reserve(sequence) or not self.memory.fits(sequence, reuse, (*self.running, *self.pulling)):
                return
            sequence.is_degraded = bool(reuse.pages) and any(other.is_degraded for other in sequence.siblings)
            pulls = sequence.kv is not None and not reuse.pages
            if not reuse.pages:
                self._count_cached(sequence, reuse.num_tokens)
            self.memory.admit(sequence, reuse)
            sequence.num_computed_tokens = reuse.num_tokens
            del self.waiting[at]
            if pulls:
                sequence.state = SequenceState.PULLING
                self.pulling.append(sequence)
            else:
                self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        counts = self._micro_batch_counts()[: self.used_micro_batches]
        sequence.micro_batch = counts.index(min(counts))
        insort(self.running, sequence, key=_age)

    def _count_cached(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence.kv is None and not sequence.num_preemptions and not sequence.num_redone:
            sequence.num_cached_tokens = num_tokens
            self.num_prefix_queries += len(sequence.tokens)
            self.num_prefix_hits += num_tokens

    def pulled(self, sequence: Sequence) -> None:
        """Run a sequence that has the state of its prompt."""
        assert sequence.kv is not None, sequence.name
        self.pulling.remove(sequence)
        sequence.num_computed_tokens = sequence.kv.num_tokens
        sequence.is_degraded = sequence.kv.is_degraded
        self.memory.commit(sequence)
        sequence.kv, sequence.is_pulled = None, False
        self._run(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Take a sequence out of the steps and keep its state. It must not be in a step."""
        self.running.remove(sequence)
        self.memory.hold(sequence)
        sequence.state = SequenceState.HELD
        self.held.append(sequence)

    def recompute(self, sequence: Sequence) -> None:
        """Compute a sequence again from its first token. It must not be in a step."""
        self._release(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed_tokens = 0
        sequence.prompt_logprobs = []
        sequence.is_degraded = False
        self.add(sequence)

    def _balance(self) -> None:
        """Move sequences that are in no step from the fullest micro-batch to the emptiest, until the counts differ by one at most, and all
        from those that are out of use."""
        used = self._micro_batch_counts()[: self.used_micro_batches]
        for sequence in self.running:
            if sequence.micro_batch >= len(used) and not sequence.in_step:
                sequence.micro_batch = used.index(min(used))
                used[sequence.micro_batch] += 1
        while max(used) - min(used) > 1:
            fullest, emptiest = used.index(max(used)), used.index(min(used))
            idle = [sequence for sequence in self.running if sequence.micro_batch == fullest and not sequence.in_step]
            if not idle:
                return
            idle[-1].micro_batch = emptiest
            used[fullest] -= 1
            used[emptiest] += 1

    def _micro_batch_counts(self) -> list[int]:
        counts = [0] * self._num_micro_batches
        for sequence in self.running:
            counts[sequence.micro_batch] += 1
        return counts

    def _chunk(self, sequence: Sequence, free_rows: int) -> int:
        """The number of rows of a sequence with several uncomputed tokens that fit into this step; 0: none."""
        if sequence.is_on_trial and not sequence.runs_alone:
            free_rows = min(free_rows, sequence.num_proven_tokens - sequence.num_computed_tokens)
        start = sequence.num_computed_tokens
        if not self._chunk_tokens:
            return self.memory.end_of_step(sequence, start + min(sequence.num_missing_tokens, free_rows)) - start
        if start >= sequence.num_prompt_tokens:
            return min(sequence.num_missing_tokens, free_rows, self._chunk_tokens)
        end = min(sequence.num_prompt_tokens, (start // self._chunk_tokens + 1) * self._chunk_tokens)
        return end - start if end - start <= free_rows else 0

    def _grow(self, sequence: Sequence) -> bool:
        """Reserve memory for all tokens of the sequence, and preempt younger sequences if necessary; False: not possible now."""
        if self.memory.has_enough(sequence):
            return True
        if not self._may_reserve(sequence):
            return False
        while not (is_reserved := self.memory.reserve(sequence)) and (victim := self._youngest_idle(than=sequence)) is not None:
            self._preempt(victim)
        if not is_reserved:
            self.claim = sequence
        elif self.claim is sequence:
            self.claim = None
        return is_reserved

    def _may_reserve(self, sequence: Sequence) -> bool:
        return self.claim is None or sequence.order <= self.claim.order

    def _youngest_idle(self, than: Sequence) -> Sequence | None:
        for sequence in reversed(self.running):
            if sequence.order <= than.order:
                return None
            if not sequence.in_step:
                return sequence
        return None

    def _preempt(self, sequence: Sequence) -> None:
        self.recompute(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        assert not sequence.in_step, sequence.name
        lists = {SequenceState.WAITING: self.waiting, SequenceState.PULLING: self.pulling, SequenceState.HELD: self.held}
        lists.get(sequence.state, self.running).remove(sequence)
        self.memory.release(sequence)
        if self.claim is sequence:
            self.claim = None
