"""Level L2: steps of small and large deployments, beside equations where these hold, and beside the runtime in virtual time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flowrt.costs.links import LinkProfile
from flowrt.costs.models import read_model_card
from flowrt.costs.ping_pong import PingPong
from flowrt.errors import UserError
from flowrt.graph.settings import Batching, ComputeCost
from flowrt.planner.deployment import AttentionGroup, ChargedTimes, Deployment, ExpertServer, ExpertSkew, even_map, message_bytes
from flowrt.planner.step import step_times

LINK = LinkProfile("link", 10e-6, 100e9, 1e-6)
TIMES = ChargedTimes(
    {
        "attention": ComputeCost(fixed_seconds=200e-6, row_seconds=1e-6),
        "experts": ComputeCost(fixed_seconds=60e-6, row_seconds=0.2e-6, expert_seconds=10e-6),
    }
)


def deployment(groups: int, servers: int, domains: int = 1, replicas: int = 1, **more: Any) -> Deployment:
    model = read_model_card("deepseek-r1")
    names = [f"attention.{number}.source" for number in range(groups)]
    domain_of = [number * domains // groups for number in range(groups)]
    turns = tuple(tuple(name for name, at in zip(names, domain_of, strict=True) if at == domain) for domain in range(domains))
    dispatch, combine = message_bytes(model)
    times = more.pop("times", TIMES)
    keys: dict[str, Any] = {
        "model": model,
        "groups": tuple(AttentionGroup(name, times, domain) for name, domain in zip(names, domain_of, strict=True)),
        "servers": tuple(ExpertServer(f"experts.{number}", times) for number in range(servers)),
        "placement": even_map(model.num_experts, servers, replicas),
        "micro_batches": 2,
        "batching": Batching(domains=turns) if domains > 1 else Batching(),
        "link": LINK,
        "dispatch_bytes": dispatch,
        "combine_bytes": combine,
    }
    return Deployment(**keys | more)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("exchange", [10e-6, 40e-6])
def test_one_group_and_one_server_follow_the_equations(micro_batches: int, exchange: float) -> None:
    pair = PingPong(100e-6, 60e-6, exchange)
    times = ChargedTimes({"attention": ComputeCost(fixed_seconds=100e-6), "experts": ComputeCost(fixed_seconds=60e-6)})
    link = LinkProfile("link", exchange / 2, 1e15, exchange / 2)
    found = step_times(deployment(1, 1, times=times, link=link, micro_batches=micro_batches), micro_batches, 100)
    model = read_model_card("deepseek-r1")
    dense = (model.num_layers - len(model.moe_layers)) * 100e-6 * micro_batches  # layers without experts: attention alone
    expected = len(model.moe_layers) * pair.period_seconds(micro_batches) + dense
    assert found.seconds == pytest.approx(expected, rel=0.05)
    assert found.level == "L2"


def test_equal_seeds_give_equal_steps_and_nothing_is_missing() -> None:
    found, repeated = (step_times(deployment(4, 4), 8, 1000) for _ in range(2))
    assert found.seconds == repeated.seconds
    assert found.by_group.shape == (4,)
    assert found.server_busy.shape == (4,)
    assert 0 < found.dispatch.least <= found.dispatch.mean <= found.dispatch.most
    assert found.dispatch.least >= LINK.latency_seconds
    assert found.operators["attention"] == pytest.approx(2 * 61 * 204e-6)
    assert found.slowest_rank[1] <= 1
    assert found.slowest_edge[2] >= LINK.latency_seconds
    assert found.tokens_per_second == pytest.approx(32 / found.seconds)


def test_skew_and_slow_groups_make_steps_longer() -> None:
    by_row = ChargedTimes({"attention": ComputeCost(fixed_seconds=50e-6), "experts": ComputeCost(row_seconds=5e-6)})
    even = step_times(deployment(4, 8, times=by_row), 32, 1000)
    skewed = step_times(deployment(4, 8, times=by_row, skew=ExpertSkew(0.9)), 32, 1000)
    assert skewed.seconds > 1.05 * even.seconds
    assert skewed.server_busy.max() > 1.05 * np.median(skewed.server_busy)
    counts = {layer: [0.0] * 8 + [1.0] * 248 for layer in read_model_card("deepseek-r1").moe_layers}
    assert step_times(replace(deployment(4, 8), counts=counts), 32, 1000).seconds > 0


def test_folded_ranks_agree_with_ranks_of_their_own() -> None:
    """The same deployment with all ranks, and with some of them."""
    for one in (deployment(16, 8), deployment(15, 8, domains=3)):
        exact, folded = (step_times(one, 16, 1000, max_ranks=ranks, max_layers=4) for ranks in (64, 20))
        assert folded.seconds == pytest.approx(exact.seconds, rel=0.1)
        assert folded.by_group.shape == exact.by_group.shape


def test_a_layer_that_is_not_run_takes_the_mean_of_the_others() -> None:
    few, many = (step_times(deployment(2, 2), 8, 1000, max_layers=layers) for layers in (6, 30))
    assert few.seconds == pytest.approx(many.seconds, rel=0.05)


def test_a_step_of_768_dies_and_61_layers_is_quick() -> None:
    one = deployment(480, 288, domains=3, replicas=2)
    start = time.process_time()
    found = step_times(one, 96, 3000)
    assert time.process_time() - start < 3  # 1 s on a quiet machine
    assert len(found.by_group) == 480
    assert 0.02 < found.seconds < 0.2


def test_numbers_that_are_not_positive_are_refused() -> None:
    for batch, context in ((0, 10), (-1, 10), (float("nan"), 10), (1, 0), (1, float("inf"))):
        with pytest.raises(UserError):
            step_times(deployment(2, 2), batch, context)
    with pytest.raises(UserError, match="no server holds expert 0"):
        replace(deployment(2, 2), placement=deployment(2, 2).placement.without_servers([0]))
    with pytest.raises(UserError, match="counts of layer 3"):
        step_times(replace(deployment(2, 2), counts={3: [1.0]}), 4, 10)


def test_ranks_that_share_devices_compute_in_turns() -> None:
    local, apart = replace(deployment(2, 1), servers=()), step_times(deployment(4, 4), 4, 100)
    assert step_times(replace(local, shared_devices=1), 4, 100).seconds == pytest.approx(2 * step_times(local, 4, 100).seconds)
    assert step_times(deployment(4, 4, shared_devices=8), 4, 100).seconds == pytest.approx(apart.seconds)
    shared = step_times(deployment(4, 4, shared_devices=2), 4, 100)
    busy = 4 * sum(shared.operators.values()) / 2  # of four groups and four servers, on two devices
    assert busy <= shared.seconds * 1.01 < 1.2 * busy
    assert shared.seconds > 1.5 * apart.seconds
