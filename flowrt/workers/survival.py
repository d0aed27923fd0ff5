"""What a worker does when another one dies, and when it is back.

Here: Survival. Not here: who notices (the links of this worker, the launcher), links (flowrt/actors/links.py), what is asked again of whom
(flowrt/exchange/failover.py). Made by the worker (process.py) when its links are up; one per life of a worker.

Notices come twice and in any order: the end of a link may be seen before the launcher tells of it, or after. A life is over once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flowrt.actors.control import Control, Joined, Late, Left, LinkLost
from flowrt.actors.links import Links
from flowrt.exchange.failover import Failover
from flowrt.graph.model import ReliabilitySettings
from flowrt.seams import Clock
from flowrt.workers.group import Group
from transports.contract import Identity

LOOK_SECONDS = 0.05  # while experts are without a copy, or a part waits for one
COMPLAIN_SECONDS = 1.0  # between two complaints about one server
HEDGE_SECONDS, IDLE_SECONDS = 5e-3, 20e-3  # between looks for what is late


class Survival:
    """`failover` and `group` are None in workers that ask no expert servers. `tasks` owns what is begun here."""

    def __init__(
        self,
        name: str,
        links: Links,
        send: Callable[[Control], None],
        clock: Clock,
        tasks: asyncio.TaskGroup,
        failover: Failover | None,
        group: Group | None,
        settings: ReliabilitySettings,
    ) -> None:
        self._name, self._links, self._send, self._clock, self._tasks = name, links, send, clock, tasks
        self._failover, self._group = failover, group
        self._lost_expert_seconds = settings.lost_expert_seconds
        self._over: set[tuple[str, str]] = set()  # (process, incarnation)
        self._watching = False
        self._lost_since = 0.0  # an expert has had no copy
        self._complained: dict[str, float] = {}  # process -> when last
        if settings.hedge and failover is not None and failover.hedges:
            tasks.create_task(self._hedge(failover), name=f"hedging of {name}")

    def on_lost(self, peer: Identity, reason: str) -> None:
        """The link to this life has ended."""
        if self._end(peer.name, peer.incarnation):
            self._send(LinkLost(peer.name, reason, peer.incarnation))

    def on_control(self, control: Left | Joined) -> None:
        if isinstance(control, Joined):
            self._tasks.create_task(self._join(control), name=f"join {control.process}")
            return
        self._links.drop(control.process, control.incarnation)
        self._end(control.process, control.incarnation)

    def _end(self, process: str, incarnation: str) -> bool:
        """A life is over. False when that was known."""
        if (process, incarnation) in self._over:
            return False
        self._over.add((process, incarnation))
        if self._failover is not None:
            was_whole = self._failover.refusal() is None
            self._failover.lost(process)
            if self._group is not None and was_whole and self._failover.refusal() is not None:
                self._lost_since = self._clock.now()  # anew, however short a copy was back
                if not self._watching:
                    self._watching = True
                    self._tasks.create_task(self._watch(self._failover, self._group), name=f"lost experts of {self._name}")
        return True

    async def _join(self, joined: Joined) -> None:
        if await self._links.join(joined.process, joined.incarnation, joined.addresses) and self._failover is not None:
            self._failover.joined(joined.process)

    async def _hedge(self, failover: Failover) -> None:
        while True:
            await self._clock.sleep(HEDGE_SECONDS if failover.hedge() else IDLE_SECONDS)
            for process, (waited, usual) in failover.overdue().items():
                now = self._clock.now()
                if now >= self._complained.get(process, now - COMPLAIN_SECONDS) + COMPLAIN_SECONDS:
                    self._complained[process] = now
                    self._send(Late(process, "", waited, usual))

    async def _watch(self, failover: Failover, group: Group) -> None:
        """While experts are without a copy: wait for one, and after a time give up what waits."""
        refused = False
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            failover.look_again()
            now = self._clock.now()
            text = failover.refusal()
            if text is None:
                if refused:
                    refused = False
                    group.accept()
                if not failover.waits:
                    self._watching = False
                    return
                continue
            if not refused and now - self._lost_since >= self._lost_expert_seconds:
                refused = True
                group.refuse(text)
