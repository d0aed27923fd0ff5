"""The state of one run: which processes live, what follows from a death, how the run starts and how it ends. Pure.

Events in, actions out. Each `on_...` method is one event, with its time; `take_actions` returns what follows from it. `deadline` is the
time of the next timer, and `on_time` the event at that time. The launcher (launcher.py) turns messages, notices and timers into events and
carries out the actions.

A process goes through these states, once per incarnation:

    FORKING -> STARTING -> UP -> DYING -> EXITED -> DEAD -> FORKING (a restart)

- DYING: the first sign of the end. Its peers are notified in the same event (`PeerLeft`), so that they use it no more.
- EXITED: it was reaped. Its last messages may not be read yet; they may contain the cause.
- DEAD: how it died is known. A process whose workers keep no state is restarted within its restart budget; without one it stays down.
  The death of any other process ends the run.

The run goes through LOADING (until all workers listen), CONNECTING (until all are connected), RUNNING, STOPPING and ENDED. A worker that
reports a failure while the run loads ends the run, since it would fail again; a process that dies without a report is loaded again.

The peers of a dead process often report lost links before the death itself is detected. All reports within SETTLE_SECONDS of the first are
therefore collected, and the most fundamental one is the root cause. Once chosen, it never changes. No action follows the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from flowrt.actors.control import Control, DetectorReport, Failed, LinkLost, Listening, PeerJoined, PeerLeft, Peers
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, MONITOR, Graph
from flowrt.graph.recovery import is_watched, neighbours, survivable_processes
from flowrt.launcher import events
from flowrt.reliability.detector import ProcessState
from flowrt.reliability.restart_policy import Restart, RestartPolicy

SETTLE_SECONDS = 0.2  # from the first report of a failure to the choice of the root cause
EXPLAINED_SECONDS = 2.0  # from a lost link to the death that explains it; after that the end that the run can lose is killed
FORK_SERVER_SECONDS = 15.0  # time limit for the fork server to report the exit of an ended process
LAST_MESSAGES_SECONDS = 0.5  # for a process that closed its control connection to end, and to read the last messages of an ended one
STATUS_SECONDS = 10.0  # the same for a process that the run cannot lose: its exit status is the reason that users see
TERM_SECONDS = 0.5  # from SIGTERM to SIGKILL, and from SIGKILL to the end of the run


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
    EXITED = 4
    DEAD = 5


class FailureKind(IntEnum):
    """Kinds of failure, the most fundamental first. A SECONDARY failure may be only the consequence of a death."""

    BAD_INPUT = 0
    DIED = 1
    SECONDARY = 2


@dataclass(frozen=True)
class StartProcess:
    """Start the process; `on_forked` or `on_fork_failed` follows."""

    process: str


@dataclass(frozen=True)
class EndProcess:
    """Send SIGKILL to the process, or SIGTERM if it is to `end_gently`."""

    process: str
    end_gently: bool = False


@dataclass(frozen=True)
class SendStart:
    worker: str


@dataclass(frozen=True)
class Send:
    """Send the message to the worker. A message to a worker whose connection has ended is dropped."""

    worker: str
    control: Control


@dataclass(frozen=True)
class SendStop:
    """Send Stop to the worker until `deadline`; `on_stop_sent` follows unless the worker is gone."""

    worker: str
    deadline: float


@dataclass(frozen=True)
class Announce:
    event: events.Event


@dataclass(frozen=True)
class End:
    """End the run: in order, or by `error`. `tail_of`: the process whose output tail belongs to the error."""

    error: Exception | None = None
    tail_of: str | None = None


Action = StartProcess | EndProcess | SendStart | Send | SendStop | Announce | End


@dataclass(frozen=True, order=True)
class _Report:
    kind: FailureKind
    order: int
    worker: str = field(compare=False)
    process: str = field(compare=False)
    reason: str = field(compare=False)


@dataclass
class _WorkerRecord:
    """One worker. From `pid` on, the fields belong to its current incarnation. `has_left`: its peers were notified of its end. `unsent`:
    notices about its peers, kept until it is connected and can use them."""

    name: str
    process: _ProcessRecord
    incarnation: str
    pid: int = 0
    is_open: bool = False
    is_listening: bool = False
    has_peers: bool = False
    is_connected: bool = False
    has_left: bool = False
    has_stop: bool = False
    last_message_seconds: float = 0.0
    unsent: list[Control] = field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        return self.is_connected and self.is_open and not self.has_left


@dataclass
class _ProcessRecord:
    """One process. `can_restart`: the run can lose all its workers. `cause`: why it died, where more than the exit status is known."""

    name: str
    can_restart: bool
    links_are_lazy: bool
    is_task: bool
    workers: list[_WorkerRecord] = field(default_factory=list)
    phase: ProcessPhase = ProcessPhase.FORKING
    how: str = ""
    cause: str | None = None
    died_seconds: float | None = None
    is_given_up: bool = False
    num_restarts: int = 0


class RunState:
    """The run of `graph` with these OS processes (lists of workers by name), and `tasks`: workers that are tasks of the launcher's loop.

    response_seconds: the longest silence of a worker that starts. stop_seconds: from Stop to the end of the processes.
    """

    def __init__(
        self,
        graph: Graph,
        processes: Mapping[str, Sequence[str]],
        tasks: Iterable[str],
        *,
        new_incarnation: Callable[[], str],
        response_seconds: float,
        stop_seconds: float,
    ) -> None:
        self._new_incarnation, self.response_seconds, self._stop_seconds = new_incarnation, response_seconds, stop_seconds
        self._survivable = survivable_processes(graph) | {MONITOR}
        self._neighbours = neighbours(graph)
        self._eager = {end for edge in graph.edges.values() if edge.open == "start" for end in graph.ends_of(edge)}
        self._budget = RestartPolicy(graph.reliability.restarts, graph.reliability.restart_window_seconds)
        self._wants_monitor = is_watched(graph) and bool(processes)
        self._processes: dict[str, _ProcessRecord] = {}
        self._workers: dict[str, _WorkerRecord] = {}
        self.incarnations: dict[str, str] = {}
        for name, workers in processes.items():
            self._add(name, workers, is_task=False)
        for name in tasks:
            self._add(name, [name], is_task=True)
        self._phase = RunPhase.LOADING
        self._now = self._began = 0.0
        self._actions: list[Action] = []
        self._addresses: dict[str, dict[str, str]] = {}  # by worker: scheme -> address, of the latest incarnation that listened
        self._files: dict[str, str] = {}  # of the model: path -> fingerprint, as first loaded
        self._timers: dict[tuple[str, ...], tuple[float, Callable[[], None]]] = {}
        self._reports: list[_Report] = []
        self._fenced: set[str] = set()  # marked dead by the present monitor, and not killed
        self._awaited_stops: set[str] = set()  # workers to which Stop is being sent

    def _add(self, name: str, workers: Sequence[str], is_task: bool) -> None:
        can_restart = not is_task and self._survivable.issuperset(workers)
        process = self._processes[name] = _ProcessRecord(name, can_restart, self._eager.isdisjoint(workers), is_task)
        for worker in workers:
            self.incarnations[worker] = self._new_incarnation()
            self._workers[worker] = _WorkerRecord(worker, process, self.incarnations[worker])
        process.workers = [self._workers[worker] for worker in workers]

    # What the launcher reads.

    @property
    def deadline(self) -> float | None:
        """When `on_time` is due; None without a timer."""
        if self._phase == RunPhase.ENDED:
            return None
        times = [at for at, _ in self._timers.values()]
        return min([*times, *(worker.last_message_seconds + self.response_seconds for worker in self._awaited_workers())], default=None)

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def is_usable(self, worker: str) -> bool:
        """Whether the current incarnation is connected, and no sign of its end has come."""
        return worker in self._workers and self._workers[worker].is_usable

    def is_starting(self, worker: str) -> bool:
        return self._workers[worker].process.phase == ProcessPhase.STARTING

    @property
    def wants_monitor(self) -> bool:
        return self._wants_monitor

    def has_ended(self, worker: str) -> bool:
        """Whether the current incarnation has ended or is about to: it was fenced, closed its connection, or was sent Stop."""
        found = self._workers[worker]
        return found.has_left or found.has_stop or not found.is_open

    def can_lose(self, worker: str) -> bool:
        """Whether the run goes on when the worker's process dies now."""
        return self._can_lose(self._workers[worker].process)

    def restarting(self) -> list[str]:
        """Processes that have died, or are being started, and are not given up."""
        return [name for name, process in self._processes.items() if process.phase != ProcessPhase.UP and not process.is_given_up]

    def num_restarts(self, worker: str) -> int:
        return self._workers[worker].process.num_restarts

    # Events. None of these methods waits.

    def start(self, now: float, began: float) -> None:
        """Start all processes. `began`: when the launch began, before the process backend was opened."""
        self._now, self._began = now, began
        for process in self._processes.values():
            self._act(StartProcess(process.name))

    def on_time(self, now: float) -> None:
        """Run the timers that are due, at least the next one: a clock may round the time of its call down."""
        self._now = now = max(now, self.deadline or now)
        due = sorted((at, key) for key, (at, _) in self._timers.items() if at <= now)
        for _, key in due:
            if key in self._timers:  # an earlier one may have cancelled it
                self._timers.pop(key)[1]()
        silent = [worker for worker in self._awaited_workers() if worker.last_message_seconds + self.response_seconds <= now]
        for worker in silent[:1]:
            self._on_silence(worker)

    def on_forked(self, now: float, process: str, pid: int) -> None:
        self._now = now
        found = self._processes[process]
        found.phase = ProcessPhase.STARTING
        for worker in found.workers:
            worker.pid, worker.is_open, worker.last_message_seconds = pid, True, now
            if worker.name != MONITOR:
                self._announce(events.WorkerStarted(worker.name, pid))
            self._act(SendStart(worker.name))
        if self._phase >= RunPhase.STOPPING:  # it holds no work yet
            self._kill(found, "the run is being stopped")

    def on_fork_failed(self, now: float, process: str, error: UserError | WorkerDiedError) -> None:
        """The system refused, or the fork server does not respond. A restart is tried again within the restart budget."""
        self._now = now
        found = self._processes[process]
        found.phase, found.how = ProcessPhase.DEAD, str(error)
        if self._phase == RunPhase.LOADING and self._reports:
            return  # the root cause is about to be chosen
        if self._phase == RunPhase.LOADING:
            self._act(End(error))
        elif self._phase < RunPhase.STOPPING and not self._has_report(FORK_SERVER):
            if isinstance(error, WorkerDiedError) and error.process == FORK_SERVER:
                self._stay_down(found, f"the fork server {error.reason}")
            self._restart(found)
        self._end_if_stopped()

    def on_message(self, now: float, worker: str) -> None:
        """A message of a worker that starts."""
        self._workers[worker].last_message_seconds = now

    def on_listening(self, now: float, worker: str, listening: Listening) -> None:
        self._now = now
        found = self._workers[worker]
        if found.is_listening:
            return
        changed = [path for path, fingerprint in listening.files.items() if self._files.setdefault(path, fingerprint) != fingerprint]
        if changed:
            reason = f"{changed[0]} has changed since the run began; restore the file, or start the run again"
            self._blame(FailureKind.BAD_INPUT, found, reason)
            self.fence(now, worker, reason)
            return
        found.is_listening, self._addresses[worker] = True, listening.addresses
        if worker != MONITOR:
            self._announce(events.WorkerListening(worker, listening.resident_bytes, listening.imported_bytes))
        if self._phase == RunPhase.LOADING:
            if all(each.is_listening and each.process.phase == ProcessPhase.STARTING for each in self._workers.values()):
                self._phase = RunPhase.CONNECTING
                self._send_peers(self._workers.values())
        elif found.process.phase == ProcessPhase.STARTING and all(each.is_listening for each in found.process.workers):
            for each in found.process.workers:
                self._notify(each, self._neighbours.get(each.name, ()), PeerJoined(each.name, each.incarnation, self._addresses[each.name]))
            self._send_peers(found.process.workers)

    def on_connected(self, now: float, worker: str) -> None:
        self._now = now
        found, process = self._workers[worker], self._workers[worker].process
        if found.is_connected:
            return
        found.is_connected = True
        for control in found.unsent:
            self._act(Send(worker, control))
        found.unsent.clear()
        if worker == MONITOR:
            self._introduce_to_monitor()
        else:
            self._announce(events.WorkerConnected(worker))
        if process.phase != ProcessPhase.STARTING or not all(each.is_connected for each in process.workers):
            return
        process.phase = ProcessPhase.UP
        if process.died_seconds is not None:
            process.num_restarts += 1
        for each in process.workers:
            if each.name != MONITOR:
                self._notify(each, (MONITOR,), PeerJoined(each.name, each.incarnation, {}, each.pid))
            if process.died_seconds is not None:
                self._announce(events.WorkerRestarted(each.name, each.pid, now - process.died_seconds))
        process.died_seconds = None
        if self._phase == RunPhase.CONNECTING and all(each.phase == ProcessPhase.UP for each in self._processes.values()):
            self._phase = RunPhase.RUNNING
            self._announce(events.Ready(now - self._began))
            if self._wants_monitor:
                self._add(MONITOR, [MONITOR], is_task=False)
                self._act(StartProcess(MONITOR))

    def on_connection_closed(self, now: float, worker: str) -> None:
        self._now = now
        found, process = self._workers[worker], self._workers[worker].process
        found.is_open = False
        self._awaited_stops.discard(worker)
        if not found.has_stop:
            self._note_dying(process, "it has closed its control connection")
            if process.phase == ProcessPhase.DYING and self._can_replace(process):
                self._set_timer("kill", process, LAST_MESSAGES_SECONDS, lambda: self._act(EndProcess(process.name)))
            elif process.phase == ProcessPhase.DYING:
                process.how = "closed its control connection"
                self._set_timer("kill", process, STATUS_SECONDS, lambda: self._on_dead(process))
        if process.phase == ProcessPhase.EXITED and not any(each.is_open for each in process.workers):
            self._on_dead(process)
        self._end_if_stopped()

    def on_dying(self, now: float, process: str) -> None:
        """The kernel reports that the process has begun to die. The reap follows."""
        self._now = now
        if self._processes[process].can_restart:
            self._note_dying(self._processes[process], "its process has ended")

    def on_exited(self, now: float, process: str, how: str) -> None:
        """The process has ended and was reaped. `how` continues a sentence: "was killed by SIGKILL"."""
        self._now = now
        found = self._processes[process]
        self._note_dying(found, "its process has ended")
        found.phase, found.how = ProcessPhase.EXITED, how
        self._cancel_timers(found)
        if not any(worker.is_open for worker in found.workers):
            self._on_dead(found)
        elif not all(worker.has_stop for worker in found.workers):
            seconds = LAST_MESSAGES_SECONDS if self._can_replace(found) else EXPLAINED_SECONDS  # a child may hold its connection open
            self._set_timer("messages", found, seconds, lambda: self._on_dead(found))
        self._end_if_stopped()

    def on_backend_lost(self, now: float, how: str) -> None:
        self._now = now
        if ("stop",) not in self._timers or self._awaited_stops:
            self._report(FailureKind.DIED, FORK_SERVER, FORK_SERVER, how)
            return
        for process in self._processes.values():  # they end with the fork server, and no exit is reported
            if not process.is_task:
                process.phase = max(process.phase, ProcessPhase.EXITED)
        self._end_if_stopped()

    def on_failed(self, now: float, worker: str, failed: Failed) -> None:
        self._now = now
        self._blame(FailureKind.BAD_INPUT if failed.user else FailureKind.SECONDARY, self._workers[worker], failed.error)

    def on_bad_message(self, now: float, worker: str, reason: str) -> None:
        """The worker sent a message that cannot be decoded; its connection is closed."""
        self._now = now
        self._blame(FailureKind.DIED, self._workers[worker], reason)

    def on_overflow(self, now: float, worker: str) -> None:
        """Messages for the worker fill the queue of its control connection. No message may be lost, so it is ended."""
        self._now = now
        reason = "does not read its control connection: is it stopped, or the machine overloaded?"
        if self._can_lose(self._workers[worker].process):
            self.fence(now, worker, reason)
        elif not self._has_report(worker):
            self._blame(FailureKind.DIED, self._workers[worker], reason)

    def on_link_lost(self, now: float, worker: str, lost: LinkLost) -> None:
        """Kill an end that the run can lose, unless a death explains the lost link within EXPLAINED_SECONDS. Without such an end, the run
        ends unless some worker has closed its connection by then."""
        self._now = now
        found, peer = self._workers[worker], self._workers.get(lost.peer)
        for end, other in ((peer, found), (found, peer)):
            if end is None or not self._can_lose(end.process):
                continue
            if not end.has_left and not (end is peer and lost.incarnation not in ("", end.incarnation)):
                reason = f"has lost its link to {other.name if other is not None else lost.peer} ({lost.reason})"
                key = "link", end.incarnation, other.incarnation if other is not None else ""
                self._timers[key] = now + EXPLAINED_SECONDS, partial(self._on_link_unexplained, end, other, reason)
            return
        reason = f"lost its link to {lost.peer}: {lost.reason}"
        self._timers["link", found.incarnation, lost.peer] = now + EXPLAINED_SECONDS, partial(self._blame_if_open, found, peer, reason)

    def on_detector_report(self, now: float, report: DetectorReport) -> None:
        """The monitor reports the new state of an incarnation. A dead one is killed if the run can lose it; otherwise the gateway fences it
        until it is cleared."""
        self._now = now
        worker, found = report.process, self._workers.get(report.process)
        if found is None or found.incarnation != report.incarnation or self.has_ended(worker):
            return
        match report.state:
            case ProcessState.SUSPECT:
                self._announce(events.WorkerSuspected(worker, report.why))
            case ProcessState.ALIVE:
                self._fenced.discard(worker)
                self._announce(events.WorkerCleared(worker, report.why))
            case ProcessState.DEAD:
                is_killed = self._can_fence(found.process)
                if not is_killed:
                    self._fenced.add(worker)
                self._announce(events.WorkerMarkedDead(worker, report.why, is_killed))
                self.fence(now, worker, f"was marked dead ({report.why})")

    def fence(self, now: float, worker: str, why: str) -> None:
        """Fence this incarnation: notify its peers, then send SIGKILL. No-op when the run cannot lose it, or its end is known."""
        self._now = now
        process = self._workers[worker].process
        if self._can_fence(process):
            process.cause = process.cause or why
            self._kill(process, why)

    def _can_fence(self, process: _ProcessRecord) -> bool:
        is_living = process.phase in (ProcessPhase.STARTING, ProcessPhase.UP)
        return is_living and self._phase < RunPhase.STOPPING and self._can_lose(process)

    def stop(self, now: float) -> None:
        """End the run in order; before it is ready, at once. If a worker that the run needs has ended already, its death ends the run
        instead."""
        self._now = now
        if self._phase >= RunPhase.STOPPING:
            return
        if self._phase < RunPhase.RUNNING:
            self._act(End())
            return
        self._phase = RunPhase.STOPPING
        for process in self._processes.values():
            if process.phase == ProcessPhase.STARTING:
                self._kill(process, "the run is being stopped")
            elif process.phase == ProcessPhase.DEAD:
                self._cancel_timers(process)
        if self._reports or any(not process.can_restart and process.phase != ProcessPhase.UP for process in self._processes.values()):
            return
        deadline = now + self._stop_seconds
        self._awaited_stops = {name for name, worker in self._workers.items() if worker.process.phase == ProcessPhase.UP}
        for name in sorted(self._awaited_stops, key=list(self._workers).index):
            self._act(SendStop(name, deadline))
        self._timers["stop",] = deadline, self._on_stop_deadline
        self._end_if_stopped()

    def on_stop_sent(self, now: float, worker: str) -> None:
        self._now = now
        self._workers[worker].has_stop = True
        self._awaited_stops.discard(worker)
        self._end_if_stopped()

    # Starts.

    def _awaited_workers(self) -> list[_WorkerRecord]:
        """Workers whose next message of the startup handshake is due."""
        return [
            worker
            for worker in self._workers.values()
            if worker.process.phase == ProcessPhase.STARTING and (not worker.is_listening or worker.has_peers) and not worker.is_connected
        ]

    def _on_silence(self, worker: _WorkerRecord) -> None:
        reason = f"sent nothing for {self.response_seconds:g} s while {'connecting' if worker.has_peers else 'loading'}"
        if self._phase < RunPhase.RUNNING:
            if not self._reports:
                self._report(FailureKind.DIED, worker.name, worker.process.name, reason)
            worker.last_message_seconds = self._now
        else:
            worker.last_message_seconds = self._now
            self.fence(self._now, worker.name, reason)

    def _send_peers(self, workers: Iterable[_WorkerRecord]) -> None:
        for worker in workers:
            worker.has_peers, worker.last_message_seconds = True, self._now
            self._act(Send(worker.name, Peers(dict(self._addresses), dict(self.incarnations))))

    def _introduce_to_monitor(self) -> None:
        """Notify a new monitor of all connected processes. It marks dead ones again, so the fenced workers are cleared."""
        for name in sorted(self._fenced):
            self._announce(events.WorkerCleared(name, "the monitor was started again"))
        self._fenced.clear()
        for worker in self._workers.values():
            if worker.name != MONITOR and worker.is_usable and not worker.process.is_task:
                self._act(Send(MONITOR, PeerJoined(worker.name, worker.incarnation, {}, worker.pid)))

    # Deaths.

    def _can_lose(self, process: _ProcessRecord) -> bool:
        """Whether the run has loaded and goes on when this process dies now."""
        return self._can_replace(process) and self._phase >= RunPhase.CONNECTING

    def _can_replace(self, process: _ProcessRecord) -> bool:
        """Whether a restart makes up for the process's death now. While workers connect, others wait for its very incarnation, unless
        links open at their first use."""
        return process.can_restart and (process.links_are_lazy or self._phase != RunPhase.CONNECTING)

    def _note_dying(self, process: _ProcessRecord, why: str) -> None:
        """Handle the first sign of a death."""
        if process.phase >= ProcessPhase.DYING:
            return
        process.phase, process.died_seconds = ProcessPhase.DYING, self._now
        if self._can_lose(process):
            for worker in process.workers:
                if not worker.has_stop:
                    worker.has_left = True
                    left = PeerLeft(worker.name, worker.incarnation, process.cause or why)
                    self._notify(worker, (*self._neighbours.get(worker.name, ()), MONITOR), left)
        if process.can_restart:
            self._set_timer("reap", process, FORK_SERVER_SECONDS, lambda: self._on_not_reaped(process))

    def _kill(self, process: _ProcessRecord, why: str) -> None:
        self._note_dying(process, why)
        self._act(EndProcess(process.name))

    def _on_not_reaped(self, process: _ProcessRecord) -> None:
        """Only the fork server can reap and fork, so the process stays down unless the fork server continues."""
        hint = "is it stopped, or the machine overloaded?"
        if self._phase < RunPhase.RUNNING:
            reason = f"has not reported the end of {process.name} for {FORK_SERVER_SECONDS:g} s: {hint}"
            self._act(End(WorkerDiedError(FORK_SERVER, reason), FORK_SERVER))
        elif self._phase == RunPhase.RUNNING:
            self._stay_down(process, f"it died {FORK_SERVER_SECONDS:g} s ago, and the fork server has not reported it: {hint}")

    def _on_dead(self, process: _ProcessRecord) -> None:
        """How the process died is known, and its last messages have been read."""
        process.phase = ProcessPhase.DEAD
        self._cancel_timers(process)
        if all(worker.has_stop for worker in process.workers):
            return
        if not self._can_replace(process):
            if not any(map(self._has_report, (FORK_SERVER, *(worker.name for worker in process.workers)))):
                how = process.how if process.how.startswith(("was", "failed")) else f"{process.how} unexpectedly"
                self._blame(FailureKind.DIED, process.workers[0], how)
            return
        if self._phase >= RunPhase.STOPPING or self._reports:
            return
        how = process.how if process.cause is None else f"{process.cause}; {process.how}"
        for worker in process.workers:
            is_loading = self._phase == RunPhase.LOADING
            self._announce(events.WorkerDiedLoading(worker.name, how) if is_loading else events.WorkerLost(worker.name, how))
        if self._phase == RunPhase.LOADING:
            process.died_seconds = None
            process.num_restarts += 1
        self._restart(process)

    def _restart(self, process: _ProcessRecord) -> None:
        """Restart the process when its restart budget allows it."""
        decision = self._budget.on_death(process.name, self._now)
        if isinstance(decision, Restart):
            self._set_timer("restart", process, decision.delay_seconds, lambda: self._fork_again(process))
        elif self._phase < RunPhase.RUNNING:
            doing = "loaded" if self._phase == RunPhase.LOADING else "connected"
            reason = f"{process.how} while it {doing}, and {decision.why}"
            self._act(End(WorkerDiedError(process.workers[0].name, reason), process.name))
        elif decision.retry_seconds is None:
            self._stay_down(process, decision.why)
        else:
            self._stay_down(process, f"{decision.why}; the next try is in {decision.retry_seconds:g} s", decision.retry_seconds)
            self._set_timer("restart", process, decision.retry_seconds, lambda: self._fork_again(process))

    def _fork_again(self, process: _ProcessRecord) -> None:
        process.phase, process.cause, process.is_given_up = ProcessPhase.FORKING, None, False
        for worker in process.workers:
            self.incarnations[worker.name] = self._new_incarnation()
            self._workers[worker.name] = _WorkerRecord(worker.name, process, self.incarnations[worker.name])
        process.workers = [self._workers[worker.name] for worker in process.workers]
        self._act(StartProcess(process.name))

    def _stay_down(self, process: _ProcessRecord, why: str, retry_seconds: float | None = None) -> None:
        process.is_given_up = True
        for worker in process.workers:
            self._announce(events.WorkerGivenUp(worker.name, why, retry_seconds))

    def _on_link_unexplained(self, end: _WorkerRecord, other: _WorkerRecord | None, reason: str) -> None:
        """Fence `end`, unless the death of `other` explains the lost link. Both may have new incarnations by now."""
        if self._workers[end.name] is end and (
            other is None or (self._workers[other.name] is other and other.is_open and not other.has_left)
        ):
            self.fence(self._now, end.name, reason)

    def _blame_if_open(self, worker: _WorkerRecord, peer: _WorkerRecord | None, reason: str) -> None:
        if worker.is_open and (peer is None or peer.is_open):  # otherwise the death of one of the two is the reason
            self._blame(FailureKind.SECONDARY, worker, reason)

    # The root cause.

    def _blame(self, kind: FailureKind, worker: _WorkerRecord, reason: str) -> None:
        """Record a worker's failure: as the cause of its death if the run can lose it, else as a possible root cause of the run's end. A
        failure while the run starts is one too: the worker would fail again."""
        if self._can_lose(worker.process) and self._phase >= RunPhase.RUNNING:
            worker.process.cause = worker.process.cause or (reason if kind is FailureKind.DIED else f"failed: {reason}")
        elif not worker.has_stop:
            self._report(kind, worker.name, worker.process.name, reason)

    def _report(self, kind: FailureKind, worker: str, process: str, reason: str) -> None:
        if not self._reports:
            self._timers["settle",] = self._now + SETTLE_SECONDS, self._conclude
        self._reports.append(_Report(kind, len(self._reports), worker, process, reason))

    def _has_report(self, worker: str) -> bool:
        return any(report.worker == worker for report in self._reports)

    def _conclude(self) -> None:
        worst = min(self._reports)
        if worst.kind is FailureKind.BAD_INPUT:
            self._act(End(UserError(worst.reason)))
        else:
            reason = f"failed: {worst.reason}" if worst.kind is FailureKind.SECONDARY else worst.reason
            self._act(End(WorkerDiedError(worst.worker, reason), worst.process))

    # The end in order.

    def _end_if_stopped(self) -> None:
        """End the run when all processes have ended in order."""
        if self._phase != RunPhase.STOPPING or ("stop",) not in self._timers or self._reports or self._awaited_stops:
            return
        if all(process.phase >= ProcessPhase.EXITED for process in self._processes.values()) and not any(
            worker.is_open for worker in self._workers.values()
        ):
            self._act(End())

    def _on_stop_deadline(self) -> None:
        late = [each for each in self._processes.values() if ProcessPhase.STARTING <= each.phase < ProcessPhase.EXITED]
        for process in late:
            for worker in process.workers:
                if worker.has_stop:
                    self._announce(events.Straggler(worker.name, self._stop_seconds))
            self._act(EndProcess(process.name, end_gently=True))
        self._timers["stop",] = self._now + TERM_SECONDS, lambda: self._kill_late(late)

    def _kill_late(self, late: Collection[_ProcessRecord]) -> None:
        for process in late:
            if process.phase < ProcessPhase.EXITED:
                self._act(EndProcess(process.name))
        self._timers["stop",] = self._now + TERM_SECONDS, lambda: self._act(End())

    # Inside.

    def _act(self, action: Action) -> None:
        """No action follows the end of the run."""
        if self._phase != RunPhase.ENDED:
            self._actions.append(action)
        if isinstance(action, End):
            self._phase = RunPhase.ENDED
            self._timers.clear()

    def _announce(self, event: events.Event) -> None:
        self._act(Announce(event))

    def _notify(self, worker: _WorkerRecord, names: Iterable[str], control: PeerLeft | PeerJoined) -> None:
        """Send a notice about `worker` to other processes. One that is not connected yet cannot use it: it is kept until then, unless Peers
        contains it."""
        for name in names:
            other = self._workers.get(name)
            if other is None or other.process is worker.process or not other.is_open or other.has_left:
                continue
            if other.is_connected:
                self._act(Send(name, control))
            elif other.has_peers and name != MONITOR:
                other.unsent.append(control)

    def _set_timer(self, name: str, process: _ProcessRecord, seconds: float, call: Callable[[], None]) -> None:
        self._timers[name, process.name] = self._now + seconds, call

    def _cancel_timers(self, process: _ProcessRecord) -> None:
        for name in ("kill", "reap", "messages", "restart"):
            self._timers.pop((name, process.name), None)
