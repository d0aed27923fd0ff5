"""Ends a run in order: Stop to every worker, then SIGTERM and SIGKILL for processes that do not end. Pure."""

from __future__ import annotations

from flowrt.actors.control import Stop
from flowrt.launcher import events
from flowrt.launcher.actions import End, EndProcess, Send
from flowrt.launcher.root_cause import RootCause
from flowrt.launcher.run_table import ProcessPhase, ProcessRecord, RunPhase, RunTable, TimerKind, WorkerState

TERM_SECONDS = 0.5  # from SIGTERM to SIGKILL, and from SIGKILL to the end of the run


class OrderedStop:
    """stop_seconds: from Stop to the end of the processes."""

    def __init__(self, table: RunTable, root_cause: RootCause, stop_seconds: float) -> None:
        self._table, self._root_cause, self._stop_seconds = table, root_cause, stop_seconds
        self.has_begun = False
        self._awaited: set[str] = set()  # workers to which Stop is being sent

    @property
    def is_sent(self) -> bool:
        """Whether every worker has received Stop, or has ended."""
        return self.has_begun and not self._awaited

    def begin(self) -> None:
        """End the run in order; before it is ready, at once. If a worker that the run needs has ended already, its death ends the run
        instead."""
        table, processes = self._table, self._table.processes.values()
        if table.phase >= RunPhase.STOPPING:
            return
        if table.phase < RunPhase.RUNNING:
            table.act(End())
            return
        table.phase = RunPhase.STOPPING
        for process in processes:
            if process.phase == ProcessPhase.STARTING:
                table.kill(process, "the run is being stopped")
            elif process.phase == ProcessPhase.DEAD:
                table.cancel_timers(process)
        if self._root_cause.has_reports or any(not process.can_restart and process.phase != ProcessPhase.UP for process in processes):
            return
        self.has_begun = True
        stopped = [name for name, worker in table.workers.items() if worker.process.phase == ProcessPhase.UP]
        self._awaited.update(stopped)
        for name in stopped:
            table.act(Send(name, Stop(), table.now + self._stop_seconds))
        table.set_timer(TimerKind.STOP, self._stop_seconds)
        self.end_if_done()

    def on_sent(self, worker: str) -> None:
        self._table.workers[worker].advance(WorkerState.STOPPING)
        self.await_no_longer(worker)

    def await_no_longer(self, worker: str) -> None:
        self._awaited.discard(worker)
        self.end_if_done()

    def end_if_done(self) -> None:
        """End the run when all processes have ended in order."""
        processes = self._table.processes.values()
        if not self.is_sent or self._root_cause.has_reports:
            return
        if all(process.phase >= ProcessPhase.ENDED and not process.is_open for process in processes):
            self._table.act(End())

    def on_deadline(self, subject: str) -> None:
        for process in self._late():
            for worker in process.workers:
                if worker.state is WorkerState.STOPPING:
                    self._table.announce(events.Straggler(worker.name, self._stop_seconds))
            self._table.act(EndProcess(process.name, end_gently=True))
        self._table.set_timer(TimerKind.KILL_LATE, TERM_SECONDS)

    def kill_late(self, subject: str) -> None:
        for process in self._late():
            self._table.act(EndProcess(process.name))
        self._table.set_timer(TimerKind.END, TERM_SECONDS)

    def _late(self) -> list[ProcessRecord]:
        processes = self._table.processes.values()
        return [process for process in processes if ProcessPhase.STARTING <= process.phase < ProcessPhase.ENDED]
