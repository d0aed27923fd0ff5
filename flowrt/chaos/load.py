"""Generates the load of a chaos run: a fixed number of requests at a time, over and over; records each token with its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from flowrt.api import RunningGraph
from flowrt.chaos.compare import ReceivedAnswer, ReceivedToken
from flowrt.errors import NotRunningError, UserError, WorkerDiedError
from flowrt.gateway.gateway import EndEvent, TokenEvent
from flowrt.graph.model import GraphLimits
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Clock


@dataclass(frozen=True)
class LoadRequest:
    """One of the requests."""

    prompt: tuple[int, ...]
    params: SamplingParams


def requests_of(num: int, prompt_tokens: int, new_tokens: int, vocab_size: int, limits: GraphLimits) -> list[LoadRequest]:
    """Different prompts of half to all of `prompt_tokens`; every other request samples with a seed of its own. Raises UserError when the
    graph would refuse them."""
    if limits.max_tokens < new_tokens:
        raise UserError(f"limits.max_tokens is {limits.max_tokens} and each answer is to have {new_tokens} tokens; use --new-tokens")
    requests = []
    for number in range(num):
        length = max(1, prompt_tokens - number % max(1, prompt_tokens // 2))
        prompt = tuple((7 * number + 13 * place) % (vocab_size - 10) + 3 for place in range(length))
        greedy = SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=number)
        requests.append(LoadRequest(prompt, msgspec.structs.replace(greedy, temperature=0.8, top_k=40) if number % 2 else greedy))
    return requests


class Load:
    """A closed loop: `concurrency` clients, each of which sends the next request when its last has ended. `answers` grows meanwhile."""

    def __init__(
        self,
        graph: RunningGraph,
        requests: Sequence[LoadRequest],
        concurrency: int,
        clock: Clock,
        on_end: Callable[[ReceivedAnswer], None] = lambda answer: None,
    ) -> None:
        self._graph, self._requests, self._concurrency, self._clock, self._on_end = graph, requests, concurrency, clock, on_end
        self._num_sent = 0
        self._is_stopped = False
        self.answers: list[ReceivedAnswer] = []
        self.failure: Exception | None = None
        self.begun = asyncio.Event()  # the first token or end of an answer has arrived

    def stop(self) -> None:
        """Send no more requests; those that are open finish."""
        self._is_stopped = True

    async def run(self, min_requests: int = 0) -> None:
        """Send until `stop`, and at least `min_requests`; or until the run fails, then `failure` is set."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._concurrency):
                tasks.create_task(self._run_client(min_requests), name=f"client {number}")

    async def _run_client(self, min_requests: int) -> None:
        now = self._clock.now
        while self.failure is None and (not self._is_stopped or self._num_sent < min_requests):
            number = self._num_sent % len(self._requests)
            self._num_sent += 1
            answer = ReceivedAnswer(number, now())
            self.answers.append(answer)
            try:
                index = await self._graph.submit(self._requests[number].prompt, self._requests[number].params)
                await self._follow(index, answer)
            except (UserError, WorkerDiedError, NotRunningError) as error:
                answer.error = answer.error or str(error)
                self.failure = self.failure or error
                self.begun.set()
            self._on_end(answer)
            if answer.failed and self.failure is None:
                await self._clock.sleep(0.01)  # a refusal comes at once; without a wait this loop would spin

    async def _follow(self, index: int, answer: ReceivedAnswer) -> None:
        now = self._clock.now
        async for event in self._graph.follow(index):
            if isinstance(event, TokenEvent):
                answer.num_late += answer.finish_reason is not None
                answer.tokens.append(ReceivedToken(event.index, event.token_id, now()))
                self.begun.set()
            elif isinstance(event, EndEvent):
                answer.finish_reason, answer.error, answer.ended = event.finish_reason, event.error, now()
                self.begun.set()  # also of a refusal: requests that are all refused are a load too
