"""The state of one run: which processes live, what follows from a death, how the run starts and how it ends. Pure.

Events in, actions out. Each `on_...` method, `start` and `stop` are events, also those of `deaths` (deaths.py) and `starts` (starts.py).
`handle` takes one with its time, and returns the actions that follow (actions.py). `deadline` is the time of the next timer, and `on_time`
the event at that time. The launcher (launcher.py) turns messages, notices and timers into events and carries out the actions.

The run goes through LOADING (until all workers listen), CONNECTING (until all are connected), RUNNING, STOPPING and ENDED. A worker that
reports a failure while the run loads ends the run, since it would fail again; a process that dies without a report is loaded again.
run_table.py has the phases of a process. A process that the run can lose is restarted within its restart budget; without one it stays
down. The death of any other process ends the run. No action follows the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flowrt.actors.control import DetectorReport, Listening, PeerJoined, Peers, StatisticsRequest, Stop
from flowrt.graph.model import FORK_SERVER, MONITOR, Graph
from flowrt.graph.recovery import is_watched
from flowrt.launcher import events
from flowrt.launcher.actions import Action, End, EndProcess, Send, SendStart
from flowrt.launcher.deaths import Deaths, FailureKind
from flowrt.launcher.graph_change import GraphChange
from flowrt.launcher.run_table import ProcessPhase, ProcessRecord, RunPhase, RunTable, WorkerRecord, WorkerState
from flowrt.launcher.starts import Starts
from flowrt.reliability.detector import ProcessState

POLL_SECONDS = 0.5  # between two requests to the monitor
MONITOR_SECONDS = 10.0  # time limit for the monitor's responses; generous, since a run loses little without its monitor
TERM_SECONDS = 0.5  # from SIGTERM to SIGKILL, and from SIGKILL to the end of the run


class RunState:
    """The run of `graph` with these OS processes (lists of workers by name), and `tasks`: workers that are tasks of the launcher's loop.

    response_seconds: the longest silence of a worker that starts. stop_seconds: from Stop to the end of the processes. standby_loads: see
    starts.py; without them there are no standby processes.
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
        standby_loads: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.response_seconds, self._stop_seconds = response_seconds, stop_seconds
        self.wants_monitor = is_watched(graph) and bool(processes)
        self.table = RunTable(graph, new_incarnation)
        self.starts = Starts(self.table, standby_loads)
        self.deaths = Deaths(self.table, self.starts)
        for name, workers in processes.items():
            self.table.add(name, workers)
        for name in tasks:
            self.table.add(name, [name], is_task=True)
        self.change = GraphChange(self.table, self.starts, self.deaths, stop_seconds)
        self._began = self._polled = 0.0
        self._loaded_files = LoadedFiles(self.table)
        self._stops_in_order = False

    # What the launcher reads.

    @property
    def deadline(self) -> float | None:
        """When `on_time` is due; None without a timer."""
        if self.table.phase == RunPhase.ENDED:
            return None
        due = [worker.last_message_seconds + self.response_seconds for worker in self._awaited_workers()]
        return min(due if self.table.deadline is None else [self.table.deadline, *due], default=None)

    @property
    def incarnations(self) -> dict[str, str]:
        """The current incarnation of each worker."""
        return {name: worker.incarnation for name, worker in self.table.workers.items()}

    def is_current(self, worker: str, incarnation: str) -> bool:
        found = self.table.workers.get(worker)  # None: a standby process that was taken
        return found is not None and found.incarnation == incarnation

    def accepts_messages(self, worker: str, incarnation: str) -> bool:
        """Whether messages of this incarnation have an effect: it is the current one, and was not fenced."""
        return self.is_current(worker, incarnation) and not self.table.workers[worker].process.is_fenced

    def is_usable(self, worker: str) -> bool:
        """Whether the current incarnation is connected, and no sign of its end has come."""
        return worker in self.table.workers and self.table.workers[worker].is_usable

    def counts_messages(self, worker: str) -> bool:
        """Whether the run state needs `on_message` for each message of this worker: it starts, or is the monitor."""
        return worker == MONITOR or self.table.workers[worker].process.phase == ProcessPhase.STARTING

    def has_ended(self, worker: str) -> bool:
        """Whether the current incarnation has ended or is about to: it was fenced, closed its connection, was sent Stop, or has left."""
        return worker not in self.table.workers or self.table.workers[worker].has_ended

    def can_lose(self, worker: str) -> bool:
        """Whether the run goes on when the worker's process dies now. Also for one that has left."""
        return worker not in self.table.workers or self.table.can_lose(self.table.workers[worker].process)

    def restarting(self) -> list[str]:
        """Processes that have died, or are being started, and are not given up, and those that are about to end."""
        processes = self.table.processes.items()
        return [name for name, each in processes if each.is_leaving or (each.phase != ProcessPhase.UP and not each.is_given_up)]

    def num_restarts(self, worker: str) -> int:
        return self.table.workers[worker].process.num_restarts if worker in self.table.workers else 0

    # Events. None of these methods waits.

    def handle(self, now: float, event: Callable[..., None], *arguments: Any) -> list[Action]:
        """Pass on one event, with its time. Returns the actions that follow."""
        self.table.now = now
        event(*arguments)
        self.change.advance()
        self.deaths.end_marked_dead()
        self._end_if_stopped()
        actions, self.table.actions = self.table.actions, []
        return actions

    def start(self, began: float) -> None:
        """Start all processes. `began`: when the launch began, before the process backend was opened."""
        self._began = began
        if self.wants_monitor:
            self.table.add(MONITOR, [MONITOR])
            self._set_poll()
        for process in self.table.processes.values():
            self.table.start(process)

    def on_time(self) -> None:
        """Run the timers that are due, at least the next one: a clock may round the time of its call down."""
        table = self.table
        now = table.now = max(table.now, self.deadline or table.now)
        table.run_timers()
        silent = [worker for worker in self._awaited_workers() if worker.last_message_seconds + self.response_seconds <= now]
        for worker in sorted(silent, key=lambda each: each.marked_dead is None)[:1]:
            worker.last_message_seconds = now
            for other in (each for each in self._awaited_workers() if each.state is WorkerState.LINKING):
                other.last_message_seconds = now  # it may have waited for this one, and learns of its end later
            doing = "connecting" if worker.state is WorkerState.LINKING else "loading"
            reason = f"sent nothing for {self.response_seconds:g} s while {doing}"
            others = [each.name for each in silent if each is not worker and each.state is worker.state is WorkerState.LINKING]
            if others and worker.marked_dead is None:
                reason += f", nor did {', '.join(others[:3])}{' and others' if len(others) > 3 else ''}: one of them may hold up the rest"
            if not table.awaits_start(worker.process):
                self.deaths.kill_to_restart(worker.process, reason)
            elif not self.deaths.has_reports:
                self.deaths.report(FailureKind.DIED, worker.name, worker.process.name, reason)

    # The start of a process.

    def on_forked(self, process: str, pid: int) -> None:
        table, found = self.table, self.table.processes[process]
        found.phase, found.refused_seconds = ProcessPhase.STARTING, None
        for worker in found.workers:
            worker.advance(WorkerState.LOADING)
            worker.pid, worker.is_open, worker.last_message_seconds = pid, True, table.now
            if worker.name != MONITOR:
                table.announce(events.WorkerStarted(worker.name, pid))
                if not found.is_task:
                    table.notify_monitor(self._joined(worker))
            table.act(SendStart(worker.name, worker.incarnation, self.starts.loads_of(worker.name), worker.loaded_as))
        if table.phase >= RunPhase.STOPPING:  # it holds no work yet
            self.deaths.kill(found, "the run is being stopped")
        elif found.is_leaving:
            self.deaths.kill_leaving(found)

    def on_message(self, worker: str) -> None:
        """A message of a worker for which `counts_messages` is true."""
        found = self.table.workers[worker]
        found.last_message_seconds, found.silent_seconds = self.table.now, 0.0

    def on_listening(self, worker: str, listening: Listening) -> None:
        table, found = self.table, self.table.workers[worker]
        if not found.advance(WorkerState.LISTENING):
            if found.state in (WorkerState.LINKING, WorkerState.CONNECTED):  # a changed graph needs more links
                found.addresses = listening.addresses
                table.notify(found, PeerJoined(worker, found.incarnation, found.addresses))
            return
        if (reason := self._loaded_files.difference(found.process.name, listening.files)) is not None:
            self.deaths.end_worker(FailureKind.BAD_INPUT, found, reason)
            return
        found.addresses = listening.addresses
        if worker != MONITOR:
            table.announce(events.WorkerListening(worker, listening.resident_bytes, listening.imported_bytes))
        if worker in self.starts.standby_names:
            self._on_up(found.process)
            self.starts.start_standbys()
            return
        if table.phase == RunPhase.LOADING and worker != MONITOR:
            workers = [each for each in table.workers.values() if each.name != MONITOR]
            if all(each.state is WorkerState.LISTENING and each.process.phase == ProcessPhase.STARTING for each in workers):
                table.phase = RunPhase.CONNECTING
                self._send_peers(workers)
        elif found.process.phase == ProcessPhase.STARTING and all(each.state is WorkerState.LISTENING for each in found.process.workers):
            for each in found.process.workers:
                table.notify(each, PeerJoined(each.name, each.incarnation, each.addresses))
            self._send_peers(found.process.workers)

    def on_connected(self, worker: str) -> None:
        table, found, process = self.table, self.table.workers[worker], self.table.workers[worker].process
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
                table.notify_monitor(self._joined(each))
        self._on_up(process)
        is_up = all(each.phase == ProcessPhase.UP or not table.awaits_start(each) for each in table.processes.values())
        if table.phase == RunPhase.CONNECTING and is_up and not self.deaths.has_reports:  # a failed start must not become ready
            table.phase = RunPhase.RUNNING
            table.announce(events.Ready(table.now - self._began))
            self.starts.introduce_fork_server()
        if table.phase == RunPhase.RUNNING:
            self.starts.start_standbys()

    def _on_up(self, process: ProcessRecord) -> None:
        """The process is at work, or as a standby process ready to be."""
        process.phase = ProcessPhase.UP
        if process.is_joining:
            process.is_joining = False
            for each in process.workers:
                self.table.announce(events.WorkerJoined(each.name, each.pid))
        if process.down_seconds is not None:
            process.num_restarts += 1
            for each in process.workers:
                self.table.announce(events.WorkerRestarted(each.name, each.pid, self.table.now - process.down_seconds))
        process.died_seconds = process.down_seconds = None
        process.is_restarting = False

    def _awaited_workers(self) -> list[WorkerRecord]:
        """Workers whose next message of the startup handshake is due."""
        awaited = WorkerState.LOADING, WorkerState.LINKING
        return [each for each in self.table.workers.values() if each.process.phase == ProcessPhase.STARTING and each.state in awaited]

    def _send_peers(self, workers: Iterable[WorkerRecord]) -> None:
        """Send these workers the peers that they can link with now. One that starts or has died is left out: its PeerJoined follows."""
        for worker in workers:
            worker.advance(WorkerState.LINKING)
            worker.last_message_seconds = self.table.now
        others = [each for each in self.table.workers.values() if each.name != MONITOR]
        up = [each for each in others if WorkerState.LINKING <= each.state <= WorkerState.STOPPING]
        addresses, incarnations = {each.name: each.addresses for each in up}, {each.name: each.incarnation for each in up}
        restarting = tuple(sorted(each.name for each in others if each.process.is_restarting and each.name not in addresses))
        for worker in workers:
            self.table.act(Send(worker.name, Peers(addresses, incarnations, restarting)))

    # The monitor.

    def on_detector_report(self, report: DetectorReport) -> None:
        """The monitor reports the new state of an incarnation. A dead one is killed once the run can lose it; until then the gateway
        fences it, unless it is cleared."""
        if report.process == FORK_SERVER:
            self.starts.on_fork_server_marked_dead(report)
        name, worker = report.process, self.table.workers.get(report.process)
        if worker is None or worker.incarnation != report.incarnation or worker.has_ended:
            return
        match report.state:
            case ProcessState.SUSPECT:
                self.table.announce(events.WorkerSuspected(name, report.why))
            case ProcessState.ALIVE:
                worker.marked_dead = None
                self.table.announce(events.WorkerCleared(name, report.why))
            case ProcessState.DEAD:
                is_killed = self.table.can_kill(worker.process)
                worker.marked_dead = report
                self.table.announce(events.WorkerMarkedDead(name, report.why, is_killed, not report.is_stopped))

    def _introduce_to_monitor(self) -> None:
        """Notify a new monitor of all connected processes. It marks dead ones again, so the fenced workers are cleared."""
        workers = [worker for worker in self.table.workers.values() if worker.name != MONITOR]
        for worker in sorted((each for each in workers if each.marked_dead is not None), key=lambda each: each.name):
            worker.marked_dead = None
            self.table.announce(events.WorkerCleared(worker.name, "the monitor was started again"))
        for worker in workers:
            if not worker.has_ended and not worker.process.is_task:
                self.table.notify_monitor(self._joined(worker))
        self.starts.introduce_fork_server()

    def _joined(self, worker: WorkerRecord) -> PeerJoined:
        """For the monitor. A standby process counts as one that starts: it sends no heartbeats."""
        return PeerJoined(worker.name, worker.incarnation, {}, worker.pid, not worker.is_usable)

    def _set_poll(self) -> None:
        self._polled = self.table.now
        self.table.set_timer(POLL_SECONDS, self.poll_monitor)

    def poll_monitor(self) -> None:
        """Request a response of the monitor, which no other process watches; kill it when it has sent nothing for MONITOR_SECONDS.

        Silence counts only while the launcher itself runs: between two polls it grows by at most 1.5 POLL_SECONDS. A launcher that was
        stopped or got no processor time has read no responses either; it finds them when it runs again.
        """
        monitor = self.table.workers[MONITOR]
        if monitor.is_open:  # also while it starts: nothing else notices there that it was stopped
            monitor.silent_seconds += min(self.table.now - self._polled, 1.5 * POLL_SECONDS)
            if monitor.silent_seconds >= MONITOR_SECONDS:
                self.deaths.kill_to_restart(monitor.process, f"sent nothing for {MONITOR_SECONDS:g} s")
            elif monitor.is_usable:
                self.table.act(Send(MONITOR, StatisticsRequest()))
        self._set_poll()

    # The end in order: Stop to every worker, then SIGTERM and SIGKILL for processes that do not end.

    def stop(self) -> None:
        """End the run in order; before it is ready, at once. If a process that the run needs has ended already, its death ends the run
        instead."""
        table, processes = self.table, self.table.processes.values()
        if table.phase >= RunPhase.STOPPING:
            return
        if table.phase < RunPhase.RUNNING:
            table.act(End())
            return
        table.phase = RunPhase.STOPPING
        for process in processes:
            if process.phase == ProcessPhase.STARTING:
                self.deaths.kill(process, "the run is being stopped")
            elif process.phase == ProcessPhase.DEAD:
                table.cancel_timers(process.name)
        if self.deaths.has_reports or any(not process.can_restart and process.phase != ProcessPhase.UP for process in processes):
            return
        self._stops_in_order = True
        for worker in table.workers.values():
            if worker.process.phase == ProcessPhase.UP:
                table.act(Send(worker.name, Stop(), table.now + self._stop_seconds))
        table.set_timer(self._stop_seconds, self.end_late)

    def on_stop_sent(self, worker: str) -> None:
        if worker in self.table.workers:
            self.table.workers[worker].advance(WorkerState.STOPPING)

    def end_late(self, signal: str = "SIGTERM") -> None:
        """End the processes that Stop has not ended, by this signal and then by SIGKILL. At last, "", end the run, whatever is left."""
        if not signal:
            self.table.act(End())
            return
        is_gentle = signal == "SIGTERM"
        for process in self.table.processes.values():
            if ProcessPhase.STARTING <= process.phase < ProcessPhase.ENDED:
                for worker in process.workers:
                    if is_gentle and worker.state is WorkerState.STOPPING:
                        self.table.announce(events.Straggler(worker.name, self._stop_seconds))
                self.table.act(EndProcess(process.name, is_gentle))
        self.table.set_timer(TERM_SECONDS, self.end_late, "SIGKILL" if is_gentle else "")

    def _end_if_stopped(self) -> None:
        """End the run when all processes have ended in order."""
        if not self._stops_in_order or self.table.phase == RunPhase.ENDED or self.deaths.has_reports:
            return
        if all(process.phase >= ProcessPhase.ENDED and not process.is_open for process in self.table.processes.values()):
            self.table.act(End())


class LoadedFiles:
    """The files of the model that the first workers have loaded, with which those of later ones are compared.

    Fingerprints are those of flowrt/workers/model_files.py: a digest, "@" and a time. The times are compared on one host, the digests
    between hosts.
    """

    def __init__(self, table: RunTable) -> None:
        self._table = table
        self._fingerprints: dict[tuple[str, str], str] = {}  # by host and path
        self._digests: dict[str, str] = {}  # by name

    def difference(self, process: str, files: Mapping[str, str]) -> str | None:
        """Why the files that the process has loaded are not those of the run. None: they are, and count as loaded from now on."""
        host = self._table.graph.host_of(process)
        for path, fingerprint in files.items():
            if self._fingerprints.setdefault((host, path), fingerprint) != fingerprint:
                return f"{path} has changed since the run began; restore the file, or start the run again"
            name, digest = path.rpartition("/")[2], fingerprint.partition("@")[0]
            if self._digests.setdefault(name, digest) != digest:
                return f"{path} of {host} is not the {name} of the other hosts; copy the same model to each, or remove it on {host}"
        return None
