"""Waits until every worker of a starting run has loaded, and restarts those that die meanwhile within their restart budget.

While workers connect to each other, after they have loaded, any death still ends the run: the others wait for that very incarnation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from flowrt.errors import WorkerDiedError
from flowrt.graph.model import FORK_SERVER
from flowrt.launcher import events
from flowrt.launcher.control_connection import ControlConnection
from flowrt.launcher.hosts import Hosts
from flowrt.launcher.introduction import Introduction
from flowrt.launcher.restarts import FORK_SERVER_SECONDS, Revival, Run
from flowrt.launcher.root_cause import Verdict
from flowrt.seams import Clock

_END_SECONDS = 0.5  # for a process that has closed its control connection to end


class Loading:
    """The start of one run. A worker that reports Failed ends the run, since it would fail again. One that dies without a report is
    restarted if the run can lose it."""

    def __init__(self, run: Run, hosts: Hosts, introduction: Introduction, revival: Revival, verdict: Verdict, clock: Clock) -> None:
        self._run, self._hosts, self._introduction = run, hosts, introduction
        self._revival, self._verdict, self._clock = revival, verdict, clock
        self._is_over = False

    def loads_again(self, host: str) -> bool:
        """Whether this class handles a death of this host now: the run is loading, and it can lose all workers of the host."""
        return not self._is_over and self._revival.may_die(host)

    async def wait_loaded(self, begin: Callable[[ControlConnection], Awaitable[None]]) -> bool:
        """Call `begin` for each worker and wait until all current incarnations listen. False: a worker has ended that the run cannot lose,
        or has failed.

        Raises WorkerDiedError for a worker that sends nothing for too long, or dies more often than its restart budget allows.
        """
        lines = new = list(self._run.workers.values())
        while True:
            for line in new:
                await begin(line)
            loaded = await self._introduction.wait_loaded(lines)
            dead = list(dict.fromkeys(line.host for line in lines if line.ended.done()))
            if loaded and not dead:
                self._is_over = True
                return True
            if self._verdict.any_accused or not dead or not all(map(self.loads_again, dead)):
                return False
            new = [line for host in dead for line in await self._load_again(host)]
            lines = list(self._run.workers.values())

    async def _load_again(self, host: str) -> list[ControlConnection]:
        how = await self._see_end(host)
        names = self._hosts.workers_of(host)
        for name in names:
            await self._run.workers[name].aclose()
            self._revival.count_restart(name)
            self._run.on_event(events.WorkerDiedLoading(name, how))
        delay_seconds = self._revival.delay_before_next(host)
        if isinstance(delay_seconds, str):
            raise WorkerDiedError(names[0], f"{how} while it loaded, and {delay_seconds}", self._hosts.output_tail(host))
        await self._clock.sleep(delay_seconds)
        return await self._revival.fork_again(host)

    async def _see_end(self, host: str) -> str:
        """Return how the process ended; kill it first if it has only closed its control connection.

        Raises WorkerDiedError, naming the fork server, when that does not report the exit within FORK_SERVER_SECONDS.
        """
        ended = self._hosts.exits[host]
        await asyncio.wait([ended], timeout=_END_SECONDS)
        if not ended.done():
            self._hosts.kill_now(host)
            await asyncio.wait([ended], timeout=FORK_SERVER_SECONDS)
        if not ended.done():
            reason = f"has not said for {FORK_SERVER_SECONDS:g} s that {host} has ended: is it stopped, or the machine overloaded?"
            raise WorkerDiedError(FORK_SERVER, reason, self._hosts.output_tail(FORK_SERVER))
        return ended.result()
