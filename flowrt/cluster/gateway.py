"""The gateway: the log of every request, and what its client is told.

Here: Gateway, pure: requests, tokens and ends in; placements, events for clients and cancels for workers out. Not here: sockets,
tasks and control lines (flowrt/cluster/launcher carries decisions out), text to tokens (flowrt/serving), a group's own schedule
(flowrt/engine). No torch, no clock.

A token is committed when it is appended here. Only the next index from the current attempt is appended, so whatever a worker
repeats, or an older attempt still says, changes nothing. Each request ends in exactly one EndEvent, when all its choices have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from flowrt.actors.control import Cancel, Ended, Logprobs, Request, Sampling, Token
from flowrt.cluster.stop_strings import StopStrings
from flowrt.engine.routing import GroupLoad, choose_group
from flowrt.engine.validation import choices_refusal, most_new_tokens
from flowrt.graph.model import GraphLimits

MAX_PROMPT_TOKENS = 1 << 20
_LEAST_NUMBER, _MOST_NUMBER = -(1 << 63), (1 << 63) - 1  # what a message can carry
_NO_GROUP = "no attention group is left to serve the request"


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
    With `logprobs`: the token's own, and (token id, logprob) of the likeliest at its place, best first (control.Logprobs)."""

    request: int
    index: int
    token_id: int
    text: str
    choice: int = 0
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


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
    def max_requests(self) -> int:
        return self._max_requests

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
        if (refusal := choices_refusal(parameters.n)) is not None:
            return self._refuse(log, refusal)
        try:
            log.choices = [self._new_choice(choice, parameters) for choice in range(parameters.n)]
        except ValueError as error:
            return self._refuse(log, str(error))
        log.seed = self._draw_seed() if parameters.seed is None else parameters.seed
        room = most_new_tokens(len(log.prompt_token_ids), self._limits, self._max_position_embeddings)
        log.max_tokens = max(room, 1) if parameters.max_tokens is None else parameters.max_tokens
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
        choice = log.choices[token.choice] if token.choice < len(log.choices) else None
        for at, token_id in enumerate(token.token_ids):
            index = token.index + at
            if choice is not None and (choice.finish_reason is not None or index < len(choice.token_ids)):
                continue
            if choice is None or index > len(choice.token_ids) or index >= log.max_tokens:
                num_committed = 0 if choice is None else len(choice.token_ids)
                which = f"{log.id} (choice {token.choice})" if token.choice else log.id
                error = f"{log.group} sent token {index} of {which} where {num_committed} of {log.max_tokens} were committed"
                return decisions + self._end(log, "error", error, tell_worker=True)
            decisions += self._commit(log, choice, token_id, token.logprobs[at] if at < len(token.logprobs) else None)
        return decisions

    def on_ended(self, ended: Ended) -> list[ClientEvent | SendCancel]:
        """A choice of the current attempt is over; with the last one, or with an error, the request.

        A choice that ends with fewer tokens than its group drew has lost some: the request ends with an error.
        """
        log = self._alive.get(ended.request_id)
        if log is None or ended.attempt != log.attempt:
            return []
        if ended.reason == "error":
            return self._end(log, "error", ended.error)
        choice = log.choices[ended.choice] if ended.choice < len(log.choices) else None
        if choice is None or choice.finish_reason is not None:
            return []
        if ended.num_tokens is not None and ended.num_tokens != len(choice.token_ids):
            error = f"{log.group} ended {log.id} after {ended.num_tokens} tokens, {len(choice.token_ids)} were committed"
            return self._end(log, "error", error, tell_worker=True)
        return self._end_choice(log, choice, ended.reason)

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
            min_tokens=parameters.min_tokens,
            num_choices=len(log.choices),
            sampling=Sampling(
                temperature=parameters.temperature,
                top_k=parameters.top_k,
                top_p=parameters.top_p,
                seed=log.seed,
                repetition_penalty=parameters.repetition_penalty,
                presence_penalty=parameters.presence_penalty,
                frequency_penalty=parameters.frequency_penalty,
                num_logprobs=parameters.logprobs,
            ),
            stop_token_ids=parameters.stop_token_ids,
            ignore_eos=parameters.ignore_eos,
            committed_token_ids=tuple(tuple(choice.token_ids) for choice in log.choices) if log.attempt else (),
            ended_choices=tuple(choice.index for choice in log.choices if choice.finish_reason is not None),
        )
        return Placed(group, request, log.index)

    def _load(self, log: RequestLog, sign: int) -> None:
        assert log.group is not None
        load, num_choices = self._loads[log.group], len(log.choices)
        num_tokens = len(log.prompt_token_ids) + num_choices * log.max_tokens
        self._loads[log.group] = GroupLoad(load.num_sequences + sign * num_choices, load.num_tokens + sign * num_tokens)

    def _new_choice(self, index: int, parameters: Parameters) -> ChoiceLog:
        detokenizer = self._new_detokenizer() if self._new_detokenizer is not None else None
        return ChoiceLog(index, detokenizer, StopStrings(parameters.stop) if parameters.stop else None)

    def _commit(self, log: RequestLog, choice: ChoiceLog, token_id: int, logprobs: Logprobs | None) -> list[ClientEvent | SendCancel]:
        index = len(choice.token_ids)
        choice.token_ids.append(token_id)
        text, stopped = "", False
        if not self._is_stop_token(log, token_id):
            text, stopped = choice.push(token_id, looks_for_stops=index >= log.parameters.min_tokens)
        event = TokenEvent(log.index, index, token_id, text, choice.index)
        if logprobs is not None:
            event = msgspec.structs.replace(event, logprob=logprobs.token, top_logprobs=logprobs.top)
        log.events.append(event)
        return [event, *(self._end_choice(log, choice, "stop", tell_worker=True) if stopped else ())]

    def _is_stop_token(self, log: RequestLog, token_id: int) -> bool:
        """Stop tokens belong to the token ids of an output, not to its text."""
        parameters = log.parameters
        return token_id in parameters.stop_token_ids or (token_id in self._eos_token_ids and not parameters.ignore_eos)

    def _end_choice(self, log: RequestLog, choice: ChoiceLog, reason: str, tell_worker: bool = False) -> list[ClientEvent | SendCancel]:
        """One choice is over; when it was the last, so is the request."""
        if len(log.choices) == 1:
            return self._end(log, reason, tell_worker=tell_worker)
        assert log.group is not None
        text = choice.end(reason)
        assert choice.finish_reason is not None
        event = ChoiceEvent(log.index, choice.index, choice.finish_reason, text)
        log.events.append(event)
        decisions: list[ClientEvent | SendCancel] = [event]
        if tell_worker:
            decisions.append(SendCancel(log.group, Cancel(log.id, log.attempt, choice.index)))
        if all(each.finish_reason is not None for each in log.choices):
            decisions += self._end(log, log.choices[0].finish_reason or reason)
        return decisions

    def _end(self, log: RequestLog, reason: str, error: str | None = None, tell_worker: bool = False) -> list[ClientEvent | SendCancel]:
        """The request is over, and every choice that was not."""
        assert log.group is not None
        events: list[ClientEvent] = []
        text = ""
        for choice in log.choices:
            if choice.finish_reason is None:
                text = choice.end(reason)
                if len(log.choices) > 1:
                    events.append(ChoiceEvent(log.index, choice.index, choice.finish_reason or reason, text))
        if len(log.choices) == 1:
            events.append(EndEvent(log.index, log.choices[0].finish_reason or reason, text, error))
        else:
            events.append(EndEvent(log.index, reason, "", error))
        log.events += events
        decisions: list[ClientEvent | SendCancel] = [*events]
        if tell_worker:
            decisions.append(SendCancel(log.group, Cancel(log.id, log.attempt)))
        self._load(log, -1)
        del self._alive[log.id]
        log.group = None
        return decisions


def _unsendable(log: RequestLog) -> str | None:
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
        if not _LEAST_NUMBER <= number <= _MOST_NUMBER:
            return f"{name} of more than 64 bits; no message carries such a number"
    return None
