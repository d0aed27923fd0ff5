"""The number of micro-batches follows the load: the fastest one is found, and another one when the load changes."""

from __future__ import annotations

from collections.abc import Callable

from flowrt.engine.micro_batches import REMEASURE_STEPS, MicroBatchCount, load_of

StepSeconds = Callable[[int, int], float]  # by micro-batches in use and sequences


def decode(chooser: MicroBatchCount, num_sequences: int, num_steps: int, step_seconds: StepSeconds, now: float = 0.0) -> list[int]:
    """The numbers in use in `num_steps` steps of evenly filled micro-batches."""
    numbers = []
    for _ in range(num_steps):
        used = min(chooser.number, num_sequences)
        now += step_seconds(used, num_sequences) / used  # one of the micro-batches ends its step
        numbers.append(chooser.step_done(now, num_sequences // used, num_sequences, is_decode=True))
    return numbers


def exchange_bound(micro_batches: int, num_sequences: int) -> float:
    """The exchange takes as long as computing one sequence: three micro-batches hide it, a fourth gains nothing."""
    return max(3.0, micro_batches) * (1.0 + 0.1 * (micro_batches > 3)) * num_sequences / micro_batches


def bound_by_fixed_cost(micro_batches: int, num_sequences: int) -> float:
    """Each batch costs the same whatever its size: one batch is best."""
    return float(micro_batches)


def test_the_number_that_hides_the_exchange_is_found() -> None:
    numbers = decode(MicroBatchCount(4), 12, 400, exchange_bound)
    assert numbers[-1] == 3
    assert numbers[100:].count(3) > 0.9 * 300


def test_one_batch_is_found_where_each_batch_costs_the_same() -> None:
    assert decode(MicroBatchCount(4), 12, 400, bound_by_fixed_cost)[-1] == 1


def test_another_load_begins_with_the_choice_of_the_nearest() -> None:
    chooser = MicroBatchCount(4)
    decode(chooser, 12, 400, bound_by_fixed_cost)
    assert chooser.step_done(1000.0, 16, 16, is_decode=True) == 1  # another load: as at 12, until it is measured
    assert decode(chooser, 16, 400, exchange_bound, 1000.0)[-1] == 3


def test_a_number_is_tried_again_after_a_while() -> None:
    chooser = MicroBatchCount(2)
    assert decode(chooser, 8, 200, bound_by_fixed_cost)[-1] == 1
    later = decode(chooser, 8, 2 * REMEASURE_STEPS, exchange_bound, 1000.0)
    assert later[-1] == 2


def test_there_are_never_more_micro_batches_than_sequences_or_than_the_graph_has() -> None:
    chooser = MicroBatchCount(3)
    for num_sequences in (1, 2, 5, 1, 9):
        assert max(decode(chooser, num_sequences, 60, exchange_bound)) <= 3
        assert chooser.number <= num_sequences


def test_steps_with_prompts_are_not_compared() -> None:
    chooser = MicroBatchCount(2)
    numbers = {chooser.step_done(float(second), 500, 8, is_decode=False) for second in range(100)}
    assert numbers == {2}


def test_loads_are_the_same_within_a_fifth() -> None:
    assert [load_of(number) for number in range(1, 10)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert load_of(100) == load_of(107)
    assert load_of(100) < load_of(130)


def test_a_pause_in_a_window_is_not_measured() -> None:
    """A server that dies stops every step for a second."""
    chooser, now = MicroBatchCount(4), 0.0
    numbers = []
    for step in range(1200):
        used = chooser.number
        now += exchange_bound(used, 12) / used + (500.0 if step % 150 == 100 else 0.0)
        numbers.append(chooser.step_done(now, 12 // used, 12, is_decode=True))
    assert numbers[100:].count(3) > 0.9 * 1100
