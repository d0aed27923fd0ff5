"""The detector's benchmark: real processes are stopped, blocked and hung, and each is marked dead; one that is only slow is not."""

from __future__ import annotations

import pytest

from flowrt.bench.cases import detector
from flowrt.bench.cases.detector import count_false_deaths, detection_seconds, measure, times_text
from flowrt.bench.peers.heartbeats import BLOCK, HANG, SPIN


@pytest.fixture(autouse=True)
def stalls_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "STALL_EVERY_SECONDS", 1.6)


async def test_each_kind_of_standstill_is_marked_dead() -> None:
    """Stopped by a signal, asleep, busy, and a hung operation; the benchmark raises for a verdict on another process."""
    seconds = await detection_seconds(1, 2)
    assert set(seconds) == {"pause", BLOCK, SPIN, HANG}
    assert all(len(values) == 1 and values[0] > 0 for values in seconds.values())


async def test_a_crowd_is_not_marked_dead() -> None:
    found = await count_false_deaths(1.5, 4)
    assert found.false_deaths == []
    assert found.num_stalls >= 4
    assert found.longest_gap_seconds > 0.25  # they were stopped indeed


async def test_the_report_claims_an_hour_only_after_an_hour() -> None:
    (line,) = [line async for line in measure(0, 0.5, 1)]
    assert str(line).startswith("processes marked dead wrongly: 0 (target: 0; undecided: the claim is for an hour) in ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([1.05], "p50 1.050 s, worst 1.050 s of 1 (target: p99 <= 1.2 s; undecided)"),
        ([1.5], "p50 1.500 s, worst 1.500 s of 1 (target: p99 <= 1.2 s; undecided)"),
        ([1.0] * 20, "p50 1.000 s, worst 1.000 s of 20 (target: p99 <= 1.2 s; undecided)"),
        ([1.5] * 20, "p50 1.500 s, worst 1.500 s of 20 (target: p99 <= 1.2 s; not met)"),
        ([1.0] * 400, "p50 1.000 s, p99 1.000 s, worst 1.000 s of 400 (target: p99 <= 1.2 s; met)"),
    ],
)
def test_few_tries_claim_nothing(seconds: list[float], text: str) -> None:
    assert times_text(seconds) == text
