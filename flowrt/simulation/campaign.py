"""Runs a campaign of many seeds, one after another, and counts their outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flowrt.errors import leaves
from flowrt.reliability.scenario import KINDS
from flowrt.simulation.calls import AnyServed
from flowrt.simulation.case import Case
from flowrt.simulation.cases import run_case
from flowrt.simulation.errors import InvariantError, SimulationError
from flowrt.simulation.world import Outcome


@dataclass(frozen=True)
class Failure:
    """A seed that failed: the number of the violated invariant, or else the kind of error, and the text."""

    seed: int
    invariant: str
    text: str


@dataclass
class CampaignCounts:
    """Counts over all seeds so far. `faults`: by kind, faults that hit a living target. `outcomes`: runs by how they ended."""

    num_seeds: int = 0
    num_steps: int = 0
    virtual_seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    branches: Counter[str] = field(default_factory=Counter)  # occurrences of rare branches
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def campaign(
    cases: Iterable[Case],
    on_run: Callable[[Case, Outcome[AnyServed] | Failure, CampaignCounts], bool] = lambda case, outcome, counts: True,
) -> CampaignCounts:
    """Run each case. Calls `on_run` after each; False from it ends the campaign."""
    counts = CampaignCounts()
    for case in cases:
        outcome: Outcome[AnyServed] | Failure
        try:
            outcome = run_case(case)
        except Exception as error:
            outcome = failure_of(case.seed, error)
            counts.failures.append(outcome)
            counts.outcomes["failed"] += 1
        else:
            counts.num_steps += outcome.num_steps
            counts.virtual_seconds += outcome.virtual_seconds
            counts.faults.update({kind: count for kind, count in outcome.num_faults.items() if kind in KINDS})
            counts.branches.update({name: count for name, count in outcome.num_faults.items() if name not in KINDS})
            counts.branches["client left"] += sum(client.has_left for client in outcome.result.clients)
            counts.outcomes["named error" if outcome.result.failure is not None else "tokens"] += 1
        counts.num_seeds += 1
        if not on_run(case, outcome, counts):
            break
    return counts


def digest_line(case: Case, outcome: Outcome[AnyServed]) -> str:
    """The line of `--digests`: equal in every process."""
    return f"{case.seed} {outcome.digest} {outcome.num_steps} {outcome.virtual_seconds:.9f}"


def fails(case: Case) -> bool:
    try:
        run_case(case)
    except Exception:
        return True
    return False


def failure_of(seed: int, error: BaseException) -> Failure:
    """The failure by its innermost error. An InvariantError takes precedence, because all errors of a group have one cause."""
    errors = list(leaves(error))
    worst = next((each for each in errors if isinstance(each, InvariantError)), errors[0])
    kind = worst.kind if isinstance(worst, SimulationError) else type(worst).__name__
    return Failure(seed, kind, str(worst) if isinstance(worst, InvariantError) else f"{type(worst).__name__}: {worst}")
