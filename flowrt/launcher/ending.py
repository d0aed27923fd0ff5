"""Steps of an orderly stop: send Stop to the workers, wait for their ends, kill the late ones, and close the connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from flowrt.graph.model import FORK_SERVER
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.hosts import Hosts

_TERM_SECONDS = 0.5  # from SIGTERM to SIGKILL


async def tell_all(lines: Sequence[ControlConnection], deadline: float) -> None:
    """Send Stop to each worker. One whose connection has no room until `deadline` (loop time) counts as notified."""
    async with asyncio.TaskGroup() as group:
        for line in lines:
            group.create_task(line.tell_stop(deadline))


async def end_all(lines: Sequence[ControlConnection], hosts: Hosts, deadline: float) -> list[ControlConnection]:
    """Wait for control connections and hosts to end, until `deadline` (loop time) at most. Returns the workers whose hosts are alive."""
    await _wait_until([line.ended for line in lines], deadline)
    await _wait_until((ended for host, ended in hosts.exits.items() if host != FORK_SERVER), deadline)
    return [line for line in lines if not hosts.has_exited(line.host)]


async def kill_all(late: Sequence[ControlConnection], hosts: Hosts) -> None:
    """Send SIGTERM, then SIGKILL to hosts that have not ended after 0.5 s. A worker in this loop is cancelled."""
    for line in late:
        if line.placed.task is not None:
            line.placed.task.cancel()
    for is_last in (False, True):
        left = list(dict.fromkeys(line.host for line in late if line.placed.task is None and not hosts.has_exited(line.host)))
        for host in left:
            if is_last:
                hosts.kill_now(host)
            else:
                await hosts.terminate(host)
        await _wait_until([hosts.exits[host] for host in left], asyncio.get_running_loop().time() + _TERM_SECONDS)


async def close_all(lines: Iterable[ControlConnection], cancelled: asyncio.CancelledError | None) -> None:
    """Close all connections even if the caller is cancelled meanwhile. Then raises the last cancellation, `cancelled` included."""
    for line in lines:
        try:
            await line.aclose()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def see_end(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task even if the caller is cancelled meanwhile. Then raises the last cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _wait_until(futures: Iterable[asyncio.Future[Any]], deadline: float) -> None:
    waiting = [future for future in futures if not future.done()]
    if waiting:
        await asyncio.wait(waiting, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
