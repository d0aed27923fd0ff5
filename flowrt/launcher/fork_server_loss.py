"""Decides what follows when the fork server dies or does not respond: a new one within its restart budget. Pure.

Workers run on meanwhile, since they live as long as the launcher. A process that should be restarted waits until a fork server is back.
While the run starts, the loss of the fork server ends the run.
"""

from __future__ import annotations

from flowrt.actors.control import DetectorReport, PeerJoined
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER
from flowrt.graph.settings import ReliabilitySettings
from flowrt.launcher import events
from flowrt.launcher.actions import End, KillForkServer, StartForkServer
from flowrt.launcher.root_cause import FailureKind, RootCause
from flowrt.launcher.run_table import ProcessPhase, ProcessRecord, RunPhase, RunTable, TimerKind
from flowrt.reliability.detector import ProcessState
from flowrt.reliability.restart_policy import Restart, RestartPolicy

# Time limits for a fork. It takes milliseconds, so a fork server that exceeds them is stopped. During the launch it forks all processes at
# once, while they load.
FORK_SECONDS, LAUNCH_FORK_SECONDS = 5.0, 15.0
IMPORT_SECONDS = 60.0  # time limit for a new fork server to serve
RETRY_SECONDS = 0.1  # from a fork that met the end of the fork server to the next try: the loss is about to be reported


class ForkServerLoss:
    def __init__(self, table: RunTable, root_cause: RootCause, settings: ReliabilitySettings) -> None:
        self._table, self._root_cause = table, root_cause
        self._budget = RestartPolicy(settings.restarts, settings.restart_window_seconds)
        self.is_up = True  # and serves
        self._lost_seconds: float | None = None  # when it was lost; None: it is up
        self._why_down: str | None = None  # its restarts are used up
        self._num_starts, self._pid = 0, 0  # of all fork servers; of the present one, where it is a process
        self._why_killed = ""
        self.waiting: dict[str, None] = {}  # processes that are to be forked when it is back

    @property
    def fork_seconds(self) -> float:
        return FORK_SECONDS if self._table.phase >= RunPhase.RUNNING else LAUNCH_FORK_SECONDS

    def can_fork(self, process: ProcessRecord) -> bool:
        """Whether the process can be forked now. Otherwise it is forked when the fork server is back."""
        if not self.is_up:
            self.waiting[process.name] = None
            if self._why_down is not None:
                self._table.give_up(process, self._why_down)
        return self.is_up

    # Events.

    def on_lost(self, how: str) -> None:
        if self._table.phase < RunPhase.RUNNING:
            self._root_cause.report(FailureKind.DIED, FORK_SERVER, FORK_SERVER, how)
        else:
            self._lost_seconds = self._table.now
            self._start_again("; ".join(each for each in (self._why_killed, how) if each))

    def on_failed(self, error: UserError | WorkerDiedError) -> None:
        """A new fork server has failed to start."""
        self._start_again(error.reason if isinstance(error, WorkerDiedError) else f"cannot start: {error}")

    def on_ready(self, pid: int) -> None:
        """A new fork server serves. `pid`: 0 where it is no process of this host."""
        self.is_up, self._why_down, self._why_killed, self._pid = True, None, "", pid
        self._num_starts += 1
        self.introduce()
        if self._table.phase != RunPhase.RUNNING or self._lost_seconds is None:
            return
        self._table.announce(events.ForkServerRestarted(self._table.now - self._lost_seconds))
        self._lost_seconds = None
        for name in self.waiting:
            self._table.set_timer(TimerKind.RESTART, 0.0, name)
        self.waiting.clear()

    def introduce(self) -> None:
        """Notify the monitor of the fork server. It sends no heartbeats: like a process that starts, it is dead when it stays stopped."""
        if self.is_up and self._pid and self._table.phase == RunPhase.RUNNING:
            self._table.notify_monitor(PeerJoined(FORK_SERVER, self._incarnation, {}, self._pid, is_starting=True))

    def on_marked_dead(self, report: DetectorReport) -> None:
        if self.is_up and report.incarnation == self._incarnation and report.state is ProcessState.DEAD:
            self._why_killed = f"was marked dead ({report.why})"
            self._kill()

    def on_silent(self, name: str) -> None:
        """The fork of a process has exceeded its time limit. The fork server is killed, so that its loss is reported."""
        process = self._table.processes[name]
        if self._table.phase < RunPhase.RUNNING:
            process.phase = ProcessPhase.DEAD
            if not self._root_cause.has_reports:
                reason = f"has not responded for {LAUNCH_FORK_SECONDS:g} s: is it stopped, or the machine overloaded?"
                self._table.act(End(WorkerDiedError(FORK_SERVER, reason), FORK_SERVER))
            return
        if self.is_up:
            self._kill()
        self.await_fork(process)

    def await_fork(self, process: ProcessRecord) -> None:
        """A fork has met the end of the fork server, which costs the process none of its restart budget."""
        process.phase = ProcessPhase.DEAD
        if self._table.phase == RunPhase.RUNNING:
            self._table.set_timer(TimerKind.RESTART, RETRY_SECONDS, process.name)

    def on_time(self, subject: str) -> None:
        if self._table.phase == RunPhase.RUNNING:
            self._table.act(StartForkServer())

    # Inside.

    @property
    def _incarnation(self) -> str:
        return str(self._num_starts)

    def _kill(self) -> None:
        self.is_up = False
        self._table.act(KillForkServer())

    def _start_again(self, how: str) -> None:
        self.is_up = False
        if self._table.phase != RunPhase.RUNNING:
            return
        decision = self._budget.on_death(FORK_SERVER, self._table.now)
        seconds = decision.delay_seconds if isinstance(decision, Restart) else decision.retry_seconds
        self._table.announce(events.ForkServerLost(how, seconds))
        if seconds is not None:
            self._table.set_timer(TimerKind.FORK_SERVER, seconds)
        if not isinstance(decision, Restart):
            self._why_down = f"the fork server {how}, and {decision.why}"
            for name in self.waiting:
                self._table.give_up(self._table.processes[name], self._why_down)
