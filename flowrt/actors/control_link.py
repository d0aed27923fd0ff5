"""A worker's end of its control connection to the launcher. No torch: the monitor uses it too."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from flowrt.actors.control import Control, Failed, Heartbeat, Start, as_message, from_message
from flowrt.actors.links import LOST, Link, LinkLostError
from flowrt.errors import UserError, error_text
from flowrt.transports.contract import Channel
from flowrt.transports.wire.message import Message

log = logging.getLogger("flowrt.worker")

FLUSH_SECONDS = 2.0


async def receive_start(channel: Channel) -> Start | None:
    """The first message of a control connection; None when the launcher has ended before it sent one."""
    try:
        start = from_message(await channel.recv())
    except LOST:
        return None
    if not isinstance(start, Start):
        raise msgspec.ValidationError(f"expected Start as a worker's first message, got {start.kind!r}")
    return start


class ControlLink:
    """The link to the launcher. `on_message` must not wait. `on_end` is called when the connection ends, for any reason. The launcher may
    be `capacity_messages` behind."""

    def __init__(
        self, name: str, channel: Channel, capacity_messages: int, on_message: Callable[[Message], None], on_end: Callable[[], None]
    ) -> None:
        self._name, self._on_end = name, on_end
        # Behind much traffic heartbeats would be late, and the process suspected.
        self._link = Link(channel, capacity_messages, on_message, overtaking=Heartbeat.kind)

    def send(self, control: Control) -> None:
        self._link.post(as_message(control))

    def when_sent(self, call: Callable[[], None]) -> None:
        """Call once when all messages have left: now, or as soon as the launcher has room. The launcher reads them even if this process
        crashes then."""
        self._link.when_sent(call)

    async def run(self) -> None:
        """Read and write until the connection ends."""
        try:
            await self._link.run()
        except LinkLostError:
            log.info("%s: the launcher has ended", self._name)
        finally:
            self._on_end()

    async def flush(self) -> None:
        """Wait for the last messages to leave, at most FLUSH_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._link.flush()


class ControlledProcess(Protocol):
    """One incarnation of a process with a control link."""

    control: ControlLink

    async def run(self) -> None: ...


async def run_controlled(channel: Channel, new: Callable[[Start], ControlledProcess]) -> None:
    """Run what `new` makes of Start beside its control link, until it ends. Its error is reported, and raised."""
    start = await receive_start(channel)
    if start is None:
        return
    process = new(start)
    try:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(process.control.run(), name=f"control of {start.name}")
            try:
                await process.run()
            except Exception as error:
                process.control.send(Failed(error_text(error), isinstance(error, UserError)))
                await process.control.flush()
                raise
            finally:
                reading.cancel()
    finally:
        await channel.aclose()
