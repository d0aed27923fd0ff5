"""The detector's benchmark: real processes are stopped, blocked and hung, and each is condemned; slow ones are stalled and counted."""

from __future__ import annotations

import pytest

from flowrt.bench.detector import measure, notice, wrongly


@pytest.mark.slow
async def test_whoever_stands_still_is_condemned() -> None:
    seconds = await notice(1, 2)
    assert set(seconds) == {"pause", "block", "hang"}
    assert all(len(values) == 1 and values[0] > 0 for values in seconds.values())


async def test_stalls_on_a_crowded_machine_are_made_and_counted() -> None:
    """Whether somebody is condemned wrongly is the machine's answer, for the benchmark to tell; the rules have tests without a clock."""
    found = await wrongly(1.0, 3)
    assert found.num_stalls >= 3
    assert found.longest_gap_seconds > 0.25  # they were stopped indeed
    assert all(": no beat for" in each or ": '" in each for each in found.condemned)


async def test_what_is_told() -> None:
    told = [each async for each in measure(0, 0.5, 1)]
    assert len(told) == 1
    assert str(told[0]).startswith("false evictions: 0 (target: 0) in 0 s, 1 processes computing on ")
