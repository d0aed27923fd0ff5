"""Changes the graph of a run while requests run: processes join, then others leave. Pure; one change at a time.

1. JOINING: each worker gets the version with all processes of both graphs, and the new ones start, as restarted ones do. For its
   neighbours, a process that has not joined yet is one that is down.
2. LEAVING: each worker gets the version that says who leaves. No new request and no new part goes there, requests of groups that leave move
   to others, and workers confirm when nothing of theirs is left there. A process that does not run any more is not restarted.
3. ENDING: each worker gets the version without these processes, which get Stop.

If a new process is given up, the change is undone: the new processes leave again. A worker that starts meanwhile gets the latest version in
its Start.
"""

from __future__ import annotations

from enum import IntEnum

from flowrt.actors.control import ChangeGraph, PeerLeft, Stop
from flowrt.errors import WorkerDiedError
from flowrt.graph import delta
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.launcher.actions import ReleaseProcess, Send
from flowrt.launcher.deaths import Deaths
from flowrt.launcher.run_table import ProcessPhase, ProcessRecord, RunPhase, RunTable, WorkerState
from flowrt.launcher.starts import Starts

DRAIN = "drain"  # the subject of its timer
DRAIN_SECONDS = 20.0  # the longest wait for the confirmations of workers: a process that leaves ends then, and what it has is redone


class Stage(IntEnum):
    NONE = 0
    JOINING = 1
    LEAVING = 2
    ENDING = 3


class GraphChange:
    """`stop_seconds`: from Stop to the end of a process."""

    def __init__(self, table: RunTable, starts: Starts, deaths: Deaths, stop_seconds: float) -> None:
        self._table, self._starts, self._deaths, self._stop_seconds = table, starts, deaths, stop_seconds
        self.stage = Stage.NONE
        self._before = self._target = table.graph
        self._joining: tuple[str, ...] = ()
        self._leaving: tuple[str, ...] = ()
        self._unconfirmed: dict[str, str] = {}  # incarnations of workers that use the latest version, and have not confirmed it yet
        self._error: Exception | None = None

    # Events.

    def begin(self, target: Graph) -> None:
        """Make `target`, which was checked, the graph of the run. No change is in progress."""
        table = self._table
        self._before, self._target, self._error = table.graph, target, None
        before, after = table.graph.process_names(), target.process_names()
        self._joining = tuple(name for name in after if name not in before)
        self._leaving = tuple(name for name in before if name not in after)
        self.stage = Stage.JOINING
        if self._joining:
            self._publish(delta.joined(table.graph, target), self._joining)
        for name in self._joining:
            process = table.add(name, [name])
            process.phase, process.is_joining = ProcessPhase.DEAD, True
            self._starts.start_next(name)

    def on_changed(self, worker: str, version: int) -> None:
        """A worker confirms a version."""
        if version == self._table.graph.version:
            self._unconfirmed.pop(worker, None)

    def end_drain(self, subject: str = "") -> None:
        """Wait no longer for confirmations."""
        self._unconfirmed.clear()

    def advance(self) -> None:
        """Take the next step if it is due: call it after each event."""
        if self.stage is Stage.NONE or self._table.phase >= RunPhase.STOPPING:
            return
        if self.stage is Stage.JOINING:
            joining = [self._table.processes[name] for name in self._joining]
            if given_up := [process for process in joining if process.is_given_up]:
                how = given_up[0].how or "could not be started"
                self._error = WorkerDiedError(given_up[0].name, f"{how} before it had joined, and was given up; the graph is as before")
                self._leaving, self._target = self._joining, self._before
            elif any(process.phase != ProcessPhase.UP for process in joining):
                return
            self._begin_leaving()
        if self.stage is Stage.LEAVING and not self._awaits_confirmations():
            self._begin_ending()
        if self.stage is Stage.ENDING:
            for process in self._records():
                if process.phase == ProcessPhase.DEAD:
                    self._table.remove(process)
                    self._table.act(ReleaseProcess(process.name))
            if not self._records():
                self.stage = Stage.NONE
                self._table.announce(events.ChangeEnded(self._error))

    # Inside.

    def _begin_leaving(self) -> None:
        self.stage = Stage.LEAVING
        if not self._leaving:
            return
        graph = self._table.graph
        for process in self._records():
            process.is_leaving, process.unit = True, ""
            if process.phase == ProcessPhase.STARTING:
                self._deaths.kill_leaving(process)
            elif process.phase == ProcessPhase.DEAD:
                self._table.cancel_timers(process.name)
                self._starts.waiting.pop(process.name, None)
        self._deaths.fence_held()
        self._starts.wake_waiting()
        self._publish(graph.replace(version=graph.version + 1, leaving=self._leaving))
        self._table.set_timer(DRAIN_SECONDS, self.end_drain, DRAIN)

    def _begin_ending(self) -> None:
        table = self._table
        self.stage = Stage.ENDING
        table.cancel_timers(DRAIN)
        for process in self._records():
            for worker in process.workers:
                if worker.advance(WorkerState.LEFT):
                    left = PeerLeft(worker.name, worker.incarnation, "it has left the graph")
                    table.notify(worker, left)
                    table.notify_monitor(left)
                if process.phase == ProcessPhase.UP:
                    table.act(Send(worker.name, Stop(), table.now + self._stop_seconds))
            process.has_left = True
            if process.phase == ProcessPhase.UP:
                table.set_timer(self._stop_seconds, self._deaths.end_late, process.name)
        if self._leaving or table.graph != self._target:
            self._publish(self._target.replace(version=table.graph.version + 1))

    def _publish(self, graph: Graph, joining: tuple[str, ...] = ()) -> None:
        """Make `graph` the graph of the run, and send the workers what has changed. One that has no Start yet gets it there."""
        table = self._table
        change = delta.delta_of(table.graph, graph)
        table.use(delta.apply(table.graph, change))
        control = ChangeGraph(delta.to_json(change))
        workers = [table.workers[name] for name in table.graph.process_names() if name in table.workers]
        open_workers = [worker for worker in workers if worker.is_open and worker.state >= WorkerState.LOADING]
        self._unconfirmed = {worker.name: worker.incarnation for worker in open_workers}
        for worker in open_workers:
            table.act(Send(worker.name, control))
        table.announce(events.GraphVersion(table.graph, joining))

    def _awaits_confirmations(self) -> bool:
        """A worker that has ended needs to confirm nothing: its next incarnation sends nothing to those that leave."""
        workers = self._table.workers
        living = (name for name, incarnation in self._unconfirmed.items() if workers[name].incarnation == incarnation)
        return any(workers[name].is_open for name in living)

    def _records(self) -> list[ProcessRecord]:
        """The processes that leave and are not gone."""
        return [self._table.processes[name] for name in self._leaving if name in self._table.processes]
