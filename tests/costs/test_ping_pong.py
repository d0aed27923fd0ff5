"""The equations of the ping-pong pipeline (MegaScale-Infer section 4.1)."""

from __future__ import annotations

import math

import pytest

from flowrt.costs.ping_pong import PingPong


@pytest.mark.parametrize(("share", "smallest"), [(0.0, 2), (0.1, 3), (0.5, 3), (0.51, 4), (0.99, 4)])
def test_the_smallest_number_of_micro_batches(share: float, smallest: int) -> None:
    """The paper: at least 3 where T_c < T_f / 2, at least 4 for slower links."""
    times = PingPong(1.0, 1.0, share)
    assert times.smallest_micro_batches() == smallest
    assert times.fills_pipeline(smallest)
    assert not times.fills_pipeline(smallest - 1)
    assert times.hides_exchange()


def test_equations_agree_where_the_pipeline_is_filled() -> None:
    times, micro_batches, layers = PingPong(1.0, 0.9, 0.3), 3, 60
    assert times.total_seconds(micro_batches, layers) == pytest.approx(1.0 + 0.9 + 0.6 + 1.0 * (3 * 60 - 1))
    assert times.step_seconds(micro_batches, layers) == pytest.approx(times.total_seconds(micro_batches, layers))
    least, most = times.iteration_bounds(micro_batches, layers)
    assert least == pytest.approx(2.5 + 3 * 59)
    assert most == 180.0
    assert least <= times.period_seconds(micro_batches) * layers <= most


def test_one_micro_batch_overlaps_nothing() -> None:
    times = PingPong(2.0, 1.0, 0.5)
    assert times.step_seconds(1, 10) == pytest.approx(10 * 4.0)
    assert not times.is_balanced()
    assert PingPong(1.0, 0.95, 1.5).is_balanced()
    assert not PingPong(1.0, 1.0, 1.0).hides_exchange()


@pytest.mark.parametrize("times", [(0.0, 1.0, 0.1), (1.0, -1.0, 0.1), (1.0, 1.0, -0.1), (math.inf, 1.0, 0.1), (1.0, math.nan, 0.1)])
def test_impossible_times_are_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="times must be finite and positive"):
        PingPong(*times)
