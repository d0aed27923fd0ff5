"""One end of the connection between the launcher and a host server: queues messages, sends heartbeats, and ends when none arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from flowrt.actors.mailbox import Mailbox, MailboxClosedError
from flowrt.hosts.messages import AnyHostMessage, HostHeartbeat, HostMessage, OutputLine, as_message, from_message
from flowrt.seams import Seams
from flowrt.system.clock_offset import ClockExchange
from flowrt.transports.contract import Channel
from flowrt.transports.errors import EndOfChannel, TransportError

HEARTBEATS = 6  # in the time after which the other end is lost
MAX_QUEUED, MAX_QUEUED_LINES = 1 << 16, 1 << 10  # messages that wait; an end that leaves more unread is lost


class HostConnection:
    """Both ends send heartbeats, because a network that is cut ends no connection. After `dead_seconds` without any message, `run` ends.
    `clocks`: what the heartbeats show of the other end's machine clock."""

    def __init__(self, channel: Channel, seams: Seams, dead_seconds: float) -> None:
        self._channel, self._clock, self._dead_seconds = channel, seams.clock, dead_seconds
        self.clocks = ClockExchange(seams.machine_now)
        self._queued: Mailbox[HostMessage] = Mailbox(MAX_QUEUED)

    def post(self, message: HostMessage) -> None:
        """Send a message behind all earlier ones. Does not wait. No-op after the end."""
        if isinstance(message, OutputLine) and len(self._queued) >= MAX_QUEUED_LINES:
            return
        try:
            self._queued.post(message)
        except MailboxClosedError:
            pass
        except OverflowError:
            self._channel.abort(f"{MAX_QUEUED} messages wait")

    async def run(self, on_message: Callable[[AnyHostMessage], None]) -> str:
        """Exchange messages until the connection ends, and close it. Returns how it ended: "sent nothing for 3 s"."""
        async with self._channel, asyncio.TaskGroup() as tasks:
            sending = [tasks.create_task(self._send()), tasks.create_task(self._send_heartbeats())]
            try:
                how = await self._receive(on_message)
                self._channel.abort(how)  # so that closing it waits for nothing
            finally:
                self._queued.close()
                for each in sending:
                    each.cancel()
        return how

    async def _receive(self, on_message: Callable[[AnyHostMessage], None]) -> str:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._dead_seconds) as limit:
                while True:
                    message = from_message(await self._channel.recv())
                    limit.reschedule(loop.time() + self._dead_seconds)
                    if isinstance(message, HostHeartbeat):
                        self.clocks.receive(message.stamp)
                    on_message(message)
        except TimeoutError:
            return f"sent nothing for {self._dead_seconds:g} s"
        except msgspec.DecodeError as error:
            return f"sent a message that cannot be decoded: {error}"
        except EndOfChannel:
            return "has closed the connection"
        except TransportError as error:
            return f"has left: {error}"

    async def _send(self) -> None:
        try:
            while True:
                message = await self._queued.wait_item()
                await self._channel.send(as_message(message))
                self._queued.take_nowait()
        except (TransportError, MailboxClosedError):  # `_receive` notices the end
            pass

    async def _send_heartbeats(self) -> None:
        while True:
            if not len(self._queued):
                self.post(HostHeartbeat(self.clocks.stamp()))
            await self._clock.sleep(self._dead_seconds / HEARTBEATS)
