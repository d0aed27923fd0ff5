"""The requests of front ends: admits them, sends each front end the new tokens of its requests, and cancels those of one that dies.

The request log is the only buffer. A front end gets what is new of all its requests in one message, and the next one when its connection
has room. So a front end that reads slowly delays no other, and gets larger messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from flowrt.actors.control import Control
from flowrt.actors.front_end_messages import (
    Attach,
    Attached,
    CancelRequest,
    Outputs,
    Place,
    Refusal,
    RequestOutput,
    Reserve,
    Reserved,
    StateQuery,
    StateReport,
    StopChoice,
)
from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.gateway.requests import Requests
from flowrt.transports.errors import TransportError

log = logging.getLogger("flowrt.gateway")

SEND_SECONDS = 2.0  # for a front end to read what is left
MAX_EVENTS = 4096  # of one message: with 20 logprobs per token about 1 MiB

Send = Callable[[str, Control], Awaitable[None]]


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class _FollowedRequest:
    """A request of a front end at the gateway. `on_change` is called after new events. `num_sent`: events of its log that were sent."""

    index: int
    on_change: Callable[[], None]
    num_sent: int = 0


@dataclass
class FrontEndQueue:
    requests: dict[int, _FollowedRequest] = field(default_factory=dict)  # by the front end's number
    changed: dict[int, None] = field(default_factory=dict)  # numbers of requests with new events, in order
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_idle: asyncio.Event = field(default_factory=_set_event)  # nothing is left to send
    num_lost: int = 0  # incarnations; each numbers its queries from 0


class FrontEnds:
    """`send` waits while the connection to a front end is full, `post` queues a message. `report_state` returns the response to a query."""

    def __init__(
        self,
        names: Iterable[str],
        requests: Requests,
        send: Send,
        post: Callable[[str, Control], None],
        report_state: Callable[[StateQuery], Awaitable[StateReport]],
    ) -> None:
        self._requests, self._send, self._post, self._report_state = requests, send, post, report_state
        self.queues = {name: FrontEndQueue() for name in names}
        self._has_failed = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        return list(self.queues)

    def begin(self) -> None:
        """Start one task per front end. `aclose` ends these tasks."""
        for name in self.queues:
            self._spawn(self._send_outputs(name), f"outputs to {name}")

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def on_control(self, name: str, control: Control) -> None:
        """Handle a message of the current incarnation of a front end. Ignores other messages, and those of other workers."""
        front_end = self.queues.get(name)
        if front_end is None:
            return
        if isinstance(control, Reserve | StateQuery) and control.num_refused and self._requests.metrics is not None:
            self._requests.metrics.refuse("overloaded", control.num_refused)
        match control:
            case Reserve():
                self._reserve(name, front_end, control)
            case Place(number, prompt_token_ids, origin) if (request := front_end.requests.get(number)) is not None:
                self._requests.place(request.index, prompt_token_ids, origin)
            case Attach():
                self._attach(name, front_end, control)
            case StopChoice(number, choice) if (request := front_end.requests.get(number)) is not None:
                self._requests.stop_choice(request.index, choice)
            case CancelRequest(number, is_invalid):
                if is_invalid and self._requests.metrics is not None and (request := front_end.requests.get(number)) is not None:
                    self._requests.metrics.withdraw(request.index, "invalid")
                self._close(front_end, number)
            case StateQuery():
                self._spawn(self._respond(name, front_end, control), f"query of {name}")

    def lose(self, name: str) -> None:
        """Cancel the requests of a front end that has died. No-op for other workers."""
        if (front_end := self.queues.get(name)) is not None:
            front_end.num_lost += 1
            for number in list(front_end.requests):
                self._close(front_end, number)

    def fail(self, error: str) -> None:
        """The run has failed: end every request with this error, in a last message to each front end, and admit no more."""
        self._has_failed = True
        for name, front_end in self.queues.items():
            ends = tuple(RequestOutput(number, (EndEvent(number, "error", "", error),)) for number in front_end.requests)
            if ends:  # else it may not even be connected
                with suppress(TransportError):
                    self._post(name, Outputs(ends))
            front_end.requests.clear()
            front_end.changed.clear()

    def leftovers(self) -> list[str]:
        """What is left when all clients have left."""
        return [f"{name} keeps {len(queue.requests)} requests" for name, queue in self.queues.items() if queue.requests or queue.changed]

    async def wait_sent(self) -> None:
        """Wait until nothing is left to send. It does not wait long for a front end that reads nothing."""
        waiting = [each.is_idle.wait() for each in self.queues.values()]
        with suppress(TimeoutError):
            async with asyncio.timeout(SEND_SECONDS):
                await asyncio.gather(*waiting)

    # Inside.

    def _spawn(self, task: Awaitable[None], name: str) -> None:
        spawned = asyncio.get_running_loop().create_task(_awaited(task), name=name)
        self._tasks.add(spawned)
        spawned.add_done_callback(self._tasks.discard)

    def _reserve(self, name: str, front_end: FrontEndQueue, reserve: Reserve) -> None:
        number, requests = reserve.number, self._requests
        if number in front_end.requests:
            return
        failed = Refusal("unavailable", "the graph has failed") if self._has_failed else None
        refusal = failed or requests.gateway.admission.refusal_now(reserve.num_tokens)
        if refusal is not None and requests.metrics is not None:
            requests.metrics.refuse(refusal.kind)
        if refusal is None:
            on_change = partial(self._note_change, front_end, number)
            front_end.requests[number] = _FollowedRequest(requests.open(reserve.params, reserve.num_tokens, on_change), on_change)
        self._post(name, Reserved(number, refusal, requests.gateway.admission.overload))

    def _attach(self, name: str, front_end: FrontEndQueue, attach: Attach) -> None:
        number, requests = attach.number, self._requests
        index = requests.find(attach.id).get(attach.prompt)
        if index is None or number in front_end.requests or self._has_failed:
            self._post(name, Attached(number))
            return
        on_change = partial(self._note_change, front_end, number)
        front_end.requests[number] = _FollowedRequest(index, on_change)
        requests.attach(index, on_change)
        log = requests.gateway.log(index)
        self._post(name, Attached(number, log.prompt_token_ids, log.origin))
        on_change()

    def _close(self, front_end: FrontEndQueue, number: int) -> None:
        front_end.changed.pop(number, None)
        if (request := front_end.requests.pop(number, None)) is not None:
            self._requests.close(request.index, request.on_change)

    def _note_change(self, front_end: FrontEndQueue, number: int) -> None:
        if number in front_end.requests:  # it is not being closed
            front_end.changed[number] = None
            front_end.is_idle.clear()
            front_end.wake.set()

    async def _send_outputs(self, name: str) -> None:
        front_end = self.queues[name]
        while True:
            if not (outputs := self._take_outputs(front_end)):
                front_end.wake.clear()
                front_end.is_idle.set()
                await front_end.wake.wait()
                continue
            with suppress(TransportError):  # it has died: `lose` follows
                await self._send(name, Outputs(outputs))

    def _take_outputs(self, front_end: FrontEndQueue) -> tuple[RequestOutput, ...]:
        """What is new of the requests that have changed, up to MAX_EVENTS events. Closes the requests that have ended."""
        outputs: list[RequestOutput] = []
        num_events = 0
        while front_end.changed and num_events < MAX_EVENTS:
            number = next(iter(front_end.changed))
            del front_end.changed[number]
            request = front_end.requests[number]
            events = self._requests.gateway.events(request.index, request.num_sent)
            if len(events) > MAX_EVENTS:
                events = events[:MAX_EVENTS]
                front_end.changed[number] = None
            request.num_sent += len(events)
            if events:
                outputs.append(RequestOutput(number, tuple(events)))
                num_events += sum(1 + len(event.prompt_logprobs) if isinstance(event, TokenEvent) else 1 for event in events)
                if outputs[-1].end is not None:
                    self._close(front_end, number)
        return tuple(outputs)

    async def _respond(self, name: str, front_end: FrontEndQueue, query: StateQuery) -> None:
        num_lost = front_end.num_lost
        try:
            report = await self._report_state(query)
        except Exception:  # a front end that gets no response asks no more
            log.exception("the state of the graph could not be read for %s", name)
            report = StateReport(query.number, False, "the state of the graph could not be read")
        if front_end.num_lost == num_lost:  # else the next incarnation may have a query of this number
            with suppress(TransportError):
                self._post(name, report)


async def _awaited(task: Awaitable[None]) -> None:
    await task
