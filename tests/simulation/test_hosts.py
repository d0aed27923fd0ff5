"""Runs on several hosts in virtual time: the end of a host, partitions and stops of host servers change no token and leave nothing."""

from __future__ import annotations

from typing import Literal

import pytest
from simulation.outcomes import finish_reasons
from simulation.test_deaths import SEEDS, load, requests, serve_under

from flowrt.reliability.scenario import PERMANENT_SECONDS, Crash, Cut, Fault, Pause, Stall
from flowrt.simulation.campaign import campaign
from flowrt.simulation.cases import draw

FILE = "hosts/two.yaml"
LINKS = [("gateway", "host.1"), ("attention.0", "experts.1"), ("attention.0", "attention.1"), ("experts.0", "attention.1")]


def partition(direction: Literal["both", "there", "back"]) -> list[Fault]:
    return [Cut(between=link, at_seconds=0.02, for_seconds=6.0, direction=direction) for link in LINKS]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "faults",
    [
        [Crash(process="host.1", at_seconds=0.02)],
        [Crash(process="host.1", at_seconds=0.02), Crash(process="host.1", at_seconds=2.0)],
        [Pause(process="host.1", at_seconds=0.02, for_seconds=6.0)],
        [Cut(between=("gateway", "host.1"), at_seconds=0.02, for_seconds=6.0)],
        *(partition(direction) for direction in ("both", "there", "back")),
    ],
    ids=["crash", "twice", "stop", "cut", "both", "there", "back"],
)
def test_the_loss_of_a_host_changes_no_token_and_its_processes_rejoin(seed: int, faults: list[Fault]) -> None:
    outcome = serve_under(seed, load(FILE), requests(8), *faults, expect="tokens")
    assert finish_reasons(outcome.result) == ("length",) * 8
    assert outcome.num_faults["restarted"] >= 2


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
    counts = campaign(draw(seed, [load(FILE, detector=True)]) for seed in (*range(20), 339))
    assert counts.failures == []
