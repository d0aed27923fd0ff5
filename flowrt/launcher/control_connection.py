"""The launcher's end of a worker's control connection: messages sent and received, and the requests that wait for a response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from flowrt.actors.control import Control, Drain, Drained, Statistics, StatisticsRequest, Stop, as_message, from_message
from flowrt.actors.mailbox import Mailbox
from flowrt.transports.contract import Channel
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel, TransportError
from flowrt.transports.wire.message import Message

MAX_POSTED = 1 << 12  # messages queued for one worker; further ones are dropped: a worker this far behind has long been stopped

T = TypeVar("T")


class ControlConnection:
    """The control connection of one incarnation of a worker. `last_message_seconds`: when its latest message was received (loop time).
    `statistics`: the latest that it has sent."""

    def __init__(self, name: str, incarnation: str, pid: int, control: Channel) -> None:
        self.name, self.incarnation, self.pid, self._control = name, incarnation, pid, control
        self.last_message_seconds = asyncio.get_running_loop().time()
        self.statistics = Statistics()
        self._statistics_requests: list[asyncio.Future[Statistics]] = []
        self._drain_requests: list[asyncio.Future[None]] = []
        self._posted: Mailbox[Message] = Mailbox(MAX_POSTED)

    async def send(self, control: Control) -> None:
        """Send a message; wait while the connection is full. Raises TransportError when the worker is gone."""
        await self._control.send(as_message(control))

    def post(self, control: Control) -> None:
        """Send a message now, or queue it until the connection has room; keeps the order of posts. Does not wait.

        Ignores a dead worker: `receive_all` detects the death.
        """
        message = as_message(control)
        with contextlib.suppress(TransportError, OverflowError):
            if self._posted.items or not self._control.send_nowait(message):
                self._posted.post(message)

    def send_if_room(self, control: Control) -> None:
        """Send a message if the connection has room, else drop it. Ignores a dead worker."""
        with contextlib.suppress(TransportError):
            self._control.send_nowait(as_message(control))

    async def send_stop(self, deadline: float) -> bool:
        """Send Stop. False: the worker is gone. True also when the connection has no room until `deadline` (loop time)."""
        try:
            async with asyncio.timeout_at(deadline):
                await self.send(Stop())
        except TransportError:
            return False
        except TimeoutError:
            pass
        return True

    def request_statistics(self) -> asyncio.Future[Statistics]:
        """Request statistics; the future is done when the worker responds."""
        return self._request(StatisticsRequest(), self._statistics_requests)

    def request_drain(self) -> asyncio.Future[None]:
        """Request a drain; the future is done when the worker has drained."""
        return self._request(Drain(), self._drain_requests)

    async def receive_all(self, on_control: Callable[[Control], None]) -> str | None:
        """Pass the worker's messages to `on_control` until the connection ends, and send the queued ones meanwhile.

        Returns why a message cannot be decoded; None at the end of the connection.
        """
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(self._send_posted(), name=f"notices to {self.name}")
            try:
                while True:
                    message = await self._control.recv()
                    self.last_message_seconds = asyncio.get_running_loop().time()
                    try:
                        control = from_message(message)
                    except msgspec.ValidationError as error:
                        return str(error)
                    self._complete_requests(control)
                    on_control(control)
            except (EndOfChannel, BrokenChannelError, ClosedChannelError):
                return None
            finally:
                sender.cancel()

    def give_up_requests(self) -> None:
        """Complete pending requests of a dead worker: statistics with the latest known ones, drains as done."""
        _complete(self._statistics_requests, self.statistics)
        _complete(self._drain_requests, None)

    async def aclose(self) -> None:
        await self._control.aclose()

    def _complete_requests(self, control: Control) -> None:
        match control:
            case Statistics():
                self.statistics = control
                _complete(self._statistics_requests, control)
            case Drained():
                _complete(self._drain_requests, None)

    async def _send_posted(self) -> None:
        with contextlib.suppress(TransportError):
            while True:
                await self._control.send(await self._posted.wait_item())
                self._posted.take_nowait()

    def _request(self, control: Control, requests: list[asyncio.Future[T]]) -> asyncio.Future[T]:
        response: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        requests.append(response)
        self.post(control)
        return response


def _complete(requests: list[asyncio.Future[T]], value: T) -> None:
    for future in requests:
        if not future.done():
            future.set_result(value)
    requests.clear()
