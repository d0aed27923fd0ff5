"""Serves the requests of a running graph: carries out the gateway's decisions, wakes the clients, and reports progress to health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from flowrt.actors.control import Control, Ended, KvLost, KvPulled, Prefilled, Prefilling, RunsAlone, Submit, Tokens
from flowrt.actors.mailbox import Mailbox
from flowrt.errors import UserError, shown
from flowrt.gateway.decisions import Decision, ForWorker, SendCancel, SendCompleted, SendRequest
from flowrt.gateway.gateway import ClientEvent, EndEvent, Gateway, TokenEvent
from flowrt.gateway.request_metrics import RequestMetrics
from flowrt.reliability.health import RequestProgress
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Clock

Send = Callable[[str, Control], Awaitable[None]]
ROUNDING_SECONDS = 1e-6  # a timer that is set to a deadline may fire this much before it, because its sums round differently
MAX_UNREAD = 1024  # logs kept of requests that have ended and that no client follows


class Requests:
    """`send(group, control)` waits while the group's control connection is full. `progress` receives the starts, tokens and ends of
    requests, `on_token` each committed token."""

    def __init__(
        self,
        gateway: Gateway,
        send: Send,
        progress: RequestProgress,
        clock: Clock,
        on_token: Callable[[TokenEvent], None] | None = None,
        metrics: RequestMetrics | None = None,
    ) -> None:
        self.gateway = gateway
        self._send, self._progress, self._clock, self._on_token = send, progress, clock, on_token
        self.metrics = metrics
        self._on_change: dict[int, Callable[[], None]] = {}  # by request: called after new events
        self._in_use: set[int] = set()  # requests that a call submits or follows
        self._unread: dict[int, None] = {}  # requests that have ended and that no call uses, oldest first
        self._outgoing: dict[str, Mailbox[ForWorker]] = {group: Mailbox(1 << 16) for group in gateway.workers}
        self._senders: list[asyncio.Task[None]] = []  # one per group: a stopped group does not delay the messages to others
        self._timer: asyncio.TimerHandle | None = None  # for the gateway's deadline
        self._failure: Exception | None = None
        self.has_raised_failure = False
        self._is_closing = False
        self._has_drained: asyncio.Event | None = None

    def begin(self) -> None:
        """Start one task per group that sends requests and cancels: the run is up. `aclose` ends these tasks."""
        for group in self._outgoing:
            self._senders.append(asyncio.get_running_loop().create_task(self._send_all(group), name=f"requests of {group}"))

    async def aclose(self) -> None:
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for sender in self._senders:
            sender.cancel()
        if self._senders:
            await asyncio.wait(self._senders)

    def fail(self, error: Exception) -> None:
        """Make each `follow` raise `error`, once it has yielded the events so far: the run has failed."""
        self._failure = error
        for on_change in list(self._on_change.values()):
            on_change()
        if self._has_drained is not None:
            self._has_drained.set()

    async def drain(self) -> None:
        """Admit no new requests, and wait until all admitted ones have ended. Raises the run's failure when the run fails first."""
        self.gateway.drain()
        if self._failure is None:
            if self._has_drained is None:  # else another call waits for it
                self._has_drained = asyncio.Event()
            self._note_drained()
            await self._has_drained.wait()
        if self._failure is not None:
            raise self._failure

    async def submit(self, params: SamplingParams, tokenize: Callable[[], Awaitable[Sequence[int]]]) -> int:
        """Submit a request and return its number. The request is reserved first; then `tokenize` returns the prompt's token ids.

        A UserError of `tokenize` ends the request with that error. A cancelled or failed call cancels the request.
        """
        gateway = self.gateway
        index = self._reserve(gateway.reserve(params), _nothing)
        try:
            await self._submit(index, tokenize)
        except BaseException:  # the caller has no number, so it cannot end the request
            self._let_go(index)
            raise
        finally:
            self._in_use.discard(index)
        if gateway.has_ended(index):
            self._keep_unread(index)
        return index

    def _reserve(self, index: int, on_change: Callable[[], None]) -> int:
        self._on_change[index] = on_change
        self._in_use.add(index)
        return index

    async def _submit(self, index: int, tokenize: Callable[[], Awaitable[Sequence[int]]]) -> None:
        gateway = self.gateway
        if gateway.has_ended(index):
            return
        self._progress.opened(self._clock.now())
        token_ids: Sequence[int] = ()
        error: str | None = None
        try:
            token_ids = await tokenize()
        except UserError as failed:
            error = str(failed)
        if gateway.has_ended(index):  # the run was closed meanwhile
            return
        self._carry_out(gateway.place(index, token_ids) if error is None else [gateway.refuse(index, error)])

    async def follow(self, index: int) -> AsyncGenerator[ClientEvent, None]:
        """Yield the events of a request from the first one on. Leaving early cancels the request.

        Raises UserError for an unknown request or a second reader, and the run's failure when the run fails first.
        """
        gateway = self.gateway
        self._check_known(index)
        if index in self._in_use:
            raise UserError(f"request {index} is followed already; a request has one reader")
        self._in_use.add(index)
        self._unread.pop(index, None)
        seen, changed = 0, asyncio.Event()
        self._on_change[index] = changed.set
        try:
            while True:
                changed.clear()
                for event in gateway.events(index, seen):
                    seen += 1
                    yield event
                    if isinstance(event, EndEvent):
                        return
                if self._failure is not None:
                    self.has_raised_failure = True
                    raise self._failure
                await changed.wait()
        finally:
            self.close(index)

    # For a client that calls when it has room for more events.

    def open(self, params: SamplingParams, num_tokens: int, on_change: Callable[[], None]) -> int:
        """Admit a request whose events have no text, see `Gateway.reserve`. Returns its number. `on_change` is called after new events,
        and must not wait. `place` or `close` follows."""
        index = self._reserve(self.gateway.reserve(params, num_tokens=num_tokens, has_text=False), on_change)
        if not self.gateway.has_ended(index):
            now = self._clock.now()
            self._progress.opened(now)
            if self.metrics is not None:
                self.metrics.admit(index, now)
        return index

    def place(self, index: int, prompt_token_ids: Sequence[int]) -> None:
        self._carry_out(self.gateway.place(index, prompt_token_ids))

    def stop_choice(self, index: int, choice: int) -> None:
        self._carry_out(self.gateway.stop_choice(index, choice))

    def close(self, index: int) -> None:
        """Drop a request that no client follows any more; cancel it unless it has ended."""
        self._let_go(index)
        self._in_use.discard(index)

    def prompt_token_ids(self, index: int) -> tuple[int, ...]:
        """The prompt token ids of a request; empty when it has none. Raises UserError for an unknown request."""
        self._check_known(index)
        return self.gateway.log(index).prompt_token_ids

    def on_control(self, group: str, control: Control) -> None:
        """Handle a message of the current incarnation of a group, about one of its requests. Ignores other messages."""
        match control:
            case Tokens(tokens):
                for token in tokens:
                    self._carry_out(self.gateway.on_token(group, token))
            case Ended():
                self._carry_out(self.gateway.on_ended(group, control))
            case RunsAlone():
                self.gateway.on_runs_alone(group, control)
            case Prefilling() | Prefilled() | KvPulled() | KvLost():
                self._carry_out(self.gateway.on_transfer(group, control))

    def lose_group(self, group: str, why: str, **how: bool) -> None:
        """Move the requests of a group; the arguments are those of `Gateway.lose_group`. No-op for other workers."""
        if group in self._outgoing:
            self._carry_out(self.gateway.lose_group(group, why, **how))

    def lose_server(self, server: str, why: str, alone_for: str, is_colocated: bool = False) -> None:
        """Suspect the requests that a crashed server may have computed parts of; see `Gateway.lose_server`. No-op for groups, but for those
        that are servers too (`is_colocated`)."""
        if is_colocated or server not in self._outgoing:
            self._carry_out(self.gateway.lose_server(server, why, alone_for))

    def give_up_group(self, group: str) -> None:
        """Limit the time that requests wait for this lost group. No-op for other workers."""
        if group in self._outgoing:
            self._carry_out(self.gateway.give_up_group(group))

    def readmit_group(self, group: str) -> None:
        """Place requests in a lost group again. No-op for other workers."""
        if group in self._outgoing:
            self._carry_out(self.gateway.readmit_group(group))

    def end_all(self) -> None:
        """End all active requests with reason "abort": the run was closed."""
        self._carry_out(self.gateway.end_all())

    def _check_known(self, index: int) -> None:
        if type(index) is not int or index not in self._on_change:
            kept = f"it can be followed once, and the logs of {MAX_UNREAD} ended requests are kept for it"
            raise UserError(f"there is no request {shown(index)} to follow; submit gives the number, {kept}")

    def _keep_unread(self, index: int) -> None:
        """Keep the log of a request that has ended without a reader, and drop the oldest of too many."""
        self._unread[index] = None
        if len(self._unread) > MAX_UNREAD:
            self._let_go(next(iter(self._unread)))

    def _let_go(self, index: int) -> None:
        """Cancel a request without a reader, unless it has ended, and drop its log."""
        self._unread.pop(index, None)
        self._carry_out(self.gateway.cancel(index))
        if self.gateway.log(index).end is not None:
            self.gateway.forget(index)
        del self._on_change[index]

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        now, metrics = self._clock.now(), self.metrics
        for decision in decisions:
            if metrics is not None:
                _count(metrics, decision, now)
            if isinstance(decision, ForWorker):
                self._outgoing[decision.group].post(decision)
                continue
            if isinstance(decision, TokenEvent):
                self._progress.progressed(now)
                if self._on_token is not None:
                    self._on_token(decision)
            elif isinstance(decision, EndEvent):
                self._progress.ended(now)
                self._note_drained()
                if decision.request not in self._in_use:
                    self._keep_unread(decision.request)
            if (on_change := self._on_change.get(decision.request)) is not None:
                on_change()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self.gateway.deadline) is not None and not self._is_closing:
            self._timer = asyncio.get_running_loop().call_later(max(ROUNDING_SECONDS, deadline - now), self._on_time)

    def _on_time(self) -> None:
        self._carry_out(self.gateway.on_time())

    def _note_drained(self) -> None:
        if self._has_drained is not None and not self.gateway.num_unfinished:
            self._has_drained.set()

    async def _send_all(self, group: str) -> None:
        outgoing = self._outgoing[group]
        while not self._is_closing:  # `decision` is delivered once; if `send` raises another error instead, this ends the task
            decision = await outgoing.wait_item()
            outgoing.take_nowait()
            if isinstance(decision, SendCancel):
                control: Control = decision.cancel
            elif isinstance(decision, SendCompleted):
                control = decision.completed
            elif self.gateway.is_placed(decision.request, group):
                control = Submit(decision.request)
            else:  # it has ended, or the group was lost meanwhile
                continue
            with suppress(Exception):  # a dead group needs no message; `follow` raises the run's failure
                await self._send(group, control)


def _count(metrics: RequestMetrics, decision: Decision, now: float) -> None:
    match decision:
        case TokenEvent():
            metrics.add_token(decision.request, decision.choice, now)
        case SendRequest() if decision.request.kv is None:  # otherwise the same attempt goes on in a group
            metrics.place(decision.index, len(decision.request.prompt_token_ids), now)
        case EndEvent():
            metrics.end(decision.request, decision.finish_reason, now)


def _nothing() -> None:
    pass
