"""The launcher's end of a worker's control connection: messages sent and received, and the requests that wait for a response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from flowrt.actors.control import Control, Drain, Drained, Statistics, StatisticsRequest, as_message, from_message
from flowrt.actors.mailbox import Mailbox, MailboxClosedError
from flowrt.system.clock_offset import SAME_CLOCK, ClockOffset
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.errors import BrokenChannelError, ClosedChannelError, EndOfChannel, TransportError
from flowrt.transports.wire.message import Message

MAX_QUEUED = 1 << 12  # messages queued for one worker; a worker this far behind is ended


class ControlConnection:
    """The control connection of one incarnation of a worker. `statistics`: the latest that it has sent. `on_overflow(name, incarnation)` is
    called soon after a message found MAX_QUEUED others waiting: that message is lost, so the worker must be ended. `clock_offset()`: as of
    its process (WorkerProcess)."""

    def __init__(
        self,
        name: str,
        incarnation: str,
        pid: int,
        control: Channel,
        on_overflow: Callable[[str, str], None],
        clock_offset: Callable[[], ClockOffset] = lambda: SAME_CLOCK,
    ) -> None:
        self.name, self.incarnation, self.pid, self._control, self._on_overflow = name, incarnation, pid, control, on_overflow
        self.clock_offset = clock_offset
        self.statistics = Statistics()
        self._requests: dict[type[StatisticsRequest | Drain], asyncio.Future[None]] = {}  # the latest of each kind
        self._queued: Mailbox[tuple[Message, asyncio.Future[None] | None]] = Mailbox(MAX_QUEUED)

    def assign(self, worker: Identity) -> None:
        """Assign the connection to this incarnation: the standby process at its other end has become it."""
        self.name, self.incarnation, self.statistics = worker.name, worker.incarnation, Statistics()

    async def send(self, control: Control) -> None:
        """Send a message behind all earlier ones; wait while the connection is full. Raises TransportError when the worker has ended, or
        when MAX_QUEUED messages wait already.

        A message whose send is cancelled may still be sent.
        """
        message = as_message(control)
        if not self._send_now(message):
            sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue(message, sent)
            await sent

    def post(self, control: Control) -> None:
        """Send a message behind all earlier ones: now, or when the connection has room. Does not wait.

        Ignores a dead worker: `receive_all` detects the death.
        """
        message = as_message(control)
        with contextlib.suppress(TransportError):
            if not self._send_now(message):
                self._queue(message, None)

    def send_if_room(self, control: Control) -> None:
        """Send a message if the connection has room and none waits, else drop it. Ignores a dead worker."""
        with contextlib.suppress(TransportError):
            self._send_now(as_message(control))

    async def send_until(self, control: Control, deadline: float) -> bool:
        """Send a message. False: the worker has ended. True also when the connection has no room until `deadline` (loop time)."""
        try:
            async with asyncio.timeout_at(deadline):
                await self.send(control)
        except TransportError:
            return False
        except TimeoutError:
            pass
        return True

    def request(self, control: StatisticsRequest | Drain) -> asyncio.Future[None]:
        """Send a request; the future is done when the worker has responded. While one of its kind waits, no further one is sent: a stopped
        worker collects none."""
        response = self._requests.get(type(control))
        if response is None or response.done():
            response = self._requests[type(control)] = asyncio.get_running_loop().create_future()
            self.post(control)
        return response

    async def receive_all(self, on_control: Callable[[Control], None]) -> str | None:
        """Pass the worker's messages to `on_control` until the connection ends, and send the queued ones meanwhile.

        Returns why a message cannot be decoded; None at the end of the connection.
        """
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(self._send_queued(), name=f"messages to {self.name}")
            try:
                while True:
                    message = await self._control.recv()
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
        """Complete the pending requests of a dead worker."""
        for kind in self._requests:
            self._complete(kind)

    async def aclose(self) -> None:
        await self._control.aclose()

    def _complete_requests(self, control: Control) -> None:
        match control:
            case Statistics():
                self.statistics = control
                self._complete(StatisticsRequest)
            case Drained():
                self._complete(Drain)

    def _complete(self, kind: type[StatisticsRequest | Drain]) -> None:
        response = self._requests.get(kind)
        if response is not None and not response.done():
            response.set_result(None)

    def _send_now(self, message: Message) -> bool:
        return not self._queued.items and self._control.send_nowait(message)

    def _queue(self, message: Message, sent: asyncio.Future[None] | None) -> None:
        try:
            self._queued.post((message, sent))
        except MailboxClosedError:
            raise ClosedChannelError(f"the control connection of {self.name} has ended") from None
        except OverflowError:
            asyncio.get_running_loop().call_soon(self._on_overflow, self.name, self.incarnation)
            raise ClosedChannelError(f"{self.name} has left {MAX_QUEUED} messages unread") from None

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
