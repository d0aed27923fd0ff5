"""A group in miniature: an Engine, and a "model" whose next token is a hash of the prefix that it finds in its pages.

The model reads tokens from simulated page memory through page tables, as attention does, so a wrong slot, a page with two owners
or rows computed out of order give other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any

from group_tokens import number_of, request_named

from flowrt.actors.control import Ended, Request
from flowrt.actors.outputs import TokenEvent
from flowrt.engine.batch import Batch, SampleSpec
from flowrt.engine.engine import Decision, Engine, StartStep
from flowrt.engine.offered_prompt import NO_STATE
from flowrt.graph.settings import GraphLimits
from flowrt.sampling_params import SamplingParams

VOCABULARY = 97
ROW_SECONDS, KV_SECONDS = 0.1, 1e-3


def next_token(prefix: Sequence[int], seed: int) -> int:
    value = seed + 17
    for token_id in prefix:
        value = (value * 1000003 + token_id + 1) % 2147483647
    return value % VOCABULARY


def sampled_token(prefix: Sequence[int], spec: SampleSpec) -> int:
    """Penalties: a token of the prefix that was in the output is stepped over."""
    token_id = next_token(prefix, spec.seed + 1000 * spec.choice)
    counts = spec.output_counts or {}
    while token_id in spec.forbidden_token_ids or (token_id in counts and counts[token_id] > 1):
        token_id = (token_id + 1) % VOCABULARY
    return token_id


def expected_output(request: Request, eos_token_ids: Sequence[int] = (), choice: int = 0) -> list[int]:
    """The whole output of one choice, computed alone."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    ends = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else eos_token_ids)}
    while len(output) < request.max_tokens:
        counts = {token: output.count(token) for token in tokens} if request.params.has_penalties else None
        forbidden = ends if len(output) < request.params.min_tokens else ()
        output.append(sampled_token(tokens, SampleSpec(request.params, request.seed, len(output), choice, counts, forbidden)))
        tokens.append(output[-1])
        if output[-1] in ends:
            break
    return output


def request(
    name: str,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 5,
    seed: int = 0,
    attempt: int = 0,
    committed_token_ids: tuple[tuple[int, ...], ...] = (),
    ended_choices: tuple[int, ...] = (),
    **params: Any,
) -> Request:
    return Request(
        id=name,
        index=number_of(name),
        attempt=attempt,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        seed=seed,
        params=SamplingParams(**params),
        committed_token_ids=committed_token_ids,
        ended_choices=ended_choices,
    )


def next_step(group: Engine, micro_batch: int = 0) -> StartStep:
    step = group.next_step(micro_batch)
    assert step is not None
    return step


class ToyGroup:
    """Feeds an engine with events and keeps its outputs. Checks the invariants of every batch."""

    def __init__(
        self,
        limits: GraphLimits,
        num_micro_batches: int = 1,
        eos_token_ids: Sequence[int] = (),
        chunk_tokens: int = 0,
        recurrent: bool = False,
    ) -> None:
        self.limits = limits
        self.engine = Engine(
            limits, num_micro_batches, 100, VOCABULARY, eos_token_ids, chunk_tokens=chunk_tokens, has_recurrent_layers=recurrent
        )
        self.memory: list[int | None] = [None] * (limits.kv_pages * limits.page_size)
        self.states: dict[int, tuple[int, ...]] = {NO_STATE: ()}  # by slot: the tokens that the state is of
        self.running: dict[int, StartStep] = {}
        self.now = 0.0
        self.batches: list[tuple[int, Batch]] = []
        # By (request, attempt), or (request, attempt, choice) behind the first choice.
        self.tokens: dict[tuple[str | int, ...], list[int]] = {}
        self.first_index: dict[tuple[str | int, ...], int] = {}
        self.ends: dict[tuple[str | int, ...], Ended] = {}

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case TokenEvent(request, index, token_ids, _, choice, attempt=attempt):
                    key = (request_named(request), attempt, choice)[: 3 if choice else 2]
                    assert key not in self.ends, f"a token of {key} after its end"
                    first = self.first_index.setdefault(key, index)
                    assert index == first + len(self.tokens.setdefault(key, []))
                    self.tokens[key].extend(token_ids)
                case Ended() as ended:
                    key = (ended.request_id, ended.attempt, ended.choice)[: 3 if ended.choice else 2]
                    # An error ends all choices of a request, of which some may have ended.
                    assert key not in self.ends or ended.reason == "error", f"{key} ended twice"
                    self.ends.setdefault(key, ended)

    def submit(self, *requests: Request) -> None:
        for each in requests:
            self.take(self.engine.submit(each))

    def start(self) -> list[StartStep]:
        steps = self.engine.next_steps(self.now)
        for step in steps:
            assert step.micro_batch not in self.running
            self.running[step.micro_batch] = step
            self.batches.append((step.micro_batch, step.batch))
        self.check()
        return steps

    def is_suspect(self, micro_batch: int) -> bool:
        """Whether the running step of this micro-batch belongs to a suspect."""
        running = self.engine._steps[micro_batch]
        return running is not None and any(sequence.is_suspect for sequence, _ in running.parts)

    def check(self) -> None:
        """What must hold at every moment, over the batches running now."""
        names = [name for step in self.running.values() for name, _ in groupby(step.batch.sequence_names)]  # replayed rows count once
        if any(map(self.is_suspect, self.running)):
            assert len(names) == 1, "a suspect runs alone"
        assert len(names) == len(set(names)) <= self.limits.max_num_seqs
        writers: dict[int, str] = {}
        readers: dict[int, set[str]] = {}
        for step in self.running.values():
            batch = step.batch
            assert 0 < batch.num_rows == sum(batch.query_lengths) <= self.limits.max_num_batched_tokens
            for name, num_rows, kv_length, table in zip(
                batch.sequence_names, batch.query_lengths, batch.kv_lengths, batch.page_tables, strict=True
            ):
                assert len(table) == -(-kv_length // self.limits.page_size)
                for at, page in enumerate(table):
                    readers.setdefault(page, set()).add(name)
                    if (at + 1) * self.limits.page_size > kv_length - num_rows:
                        assert writers.setdefault(page, name) == name, f"page {page} is written to by two"
        for page, writer in writers.items():
            assert readers[page] == {writer}, f"page {page} is written to and read by others"
        batches = [step.batch for step in self.running.values()]
        slots = {(name, *slots) for batch in batches for name, slots in zip(batch.sequence_names, batch.slots, strict=False)}
        for name, _, target in slots:
            users = {other for other, *used in slots if target in used}
            assert users == {name}, f"slot {target} is written to by {name} and used by {users}"
        statistics = self.engine.statistics()
        assert statistics.num_running <= self.limits.max_num_seqs

    def compute(self, micro_batch: int) -> list[int]:
        """Write the batch's rows into the page memory and read the prefixes of the sample rows back from it."""
        batch = self.running[micro_batch].batch
        page_size = self.limits.page_size
        sampled: list[int] = []
        samples = iter(zip(batch.sample_rows, batch.samples, strict=True))
        upcoming = next(samples, None)
        row = 0
        for at, (num_rows, kv_length, table) in enumerate(zip(batch.query_lengths, batch.kv_lengths, batch.page_tables, strict=True)):
            for position, token_id in enumerate(batch.token_ids[row : row + num_rows], kv_length - num_rows):
                self.memory[table[position // page_size] * page_size + position % page_size] = token_id
            row += num_rows
            if batch.slots:
                source, target = batch.slots[at]
                self.states[target] = (*self.states[source], *batch.token_ids[row - num_rows : row])
                found = [self.memory[page * page_size + each] for page in table for each in range(page_size)][:kv_length]
                assert list(self.states[target]) == found, "the state is of other tokens than the pages"
            if upcoming is not None and upcoming[0] == row - 1:
                prefix = [self.memory[page * page_size + at] for page in table for at in range(page_size)][:kv_length]
                assert None not in prefix
                sampled.append(sampled_token([token for token in prefix if token is not None], upcoming[1]))
                upcoming = next(samples, None)
        assert upcoming is None
        return sampled

    def finish(self, micro_batch: int, broken: str = "") -> int:
        """`broken`: logits of sequences whose names begin so are not finite. Returns how many these are."""
        sampled, step = self.compute(micro_batch), self.running.pop(micro_batch)
        if broken:
            ends = zip(step.batch.sequence_names, accumulate(step.batch.query_lengths), strict=True)
            names = [name for name, end in ends if end - 1 in step.batch.sample_rows]
            sampled = [-1 if name.startswith(broken) else token for name, token in zip(names, sampled, strict=True)]
        self.now += 1.0 + micro_batch + ROW_SECONDS * step.batch.num_rows + KV_SECONDS * sum(step.batch.kv_lengths)  # fewer are faster
        self.take(self.engine.step_done(micro_batch, step.step, sampled, now=self.now))
        return sampled.count(-1)

    def step(self) -> None:
        """Run a step of micro-batch 0."""
        self.start()
        self.finish(0)

    def check_outputs(self, *requests: Request) -> None:
        """Their first attempts have the tokens that each has alone."""
        for each in requests:
            assert self.tokens[(each.id, 0)] == expected_output(each)

    def fail(self, micro_batch: int) -> list[str]:
        """The micro-batch's step fails. Returns the requests that must end for it."""
        step, suspects = self.running[micro_batch], self.is_suspect(micro_batch)
        self.running.clear()
        self.take(self.engine.fail_steps([(micro_batch, step.step)], "it failed"))
        return [name.split("/")[0] for name in step.batch.sequence_names] if suspects else []

    def roll_back(self, half_written: bool = True) -> None:
        if half_written:
            for micro_batch in self.running:
                self.compute(micro_batch)
        self.running.clear()
        self.engine.roll_back()

    def run(self, choose: Callable[[list[int]], int] = min, max_steps: int = 10_000) -> None:
        """Until nothing is left to do; `choose` picks the micro-batch that finishes next."""
        for _ in range(max_steps):
            self.start()
            if not self.running:
                break
            self.finish(choose(sorted(self.running)))
        assert self.engine.idle, "the engine has requests but starts no step"
        statistics = self.engine.statistics()
        assert self.engine.leftovers() == []
        assert statistics.num_waiting == statistics.num_running == 0
