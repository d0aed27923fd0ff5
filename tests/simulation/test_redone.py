"""What is redone after a fault, in virtual time: exactly the unit of flowrt/reliability/fault_table.py, and no token changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from simulation.outcomes import errors, finish_reasons
from simulation.test_deaths import SEEDS, load, requests

from flowrt.engine.engine import Engine
from flowrt.engine.scheduler import Scheduler
from flowrt.exchange.expert_client import ExpertClient
from flowrt.gateway.gateway import Gateway
from flowrt.reliability.hedging import HedgingPolicy
from flowrt.reliability.scenario import PERMANENT_SECONDS, Crash, Hang, Reset, Scenario, Slow
from flowrt.simulation.case import Case, Glitch, Poison
from flowrt.simulation.cases import references_of, run_case
from flowrt.simulation.invariants import ALONE_TEXT, FAILED_TEXT, MAX_VICTIMS, NOT_FINITE_TEXT, max_victims
from flowrt.simulation.network_conditions import CALM

OPERATORS = ("embed", "attention", "gate", "experts", "combine", "head")


@pytest.fixture
def redone(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is redone, by unit."""
    counts = Counter[str]()
    for unit, owner, name in (
        ("step", Engine, "roll_back"),
        ("sequence", Scheduler, "recompute"),
        ("part", ExpertClient, "redispatch"),
        ("group", Gateway, "lose_group"),
        ("late part", HedgingPolicy, "spend"),
    ):
        function = getattr(owner, name)

        def counted(self: object, *arguments: object, unit: str = unit, function: object = function, **options: object) -> object:
            counts[unit] += 1
            return function(self, *arguments, **options)  # type: ignore[operator]

        monkeypatch.setattr(owner, name, counted)
    return counts


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("effect", "unit"), [("raise", "step"), ("nan", "sequence")])
def test_wrong_result_costs_one_step_or_one_sequence(operator: str, effect: str, unit: str, redone: Counter[str]) -> None:
    graph = load("2x3.yaml", hedge=False)
    for seed in SEEDS:
        redone.clear()
        outcome = run_case(Case(graph, tuple(requests(6, apart=1e-3)), seed=seed, glitch=Glitch(operator, effect, 9)))  # type: ignore[arg-type]
        assert outcome.num_faults["glitch"] == 1
        assert finish_reasons(outcome.result) == ("length",) * 6
        assert dict(redone) in ({unit: 1}, {unit: 0}, {}), "or none: a row whose logits are not sampled, of a sequence that has ended"


@pytest.mark.parametrize(("process", "unit"), [("experts.1", "part"), ("attention.0", "group")])
def test_killed_process_costs_its_parts_or_its_sequences(process: str, unit: str, redone: Counter[str]) -> None:
    for number in range(4):
        faults = (Crash(process=process, at_seconds=0.01 + 2e-3 * number),)
        case = Case(load("2x3.yaml", hedge=False), tuple(requests(8, apart=1e-3)), Scenario(faults=faults), number)
        assert finish_reasons(run_case(case).result) == ("length",) * 8
    assert redone[unit]
    assert not redone["step"]
    assert not redone["sequence"]


def test_lost_link_costs_one_process_and_its_parts(redone: Counter[str]) -> None:
    graph = load("2x3.yaml", hedge=False)
    graph = graph.replace(edges={name: replace(edge, transport="zmq") for name, edge in graph.edges.items()})  # nothing to fall back on
    for number in range(8):
        faults = (Reset(between=("attention.0", "experts.1"), at_seconds=0.01 + 2e-3 * number),)
        outcome = run_case(Case(graph, tuple(requests(8, apart=1e-3)), Scenario(faults=faults), number))
        assert finish_reasons(outcome.result) == ("length",) * 8
        assert outcome.num_faults["restarted"] == outcome.num_faults["reset"]
    assert set(redone) == {"part"}


def test_late_part_is_computed_once_more_at_a_replica(redone: Counter[str]) -> None:
    slow = Slow(process="experts.1", at_seconds=0.5, for_seconds=1.0, factor=300.0)
    for seed in SEEDS:
        case = Case(load("2x3.yaml"), tuple(requests(24, apart=0.04)), Scenario(faults=(slow,), expect="tokens"), seed, conditions=CALM)
        assert finish_reasons(run_case(case).result) == ("length",) * 24
    assert set(redone) == {"late part"}


def test_lack_of_pages_costs_one_sequence(redone: Counter[str]) -> None:
    for seed in SEEDS:
        assert finish_reasons(run_case(Case(load("tight.yaml"), tuple(requests(6, apart=0.0)), seed=seed)).result) == ("length",) * 6
    assert set(redone) == {"sequence"}


@pytest.mark.parametrize(("process", "unit"), [("experts.1", "step"), ("attention.0", "group")])
def test_hung_operation_costs_its_process_and_what_it_computed(process: str, unit: str, redone: Counter[str]) -> None:
    hang = Hang(process=process, at_seconds=0.05, for_seconds=PERMANENT_SECONDS)
    for seed in SEEDS:
        case = Case(load("2x3.yaml", detector=True, hedge=False), tuple(requests(8, apart=0.01)), Scenario(faults=(hang,)), seed)
        outcome = run_case(case)
        assert finish_reasons(outcome.result) == ("length",) * 8
        assert outcome.num_faults["marked dead"] == outcome.num_faults["restarted"] == 1
    assert set(redone) == {unit}


@pytest.mark.parametrize(
    ("effect", "text", "victims"),
    [("raise", FAILED_TEXT, 0), ("nan", NOT_FINITE_TEXT, 0), ("part", ALONE_TEXT, MAX_VICTIMS)],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_poison_ends_its_request_alone(seed: int, effect: str, text: str, victims: int) -> None:
    first, *others = requests(8, apart=1e-3)
    first = replace(first, prompt_token_ids=tuple(range(40, 60)))
    case = Case(load("2x3.yaml"), (first, *others), seed=seed)
    computed = {token for reference in references_of(case)[1:] for choice in reference for token in choice}
    poison = Poison(max({*range(40, 60)} - computed), effect)  # type: ignore[arg-type]
    outcome = run_case(replace(case, poison=poison))
    assert text in (errors(outcome.result)[0] or "")
    assert finish_reasons(outcome.result)[1:] == ("length",) * 7
    assert outcome.num_faults["poisoned"] <= victims


@pytest.mark.parametrize("seed", SEEDS)
def test_hedge_of_a_part_that_hangs_its_server_ends_its_request_alone(seed: int, redone: Counter[str]) -> None:
    """The request comes while others run, when response times are known: its part is late before its server is marked dead."""
    *others, last = requests(8, apart=1e-3)
    case = Case(load("2x3.yaml", detector=True), (*others, last), seed=seed + 1)
    computed = {token for request in others for token in request.prompt_token_ids}
    computed |= {token for reference in references_of(case)[:-1] for choice in reference for token in choice}
    token_id = max({*range(60)} - computed)
    last = replace(last, prompt_token_ids=(token_id,), after_seconds=0.06)
    case = replace(case, requests=(*others, last), poison=Poison(token_id, "hung_part"))
    outcome = run_case(case)
    assert ALONE_TEXT in (errors(outcome.result)[-1] or "")
    assert finish_reasons(outcome.result)[:-1] == ("length",) * 7
    assert 2 < outcome.num_faults["poisoned"] <= max_victims(case)
    assert redone["late part"]
