"""Level L2 for traffic: every token is counted, queues form when they must, and prefill workers and prefix caches have their effect."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from planner.test_step import TIMES, deployment

from flowrt.costs.devices import read_device
from flowrt.errors import UserError
from flowrt.planner.deployment import AttentionGroup, DeviceTimes
from flowrt.planner.requests import traffic_times
from flowrt.planner.step import StepLoad, prefill_times, step_times, times_of_loads
from flowrt.planner.traffic import RequestArrival, Traffic, drawn_traffic


def small(**keys: int) -> Traffic:
    return drawn_traffic(200, 20, num_requests=40, **keys)


def test_every_request_gets_all_its_tokens() -> None:
    seen: list[tuple[int, int]] = []
    found = traffic_times(deployment(2, 2), small(concurrency=8), on_progress=lambda ended, total: seen.append((ended, total)))
    assert found.num_output == 40 * 20
    assert len(found.gaps) == 40 * 19
    assert seen[-1] == (40, 40)
    assert all(after[0] == before[0] + 1 for before, after in pairwise(seen))
    assert np.isfinite(found.first_tokens).all()
    assert (found.latencies >= found.first_tokens).all()
    assert (found.queued >= 0).all()
    assert found.level == "L2"
    assert 0 < max(found.busy.values()) <= 1.01


def test_a_lone_request_takes_the_steps_that_step_times_predicts() -> None:
    one = deployment(1, 1)
    found = traffic_times(one, Traffic("one", (RequestArrival(0.0, 100, 11),)))
    assert found.gaps == pytest.approx(np.full(10, step_times(one, 1, 105, max_ranks=24, max_layers=6).seconds), rel=0.05)


@pytest.mark.parametrize(("num_groups", "num_servers"), [(1, 1), (1, 2), (2, 2)])
def test_prompts_that_come_at_once_take_the_steps_of_their_rows(num_groups: int, num_servers: int) -> None:
    """The first prompt of a group is alone in its step; the others have the next one to themselves, with the first one's next token."""
    one = replace(deployment(num_groups, num_servers), max_batched_tokens=2048, max_num_seqs=16, micro_batches=1)
    found = traffic_times(one, Traffic("at once", (RequestArrival(0.0, 64, 4),) * (num_groups * 9)))
    alone, together = (times_of_loads(one, [[StepLoad(rows, rows, 32.5 * rows, rows / 64)]] * num_groups).seconds for rows in (64, 512))
    assert found.first_tokens.max() == pytest.approx(alone + together, rel=0.15)


def test_layers_that_are_not_run_take_the_time_of_their_own_group() -> None:
    """deepseek-r1 has 58 layers with experts: a prompt beside a decoding sequence takes as long as all of them."""
    loads = [[StepLoad(512, 512, sampled=1)], [StepLoad(1, 100)]]
    two = replace(deployment(2, 2), micro_batches=1)
    few, all_layers = (times_of_loads(two, loads, max_layers=most, apart=True).by_group for most in (6, 58))
    assert few == pytest.approx(all_layers, rel=0.1)
    assert few[0] > 1.5 * few[1]


@pytest.mark.parametrize("concurrency", [1, 12])
def test_many_colocated_groups_serve_little_traffic(concurrency: int) -> None:
    many = deployment(32, 32)
    many = replace(many, groups=tuple(replace(group, home=number) for number, group in enumerate(many.groups)))
    found = traffic_times(many, drawn_traffic(100, 3, concurrency=concurrency, num_requests=14))
    assert found.num_output == 14 * 3


def test_the_tokens_that_a_long_prompt_attends_to_count() -> None:
    times = DeviceTimes(read_device("h20"), deployment(1, 1).model)
    one = replace(deployment(1, 1, times=times), max_batched_tokens=1 << 15, micro_batches=1)
    found = traffic_times(one, Traffic("one", (RequestArrival(0.0, 20_000, 2),)))
    assert found.first_tokens[0] == pytest.approx(prefill_times(one, 20_000, 20_000).seconds, rel=0.15)


def test_queues_form_above_the_capacity() -> None:
    one = replace(deployment(2, 2), max_num_seqs=4)
    slow, fast = (traffic_times(one, small(rate=rate)) for rate in (1, 1000))
    assert fast.max_waiting > slow.max_waiting
    assert np.percentile(fast.first_tokens, 90) > 3 * np.percentile(slow.first_tokens, 90)


def test_prefill_workers_keep_prompts_out_of_decode_steps() -> None:
    together = deployment(2, 2)
    apart = replace(deployment(1, 2), prefill=(AttentionGroup("prefill.0.source", TIMES),))
    traffic = drawn_traffic(1000, 20, rate=6.0, num_requests=12)
    mixed, split = traffic_times(together, traffic), traffic_times(apart, traffic)
    assert split.num_output == mixed.num_output
    assert np.percentile(split.gaps, 99) < np.percentile(mixed.gaps, 99)


def test_prompts_that_begin_alike_are_computed_once() -> None:
    blocks = tuple(range(8))
    alike = Traffic("alike", tuple(RequestArrival(1.0 * number, 4096, 4, blocks) for number in range(6)))
    different = Traffic("different", tuple(replace(each, blocks=()) for each in alike.arrivals))
    cached, plain = (traffic_times(deployment(1, 1), each) for each in (alike, different))
    assert cached.first_tokens[1:].mean() < 0.5 * plain.first_tokens[1:].mean()
    assert cached.first_tokens[0] == pytest.approx(plain.first_tokens[0])


def test_drafts_give_several_tokens_in_a_step() -> None:
    one = replace(deployment(1, 1), draft_tokens=1, acceptance=0.9)
    found = traffic_times(one, Traffic("one", (RequestArrival(0.0, 100, 39),)))
    assert found.num_output == 39
    assert np.count_nonzero(found.gaps) == pytest.approx(38 / 1.9, abs=1)


def test_requests_without_room_are_refused() -> None:
    with pytest.raises(UserError, match="has room for 100"):
        traffic_times(replace(deployment(1, 1), kv_tokens=100), small(concurrency=1))
    with pytest.raises(UserError, match="no request"):
        traffic_times(deployment(1, 1), Traffic("none", ()))
