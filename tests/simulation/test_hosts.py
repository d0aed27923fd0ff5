"""Runs on several hosts in virtual time: the end of a host, partitions and stops of host servers change no token and leave nothing."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
from simulation.outcomes import finish_reasons
from simulation.test_deaths import GRAPHS, SEEDS, load, requests, serve_under

from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph
from flowrt.launcher.model_facts import facts_of
from flowrt.reliability.scenario import PERMANENT_SECONDS, Crash, Cut, Fault, Pause, Stall
from flowrt.simulation.campaign import campaign
from flowrt.simulation.cases import draw

FILE = "hosts/two.yaml"
LINKS = [("gateway", "host.1"), ("attention.0", "experts.1"), ("attention.0", "attention.1"), ("experts.0", "attention.1")]


Direction = Literal["both", "there", "back"]


def partition(direction: Direction) -> list[Fault]:
    return [Cut(between=link, at_seconds=0.02, for_seconds=6.0, direction=direction) for link in LINKS]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "faults",
    [
        [Crash(process="host.1", at_seconds=0.02)],
        [Crash(process="host.1", at_seconds=0.02), Crash(process="host.1", at_seconds=2.0)],
        [Pause(process="host.1", at_seconds=0.02, for_seconds=6.0)],
        [Cut(between=("gateway", "host.1"), at_seconds=0.02, for_seconds=6.0)],
        *(partition(direction) for direction in get_args(Direction)),
    ],
    ids=["crash", "twice", "stop", "cut", "both", "there", "back"],
)
def test_the_loss_of_a_host_changes_no_token_and_its_processes_rejoin(seed: int, faults: list[Fault]) -> None:
    outcome = serve_under(seed, load(FILE), requests(8), *faults, expect="tokens")
    assert finish_reasons(outcome.result) == ("length",) * 8
    assert outcome.num_faults["restarted"] >= 2


def on_three_hosts() -> Graph:
    settings = ("hosts.count=3", "deploy.attention.groups=3", "deploy.experts={servers: 3, replicas: 3}")
    graph = load_graph(GRAPHS / FILE, settings, facts_of=facts_of)
    return graph.replace(reliability=graph.reliability.replace(detector=False))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("second", get_args(Direction))
def test_two_partitions_at_once_change_no_token_and_both_hosts_rejoin(seed: int, second: Direction) -> None:
    """One host is cut off in both directions; while it is, another one too, perhaps one way."""
    graph = on_three_hosts()
    workers = [name for name in graph.process_names() if name.startswith(("attention", "experts"))]

    def cut_off(host: str, at_seconds: float, direction: Direction) -> list[Fault]:
        own = [name for name in workers if graph.host_of(name) == host]
        links = [("gateway", host), *((other, name) for name in own for other in workers if other not in own)]
        return [Cut(between=link, at_seconds=at_seconds, for_seconds=6.0, direction=direction) for link in links]

    faults = cut_off("host.1", 0.02, "both") + cut_off("host.2", 1.0, second)
    outcome = serve_under(seed, graph, requests(8), *faults, expect="tokens")
    assert finish_reasons(outcome.result) == ("length",) * 8
    assert outcome.num_faults["restarted"] >= 4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("process", ["experts.1", "attention.1"])
@pytest.mark.parametrize("kind", [Pause, Stall])
def test_a_process_that_stands_still_on_another_host_is_replaced(seed: int, process: str, kind: type[Pause | Stall]) -> None:
    fault = kind(process=process, at_seconds=0.02, for_seconds=PERMANENT_SECONDS)
    outcome = serve_under(seed, load(FILE, detector=True), requests(8), fault, expect="tokens")
    assert finish_reasons(outcome.result) == ("length",) * 8
    assert outcome.num_faults["restarted"] == 1


def test_a_run_without_recovery_may_end_with_a_host_that_is_cut_off() -> None:
    assert campaign([draw(64, [load(FILE, detector=True)])]).failures == []


def test_invariants_hold_under_drawn_faults() -> None:
    """The last one: a host dies while the launcher connects to its host server."""
    counts = campaign(draw(seed, [load(FILE, detector=True)]) for seed in (*range(10), 339))
    assert counts.failures == []
