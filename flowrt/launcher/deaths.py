"""Decides what follows failures and deaths: a restart, a process that stays down, or the end of the run. Pure.

- A death that the run can lose: peers are notified at its first sign, its loss is announced when its last messages were read, and it is
  restarted within its restart budget, with its failure unit.
- A lost link that no death explains: the end that the run can lose is killed. A process that died reports nothing, so a loss that both ends
  have reported has no death behind it, and is decided at once.
- Any other failure is reported as a possible root cause of the run's end. The peers of a dead process often report lost links before the
  death itself is detected. All reports within SETTLE_SECONDS of the first are therefore collected, and the most fundamental one is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from flowrt.actors.control import DeathCause, Failed, LinkLost, PeerLeft
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, MONITOR
from flowrt.graph.recovery import keeps_less, pipelines, remote_servers
from flowrt.launcher import events
from flowrt.launcher.actions import End, EndProcess
from flowrt.launcher.run_table import ProcessPhase, ProcessRecord, RunPhase, RunTable, WorkerRecord, WorkerState
from flowrt.launcher.starts import LAUNCH_FORK_SECONDS, Starts
from flowrt.reliability.restart_policy import Restart, RestartPolicy

LAST_MESSAGES_SECONDS = 0.5  # from the end of a control connection to the end of its process
STATUS_SECONDS = 10.0  # the same of a process that the run cannot lose: its exit status is the reason that users see
FENCE_SECONDS = 0.75  # from the first sign of a death until no more messages are accepted; longer, so that the exit status is known
REAP_SECONDS = 15.0  # time limit for a dying process to end
SETTLE_SECONDS = 0.2  # from the first report of a failure to the choice of the root cause
EXPLAINED_SECONDS = 2.0  # from a lost link to the death that explains it; after that the end that the run can lose is killed


class FailureKind(IntEnum):
    """Kinds of failure, the most fundamental first. A SECONDARY failure may be only the consequence of a death."""

    BAD_INPUT = 0
    DIED = 1
    SECONDARY = 2


class FailureReport(NamedTuple):
    kind: FailureKind
    worker: str
    process: str
    reason: str


@dataclass(frozen=True)
class UnexplainedLoss:
    """The first of `ends` that the run can lose by then is killed; if it needs both, the loss is reported, unless one has died. Both may
    have new incarnations by then."""

    ends: tuple[WorkerRecord, WorkerRecord]
    reason: str
    reported_by: WorkerRecord


class Deaths:
    """Owns the ends of processes, from the first sign to the decision, and the root cause of the run's end."""

    def __init__(self, table: RunTable, starts: Starts) -> None:
        self._table, self._starts = table, starts
        settings = table.graph.reliability
        window_seconds = settings.restart_window_seconds
        self._budget = RestartPolicy(settings.restarts, window_seconds)
        self._monitor_budget = RestartPolicy(max(1, settings.restarts), window_seconds)  # without it no process that hangs is ever found
        self._reports: list[FailureReport] = []  # of failures that may end the run
        self._held: dict[str, None] = {}  # processes that are fenced after the one that they are restarted with
        self._losses: dict[str, UnexplainedLoss] = {}  # of links, by the incarnations of both ends

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    # Failures.

    def on_failed(self, worker: str, failed: Failed) -> None:
        kind = FailureKind.BAD_INPUT if failed.user else FailureKind.SECONDARY
        self._note_failure(kind, self._table.workers[worker], failed.error)

    def on_bad_message(self, worker: str, reason: str) -> None:
        """The worker sent a message that cannot be decoded; its connection is closed."""
        self._note_failure(FailureKind.DIED, self._table.workers[worker], reason)

    def on_overflow(self, worker: str, incarnation: str) -> None:
        """Messages for the incarnation fill the queue of its control connection. No message may be lost, so it is ended."""
        found = self._table.workers.get(worker)  # None: a standby process that was taken
        if found is not None and found.incarnation == incarnation:
            self.end_worker(FailureKind.DIED, found, "does not read its control connection: is it stopped, or the machine overloaded?")

    def end_worker(self, kind: FailureKind, worker: WorkerRecord, reason: str) -> None:
        """Record the failure, and kill the worker's process if the run can lose it."""
        if not self._is_reported(worker.name):
            self._note_failure(kind, worker, reason)
        self.kill_to_restart(worker.process, reason)

    def _note_failure(self, kind: FailureKind, worker: WorkerRecord, reason: str) -> None:
        """Record a worker's failure: as the cause of its death if the run can lose it, else as a possible root cause of the run's end. A
        failure while the run starts is one too: the worker would fail again."""
        process = worker.process
        if self._table.can_lose(process) and self._table.phase >= RunPhase.RUNNING:
            process.has_failed |= kind is FailureKind.SECONDARY
            process.cause = process.cause or (reason if kind is FailureKind.DIED else f"failed: {reason}")
        elif worker.state is not WorkerState.STOPPING:
            self.report(kind, worker.name, process.name, reason)

    def _is_reported(self, worker: str) -> bool:
        return any(report.worker == worker for report in self._reports)

    def report(self, kind: FailureKind, worker: str, process: str, reason: str) -> None:
        """Report a possible root cause of the run's end."""
        if not self._reports:
            self._table.set_timer(SETTLE_SECONDS, self.conclude)
        self._reports.append(FailureReport(kind, worker, process, reason))

    def conclude(self) -> None:
        kind, worker, process, reason = min(self._reports, key=lambda report: report.kind)
        if kind is FailureKind.BAD_INPUT:
            self._table.act(End(UserError(reason)))
        else:
            self._end_run(process, f"failed: {reason}" if kind is FailureKind.SECONDARY else reason, worker)

    def _end_run(self, process: str, reason: str, worker: str = "") -> None:
        self._table.act(End(WorkerDiedError(worker or process, reason), process))

    # Lost links.

    def on_link_lost(self, worker: str, lost: LinkLost) -> None:
        """Wait for a death that explains the lost link, or for the report of its other end."""
        found, peer = self._table.workers[worker], self._table.workers.get(lost.peer)
        if peer is None or peer.process.has_left or found.process.has_left:
            return
        if lost.incarnation not in ("", peer.incarnation):
            return  # the peer has a new incarnation since: the death of the one before is the reason
        ends = (peer, found)
        subject = " ".join(sorted(each.incarnation for each in ends))
        if subject in self._losses:
            if self._losses[subject].reported_by.name != worker:
                self._table.set_timer(0.0, self.on_unexplained_loss, subject)
            return
        if keeps_less(self._table.graph, worker, lost.peer):
            ends = ends[::-1]
        self._losses[subject] = UnexplainedLoss(ends, lost.reason, found)
        self._table.set_timer(EXPLAINED_SECONDS, self.on_unexplained_loss, subject)

    def on_unexplained_loss(self, subject: str) -> None:
        """Decides with what is known now: a run that was connecting at the report may have begun to serve."""
        loss = self._losses.pop(subject)
        end = next((each for each in loss.ends if self._table.can_lose(each.process)), None)
        first, other = loss.ends if (end or loss.reported_by) is loss.ends[0] else loss.ends[::-1]
        if end is not None and all(map(self._is_living, loss.ends)):
            self.kill_to_restart(first.process, f"has lost its link to {other.name} ({loss.reason})")
        elif end is None and all(each.is_open for each in loss.ends):  # otherwise the death of one of the two is the reason
            self._note_failure(FailureKind.SECONDARY, first, f"lost its link to {other.name}: {loss.reason}")

    def _is_living(self, worker: WorkerRecord) -> bool:
        return self._table.workers.get(worker.name) is worker and worker.is_open and worker.state is not WorkerState.LEFT

    # The end of a process.

    def kill(self, process: ProcessRecord, why: str) -> None:
        self._note_dying(process, why)
        self._table.act(EndProcess(process.name))

    def kill_leaving(self, process: ProcessRecord) -> None:
        """Kill a process that leaves the graph before it is up."""
        process.is_killed_on_purpose, process.cause = True, "left the graph before it was up"
        self.kill(process, process.cause)

    def kill_to_restart(self, process: ProcessRecord, why: str) -> None:
        """Kill this incarnation and notify its peers first. No-op when the run cannot lose it, or its end is known."""
        if self._table.can_kill(process):
            process.cause = process.cause or why
            self.kill(process, why)

    def end_marked_dead(self) -> None:
        """Kill the processes that the monitor has marked dead and that the run can lose now: perhaps not when they were marked."""
        for worker in self._table.workers.values():
            if worker.marked_dead is not None:
                self.kill_to_restart(worker.process, f"was marked dead ({worker.marked_dead.why})")

    def on_dying(self, name: str, how: str) -> None:
        """The kernel reports that the process has begun to die. The end of its control connections and the reap follow. `how`: as in
        `on_exited`; "" where it is not known yet."""
        process = self._table.processes[name]
        process.how = process.how or how
        self._note_dying(process, "its process has ended")
        if process.phase == ProcessPhase.DYING:
            process.phase = ProcessPhase.ENDED
            self._fence_explained(process)
            if not process.has_stop and not process.can_restart:
                self._await_reap(process)

    def on_connection_closed(self, worker: str) -> None:
        found, process = self._table.workers[worker], self._table.workers[worker].process
        found.is_open = False
        if found.state is not WorkerState.STOPPING:
            self._note_dying(process, "it has closed its control connection")
            if process.phase in (ProcessPhase.DYING, ProcessPhase.ENDED):
                self._await_reap(process)
        if process.phase == ProcessPhase.ENDED:
            self._fence_explained(process)
        elif process.phase == ProcessPhase.REAPED and not process.is_open:
            self._on_dead(process)

    def on_exited(self, name: str, how: str) -> None:
        """The process has ended and was reaped. `how` continues a sentence: "was killed by SIGKILL"."""
        process = self._table.processes[name]
        self._note_dying(process, "its process has ended")
        process.phase, process.how = ProcessPhase.REAPED, process.how or how
        self._table.cancel_timers(name)
        if not process.is_open:
            self._on_dead(process)

    def on_not_reaped(self, name: str) -> None:
        """The process was killed and has not ended, perhaps because it waits for a disk. It stays down until it has."""
        why = f"has been ending for {REAP_SECONDS:g} s: is the machine overloaded?"
        process = self._table.processes[name]
        if self._table.awaits_start(process):
            self._end_run(name, why)
        elif self._table.phase <= RunPhase.RUNNING:
            self._starts.give_up(process, f"it {why}")

    def on_no_status(self, name: str) -> None:
        """The process closed its control connection and no notice of its death followed, or it has ended and was not reaped."""
        process = self._table.processes[name]
        if process.phase == ProcessPhase.DYING:
            process.how = "closed its control connection unexpectedly"
        elif process.phase == ProcessPhase.ENDED:
            process.how = process.how or "has ended, and its exit status is not known"
        self._on_dead(process)

    def end_late(self, name: str) -> None:
        """The process has closed its control connection and not ended since."""
        self._table.act(EndProcess(name))

    def fence(self, name: str) -> None:
        """Announce the loss of a process that has died or is dying, and accept no more of its messages.

        Its control connection was read to its end, unless that takes longer than FENCE_SECONDS. Of a failure unit, the process that died by
        itself comes first: what it may have crashed over is known before the requests and parts of the others move.
        """
        table, process = self._table, self._table.processes[name]
        if process.is_fenced or process.has_left or table.phase >= RunPhase.STOPPING or self._reports:
            return
        if self._follows(process):
            self._held[name] = None
            return
        process.is_fenced = True
        how = "; ".join(each for each in (process.cause, process.how) if each) or "has ended"
        dying = (process, *table.rest_of_unit(process)) if process.is_restarting else ()
        groups, servers = pipelines(table.graph), remote_servers(table.graph)
        ends_groups = any(name in groups for each in dying for name in each.names)
        is_server = not servers.isdisjoint(process.names)
        while_loading, ends_groups = table.phase == RunPhase.LOADING, is_server and ends_groups
        together = tuple(process.names) if len(process.names) > 1 else ()
        for worker in process.workers:
            lost = (worker.name, how, while_loading, process.may_recur, process.is_restarting, ends_groups, together)
            table.announce(events.WorkerLost(*lost))
            table.notify(worker, DeathCause(worker.name, worker.incarnation, how, process.may_recur, process.is_killed_on_purpose))
        self.fence_held()

    def fence_held(self) -> None:
        """Fence the processes that wait for no other one any more: it was fenced, or its failure unit is without it."""
        held, self._held = self._held, {}
        for each in filter(self._table.processes.__contains__, held):
            self.fence(each)

    def _follows(self, process: ProcessRecord) -> bool:
        """Whether a process with which this one is restarted has died by itself, no later, and its loss was not announced yet."""
        unit = self._table.rest_of_unit(process) if process.is_killed_on_purpose else ()
        first = (other for other in unit if other.is_ending and not other.is_fenced and not other.is_killed_on_purpose)
        return any((other.died_seconds or 0.0) <= (process.died_seconds or 0.0) for other in first)

    def _fence_explained(self, process: ProcessRecord) -> None:
        """Fence a process that has ended, and whose last messages were read, before the reap, if its exit status is known."""
        if not process.is_open and process.how and self._table.can_lose(process):
            self.fence(process.name)

    def _note_dying(self, process: ProcessRecord, why: str) -> None:
        """Handle the first sign of a death."""
        table = self._table
        if process.phase >= ProcessPhase.DYING:
            return
        can_lose = table.can_lose(process)
        is_lost = can_lose and process.phase == ProcessPhase.UP and table.phase == RunPhase.RUNNING
        process.phase, process.died_seconds = ProcessPhase.DYING, table.now
        process.down_seconds = table.now if process.down_seconds is None else process.down_seconds
        for worker in process.workers:
            process.has_failed |= worker.marked_dead is not None and not worker.marked_dead.is_stopped
            worker.marked_dead = None
        process.is_restarting = bool(process.unit) if is_lost else process.is_restarting
        if can_lose:
            table.set_timer(FENCE_SECONDS, self.fence, process.name)
            why = process.cause or process.how or why
            for worker in process.workers:
                if worker.advance(WorkerState.LEFT):
                    left = PeerLeft(worker.name, worker.incarnation, why, process.is_restarting)
                    table.notify(worker, left)
                    table.notify_monitor(left)
        if process.can_restart and not process.has_left:
            table.set_timer(REAP_SECONDS, self.on_not_reaped, process.name)
        if is_lost and not process.is_killed_on_purpose:
            for other in table.rest_of_unit(process):
                if other.phase == ProcessPhase.UP:  # one that starts already has served no request yet, and goes on
                    other.is_killed_on_purpose, other.cause = True, f"is restarted with {process.name}"
                    self.kill(other, other.cause)

    def _await_reap(self, process: ProcessRecord) -> None:
        """Limit the time until a dying process has ended."""
        if self._table.can_replace(process):
            self._table.set_timer(LAST_MESSAGES_SECONDS, self.end_late, process.name)
        else:
            self._table.set_timer(STATUS_SECONDS, self.on_no_status, process.name)

    def _on_dead(self, process: ProcessRecord) -> None:
        """How the process died is known, and its last messages have been read."""
        table = self._table
        process.phase = ProcessPhase.DEAD
        table.cancel_timers(process.name)
        if process.has_stop:
            return
        if not table.can_replace(process):
            if not any(map(self._is_reported, (FORK_SERVER, *process.names))):
                how = f"{process.how} unexpectedly" if process.how.startswith("exited") else process.how
                self.report(FailureKind.DIED, process.name, process.name, how)  # any of its workers may be the cause
        elif table.phase < RunPhase.STOPPING and not self._reports:
            self.fence(process.name)
            if table.phase == RunPhase.LOADING:
                process.died_seconds = process.down_seconds = None
                process.num_restarts += 1
            self._restart(process)
            self._starts.wake_waiting()

    # Restarts.

    def on_fork_failed(self, name: str, error: UserError | WorkerDiedError) -> None:
        """The system refused, or the fork server has ended. A restart is tried again, after a refusal within the restart budget."""
        table, process = self._table, self._table.processes[name]
        process.phase, process.how = ProcessPhase.DEAD, str(error)
        is_lost = isinstance(error, WorkerDiedError) and error.process == FORK_SERVER
        if table.awaits_start(process) and (is_lost or table.phase == RunPhase.LOADING):
            if not self._reports:  # otherwise the root cause is about to be chosen
                table.act(End(error))
        elif is_lost and self._starts.may_await_fork_server(process):
            self._starts.await_fork_server(process)
        elif table.phase < RunPhase.STOPPING:
            subject = "the fork server of its host" if is_lost else "it"
            self._restart(process, refusal=f"{subject} {error.reason}, and " if isinstance(error, WorkerDiedError) else f"{error}, and ")

    def on_fork_silent(self, name: str) -> None:
        """The fork has exceeded its time limit, `Starts.fork_seconds`."""
        process = self._table.processes[name]
        process.phase = ProcessPhase.DEAD
        if self._table.phase >= RunPhase.RUNNING:
            self._starts.kill_fork_server()
            self._starts.await_fork_server(process)
        elif not self._reports:
            self._end_run(FORK_SERVER, f"has not responded for {LAUNCH_FORK_SECONDS:g} s: is it stopped, or the machine overloaded?")

    def on_fork_server_lost(self, how: str) -> None:
        """While the run starts, this ends it."""
        if self._table.phase < RunPhase.RUNNING:
            self.report(FailureKind.DIED, FORK_SERVER, FORK_SERVER, how)
        else:
            self._starts.on_fork_server_lost(how)

    def _restart(self, process: ProcessRecord, refusal: str = "") -> None:
        """Restart the process when its restart budget allows it. A death on purpose costs no budget. `refusal`: why it was not forked."""
        table, name = self._table, process.name
        if process.is_leaving:
            return
        if process.is_killed_on_purpose:
            self._starts.start_next(name)
            return
        budget = self._monitor_budget if name == MONITOR else self._budget
        decision = budget.on_death(name, table.now)
        if isinstance(decision, Restart):
            table.set_timer(decision.delay_seconds, self._starts.start_next, name)
        elif table.awaits_start(process):
            doing = "loaded" if table.phase == RunPhase.LOADING else "connected"
            self._end_run(name, f"{process.how} while it {doing}, and {decision.why}")
        elif decision.retry_seconds is None:
            self._starts.give_up(process, refusal + decision.why)
        else:
            why = f"{refusal}{decision.why}; the next try is in {decision.retry_seconds:g} s"
            self._starts.give_up(process, why, decision.retry_seconds)
            table.set_timer(decision.retry_seconds, self._starts.start_next, name)
