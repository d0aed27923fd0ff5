"""Processes that stop, by SIGSTOP, while no heartbeat shows that they run: the fork server, and processes that start."""

from __future__ import annotations

import pytest
from simulation.outcomes import finish_reasons
from simulation.test_deaths import SEEDS, load, requests

from flowrt.graph.model import FORK_SERVER, GATEWAY
from flowrt.reliability.scenario import PERMANENT_SECONDS, Crash, Pause, Scenario, SlowLink
from flowrt.simulation.case import Case
from flowrt.simulation.cases import run_case


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_stopped_fork_server_is_replaced_before_it_is_needed(seed: int) -> None:
    faults = (Pause(process=FORK_SERVER, at_seconds=0.1, for_seconds=PERMANENT_SECONDS),)
    case = Case(load("2x3.yaml", detector=True), tuple(requests(4, apart=0.6)), Scenario(faults=faults, expect="tokens"), seed)
    outcome = run_case(case)
    assert finish_reasons(outcome.result) == ("length",) * 4
    assert outcome.num_faults["fork server lost"] == outcome.num_faults["fork server restarted"] == 1


@pytest.mark.parametrize("process", ["attention.1", "experts.0"])
def test_process_that_stops_while_the_run_starts_is_started_again(process: str) -> None:
    faults = (Pause(process=process, at_seconds=0.02, for_seconds=PERMANENT_SECONDS),)
    case = Case(load("2x3.yaml", detector=True), tuple(requests(2)), Scenario(faults=faults), faults_from_launch=True)
    outcome = run_case(case)
    assert finish_reasons(outcome.result) == ("length",) * 2
    assert outcome.num_faults["marked dead"] == 1
    assert outcome.virtual_seconds < 10


def test_process_that_waits_for_the_fork_server_takes_a_standby_process_that_becomes_ready() -> None:
    late = SlowLink(between=(GATEWAY, "standby.0"), for_seconds=10.0, factor=300.0)
    ends = [Crash(process=FORK_SERVER, at_seconds=0.05 * number) for number in (1, 2, 3)]
    faults = (late, *ends, Crash(process="experts.1", at_seconds=0.2))
    graph = load("2x3.yaml", standby=1, restarts=9)
    num_used = 0
    for seed in SEEDS:
        outcome = run_case(Case(graph, tuple(requests(4, apart=0.3)), Scenario(faults=faults, expect="tokens"), seed))
        assert finish_reasons(outcome.result) == ("length",) * 4
        num_used += outcome.num_faults["standby process used"]
    assert num_used
