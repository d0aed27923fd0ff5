"""What is known of one request: what its user asked, each choice's output so far, and the events of its client.

Here: Parameters, the events, ChoiceLog, RequestLog, and what of a request is badly typed; pure. Not here: who writes to a log and
when (gateway.py, the only caller).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_type_hints

import msgspec

from flowrt.gateway.stop_strings import StopStrings

MAX_PROMPT_TOKENS = 1 << 20
_MIN_NUMBER, _MAX_NUMBER = -(1 << 63), (1 << 63) - 1  # what a message can carry


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks of one request. max_tokens None: as many as the graph's limits and the model's positions leave; seed None:
    the gateway draws one. The other numbers are those of control.Sampling and control.Request; `n` is the number of choices, and
    `logprobs` how many of the likeliest tokens are told with each token (0: its own logprob alone, None: none)."""

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


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
    finish_reason: str
    text: str = ""


class EndEvent(msgspec.Struct, frozen=True):
    """The request's one last event. finish_reason: stop, length, cancelled, error (then `error` says why). `text` is the rest.

    With n > 1 each choice had its own ChoiceEvent: `text` is empty, and finish_reason that of the first choice unless it is error."""

    request: int
    finish_reason: str
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
    finish_reason: str | None = None  # None while it goes on

    def push(self, token_id: int, looks_for_stops: bool) -> tuple[str, bool]:
        """The text that the token sets free, and whether a stop string was completed: then no more text will come."""
        text = self.detokenizer.push(token_id) if self.detokenizer is not None else ""
        if self.stops is None or not looks_for_stops:
            return text, False
        text, stopped = self.stops.push(text)
        if stopped:
            self.detokenizer = self.stops = None
        return text, stopped

    def end(self, reason: str) -> str:
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
    prompt_token_ids: tuple[int, ...]
    parameters: Parameters
    choices: list[ChoiceLog] = field(default_factory=lambda: [ChoiceLog(0)])
    max_tokens: int = 0
    seed: int = 0
    attempt: int = 0
    group: str | None = None  # None: nowhere, it has ended
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


_SHOWN_CHARACTERS = 80
_WORDS: dict[Any, str] = {
    int: "a whole number",
    int | None: "a whole number, or None",
    float: "a number",
    bool: "True or False",
    tuple[str, ...]: "a sequence of texts",
    tuple[int, ...]: "a sequence of whole numbers",
}
_TYPES: dict[str, Any] = get_type_hints(Parameters)


def shown(value: object) -> str:
    """A user's value as an error names it: on one line, and never long."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or an object of the user's own
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def typed_parameters(parameters: Parameters) -> Parameters:
    """The same with every value of its declared type: nothing else has looked at them so far. ValueError, one line.

    `stop` may also be a single text, and it and stop_token_ids any iterable.
    """
    if not isinstance(parameters, Parameters):
        raise ValueError(f"parameters is {shown(parameters)}, it must be of type Parameters")
    typed: dict[str, Any] = {}
    for name, kind in _TYPES.items():
        value = getattr(parameters, name)
        if name == "stop" and isinstance(value, str):
            value = (value,)
        elif name in ("stop", "stop_token_ids") and isinstance(value, Iterable) and not isinstance(value, str | bytes):
            value = tuple(value)
        try:
            typed[name] = msgspec.convert(value, kind, strict=True)
        except (msgspec.ValidationError, ValueError, TypeError, OverflowError):
            raise ValueError(f"{name} is {shown(value)}, it must be {_WORDS[kind]}") from None
    if any("\ud800" <= character <= "\udfff" for stop in typed["stop"] for character in stop):
        raise ValueError("stop holds half a character (an unpaired surrogate)")
    return Parameters(**typed)


def typed_prompt(prompt_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The prompt's token ids, all of them plain integers. ValueError, one line."""
    if isinstance(prompt_token_ids, str | bytes | bytearray | memoryview) or not isinstance(prompt_token_ids, Sequence):
        raise ValueError(f"the prompt is {shown(prompt_token_ids)}, it must be a text or a sequence of token ids")
    for position, token_id in enumerate(prompt_token_ids):
        if type(token_id) is not int:  # a bool is no token either
            raise ValueError(f"prompt token {shown(token_id)} at position {position} is no whole number")
    return tuple(prompt_token_ids)


def unsendable(log: RequestLog) -> str | None:
    """Why the request cannot even be put into a message: a prompt without bound, or a number of more than 64 bits."""
    prompt, parameters = log.prompt_token_ids, log.parameters
    if len(prompt) > MAX_PROMPT_TOKENS:
        return f"prompt of {len(prompt)} tokens is longer than any that is taken ({MAX_PROMPT_TOKENS})"
    numbers = [("prompt token", token_id) for token_id in prompt]
    numbers += [("stop token", token_id) for token_id in parameters.stop_token_ids]
    names = ("max_tokens", "min_tokens", "n", "top_k", "seed", "logprobs")
    named = ((name, getattr(parameters, name)) for name in names)
    numbers += [(name, number) for name, number in named if number is not None]
    for name, number in numbers:
        if not _MIN_NUMBER <= number <= _MAX_NUMBER:
            return f"{name} of more than 64 bits; no message carries such a number"
    return None
