"""Launchers that die in virtual time, and others that resume their requests from the request log."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from simulation.outcomes import finish_reasons
from simulation.test_deaths import load

from flowrt.reliability.scenario import Crash, Scenario
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.case import Case, SimulatedRequest
from flowrt.simulation.cases import run_case
from flowrt.simulation.launchers import simulate
from flowrt.simulation.log_disk import DeathKind, LauncherDeath, LogConditions

SEEDS = range(4)
REQUESTS = (
    SimulatedRequest((5, 6, 7), SamplingParams(max_tokens=12, ignore_eos=True), after_seconds=0.0),
    SimulatedRequest((8, 9), SamplingParams(max_tokens=10, ignore_eos=True, n=2, temperature=0.9, seed=4), after_seconds=2e-3),
    SimulatedRequest((10,), SamplingParams(max_tokens=12, ignore_eos=True, seed=3, temperature=0.9, stop=("never",)), after_seconds=2e-3),
    SimulatedRequest((11, 12), SamplingParams(max_tokens=1, ignore_eos=True), after_seconds=2e-3),
    SimulatedRequest((13,), SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2), after_seconds=0.03),
)


def case_of(seed: int, *deaths: LauncherDeath, is_synced: bool = False) -> Case:
    return Case(load("2x3.yaml"), REQUESTS, seed=seed, log=LogConditions(deaths, 400, is_synced))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", get_args(DeathKind))
def test_another_launcher_continues_each_open_request(seed: int, kind: DeathKind) -> None:
    """`run_case` compares all tokens with the reference, and what each client got before with what it gets after."""
    deaths = LauncherDeath(0.02, kind), LauncherDeath(0.012, kind)
    outcome = run_case(case_of(seed, *deaths, is_synced=kind == "power loss"))
    assert finish_reasons(outcome.result) == ("length",) * len(REQUESTS)
    assert outcome.num_faults[f"launcher: {kind}"] == 2
    assert outcome.num_faults["resumed request"] >= 4


def test_requests_without_a_seed_of_their_own_draw_the_same_after_a_death() -> None:
    """The seed that the gateway has drawn is in the log: the next launcher would draw another one."""
    unseeded = replace(REQUESTS[1], params=SamplingParams(max_tokens=10, ignore_eos=True, n=2, temperature=0.9))
    case = replace(case_of(1), requests=(unseeded,))
    whole = simulate(case)
    resumed = simulate(replace(case, log=LogConditions((LauncherDeath(0.02),))))
    assert resumed.num_faults["resumed request"] == 1
    assert resumed.result.clients[0].choices == whole.result.clients[0].choices


@pytest.mark.parametrize("seed", SEEDS)
def test_processes_die_before_and_after_the_launcher(seed: int) -> None:
    faults = Crash(process="attention.0", at_seconds=0.01), Crash(process="experts.1", at_seconds=0.015)
    case = replace(case_of(seed, LauncherDeath(0.02)), scenario=Scenario(faults=faults, expect="tokens"))
    outcome = run_case(case)
    assert finish_reasons(outcome.result) == ("length",) * len(REQUESTS)


def test_a_seed_takes_the_same_course_again() -> None:
    case = case_of(3, LauncherDeath(0.02, "torn write"))
    assert run_case(case).digest == run_case(case).digest


def test_clients_of_a_dead_front_end_read_on_at_another_one() -> None:
    """`run_case` compares what each has got with what it gets then, and all tokens with the reference. Some clients do not come back; the
    request of one that was lost before its prompt is unknown."""
    num_back = num_whole = 0
    for seed in range(12):
        crashes = tuple(Crash(process=f"front_end.{number}", at_seconds=at) for number, at in enumerate((0.02, 0.035)))
        case = replace(case_of(seed), front_ends=2, scenario=Scenario(faults=crashes))
        outcome = run_case(case)
        assert outcome.result.failure is None
        num_back += outcome.num_faults["client came back"]
        num_whole += finish_reasons(outcome.result).count("length")
    assert num_back >= 12
    assert num_whole > 12 * len(REQUESTS) / 2
