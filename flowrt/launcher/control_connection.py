"""The launcher's end of a worker's control connection: messages sent and received, and the requests that wait for a response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

import msgspec

from flowrt.actors.control import Control, Drain, Drained, Statistics, StatisticsRequest, Stop, as_message, from_message
from flowrt.actors.mailbox import Mailbox, MailboxClosedError
from flowrt.transports.contract import Channel
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel, TransportError
from flowrt.transports.wire.message import Message

MAX_QUEUED = 1 << 12  # messages queued for one worker; further ones are dropped: a worker this far behind has long been stopped

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
        self._queued: Mailbox[tuple[Message, asyncio.Future[None] | None]] = Mailbox(MAX_QUEUED)

    async def send(self, control: Control) -> None:
        """Send a message behind all earlier ones; wait while the connection is full. Raises TransportError when the worker is gone.

        A message whose send is cancelled may still be sent.
        """
        message = as_message(control)
        if not self._send_now(message):
            sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            try:
                self._queued.post((message, sent))
            except (MailboxClosedError, OverflowError):
                raise ClosedChannelError(f"the control connection of {self.name} has ended, or is overloaded") from None
            await sent

    def post(self, control: Control) -> None:
        """Send a message behind all earlier ones: now, or when the connection has room. Does not wait.

        Ignores a dead worker: `receive_all` detects the death.
        """
        message = as_message(control)
        with contextlib.suppress(TransportError, OverflowError, MailboxClosedError):
            if not self._send_now(message):
                self._queued.post((message, None))

    def send_if_room(self, control: Control) -> None:
        """Send a message if the connection has room and none waits, else drop it. Ignores a dead worker."""
        with contextlib.suppress(TransportError):
            self._send_now(as_message(control))

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
            sender = group.create_task(self._send_queued(), name=f"messages to {self.name}")
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

    def _send_now(self, message: Message) -> bool:
        return not self._queued.items and self._control.send_nowait(message)

    async def _send_queued(self) -> None:
        try:
            while True:
                message, sent = await self._queued.wait_item()
                await self._control.send(message)
                self._queued.take_nowait()
                if sent is not None and not sent.done():
                    sent.set_result(None)
        except TransportError:  # `receive_all` detects the end
            pass
        finally:
            self._queued.close()
            while (item := self._queued.take_nowait()) is not None:
                if item[1] is not None and not item[1].done():
                    item[1].set_exception(ClosedChannelError(f"the control connection of {self.name} has ended"))

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
