"""Attention groups that die in virtual time: their requests move to other groups, and no token changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation.outcomes import errors, finish_reasons
from simulation.test_deaths import SEEDS, load, requests, serve_under

from flowrt.gateway.gateway import Gateway
from flowrt.gateway.router import Router
from flowrt.graph.model import GATEWAY
from flowrt.launcher.deaths import Deaths
from flowrt.reliability.scenario import PERMANENT_SECONDS, Crash, Fault, Hang, Pause, Scenario, SlowLink, Stall
from flowrt.simulation.case import Case, Poison
from flowrt.simulation.cases import references_of, run_case
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.invariants import ALONE_TEXT, MAX_VICTIMS, NO_GROUP_TEXT, check
from flowrt.simulation.processes import KILLED, ProcessConditions

FOREVER = {"at_seconds": 0.02, "for_seconds": PERMANENT_SECONDS}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "fault",
    [
        Crash(process="attention.0", at_seconds=0.02),
        Pause(process="attention.0", **FOREVER),
        Stall(process="attention.0", **FOREVER),
        Hang(process="attention.0", **FOREVER),
    ],
    ids=lambda fault: fault.kind,
)
def test_death_of_a_group_changes_no_token_and_its_next_incarnation_is_used(seed: int, fault: Fault) -> None:
    graph = load("2x3.yaml", detector=not isinstance(fault, Crash))
    outcome = serve_under(seed, graph, requests(8), fault, expect="tokens")
    assert finish_reasons(outcome.result) == ("length",) * 8
    assert outcome.num_faults["restarted"] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_survive_the_death_of_all_groups_and_a_server(seed: int) -> None:
    deaths = [Crash(process=name, at_seconds=0.02 + 5e-3 * seed * place) for place, name in enumerate(("attention.0", "attention.1"))]
    server = Crash(process="experts.1", at_seconds=0.03)
    outcome = serve_under(seed, load("2x3.yaml", lost_group_seconds=10.0), requests(8), *deaths, server, expect="tokens")
    assert finish_reasons(outcome.result) == ("length",) * 8
    assert outcome.num_faults["restarted"] == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_end_when_no_group_returns(seed: int) -> None:
    graph = load("2x3.yaml", restarts=0, lost_group_seconds=0.5)
    deaths = [Crash(process=name, at_seconds=0.05) for name in ("attention.0", "attention.1")]
    served = serve_under(seed, graph, requests(4), *deaths).result
    assert served.failure is None
    assert finish_reasons(served)[-1] == "error"
    assert NO_GROUP_TEXT in (errors(served)[-1] or "")
    case = Case(graph, tuple(requests(4)), Scenario(faults=tuple(deaths)))
    too_early = replace(served, clients=tuple(replace(client, no_group_seconds=0.3) for client in served.clients))
    with pytest.raises(InvariantError, match=NO_GROUP_TEXT):
        check(case, too_early, references_of(case))


def test_requests_that_wait_too_long_for_a_group_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "deadline", lambda self, waiting: None)
    graph = load("2x3.yaml", detector=True, restarts=0, lost_group_seconds=0.1)
    deaths = [Crash(process=name, at_seconds=0.02) for name in ("attention.0", "attention.1")]
    with pytest.raises(InvariantError, match=r"I5: request-\d+ still waits for a group"):
        serve_under(1, graph, requests(3), *deaths)


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_poison_ends_alone_after_three_victims(seed: int, hangs: bool) -> None:
    graph = load("2x3.yaml", detector=hangs)
    first, *others = requests(4, apart=1e-3)
    first = replace(first, prompt_token_ids=tuple(range(40, 60)))
    case = Case(graph, (first, *others), seed=seed)
    computed = {token for reference in references_of(case)[1:] for choice in reference for token in choice}
    outcome = run_case(replace(case, poison=Poison(max({*range(40, 60)} - computed), "hang" if hangs else "crash")))
    assert ALONE_TEXT in (errors(outcome.result)[0] or "")
    assert finish_reasons(outcome.result)[1:] == ("length",) * 3
    assert 1 <= outcome.num_faults["poisoned"] <= MAX_VICTIMS


def test_victim_too_many_of_a_poison_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gateway, "on_alone", lambda self, group, control: [])
    case = Case(load("2x3.yaml", restarts=3, lost_group_seconds=0.5), tuple(requests(1)), poison=Poison(5))
    with pytest.raises(InvariantError, match=r"I1: \d processes computed the poison"):
        run_case(case)


EARLY_NOTICES = ProcessConditions(unseen_one_in=0, unknown_one_in=0)


def test_requests_that_move_before_the_last_messages_are_read_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    on_dying = Deaths.on_dying

    def move_at_once(deaths: Deaths, process: str, how: str) -> None:
        on_dying(deaths, process, how)
        deaths.fence(process)

    monkeypatch.setattr(Deaths, "on_dying", move_at_once)
    slow = SlowLink(between=(GATEWAY, "attention.0"), for_seconds=1.0, factor=1000.0)
    case = Case(load("2x3.yaml"), tuple(requests(8)), Scenario(faults=(slow, Crash(process="attention.0", at_seconds=0.4))))

    def run_all() -> None:
        for seed in range(4):  # in some of them the notice comes before the exit status
            run_case(replace(case, seed=seed, processes=EARLY_NOTICES))

    with pytest.raises(InvariantError, match=r"I2: the loss of attention\.0 was announced, and \d+ messages of it were not read"):
        run_all()


def test_crash_that_is_taken_for_a_kill_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    on_dying = Deaths.on_dying
    monkeypatch.setattr(Deaths, "on_dying", lambda deaths, process, how: on_dying(deaths, process, how and KILLED))
    graph = load("2x3.yaml", restarts=1, lost_group_seconds=0.5)
    with pytest.raises(InvariantError, match=r"I7: attention\.\d was killed by SIGSEGV, but its loss was announced as"):
        run_case(Case(graph, tuple(requests(1)), poison=Poison(5), processes=EARLY_NOTICES))


@pytest.mark.parametrize("seed", SEEDS)
def test_drain_waits_for_requests_that_move(seed: int) -> None:
    case = Case(load("2x3.yaml"), tuple(requests(4, apart=1e-3)), Scenario(faults=(Crash(process="attention.0", at_seconds=0.02),)), seed)
    served = run_case(replace(case, drain_seconds=0.015)).result
    assert finish_reasons(served) == ("length",) * 4
