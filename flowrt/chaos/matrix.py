"""The matrix of a chaos run: the outcome of each cell of role, fault and phase. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from flowrt.chaos.cells import FAULTS, PHASES, can_take, fault_name, processes_by_role, role_of
from flowrt.chaos.compare import STALL_SECONDS, ExpectedAnswer, difference_of
from flowrt.chaos.measure import ChaosResult
from flowrt.chaos.observer import InjectedFault

NOT_TRIED, IMPOSSIBLE = "-", "n/a"
NOTES = (
    "N ok: after N faults every answer was exact, none failed, and the process came back",
    "N bad: after N faults an answer was wrong or failed, or the process stayed down",
    f"{NOT_TRIED}, or no row: not tried; {IMPOSSIBLE}: such a process cannot take the fault then",
)


class Cell(NamedTuple):
    role: str
    fault: str
    phase: str


class Outcomes(NamedTuple):
    """Numbers of faults in one cell: exact answers and a process that is back; and others, by their outcome."""

    num_exact: int
    others: Counter[str]


def outcome_of(found: ChaosResult, injected: InjectedFault, expected: Mapping[int, ExpectedAnswer]) -> str:
    """`exact`, or the worst that came of the fault: `wrong` answers, `failed` requests, or a process that is `down`."""
    observer = found.observer
    back = observer.back_seconds(injected)
    until = injected.at + (back if back < math.inf else 0.0) + STALL_SECONDS
    answers = [answer for answer in found.answers if answer.submitted <= until and answer.ended >= injected.at]
    if any(answer.number in expected and any(difference_of(expected[answer.number], answer)) for answer in answers):
        return "wrong"
    if any(answer.failed for answer in answers):
        return "failed"
    return "down" if observer.must_return(injected) and not observer.has_returned(injected) else "exact"


def matrix_of(found: ChaosResult, expected: Mapping[int, ExpectedAnswer]) -> dict[Cell, Outcomes]:
    """The outcomes of every cell that was tried."""
    counts: dict[Cell, Counter[str]] = {}
    for injected in found.injected_faults:
        if not injected.missed and injected.phase:
            cell = Cell(role_of(found.graph, injected.process), fault_name(injected.kind), injected.phase)
            counts.setdefault(cell, Counter())[outcome_of(found, injected, expected)] += 1
    return {cell: Outcomes(each.pop("exact", 0), each) for cell, each in counts.items()}


def matrix_rows(found: ChaosResult, matrix: Mapping[Cell, Outcomes]) -> list[tuple[str, ...]]:
    """A row of short texts for each role and fault that was tried, with a column for each phase."""
    tried = {(cell.role, cell.fault) for cell in matrix}
    roles = dict.fromkeys([*processes_by_role(found.graph), *(cell.role for cell in matrix)])
    faults = [*FAULTS, *sorted({cell.fault for cell in matrix} - set(FAULTS))]
    return [
        (role, fault, *(_text(role, fault, phase, matrix.get(Cell(role, fault, phase))) for phase in PHASES))
        for role in roles
        for fault in faults
        if (role, fault) in tried
    ]


def _text(role: str, fault: str, phase: str, outcomes: Outcomes | None) -> str:
    if outcomes is None:
        return NOT_TRIED if fault not in FAULTS or can_take(role, fault, phase) else IMPOSSIBLE
    num_bad = sum(outcomes.others.values())
    return f"{num_bad} bad" if num_bad else f"{outcomes.num_exact} ok"
