"""Builds the completion of a request, with its choices, from the request's events. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from flowrt.actors.outputs import ChoiceEvent, ClientEvent, EndEvent, Logprobs, TokenEvent
from flowrt.errors import RequestError, as_line
from flowrt.sampling_params import FinishReason


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One output of a request. When logprobs are requested, `logprobs` has one number per token, and `top_logprobs` has (token id, logprob)
    pairs per token. `degraded_tokens`: indices of the tokens that were computed without some expert, or from earlier results computed
    without it."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    degraded_tokens: tuple[int, ...] = ()

    @property
    def degraded(self) -> bool:
        return bool(self.degraded_tokens)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request with its `n` choices. `error`: the reason when finish_reason is "error", else None; then `text` raises it.

    `prompt_logprobs`, if requested: of each token of the prompt behind the first, its logprob (`token`) and pairs of token id and logprob
    (`top`).
    """

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    finish_reason: FinishReason  # of the whole request: the first choice's, or error
    error: str | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()

    @classmethod
    def of(cls, prompt_token_ids: tuple[int, ...], events: Sequence[ClientEvent]) -> Completion:
        """Build the completion from all events of a request. The last event must be its EndEvent."""
        end = events[-1]
        assert isinstance(end, EndEvent)
        num_choices = 1 + max((event.choice for event in events if not isinstance(event, EndEvent)), default=0)
        choices = tuple(_choice(choice, events, end) for choice in range(num_choices))
        of_prompt = next((event.prompt_logprobs for event in events if isinstance(event, TokenEvent) and event.prompt_logprobs), ())
        return cls(
            prompt_token_ids=prompt_token_ids,
            choices=choices,
            finish_reason=end.finish_reason,
            error=end.error,
            prompt_logprobs=of_prompt,
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of choice 0. `text`, `logprobs` and `top_logprobs` are also those of choice 0."""
        return self.choices[0].token_ids

    @property
    def degraded(self) -> bool:
        """Whether any token of any choice is degraded."""
        return any(choice.degraded for choice in self.choices)

    @property
    def text(self) -> str:
        """The text of choice 0. Raises RequestError when finish_reason is "error": what came before is in `choices`."""
        self.check()
        return self.choices[0].text

    def check(self) -> None:
        """Raises RequestError when finish_reason is "error"."""
        if self.finish_reason == "error":
            raise RequestError(as_line(self.error or "the request failed"))

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.choices[0].logprobs

    @property
    def top_logprobs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        return self.choices[0].top_logprobs


def _choice(choice: int, events: Iterable[ClientEvent], end: EndEvent) -> Choice:
    """Build one choice from the request's events."""
    own = [event for event in events if not isinstance(event, EndEvent) and event.choice == choice]
    tokens = [event for event in own if isinstance(event, TokenEvent)]
    reasons = [event.finish_reason for event in own if isinstance(event, ChoiceEvent)]
    return Choice(
        token_ids=tuple(token_id for event in tokens for token_id in event.token_ids),
        text="".join(event.text for event in own) + end.text,
        finish_reason=reasons[0] if reasons else end.finish_reason,
        logprobs=tuple(each.token for event in tokens for each in event.logprobs),
        top_logprobs=tuple(each.top for event in tokens for each in event.logprobs),
        degraded_tokens=tuple(index for event in tokens if event.degraded for index in event.indices),
    )
