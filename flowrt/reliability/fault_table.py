"""The unit that is computed or started again after each kind of fault: the smallest one that the fault can have spoilt. Pure.

`RULES` is the only table of these decisions, and a test compares it with docs/reliability.md. Where the unit depends on what happened
before, the code that handles the fault looks it up (`redo`, `STEP_AGAIN`).
"""

from __future__ import annotations

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


# What is redone for the first time, the second, and so on, without progress in between; the last entry holds for all later times.
RULES: dict[FaultKind, tuple[Redo, ...]] = {
    FaultKind.OPERATOR_ERROR: STEP_AGAIN,
    FaultKind.NOT_FINITE: (Redo.SEQUENCE, Redo.END),
    FaultKind.LATE_PART: (Redo.PART, Redo.NOTHING),
    FaultKind.OUT_OF_PAGES: (Redo.SEQUENCE,),
    FaultKind.LOST_SERVER: (Redo.PART, *STEP_AGAIN),
    FaultKind.CRASHED_SERVER: (Redo.STEP, Redo.GROUP, Redo.END),  # Redo.GROUP: counted as a crash of the group
    FaultKind.LOST_GROUP: (Redo.GROUP,),
    FaultKind.CRASHED_GROUP: (Redo.GROUP, Redo.GROUP, Redo.END),
    FaultKind.STANDSTILL: (Redo.PROCESS,),
    FaultKind.LOST_LINK: (Redo.PROCESS,),
    FaultKind.CHANGED_WEIGHTS: (Redo.PROCESS,),
}


def redo(kind: FaultKind, times_before: int = 0) -> Redo:
    """What is done again when a fault of this kind hits something for the first time, or `times_before` times before."""
    redone = RULES[kind]
    return redone[min(times_before, len(redone) - 1)]
