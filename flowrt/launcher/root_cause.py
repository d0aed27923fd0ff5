"""Chooses the root cause of a run's end. Pure.

The peers of a dead process often report lost links before the death itself is detected. All reports within SETTLE_SECONDS of the first are
therefore collected, and the most fundamental one is the root cause. Once chosen, it never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from flowrt.errors import UserError, WorkerDiedError
from flowrt.launcher.actions import End
from flowrt.launcher.run_table import RunPhase, RunTable, TimerKind, WorkerRecord, WorkerState

SETTLE_SECONDS = 0.2  # from the first report of a failure to the choice of the root cause


class FailureKind(IntEnum):
    """Kinds of failure, the most fundamental first. A SECONDARY failure may be only the consequence of a death."""

    BAD_INPUT = 0
    DIED = 1
    SECONDARY = 2


@dataclass(frozen=True, order=True)
class FailureReport:
    kind: FailureKind
    order: int
    worker: str = field(compare=False)
    process: str = field(compare=False)
    reason: str = field(compare=False)


class RootCause:
    """The reports of failures that may end the run."""

    def __init__(self, table: RunTable) -> None:
        self._table = table
        self._reports: list[FailureReport] = []

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    def is_reported(self, worker: str) -> bool:
        return any(report.worker == worker for report in self._reports)

    def on_failure(self, kind: FailureKind, worker: WorkerRecord, reason: str) -> None:
        """Record a worker's failure: as the cause of its death if the run can lose it, else as a possible root cause of the run's end. A
        failure while the run starts is one too: the worker would fail again."""
        process = worker.process
        if self._table.can_lose(process) and self._table.phase >= RunPhase.RUNNING:
            process.has_failed |= kind is FailureKind.SECONDARY
            process.cause = process.cause or (reason if kind is FailureKind.DIED else f"failed: {reason}")
        elif worker.state is not WorkerState.STOPPING:
            self.report(kind, worker.name, process.name, reason)

    def end_worker(self, kind: FailureKind, worker: WorkerRecord, reason: str) -> None:
        """Record the failure, and kill the worker's process if the run can lose it."""
        if not self.is_reported(worker.name):
            self.on_failure(kind, worker, reason)
        self._table.fence(worker.name, reason)

    def report(self, kind: FailureKind, worker: str, process: str, reason: str) -> None:
        if not self._reports:
            self._table.set_timer(TimerKind.SETTLE, SETTLE_SECONDS)
        self._reports.append(FailureReport(kind, len(self._reports), worker, process, reason))

    def conclude(self, subject: str) -> None:
        first = min(self._reports)
        if first.kind is FailureKind.BAD_INPUT:
            self._table.act(End(UserError(first.reason)))
        else:
            reason = f"failed: {first.reason}" if first.kind is FailureKind.SECONDARY else first.reason
            self._table.act(End(WorkerDiedError(first.worker, reason), first.process))
