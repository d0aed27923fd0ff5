"""Requests of a running graph, from being taken to their last event.

Here: `Requests`: the gateway's decisions carried out, its clients woken, and what is in progress told to health. Not here: the decisions
(gateway.py), text to tokens and the graph around it (flowrt/api, the only user).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from flowrt.actors.control import Control, Ended, Submit, Tokens
from flowrt.actors.mailbox import Mailbox
from flowrt.errors import UserError
from flowrt.gateway.gateway import ClientEvent, EndEvent, Gateway, Parameters, SendCancel, TokenEvent
from flowrt.gateway.request_log import shown
from flowrt.reliability.health import Progress
from flowrt.seams import Clock

Send = Callable[[str, Control], Awaitable[None]]


class Requests:
    """`send(group, control)` waits while the group's line is full. `progress` is told what comes of requests."""

    def __init__(self, gateway: Gateway, send: Send, progress: Progress, clock: Clock) -> None:
        self.gateway = gateway
        self._send, self._progress, self._clock = send, progress, clock
        self._changed: dict[int, asyncio.Event] = {}
        self._followed: set[int] = set()
        self._outgoing: dict[str, Mailbox[SendCancel]] = {group: Mailbox(1 << 16) for group in gateway.loads}
        self._senders: list[asyncio.Task[None]] = []  # one per group: a group that stands still delays no other's cancels
        self._submitting: dict[str, set[asyncio.Timeout]] = {group: set() for group in gateway.loads}  # Submits under way
        self._failure: Exception | None = None
        self._is_closing = False

    def begin(self) -> None:
        """The run is up. `aclose` ends what this begins."""
        for group in self._outgoing:
            self._senders.append(asyncio.get_running_loop().create_task(self._send_cancels(group), name=f"cancels for {group}"))

    async def aclose(self) -> None:
        self._is_closing = True
        for sender in self._senders:
            sender.cancel()
        if self._senders:
            await asyncio.wait(self._senders)

    def fail(self, error: Exception) -> None:
        """The run has ended; whoever follows a request is raised this."""
        self._failure = error
        for changed in self._changed.values():
            changed.set()

    async def submit(self, prompt_token_ids: Sequence[int], parameters: Parameters) -> int:
        """Take a request; its number. Raises as `send`."""
        admitted = self.gateway.admit(prompt_token_ids, parameters)
        if isinstance(admitted, EndEvent):
            return self._refused(admitted)
        self._changed[admitted.index] = asyncio.Event()
        self._progress.opened(self._clock.now())
        sending, submitting = asyncio.timeout(None), self._submitting[admitted.group]
        submitting.add(sending)
        try:
            async with sending:
                await self._send(admitted.group, Submit(admitted.request))
        except BaseException:  # nobody has its number, so nobody else can end it
            if not sending.expired():  # else the group was fenced, which has ended the request
                self._let_go(admitted.index)
                raise
        finally:
            submitting.discard(sending)
        return admitted.index

    def refuse(self, error: str) -> int:
        """A request that ends with this error before it has tokens; its number."""
        return self._refused(self.gateway.refuse(error))

    async def follow(self, index: int) -> AsyncGenerator[ClientEvent, None]:
        """The events of a request, from its first; UserError for a second reader. Leaving early cancels the request."""
        gateway = self.gateway
        if type(index) is not int or index not in self._changed:
            raise UserError(f"there is no request {shown(index)} to follow; submit gives the number, and it can be followed once")
        if index in self._followed:
            raise UserError(f"request {index} is followed already; a request has one reader")
        self._followed.add(index)
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
                    raise self._failure
                await self._changed[index].wait()
        finally:
            self._let_go(index)
            self._followed.discard(index)

    def on_control(self, control: Control) -> None:
        """What a group says."""
        match control:
            case Tokens(tokens):
                for token in tokens:
                    self._carry_out(self.gateway.on_token(token))
            case Ended():
                self._carry_out(self.gateway.on_ended(control))

    def fence_group(self, group: str, why: str) -> None:
        """End the requests of a group that was marked dead, those that are being submitted too, and route no more to it."""
        if group in self._submitting:
            self._carry_out(self.gateway.fence_group(group, why))
            for sending in self._submitting[group]:
                sending.reschedule(0.0)

    def readmit_group(self, group: str) -> None:
        """The group works again."""
        self.gateway.readmit_group(group)

    def end_all(self) -> None:
        """The run was closed: what is left is cancelled."""
        self._carry_out(self.gateway.end_all("cancelled"))

    def _let_go(self, index: int) -> None:
        """Nobody reads this request any more: cancel it, unless it has ended."""
        self._carry_out(self.gateway.cancel(index))
        if self.gateway.log(index).end is not None:
            self.gateway.forget(index)
        del self._changed[index]

    def _refused(self, end: EndEvent) -> int:
        self._changed[end.request] = asyncio.Event()
        return end.request

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
            if (changed := self._changed.get(decision.request)) is not None:
                changed.set()

    async def _send_cancels(self, group: str) -> None:
        outgoing = self._outgoing[group]
        while not self._is_closing:  # `cancel` comes once: an error that `send` raises in its place must end this task, too
            decision = await outgoing.wait_item()
            outgoing.take_nowait()
            with suppress(Exception):  # a worker that is gone has nothing left to cancel; the run's failure is told elsewhere
                await self._send(decision.group, decision.cancel)
