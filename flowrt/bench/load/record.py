"""The record of one streamed response: reads its events as they come in, and keeps their times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_LINE_BYTES = 16 << 20
_MAX_ERROR_CHARACTERS = 500
_DONE = b"[DONE]"


class _ChoiceDelta(msgspec.Struct):
    content: str | None = None
    role: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what other servers call it
    refusal: str | None = None
    tool_calls: Any = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class _EventChoice(msgspec.Struct):
    text: str | None = None
    delta: _ChoiceDelta | None = None
    finish_reason: str | None = None


class _ReportedUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class StreamEvent(msgspec.Struct):
    """What is read of one event of a chat or completion stream."""

    choices: tuple[_EventChoice, ...] = ()
    usage: _ReportedUsage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(StreamEvent)


@dataclass
class RequestRecord:
    """Times are of the clock, in seconds. `times`: of each event with a token. `num_prompt_tokens`: the server's count, else the client's.
    `error` "": the request succeeded."""

    num_prompt_tokens: int
    start: float = 0.0
    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_reported: int = 0  # output tokens, as the server counts them
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return self.num_reported or len(self.times)

    @property
    def end(self) -> float:
        """Returns when the last token came."""
        return self.times[-1]

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.start

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def seconds_per_token(self) -> float:
        """Without the first token."""
        return (self.end - self.times[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


class EventReader:
    """Reads the body of a response into a record. A piece of the body may begin and end anywhere. `on_event` gets each event, too."""

    def __init__(self, record: RequestRecord, now: Callable[[], float], on_event: Callable[[StreamEvent], None] | None = None) -> None:
        self._record, self._now, self._on_event = record, now, on_event
        self._rest = b""
        self._has_ended = False

    def read(self, status: int, data: bytes) -> None:
        now = self._now()
        if status != 200:
            self._rest = (self._rest + data)[:MAX_LINE_BYTES]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._read_line(line, now)
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError("an event is too long")

    def finish(self, status: int) -> None:
        """The body is complete."""
        record = self._record
        if status != 200:
            record.error = f"HTTP {status}: {_error_text(self._rest)}"
            return
        self._read_line(self._rest, self._now())
        if not record.error and not self._has_ended:  # some servers send no [DONE]
            record.error = "the stream was cut off: it has neither [DONE] nor a finish reason"

    def _read_line(self, line: bytes, now: float) -> None:
        """A line of an event stream. Each event of this API is one line of JSON; other lines are comments."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == _DONE:
            self._has_ended = True
            return
        event = _decoder.decode(data)
        if self._on_event is not None:
            self._on_event(event)
        record = self._record
        if event.error is not None:
            record.error = record.error or _shown(event.error)
        if event.usage is not None:
            record.num_prompt_tokens = event.usage.prompt_tokens or record.num_prompt_tokens
            record.num_reported = event.usage.completion_tokens
        for choice in event.choices[:1]:
            self._has_ended = self._has_ended or choice.finish_reason is not None
            text = choice.text or (choice.delta.content if choice.delta is not None else None) or ""
            # A token may have no text; an event that only opens or ends a choice is none.
            only_frames = choice.finish_reason is not None or (choice.delta is not None and choice.delta.role is not None)
            if text or not only_frames:
                record.times.append(now)
                record.texts.append(text)


def _error_text(body: bytes) -> str:
    try:
        error = _decoder.decode(body).error
    except msgspec.DecodeError:
        error = None
    return _shown(error if error is not None else body.decode(errors="replace"))


def _shown(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:_MAX_ERROR_CHARACTERS]
