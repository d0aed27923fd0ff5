"""What is known of one request: its prompt and parameters, each choice's output so far, and the events of its client. Pure.

Only the gateway (gateway.py) writes to a log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from flowrt.gateway.stop_strings import StopStrings
from flowrt.sampling_params import FinishReason, SamplingParams


class TokenEvent(msgspec.Struct, frozen=True):
    """One committed token. `text` is what may be shown now: it can be empty, or hold text of earlier tokens that was held back.
    With `logprobs`: the token's own, and (token id, logprob) of the likeliest at its place, best first (control.Logprobs).
    `degraded`: it was computed without some expert of which no copy was left, or from what had been."""

    request: int
    index: int
    token_id: int
    text: str
    choice: int = 0
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    degraded: bool = False


class ChoiceEvent(msgspec.Struct, frozen=True):
    """One of several choices has ended (a request with n = 1 has no such event). finish_reason and `text` as in EndEvent."""

    request: int
    choice: int
    finish_reason: FinishReason
    text: str = ""


class EndEvent(msgspec.Struct, frozen=True):
    """The request's one last event. finish_reason: stop, length, abort, error (then `error` says why). `text` is the rest.

    With n > 1 each choice had its own ChoiceEvent: `text` is empty, and finish_reason that of the first choice unless it is error."""

    request: int
    finish_reason: FinishReason
    text: str = ""
    error: str | None = None


ClientEvent = TokenEvent | ChoiceEvent | EndEvent


class Detokenizer(Protocol):
    """Text of one request's output, token by token."""

    def push(self, token_id: int) -> str:
        """The new text that is certain after this token; may be empty."""
        ...

    def flush(self) -> str:
        """The text still held back at the end."""
        ...


@dataclass(slots=True)
class ChoiceLog:
    """One of a request's outputs."""

    index: int
    detokenizer: Detokenizer | None = None  # none: no tokenizer, or no more text is wanted
    stops: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None while it goes on

    def push(self, token_id: int, looks_for_stops: bool) -> tuple[str, bool]:
        """The text that the token sets free, and whether a stop string was completed: then no more text will come."""
        text = self.detokenizer.push(token_id) if self.detokenizer is not None else ""
        if self.stops is None or not looks_for_stops:
            return text, False
        text, stopped = self.stops.push(text)
        if stopped:
            self.detokenizer = self.stops = None
        return text, stopped

    def end(self, reason: FinishReason) -> str:
        """The choice is over; returns the text that was held back."""
        text = self.detokenizer.flush() if self.detokenizer is not None else ""
        if self.stops is not None:
            text, stopped = self.stops.push(text)
            if stopped and reason == "length":
                reason = "stop"
            text += self.stops.flush()
        self.finish_reason, self.detokenizer, self.stops = reason, None, None
        return text


@dataclass(slots=True)
class RequestLog:
    """All that is known of a request. `events` is what its client has been or can be told: at most max_tokens + 1 for each choice,
    and the end."""

    index: int
    params: SamplingParams
    prompt_token_ids: tuple[int, ...] = ()  # until it is placed: none
    choices: list[ChoiceLog] = field(default_factory=lambda: [ChoiceLog(0)])
    max_tokens: int = 0
    seed: int = 0
    attempt: int = 0
    group: str | None = None  # None: not placed yet, or ended
    events: list[ClientEvent] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"request-{self.index}"

    @property
    def end(self) -> EndEvent | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, EndEvent) else None

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice."""
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        """Of the first choice."""
        return "".join(event.text for event in self.events if isinstance(event, EndEvent) or event.choice == 0)
