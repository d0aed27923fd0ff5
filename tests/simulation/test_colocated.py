"""Groups that are expert servers too, in virtual time: a death is both a group's and a server's, and changes no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from simulation.outcomes import errors, finish_reasons
from simulation.test_deaths import SEEDS, load, requests, serve_under

from flowrt.reliability.scenario import PERMANENT_SECONDS, Crash, Fault, Hang, Pause
from flowrt.simulation.campaign import campaign
from flowrt.simulation.case import Case, Poison
from flowrt.simulation.cases import draw, references_of, run_case
from flowrt.simulation.invariants import ALONE_TEXT, max_victims

FILE = "colocated/colocated.yaml"
DRAWN_SEEDS = 8


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "fault",
    [
        Crash(process="attention.1", at_seconds=0.02),
        Pause(process="attention.1", at_seconds=0.02, for_seconds=PERMANENT_SECONDS),
        Hang(process="attention.1", at_seconds=0.02, for_seconds=PERMANENT_SECONDS),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_death_changes_no_token_and_both_roles_are_used_again(seed: int, fault: Fault) -> None:
    graph = load(FILE, detector=not isinstance(fault, Crash))
    outcome = serve_under(seed, graph, requests(8), fault, expect="tokens")
    assert finish_reasons(outcome.result) == ("length",) * 8
    assert outcome.num_faults["restarted"] == 1


@pytest.mark.parametrize("effect", ["crash", "part"])
@pytest.mark.parametrize("seed", SEEDS)
def test_poison_ends_alone_after_few_victims(seed: int, effect: Literal["crash", "part"]) -> None:
    first, *others = requests(4, apart=1e-3)
    first = replace(first, prompt_token_ids=tuple(range(40, 60)))
    case = Case(load(FILE), (first, *others), seed=seed)
    computed = {token for reference in references_of(case)[1:] for choice in reference for token in choice}
    case = replace(case, poison=Poison(max({*range(40, 60)} - computed), effect))
    outcome = run_case(case)
    assert ALONE_TEXT in (errors(outcome.result)[0] or "")
    assert finish_reasons(outcome.result)[1:] == ("length",) * 3
    assert 1 <= outcome.num_faults["poisoned"] <= max_victims(case)


@pytest.mark.timeout(300)
def test_invariants_hold_under_drawn_faults() -> None:
    counts = campaign((draw(seed, [load(FILE)]) for seed in range(DRAWN_SEEDS)), lambda case, outcome, counts: True)
    assert counts.failures == []
