"""What a call of an operator costs on a device."""

from __future__ import annotations

import pytest

from flowrt.costs.devices import read_device
from flowrt.costs.models import read_model_card
from flowrt.costs.work import FiringLoad
from flowrt.graph.kinds import all_kinds, kind_of
from flowrt.kinds.attention import block_work
from flowrt.kinds.device_times import device_seconds

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
    expected = products + H20.attention_seconds(attend, "bfloat16")
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
