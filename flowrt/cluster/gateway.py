"""The gateway: the log of every request, and what its client is told.

Here: Gateway, pure: requests, tokens and ends in; placements, events for clients and cancels for workers out. Not here: sockets,
tasks and control lines (flowrt/cluster/launcher carries decisions out), text to tokens (flowrt/serving), a group's own schedule
(flowrt/engine). No torch, no clock.

A token is committed when it is appended here. Only the next index from the current attempt is appended, so whatever a worker
repeats, or an older attempt still says, changes nothing. Each request ends in exactly one EndEvent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from flowrt.actors.control import Cancel, Ended, Request, Sampling, Token
from flowrt.cluster.stop_strings import StopStrings
from flowrt.engine.routing import GroupLoad, choose_group
from flowrt.engine.validation import most_new_tokens
from flowrt.graph.model import GraphLimits

MAX_PROMPT_TOKENS = 1 << 20
_LEAST_NUMBER, _MOST_NUMBER = -(1 << 63), (1 << 63) - 1  # what a message can carry
_NO_GROUP = "no attention group is left to serve the request"


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks of one request. max_tokens None: as many as the graph's limits and the model's positions leave; seed None:
    the gateway draws one."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class TokenEvent(msgspec.Struct, frozen=True):
    """One committed token. `text` is what may be shown now: it can be empty, or hold text of earlier tokens that was held back."""

    request: int
    index: int
    token_id: int
    text: str


class EndEvent(msgspec.Struct, frozen=True):
    """The request's one last event. finish_reason: stop, length, cancelled, error (then `error` says why). `text` is the rest."""

    request: int
    finish_reason: str
    text: str = ""
    error: str | None = None


ClientEvent = TokenEvent | EndEvent


@dataclass(frozen=True, slots=True)
class Placed:
    """Send this to the group as a Submit."""

    group: str
    request: Request
    index: int  # the request's number at this gateway, as in its events


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Send this to the group."""

    group: str
    cancel: Cancel


class Detokenizer(Protocol):
    """Text of one request's output, token by token."""

    def push(self, token_id: int) -> str:
        """The new text that is certain after this token; may be empty."""
        ...

    def flush(self) -> str:
        """The text still held back at the end."""
        ...


@dataclass(slots=True)
class RequestLog:
    """All that is known of a request. `events` is what its client has been or can be told: at most max_tokens + 1."""

    index: int
    prompt_token_ids: tuple[int, ...]
    parameters: Parameters
    max_tokens: int = 0
    seed: int = 0
    attempt: int = 0
    group: str | None = None  # None: nowhere, it has ended
    token_ids: list[int] = field(default_factory=list)
    events: list[ClientEvent] = field(default_factory=list)
    detokenizer: Detokenizer | None = None
    stops: StopStrings | None = None

    @property
    def id(self) -> str:
        return f"request-{self.index}"

    @property
    def end(self) -> EndEvent | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, EndEvent) else None

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


class Gateway:
    """`groups` are the names of the workers that take requests. `max_requests` bounds the requests that have not ended."""

    def __init__(
        self,
        groups: Iterable[str],
        limits: GraphLimits,
        max_position_embeddings: int,
        *,
        draw_seed: Callable[[], int],
        new_detokenizer: Callable[[], Detokenizer] | None = None,
        eos_token_ids: Iterable[int] = (),
        max_requests: int = 1024,
    ) -> None:
        self._loads = {group: GroupLoad() for group in groups}
        self._limits = limits
        self._max_position_embeddings = max_position_embeddings
        self._draw_seed = draw_seed
        self._new_detokenizer = new_detokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_requests = max_requests
        self._logs: dict[int, RequestLog] = {}
        self._alive: dict[str, RequestLog] = {}  # by Request.id
        self._num_requests = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._alive)

    @property
    def full(self) -> bool:
        """Whether the next request would be refused for want of room."""
        return len(self._alive) >= self._max_requests

    @property
    def loads(self) -> dict[str, GroupLoad]:
        return dict(self._loads)

    def log(self, index: int) -> RequestLog:
        """The request's log; KeyError when there is none or it was forgotten."""
        return self._logs[index]

    def events(self, index: int, start: int = 0) -> list[ClientEvent]:
        """The request's events from number `start` on: a client reads at its own pace, and nobody waits for it."""
        return self._logs[index].events[start:]

    def forget(self, index: int) -> None:
        """Drop the log of a request that has ended. ValueError while it has not."""
        if self._logs[index].end is None:
            raise ValueError(f"request {index} has not ended")
        del self._logs[index]

    # From clients

    def admit(self, prompt_token_ids: Sequence[int], parameters: Parameters = Parameters()) -> Placed | EndEvent:
        """Take a request and choose its group; or end it at once with the reason.

        Lengths and ranges are the engine's to check, but for what no message to it could hold.
        """
        log = self._new_log(prompt_token_ids, parameters)
        if (reason := _unsendable(log)) is not None:
            return self._refuse(log, reason)
        if self.full:
            return self._refuse(log, f"{len(self._alive)} requests are unfinished, more are not taken (max_requests: {self._max_requests})")
        if parameters.stop and self._new_detokenizer is None:
            return self._refuse(log, "stop strings need a tokenizer, and the model's directory has none; use stop_token_ids")
        try:
            log.stops = StopStrings(parameters.stop) if parameters.stop else None
        except ValueError as error:
            return self._refuse(log, str(error))
        log.seed = self._draw_seed() if parameters.seed is None else parameters.seed
        room = most_new_tokens(len(log.prompt_token_ids), self._limits, self._max_position_embeddings)
        log.max_tokens = max(room, 1) if parameters.max_tokens is None else parameters.max_tokens
        log.detokenizer = self._new_detokenizer() if self._new_detokenizer is not None else None
        group = choose_group(self._loads)
        if group is None:
            return self._refuse(log, _NO_GROUP)
        self._alive[log.id] = log
        return self._place(log, group)

    def refuse(self, error: str) -> EndEvent:
        """A request that failed before it had tokens (its text could not be tokenised): it ends with this error."""
        return self._refuse(self._new_log((), Parameters()), error)

    def cancel(self, index: int) -> list[ClientEvent | SendCancel]:
        """The client wants no more. After the end: nothing."""
        log = self._logs.get(index)
        return [] if log is None or log.group is None else self._end(log, "cancelled", tell_worker=True)

    # From workers

    def on_token(self, token: Token) -> list[ClientEvent | SendCancel]:
        """Commit what comes next in the request's log; ignore what was committed already, or comes from an older attempt.

        A gap cannot happen on a line that keeps order: it ends the request with an error rather than with wrong text.
        """
        log = self._alive.get(token.request_id)
        if log is None or token.attempt != log.attempt:
            return []
        decisions: list[ClientEvent | SendCancel] = []
        for index, token_id in enumerate(token.token_ids, token.index):
            if index < len(log.token_ids):
                continue
            if index > len(log.token_ids) or index >= log.max_tokens:
                error = f"{log.group} sent token {index} of {log.id} where {len(log.token_ids)} of {log.max_tokens} were committed"
                return decisions + self._end(log, "error", error, tell_worker=True)
            decisions += self._commit(log, token_id)
            if log.group is None:
                break
        return decisions

    def on_ended(self, ended: Ended) -> list[ClientEvent | SendCancel]:
        """The current attempt is over, and with it the request."""
        log = self._alive.get(ended.request_id)
        if log is None or ended.attempt != log.attempt:
            return []
        return self._end(log, ended.reason, ended.error)

    # When something was lost

    def place_again(self, index: int, avoid: Collection[str] = ()) -> Placed | EndEvent:
        """A new attempt that goes on behind the committed tokens, in a group not among `avoid`. ValueError after the end."""
        log = self._logs[index]
        if log.group is None:
            raise ValueError(f"request {index} has ended")
        group = choose_group(self._loads, avoid)
        if group is None:
            self._end(log, "error", _NO_GROUP)
            assert log.end is not None
            return log.end
        self._load(log, -1)
        log.attempt += 1
        return self._place(log, group)

    def end_all(self, reason: str, error: str | None = None) -> list[EndEvent]:
        """End every request: the run is over."""
        decisions = [decision for log in list(self._alive.values()) for decision in self._end(log, reason, error)]
        return [decision for decision in decisions if isinstance(decision, EndEvent)]

    # Inside

    def _new_log(self, prompt_token_ids: Sequence[int], parameters: Parameters) -> RequestLog:
        log = RequestLog(self._num_requests, tuple(prompt_token_ids), parameters)
        self._num_requests += 1
        self._logs[log.index] = log
        return log

    def _refuse(self, log: RequestLog, error: str) -> EndEvent:
        event = EndEvent(log.index, "error", "", error)
        log.events.append(event)
        return event

    def _place(self, log: RequestLog, group: str) -> Placed:
        log.group = group
        self._load(log, 1)
        parameters = log.parameters
        request = Request(
            id=log.id,
            attempt=log.attempt,
            prompt_token_ids=log.prompt_token_ids,
            max_tokens=log.max_tokens,
            sampling=Sampling(temperature=parameters.temperature, top_k=parameters.top_k, top_p=parameters.top_p, seed=log.seed),
            stop_token_ids=parameters.stop_token_ids,
            ignore_eos=parameters.ignore_eos,
            committed_token_ids=tuple(log.token_ids),
        )
        return Placed(group, request, log.index)

    def _load(self, log: RequestLog, sign: int) -> None:
        assert log.group is not None
        load = self._loads[log.group]
        num_tokens = len(log.prompt_token_ids) + log.max_tokens
        self._loads[log.group] = GroupLoad(load.num_requests + sign, load.num_tokens + sign * num_tokens)

    def _commit(self, log: RequestLog, token_id: int) -> list[ClientEvent | SendCancel]:
        index = len(log.token_ids)
        log.token_ids.append(token_id)
        text, stopped = "", False
        if log.detokenizer is not None and not self._is_stop_token(log, token_id):
            text = log.detokenizer.push(token_id)
            if log.stops is not None:
                text, stopped = log.stops.push(text)
        event = TokenEvent(log.index, index, token_id, text)
        log.events.append(event)
        if stopped:
            log.detokenizer = log.stops = None  # whatever they hold lies behind the stop string
            return [event, *self._end(log, "stop", tell_worker=True)]
        return [event]

    def _is_stop_token(self, log: RequestLog, token_id: int) -> bool:
        """Stop tokens belong to the token ids of an output, not to its text."""
        parameters = log.parameters
        return token_id in parameters.stop_token_ids or (token_id in self._eos_token_ids and not parameters.ignore_eos)

    def _end(self, log: RequestLog, reason: str, error: str | None = None, tell_worker: bool = False) -> list[ClientEvent | SendCancel]:
        assert log.group is not None
        text = log.detokenizer.flush() if log.detokenizer is not None else ""
        if log.stops is not None:
            text, stopped = log.stops.push(text)
            if stopped and reason == "length":
                reason = "stop"
            text += log.stops.flush()
        event = EndEvent(log.index, reason, text, error)
        log.events.append(event)
        decisions: list[ClientEvent | SendCancel] = [event]
        if tell_worker:
            decisions.append(SendCancel(log.group, Cancel(log.id, log.attempt)))
        self._load(log, -1)
        del self._alive[log.id]
        log.group = log.detokenizer = log.stops = None
        return decisions


def _unsendable(log: RequestLog) -> str | None:
    """Why the request cannot even be put into a message: a prompt without bound, or a number of more than 64 bits."""
    prompt, parameters = log.prompt_token_ids, log.parameters
    if len(prompt) > MAX_PROMPT_TOKENS:
        return f"prompt of {len(prompt)} tokens is longer than any that is taken ({MAX_PROMPT_TOKENS})"
    numbers = [("prompt token", token_id) for token_id in prompt]
    numbers += [("stop token", token_id) for token_id in parameters.stop_token_ids]
    named = (("max_tokens", parameters.max_tokens), ("top_k", parameters.top_k), ("seed", parameters.seed))
    numbers += [(name, number) for name, number in named if number is not None]
    for name, number in numbers:
        if not _LEAST_NUMBER <= number <= _MOST_NUMBER:
            return f"{name} of more than 64 bits; no message carries such a number"
    return None
