"""Decides what follows a death: a restart within the restart budget, a process that stays down, or the end of the run. Pure."""

from __future__ import annotations

import signal

from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, ReliabilitySettings
from flowrt.launcher import events, run_table
from flowrt.launcher.actions import End, StartProcess
from flowrt.launcher.root_cause import FailureKind, RootCause
from flowrt.launcher.run_table import ProcessPhase, ProcessRecord, RunPhase, RunTable, TimerKind
from flowrt.processes.output_tail import exit_text
from flowrt.reliability.restart_policy import Restart, RestartPolicy

# Signals that other programs send. The system sends SIGKILL when memory runs out, which a request can cause; users kill far more often.
FROM_OUTSIDE = tuple(exit_text(-number) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
_HINT = "is it stopped, or the machine overloaded?"


class Restarts:
    def __init__(self, table: RunTable, root_cause: RootCause, settings: ReliabilitySettings) -> None:
        self._table, self._root_cause = table, root_cause
        self._budget = RestartPolicy(settings.restarts, settings.restart_window_seconds)

    def on_dead(self, process: ProcessRecord) -> None:
        """How the process died is known, and its last messages have been read."""
        table = self._table
        process.phase = ProcessPhase.DEAD
        table.cancel_timers(process)
        if process.has_stop:
            return
        if not table.can_replace(process):
            if not any(map(self._root_cause.is_reported, (FORK_SERVER, *(worker.name for worker in process.workers)))):
                how = f"{process.how} unexpectedly" if process.how.startswith("exited") else process.how
                self._root_cause.report(FailureKind.DIED, process.name, process.name, how)  # any of its workers may be the cause
            return
        if table.phase >= RunPhase.STOPPING or self._root_cause.has_reports:
            return
        self.fence(process.name)
        if table.phase == RunPhase.LOADING:
            process.died_seconds = None
            process.num_restarts += 1
        self._restart(process)

    def fence(self, name: str) -> None:
        """Announce the loss of a process that has died or is dying, and accept no more of its messages.

        Its control connection was read to its end, unless that takes longer than FENCE_SECONDS.
        """
        process = self._table.processes[name]
        if process.is_fenced or self._table.phase >= RunPhase.STOPPING or self._root_cause.has_reports:
            return
        process.is_fenced = True
        if process.cause is None and process.how not in FROM_OUTSIDE:
            process.may_recur = process.how.startswith(("exited", "was killed"))
        how = "; ".join(each for each in (process.cause, process.how) if each) or "has ended"
        for worker in process.workers:
            self._table.announce(events.WorkerLost(worker.name, how, self._table.phase == RunPhase.LOADING, process.may_recur))

    def on_fork_failed(self, process: ProcessRecord, error: UserError | WorkerDiedError) -> None:
        """The system refused, or the fork server does not respond. A restart is tried again within the restart budget."""
        process.phase, process.how = ProcessPhase.DEAD, str(error)
        if self._table.phase == RunPhase.LOADING:
            if not self._root_cause.has_reports:  # otherwise the root cause is about to be chosen
                self._table.act(End(error))
        elif self._table.phase < RunPhase.STOPPING and not self._root_cause.is_reported(FORK_SERVER):
            if isinstance(error, WorkerDiedError) and error.process == FORK_SERVER:
                self._stay_down(process, f"the fork server {error.reason}")
            self._restart(process)

    def on_not_reaped(self, name: str) -> None:
        """Only the fork server can reap and fork, so the process stays down unless the fork server continues."""
        if self._table.phase < RunPhase.RUNNING:
            reason = f"has not reported the end of {name} for {run_table.FORK_SERVER_SECONDS:g} s: {_HINT}"
            self._table.act(End(WorkerDiedError(FORK_SERVER, reason), FORK_SERVER))
        elif self._table.phase == RunPhase.RUNNING:
            why = f"it died {run_table.FORK_SERVER_SECONDS:g} s ago, and the fork server has not reported it: {_HINT}"
            self._stay_down(self._table.processes[name], why)

    def on_no_status(self, name: str) -> None:
        """The last messages, or the exit status, of a process have not come."""
        process = self._table.processes[name]
        if process.phase == ProcessPhase.DYING:
            process.how = "closed its control connection unexpectedly"
        elif process.phase == ProcessPhase.ENDED:
            process.how = f"has ended, and the fork server has not reported how: {_HINT}"
        self.on_dead(process)

    def fork_again(self, name: str) -> None:
        process = self._table.processes[name]
        self._table.renew(process, [worker.name for worker in process.workers])
        self._table.act(StartProcess(name, self._table.identities(process)))

    def _restart(self, process: ProcessRecord) -> None:
        """Restart the process when its restart budget allows it."""
        decision = self._budget.on_death(process.name, self._table.now)
        if isinstance(decision, Restart):
            self._table.set_timer(TimerKind.RESTART, decision.delay_seconds, process.name)
        elif self._table.phase < RunPhase.RUNNING:
            doing = "loaded" if self._table.phase == RunPhase.LOADING else "connected"
            reason = f"{process.how} while it {doing}, and {decision.why}"
            self._table.act(End(WorkerDiedError(process.name, reason), process.name))
        elif decision.retry_seconds is None:
            self._stay_down(process, decision.why)
        else:
            self._stay_down(process, f"{decision.why}; the next try is in {decision.retry_seconds:g} s", decision.retry_seconds)
            self._table.set_timer(TimerKind.RESTART, decision.retry_seconds, process.name)

    def _stay_down(self, process: ProcessRecord, why: str, retry_seconds: float | None = None) -> None:
        process.is_given_up = True
        for worker in process.workers:
            self._table.announce(events.WorkerGivenUp(worker.name, why, retry_seconds))
