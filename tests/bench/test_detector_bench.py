"""The detector's benchmark: real processes are stopped, blocked and hung, and each is condemned; one that is only slow is not."""

from __future__ import annotations

import pytest

from flowrt.bench.detector import measure, notice, told_times, wrongly
from flowrt.reliability.detector import Timeouts


@pytest.mark.slow
async def test_whoever_stands_still_is_condemned() -> None:
    seconds = await notice(1, 2)
    assert set(seconds) == {"pause", "block", "hang"}
    assert all(len(values) == 1 and values[0] > 0 for values in seconds.values())


async def test_whoever_is_only_slow_is_not() -> None:
    """A machine that gives somebody no processor for longer than `dead_seconds` is not what this promises about: then his beats did not
    come, here either. An hour of stalls by a clock of its own is in tests/reliability/test_detector_hour.py."""
    found = await wrongly(1.0, 3)
    assert found.condemned == [] or found.longest_gap_seconds > Timeouts().dead_seconds
    assert all(": no heartbeat for" in each for each in found.condemned), "nobody hung"
    assert found.num_stalls >= 3
    assert found.longest_gap_seconds > 0.25  # they were stopped indeed


async def test_what_is_told() -> None:
    told = [each async for each in measure(0, 0.5, 1)]
    assert len(told) == 1
    assert str(told[0]).startswith(
        "false evictions: 0 (target: 0; not resolved: the claim is for an hour) in 0 s, 1 processes computing on "
    )


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ([1.05], "p50 1.050 s, worst 1.050 s of 1 (target: p99 <= 1.2 s; not resolved)"),
        ([1.5], "p50 1.500 s, worst 1.500 s of 1 (target: p99 <= 1.2 s; not resolved)"),
        ([1.0] * 20, "p50 1.000 s, worst 1.000 s of 20 (target: p99 <= 1.2 s; not resolved)"),
        ([1.5] * 20, "p50 1.500 s, worst 1.500 s of 20 (target: p99 <= 1.2 s; not met)"),
        ([1.0] * 400, "p50 1.000 s, p99 1.000 s, worst 1.000 s of 400 (target: p99 <= 1.2 s; met)"),
    ],
)
def test_few_tries_claim_nothing(seconds: list[float], told: str) -> None:
    assert told_times(seconds) == told
