"""A failing seed is reduced to the smallest part that still fails, with one command that replays it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from simulation.simulate_command import simulate

from flowrt.dataflow.runner import Runner
from flowrt.graph.file import load_graph
from flowrt.launcher.model_facts import facts_of
from flowrt.reliability.scenario import RollBack
from flowrt.simulation.campaign import campaign
from flowrt.simulation.case import Case, Kept
from flowrt.simulation.cases import draw
from flowrt.simulation.network_conditions import CALM
from flowrt.simulation.shrink import shrink

GRAPH = Path(__file__).resolve().parent / "graphs" / "2x3.yaml"


@pytest.fixture(scope="module")
def case() -> Case:
    """A drawn case of several faults and requests."""
    graph = load_graph(GRAPH, facts_of=facts_of)
    drawn = (draw(seed, [graph]) for seed in range(1000))
    return next(each for each in drawn if len(each.scenario.faults) >= 4 and len(each.requests) >= 3 and each.conditions != CALM)


def counted(fails: Callable[[Case], bool]) -> tuple[Callable[[Case], bool], list[Case]]:
    seen: list[Case] = []

    def count(case: Case) -> bool:
        seen.append(case)
        return fails(case)

    return count, seen


def test_shrinking_keeps_only_what_the_failure_needs(case: Case) -> None:
    fault, request = case.scenario.faults[2], case.requests[1]
    fails, seen = counted(lambda smaller: fault in smaller.scenario.faults and request in smaller.requests)
    kept = shrink(case, fails)
    assert kept == Kept(faults=(2,), requests=(1,), calm=True)
    assert kept.of(case).scenario.faults == (fault,)
    assert len(seen) < 60


def test_case_that_always_fails_keeps_no_fault_and_one_request(case: Case) -> None:
    kept = shrink(case, lambda smaller: True)
    assert (kept.faults, len(kept.requests or ()), kept.calm) == ((), 1, True)


def test_network_conditions_are_kept_when_they_matter_and_runs_are_bounded(case: Case) -> None:
    fails, seen = counted(lambda smaller: smaller.conditions == case.conditions)
    assert not shrink(case, fails).calm
    fails, seen = counted(lambda smaller: len(smaller.scenario.faults) == len(case.scenario.faults))
    shrink(case, fails, max_runs=5)
    assert len(seen) <= 5


def test_failing_seed_prints_a_command_that_replays_the_smallest_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With rollbacks that leave old epochs running, a seed with a rollback in it fails, shrinks, and fails again by its command."""
    monkeypatch.setattr(Runner, "roll_back", lambda self, source, epoch: 0)
    graph = load_graph(GRAPH, facts_of=facts_of)
    cases = (draw(seed, [graph]) for seed in range(400))
    alone = (case for case in cases if case.poison is None and case.glitch is None)  # these roll steps back without a fault
    few = (case for case in alone if len(case.scenario.faults) <= 6)  # each takes a run or two to leave out
    rolled = (case for case in few if any(isinstance(fault, RollBack) for fault in case.scenario.faults))
    counts = campaign(rolled, lambda case, came, counts: not counts.failures)
    assert counts.failures
    seed = counts.failures[0].seed
    assert simulate([str(GRAPH), "--first", str(seed), "--seeds", "1"]) == 1
    output = capsys.readouterr().err.splitlines()
    repeated = next(line for line in output if line.strip().startswith("again: "))
    smallest = next(line for line in output if "requests, " in line)
    assert "roll_back of attention." in smallest or "crash of experts." in smallest  # the loss of a server rolls steps back, too
    command = repeated.strip().removeprefix("again: flowrt simulate ").split()
    assert simulate(command) == 1
    assert f"seed {seed}: " in capsys.readouterr().err
