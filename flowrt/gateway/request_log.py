"""The log of one request: its prompt and parameters, each choice's output so far, and the events for its client. Pure.

Only the gateway (gateway.py) writes to a log. log_records.py has the form in which it outlives the process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from flowrt.actors.control import KvOffer, Request
from flowrt.actors.front_end_messages import Origin
from flowrt.actors.outputs import ClientEvent, EndEvent, TokenEvent
from flowrt.gateway.stop_strings import StopStrings
from flowrt.sampling_params import FinishReason, SamplingParams

Stage = Literal["all", "prefill"]  # what a worker computes of a request: Request.stage


class Detokenizer(Protocol):
    """Converts the token ids of the output of one prompt to text, token by token."""

    def push(self, token_id: int) -> str:
        """Add a token and return the new text that later tokens cannot change; may be empty."""
        ...

    def flush(self) -> str:
        """Return the text still held back at the end."""
        ...


def is_hidden_stop(params: SamplingParams, eos_token_ids: Collection[int], token_id: int) -> bool:
    """Whether the token ends the output, and is in the token ids of the output, but not in its text."""
    if params.include_stop_str_in_output:
        return False
    ends_at_eos = not params.ignore_eos or params.structured_outputs is not None
    return token_id in params.stop_token_ids or (token_id in eos_token_ids and ends_at_eos)


def new_stop_strings(params: SamplingParams) -> StopStrings | None:
    """Makes the stop strings of one choice."""
    return StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None


@dataclass(slots=True)
class ChoiceLog:
    """The output of one choice of a request, and the state of its text conversion."""

    index: int
    detokenizer: Detokenizer | None = None  # None: no tokenizer, no prompt yet, or the text is complete
    stops: StopStrings | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None while the choice is running

    def push(self, token_id: int, params: SamplingParams, eos_token_ids: Collection[int]) -> tuple[str, bool]:
        """Add a token. Returns the text that may be shown now, and whether a stop string is complete. After that no more text comes."""
        may_end = len(self.token_ids) >= params.min_tokens
        self.token_ids.append(token_id)
        if is_hidden_stop(params, eos_token_ids, token_id):
            return "", False
        text = self.detokenizer.push(token_id) if self.detokenizer is not None else ""
        if self.stops is None:
            return text, False
        text, stopped = self.stops.push(text, may_end)
        if stopped:
            self.detokenizer = self.stops = None
        return text, stopped

    def end(self, reason: FinishReason) -> tuple[FinishReason, str]:
        """End the choice. Returns its finish reason and the text that was held back. A stop string in that text changes the reason
        "length" to "stop"."""
        text = self.detokenizer.flush() if self.detokenizer is not None else ""
        if self.stops is not None:
            text, stopped = self.stops.push(text)
            if stopped and reason == "length":
                reason = "stop"
            text += self.stops.flush()
        self.finish_reason, self.detokenizer, self.stops = reason, None, None
        return reason, text


@dataclass(slots=True, eq=False)
class RequestLog:
    """The state of one request. `events`: all events for its client so far, at most max_tokens + 1 for each choice, and the end."""

    index: int
    params: SamplingParams
    prompt_token_ids: tuple[int, ...] = ()  # empty until the request is placed
    choices: list[ChoiceLog] = field(default_factory=lambda: [ChoiceLog(0)])
    has_text: bool = True  # its events have text; else a front end decodes the tokens
    max_tokens: int = 0
    seed: int = 0
    attempt: int = 0
    prefill_worker: str | None = None  # of this attempt, which sends the first token of each choice; None: the group does
    kv: KvOffer | None = None  # the KV of the prompt that the prefill worker of this attempt has offered
    kv_was_lost: bool = False  # a group lost it while the prefill worker computed the prompt; the next attempt begins after the prompt
    num_expected_tokens: int = 0  # of output, of each choice
    prefix_digests: tuple[bytes, ...] | None = None  # of the prompt (prefix_index.py), when they are known
    num_kv_lost: int = 0  # KV transfers that failed, in all attempts
    waits_since: float = 0.0  # seconds: when it was admitted, from when on it waits for a group while none is left
    is_suspect: bool = False  # its group crashed while it ran there: each choice runs alone until it has committed a token
    replays_alone: bool = False  # as a suspect: another group has crashed, while no request ran alone there
    unproven: set[int] = field(default_factory=set)  # of a suspect that was placed as one: the choices without a token since
    runs_alone: bool = False  # its group computes a choice alone; no token has come since
    placed_attempt: int = -1  # the latest that was placed
    restarted_attempt: int = -1  # a policy restarts the groups of the attempts up to this one: they may still report that it ran alone
    server_crash: str = ""  # as text, the crash of a server before whose notice no such report had come
    num_crashes: int = 0  # of processes that crashed or hung while it ran alone, since it was a suspect first
    events: list[ClientEvent] = field(default_factory=list)
    num_held: int = 0  # of the latest events: no client gets them before they are in the request log on disk
    origin: Origin | None = None  # of a request that a front end may ask for again

    @property
    def id(self) -> str:
        return f"request-{self.index}"

    def count_crash(self) -> int:
        """A process crashed or hung while it computed this request, a suspect from now on. Tokens that are still to come from before prove
        nothing. Returns how many processes did so while it ran alone."""
        self.num_crashes += self.runs_alone
        self.is_suspect, self.replays_alone, self.runs_alone = True, self.is_suspect, False
        self.unproven.clear()
        return self.num_crashes

    @property
    def end(self) -> EndEvent | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, EndEvent) else None

    @property
    def num_bytes(self) -> int:
        """About the memory that it takes."""
        tokens = [event for event in self.events if isinstance(event, TokenEvent)]
        num_logprobs = sum(1 + len(each.top) for event in tokens for each in event.logprobs + event.prompt_logprobs)
        form = b"" if self.origin is None else self.origin.form
        return 256 * len(self.events) + 128 * num_logprobs + 40 * len(self.prompt_token_ids) + len(form)

    @property
    def num_expected_now(self) -> int:
        """Tokens of output that are expected to come."""
        open_choices = (choice for choice in self.choices if choice.finish_reason is None)
        return sum(max(0, self.num_expected_tokens - len(choice.token_ids)) for choice in open_choices)

    @property
    def token_ids(self) -> list[int]:
        """Token ids of choice 0."""
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        """Text of choice 0."""
        return "".join(event.text for event in self.events if isinstance(event, EndEvent) or event.choice == 0)


class RequestLogs:
    """The logs of all requests, by number."""

    def __init__(self) -> None:
        self._logs: dict[int, RequestLog] = {}
        self._num_requests = 0

    @property
    def num_logs(self) -> int:
        """Number of requests whose log is kept."""
        return len(self._logs)

    def log(self, index: int) -> RequestLog:
        """The request's log; KeyError when there is none or it was forgotten."""
        return self._logs[index]

    def has_ended(self, index: int) -> bool:
        return self._logs[index].end is not None

    def events(self, index: int, start: int = 0) -> list[ClientEvent]:
        """The request's events from number `start` on, but for those that are held. A client reads at its own pace; a slow client delays no
        other."""
        log = self._logs[index]
        return log.events[start : len(log.events) - log.num_held]

    def hold(self, events: Iterable[ClientEvent]) -> None:
        """Hold the latest events back, until they are in the request log on disk."""
        for event in events:
            if (log := self._logs.get(event.request)) is not None:
                log.num_held += 1

    def release(self, event: ClientEvent) -> None:
        """The oldest event that is held is in the request log on disk."""
        if (log := self._logs.get(event.request)) is not None:
            log.num_held -= 1

    def forget(self, index: int) -> None:
        """Drop the log of a request that has ended. ValueError while it has not."""
        if self._logs[index].end is None:
            raise ValueError(f"request {index} has not ended")
        del self._logs[index]

    def _new_log(self, params: SamplingParams) -> RequestLog:
        log = RequestLog(self._num_requests, params)
        self._num_requests += 1
        self._logs[log.index] = log
        return log


def request_of(log: RequestLog, stage: Stage = "all") -> Request:
    """The message that submits the request's current attempt to its group."""
    return Request(
        id=log.id,
        index=log.index,
        attempt=log.attempt,
        prompt_token_ids=log.prompt_token_ids,
        max_tokens=log.max_tokens,
        seed=log.seed,
        params=log.params,
        committed_token_ids=tuple(tuple(choice.token_ids) for choice in log.choices) if log.attempt or log.kv else (),
        ended_choices=tuple(choice.index for choice in log.choices if choice.finish_reason is not None),
        is_suspect=log.is_suspect,
        replays_alone=log.replays_alone,
        stage=stage,
        kv=log.kv,
    )
