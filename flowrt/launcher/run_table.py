"""The processes and workers of a run, the phase of the run, and the timers and actions that follow from its events. Pure.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from flowrt.actors.control import DeathCause, DetectorReport, PeerJoined, PeerLeft
from flowrt.graph.model import MONITOR, Graph
from flowrt.graph.recovery import failure_unit, neighbours, restart_rank, survivable_processes
from flowrt.launcher.actions import Action, Announce, End, Send, StartProcess
from flowrt.launcher.events import Event
from flowrt.processes.output_tail import exit_text
from flowrt.transports.contract import Identity

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


@dataclass
class WorkerRecord:
    """One incarnation of a worker. `is_open`: its control connection. `addresses`: where it listens, by scheme. `silent_seconds`: counted
    by the polls of the monitor. `loaded_as`: the process whose operators it has loaded as a standby process, which it was until it got its
    name. `marked_dead`: the report of the present monitor, until it is killed for it."""

    name: str
    process: ProcessRecord
    incarnation: str
    pid: int = 0
    state: WorkerState = WorkerState.FORKING
    is_open: bool = False
    addresses: dict[str, str] = field(default_factory=dict)
    last_message_seconds: float = 0.0
    silent_seconds: float = 0.0
    loaded_as: str = ""
    marked_dead: DetectorReport | None = None

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
    """One process. `can_restart`: the run can lose all its workers. `unit`: its failure unit, "": none. `rank`: see `restart_rank`.
    `cause`: why it died, where more than the exit status is known. `died_seconds`: when, the last time; `down_seconds`: since when it is
    not up; `refused_seconds`: since when its forks have met the end of a fork server. `has_failed`: a worker or the monitor has reported
    that what it computed may be the reason. `is_fenced`: it has died, and no more of its messages are accepted. `is_killed_on_purpose`: it
    was killed to be restarted with its failure unit, or because it leaves. `is_restarting`: it has died, is restarted with its failure
    unit, and is not given up. `is_joining`: it has never been up. `is_leaving`: it ends soon, and is not restarted. `has_left`: the graph
    is without it, and it was told to end."""

    name: str
    can_restart: bool
    links_are_lazy: bool
    is_task: bool
    unit: str = ""
    rank: int = 0
    workers: list[WorkerRecord] = field(default_factory=list)
    phase: ProcessPhase = ProcessPhase.FORKING
    how: str = ""
    cause: str | None = None
    died_seconds: float | None = None
    down_seconds: float | None = None
    refused_seconds: float | None = None
    is_given_up: bool = False
    is_fenced: bool = False
    has_failed: bool = False
    is_killed_on_purpose: bool = False
    is_restarting: bool = False
    is_joining: bool = False
    is_leaving: bool = False
    has_left: bool = False
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
    """Belongs to one run. `now` is the time of the present event. A timer is an event of the run state and its subject: the name of a
    process, or of a lost link; some have none."""

    def __init__(self, graph: Graph, new_incarnation: Callable[[], str]) -> None:
        self._new_incarnation = new_incarnation
        self.use(graph)
        self.processes: dict[str, ProcessRecord] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self.phase = RunPhase.LOADING
        self.now = 0.0
        self.actions: list[Action] = []
        self._timers: dict[tuple[Callable[..., None], tuple[str, ...]], float] = {}

    def use(self, graph: Graph) -> None:
        """The graph of the run from now on."""
        self.graph = graph
        self._eager = {end for edge in graph.edges.values() if edge.open == "start" for end in graph.ends_of(edge)}
        self._neighbours = neighbours(graph)

    def add(self, name: str, workers: Sequence[str], is_task: bool = False) -> ProcessRecord:
        """Add a process. The run can lose the processes that are not of the graph."""
        fatal = set(self.graph.process_names()) - survivable_processes(self.graph)
        process = self.processes[name] = ProcessRecord(
            name,
            can_restart=not is_task and fatal.isdisjoint(workers),
            links_are_lazy=self._eager.isdisjoint(workers),
            is_task=is_task,
            unit=failure_unit(self.graph, workers),
            rank=restart_rank(self.graph, workers),
        )
        self.renew(process, workers)
        return process

    def remove(self, process: ProcessRecord) -> None:
        """Forget a process that has become another one, or has left."""
        self.cancel_timers(process.name)
        del self.processes[process.name]
        for name in process.names:
            del self.workers[name]

    def renew(self, process: ProcessRecord, workers: Sequence[str], loaded_as: str = "") -> None:
        """Give the process new incarnations of its workers."""
        process.phase, process.how, process.cause = ProcessPhase.FORKING, "", None
        process.is_given_up = process.is_fenced = process.has_failed = process.is_killed_on_purpose = False
        process.workers = [WorkerRecord(name, process, self._new_incarnation(), loaded_as=loaded_as) for name in workers]
        self.workers |= {worker.name: worker for worker in process.workers}

    # Actions and timers.

    def act(self, action: Action) -> None:
        """No action follows the end of the run."""
        if self.phase != RunPhase.ENDED:
            self.actions.append(action)
        if isinstance(action, End):
            self.phase = RunPhase.ENDED
            self._timers.clear()

    def announce(self, event: Event) -> None:
        self.act(Announce(event))

    def start(self, process: ProcessRecord, standby: str = "") -> None:
        self.act(StartProcess(process.name, tuple(Identity(each.name, each.incarnation) for each in process.workers), standby))

    def set_timer(self, seconds: float, event: Callable[..., None], *subject: str) -> None:
        self._timers[event, subject] = self.now + seconds

    def cancel_timers(self, subject: str) -> None:
        self._timers = {timer: at for timer, at in self._timers.items() if subject not in timer[1]}

    @property
    def deadline(self) -> float | None:
        """The time of the next timer."""
        return min(self._timers.values(), default=None)

    def run_timers(self) -> None:
        """Run the timers that are due."""
        due = sorted((at, subject, number, event) for number, ((event, subject), at) in enumerate(self._timers.items()) if at <= self.now)
        for _, subject, _, event in due:
            if self._timers.pop((event, subject), None) is not None:  # an earlier one may have cancelled it
                event(*subject)

    # Notices.

    def notify(self, worker: WorkerRecord, control: PeerLeft | PeerJoined | DeathCause) -> None:
        """Send a notice about `worker` to its neighbours. One that does not link yet needs none: its Peers will contain the news."""
        for name in self._neighbours.get(worker.name, ()):
            other = self.workers.get(name)
            if other is None or other.process is worker.process or not other.is_open:
                continue
            if WorkerState.LINKING <= other.state <= WorkerState.STOPPING:
                self.act(Send(name, control))

    def notify_monitor(self, control: PeerLeft | PeerJoined) -> None:
        monitor = self.workers.get(MONITOR)
        if monitor is not None and monitor.is_usable:
            self.act(Send(MONITOR, control))

    # What the run can lose.

    def can_lose(self, process: ProcessRecord) -> bool:
        """Whether the run has loaded and goes on when this process dies now."""
        return self.can_replace(process) and self.phase >= RunPhase.CONNECTING

    def can_replace(self, process: ProcessRecord) -> bool:
        """Whether a restart makes up for the process's death now. While workers connect, others wait for its very incarnation, unless
        links open at their first use."""
        return process.can_restart and (process.links_are_lazy or self.phase != RunPhase.CONNECTING)

    def can_kill(self, process: ProcessRecord) -> bool:
        """Whether the process is running and can be killed to be restarted."""
        is_living = process.phase in (ProcessPhase.STARTING, ProcessPhase.UP)
        return is_living and self.phase < RunPhase.STOPPING and self.can_replace(process)

    def awaits_start(self, process: ProcessRecord) -> bool:
        """Whether the run starts and cannot become ready without this process."""
        return self.phase < RunPhase.RUNNING and process.name != MONITOR

    def rest_of_unit(self, process: ProcessRecord) -> list[ProcessRecord]:
        """The other processes of its failure unit that the run can lose: they end and are restarted with this one."""
        unit = (other for other in self.processes.values() if process.unit and other.unit == process.unit)
        return [other for other in unit if other is not process and self.can_lose(other)]
