"""Fleets: what is lost with devices, which sizes and hours need how many, and what the four recovery policies make of equal failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrt.costs.devices import read_device
from flowrt.costs.links import PROFILES
from flowrt.costs.models import read_model_card
from flowrt.errors import UserError
from flowrt.planner.deployment import AttentionGroup, Deployment, DeviceTimes, ExpertServer, even_map, message_bytes
from flowrt.planner.fleet import (
    Capacity,
    Losses,
    RecoveryTimes,
    ScalePoint,
    compare_policies,
    daily_needs,
    devices_by_hour,
    lost_one_by_one,
    read_daily,
    weak_scaling,
)


def test_sizes_whose_weights_do_not_fit_are_left_out() -> None:
    """64 GB of experts: two devices of 40 GB hold them, one does not."""
    whole = capacity_of(replicas=1, servers=2).deployment
    small = replace(read_device("h20"), memory_bytes=40e9)
    times = DeviceTimes(small, whole.model)
    whole = replace(
        whole,
        groups=tuple(replace(each, times=times) for each in whole.groups),
        servers=tuple(replace(each, times=times) for each in whole.servers),
    )
    assert whole.shortage() is None
    assert [each.servers for each in weak_scaling(Capacity(whole, 64, 1024))] == [2]
    assert str(replace(whole, servers=()).shortage()).startswith("attention.0 needs 61 GB")  # each group holds all experts
    tiny = DeviceTimes(replace(small, memory_bytes=20e9), whole.model)
    short = replace(whole, servers=tuple(replace(each, times=tiny) for each in whole.servers)).shortage()
    assert short is not None
    assert short.startswith("experts.0 needs 29 GB for weights and KV, h20 has 20 GB")


RECOVERY = RecoveryTimes(detect=1.0, restart=180.0, operator=1800.0)


def capacity_of(replicas: int, servers: int = 8) -> Capacity:
    model = read_model_card("qwen3-30b")
    times = DeviceTimes(read_device("h20"), model)
    dispatch, combine = message_bytes(model)
    deployment = Deployment(
        model=model,
        groups=tuple(AttentionGroup(f"attention.{number}", times) for number in range(4)),
        servers=tuple(ExpertServer(f"experts.{number}", times) for number in range(servers)),
        placement=even_map(model.num_experts, servers, replicas),
        micro_batches=2,
        link=PROFILES["roce-400g"],
        dispatch_bytes=dispatch,
        combine_bytes=combine,
    )
    return Capacity(deployment, 64, 1024)


def test_with_replicas_a_lost_server_costs_a_part_and_without_them_all() -> None:
    lost = Losses(servers=frozenset((3,)))
    assert capacity_of(1).tokens_per_second(lost) == 0.0
    two = capacity_of(2)
    assert 0.5 * two.whole < two.tokens_per_second(lost) <= 1.02 * two.whole
    assert two.tokens_per_second(Losses(frozenset(range(4)))) == 0.0
    assert two.tokens_per_second(Losses(servers=frozenset((0, 4)))) == 0.0  # both have the same experts


def test_devices_that_are_lost_one_by_one_leave_less_and_less() -> None:
    found = lost_one_by_one(capacity_of(2), 3, seed=1)
    assert len({name for name, _ in found}) == 3
    assert all(0 <= share <= 1.05 for _, share in found)
    assert found == lost_one_by_one(capacity_of(2), 3, seed=1)


def test_the_policies_are_in_the_order_of_what_they_restart() -> None:
    weeks, found = compare_policies(capacity_of(2), RECOVERY)
    assert weeks > 0
    products = [each.availability * each.throughput for each in found]
    assert [each.policy for each in found] == ["fine", "restart_role", "restart_all", "off"]
    assert products == sorted(products, reverse=True)
    assert all(0 < each.availability <= 1 and 0 < each.throughput <= 1 for each in found)
    fine, off = found[0], found[-1]
    assert fine.lost_per_failure < RECOVERY.restart < off.lost_per_failure
    assert off.lost_per_failure == pytest.approx(1981, rel=0.05)  # detection, start and operator, and what is computed again


def test_weak_scaling_has_odd_numbers_of_servers_and_grows() -> None:
    points = weak_scaling(capacity_of(2))
    assert any(point.servers % 2 for point in points)
    assert points[-1].servers == 8
    assert points[-1].tokens_per_second > points[0].tokens_per_second
    assert all(point.devices == point.groups + point.servers for point in points)


def test_single_steps_need_no_more_devices_than_whole_instances() -> None:
    points = [ScalePoint(2, 2, 4, 400.0), ScalePoint(3, 3, 6, 600.0), ScalePoint(4, 4, 8, 800.0)]
    needs = daily_needs([(0.0, 0.0), (6.0, 5.0), (12.0, 16.0), (18.0, 8.0)], 8.0, points)
    assert [need.fixed for need in needs] == [8, 8, 16, 8]
    assert [need.single for need in needs] == [4, 6, 16, 8]
    assert devices_by_hour(needs)["saved"] == pytest.approx(1 - 34 / 40)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", ":1: has no columns"),
        ("hour,requests_per_second\n1,-2\n", ":2: "),
        ("hour,requests_per_second\n1,nan\n", ":2: "),
        ("hour,requests_per_second\n1\n", ":2: "),
        ("hour,requests_per_second\n", "has 0 rows"),
    ],
)
def test_a_bad_day_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_daily(path)
    with pytest.raises(UserError, match="does not exist"):
        read_daily(tmp_path / "none.csv")
