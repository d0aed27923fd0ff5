"""Connects the front ends of a run to its gateway and its launcher."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

from flowrt.actors.control import Control, Drain, StatisticsRequest
from flowrt.actors.front_end_messages import StateQuery, StateReport
from flowrt.gateway.front_ends import FrontEnds
from flowrt.gateway.requests import Requests
from flowrt.graph.model import front_end_names
from flowrt.launcher import events
from flowrt.launcher.launcher import Launcher
from flowrt.launcher.worker_pool import Service

LAST_EVENTS_SECONDS = 2.0  # for all streams to get their last event
REFRESH_SECONDS = 2.0  # a process that is killed has counted for so long since its latest statistics, at most


class Reports(Protocol):
    """What serves front ends beside the gateway. `services`: their processes, by name."""

    services: Mapping[str, Service]

    async def report(self, launcher: Launcher, requests: Requests, query: StateQuery) -> StateReport:
        """The response to a query."""


class ServedRequests:
    """The requests that come by way of front ends."""

    def __init__(self, launcher: Launcher, requests: Requests, reports: Reports) -> None:
        self._launcher, self._requests = launcher, requests
        self._refreshing: asyncio.Task[None] | None = None
        report = partial(reports.report, launcher, requests)
        self.front_ends = FrontEnds(front_end_names(launcher.graph), requests, self._send, self._post, report)

    def begin(self) -> None:
        self.front_ends.begin()
        self._refreshing = asyncio.get_running_loop().create_task(self._keep_refreshing(), name="requests of statistics")

    async def aclose(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})
        await self.front_ends.aclose()

    def on_control(self, worker: str, control: Control) -> None:
        self.front_ends.on_control(worker, control)

    def note(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerLost):
            self.front_ends.lose(event.name)

    async def drain(self, seconds: float) -> None:
        """Admit no new requests and wait until all have ended. After `seconds` end those that are left; then each stream gets its end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._requests.drain()
        self._requests.end_all()
        await self._requests.wait_written()
        await self._flush()

    async def fail(self, error: Exception) -> None:
        """The run has failed: each stream gets an error as its last event."""
        self.front_ends.fail(str(error))
        await self._flush()

    async def _keep_refreshing(self) -> None:
        while True:
            await self._launcher.seams.clock.sleep(REFRESH_SECONDS)
            self._refresh()

    def _refresh(self) -> None:
        """Request the statistics of all processes that are at work: the counts of one that is killed later are known up to here."""
        for name in self._launcher.graph.process_names():
            if self._launcher.state.is_usable(name):
                self._launcher.workers[name].request(StatisticsRequest())

    async def _flush(self) -> None:
        """Wait until the front ends have sent all that they were given; they take no more connections."""
        await self.front_ends.wait_sent()
        names = [name for name in self.front_ends.names if self._launcher.state.is_usable(name)]
        if drained := [self._launcher.workers[name].request(Drain()) for name in names]:
            await asyncio.wait(drained, timeout=LAST_EVENTS_SECONDS)

    async def _send(self, name: str, control: Control) -> None:
        await self._launcher.workers[name].send(control)

    def _post(self, name: str, control: Control) -> None:
        self._launcher.workers[name].post(control)
