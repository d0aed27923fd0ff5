"""The unit that is computed or started again after each kind of fault: the smallest one that the fault can have spoilt. Pure.

`RULES` is the only table of these decisions, and a test compares it with docs/reliability.md. Where the unit depends on what happened
before, the code that handles the fault looks it up (`redo`, `STEP_AGAIN`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Redo(StrEnum):
    """What is computed, or started, again."""

    PART = "part"  # other servers compute the rows of the part
    SEQUENCE = "sequence"  # it is computed again from its prompt and tokens
    STEP = "step"  # all running steps of the group are computed again in a new epoch; the sequences of the failed one run one by one
    GROUP = "group"  # its requests are replayed in other groups
    PROCESS = "process"  # it is killed and started again; what it computed is done again as for a lost process
    NOTHING = "nothing"
    END = "request ends"  # with an error


class FaultKind(StrEnum):
    """The name of a kind of fault in docs/reliability.md."""

    OPERATOR_ERROR = "operator raises, or returns a wrong shape"
    NOT_FINITE = "NaN or infinity in a part or in the logits of a sequence"
    LATE_PART = "late part"
    OUT_OF_PAGES = "out of pages"
    LOST_SERVER = "lost server"
    CRASHED_SERVER = "server crashed or hung"
    LOST_GROUP = "lost group"
    CRASHED_GROUP = "group crashed or hung"
    STANDSTILL = "hung operation, or a process that stands still"
    LOST_LINK = "message lost with its link, or a message that violates its schema"
    CHANGED_WEIGHTS = "weights that changed"


STEP_AGAIN = (Redo.STEP, Redo.END)  # of a step that failed: beside others, and alone


@dataclass(frozen=True)
class FaultRule:
    """`redone`: for the first time, the second, and so on, without progress in between; the last entry holds for all later times."""

    kind: FaultKind
    redone: tuple[Redo, ...]
    effect: str


RULES: dict[FaultKind, FaultRule] = {
    rule.kind: rule
    for rule in (
        FaultRule(
            FaultKind.OPERATOR_ERROR,
            STEP_AGAIN,
            "the sequences of the step run one by one; one whose step fails again ends its request",
        ),
        FaultRule(
            FaultKind.NOT_FINITE,
            (Redo.SEQUENCE, Redo.END),
            "the other sequences of the step get their tokens; the server of the part is avoided for 2 s",
        ),
        FaultRule(FaultKind.LATE_PART, (Redo.PART, Redo.NOTHING), "the first response counts"),
        FaultRule(FaultKind.OUT_OF_PAGES, (Redo.SEQUENCE,), "the youngest sequence waits for pages"),
        FaultRule(FaultKind.LOST_SERVER, (Redo.PART, *STEP_AGAIN), "its pending parts go to replicas; it restarts"),
        FaultRule(
            FaultKind.CRASHED_SERVER,
            STEP_AGAIN,
            "steps with pending parts there are suspects; a request ends whose part it computed alone",
        ),
        FaultRule(FaultKind.LOST_GROUP, (Redo.GROUP,), "its requests move to other groups; it restarts"),
        FaultRule(FaultKind.CRASHED_GROUP, (Redo.GROUP, Redo.END), "its requests are suspects; one that ran alone ends"),
        FaultRule(FaultKind.STANDSTILL, (Redo.PROCESS,), "after its bound; then as for a crash, or as for a loss if it was stopped"),
        FaultRule(
            FaultKind.LOST_LINK,
            (Redo.PROCESS,),
            "unless another transport carries on, and sends lost messages again: the end that keeps less state restarts",
        ),
        FaultRule(FaultKind.CHANGED_WEIGHTS, (Redo.PROCESS,), "it stays down until the file is as it was when the run began"),
    )
}


def redo(kind: FaultKind, times_before: int = 0) -> Redo:
    """What is done again when a fault of this kind hits something for the first time, or `times_before` times before."""
    redone = RULES[kind].redone
    return redone[min(times_before, len(redone) - 1)]
