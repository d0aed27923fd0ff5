"""The state of one run: which processes live, what follows from a death, how the run starts and how it ends. Pure.

Events in, actions out. Each `on_...` method, `start` and `stop` are events, also those of `fork_server` (fork_server_loss.py). `handle`
takes one with its time, and returns the actions that follow (actions.py). `deadline` is the time of the next timer, and `on_time` the event
at that time. The launcher (launcher.py) turns messages, notices and timers into events and carries out the actions.

The run goes through LOADING (until all workers listen), CONNECTING (until all are connected), RUNNING, STOPPING and ENDED. A worker that
reports a failure while the run loads ends the run, since it would fail again; a process that dies without a report is loaded again.
run_table.py has the phases of a process. A process that the run can lose is restarted within its restart budget; without one it stays
down (restarts.py). The death of any other process ends the run (root_cause.py). No action follows the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flowrt.actors.control import ComputesAlone, Control, DetectorReport, Failed, LinkLost, Listening, PeerJoined, Peers, StatisticsRequest
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, MONITOR, Graph
from flowrt.graph.recovery import is_watched, standby_names
from flowrt.launcher import events
from flowrt.launcher.actions import Action, End, EndProcess, Send, StartProcess
from flowrt.launcher.fork_server_loss import ForkServerLoss
from flowrt.launcher.link_loss import LinkLoss
from flowrt.launcher.loaded_files import LoadedFiles
from flowrt.launcher.ordered_stop import OrderedStop
from flowrt.launcher.restarts import Restarts
from flowrt.launcher.root_cause import FailureKind, RootCause
from flowrt.launcher.run_table import (
    LAST_MESSAGES_SECONDS,
    ProcessPhase,
    ProcessRecord,
    RunPhase,
    RunTable,
    TimerKind,
    WorkerRecord,
    WorkerState,
)
from flowrt.launcher.standby import Standbys
from flowrt.reliability.detector import ProcessState

STATUS_SECONDS = 10.0  # LAST_MESSAGES_SECONDS of a process that the run cannot lose: its exit status is the reason that users see
POLL_SECONDS = 0.5  # between two requests to the monitor
MONITOR_SECONDS = 10.0  # time limit for the monitor's responses; generous, since a run loses little without its monitor


class RunState:
    """The run of `graph` with these OS processes (lists of workers by name), and `tasks`: workers that are tasks of the launcher's loop.

    start_of: the first message to an incarnation of a worker, which was a standby process or not. response_seconds: the longest
    silence of a worker that starts. stop_seconds: from Stop to the end of the processes. standby_loads: see standby.py; without them there
    are no standby processes. services: names of further processes (service.py).
    """

    def __init__(
        self,
        graph: Graph,
        processes: Mapping[str, Sequence[str]],
        tasks: Iterable[str],
        *,
        new_incarnation: Callable[[], str],
        start_of: Callable[[str, str, bool], Control],
        response_seconds: float,
        stop_seconds: float,
        standby_loads: Mapping[str, str] = MappingProxyType({}),
        services: Collection[str] = (),
    ) -> None:
        self._start_of, self.response_seconds = start_of, response_seconds
        self.wants_monitor = is_watched(graph) and bool(processes or services)
        self._table = table = RunTable(graph, new_incarnation, (*standby_names(graph), *services))
        self._standbys = Standbys(table, standby_names(graph), standby_loads)
        self._root_cause = RootCause(table)
        self.fork_server = ForkServerLoss(table, self._root_cause, graph.reliability)
        self._restarts = Restarts(table, self._root_cause, self.fork_server, self._standbys, graph.reliability)
        self._link_loss = LinkLoss(table, self._root_cause)
        self._stop = OrderedStop(table, self._root_cause, stop_seconds)
        for name, workers in (*processes.items(), *((name, (name,)) for name in services)):
            table.add(name, workers, is_task=False)
        for name in tasks:
            table.add(name, [name], is_task=True)
        self._began = self._polled = 0.0
        self._addresses: dict[str, dict[str, str]] = {}  # by worker: scheme -> address, of the latest incarnation that listened
        self._loaded_files = LoadedFiles(graph)
        self._fenced: set[str] = set()  # marked dead by the present monitor, and not killed
        self._timer_events: dict[TimerKind, Callable[[str], None]] = {
            TimerKind.SETTLE: self._root_cause.conclude,
            TimerKind.RESTART: self._restarts.fork_again,
            TimerKind.KILL: lambda process: table.act(EndProcess(process)),
            TimerKind.NO_REAP: self._restarts.on_not_reaped,
            TimerKind.NO_STATUS: self._restarts.on_no_status,
            TimerKind.FENCE: self._restarts.fence,
            TimerKind.LINK: self._link_loss.on_unexplained,
            TimerKind.POLL: self._poll_monitor,
            TimerKind.STOP: self._stop.on_deadline,
            TimerKind.KILL_LATE: self._stop.kill_late,
            TimerKind.FORK_SERVER: self.fork_server.on_time,
            TimerKind.END: lambda subject: table.act(End()),
        }

    # What the launcher reads.

    @property
    def deadline(self) -> float | None:
        """When `on_time` is due; None without a timer."""
        if self._table.phase == RunPhase.ENDED:
            return None
        silences = [worker.last_message_seconds + self.response_seconds for worker in self._awaited_workers()]
        return min([*self._table.timers.values(), *silences], default=None)

    @property
    def incarnations(self) -> dict[str, str]:
        """The current incarnation of each worker."""
        return {name: worker.incarnation for name, worker in self._table.workers.items()}

    def is_current(self, worker: str, incarnation: str) -> bool:
        found = self._table.workers.get(worker)  # None: a standby process that was taken
        return found is not None and found.incarnation == incarnation

    def accepts_messages(self, worker: str, incarnation: str) -> bool:
        """Whether messages of this incarnation have an effect: it is the current one, and was not fenced."""
        return self.is_current(worker, incarnation) and not self._table.workers[worker].process.is_fenced

    def is_usable(self, worker: str) -> bool:
        """Whether the current incarnation is connected, and no sign of its end has come."""
        return worker in self._table.workers and self._table.workers[worker].is_usable

    def counts_messages(self, worker: str) -> bool:
        """Whether the run state needs `on_message` for each message of this worker: it starts, or is the monitor."""
        return worker == MONITOR or self._table.workers[worker].process.phase == ProcessPhase.STARTING

    def has_ended(self, worker: str) -> bool:
        """Whether the current incarnation has ended or is about to: it was fenced, closed its connection, or was sent Stop."""
        return self._table.workers[worker].has_ended

    def can_lose(self, worker: str) -> bool:
        """Whether the run goes on when the worker's process dies now."""
        return self._table.can_lose(self._table.workers[worker].process)

    def restarting(self) -> list[str]:
        """Processes that have died, or are being started, and are not given up."""
        return [name for name, each in self._table.processes.items() if each.phase != ProcessPhase.UP and not each.is_given_up]

    @property
    def standby_names(self) -> tuple[str, ...]:
        """The standby processes that the run has, once it is ready."""
        return self._standbys.names

    def standby_loads(self, process: str) -> list[str]:
        """The workers whose operators a standby process loads; [] for any other process."""
        return self._standbys.loads_of(process)

    def is_ready_standby(self, process: str) -> bool:
        return self._standbys.is_ready(process)

    def num_restarts(self, worker: str) -> int:
        return self._table.workers[worker].process.num_restarts

    # Events. None of these methods waits.

    def handle(self, now: float, event: Callable[..., None], *arguments: Any) -> list[Action]:
        """Pass on one event, with its time. Returns the actions that follow."""
        self._table.now = now
        event(*arguments)
        actions, self._table.actions = self._table.actions, []
        return actions

    def start(self, began: float) -> None:
        """Start all processes. `began`: when the launch began, before the process backend was opened."""
        self._began = began
        if self.wants_monitor:
            self._table.add(MONITOR, [MONITOR], is_task=False)
            self._set_poll()
        for process in self._table.processes.values():
            self._table.act(StartProcess(process.name, self._table.identities(process)))

    def stop(self) -> None:
        self._stop.begin()

    def on_time(self) -> None:
        """Run the timers that are due, at least the next one: a clock may round the time of its call down."""
        table = self._table
        now = table.now = max(table.now, self.deadline or table.now)
        for _, kind, subject in sorted((at, *timer) for timer, at in table.timers.items() if at <= now):
            if table.timers.pop((kind, subject), None) is not None:  # an earlier one may have cancelled it
                self._timer_events[kind](subject)
        silent = [worker for worker in self._awaited_workers() if worker.last_message_seconds + self.response_seconds <= now]
        for worker in sorted(silent, key=lambda each: each.name not in self._fenced)[:1]:
            worker.last_message_seconds = now
            for other in (each for each in self._awaited_workers() if each.state is WorkerState.LINKING):
                other.last_message_seconds = now  # it may have waited for this one, and learns of its end later
            doing = "connecting" if worker.state is WorkerState.LINKING else "loading"
            reason = f"sent nothing for {self.response_seconds:g} s while {doing}"
            if not table.awaits_start(worker.process):
                table.fence(worker.name, reason)
            elif not self._root_cause.has_reports:
                self._root_cause.report(FailureKind.DIED, worker.name, worker.process.name, reason)

    def on_forked(self, process: str, pid: int) -> None:
        table, found = self._table, self._table.processes[process]
        found.phase = ProcessPhase.STARTING
        for worker in found.workers:
            worker.advance(WorkerState.LOADING)
            worker.pid, worker.is_open, worker.last_message_seconds = pid, True, table.now
            if worker.name != MONITOR:
                table.announce(events.WorkerStarted(worker.name, pid))
                if not found.is_task:
                    table.notify(worker, (MONITOR,), self._joined(worker))
            table.act(Send(worker.name, self._start_of(worker.name, worker.incarnation, worker.was_standby)))
        if table.phase >= RunPhase.STOPPING:  # it holds no work yet
            table.kill(found, "the run is being stopped")

    def on_fork_failed(self, process: str, error: UserError | WorkerDiedError) -> None:
        self._restarts.on_fork_failed(self._table.processes[process], error)
        self._stop.end_if_done()

    def on_fork_silent(self, process: str) -> None:
        """The fork has exceeded its time limit, `fork_server.fork_seconds`."""
        self.fork_server.on_silent(process)
        self._stop.end_if_done()

    def on_message(self, worker: str) -> None:
        """A message of a worker for which `counts_messages` is true."""
        found = self._table.workers[worker]
        found.last_message_seconds, found.silent_seconds = self._table.now, 0.0

    def on_listening(self, worker: str, listening: Listening) -> None:
        table, found = self._table, self._table.workers[worker]
        if not found.advance(WorkerState.LISTENING):
            return
        if (reason := self._loaded_files.difference(found.process.name, listening.files)) is not None:
            self._root_cause.end_worker(FailureKind.BAD_INPUT, found, reason)
            return
        self._addresses[worker] = listening.addresses
        if worker != MONITOR:
            table.announce(events.WorkerListening(worker, listening.resident_bytes, listening.imported_bytes))
        if worker in self._standbys.names:
            self._on_up(found.process)
            self._restarts.on_standby_ready()
            return
        if table.phase == RunPhase.LOADING and worker != MONITOR:
            workers = [each for each in table.workers.values() if each.name != MONITOR]
            if all(each.state is WorkerState.LISTENING and each.process.phase == ProcessPhase.STARTING for each in workers):
                table.phase = RunPhase.CONNECTING
                self._send_peers(workers)
        elif found.process.phase == ProcessPhase.STARTING and all(each.state is WorkerState.LISTENING for each in found.process.workers):
            for each in found.process.workers:
                joined = PeerJoined(each.name, each.incarnation, self._addresses[each.name])
                table.notify(each, table.neighbours.get(each.name, ()), joined)
            self._send_peers(found.process.workers)

    def on_connected(self, worker: str) -> None:
        table, found, process = self._table, self._table.workers[worker], self._table.workers[worker].process
        if not found.advance(WorkerState.CONNECTED):
            return
        if worker == MONITOR:
            self._introduce_to_monitor()
        else:
            table.announce(events.WorkerConnected(worker))
        if process.phase != ProcessPhase.STARTING or not all(each.state is WorkerState.CONNECTED for each in process.workers):
            return
        for each in process.workers:
            if each.name != MONITOR:
                table.notify(each, (MONITOR,), self._joined(each))
        self._on_up(process)
        is_up = all(each.phase == ProcessPhase.UP or not table.awaits_start(each) for each in table.processes.values())
        if table.phase == RunPhase.CONNECTING and is_up and not self._root_cause.has_reports:  # a failed start must not become ready
            table.phase = RunPhase.RUNNING
            table.announce(events.Ready(table.now - self._began))
            self.fork_server.introduce()
        if table.phase == RunPhase.RUNNING:
            self._restarts.start_standbys()

    def on_control(self, worker: str, control: Listening | ComputesAlone | LinkLost | Failed) -> None:
        match control:
            case Listening():
                self.on_listening(worker, control)
            case ComputesAlone():
                self._table.workers[worker].computes_alone = control
            case LinkLost():
                self.on_link_lost(worker, control)
            case Failed():
                self.on_failed(worker, control)

    def on_connection_closed(self, worker: str) -> None:
        table, found, process = self._table, self._table.workers[worker], self._table.workers[worker].process
        found.is_open = False
        if found.state is not WorkerState.STOPPING:
            table.note_dying(process, "it has closed its control connection")
            if process.phase in (ProcessPhase.DYING, ProcessPhase.ENDED):
                self._await_reap(process.name)
        if not process.is_open:
            if process.phase == ProcessPhase.REAPED:
                self._restarts.on_dead(process)
            elif process.phase == ProcessPhase.ENDED:
                self._fence_explained(process)
        self._stop.await_no_longer(worker)

    def on_dying(self, process: str, how: str) -> None:
        """The kernel reports that the process has begun to die. The end of its control connections and the reap follow. `how`: as in
        `on_exited`; "" where it is not known yet."""
        found = self._table.processes[process]
        found.how = found.how or how
        self._table.note_dying(found, "its process has ended")
        if found.phase == ProcessPhase.DYING:
            found.phase = ProcessPhase.ENDED
            if not found.is_open:
                self._fence_explained(found)
            if not found.has_stop and not found.can_restart:
                self._await_reap(process)
        self._stop.end_if_done()

    def on_exited(self, process: str, how: str) -> None:
        """The process has ended and was reaped. `how` continues a sentence: "was killed by SIGKILL"."""
        table, found = self._table, self._table.processes[process]
        table.note_dying(found, "its process has ended")
        found.phase, found.how = ProcessPhase.REAPED, found.how or how
        table.cancel_timers(found)
        if not found.is_open:
            self._restarts.on_dead(found)
        self._stop.end_if_done()

    def on_failed(self, worker: str, failed: Failed) -> None:
        kind = FailureKind.BAD_INPUT if failed.user else FailureKind.SECONDARY
        self._root_cause.on_failure(kind, self._table.workers[worker], failed.error)

    def on_bad_message(self, worker: str, reason: str) -> None:
        """The worker sent a message that cannot be decoded; its connection is closed."""
        self._root_cause.on_failure(FailureKind.DIED, self._table.workers[worker], reason)

    def on_overflow(self, worker: str, incarnation: str) -> None:
        """Messages for the incarnation fill the queue of its control connection. No message may be lost, so it is ended."""
        if self.is_current(worker, incarnation):
            reason = "does not read its control connection: is it stopped, or the machine overloaded?"
            self._root_cause.end_worker(FailureKind.DIED, self._table.workers[worker], reason)

    def on_link_lost(self, worker: str, lost: LinkLost) -> None:
        self._link_loss.on_link_lost(worker, lost)

    def on_detector_report(self, report: DetectorReport) -> None:
        """The monitor reports the new state of an incarnation. A dead one is killed if the run can lose it; otherwise the gateway fences it
        until it is cleared."""
        if report.process == FORK_SERVER:
            self.fork_server.on_marked_dead(report)
        worker, found = report.process, self._table.workers.get(report.process)
        if found is None or found.incarnation != report.incarnation or found.has_ended:
            return
        match report.state:
            case ProcessState.SUSPECT:
                self._table.announce(events.WorkerSuspected(worker, report.why))
            case ProcessState.ALIVE:
                self._fenced.discard(worker)
                self._table.announce(events.WorkerCleared(worker, report.why))
            case ProcessState.DEAD:
                is_killed = self._table.can_fence(found.process)
                found.process.has_failed |= not report.is_stopped
                if not is_killed:
                    self._fenced.add(worker)
                self._table.announce(events.WorkerMarkedDead(worker, report.why, is_killed, not report.is_stopped))
                self._table.fence(worker, f"was marked dead ({report.why})")

    def on_stop_sent(self, worker: str) -> None:
        self._stop.on_sent(worker)

    # Inside.

    def _fence_explained(self, process: ProcessRecord) -> None:
        """Fence a process that has ended, and whose last messages were read, before the reap, if its exit status is known."""
        if process.how and self._table.can_lose(process):
            self._restarts.fence(process.name)

    def _on_up(self, process: ProcessRecord) -> None:
        """The process is at work, or as a standby process ready to be."""
        table = self._table
        process.phase = ProcessPhase.UP
        if process.died_seconds is not None:
            process.num_restarts += 1
            for each in process.workers:
                table.announce(events.WorkerRestarted(each.name, each.pid, table.now - process.died_seconds))
        process.died_seconds, process.is_restarting = None, False

    def _awaited_workers(self) -> list[WorkerRecord]:
        """Workers whose next message of the startup handshake is due."""
        awaited = WorkerState.LOADING, WorkerState.LINKING
        return [each for each in self._table.workers.values() if each.process.phase == ProcessPhase.STARTING and each.state in awaited]

    def _await_reap(self, name: str) -> None:
        """Limit the time until a dying process has ended."""
        if self._table.can_replace(self._table.processes[name]):
            self._table.set_timer(TimerKind.KILL, LAST_MESSAGES_SECONDS, name)
        else:
            self._table.set_timer(TimerKind.NO_STATUS, STATUS_SECONDS, name)

    def _send_peers(self, workers: Collection[WorkerRecord]) -> None:
        """Send these workers the peers that they can link with now. One that starts or has died is left out: its PeerJoined follows."""
        for worker in workers:
            worker.advance(WorkerState.LINKING)
            worker.last_message_seconds = self._table.now
        up = [each for each in self._table.workers.values() if WorkerState.LINKING <= each.state <= WorkerState.STOPPING]
        incarnations = {each.name: each.incarnation for each in up if each.name != MONITOR}
        addresses = {name: self._addresses[name] for name in incarnations}
        restarting = tuple(sorted(set(self._table.restarting_on_purpose()) - incarnations.keys()))
        for worker in workers:
            self._table.act(Send(worker.name, Peers(addresses, incarnations, restarting)))

    # The monitor.

    def _introduce_to_monitor(self) -> None:
        """Notify a new monitor of all connected processes. It marks dead ones again, so the fenced workers are cleared."""
        for name in sorted(self._fenced):
            self._table.announce(events.WorkerCleared(name, "the monitor was started again"))
        self._fenced.clear()
        for worker in self._table.workers.values():
            if worker.name != MONITOR and not worker.has_ended and not worker.process.is_task:
                self._table.notify_monitor(self._joined(worker))
        self.fork_server.introduce()

    def _joined(self, worker: WorkerRecord) -> PeerJoined:
        """For the monitor. A standby process counts as one that starts: it sends no heartbeats."""
        return PeerJoined(worker.name, worker.incarnation, {}, worker.pid, not worker.is_usable)

    def _set_poll(self) -> None:
        self._polled = self._table.now
        self._table.set_timer(TimerKind.POLL, POLL_SECONDS)

    def _poll_monitor(self, subject: str) -> None:
        """Request a response of the monitor, which no other process watches; fence it when it has sent nothing for MONITOR_SECONDS.

        Silence counts only while the launcher itself runs: between two polls it grows by at most 1.5 POLL_SECONDS. A launcher that was
        stopped or got no processor time has read no responses either; it finds them when it runs again.
        """
        monitor = self._table.workers[MONITOR]
        if monitor.is_open:  # also while it starts: nothing else notices there that it was stopped
            monitor.silent_seconds += min(self._table.now - self._polled, 1.5 * POLL_SECONDS)
            if monitor.silent_seconds >= MONITOR_SECONDS:
                self._table.fence(MONITOR, f"sent nothing for {MONITOR_SECONDS:g} s")
            elif monitor.is_usable:
                self._table.act(Send(MONITOR, StatisticsRequest()))
        self._set_poll()
