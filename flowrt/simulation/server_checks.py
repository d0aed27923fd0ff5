"""Checks how a run treats processes that may die: which it marks dead, which it loses, which it uses again (I5, I7, I8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from flowrt.graph.model import FIRST_HOST, FORK_SERVER, GATEWAY, MONITOR, Graph
from flowrt.graph.recovery import pipelines, standby_names
from flowrt.launcher import events
from flowrt.launcher.launcher import Launcher
from flowrt.launcher.starts import standby_loads
from flowrt.launcher.transport_choice import pack
from flowrt.reliability.detector import SEEN_SHARE
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.faults import Faults
from flowrt.simulation.inside import WorkerInternals
from flowrt.simulation.invariants import mortal
from flowrt.simulation.outages import Outages
from flowrt.simulation.processes import KILLED, SEGFAULT, TERMINATED
from flowrt.simulation.waitables import OUTSIDE
from flowrt.simulation.world import SimulatedProcess, World
from flowrt.system.machine_limits import usable_cores
from flowrt.system.process_status import Activity

WAITING_SECONDS = 0.5  # the longest wait of a part for an available replica: polls are some milliseconds apart, by any clock
EXITS = KILLED, TERMINATED, SEGFAULT  # of processes that a fault or the launcher has killed
POLL_SECONDS = 0.1  # between polls for what waits
NOTICED_SECONDS = 2.0  # beyond dead_seconds, until a stopped process is killed
UNUSED_SECONDS = 0.1  # from the death of a standby process until the launcher notices it
UNSETTLED_SECONDS = 0.9  # from the loss of a server until its clients know the cause: FENCE_SECONDS and the ways; less than CAUSE_SECONDS
_COUNTED = {
    events.WorkerRestarted: "restarted",
    events.WorkerGivenUp: "stayed down",
    events.WorkerSuspected: "suspected",
    events.WorkerMarkedDead: "marked dead",
    events.ForkServerLost: "fork server lost",
    events.ForkServerRestarted: "fork server restarted",
}


class ServerChecks:
    """Checks one run."""

    def __init__(
        self, world: World, graph: Graph, launcher: Launcher, outages: Outages, faults: Faults, fastest_clock: float, refuses_first: bool
    ) -> None:
        """`fastest_clock`: the highest rate of any clock. `refuses_first`: the system may refuse the first start of a process."""
        self._world, self._launcher, self._outages, self._faults = world, launcher, outages, faults
        self._is_faulty = faults.has_met
        self._evidence_seconds = SEEN_SHARE * graph.reliability.dead_seconds / fastest_clock
        self.mortal = sorted(mortal(graph))
        self.counts: Counter[str] = Counter()
        self.down: set[str] = set()  # given up
        self._retry_at: dict[str, float] = {}  # of them, those that the launcher must try to start again: when
        self._restarts = graph.reliability.restarts > 0
        self.next_try_at = 0.0  # until then nothing may be left that computes, or finds a hang
        self._suspect_seconds = graph.reliability.suspect_seconds / fastest_clock
        self._began: dict[str, float] = {}
        self._wrong: list[str] = []
        self._lost: set[str] = set()
        self._polled_at = 0.0
        self._waiting: dict[tuple[str, Any, int], float] = {}  # (process, tag, part) -> since when it waits
        self._can_stand_in = standby_loads(graph, pack(graph), usable_cores()).keys()
        self._ready_standbys: set[str] = set()
        self._unused_since: float | None = None  # since when a process waits for the fork server although a standby process is ready
        self._graph_names = {*graph.process_names()}
        self._workers = {*graph.process_names(), *standby_names(graph), GATEWAY, MONITOR}
        self._is_ready, self._links_at_start = False, any(edge.open == "start" for edge in graph.edges.values())
        self._is_watched = launcher.state.wants_monitor and not refuses_first and not faults.delays((GATEWAY, MONITOR))
        self._stopped_seconds = graph.reliability.dead_seconds + NOTICED_SECONDS
        self._elsewhere = {name for name in graph.process_names() if graph.host_of(name) != FIRST_HOST}
        self._stopped: dict[str, float] = {}  # since when
        self._unsettled: dict[tuple[str, str], float] = {}  # (group, lost server) -> since when its parts wait for the cause of the loss
        world.deaths.append(self._on_death)

    def on_event(self, event: events.Event) -> None:
        self.counts[_COUNTED.get(type(event), "")] += 1
        now = self._world.loop.time()
        match event:
            case events.Ready():
                self._is_ready = True
            case events.GraphVersion(graph, joining):
                self._use(graph, joining, now)
            case events.WorkerLost(name) if name == MONITOR:
                self._is_watched = False
            case events.ForkServerLost(how) if how.startswith("was marked dead") and not self._is_faulty(FORK_SERVER):
                self._wrong.append(f"the fork server {how}, and no fault hit it")
            case events.ForkServerLost(_, retry_seconds) if retry_seconds is not None:
                self._retry_at[FORK_SERVER] = now + retry_seconds
                self.next_try_at = max(self.next_try_at, now + retry_seconds)
            case events.ForkServerRestarted():
                del self._retry_at[FORK_SERVER]
                waiting = (self.down & self._lost) - self._retry_at.keys() - {MONITOR} if self._restarts else set()
                self._retry_at |= dict.fromkeys(waiting, now)
            case events.WorkerListening(name) if name in self._launcher.state.starts.standby_names:
                self._ready_standbys.add(name)
            case events.WorkerStarted(name):
                self._lost.discard(name)
                self._ready_standbys.discard(name)
                self._began[name] = now
                self._retry_at.pop(name, None)
            case events.WorkerRestarted(name):
                self.down.discard(name)
            case events.WorkerGivenUp(name, _, retry_seconds):
                self.down.add(name)
                self._retry_at.pop(name, None)  # without another try it waits for the fork server
                if retry_seconds is not None:
                    self.next_try_at = max(self.next_try_at, now + retry_seconds)
                    if name != MONITOR:  # of whose starts there is no event
                        self._retry_at[name] = now + retry_seconds
            case events.WorkerLost(name, while_loading=True):
                self.counts["died while loading"] += 1
            case events.WorkerLost(name, how, _, may_recur):
                self._check_cause(name, how, may_recur)
                if name in self._lost:
                    self._wrong.append(f"{name} was lost again before it was back: {how}")
                self._lost.add(name)
                self._outages.down(name, now)
                if not any(map(self._is_faulty, (name, *_causes_of(how)))) and not how.startswith("left the graph"):
                    self._wrong.append(f"{name} was lost, and no fault hit it: {how}")
            case events.Straggler(name, seconds):
                self._wrong.append(f"{name} did not stop within {seconds:g} s, when all faults had healed")
            case events.WorkerMarkedDead(name, why):
                if (met := self._faults.met_seconds(name)) is None:
                    self._wrong.append(f"{name} was marked dead, and no fault hit it: {why}")
                elif now < met + self._evidence_seconds:
                    self._wrong.append(f"{name} was marked dead after {now - met:.3f} s, before there could be evidence: {why}")
            case events.WorkerSuspected(name, why) if why.startswith("no heartbeat"):  # a client may suspect any server
                if now < self._began[name] + self._suspect_seconds:
                    self._wrong.append(f"{name} was suspected before it could have been silent for so long: {why}")
                if not any(map(self._is_faulty, (name, GATEWAY, MONITOR))):
                    self._wrong.append(f"{name} was suspected, and neither it nor the receivers of its heartbeats were paused: {why}")

    def _use(self, graph: Graph, joining: Sequence[str], now: float) -> None:
        gone = self._graph_names - {*graph.process_names()}
        self._graph_names = {*graph.process_names()}
        self._workers |= self._graph_names
        self.mortal = sorted({*self.mortal, *mortal(graph)})
        self._lost -= gone
        self.down -= gone
        for name in gone:
            self._retry_at.pop(name, None)
        groups = {*joining}.intersection(pipelines(graph))
        for name in joining:
            self._outages.down(name, now)
        for group in groups:
            for name in self._lost:
                self._outages.down(name, now, group)

    def _check_cause(self, name: str, how: str, may_recur: bool) -> None:
        """Where the exit status alone is the cause of a death, it must be the true one, and only a crash may come from a request."""
        true = self._world.processes[name].how
        if how in EXITS and (how != true or may_recur != (true == SEGFAULT)):
            blames = "may" if may_recur else "cannot"
            self._wrong.append(f"{name} {true}, but its loss was announced as {how!r}, which a request {blames} cause")

    def look(self, insides: Sequence[WorkerInternals]) -> None:
        """At any time: no group treats a living server as dead without a fault (I7). Records when each group uses a new incarnation.

        Except a fenced group on a host that the launcher does not reach: its peers have closed their links to it.
        """
        now, incarnations = self._world.loop.time(), self._launcher.incarnations
        for inside in insides:
            servers = inside.servers
            if (
                not servers
                or inside.name not in self._graph_names
                or (inside.name in self._elsewhere and self._launcher.state.has_ended(inside.name))
            ):
                continue
            for name in servers:
                if (incarnation := incarnations.get(name)) is None:
                    continue  # it has left, and the group does not know it yet
                if inside.has_ended(name, incarnation):
                    self._outages.down(name, now, inside.name)
                    if self._is_alive(name) and not self._is_faulty(name):
                        self._wrong.append(f"{inside.name} treats {name} as dead, which is alive and was hit by no fault")
                elif self._outages.is_down(inside.name, name) and self._is_alive(name) and inside.uses(name, incarnation):
                    self._outages.up(inside.name, name, now)
        if self._wrong:
            raise InvariantError("I7", self._wrong[0])
        if now >= self._polled_at + POLL_SECONDS:
            self._polled_at = now
            self._look_for_waiting(insides, now)
        if not self._faults.delays(self._workers):
            self._look_for_unsettled(insides, now)
        self._look_for_unused_standbys(now)
        if self._is_watched and (self._is_ready or not (self._links_at_start or self._is_faulty(FORK_SERVER))):
            self._look_for_stopped(now)

    def due_retries(self, until: float) -> list[str]:
        """Workers out of their restart budget whose next start is due by `until`, and has not come."""
        return [f"the next start of {name} is due at {at:.6f} s" for name, at in self._retry_at.items() if at <= until]

    def unused(self, insides: Iterable[WorkerInternals]) -> str | None:
        """A group that does not use a living server in its latest incarnation, or None. When all has settled there is none (I8)."""
        for inside in insides:
            for name in inside.servers:
                if name not in self.down and not inside.uses(name, incarnation := self._launcher.incarnations[name]):
                    return f"{inside.name} does not use {name} in its latest incarnation {incarnation}"
        return None

    def missing_standbys(self) -> list[str]:
        """Standby processes that are not alive when all has settled, unless a process stays down (I8)."""
        names = self._launcher.state.starts.standby_names
        return [] if self.down else [f"there is no {name}" for name in names if not self._is_alive(name)]

    def _look_for_waiting(self, insides: Sequence[WorkerInternals], now: float) -> None:
        """Check that no part waits for a replica while one is available (I5)."""
        waiting: set[tuple[str, Any, int]] = set()
        for inside in insides:
            found = inside.undispatched()
            if found and not self._is_faulty(inside.name):
                waiting |= {(inside.name, *each) for each in found}
        self._waiting = {each: self._waiting.get(each, now) for each in waiting}
        for (name, tag, part), since in self._waiting.items():
            if now > since + WAITING_SECONDS:
                raise InvariantError("I5", f"part {part} of {tag} waits at {name} since {since:.6f} s for an available replica")

    def _look_for_unsettled(self, insides: Sequence[WorkerInternals], now: float) -> None:
        """Check that the launcher explains each loss of a server before its clients stop waiting for the cause (I5)."""
        unsettled = {(inside.name, server) for inside in insides for server in inside.unsettled()}
        if not unsettled and not self._unsettled:
            return
        self._unsettled = {each: self._unsettled.get(each, now) for each in unsettled}
        for (name, server), since in self._unsettled.items():
            if now > since + UNSETTLED_SECONDS:
                raise InvariantError("I5", f"{name} waits since {since:.6f} s for the cause of the loss of {server}")

    def _look_for_unused_standbys(self, now: float) -> None:
        """Check that no process waits for the fork server while a standby process can become it (I5)."""
        waiting = self._can_stand_in and self._can_stand_in & self._launcher.state.starts.waiting.keys()
        is_unused = waiting and any(map(self._is_alive, self._ready_standbys)) and not self._world.loop.is_parked(OUTSIDE)
        self._unused_since = (now if self._unused_since is None else self._unused_since) if is_unused else None
        if self._unused_since is not None and now > self._unused_since + UNUSED_SECONDS:
            raise InvariantError("I5", f"{min(waiting)} waits for the fork server, and a standby process is ready")

    def _look_for_stopped(self, now: float) -> None:
        """Check that no process that the run can lose stays stopped, also while it starts (I5). A new fork server has a time limit, and so
        has one that was to fork the monitor: until then no process is watched."""
        has_monitor = self._is_ready and self._is_alive(MONITOR)
        if not self._is_alive(MONITOR) and self._is_faulty(FORK_SERVER):
            self._stopped = {}
            return
        fork_server = [FORK_SERVER] if has_monitor and self._launcher.state.starts.fork_server.is_up else []
        names = {*self.mortal, *self._launcher.state.starts.standby_names, *fork_server}
        stopped = {name for name in names if self._is_stopped(name)}
        self._stopped = {name: self._stopped.get(name, now) for name in stopped}
        for name, since in self._stopped.items():
            if now > since + self._stopped_seconds:
                raise InvariantError("I5", f"{name} is stopped since {since:.6f} s and was not killed")

    def _is_stopped(self, name: str) -> bool:
        process = self._world.processes.get(name)
        if process is None or self._world.process_activity(process.pid) is not Activity.STOPPED:
            return False
        return name == FORK_SERVER or not self._launcher.state.has_ended(name)

    def _on_death(self, process: SimulatedProcess) -> None:
        """Called at the moment of the death, before any other process is notified."""
        for name in self.mortal:
            if self._world.processes.get(name) is process:
                self._outages.down(name, self._world.loop.time())

    def _is_alive(self, name: str) -> bool:
        process = self._world.processes.get(name)  # None: a standby process that was taken
        return process is not None and not self._launcher.state.has_ended(name) and self._world.is_alive(process)


def _causes_of(how: str) -> list[str]:
    """The workers of the process with which a lost one is restarted."""
    return how.removeprefix("is restarted with ").split(";")[0].split("+") if how.startswith("is restarted with ") else []
