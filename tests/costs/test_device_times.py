"""What a call of an operator costs on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrt.costs.devices import read_device
from flowrt.costs.models import read_model_card
from flowrt.costs.work import FiringLoad
from flowrt.graph.kinds import all_kinds, kind_of
from flowrt.kinds.attention import block_work
from flowrt.kinds.device_times import device_seconds, exchange_seconds

R1 = read_model_card("deepseek-r1")
H20 = read_device("h20")


def test_experts_are_read_once_and_their_efficiency_is_that_of_the_rows_of_each() -> None:
    experts, load = kind_of("experts"), FiringLoad(64, num_experts=4)
    expected = H20.seconds(experts.work(R1, load), "bfloat16", rows=16)
    assert device_seconds(H20, experts, R1, load) == pytest.approx(expected)
    assert device_seconds(H20, experts, R1, FiringLoad(64, 8)) > expected


def test_attention_reads_the_context_at_an_efficiency_of_its_own() -> None:
    load = FiringLoad(4096, 0, 4096 * 8192)
    before, attend, after = block_work(R1, load)
    products = sum(H20.seconds(work, "bfloat16", 4096) - H20.fixed_seconds for work in (before, after))
    expected = products + H20.fixed_seconds + H20.attend_seconds(attend, "bfloat16")
    assert device_seconds(H20, kind_of("attention"), R1, load) == pytest.approx(expected)


def test_products_with_weights_in_8_bits_run_at_the_rate_of_8_bits() -> None:
    load = FiringLoad(1 << 20, num_experts=1)
    wide, narrow = (device_seconds(H20, kind_of("experts"), read_model_card("deepseek-r1", weights), load) for weights in ("dtype", "int8"))
    assert wide / narrow == pytest.approx(2 * H20.efficiency(1 << 20, "int8") / H20.efficiency(1 << 20, "bfloat16"), rel=0.01)
    assert 1.5 < wide / narrow < 2  # what feeds the products is as fast for either


@pytest.mark.parametrize("name", [name for name, kind in all_kinds().items() if not name.startswith("transformers")])
def test_each_call_takes_its_fixed_part_unless_it_computes_nothing(name: str) -> None:
    seconds = device_seconds(H20, kind_of(name), R1, FiringLoad(1, 1, 1))
    assert seconds > H20.fixed_seconds if kind_of(name).work is not None else seconds == 0
    assert device_seconds(H20, kind_of(name), R1, FiringLoad(0)) == 0


def test_what_a_runtime_adds_counts_once_for_each_step_sequence_expert_firing_and_message() -> None:
    own = replace(H20, step_seconds=1.0, sequence_seconds=0.1, expert_seconds=0.01, firing_seconds=10.0, message_seconds=5.0)

    def added(kind: str, load: FiringLoad) -> float:
        return device_seconds(own, kind_of(kind), R1, load) - device_seconds(H20, kind_of(kind), R1, load)

    assert added("head", FiringLoad(3)) == pytest.approx(1.3)
    assert added("embed", FiringLoad(3)) == added("attention", FiringLoad(3, 0, 3)) == 0
    assert added("experts", FiringLoad(6, num_experts=4)) == pytest.approx(0.04)
    assert exchange_seconds(own, 4) == 30
    assert exchange_seconds(H20, 4) == 0


def test_a_model_in_a_dtype_with_constants_of_its_own_takes_these() -> None:
    slow, load = replace(H20, by_dtype={"bfloat16": replace(H20, fixed_seconds=1.0)}), FiringLoad(1)
    assert device_seconds(slow, kind_of("gate"), R1, load) - device_seconds(H20, kind_of("gate"), R1, load) == pytest.approx(1, rel=1e-4)
