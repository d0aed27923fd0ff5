"""The load of a run with chaos: so many requests at a time, over and over, each token noted as it comes.

Here: `requests_of`, Load. Not here: what the tokens should have been (compare.py), the faults (inject.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from flowrt.api import RunningGraph
from flowrt.chaos.compare import Came, Told
from flowrt.errors import UserError, WorkerDiedError
from flowrt.gateway.gateway import EndEvent, TokenEvent
from flowrt.graph.model import GraphLimits
from flowrt.launcher.launcher import NotRunningError
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Clock


@dataclass(frozen=True)
class Asked:
    """One of the requests."""

    prompt: tuple[int, ...]
    params: SamplingParams


def requests_of(num: int, prompt_tokens: int, new_tokens: int, vocab_size: int, limits: GraphLimits) -> list[Asked]:
    """Prompts of half to all of `prompt_tokens`, all different; every other one draws with a seed of its own. Raises UserError when the
    graph would refuse them."""
    if limits.max_tokens < new_tokens:
        raise UserError(f"limits.max_tokens is {limits.max_tokens} and each answer is to have {new_tokens} tokens; use --new-tokens")
    asked = []
    for number in range(num):
        length = max(1, prompt_tokens - number % max(1, prompt_tokens // 2))
        prompt = tuple((7 * number + 13 * place) % (vocab_size - 10) + 3 for place in range(length))
        greedy = SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=number)
        asked.append(Asked(prompt, msgspec.structs.replace(greedy, temperature=0.8, top_k=40) if number % 2 else greedy))
    return asked


class Load:
    """A closed loop: `concurrency` clients, each of whom asks the next request when its last has ended. `told` grows as they are asked."""

    def __init__(self, graph: RunningGraph, asked: Sequence[Asked], concurrency: int, clock: Clock) -> None:
        self._graph, self._asked, self._concurrency, self._clock = graph, asked, concurrency, clock
        self._num_asked = 0
        self._enough = False
        self.told: list[Told] = []
        self.failure: Exception | None = None
        self.begun = asyncio.Event()  # the first request is submitted

    def stop(self) -> None:
        """Ask no more; what is asked is answered."""
        self._enough = True

    async def run(self, at_least: int = 0) -> None:
        """Until `stop`, and so many requests at least; or until the run fails, which `failure` then says."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._concurrency):
                tasks.create_task(self._ask(at_least), name=f"client {number}")

    async def _ask(self, at_least: int) -> None:
        now = self._clock.now
        while self.failure is None and (not self._enough or self._num_asked < at_least):
            number = self._num_asked % len(self._asked)
            self._num_asked += 1
            told = Told(number, now())
            self.told.append(told)
            try:
                index = await self._graph.submit(self._asked[number].prompt, self._asked[number].params)
                self.begun.set()
                await self._follow(index, told)
            except (UserError, WorkerDiedError, NotRunningError) as error:
                told.error = told.error or str(error)
                self.failure = self.failure or error
                self.begun.set()
            if told.failed and self.failure is None:
                await self._clock.sleep(0.01)  # a refusal comes at once, and asking again at once would be no load but a storm

    async def _follow(self, index: int, told: Told) -> None:
        now = self._clock.now
        async for event in self._graph.follow(index):
            if isinstance(event, TokenEvent):
                told.num_late += told.finish_reason is not None
                told.tokens.append(Came(event.index, event.token_id, now()))
            elif isinstance(event, EndEvent):
                told.finish_reason, told.error, told.ended = event.finish_reason, event.error, now()
