"""A group in miniature: an Engine, and a "model" whose next token is a hash of the prefix that it finds in its pages.

The model reads tokens from simulated page memory through page tables, as attention does, so a wrong slot, a page with two owners
or rows computed out of order give other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowrt.actors.control import Ended, Request, Sampling, Token
from flowrt.engine.batch import Batch
from flowrt.engine.decision import Decision, Emit, End, StartStep
from flowrt.engine.engine import Engine
from flowrt.graph.model import GraphLimits

VOCABULARY = 97


def next_token(prefix: Sequence[int], seed: int) -> int:
    value = seed + 17
    for token_id in prefix:
        value = (value * 1000003 + token_id + 1) % 2147483647
    return value % VOCABULARY


def expected_output(request: Request, eos_token_ids: Sequence[int] = ()) -> list[int]:
    """The request's whole output, computed alone."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(next_token(tokens, request.sampling.seed))
        tokens.append(output[-1])
        if output[-1] in request.stop_token_ids or (output[-1] in eos_token_ids and not request.ignore_eos):
            break
    return output


def request(name: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 5, seed: int = 0, attempt: int = 0, **more: object) -> Request:
    return Request(id=name, attempt=attempt, prompt_token_ids=tuple(prompt), max_tokens=max_tokens, sampling=Sampling(seed=seed), **more)  # type: ignore[arg-type]


class ToyGroup:
    """Feeds an engine with events and keeps what it says. Checks every batch against what a batch must be."""

    def __init__(self, limits: GraphLimits, num_lanes: int = 1, eos_token_ids: Sequence[int] = (), chunk_tokens: int = 0) -> None:
        self.limits = limits
        self.engine = Engine(limits, num_lanes, 100, VOCABULARY, eos_token_ids, chunk_tokens=chunk_tokens)
        self.memory: list[int | None] = [None] * (limits.kv_pages * limits.page_tokens)
        self.running: dict[int, StartStep] = {}
        self.batches: list[tuple[int, Batch]] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.first_index: dict[tuple[str, int], int] = {}
        self.ends: dict[tuple[str, int], Ended] = {}

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Emit(Token(request_id, attempt, index, token_ids)):
                    key = (request_id, attempt)
                    assert key not in self.ends, f"a token of {key} after its end"
                    first = self.first_index.setdefault(key, index)
                    assert index == first + len(self.tokens.setdefault(key, []))
                    self.tokens[key].extend(token_ids)
                case End(ended):
                    key = (ended.request_id, ended.attempt)
                    assert key not in self.ends, f"{key} ended twice"
                    self.ends[key] = ended

    def submit(self, *requests: Request) -> None:
        for each in requests:
            self.take(self.engine.submit(each))

    def start(self) -> list[StartStep]:
        steps = self.engine.next_steps()
        for step in steps:
            assert step.lane not in self.running
            self.running[step.lane] = step
            self.batches.append((step.lane, step.batch))
        self.check()
        return steps

    def check(self) -> None:
        """What must hold at every moment, over the batches running now."""
        names = [name for step in self.running.values() for name in step.batch.sequence_names]
        assert len(names) == len(set(names)) <= self.limits.max_batch
        pages: dict[int, str] = {}
        for step in self.running.values():
            batch = step.batch
            assert 0 < batch.num_rows <= self.limits.max_step_tokens
            assert len(batch.positions) == len(batch.slots) == batch.num_rows == sum(batch.query_lengths)
            row = 0
            for name, num_rows, kv_length, table in zip(
                batch.sequence_names, batch.query_lengths, batch.kv_lengths, batch.page_tables, strict=True
            ):
                assert len(table) == -(-kv_length // self.limits.page_tokens)
                for page in table:
                    assert pages.setdefault(page, name) == name, f"page {page} is in two tables"
                for position, slot in zip(batch.positions[row : row + num_rows], batch.slots[row : row + num_rows], strict=True):
                    assert slot == table[position // self.limits.page_tokens] * self.limits.page_tokens + position % self.limits.page_tokens
                row += num_rows
                assert batch.positions[row - 1] == kv_length - 1
        statistics = self.engine.statistics()
        assert statistics.num_running <= self.limits.max_batch

    def compute(self, lane: int) -> list[int]:
        """Write the batch's rows into the page memory and read the prefixes of the sample rows back from it."""
        batch = self.running[lane].batch
        for token_id, slot in zip(batch.token_ids, batch.slots, strict=True):
            self.memory[slot] = token_id
        sampled: list[int] = []
        samples = iter(zip(batch.sample_rows, batch.samples, strict=True))
        upcoming = next(samples, None)
        row = 0
        for num_rows, kv_length, table in zip(batch.query_lengths, batch.kv_lengths, batch.page_tables, strict=True):
            row += num_rows
            if upcoming is not None and upcoming[0] == row - 1:
                prefix = [self.memory[page * self.limits.page_tokens + at] for page in table for at in range(self.limits.page_tokens)]
                prefix = prefix[:kv_length]
                assert None not in prefix
                sampled.append(next_token([token for token in prefix if token is not None], upcoming[1].seed))
                upcoming = next(samples, None)
        assert upcoming is None
        return sampled

    def finish(self, lane: int) -> None:
        sampled = self.compute(lane)
        self.take(self.engine.step_done(lane, self.running.pop(lane).step, sampled))

    def roll_back(self, half_written: bool = True) -> None:
        if half_written:
            for lane in self.running:
                self.compute(lane)
        self.running.clear()
        self.take(self.engine.roll_back())

    def run(self, choose: Callable[[list[int]], int] = min, max_steps: int = 10_000) -> None:
        """Until nothing is left to do; `choose` picks the lane that finishes next."""
        for _ in range(max_steps):
            self.start()
            if not self.running:
                break
            self.finish(choose(sorted(self.running)))
        assert self.engine.idle, "the engine has requests but starts no step"
        statistics = self.engine.statistics()
        assert statistics.num_free_pages == self.limits.kv_pages
        assert statistics.num_waiting == statistics.num_running == 0
