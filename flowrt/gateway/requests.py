"""Serves the requests of a running graph: carries out the gateway's decisions, wakes the clients, and reports progress to health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from flowrt.actors.control import Control, Ended, Submit, Tokens
from flowrt.actors.mailbox import Mailbox
from flowrt.errors import UserError, shown
from flowrt.gateway.gateway import ClientEvent, EndEvent, Gateway, SendCancel, SendRequest, TokenEvent
from flowrt.reliability.health import RequestProgress
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Clock

Send = Callable[[str, Control], Awaitable[None]]
MAX_UNREAD = 1024  # logs kept of requests that have ended and that no client follows


class Requests:
    """`send(group, control)` waits while the group's control connection is full. `progress` receives the starts, tokens and ends of
    requests."""

    def __init__(self, gateway: Gateway, send: Send, progress: RequestProgress, clock: Clock) -> None:
        self.gateway = gateway
        self._send, self._progress, self._clock = send, progress, clock
        self._changed: dict[int, asyncio.Event] = {}
        self._in_use: set[int] = set()  # requests that a call submits or follows
        self._unread: dict[int, None] = {}  # requests that have ended and that no call uses, oldest first
        self._outgoing: dict[str, Mailbox[SendCancel]] = {group: Mailbox(1 << 16) for group in gateway.loads}
        self._senders: list[asyncio.Task[None]] = []  # one per group: a stopped group does not delay the cancels of others
        self._failure: Exception | None = None
        self.has_raised_failure = False
        self._is_closing = False
        self._submitting: dict[str, set[asyncio.Timeout]] = {group: set() for group in gateway.loads}  # Submits under way

    def begin(self) -> None:
        """Start one task per group that sends cancels: the run is up. `aclose` ends these tasks."""
        for group in self._outgoing:
            self._senders.append(asyncio.get_running_loop().create_task(self._send_cancels(group), name=f"cancels for {group}"))

    async def aclose(self) -> None:
        self._is_closing = True
        for sender in self._senders:
            sender.cancel()
        if self._senders:
            await asyncio.wait(self._senders)

    def fail(self, error: Exception) -> None:
        """Make each `follow` raise `error`, once it has yielded the events so far: the run has failed."""
        self._failure = error
        for changed in self._changed.values():
            changed.set()

    async def submit(self, params: SamplingParams, tokenize: Callable[[], Awaitable[Sequence[int]]]) -> int:
        """Submit a request and return its number. The request is reserved first; then `tokenize` returns the prompt's token ids.

        Raises as `send`. A UserError of `tokenize` ends the request with that error. A cancelled or failed call cancels the request.
        """
        gateway = self.gateway
        index = gateway.reserve(params)
        self._changed[index] = asyncio.Event()
        self._in_use.add(index)
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
        placed = gateway.place(index, token_ids) if error is None else gateway.refuse(index, error)
        if isinstance(placed, EndEvent):
            self._carry_out([placed])
        else:
            await self._send_request(placed)

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
        seen = 0
        try:
            while True:
                self._changed[index].clear()
                for event in gateway.events(index, seen):
                    seen += 1
                    yield event
                    if isinstance(event, EndEvent):
                        return
                if self._failure is not None:
                    self.has_raised_failure = True
                    raise self._failure
                await self._changed[index].wait()
        finally:
            self._let_go(index)
            self._in_use.discard(index)

    def prompt_token_ids(self, index: int) -> tuple[int, ...]:
        """The prompt token ids of a request; empty when it has none. Raises UserError for an unknown request."""
        self._check_known(index)
        return self.gateway.log(index).prompt_token_ids

    def on_control(self, control: Control) -> None:
        """Handle a message of a group: Tokens or Ended. Ignores other messages."""
        match control:
            case Tokens(tokens):
                for token in tokens:
                    self._carry_out(self.gateway.on_token(token))
            case Ended():
                self._carry_out(self.gateway.on_ended(control))

    def fence_group(self, group: str, why: str) -> None:
        """End all requests of a group that was marked dead, including those being submitted, and route no more requests to it."""
        if group in self._submitting:
            self._carry_out(self.gateway.fence_group(group, why))
            for sending in self._submitting[group]:
                sending.reschedule(0.0)

    def readmit_group(self, group: str) -> None:
        """Route requests to a fenced group again."""
        self.gateway.readmit_group(group)

    def end_all(self) -> None:
        """End all active requests with reason "abort": the run was closed."""
        self._carry_out(self.gateway.end_all("abort"))

    async def _send_request(self, placed: SendRequest) -> None:
        """Send a request to its group. Returns without sending it when the group is fenced meanwhile: the fence has ended the request."""
        sending, submitting = asyncio.timeout(None), self._submitting[placed.group]
        submitting.add(sending)
        try:
            async with sending:
                await self._send(placed.group, Submit(placed.request))
        except Exception:
            if not sending.expired():
                raise
        finally:
            submitting.discard(sending)

    def _check_known(self, index: int) -> None:
        if type(index) is not int or index not in self._changed:
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
        del self._changed[index]

    def _carry_out(self, decisions: Iterable[ClientEvent | SendCancel]) -> None:
        now = self._clock.now()
        for decision in decisions:
            if isinstance(decision, SendCancel):
                self._outgoing[decision.group].post(decision)
                continue
            if isinstance(decision, TokenEvent):
                self._progress.progressed(now)
            elif isinstance(decision, EndEvent):
                self._progress.ended(now)
                if decision.request not in self._in_use:
                    self._keep_unread(decision.request)
            if (changed := self._changed.get(decision.request)) is not None:
                changed.set()

    async def _send_cancels(self, group: str) -> None:
        outgoing = self._outgoing[group]
        while not self._is_closing:  # `cancel` is delivered once; if `send` raises another error instead, this ends the task
            decision = await outgoing.wait_item()
            outgoing.take_nowait()
            with suppress(Exception):  # a dead worker needs no cancel; `follow` raises the run's failure
                await self._send(decision.group, decision.cancel)
