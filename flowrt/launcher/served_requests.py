"""Connects the gateway of a run to its launcher: what events mean for requests, and the front ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from flowrt.actors.control import Control, Drain
from flowrt.actors.front_end_messages import StateQuery, StateReport
from flowrt.gateway.front_ends import FrontEnds
from flowrt.gateway.requests import Requests
from flowrt.graph.model import front_end_names
from flowrt.launcher import events
from flowrt.launcher.launcher import Launcher

LAST_EVENTS_SECONDS = 2.0  # for all streams to get their last event
REFRESH_SECONDS = 2.0  # a process that is killed has counted for so long since its latest statistics, at most


def apply_group_change(event: events.Event, requests: Requests) -> None:
    """The requests of a lost group move, and a returned group gets new ones. Call this with every event of the launcher."""
    match event:
        case events.WorkerLost(name, how, while_loading=False, may_recur=may_recur, alone_for=alone_for):
            is_innocent = alone_for not in ("", name)  # a group that is a server too: it computed nothing of its own
            requests.lose_group(name, how, may_recur=may_recur and not is_innocent, is_restarting=event.is_restarting)
            if may_recur and event.ends_groups:  # otherwise the groups know whose parts it had
                requests.lose_server(name, how, alone_for, event.alone_part, event.is_colocated)
        case events.WorkerGivenUp(name):
            requests.give_up_group(name)
        case events.WorkerMarkedDead(name, why, is_killed, may_recur) if not is_killed:
            requests.lose_group(name, f"was marked dead: {why}", may_recur=may_recur, is_alive=True)
        case events.WorkerRestarted(name) | events.WorkerCleared(name):
            requests.readmit_group(name)
        case events.RunFailed(error):
            requests.fail(error)


class ServedRequests:
    """The requests that come by way of front ends. `report_state` returns the response to a query. `refresh`, which must not wait, is
    called every REFRESH_SECONDS."""

    def __init__(
        self,
        launcher: Launcher,
        requests: Requests,
        report_state: Callable[[StateQuery], Awaitable[StateReport]],
        refresh: Callable[[], None] | None = None,
    ) -> None:
        self._launcher, self._requests, self._refresh = launcher, requests, refresh
        self._refreshing: asyncio.Task[None] | None = None
        self._front_ends = FrontEnds(front_end_names(launcher.graph), requests, self._send, self._post, report_state)

    def begin(self) -> None:
        self._front_ends.begin()
        if self._refresh is not None:
            self._refreshing = asyncio.get_running_loop().create_task(self._keep_refreshing(self._refresh), name="requests of statistics")

    async def aclose(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})
        await self._front_ends.aclose()

    def on_control(self, worker: str, control: Control) -> None:
        self._front_ends.on_control(worker, control)

    def note(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerLost):
            self._front_ends.lose(event.name)

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
        self._front_ends.fail(str(error))
        await self._flush()

    async def _keep_refreshing(self, refresh: Callable[[], None]) -> None:
        while True:
            await self._launcher.seams.clock.sleep(REFRESH_SECONDS)
            refresh()

    async def _flush(self) -> None:
        """Wait until the front ends have sent all that they were given; they take no more connections."""
        await self._front_ends.wait_sent()
        names = [name for name in self._front_ends.names if self._launcher.state.is_usable(name)]
        if drained := [self._launcher.workers[name].request(Drain()) for name in names]:
            await asyncio.wait(drained, timeout=LAST_EVENTS_SECONDS)

    async def _send(self, name: str, control: Control) -> None:
        await self._launcher.workers[name].send(control)

    def _post(self, name: str, control: Control) -> None:
        self._launcher.workers[name].post(control)
