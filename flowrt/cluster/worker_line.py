"""One worker as the launcher hears it: its control line, what it has answered so far, and who waits for its next answer.

Here: `WorkerLine`. Not here: where the worker lives (hosts.py), what a broken line means for the run (launcher.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol, TypeVar

import msgspec

from flowrt.actors.control import (
    Ask,
    Connected,
    Control,
    Drain,
    Drained,
    Failed,
    LinkLost,
    Listening,
    Progress,
    Statistics,
    Stop,
    as_message,
    from_message,
)
from flowrt.cluster import events
from flowrt.cluster.hosts import Placed
from flowrt.cluster.verdict import Kind
from transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel, TransportError

T = TypeVar("T")


class Owner(Protocol):
    """Who is told what a worker says."""

    def on_event(self, event: events.Event) -> None: ...
    def on_control(self, name: str, control: Control) -> None: ...
    def on_link_lost(self, line: WorkerLine, lost: LinkLost) -> None: ...
    def accuse(self, kind: Kind, line: WorkerLine, reason: str) -> None: ...


class WorkerLine:
    """The control line of one worker. `ended` is done once the line has closed; an end before `told_to_stop` is a death."""

    def __init__(self, placed: Placed, owner: Owner) -> None:
        loop = asyncio.get_running_loop()
        self.placed, self._owner = placed, owner
        self.name, self.host, self._control = placed.name, placed.host, placed.control
        self.listening: asyncio.Future[Listening] = loop.create_future()
        self.connected: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.told_to_stop = False
        self.last_word_seconds = loop.time()
        self.statistics = Statistics()
        self._asked: list[asyncio.Future[Statistics]] = []
        self._draining: list[asyncio.Future[None]] = []

    async def send(self, control: Control) -> None:
        """Waits while the line is full. Raises TransportError when the worker is gone."""
        await self._control.send(as_message(control))

    async def tell(self, control: Control) -> None:
        """As `send`. A dead worker is for `listen` to notice, not for the speaker."""
        with contextlib.suppress(TransportError):
            await self.send(control)

    async def tell_stop(self, deadline: float) -> None:
        """Send Stop, unless the worker is gone already. One that leaves no room for it until `deadline` (loop time) counts as told."""
        try:
            async with asyncio.timeout_at(deadline):
                await self.send(Stop())
        except TransportError:
            return
        except TimeoutError:
            pass
        self.told_to_stop = True

    async def ask_statistics(self) -> asyncio.Future[Statistics]:
        """Asks; the answer comes later."""
        answer: asyncio.Future[Statistics] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        await self.tell(Ask())
        return answer

    async def ask_drain(self) -> asyncio.Future[None]:
        """Asks; done when the worker has drained."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._draining.append(answer)
        await self.tell(Drain())
        return answer

    async def listen(self) -> None:
        """Take what the worker says until its line ends."""
        clock = asyncio.get_running_loop()
        try:
            while True:
                message = await self._control.recv()
                self.last_word_seconds = clock.time()
                try:
                    control = from_message(message)
                except msgspec.ValidationError as error:
                    self._owner.accuse(Kind.DIED, self, f"sent nonsense on its control line: {error}")
                    break
                self._hear(control)
        except (EndOfChannel, BrokenChannelError, ClosedChannelError):
            pass
        self.ended.set_result(None)

    async def aclose(self) -> None:
        await self._control.aclose()

    def _hear(self, control: Control) -> None:
        match control:
            case Progress():
                self._owner.on_event(events.WorkerLoading(self.name, control.text, control.done, control.total))
                return
            case Listening():
                if not self.listening.done():
                    self.listening.set_result(control)
                    self._owner.on_event(events.WorkerListening(self.name, control.resident_bytes, control.imported_bytes))
                return
            case Connected():
                if not self.connected.done():
                    self.connected.set_result(None)
                    self._owner.on_event(events.WorkerConnected(self.name))
                return
            case Statistics():
                self.statistics = control
                _answer(self._asked, control)
            case Drained():
                _answer(self._draining, None)
            case LinkLost():
                self._owner.on_link_lost(self, control)
            case Failed():
                self._owner.accuse(Kind.BAD_INPUT if control.user else Kind.COMPLAINED, self, control.error)
        self._owner.on_control(self.name, control)


def _answer(waiting: list[asyncio.Future[T]], value: T) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(value)
    waiting.clear()
