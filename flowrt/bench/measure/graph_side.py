"""One batch decoded by a running graph, through the Python API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.api import RunningGraph
from flowrt.bench.measure.decoding import DecodeRun, Prompts
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.recovery import pipelines
from flowrt.sampling_params import SamplingParams
from flowrt.structured_outputs import StructuredOutputs


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
        self._num_runs = 0

    def label(self, phase: str) -> str:
        return self.name

    async def run(
        self, prompts: Prompts, new_tokens: int, margins: bool = False, on_prefilled: Callable[[], Awaitable[None]] | None = None
    ) -> DecodeRun:
        """Decodes greedily. `on_prefilled` is awaited when every sequence has its first token, while the graph goes on.

        Raises UserError when a request fails, or when all tokens come at once.
        """
        self._num_runs += 1
        salt = f"run {self._num_runs}"  # every run computes its prompts
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, cache_salt=salt, structured_outputs=self._outputs)
        clock = TurnClock()
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        waiting = len(prompts)
        prefilled: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        async def follow(number: int, index: int) -> None:
            nonlocal waiting
            async for event in self.graph.follow(index):
                if isinstance(event, TokenEvent):
                    seconds = clock.now()
                    times[number] += [seconds] * len(event.token_ids)
                    tokens[number] += event.token_ids
                    if event.index == 0:
                        waiting -= 1
                        if not waiting:
                            prefilled.set_result(seconds)
                elif isinstance(event, EndEvent) and event.finish_reason != "length":
                    raise UserError(f"a request ended with {event.finish_reason}: {event.error}")

        try:
            async with asyncio.TaskGroup() as group:
                for number, prompt in enumerate(prompts):
                    group.create_task(follow(number, await self.graph.submit(prompt, params)))
                if on_prefilled is not None:
                    await prefilled
                    await on_prefilled()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        run = DecodeRun.of(prefilled.result(), times, tokens)
        if not run.decode_tokens:
            raise UserError(f"no token came after the last first one: {new_tokens} new tokens are too few to measure decoding; use more")
        return run


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
