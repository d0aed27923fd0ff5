"""The table that the parts of the run state share: processes, workers, the phase of the run, timers and actions. Pure.

A process goes through these phases, once per incarnation:

    FORKING -> STARTING -> UP -> DYING -> ENDED -> REAPED -> DEAD -> FORKING (a restart)

- DYING: the first sign of the end. Its peers are notified in the same event (`PeerLeft`), so that they use it no more.
- ENDED: the kernel has reported the end. The exit status is not known yet.
- REAPED: the exit status is known. Its last messages may not be read yet; they may contain the cause.
- DEAD: how it died is known.

A death may skip phases, because its signs come in any order. Each worker has a state of its own, see NEXT_STATES.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from flowrt.actors.control import ComputesAlone, DeathCause, PeerJoined, PeerLeft
from flowrt.graph.model import MONITOR, Graph
from flowrt.graph.recovery import RULES, neighbours, rule_of, survivable_processes
from flowrt.launcher.actions import Action, Announce, End, EndProcess, Send
from flowrt.launcher.events import Event, WorkerGivenUp
from flowrt.launcher.recovery_policy import RecoveryPolicy
from flowrt.processes.output_tail import exit_text
from flowrt.transports.contract import Identity
from flowrt.transports.wire.message import Tag

LAST_MESSAGES_SECONDS = 0.5  # from the end of a control connection to the end of its process
FENCE_SECONDS = 0.75  # from the first sign of a death until no more messages are accepted; longer, so that the exit status is known
REAP_SECONDS = 15.0  # time limit for a dying process to end


# Signals that other programs send. The system sends SIGKILL when memory runs out, which a request can cause; users kill far more often.
# A worker whose control connection has ended exits with status 0.
FROM_OUTSIDE = (exit_text(0), *(exit_text(-number) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))


class RunPhase(IntEnum):
    LOADING = 0
    CONNECTING = 1
    RUNNING = 2
    STOPPING = 3
    ENDED = 4


class ProcessPhase(IntEnum):
    FORKING = 0
    STARTING = 1
    UP = 2
    DYING = 3
    ENDED = 4
    REAPED = 5
    DEAD = 6


class WorkerState(IntEnum):
    """LEFT: its peers were notified of its end. STOPPING: Stop was sent to it."""

    FORKING = 0
    LOADING = 1
    LISTENING = 2
    LINKING = 3
    CONNECTED = 4
    STOPPING = 5
    LEFT = 6


NEXT_STATES: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.FORKING: frozenset({WorkerState.LOADING}),
    WorkerState.LOADING: frozenset({WorkerState.LISTENING, WorkerState.LEFT}),
    WorkerState.LISTENING: frozenset({WorkerState.LINKING, WorkerState.STOPPING, WorkerState.LEFT}),  # Stop: of a standby process
    WorkerState.LINKING: frozenset({WorkerState.CONNECTED, WorkerState.LEFT}),
    WorkerState.CONNECTED: frozenset({WorkerState.STOPPING, WorkerState.LEFT}),
    WorkerState.STOPPING: frozenset(),
    WorkerState.LEFT: frozenset({WorkerState.STOPPING}),  # its death is noticed while Stop is sent
}


class TimerKind(IntEnum):
    """The subject of a timer is a process, or a lost link; SETTLE, POLL and the last three have none."""

    SETTLE = 0
    RESTART = 1
    KILL = 2
    NO_REAP = 3
    NO_STATUS = 4
    LINK = 5
    POLL = 6
    STOP = 7
    KILL_LATE = 8
    END = 9
    FENCE = 10
    FORK_SERVER = 11


OF_PROCESS = (TimerKind.RESTART, TimerKind.KILL, TimerKind.NO_REAP, TimerKind.NO_STATUS, TimerKind.FENCE)


@dataclass
class WorkerRecord:
    """One incarnation of a worker. `is_open`: its control connection. `silent_seconds`: counted by the polls of the monitor.
    `was_standby`: it was a standby process until it got its name."""

    name: str
    process: ProcessRecord
    incarnation: str
    pid: int = 0
    state: WorkerState = WorkerState.FORKING
    is_open: bool = False
    computes_alone: ComputesAlone = ComputesAlone()  # the part of a suspect that it computes now
    last_message_seconds: float = 0.0
    silent_seconds: float = 0.0
    was_standby: bool = False

    @property
    def is_usable(self) -> bool:
        return self.is_open and self.state in (WorkerState.CONNECTED, WorkerState.STOPPING)

    @property
    def has_ended(self) -> bool:
        return not self.is_open or self.state >= WorkerState.STOPPING

    def advance(self, state: WorkerState) -> bool:
        """Enter the state. False, and nothing happens, when it cannot follow the present one."""
        can_follow = state in NEXT_STATES[self.state]
        if can_follow:
            self.state = state
        return can_follow


@dataclass
class ProcessRecord:
    """One process. `can_restart`: the run can lose all its workers. `cause`: why it died, where more than the exit status is known.
    `has_failed`: a worker or the monitor has reported that what it computed may be the reason. `is_fenced`: it has died, and no more of its
    messages are accepted. `is_killed_on_purpose`: it was killed to be restarted with another one that died. `is_restarting`:
    `restart_role` or `restart_all` restarts it, and it is not given up."""

    name: str
    can_restart: bool
    links_are_lazy: bool
    is_task: bool
    workers: list[WorkerRecord] = field(default_factory=list)
    phase: ProcessPhase = ProcessPhase.FORKING
    how: str = ""
    cause: str | None = None
    died_seconds: float | None = None
    is_given_up: bool = False
    is_fenced: bool = False
    has_failed: bool = False
    is_killed_on_purpose: bool = False
    is_restarting: bool = False
    num_restarts: int = 0

    @property
    def may_recur(self) -> bool:
        """Whether it crashed or hung, and what it computed may be the reason."""
        is_crash = self.how.startswith(("exited", "was killed")) and self.how not in FROM_OUTSIDE
        return self.has_failed or (self.cause is None and is_crash)

    @property
    def is_ending(self) -> bool:
        """Whether it dies and its exit is awaited."""
        return ProcessPhase.DYING <= self.phase < ProcessPhase.DEAD and not self.is_given_up

    @property
    def is_next(self) -> bool:
        """Whether it has died and is about to be started."""
        return self.phase == ProcessPhase.DEAD and not self.is_given_up

    @property
    def names(self) -> list[str]:
        return [worker.name for worker in self.workers]

    @property
    def is_open(self) -> bool:
        return any(worker.is_open for worker in self.workers)

    @property
    def has_stop(self) -> bool:
        return all(worker.state is WorkerState.STOPPING for worker in self.workers)


class RunTable:
    """Belongs to one run. `now` is the time of the present event. `survivable`: processes outside the graph that the run can lose."""

    def __init__(self, graph: Graph, new_incarnation: Callable[[], str], survivable: Iterable[str] = ()) -> None:
        self._new_incarnation = new_incarnation
        self._survivable = survivable_processes(graph) | {MONITOR, *survivable}
        self._eager = {end for edge in graph.edges.values() if edge.open == "start" for end in graph.ends_of(edge)}
        self._state_kept = {name: list(RULES).index(rule_of(graph, name).keeps) for name in graph.process_names()}
        self.policy = RecoveryPolicy(graph)
        self.neighbours = neighbours(graph)
        self.emits = {node.name: node.process for node in graph.nodes.values() if node.kind.schedules}  # source -> its process
        serving = {
            graph.nodes[edge.target].process
            for edge in graph.edges.values()
            if edge.source_port.startswith("server") and graph.crosses(edge)
        }
        self.colocated = serving.intersection(self.emits.values())  # groups that are expert servers too
        self.processes: dict[str, ProcessRecord] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self.phase = RunPhase.LOADING
        self.now = 0.0
        self.actions: list[Action] = []
        self.timers: dict[tuple[TimerKind, str], float] = {}
        self.waiting: set[str] = set()  # dead processes that start after others that are restarted with them

    def add(self, name: str, workers: Sequence[str], is_task: bool) -> ProcessRecord:
        can_restart = not is_task and self._survivable.issuperset(workers)
        process = self.processes[name] = ProcessRecord(name, can_restart, self._eager.isdisjoint(workers), is_task)
        self.renew(process, workers)
        return process

    def remove(self, process: ProcessRecord) -> None:
        """Forget a process that has become another one."""
        self.cancel_timers(process)
        del self.processes[process.name]
        for name in process.names:
            del self.workers[name]

    def renew(self, process: ProcessRecord, workers: Sequence[str]) -> None:
        """Give the process new incarnations of its workers."""
        process.phase, process.how, process.cause = ProcessPhase.FORKING, "", None
        process.is_given_up = process.is_fenced = process.has_failed = process.is_killed_on_purpose = False
        process.workers = [WorkerRecord(name, process, self._new_incarnation()) for name in workers]
        self.workers |= {worker.name: worker for worker in process.workers}

    def identities(self, process: ProcessRecord) -> tuple[Identity, ...]:
        return tuple(Identity(worker.name, worker.incarnation) for worker in process.workers)

    # Actions and timers.

    def act(self, action: Action) -> None:
        """No action follows the end of the run."""
        if self.phase != RunPhase.ENDED:
            self.actions.append(action)
        if isinstance(action, End):
            self.phase = RunPhase.ENDED
            self.timers.clear()

    def announce(self, event: Event) -> None:
        self.act(Announce(event))

    def set_timer(self, kind: TimerKind, seconds: float, subject: str = "") -> None:
        self.timers[kind, subject] = self.now + seconds

    def cancel_timers(self, process: ProcessRecord) -> None:
        for kind in OF_PROCESS:
            self.timers.pop((kind, process.name), None)

    def wake_waiting(self) -> None:
        """Decide again which of the waiting processes start."""
        for name in self.waiting:
            self.set_timer(TimerKind.RESTART, 0.0, name)
        self.waiting.clear()

    def notify(self, worker: WorkerRecord, names: Iterable[str], control: PeerLeft | PeerJoined | DeathCause) -> None:
        """Send a notice about `worker` to other processes. One that does not link yet needs none: its Peers will contain the news."""
        for name in names:
            other = self.workers.get(name)
            if other is None or other.process is worker.process or not other.is_open:
                continue
            if other.state in (WorkerState.CONNECTED, WorkerState.STOPPING) or (other.state is WorkerState.LINKING and name != MONITOR):
                self.act(Send(name, control))

    def process_of(self, tag: Tag | None) -> str:
        """The process that emits a tag; "" for None, and for a tag that none emits."""
        return "" if tag is None else self.emits.get(tag.source.partition("@")[0], "")

    def notify_monitor(self, control: PeerJoined) -> None:
        monitor = self.workers.get(MONITOR)
        if monitor is not None and monitor.is_usable:
            self.act(Send(MONITOR, control))

    def give_up(self, process: ProcessRecord, why: str, retry_seconds: float | None = None) -> None:
        """The process stays down, see events.WorkerGivenUp."""
        process.is_given_up = True
        for worker in process.workers:
            self.announce(WorkerGivenUp(worker.name, why, retry_seconds))
            if process.is_restarting:
                self.notify(worker, self.neighbours.get(worker.name, ()), PeerLeft(worker.name, worker.incarnation, why))
        process.is_restarting = False
        self.wake_waiting()

    # Deaths.

    def keeps_less(self, worker: str, other: str) -> bool:
        """Whether the death of `worker` loses less state than that of `other`."""
        return self._state_kept.get(worker, 0) < self._state_kept.get(other, 0)

    def can_lose(self, process: ProcessRecord) -> bool:
        """Whether the run has loaded and goes on when this process dies now."""
        return self.can_replace(process) and self.phase >= RunPhase.CONNECTING

    def can_replace(self, process: ProcessRecord) -> bool:
        """Whether a restart makes up for the process's death now. While workers connect, others wait for its very incarnation, unless
        links open at their first use."""
        return process.can_restart and (process.links_are_lazy or self.phase != RunPhase.CONNECTING)

    def restarted_with(self, process: ProcessRecord) -> list[ProcessRecord]:
        """The other processes that the recovery policy restarts when this one dies."""
        others = [other for other in self.processes.values() if other is not process and self.can_lose(other)]
        return [other for other in others if self.policy.is_restarted_with(other.names, process.names)]

    def restarting_on_purpose(self) -> list[str]:
        """The workers that the recovery policy restarts now, in the graph's order."""
        return [name for name, worker in self.workers.items() if worker.process.is_restarting]

    def can_fence(self, process: ProcessRecord) -> bool:
        is_living = process.phase in (ProcessPhase.STARTING, ProcessPhase.UP)
        return is_living and self.phase < RunPhase.STOPPING and self.can_replace(process)

    def awaits_start(self, process: ProcessRecord) -> bool:
        """Whether the run starts and cannot become ready without this process."""
        return self.phase < RunPhase.RUNNING and process.name != MONITOR

    def note_dying(self, process: ProcessRecord, why: str) -> None:
        """Handle the first sign of a death."""
        if process.phase >= ProcessPhase.DYING:
            return
        is_lost = process.phase == ProcessPhase.UP and self.phase == RunPhase.RUNNING and self.can_lose(process)
        process.phase, process.died_seconds = ProcessPhase.DYING, self.now
        if is_lost:
            process.is_restarting = self.policy.follows(process.names)
        if self.can_lose(process):
            self.set_timer(TimerKind.FENCE, FENCE_SECONDS, process.name)
            why = process.cause or process.how or why
            for worker in process.workers:
                if worker.advance(WorkerState.LEFT):
                    left = PeerLeft(worker.name, worker.incarnation, why, process.is_restarting)
                    self.notify(worker, (*self.neighbours.get(worker.name, ()), MONITOR), left)
        if process.can_restart:
            self.set_timer(TimerKind.NO_REAP, REAP_SECONDS, process.name)
        if is_lost and not process.is_killed_on_purpose:
            self._kill_others(process)

    def _kill_others(self, process: ProcessRecord) -> None:
        """Kill the processes that are restarted with this one. One that starts already has served no request yet, and goes on."""
        for other in self.restarted_with(process):
            if other.phase == ProcessPhase.UP:
                other.is_killed_on_purpose = True
                other.cause = f"is restarted with {process.name}"
                self.kill(other, other.cause)

    def kill(self, process: ProcessRecord, why: str) -> None:
        self.note_dying(process, why)
        self.act(EndProcess(process.name))

    def fence(self, worker: str, why: str) -> None:
        """Fence this incarnation: notify its peers, then send SIGKILL. No-op when the run cannot lose it, or its end is known."""
        process = self.workers[worker].process
        if self.can_fence(process):
            process.cause = process.cause or why
            self.kill(process, why)
