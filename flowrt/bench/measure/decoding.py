"""Greedy decoding of one batch by a running graph: the prompts, what a run is, how fast it was, and whether two gave the same tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count, zip_longest

from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.api import RunningGraph
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.recovery import pipelines
from flowrt.sampling_params import SamplingParams
from flowrt.structured_outputs import StructuredOutputs

Prompts = list[list[int]]
_RUN_NUMBERS = count(1)


@dataclass(frozen=True)
class DecodeRun:
    """Prefill: from the submission of all prompts to the last first token. Decode: from there to the last token, with `decode_tokens`.

    `margins`: by sequence and position, the logit of the likeliest token less that of the second; None when unknown.
    `num_cached_tokens`: of the prompts, which were not computed.
    """

    prefill_seconds: float
    decode_seconds: float
    decode_tokens: int
    tokens: list[list[int]]
    margins: list[list[float]] | None = None
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, prefill_seconds: float, times: Sequence[Sequence[float]], tokens: list[list[int]]) -> DecodeRun:
        """Computes the speeds from the times of each sequence's tokens, in seconds since the submission.

        Tokens of fast sequences before the last first token count neither as prefill nor as decode.
        """
        last = max(each[-1] for each in times)
        decode_tokens = sum(1 for each in times for seconds in each if seconds > prefill_seconds)
        return cls(prefill_seconds, last - prefill_seconds, decode_tokens, tokens)

    def speed(self, phase: str, num_prompt_tokens: int) -> float:
        """Tokens per second. "prefill": of the prompts; "decode": new ones without each sequence's first; "throughput": all new ones, from
        the submission of the prompts on."""
        if phase == "throughput":
            return sum(map(len, self.tokens)) / (self.prefill_seconds + self.decode_seconds)
        return num_prompt_tokens / self.prefill_seconds if phase == "prefill" else self.decode_tokens / self.decode_seconds


@dataclass
class TokenAgreement:
    """Sequences compared, those that differ, and the top-two margin at the first difference of each, where it is known."""

    num_compared: int = 0
    num_different: int = 0
    margins: list[float] = field(default_factory=list)

    def compare(self, ours: DecodeRun, theirs: DecodeRun) -> None:
        """Counts the sequences whose tokens differ; tokens after a first difference are not compared."""
        if len(ours.tokens) != len(theirs.tokens):
            raise ValueError(f"{len(ours.tokens)} sequences cannot be compared with {len(theirs.tokens)}")
        for number, (one, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
            self.num_compared += 1
            if (place := first_difference(one, other)) is not None:
                self.num_different += 1
                margins = theirs.margins or ours.margins
                self.margins += margins[number][place : place + 1] if margins is not None else []

    def __str__(self) -> str:
        if not self.num_different:
            return f"all {self.num_compared} sequences equal"
        text = f"{self.num_different} of {self.num_compared} sequences differ"
        if self.margins:
            ordered = sorted(self.margins)
            middle = ordered[len(ordered) // 2]
            text += f", at top-two margins of logits up to {ordered[-1]:.2g} (median {middle:.2g})"
        return text


def prompts_of(batch: int, prompt_tokens: int, vocab_size: int) -> Prompts:
    """The prompts of every run of this shape, all different, without repeated text."""
    if vocab_size < 14:
        raise ValueError(f"a vocabulary of {vocab_size} tokens is too small")
    return [[(7 * i + 13 * j) % (vocab_size - 10) + 3 for j in range(prompt_tokens)] for i in range(batch)]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where they differ, or where the shorter ends; None for equal ones."""
    return next((place for place, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)


class TurnClock:
    """Seconds since it was made, the same during one turn of the event loop: the tokens of a step have one time."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._start = now, now()
        self._seconds: float | None = None

    def now(self) -> float:
        if self._seconds is None:
            self._seconds = self._now() - self._start
            asyncio.get_running_loop().call_soon(self._end_turn)
        return self._seconds

    def _end_turn(self) -> None:
        self._seconds = None


class GraphSide:
    """A running graph as a side of a comparison. With `outputs`, every sequence is constrained to them."""

    def __init__(self, graph: RunningGraph, name: str = "flowrt", outputs: StructuredOutputs | None = None) -> None:
        self.name, self.graph, self._outputs = name, graph, outputs

    def label(self, phase: str) -> str:
        return self.name

    async def run(
        self, prompts: Prompts, new_tokens: int, margins: bool = False, on_prefilled: Callable[[], Awaitable[None]] | None = None
    ) -> DecodeRun:
        """Decodes greedily. `on_prefilled` is awaited when every sequence has its first token, while the graph goes on.

        Raises UserError when a request fails, or when all tokens come at once.
        """
        salt = f"run {next(_RUN_NUMBERS)}"  # every run computes its prompts, also where two sides share a graph
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, cache_salt=salt, structured_outputs=self._outputs)
        clock = TurnClock()
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        waiting, num_cached = len(prompts), 0
        prefilled: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        async def follow(number: int, index: int) -> None:
            nonlocal waiting, num_cached
            async for event in follow_tokens(self.graph, index):
                seconds = clock.now()
                times[number] += [seconds] * len(event.token_ids)
                tokens[number] += event.token_ids
                if event.index == 0:
                    waiting, num_cached = waiting - 1, num_cached + event.num_cached_tokens
                    if not waiting:
                        prefilled.set_result(seconds)

        try:
            async with asyncio.TaskGroup() as group:
                for number, prompt in enumerate(prompts):
                    group.create_task(follow(number, await self.graph.submit(prompt, params)))
                if on_prefilled is not None:
                    await prefilled
                    await on_prefilled()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        run = replace(DecodeRun.of(prefilled.result(), times, tokens), num_cached_tokens=num_cached)
        if not run.decode_tokens:
            raise UserError(f"no token came after the last first one: {new_tokens} new tokens are too few to measure decoding; use more")
        return run


async def follow_tokens(graph: RunningGraph, index: int) -> AsyncIterator[TokenEvent]:
    """The tokens of a request. Raises UserError when it ends before it has all that it may have."""
    async with aclosing(graph.follow(index)) as events:  # a caller that leaves cancels the request now
        async for event in events:
            if isinstance(event, TokenEvent):
                yield event
            elif isinstance(event, EndEvent) and event.finish_reason != "length":
                raise UserError(f"a request ended with {event.finish_reason}: {event.error}")


def check_limits(graph: Graph, batches: Sequence[int], prompt_tokens: int, new_tokens: int) -> None:
    """Raises UserError when the graph's limits would queue or refuse a batch."""
    limits = graph.group_limits()
    groups = len(pipelines(graph))
    largest = max(batches)
    per_group = -(-largest // max(1, groups))
    pages = per_group * -(-(prompt_tokens + new_tokens) // limits.page_size)
    for key, has, needs in (
        ("max_num_seqs", limits.max_num_seqs, per_group),
        ("max_tokens", limits.max_tokens or new_tokens, new_tokens),
        ("kv_pages", limits.kv_pages, pages),
    ):
        if has < needs:
            raise UserError(f"limits.{key} is {has}, and a batch of {largest} needs {needs}; add --set limits.{key}={needs}")
