"""The search: what it finds keeps its limits and its devices, no figure is NaN or negative, and what does not fit is answered."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest

from flowrt.costs.devices import Cluster, read_cluster
from flowrt.costs.models import read_model_card
from flowrt.errors import UserError
from flowrt.planner import memory
from flowrt.planner.inputs import read_hardware, read_slo
from flowrt.planner.instances import Slo, SplitInstance, UniformInstance, Workload, largest_rate
from flowrt.planner.plan_text import failure_text
from flowrt.planner.queues import waiting_seconds
from flowrt.planner.search import DeploymentPlan, Objective, Search, Task, frontier
from flowrt.planner.search import search as search_uncached
from flowrt.planner.strategies import parse_strategy

_FOUND: dict[str, Search] = {}
WORKLOAD, SLO = Workload(571, 159, 20.0), Slo(ttft=5.0, itl=0.15)


def task_of(hardware: str = "1xh20,2xl40s", objective: str = "throughput", slo: Slo = SLO, rate: float = 20.0) -> Task:
    return Task(read_model_card("mixtral-8x7b"), read_hardware(hardware), replace(WORKLOAD, rate=rate), slo, objective)  # type: ignore[arg-type]


def search(task: Task) -> Search:
    """Each task is searched once for all tests."""
    key = repr(task)
    if key not in _FOUND:
        _FOUND[key] = search_uncached(task)
    return _FOUND[key]


def check(plan: DeploymentPlan) -> None:
    for group, num in plan.devices.items():
        assert 0 < num <= plan.task.cluster.groups[group].num_devices
    numbers = [plan.max_rate, plan.price, plan.watts, plan.joules_per_token, *plan.rates]
    if plan.operation is not None:
        numbers += [plan.operation.ttft, plan.operation.itl, plan.operation.batch, plan.operation.prompt_share]
    assert all(number is None or (math.isfinite(number) and number >= 0) for number in numbers)


@pytest.mark.parametrize("objective", get_args(Objective))
def test_the_best_plan_of_each_objective_keeps_limits_and_is_best(objective: str) -> None:
    found = search(task_of(objective=objective))
    assert found.plans
    for plan in (*found.plans, *found.others):
        check(plan)
    for plan in found.plans:
        assert plan.operation is not None
        assert plan.operation.ttft <= SLO.ttft
        assert plan.operation.itl <= SLO.itl
        assert plan.max_rate >= 20.0 * (1 - 1e-6)
        assert plan.max_rate == min(count * rate for count, rate in zip(plan.counts, plan.rates, strict=True))  # of its own devices
    best = found.plans[0]
    if objective == "throughput":
        assert best.max_rate == max(plan.max_rate for plan in found.plans)
    if objective == "cost":
        assert best.price == min(plan.price or 0 for plan in found.plans)
    if objective == "latency":
        assert best.operation is not None
        assert best.operation.itl == min(plan.operation.itl for plan in found.plans if plan.operation is not None)


def test_stages_make_no_single_sequence_quicker() -> None:
    """A sequence passes all stages one after the other."""
    task = task_of(objective="latency")
    idle = replace(task, workload=replace(task.workload, rate=1e-3))
    one, staged = (search(replace(idle, only=parse_strategy(text))) for text in ("TP=4", "TP=4 [PP=2]"))
    itl = [min(plan.operation.itl for plan in found.plans if plan.operation is not None) for found in (one, staged)]
    assert itl[1] >= itl[0] * (1 - 1e-9)


def test_split_instances_mix_devices() -> None:
    found = search(task_of())
    mixed = [plan for plan in found.plans for each in plan.instances if isinstance(each, SplitInstance) and len(each.devices) == 2]
    assert mixed
    assert {type(each) for plan in found.plans for each in plan.instances} >= {UniformInstance, SplitInstance}


def test_more_requests_make_nothing_quicker() -> None:
    for plan in search(task_of()).plans[:20]:
        for instance in plan.instances:
            most = largest_rate(instance, SLO)
            steps = [instance.operate(most * share) for share in (0.1, 0.4, 0.7, 0.95)]
            times = [(each.ttft, each.itl) for each in steps if each is not None]
            assert len(times) == 4
            assert all(one[0] <= other[0] * 1.001 and one[1] <= other[1] * 1.001 for one, other in pairwise(times))


def test_the_frontier_gets_better_with_every_point() -> None:
    task = task_of()
    points = frontier(task, search(task).plans[:10])
    assert len(points) > 2
    assert all(one[0] < other[0] and one[1] < other[1] for one, other in pairwise(points))


def test_a_limit_that_cannot_be_kept_names_the_limit_that_can() -> None:
    tight = task_of(slo=Slo(ttft=5.0, itl=1e-3))
    found = search(tight)
    assert not found.plans
    needed = {each.limit: each.needed for each in found.relaxations}["itl"]
    assert search(replace(tight, slo=Slo(ttft=5.0, itl=needed * 1.02))).plans


@pytest.mark.parametrize(("slo", "rate"), [(Slo(itl=1e-3), 20.0), (SLO, 1e6)])
def test_what_does_not_fit_is_the_closest_first_with_a_reason(slo: Slo, rate: float) -> None:
    others = search(task_of(slo=slo, rate=rate)).others
    shortfalls = [plan.shortfall for plan in others]
    assert shortfalls == sorted(shortfalls)
    assert shortfalls[0] > 1
    for plan in others:
        assert all(plan.counts)
        assert " > 1.0 ms" in failure_text(plan) if slo.itl == 1e-3 else "of 1e+06 requests/s" in failure_text(plan)


def test_too_many_requests_name_the_rate_and_the_devices_that_fit() -> None:
    found = search(task_of("1xl40s", rate=1e4))
    needed = {each.limit: each.needed for each in found.relaxations}
    assert search(task_of("1xl40s", rate=needed["rate"] * 0.98)).plans
    assert needed["devices"] > 8


def test_a_model_that_is_too_large_names_the_devices_for_it() -> None:
    task = replace(task_of("1xl40s"), model=read_model_card("deepseek-r1"))
    (only,) = search(task).relaxations
    assert only.limit == "memory"
    assert only.needed * memory.usable_bytes(task.cluster.groups[0].device) >= memory.model_bytes(task.model)


def test_a_search_can_be_limited_to_one_strategy() -> None:
    from flowrt.planner.strategies import parse_strategy

    found = search(replace(task_of("1xl40s"), only=parse_strategy("TP=2 + DP=4, EP=8")))
    assert {str(each.strategy) for plan in found.plans for each in plan.instances if isinstance(each, UniformInstance)} == {
        "TP=2 + DP=4, EP=8"
    }


def test_an_objective_without_prices_is_refused() -> None:
    with pytest.raises(UserError, match="no price is known of"):
        search(replace(task_of(objective="cost"), cluster=read_cluster("superpod-384")))


def test_the_wait_for_one_server_follows_pollaczek_and_khinchine() -> None:
    assert waiting_seconds(0.5, 1.0, 1) == pytest.approx(0.5)
    assert waiting_seconds(0.5, 1.0, 1, variation=1.0) == pytest.approx(1.0)
    assert waiting_seconds(2.0, 1.0, 2) == math.inf


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h8000", "did you mean 'h800'"),
        ("3xh8000", "unknown device 'h8000'"),
        ("no-such", "clusters: .*devices: "),
        ("99999xh20,99999xh20", "at most"),
        ("1xh20,1xl40s,1xh800,1xa800,1xh100,1xh200,1xl20,1x910c,1x910b", "has 9 kinds of nodes, at most 8"),
    ],
)
def test_unknown_hardware_lists_what_exists(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_hardware(text)


def test_hardware_is_nodes_or_a_card() -> None:
    assert [group.num_devices for group in read_hardware("2xh20,3xl40s").groups] == [16, 24]
    assert [group.nodes for group in read_hardware("1xh20,1xl40s,2xh20").groups] == [3, 1]  # equal nodes are one group
    assert isinstance(read_hardware("h20-2x8"), Cluster)
    assert read_hardware("h20").num_devices == 8


@pytest.mark.parametrize("text", ["itl=50", "itl=0ms", "itl=-1ms", "tpot=50ms", "itl=nan", "itl", "itl=1s,itl=2s"])
def test_a_limit_needs_a_key_a_unit_and_a_time_above_0(text: str) -> None:
    with pytest.raises(UserError, match="--slo"):
        read_slo(text)
