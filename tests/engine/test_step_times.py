"""Batches composed to a target time: the fitted cost of a step, and what the scheduler takes into one."""

from __future__ import annotations

import pytest
from engine.toy_group import KV_SECONDS, ROW_SECONDS, ToyGroup, request

from flowrt.engine.step_times import MIN_PROMPT_ROWS, StepBudget, StepTimes, fit
from flowrt.graph.settings import ComputeCost, GraphLimits

TRUTH = ComputeCost(fixed_seconds=2e-3, row_seconds=1e-4, kv_token_seconds=1e-6)
SIZES = [(1, 40), (8, 500), (64, 64), (32, 9000), (512, 512), (200, 3000)]


def factors(cost: ComputeCost | None) -> tuple[float, float, float]:
    assert cost is not None
    return cost.fixed_seconds, cost.row_seconds, cost.kv_token_seconds


def seconds(num_rows: int, num_kv_tokens: int, cost: ComputeCost = TRUTH) -> float:
    return cost.seconds(num_rows, num_kv_tokens=num_kv_tokens)


def test_the_factors_are_found_from_steps_of_several_sizes() -> None:
    assert factors(fit([(*size, seconds(*size)) for size in SIZES])) == pytest.approx(factors(TRUTH))
    times = StepTimes()
    for size in SIZES:
        times.observe(*size, seconds(*size))
    assert factors(times.cost) == pytest.approx(factors(TRUTH))


def test_no_factor_is_negative_and_one_size_is_explained_by_its_rows() -> None:
    assert factors(fit([(8, 100, 0.08)])) == pytest.approx((0.0, 0.01, 0.0))
    falling = fit([(8, 100, 0.08), (8, 1000, 0.07), (16, 100, 0.16)])  # as if context made steps faster
    assert min(factors(falling)) >= 0
    assert falling.row_seconds == pytest.approx(0.01, rel=0.1)


def test_times_of_a_machine_that_gets_slower_are_learned() -> None:
    times = StepTimes()
    assert times.cost is None
    times.observe(8, 100, 0.0)
    assert times.cost is None, "a clock that stands still says nothing"
    for factor in (1.0, 3.0):
        for _ in range(40):
            for size in SIZES:
                times.observe(*size, factor * seconds(*size))
        assert factors(times.cost) == pytest.approx([factor * each for each in factors(TRUTH)], rel=0.01)


def test_a_budget_has_the_rows_of_its_time() -> None:
    budget = StepBudget(512, 0.012, TRUTH)
    assert budget.num_prompt_rows(0) == int(0.01 / 1.01e-4)
    assert budget.num_prompt_rows(5000) == int(0.005 / 1.01e-4)
    assert budget.has_room(9000)
    budget.take(1, 9000)
    assert not budget.has_room(1000)
    assert budget.num_prompt_rows(0) == MIN_PROMPT_ROWS, "one prompt advances in each step"
    budget.take(MIN_PROMPT_ROWS, 500)
    assert budget.num_prompt_rows(0) == 0


def test_without_a_target_or_a_known_cost_only_rows_bound_a_step() -> None:
    for budget in (StepBudget(30, 0.0, TRUTH), StepBudget(30, 0.01, None)):
        assert budget.has_room(10**6)
        assert budget.num_prompt_rows(10**6) == 30
        budget.take(30, 30)
        assert budget.num_prompt_rows(0) == 0


def test_a_target_below_the_fixed_part_does_not_make_steps_of_one_row() -> None:
    assert StepBudget(512, 1e-6, TRUTH).num_prompt_rows(0) == int(2e-3 / 1.01e-4)


LIMITS = GraphLimits(max_num_seqs=8, kv_pages=64, page_size=4, max_tokens=40, max_num_batched_tokens=64, enable_prefix_caching=False)


def step_seconds(group: ToyGroup) -> list[float]:
    return [1.0 + ROW_SECONDS * batch.num_rows + KV_SECONDS * sum(batch.kv_lengths) for _, batch in group.batches]


def test_steps_take_the_target_time_once_their_cost_is_known() -> None:
    requests = [request(f"r{number}", range(1, 50), 8, number, ignore_eos=True) for number in range(12)]
    longest = []
    for target in (0.0, 3.0):
        group = ToyGroup(LIMITS.replace(target_step_seconds=target, max_num_seqs=4))
        group.submit(*requests)
        group.run()
        group.check_outputs(*requests)
        longest.append(max(step_seconds(group)[4:]))  # the first steps show the cost
    assert longest[0] > 5.0
    assert longest[1] < 3.3


def test_decoding_sequences_that_a_step_leaves_out_come_first_in_the_next() -> None:
    group = ToyGroup(LIMITS)
    group.submit(*(request(f"r{number}", range(1, 20), 30, number, ignore_eos=True) for number in range(4)))
    scheduler = group.engine._scheduler
    for _ in range(3):
        group.step()
    group.batches.clear()
    scheduler._limits = LIMITS.replace(target_step_seconds=1.0)
    scheduler.step_times.cost = ComputeCost(kv_token_seconds=1 / 50)  # two of these contexts in a second
    for _ in range(4):
        group.step()
    names = [[name.split("/")[0] for name in batch.sequence_names] for _, batch in group.batches]
    assert names == [["r0", "r1"], ["r2", "r3"], ["r0", "r1"], ["r2", "r3"]]
