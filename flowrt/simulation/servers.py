"""The lives of processes that may die: who is told of an end, what is started again, who is told of the new life.

Here: Servers, what the launcher does about them. Not here: what a worker does about it (flowrt/workers/survival.py, the real one), who may
die and how often it is started again (flowrt/reliability, the real one), when an expert has no copy (outages.py), a single life's line
(lines.py), the rest of the run (cluster.py). Delays are drawn from the seed.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from flowrt.actors.control import Condemned, Control, Heartbeat, Joined, Late, Left, LinkLost, Peers, Start, Suspected
from flowrt.actors.heartbeats import send_heartbeats
from flowrt.graph.model import GATEWAY, MONITOR, Graph
from flowrt.graph.recovery import may_die
from flowrt.reliability.supervision import GiveUp, Supervision
from flowrt.seams import Clock, Running
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.inside import Inside
from flowrt.simulation.lines import EXPLAINED_SECONDS, Line
from flowrt.simulation.outages import Outages
from flowrt.simulation.world import Process, World

UNASKED_SECONDS = 0.5  # for so long at most a part waits for a copy that is there: looks are some milliseconds apart, by any clock
LOOKS_APART_SECONDS = 0.1  # between looks for such parts
FASTEST_CLOCK = 2.0  # that is drawn
NOTICE_SECONDS = 10e-6, 30e-3  # from an end to its being told; drawn between these, short ones as often as long ones
RESTART_SECONDS = 0.3e-3, 3.0  # from there to the next life


class Owner(Protocol):
    """The run. `lines`: the latest life of each worker."""

    lines: dict[str, Line]

    def begin(self, name: str) -> Line:
        """The next life of a process that has none."""

    def start_of(self, line: Line) -> Start: ...

    def has_befallen(self, process: str) -> bool:
        """Whether a fault met this process, or its links, after which it may be held to be dead."""


class _OwnSigns:
    """What the launcher's beats tell."""

    num_firings = 0
    running: Running | None = None

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation


class Servers:
    """`rule` is to be run as a task for each of `mortal`. `wrong`: who was held to be dead for no reason (I7)."""

    def __init__(self, world: World, graph: Graph, owner: Owner, outages: Outages, clock: Clock) -> None:
        servers = may_die(graph)
        self.mortal = sorted(servers | {MONITOR}) if graph.reliability.detector and servers else sorted(servers)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._world, self._owner, self._outages, self._clock = world, owner, outages, clock
        self._random = world.random_of("servers")
        self._supervision = Supervision(graph.reliability.restarts, graph.reliability.restart_window_seconds)
        self._suspect_seconds = graph.reliability.suspect_seconds
        self._clients = {name: _neighbours(graph, name) for name in self.mortal}
        self._looked_at = 0.0
        self._unasked: dict[tuple[str, Any, int], float] = {}  # (group, tag, part) -> since when it waits for a copy that is there
        self._given_up: set[str] = set()  # until they are tried again
        self._busy = set(self.mortal) & {MONITOR}  # those whose end or beginning is under way

    @property
    def settled(self) -> bool:
        """Nobody is about to begin or to end."""
        return not self._busy and all(self._stays_down(name) or not self._is_over(name) for name in self.mortal)

    def account(self) -> list[str]:
        return [f"{name} begins or ends" for name in sorted(self._busy)] + [
            f"{name} stays down" for name in filter(self._stays_down, self.mortal)
        ]

    async def rule(self, name: str) -> None:
        """One life after another. The first is there, but for the monitor's."""
        if name not in self._owner.lines:
            await self._introduce(self._owner.begin(name))
        while True:
            line = self._owner.lines[name]
            await asyncio.wait([line.over])
            self._busy.add(name)
            self._outages.down(name, self._world.loop.time())
            await self._pass(NOTICE_SECONDS)
            self._tell((*self._clients[name], MONITOR), Left(name, line.incarnation, line.over.result()))
            line.kill()
            await line.ended.wait()
            decision = self._supervision.on_death(name, self._world.loop.time())
            if isinstance(decision, GiveUp):
                self.counts["stayed down"] += 1
                self._busy.discard(name)
                self._given_up.add(name)
                if decision.retry_seconds is None:
                    return
                await asyncio.sleep(decision.retry_seconds)
                self._given_up.discard(name)
                self._busy.add(name)
            else:
                await asyncio.sleep(decision.delay_seconds)
            await self._pass(RESTART_SECONDS)
            self.counts["started again"] += 1
            await self._introduce(self._owner.begin(name))

    async def heartbeat(self) -> None:
        """The launcher's own sign of life, for the monitor."""
        await send_heartbeats(_OwnSigns(self._world.new_incarnation()), self._clock, self._relay, process=GATEWAY)

    # what is looked at

    def on_death(self, process: Process) -> None:
        """In its moment, which nobody has heard of yet."""
        self._outages.down(process.name, self._world.loop.time())

    def look(self, insides: Sequence[Inside]) -> None:
        """At any time: no group takes a living server for dead without cause (I7). Notes when each begins to ask a new life."""
        now = self._world.loop.time()
        for inside in insides:
            for name in inside.servers:
                if name not in self.mortal:
                    continue
                line = self._owner.lines[name]
                lives = not line.over.done() and not line.is_dead
                if inside.holds_for_dead(name, line.incarnation):
                    self._outages.down(name, now, inside.name)
                    if lives and not line.told_to_stop and not self._owner.has_befallen(name):
                        self.wrong.append(f"{inside.name} holds {name} for dead, which lives and which nothing befell")
                elif lives and self._outages.is_down(inside.name, name) and inside.asks(name, line.incarnation):
                    self._outages.up(inside.name, name, now)
        if self.wrong:
            raise InvariantError("I7", self.wrong[0])
        if now >= self._looked_at + LOOKS_APART_SECONDS:
            self._looked_at = now
            self._look_for_unasked(insides, now)

    def _look_for_unasked(self, insides: Sequence[Inside], now: float) -> None:
        """No part waits for a copy while there is one (I5)."""
        unasked = {(inside.name, *part) for inside in insides if not self._owner.has_befallen(inside.name) for part in inside.unasked()}
        self._unasked = {part: self._unasked.get(part, now) for part in unasked}
        for (name, tag, part), since in self._unasked.items():
            if now > since + UNASKED_SECONDS:
                raise InvariantError("I5", f"part {part} of {tag} waits at {name} since {since:.6f} s for a copy that is there")

    def check_in_use(self, insides: Iterable[Inside]) -> None:
        """When all has settled: every group asks every server that lives, in its latest life (I8)."""
        for inside in insides:
            for name in inside.servers:
                if not self._stays_down(name) and not inside.asks(name, incarnation := self._owner.lines[name].incarnation):
                    raise InvariantError("I8", f"{inside.name} does not ask {name} in its latest life {incarnation}")

    # what lines tell

    def on_word(self, line: Line, word: Control) -> None:
        if isinstance(word, Heartbeat | Late) and line.connected.done() and not line.over.done():
            if isinstance(word, Heartbeat):
                self._relay(msgspec.structs.replace(word, process=line.name, pid=self._world.processes[line.name].pid))
            else:
                self._relay(msgspec.structs.replace(word, by=line.name))
        elif isinstance(word, Suspected):
            self.counts["suspected"] += 1
            self._on_suspected(word)
        elif isinstance(word, Condemned):
            self._on_condemned(word)

    def _on_suspected(self, word: Suspected) -> None:
        """Who does not beat may be suspected, for a client's complaint anybody."""
        line = self._owner.lines.get(word.process)
        if line is None or line.incarnation != word.incarnation or not word.why.startswith("no heartbeat"):
            return
        if self._world.loop.time() < line.began_seconds + self._suspect_seconds / FASTEST_CLOCK:
            self.wrong.append(f"{word.process} was suspected before it could have been silent for so long: {word.why}")
        if not any(self._owner.has_befallen(name) for name in (word.process, GATEWAY, MONITOR)):
            self.wrong.append(f"{word.process} was suspected, and neither it nor who hears its beats stood still: {word.why}")

    def _on_condemned(self, word: Condemned) -> None:
        line = self._owner.lines.get(word.process)
        if line is None or line.incarnation != word.incarnation or line.over.done():
            return
        self.counts["condemned"] += 1
        if not self._owner.has_befallen(word.process):
            self.wrong.append(f"{word.process} was condemned and nothing befell it: {word.why}")
        if word.process in self.mortal:
            line.condemn(word.why)

    def on_link_lost(self, line: Line, lost: LinkLost) -> bool:
        """False: neither of the two may die."""
        victim = self._owner.lines[lost.peer] if lost.peer in self.mortal else line if line.name in self.mortal else None
        if victim is None:
            return False
        if lost.incarnation in ("", victim.incarnation) or victim is line:
            self._world.loop.call_later(EXPLAINED_SECONDS, self._fence, victim, f"{line.name} lost its link to {lost.peer}: {lost.reason}")
        return True

    # inside

    def _fence(self, line: Line, why: str) -> None:
        if line.over.done():
            return
        self.counts["fenced"] += 1
        if not self._owner.has_befallen(line.name):
            self.wrong.append(f"{line.name} lives and works, and {why}")
        line.condemn(why)

    async def _introduce(self, line: Line) -> None:
        """From its first word to being connected, or to its end."""
        lines = self._owner.lines
        await line.tell(self._owner.start_of(line))
        if not await self._heard(line, line.listening):
            return
        known = {name: each for name, each in lines.items() if each.listening.done()}
        addresses = {name: each.listening.result().addresses for name, each in known.items()}
        await line.tell(Peers(addresses=addresses, incarnations={name: each.incarnation for name, each in known.items()}))
        self._tell(self._clients[line.name], Joined(line.name, line.incarnation, addresses.get(line.name, {})))
        if not await self._heard(line, line.connected):
            return
        if line.name != MONITOR:
            self._tell((MONITOR,), Joined(line.name, line.incarnation, {}, self._world.processes[line.name].pid))
        else:
            for name, each in lines.items():
                if name != MONITOR and each.connected.done() and not each.over.done():
                    line.post(Joined(name, each.incarnation, {}, self._world.processes[name].pid))
        self._busy.discard(line.name)

    async def _heard(self, line: Line, word: asyncio.Future[Any]) -> bool:
        await asyncio.wait([word, line.over], return_when=asyncio.FIRST_COMPLETED)
        return not line.over.done()

    def _relay(self, sign: Control) -> None:
        monitor = self._owner.lines.get(MONITOR)
        if monitor is not None and monitor.connected.done() and not monitor.over.done():
            monitor.try_tell(sign)

    def _stays_down(self, name: str) -> bool:
        return name in self._given_up

    def _is_over(self, name: str) -> bool:
        line = self._owner.lines.get(name)
        return line is None or line.over.done()

    def _tell(self, names: Iterable[str], control: Control) -> None:
        for name in names:
            line = self._owner.lines.get(name)
            if line is not None and line.connected.done():
                line.post(control)

    async def _pass(self, between: tuple[float, float]) -> None:
        least, most = between
        await asyncio.sleep(math.exp(self._random.uniform(math.log(least), math.log(most))))


def _neighbours(graph: Graph, process: str) -> tuple[str, ...]:
    """Those that share an edge with it, in the graph's order."""
    process_of = {node.name: node.process for node in graph.nodes.values()}
    pairs = [{process_of[edge.source], process_of[edge.target]} for edge in graph.edges.values()]
    return tuple(name for name in graph.process_names() if name != process and any({name, process} <= pair for pair in pairs))
