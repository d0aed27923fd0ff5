"""Decides what follows a lost link that no death explains: the end that the run can lose is killed, or the run ends. Pure.

A process that died reports nothing, so a loss that both ends have reported has no death behind it: it is decided at once. The launcher
waits EXPLAINED_SECONDS for the second report, or for the death.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrt.actors.control import LinkLost
from flowrt.launcher.root_cause import FailureKind, RootCause
from flowrt.launcher.run_table import RunTable, TimerKind, WorkerRecord, WorkerState

EXPLAINED_SECONDS = 2.0  # from a lost link to the death that explains it; after that the end that the run can lose is killed


@dataclass(frozen=True)
class UnexplainedLoss:
    """`end` is killed, or reported if the run needs it, unless one of the two has died. Both may have new incarnations by then."""

    end: WorkerRecord
    other: WorkerRecord | None
    reason: str
    is_killed: bool
    reported_by: str


class LinkLoss:
    def __init__(self, table: RunTable, root_cause: RootCause) -> None:
        self._table, self._root_cause = table, root_cause
        self._losses: dict[str, UnexplainedLoss] = {}  # by the incarnations of both ends

    def on_link_lost(self, worker: str, lost: LinkLost) -> None:
        """Wait for a death that explains the lost link, or for the report of its other end."""
        found, peer = self._table.workers[worker], self._table.workers.get(lost.peer)
        if peer is not None and lost.incarnation not in ("", peer.incarnation):
            return  # the peer has a new incarnation since: the death of the one before is the reason
        subject = " ".join(sorted(each.incarnation for each in (found, peer) if each is not None))
        if subject in self._losses:
            if self._losses[subject].reported_by != worker:
                self._table.set_timer(TimerKind.LINK, 0.0, subject)
            return
        ends = [(peer, found), (found, peer)]
        if self._table.keeps_less(worker, lost.peer):
            ends.reverse()
        for end, other in ends:
            if end is None or not self._table.can_lose(end.process):
                continue
            if end.state is not WorkerState.LEFT:
                reason = f"has lost its link to {other.name if other is not None else lost.peer} ({lost.reason})"
                self._wait(subject, UnexplainedLoss(end, other, reason, is_killed=True, reported_by=worker))
            return
        self._wait(
            subject, UnexplainedLoss(found, peer, f"lost its link to {lost.peer}: {lost.reason}", is_killed=False, reported_by=worker)
        )

    def on_unexplained(self, subject: str) -> None:
        loss = self._losses.pop(subject)
        end, other = loss.end, loss.other
        if not loss.is_killed:
            if end.is_open and (other is None or other.is_open):  # otherwise the death of one of the two is the reason
                self._root_cause.on_failure(FailureKind.SECONDARY, end, loss.reason)
        elif self._is_living(end) and (other is None or self._is_living(other)):
            self._table.fence(end.name, loss.reason)

    def _wait(self, subject: str, loss: UnexplainedLoss) -> None:
        self._losses[subject] = loss
        self._table.set_timer(TimerKind.LINK, EXPLAINED_SECONDS, subject)

    def _is_living(self, worker: WorkerRecord) -> bool:
        return self._table.workers[worker.name] is worker and worker.is_open and worker.state is not WorkerState.LEFT
