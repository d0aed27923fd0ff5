"""Records the tokens and times of each request, computes the figures of a run, and writes the --json file atomically."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from flowrt.cli.prompts import PromptRequest
from flowrt.cli.text import Output
from flowrt.errors import UserError, shortened
from flowrt.gateway.gateway import ChoiceEvent, ClientEvent, EndEvent, TokenEvent
from flowrt.sampling_params import FinishReason

STDOUT = "-"


@dataclass(frozen=True)
class Durations:
    """Mean, median and 99th percentile of durations in seconds; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Durations | None:
        """None when there are none."""
        ordered = sorted(seconds)
        if not ordered:
            return None
        return cls(math.fsum(ordered) / len(ordered), _percentile(ordered, 0.50), _percentile(ordered, 0.99))

    def as_json(self) -> dict[str, float]:
        return {"mean": self.mean, "p50": self.p50, "p99": self.p99}


@dataclass
class Answer:
    """One of a request's answers. With --logprobs: the logprob of each token, and [token id, logprob] of the most likely ones."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None  # None while it goes on
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    degraded_tokens: list[int] = field(default_factory=list)  # indices of tokens that were computed without some expert

    def note(self, event: TokenEvent | ChoiceEvent) -> None:
        self.text += event.text
        if isinstance(event, ChoiceEvent):
            self.finish_reason = event.finish_reason
            return
        self.token_ids.append(event.token_id)
        if event.degraded:
            self.degraded_tokens.append(event.index)
        if event.logprob is not None:
            self.logprobs.append(event.logprob)
            self.top_logprobs.append(event.top_logprobs)

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs} if self.logprobs else {}
        if self.degraded_tokens:
            told["degraded_tokens"] = self.degraded_tokens
        return {"token_ids": self.token_ids, "text": self.text, "finish_reason": self.finish_reason, **told}


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
    answers: list[Answer] = field(init=False)  # as many as the request has choices

    def __post_init__(self) -> None:
        self.answers = [Answer() for _ in range(self.request.params.n)]

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first answer, the one that is shown."""
        return self.answers[0].token_ids

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.answers[0].text

    def note(self, event: ClientEvent, now: float) -> None:
        """Add the next event of the request, which arrived at `now`."""
        if isinstance(event, EndEvent):
            self.answers[0].text += event.text
            self.finish_reason, self.error, self.ended_seconds = event.finish_reason, event.error, now
            return
        self.answers[event.choice].note(event)
        if isinstance(event, TokenEvent) and event.choice == 0:
            self.token_seconds.append(now)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End the request: no more events follow. No-op after the end."""
        if self.finish_reason is None:
            self.finish_reason, self.error = reason, error

    @property
    def is_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def degraded(self) -> bool:
        """Whether any token of any answer was computed without some expert."""
        return any(answer.degraded_tokens for answer in self.answers)

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
        itl = Durations.of(self.itl_seconds)
        choices = [{**answer.as_json(), "finish_reason": answer.finish_reason or self.finish_reason} for answer in self.answers]
        return {
            "index": self.index,
            "prompt_token_ids": list(self.prompt_token_ids),
            **self.answers[0].as_json(),
            **({"choices": choices} if len(choices) > 1 else {}),
            "finish_reason": self.finish_reason,
            "error": self.error,
            "degraded": self.degraded,
            "ttft_seconds": self.ttft_seconds,
            "itl_seconds": {"mean": None, "p50": None, "p99": None} if itl is None else itl.as_json(),
        }


@dataclass(frozen=True)
class Figures:
    """Totals of a run. `seconds` run from the first submission to the last event."""

    num_requests: int
    num_ended: dict[str, int]  # by finish_reason
    num_prompt_tokens: int
    num_tokens: int
    seconds: float | None
    ttft: Durations | None
    itl: Durations | None

    @classmethod
    def of(cls, records: Sequence[Record]) -> Figures:
        begun = [record.submitted_seconds for record in records if record.submitted_seconds is not None]
        ended = [record.ended_seconds for record in records if record.ended_seconds is not None]
        ended += [record.token_seconds[-1] for record in records if record.token_seconds]
        reasons = [record.finish_reason for record in records]
        return cls(
            num_requests=len(records),
            num_ended={reason: reasons.count(reason) for reason in ("stop", "length", "abort", "error")},
            num_prompt_tokens=sum(len(record.prompt_token_ids) for record in records),
            num_tokens=sum(len(answer.token_ids) for record in records for answer in record.answers),
            seconds=max(ended) - min(begun) if begun and ended else None,
            ttft=Durations.of(record.ttft_seconds for record in records if record.ttft_seconds is not None),
            itl=Durations.of(seconds for record in records for seconds in record.itl_seconds),
        )

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all requests together."""
        return self.num_tokens / self.seconds if self.seconds and self.num_tokens else None

    def as_json(self) -> dict[str, Any]:
        return {
            "num_requests": self.num_requests,
            "num_ended": self.num_ended,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "ttft_seconds": None if self.ttft is None else self.ttft.as_json(),
            "itl_seconds": None if self.itl is None else self.itl.as_json(),
        }


def degraded_sentence(records: Sequence[Record]) -> str | None:
    """A sentence on how many answers were computed without some expert; None when none was."""
    degraded = [record for record in records if record.degraded]
    if not degraded:
        return None
    num_tokens = sum(len(answer.degraded_tokens) for record in degraded for answer in record.answers)
    of_them = "1 answer is" if len(degraded) == 1 else f"{len(degraded)} answers are"
    tokens = "1 token was" if num_tokens == 1 else f"{num_tokens} tokens were"
    return f"degraded: {of_them}: {tokens} computed while an expert had no copy (reliability.unavailable_expert)"


def check_writable(name: str) -> None:
    """Raises UserError now rather than after the run, when the --json file could not be written."""
    if name == STDOUT:
        return
    shown = shortened(name)
    try:
        path = Path(name)
        if path.is_dir():
            raise UserError(f"--json {shown}: is a folder; give the path of a file")
        folder = path.resolve().parent
        if not folder.is_dir():
            raise UserError(f"--json {shown}: there is no folder {shortened(str(folder))}; make it, or give another path")
        is_device = path.exists() and not path.is_file()
        if not is_device:
            path.with_name(_part_name(path)).exists()  # a name near the longest possible leaves no room for that of the part
        if not os.access(path if is_device else folder, os.W_OK):
            raise UserError(f"--json {shown}: {folder} may not be written to; give another path")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"--json {shown}: cannot be written ({reason}); give another path") from None


def write_json(name: str, value: dict[str, Any], stdout: Output) -> None:
    """Write {"requests": [...], "summary": {...}} to the file, or "-" to `stdout`. A reader sees the old file or the whole new one.

    Raises UserError when it cannot be written.
    """
    content = _json_text(value)
    if name == STDOUT:
        stdout.write(content)
        stdout.flush()
        return
    path = Path(name).resolve()
    try:
        if path.exists() and not path.is_file():  # a pipe or a device: there is nothing to replace
            path.write_text(content, encoding="utf-8")
            return
        temporary = path.with_name(_part_name(path))
        try:
            temporary.write_text(content, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
    except OSError as error:
        raise UserError(f"--json {name}: cannot be written ({error.strerror}); give another path") from None


def _part_name(path: Path) -> str:
    return f".{path.name}.{os.getpid()}.part"


def _json_text(report: dict[str, Any]) -> str:
    """A line per request; token ids would take a line each if all were indented. Numbers that are not finite become null."""
    requests = ",\n".join(f"  {_line(request)}" for request in report["requests"])
    return f'{{\n "requests": [\n{requests}\n ],\n "summary": {_line(report["summary"])}\n}}\n'


def _line(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
