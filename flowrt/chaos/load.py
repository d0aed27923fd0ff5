"""Generates the load of a chaos run: a fixed number of requests at a time, over and over; records each token with its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

from flowrt.actors.outputs import ChoiceEvent, EndEvent, TokenEvent
from flowrt.api import RunningGraph
from flowrt.chaos.compare import PackedTokens, ReceivedAnswer, ReceivedToken
from flowrt.errors import NotRunningError, UserError, WorkerDiedError, install_command
from flowrt.graph.settings import GraphLimits
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Clock
from flowrt.structured_outputs import StructuredOutputs


class LoadRequest(NamedTuple):
    """One of the requests."""

    prompt: tuple[int, ...]
    params: SamplingParams


# What every answer samples, in turn: each way of sampling, alone and together.
_SAMPLED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_k": 40},
    {"n": 2, "temperature": 0.8, "top_k": 40, "logprobs": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 1},
    {"min_tokens": 0.5, "stop": ("a", "e")},
    {"n": 3, "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.9, "top_p": 0.95, "min_tokens": 0.25, "stop": ("o", "t"), "ignore_eos": False},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 2.0, "n": 2, "ignore_eos": False, "structured_outputs": StructuredOutputs(json_object=True)},
    {"temperature": 1.0, "top_p": 0.95, "min_p": 0.01, "bad_words": ("the", "a")},
)
_CONSTRAINED: tuple[dict[str, Any], ...] = (  # each form of a grammar
    {"temperature": 2.0, "n": 2, "ignore_eos": False, "structured_outputs": StructuredOutputs(json_object=True)},
    {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex="([a-z]{1,9} )*[0-9]")},
    {"logprobs": 2, "structured_outputs": StructuredOutputs(json='{"type": "array", "minItems": 9, "items": {"type": "integer"}}')},
    {"temperature": 1.0, "bad_words": ("(",), "structured_outputs": StructuredOutputs(grammar='start: "(" start ")" | /[a-z0-9 ]{9,}/')},
)
_OF_TEXT = ("stop", "bad_words", "structured_outputs")  # they need a tokenizer
_OF_BITS = ("logprobs", "prompt_logprobs")  # their last digits depend on what else is in a batch, unless numerics are strict


def requests_of(
    num: int,
    prompt_tokens: int,
    new_tokens: int,
    vocab_size: int,
    limits: GraphLimits,
    has_text: bool,
    ways: Sequence[Mapping[str, Any]] = (),
    is_constrained: bool = False,
    is_exact: bool = True,
) -> list[LoadRequest]:
    """Different prompts of half to all of `prompt_tokens`, each with a seed of its own; the ways of sampling take turns. `has_text`: the
    model has a tokenizer, so that answers may end at texts. `is_constrained`: every answer has a grammar. `is_exact`: logprobs
    compare, as numerics are strict. Raises UserError when the graph would refuse them."""
    ways = ways or (_CONSTRAINED if is_constrained else _SAMPLED)
    if is_constrained and not (has_text and find_spec("llguidance")):
        raise UserError(f"--constrained needs a tokenizer.json in the model's directory, and llguidance: {install_command('structured')}")
    if limits.max_tokens is not None and limits.max_tokens < new_tokens:
        raise UserError(f"limits.max_tokens is {limits.max_tokens} and each answer is to have {new_tokens} tokens; use --new-tokens")
    requests = []
    for number in range(num):
        length = max(1, prompt_tokens - number % max(1, prompt_tokens // 2))
        prompt = tuple((7 * number + 13 * place) % (vocab_size - 10) + 3 for place in range(length))
        sampled = {"max_tokens": new_tokens, "ignore_eos": True, "seed": number, **ways[number % len(ways)]}
        sampled["min_tokens"] = int(new_tokens * sampled.get("min_tokens", 0))
        for name in (*(() if has_text else _OF_TEXT), *(() if is_exact else _OF_BITS)):
            sampled.pop(name, None)
        if find_spec("llguidance") is None:
            sampled.pop("structured_outputs", None)
        requests.append(LoadRequest(prompt, SamplingParams(**sampled)))
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
        self._packed: dict[tuple[ReceivedToken, ...], tuple[ReceivedToken, ...]] = {}
        self._may_send = asyncio.Event()
        self._may_send.set()
        self.answers: list[ReceivedAnswer] = []
        self.failure: Exception | None = None
        self.begun = asyncio.Event()  # the first token or end of an answer has arrived

    def stop(self) -> None:
        """Send no more requests; those that are open finish."""
        self._is_stopped = True
        self._may_send.set()

    def pause(self) -> None:
        """Send no more requests until `resume` or `stop`."""
        self._may_send.clear()

    def resume(self) -> None:
        self._may_send.set()

    async def run(self, min_requests: int = 0) -> None:
        """Send until `stop`, and at least `min_requests`; or until the run fails, then `failure` is set."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._concurrency):
                tasks.create_task(self._run_client(min_requests), name=f"client {number}")

    async def _run_client(self, min_requests: int) -> None:
        now = self._clock.now
        while self.failure is None and (not self._is_stopped or self._num_sent < min_requests):
            if not self._may_send.is_set():
                await self._may_send.wait()
                continue
            number = self._num_sent % len(self._requests)
            self._num_sent += 1
            answer = ReceivedAnswer(number, now())
            self.answers.append(answer)
            try:
                answer.index = await self._graph.submit(*self._requests[number])
                await self._follow(answer)
            except (UserError, WorkerDiedError, NotRunningError) as error:
                answer.error = answer.error or str(error)
                self.failure = self.failure or error
                self.begun.set()
            self._on_end(answer)
            answer.tokens = PackedTokens(answer.tokens, self._packed)
            if answer.failed and self.failure is None:
                await self._clock.sleep(0.01)  # a refusal comes at once; without a wait this loop would spin

    async def _follow(self, answer: ReceivedAnswer) -> None:
        now, tokens = self._clock.now, cast("list[ReceivedToken]", answer.tokens)
        texts: dict[int, str] = {}
        async for event in self._graph.follow(answer.index):
            match event:
                case TokenEvent():
                    answer.num_late += answer.finish_reason is not None
                    for at, token_id in enumerate(event.token_ids):
                        logprobs = (event.logprobs[at], event.prompt_logprobs) if event.logprobs else ()
                        tokens.append(ReceivedToken(event.index + at, token_id, now(), event.choice, logprobs))
                    texts[event.choice] = texts.get(event.choice, "") + event.text
                case ChoiceEvent():
                    answer.endings[event.choice] = (event.finish_reason, texts.pop(event.choice, "") + event.text)
                case EndEvent():
                    answer.finish_reason, answer.error, answer.ended = event.finish_reason, event.error, now()
                    if not answer.endings:
                        answer.endings[0] = (event.finish_reason, texts.pop(0, "") + event.text)
            self.begun.set()  # also at a refusal: requests that are all refused are a load too
