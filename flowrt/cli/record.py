"""Records the tokens and times of each request, and computes the figures of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from flowrt.actors.outputs import ChoiceEvent, ClientEvent, EndEvent, Logprobs, TokenEvent
from flowrt.cli.prompts import PromptRequest
from flowrt.sampling_params import FinishReason


@dataclass(frozen=True)
class Durations:
    """Mean, median and 99th percentile of durations in seconds; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Durations | None:
        """Summarizes durations; None when there are none."""
        values = list(seconds)
        if not values:
            return None
        p99 = statistics.quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]
        return cls(statistics.fmean(values), statistics.median(values), p99)


_UNKNOWN = Durations(math.nan, math.nan, math.nan)
_OPTIONAL = ("logprobs", "top_logprobs", "prompt_logprobs", "degraded_tokens")


@dataclass
class RecordedChoice:
    """One of a request's answers. With --logprobs: the logprob of each token, and [token id, logprob] of the most likely ones;
    with --prompt-logprobs the first one has both, in a pair, for each token of the prompt behind its first."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None  # None while it goes on
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    degraded_tokens: list[int] = field(default_factory=list)  # indices of tokens that were computed without some expert

    def add(self, event: TokenEvent | ChoiceEvent) -> None:
        self.text += event.text
        if isinstance(event, ChoiceEvent):
            self.finish_reason = event.finish_reason
            return
        self.token_ids += event.token_ids
        self.prompt_logprobs += event.prompt_logprobs
        if event.degraded:
            self.degraded_tokens += event.indices
        self.logprobs += (each.token for each in event.logprobs)
        self.top_logprobs += (each.top for each in event.logprobs)

    def as_json(self) -> dict[str, Any]:
        """The values of the record; logprobs and degraded tokens only where there are any."""
        return {name: value for name, value in vars(self).items() if value or name not in _OPTIONAL}


@dataclass
class Record:
    """One request and its result. Times are Clock.now in seconds; those of tokens are of the first answer."""

    index: int
    request: PromptRequest
    prompt_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None  # None while it runs
    error: str | None = None
    submitted_seconds: float | None = None
    token_seconds: list[float] = field(default_factory=list)
    ended_seconds: float | None = None
    choices: list[RecordedChoice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [RecordedChoice() for _ in range(self.request.params.n)]

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first answer, the one that is shown."""
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.choices[0].text

    def add(self, event: ClientEvent, now: float) -> None:
        """Add the next event of the request, which arrived at `now`."""
        if isinstance(event, EndEvent):
            self.choices[0].text += event.text
            self.finish_reason, self.error, self.ended_seconds = event.finish_reason, event.error, now
            return
        self.choices[event.choice].add(event)
        if isinstance(event, TokenEvent) and event.choice == 0:
            self.token_seconds += [now] * len(event.token_ids)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End the request: no more events follow. No-op after the end."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error

    @property
    def is_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_running(self) -> bool:
        """Whether it has a token and has not ended."""
        return not self.is_ended and any(choice.token_ids for choice in self.choices)

    @property
    def degraded(self) -> bool:
        """Whether any token of any answer was computed without some expert."""
        return any(choice.degraded_tokens for choice in self.choices)

    @property
    def ttft_seconds(self) -> float | None:
        """From submission to the first token."""
        if self.submitted_seconds is None or not self.token_seconds:
            return None
        return self.token_seconds[0] - self.submitted_seconds

    @property
    def itl_seconds(self) -> list[float]:
        """From each token to the next."""
        return [later - earlier for earlier, later in pairwise(self.token_seconds)]

    def as_json(self) -> dict[str, Any]:
        choices = [{**choice.as_json(), "finish_reason": choice.finish_reason or self.finish_reason} for choice in self.choices]
        return {
            "index": self.index,
            "prompt": self.request.prompt if isinstance(self.request.prompt, str) else None,
            "prompt_token_ids": list(self.prompt_token_ids),
            **choices[0],
            **({"choices": choices} if len(choices) > 1 else {}),
            "finish_reason": self.finish_reason,
            "error": self.error,
            "degraded": self.degraded,
            "ttft_seconds": self.ttft_seconds,
            "itl_seconds": Durations.of(self.itl_seconds) or _UNKNOWN,
        }


@dataclass(frozen=True)
class Figures:
    """Totals of a run. `seconds` run from the first submission to the last event."""

    num_requests: int
    num_finished: dict[str, int]  # by finish_reason
    num_prompt_tokens: int
    num_tokens: int
    seconds: float | None
    tokens_per_second: float | None  # new tokens of all requests together
    ttft_seconds: Durations | None
    itl_seconds: Durations | None

    @classmethod
    def of(cls, records: Sequence[Record]) -> Figures:
        begun = [record.submitted_seconds for record in records if record.submitted_seconds is not None]
        ended = [record.ended_seconds for record in records if record.ended_seconds is not None]
        ended += [record.token_seconds[-1] for record in records if record.token_seconds]
        reasons = [record.finish_reason for record in records]
        seconds = max(ended) - min(begun) if begun and ended else None
        num_tokens = sum(len(choice.token_ids) for record in records for choice in record.choices)
        return cls(
            num_requests=len(records),
            num_finished={reason: reasons.count(reason) for reason in ("stop", "length", "abort", "error")},
            num_prompt_tokens=sum(len(record.prompt_token_ids) for record in records),
            num_tokens=num_tokens,
            seconds=seconds,
            tokens_per_second=num_tokens / seconds if seconds and num_tokens else None,
            ttft_seconds=Durations.of(record.ttft_seconds for record in records if record.ttft_seconds is not None),
            itl_seconds=Durations.of(gap for record in records for gap in record.itl_seconds),
        )


def cut_sentence(records: Sequence[Record], max_model_len: int, max_tokens: int | None) -> str | None:
    """That answers are shorter than their requests allow, and by what; None if there are none. `max_tokens`: of the graph."""
    cut = [
        len(choice.token_ids)
        for record in records
        for choice in record.choices
        if (choice.finish_reason or record.finish_reason) == "length"
        and (record.request.params.max_tokens is None or len(choice.token_ids) < record.request.params.max_tokens)
    ]
    if not cut:
        return None
    why = [f"limits.max_tokens is {max_tokens}"] if max_tokens in cut else []
    if any(number != max_tokens for number in cut):
        why.append(f"a prompt and its answer have at most {max_model_len} tokens (limits.kv_pages, or the model)")
    return f"{len(cut)} answer{'s were' if len(cut) > 1 else ' was'} cut: {'; '.join(why)}"


def degraded_sentence(records: Sequence[Record]) -> str | None:
    """A sentence on how many answers were computed without some expert; None when none was."""
    degraded = [record for record in records if record.degraded]
    if not degraded:
        return None
    num_tokens = sum(len(choice.degraded_tokens) for record in degraded for choice in record.choices)
    num_answers = "1 answer is" if len(degraded) == 1 else f"{len(degraded)} answers are"
    tokens = "1 token was" if num_tokens == 1 else f"{num_tokens} tokens were"
    return f"degraded: {num_answers}: {tokens} computed while an expert had no replica (reliability.unavailable_expert)"


def record_text(value: dict[str, Any]) -> str:
    """{"requests": [...], "summary": {...}} as JSON with a line per request. Numbers that are not finite become null."""
    requests = ",\n".join(f"  {_json(request)}" for request in value["requests"])
    return f'{{\n "requests": [\n{requests}\n ],\n "summary": {_json(value["summary"])}\n}}\n'


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
