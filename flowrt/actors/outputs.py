"""Defines the records of an output: tokens, ends of choices, the end. Groups, the request log, front ends and the API share them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from flowrt.sampling_params import FinishReason

Whole = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one output position: the token's own, and (token id, logprob) of the most likely tokens, best
    first. They are those of the model's distribution, before penalties, temperature and filters.
    """

    token: float
    top: tuple[tuple[Whole, float], ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """New tokens of a choice, at positions `index`, `index` + 1, ... of its output; one for each step of a group.

    `text` is the text that may be shown now. It can be empty, or contain held-back text of earlier tokens. A group sends none. `logprobs`,
    if requested: one per token. `prompt_logprobs`, if requested, come with the first token of choice 0: those of the prompt's tokens behind
    the first. `degraded`: the tokens were computed without an unavailable expert, or from earlier results computed without it.
    `num_cached_tokens`: tokens of the prompt whose KV came from a prefix cache, with the first token. `attempt`: of the request in the
    group that sends them; 0 once they are committed.
    """

    request: Whole
    index: Whole
    token_ids: Annotated[tuple[Whole, ...], Meta(min_length=1)]
    text: str = ""
    choice: Whole = 0
    logprobs: tuple[Logprobs, ...] = ()
    degraded: bool = False
    prompt_logprobs: tuple[Logprobs, ...] = ()
    num_cached_tokens: Whole = 0
    attempt: Whole = 0

    @property
    def indices(self) -> range:
        return range(self.index, self.index + len(self.token_ids))

    @property
    def token_id(self) -> int:
        """The first token. `logprob` and `top_logprobs` are also those of the first."""
        return self.token_ids[0]

    @property
    def logprob(self) -> float | None:
        return self.logprobs[0].token if self.logprobs else None

    @property
    def top_logprobs(self) -> tuple[tuple[int, float], ...]:
        return self.logprobs[0].top if self.logprobs else ()

    def part(self, begin: int, end: int) -> TokenEvent:
        """Its tokens from number `begin` up to number `end`, not included."""
        if begin <= 0 and end >= len(self.token_ids):
            return self
        token_ids, logprobs = self.token_ids[begin:end], self.logprobs[begin:end]
        part = replace(self, index=self.index + begin, token_ids=token_ids, logprobs=logprobs)
        return replace(part, prompt_logprobs=()) if begin else part


class ChoiceEvent(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """One of several choices has ended; a request with n = 1 has no such event. `finish_reason` and `text` are as in EndEvent."""

    request: Whole
    choice: Whole
    finish_reason: FinishReason
    text: str = ""


class EndEvent(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The last event of a request, exactly one. `finish_reason`: stop, length, abort or error; `error` is the reason of an error. `text`:
    the text held back until now. `param`: of an error, the parameter of the request that is the reason; "": the request is not at fault.

    With n > 1 each ended choice has its own ChoiceEvent. Then `text` is empty, and `finish_reason` is that of choice 0 when all choices
    ended by themselves, else the reason that ended the request."""

    request: Whole
    finish_reason: FinishReason
    text: str = ""
    error: str | None = None
    param: str = ""


ClientEvent = TokenEvent | ChoiceEvent | EndEvent
