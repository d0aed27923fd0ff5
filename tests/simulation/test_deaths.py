"""Expert servers that die in virtual time: tokens stay correct while a replica is left, and restarted servers are used again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from simulation.outcomes import errors, finish_reasons

from flowrt.actors.outputs import ClientEvent, TokenEvent
from flowrt.exchange.failover import Failover
from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph
from flowrt.launcher.model_facts import facts_of
from flowrt.launcher.starts import Starts
from flowrt.operators.replica_table import UNAVAILABLE
from flowrt.reliability.scenario import AnyFault, Crash, Fault, Hang, Pause, Reset, Scenario, Slow, Stall
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.case import Case, SimulatedRequest
from flowrt.simulation.cases import references_of, run_case
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.invariants import check, may_fail
from flowrt.simulation.launchers import simulate
from flowrt.simulation.network_conditions import NetworkConditions
from flowrt.simulation.processes import ProcessConditions
from flowrt.simulation.served import Served
from flowrt.simulation.world import Outcome

GRAPHS = Path(__file__).resolve().parent / "graphs"
SEEDS = range(2)


def load(name: str, **settings: object) -> Graph:
    graph = load_graph(GRAPHS / name, facts_of=facts_of)
    return graph.replace(reliability=graph.reliability.replace(**{"detector": False, **settings}))


def requests(count: int, apart: float = 0.1) -> list[SimulatedRequest]:
    parameters = SamplingParams(max_tokens=6, ignore_eos=True)
    return [SimulatedRequest((5 + number, 6, 7, 8), parameters, after_seconds=apart) for number in range(count)]


def serve_under(
    seed: int, graph: Graph, submitted: list[SimulatedRequest], *faults: AnyFault, expect: str | None = None
) -> Outcome[Served]:
    return run_case(Case(graph, tuple(submitted), Scenario(faults=faults, expect=expect), seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_death_of_a_server_changes_no_token_and_its_next_incarnation_is_used(seed: int) -> None:
    graph = load("2x3.yaml")
    submitted = requests(8)
    outcome = serve_under(seed, graph, submitted, Crash(process=f"experts.{seed % 3}", at_seconds=0.12), expect="tokens")
    assert outcome.result.failure is None
    assert finish_reasons(outcome.result) == ("length",) * len(submitted)
    assert outcome.num_faults["crash"] == outcome.num_faults["restarted"] == 1


@pytest.mark.parametrize(("seed", "at_seconds"), [(6, 0.085), (8, 0.05)])
def test_server_is_restarted_when_its_exit_is_reported_just_before_the_run_is_ready(seed: int, at_seconds: float) -> None:
    """The server dies after it has connected, while others still connect. tests/launcher/test_run_state.py has the order of the notices."""
    outcome = crash_while_starting(seed, at_seconds)
    assert finish_reasons(outcome.result) == ("length",) * 3
    assert outcome.num_faults["restarted"] == 1


@pytest.mark.parametrize(("seed", "at_seconds"), [(0, 0.065), (3, 0.104)])
def test_server_that_dies_while_workers_connect_is_restarted(seed: int, at_seconds: float) -> None:
    """The control connection of a connected server ends, and its exit is reported, before the last worker has connected."""
    outcome = crash_while_starting(seed, at_seconds)
    assert finish_reasons(outcome.result) == ("length",) * 3
    assert outcome.num_faults["crash"] == outcome.num_faults["restarted"] + outcome.num_faults["died while loading"] == 1


def crash_while_starting(seed: int, at_seconds: float) -> Outcome[Served]:
    """Crash a server so many seconds after the launch. Its death is noticed by its exit and the end of its control connection only."""
    case = Case(
        load("2x3.yaml"),
        tuple(requests(3)),
        Scenario(faults=(Crash(process="experts.1", at_seconds=at_seconds),)),
        seed,
        NetworkConditions(max_delay_seconds=5e-3, tick_seconds=1e-3),
        processes=ProcessConditions(unseen_one_in=1),
        faults_from_launch=True,
    )
    return simulate(case)


def test_repeated_deaths_change_no_token() -> None:
    graph = load("2x3.yaml", restarts=9)
    submitted = requests(34, apart=0.3)
    num_repeated = 0
    for seed in range(3):
        faults = [Crash(process=f"experts.{number % 3}", at_seconds=0.02 + 3.2 * number) for number in range(4)]
        outcome = serve_under(seed, graph, submitted, *faults)
        assert finish_reasons(outcome.result) == ("length",) * len(submitted)
        assert outcome.num_faults["restarted"] >= 3
        num_repeated += outcome.num_faults["part redispatched"]
    assert num_repeated > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_wait_for_the_last_replica(seed: int) -> None:
    graph = load("tight.yaml")
    outcome = serve_under(seed, graph, requests(5), Crash(process="experts.1", at_seconds=0.05), expect="tokens")
    assert finish_reasons(outcome.result) == ("length",) * 5
    assert max(client.outage_seconds for client in outcome.result.clients) > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_end_when_the_last_replica_does_not_return(seed: int) -> None:
    graph = load("tight.yaml", restarts=0, unavailable_expert_seconds=0.5)
    outcome = serve_under(seed, graph, requests(8, apart=0.2), Crash(process="experts.1", at_seconds=0.05))
    served = outcome.result
    assert served.failure is None
    assert finish_reasons(served)[-1] == "error"
    assert "experts.1 went down and is not back" in (errors(served)[-1] or "")
    assert outcome.num_faults["stayed down"] == 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_requests_continue_degraded_when_the_graph_permits_it(seed: int, numerics: Literal["fast", "strict"]) -> None:
    graph = load("tight.yaml", restarts=0, unavailable_expert_seconds=0.5, unavailable_expert="degrade")
    graph = graph.replace(numerics=numerics, limits=graph.limits.replace(chunk_tokens=4))
    served = serve_under(seed, graph, requests(8, apart=0.2), Crash(process="experts.1", at_seconds=0.05)).result
    assert finish_reasons(served) == ("length",) * 8
    assert served.clients[-1].degraded == (tuple(range(6)),)


@pytest.mark.parametrize("seed", SEEDS)
def test_output_is_not_degraded_after_a_replica_is_back(seed: int) -> None:
    graph = load("tight.yaml", restarts=1, unavailable_expert_seconds=0.05, unavailable_expert="degrade")
    submitted = requests(6, apart=0.1) + requests(2, apart=8.0)
    outcome = serve_under(seed, graph, submitted, Crash(process="experts.1", at_seconds=0.02))
    assert finish_reasons(outcome.result) == ("length",) * 8
    assert outcome.num_faults["restarted"] == 1
    assert not any(outcome.result.clients[-1].degraded)


def _unmarked(event: ClientEvent) -> ClientEvent:
    return msgspec.structs.replace(event, degraded=False) if isinstance(event, TokenEvent) else event


def test_degraded_tokens_need_an_outage_of_the_configured_length() -> None:
    graph = load("tight.yaml", restarts=0, unavailable_expert_seconds=0.5, unavailable_expert="degrade")
    submitted = requests(8, apart=0.2)
    result = serve_under(0, graph, submitted, Crash(process="experts.1", at_seconds=0.05)).result
    case = Case(graph, tuple(submitted))
    references = references_of(case)
    shorter = replace(result, clients=tuple(replace(client, outage_seconds=0.3) for client in result.clients))
    unmarked = replace(
        result, clients=tuple(replace(client, events=[_unmarked(event) for event in client.events]) for client in result.clients)
    )
    for wrong, which in ((shorter, graph), (unmarked, graph), (result, load("tight.yaml"))):
        with pytest.raises(InvariantError, match="I1"):
            check(replace(case, graph=which), wrong, references)


def test_without_failover_a_death_ends_the_run() -> None:
    graph = load("2x3.yaml", recovery="off")
    crash = Crash(process="experts.1", at_seconds=0.05)
    assert may_fail(Case(graph, (), Scenario(faults=(crash,)))) == {"experts.1"}
    served = serve_under(0, graph, requests(4), crash).result
    assert served.failed == "experts.1"
    assert "was killed by SIGKILL" in (served.failure or "")


def test_a_server_that_dies_too_often_stays_down() -> None:
    graph = load("2x3.yaml", restarts=1, restart_window_seconds=30.0)
    faults = [Crash(process="experts.0", at_seconds=at) for at in (0.02, 3.2)]
    for seed in range(2):
        outcome = serve_under(seed, graph, requests(13, apart=0.3), *faults)
        assert finish_reasons(outcome.result) == ("length",) * 13
        assert (outcome.num_faults["restarted"], outcome.num_faults["stayed down"]) == (1, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_server_lost_by_the_launcher_is_started_again(seed: int) -> None:
    outcome = serve_under(seed, load("2x3.yaml"), requests(5), Reset(between=("gateway", "experts.2"), at_seconds=0.05))
    assert finish_reasons(outcome.result) == ("length",) * 5
    assert outcome.num_faults["restarted"] == 1


@pytest.mark.parametrize(
    ("fault", "num_marked_dead", "started_again"),
    [
        (Pause(process="experts.0", at_seconds=0.02, for_seconds=3.0), 1, 1),
        (Stall(process="experts.0", at_seconds=0.02, for_seconds=3.0), 1, 1),
        (Hang(process="experts.0", at_seconds=0.02, for_seconds=4.0), 0, 0),  # in its first call, which may read from disks
        (Hang(process="experts.0", at_seconds=1.0, for_seconds=4.0), 1, 1),
        (Pause(process="experts.0", at_seconds=0.02, for_seconds=0.3), 0, 0),
        (
            Slow(process="experts.0", at_seconds=0.02, for_seconds=3.0, factor=50.0),
            0,
            0,
        ),  # slow, but it sends heartbeats
        (Pause(process="gateway", at_seconds=0.02, for_seconds=2.0), 0, 0),
        (Pause(process="gateway", at_seconds=0.02, for_seconds=3.0), 0, 0),  # receives nothing, which is no evidence against others
        (Pause(process="monitor", at_seconds=0.5, for_seconds=0.9), 0, 0),
        (Crash(process="monitor", at_seconds=0.5), 0, 1),
    ],
    ids=lambda value: f"{value.kind}-{'-'.join(value.processes)}" if isinstance(value, Fault) else str(value),
)
def test_process_marked_dead_by_the_monitor(fault: Fault, num_marked_dead: int, started_again: int) -> None:
    graph = load("2x3.yaml", detector=True)
    outcome = serve_under(0, graph, requests(8, apart=0.6), fault)
    assert finish_reasons(outcome.result) == ("length",) * 8
    assert (outcome.num_faults["marked dead"], outcome.num_faults["restarted"]) == (num_marked_dead, started_again)


def test_first_call_of_a_restarted_process_has_no_longer_bound() -> None:
    faults = Crash(process="experts.0", at_seconds=1.0), Hang(process="experts.0", at_seconds=1.1, for_seconds=4.0)
    outcome = serve_under(0, load("2x3.yaml", detector=True), requests(8, apart=0.6), *faults)
    assert (outcome.num_faults["marked dead"], outcome.num_faults["restarted"]) == (1, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_wait_for_a_slow_server_that_is_the_only_holder(seed: int) -> None:
    slow = Slow(process="experts.1", at_seconds=1e-3, for_seconds=5.0, factor=50.0)
    outcome = serve_under(seed, load("uneven.yaml", recovery="fine"), requests(6), slow, expect="tokens")
    assert finish_reasons(outcome.result) == ("length",) * 6


def test_a_request_after_an_outage_is_served() -> None:
    graph = load("tight.yaml", unavailable_expert_seconds=0.1, restarts=3)
    submitted = [*requests(5), SimulatedRequest((5, 6, 7, 8), SamplingParams(max_tokens=6, ignore_eos=True), after_seconds=6.0)]
    refused = 0
    for seed in range(8):
        served = serve_under(seed, graph, submitted, Crash(process="experts.1", at_seconds=0.05)).result
        assert finish_reasons(served)[-1] == "length"
        refused += "error" in finish_reasons(served)
    assert refused > 0


def test_run_waits_for_a_call_that_outlasts_every_request() -> None:
    graph = load("tight.yaml", unavailable_expert_seconds=0.1, restarts=0)
    slow = Slow(process="attention.0", at_seconds=0.01, for_seconds=5.0, factor=4000.0)
    for seed in range(3):
        serve_under(seed, graph, requests(3, apart=0.02), slow, Crash(process="experts.1", at_seconds=0.02))


def test_process_with_heartbeats_is_not_suspected() -> None:
    graph = load("2x3.yaml", detector=True, suspect_seconds=0.05)  # beats are further apart than that
    with pytest.raises(InvariantError, match=r"I7: .* was suspected"):
        serve_under(0, graph, requests(8, apart=0.3))


def test_process_that_is_never_retried_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies twice within a window that permits one restart; the next start is due half a second later."""
    start_next = Starts.start_next

    def forget_retry(self: Starts, name: str) -> None:
        if not self._table.processes[name].is_given_up:
            start_next(self, name)

    monkeypatch.setattr(Starts, "start_next", forget_retry)
    deaths = [Crash(process="experts.1", at_seconds=seconds) for seconds in (0.02, 0.1, 0.2, 0.3)]
    with pytest.raises(InvariantError, match=r"I5: .* the next start of experts.1 is due at"):
        serve_under(0, load("2x3.yaml", restarts=1, restart_window_seconds=0.5), requests(4), *deaths)


def test_part_that_waits_for_an_available_replica_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    redispatch = Failover._redispatch_from
    monkeypatch.setattr(Failover, "_redispatch_from", lambda self, servers: None if UNAVAILABLE in servers else redispatch(self, servers))

    def serve_until_it_fails() -> None:
        for seed in range(20):  # whether a part waits at all is the seed's choice
            serve_under(seed, load("tight.yaml"), requests(5), Crash(process="experts.1", at_seconds=0.05))

    with pytest.raises(InvariantError, match=r"I5: part \d+ of .* waits at attention.0 since .* for an available replica"):
        serve_until_it_fails()


def test_errors_need_an_outage_of_the_configured_length() -> None:
    graph = load("tight.yaml", restarts=0, unavailable_expert_seconds=0.5)
    submitted = requests(8, apart=0.2)
    outcome = serve_under(0, graph, submitted, Crash(process="experts.1", at_seconds=0.05))
    case = Case(graph, tuple(submitted))
    references = references_of(case)
    shorter = replace(outcome.result, clients=tuple(replace(client, outage_seconds=0.3) for client in outcome.result.clients))
    with pytest.raises(InvariantError, match="I1"):
        check(case, shorter, references)
    with pytest.raises(InvariantError, match="I1"):
        check(replace(case, scenario=Scenario(expect="tokens")), outcome.result, references)
