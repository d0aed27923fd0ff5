"""Requests for far more tokens than a group holds: all are admitted, get what fits, and none starves."""

from __future__ import annotations

import pytest
from simulation.outcomes import finish_reasons
from simulation.test_deaths import load

from flowrt.reliability.scenario import Crash, Scenario
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.case import Case, SimulatedRequest
from flowrt.simulation.cases import run_case

MANY = SamplingParams(max_tokens=100_000, ignore_eos=True)
FEW = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize("name", ["2x3.yaml", "prefill.yaml", "tight.yaml"])
def test_many_requests_for_many_tokens_end_with_what_fits(name: str) -> None:
    graph = load(name)
    graph = graph.replace(limits=graph.limits.replace(max_tokens=None, kv_pages=graph.limits.kv_pages // 2))
    num_tokens = graph.limits.kv_pages * graph.limits.page_size
    together = [SimulatedRequest((5 + number, 6, 7), MANY if number % 4 else FEW, after_seconds=0.0) for number in range(10)]
    outcome = run_case(Case(graph, tuple(together), Scenario(expect="tokens")))
    assert finish_reasons(outcome.result) == ("length",) * 10
    lengths = [len(client.choices[0]) for client in outcome.result.clients]
    assert lengths == [num_tokens - 3 if number % 4 else 3 for number in range(10)]


def test_tokens_of_long_outputs_survive_the_death_of_their_group() -> None:
    graph = load("2x3.yaml")
    graph = graph.replace(limits=graph.limits.replace(max_tokens=None))
    together = tuple(SimulatedRequest((5 + number, 6, 7), MANY, after_seconds=0.0) for number in range(6))
    outcome = run_case(Case(graph, together, Scenario(faults=(Crash(process="attention.0", at_seconds=0.2),), expect="tokens")))
    assert finish_reasons(outcome.result) == ("length",) * 6
