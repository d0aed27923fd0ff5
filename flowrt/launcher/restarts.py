"""Decides what follows a death: a restart within the restart budget, a process that stays down, or the end of the run. Pure."""

from __future__ import annotations

from flowrt.actors.control import ComputesAlone, DeathCause
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, MONITOR
from flowrt.graph.settings import ReliabilitySettings
from flowrt.launcher import events, run_table
from flowrt.launcher.actions import End, StartProcess
from flowrt.launcher.fork_server_loss import ForkServerLoss
from flowrt.launcher.root_cause import FailureKind, RootCause
from flowrt.launcher.run_table import ProcessPhase, ProcessRecord, RunPhase, RunTable, TimerKind
from flowrt.launcher.standby import Standbys
from flowrt.reliability.restart_policy import Restart, RestartPolicy


class Restarts:
    def __init__(
        self, table: RunTable, root_cause: RootCause, fork_server: ForkServerLoss, standbys: Standbys, settings: ReliabilitySettings
    ) -> None:
        self._table, self._root_cause, self._fork_server, self._standbys = table, root_cause, fork_server, standbys
        window_seconds = settings.restart_window_seconds
        self._budget = RestartPolicy(settings.restarts, window_seconds)
        self._monitor_budget = RestartPolicy(max(1, settings.restarts), window_seconds)  # without it no process that hangs is ever found

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
        table.wake_waiting()

    def fence(self, name: str) -> None:
        """Announce the loss of a process that has died or is dying, and accept no more of its messages.

        Its control connection was read to its end, unless that takes longer than FENCE_SECONDS.
        """
        process = self._table.processes[name]
        if process.is_fenced or self._table.phase >= RunPhase.STOPPING or self._root_cause.has_reports:
            return
        process.is_fenced = True
        how = "; ".join(each for each in (process.cause, process.how) if each) or "has ended"
        dying = (process, *self._table.restarted_with(process)) if process.is_restarting else ()
        ends_groups = any(name in self._table.emits.values() for each in dying for name in each.names)
        # A crash ends all workers of the process, whichever of them computed the part.
        alone = next((each.computes_alone for each in process.workers if each.computes_alone.tag is not None), ComputesAlone())
        for worker in process.workers:
            while_loading = self._table.phase == RunPhase.LOADING
            part = worker.computes_alone.tag
            is_colocated = worker.name in self._table.colocated
            lost = (process.may_recur, process.is_restarting, self._table.process_of(part), part, is_colocated, ends_groups)
            self._table.announce(events.WorkerLost(worker.name, how, while_loading, *lost))
            cause = DeathCause(worker.name, worker.incarnation, how, process.may_recur, alone.tag, alone.part)
            self._table.notify(worker, self._table.neighbours.get(worker.name, ()), cause)

    def on_fork_failed(self, process: ProcessRecord, error: UserError | WorkerDiedError) -> None:
        """The system refused, or the fork server has ended. A restart is tried again, after a refusal within the restart budget."""
        process.phase, process.how = ProcessPhase.DEAD, str(error)
        is_lost = isinstance(error, WorkerDiedError) and error.process == FORK_SERVER
        if self._table.awaits_start(process) and (is_lost or self._table.phase == RunPhase.LOADING):
            if not self._root_cause.has_reports:  # otherwise the root cause is about to be chosen
                self._table.act(End(error))
        elif is_lost:
            self._fork_server.await_fork(process)
        elif self._table.phase < RunPhase.STOPPING:
            self._restart(process, refusal=f"it {error.reason}, and " if isinstance(error, WorkerDiedError) else f"{error}, and ")

    def on_not_reaped(self, name: str) -> None:
        """The process was killed and has not ended, perhaps because it waits for a disk. It stays down until it has."""
        why = f"has been ending for {run_table.REAP_SECONDS:g} s: is the machine overloaded?"
        process = self._table.processes[name]
        if self._table.awaits_start(process):
            self._table.act(End(WorkerDiedError(name, why), name))
        elif self._table.phase <= RunPhase.RUNNING:
            self._table.give_up(process, f"it {why}")

    def on_no_status(self, name: str) -> None:
        """The process closed its control connection and no notice of its death followed, or it has ended and was not reaped."""
        process = self._table.processes[name]
        if process.phase == ProcessPhase.DYING:
            process.how = "closed its control connection unexpectedly"
        elif process.phase == ProcessPhase.ENDED:
            process.how = process.how or "has ended, and its exit status is not known"
        self.on_dead(process)

    def fork_again(self, name: str) -> None:
        """Start a new incarnation, unless the process waits for others that are restarted with it, or for a fork server."""
        table, process = self._table, self._table.processes[name]
        table.waiting.discard(name)
        self._fork_server.waiting.pop(name, None)
        if self._must_wait(process):
            table.waiting.add(name)
        elif (standby := self._standbys.take(process)) or self._fork_server.can_fork(process):
            table.renew(process, process.names)
            for worker in process.workers:
                worker.was_standby = bool(standby)
            table.act(StartProcess(name, table.identities(process), standby))
            table.wake_waiting()

    def start_standbys(self) -> None:
        """Start the standby processes that are missing."""
        for name in self._standbys.names_to_start():
            self._table.add(name, [name], is_task=False).phase = ProcessPhase.DEAD
            self.fork_again(name)

    def on_standby_ready(self) -> None:
        """A process that waits for the fork server may become the one that is ready."""
        self.start_standbys()
        for name in self._fork_server.waiting:
            if self._standbys.ready_for(self._table.processes[name]) is not None:
                self.fork_again(name)
                return

    def _must_wait(self, process: ProcessRecord) -> bool:
        """Whether a process that is restarted with this one has not ended yet, or has a lower rank and has not been started."""
        rank_of = self._table.policy.rank_of
        return any(
            other.is_ending or (other.is_next and rank_of(other.names) < rank_of(process.names))
            for other in self._table.restarted_with(process)
        )

    def _restart(self, process: ProcessRecord, refusal: str = "") -> None:
        """Restart the process when its restart budget allows it. A death on purpose costs no budget. `refusal`: why it was not forked."""
        if process.is_killed_on_purpose:
            self.fork_again(process.name)
            return
        budget = self._monitor_budget if process.name == MONITOR else self._budget
        decision = budget.on_death(process.name, self._table.now)
        if isinstance(decision, Restart):
            self._table.set_timer(TimerKind.RESTART, decision.delay_seconds, process.name)
        elif self._table.awaits_start(process):
            doing = "loaded" if self._table.phase == RunPhase.LOADING else "connected"
            reason = f"{process.how} while it {doing}, and {decision.why}"
            self._table.act(End(WorkerDiedError(process.name, reason), process.name))
        elif decision.retry_seconds is None:
            self._table.give_up(process, refusal + decision.why)
        else:
            why = f"{refusal}{decision.why}; the next try is in {decision.retry_seconds:g} s"
            self._table.give_up(process, why, decision.retry_seconds)
            self._table.set_timer(TimerKind.RESTART, decision.retry_seconds, process.name)
