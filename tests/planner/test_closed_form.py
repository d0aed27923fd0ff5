"""Steps in closed form: tensor parallelism, exchanges, two batches, split attention and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowrt.costs.devices import read_device
from flowrt.costs.exchange import fabric_of
from flowrt.costs.experts import largest_of
from flowrt.costs.models import read_model_card
from flowrt.errors import UserError
from flowrt.planner.closed_form import SplitDeployment, UniformDeployment, decode_step, prefill_step, sharded, split_layer

R1 = read_model_card("deepseek-r1", "fp8")
H800 = read_device("h800")


def deployment(**given: Any) -> UniformDeployment:
    return UniformDeployment(**{"model": R1, "device": H800, "fabric": fabric_of(H800), "ranks": 64, "dispatch_dtype": "fp8", **given})


def test_a_step_is_its_operators_and_its_gap() -> None:
    step = decode_step(deployment(gap_seconds=2e-3), 64, 2048)
    assert step.seconds == pytest.approx(sum(step.operators.values()) + 2e-3)
    assert step.share(*step.operators) == pytest.approx(1)
    assert step.layer.seconds == pytest.approx(step.layer.computing + step.layer.sending + step.layer.waiting)


def test_more_sequences_and_context_take_longer_and_give_more_tokens() -> None:
    seconds = [decode_step(deployment(), batch, 2048).seconds for batch in (8, 32, 128, 512)]
    assert seconds == sorted(seconds)
    assert [batch / time for batch, time in zip((8, 32, 128, 512), seconds, strict=True)] == sorted(
        batch / time for batch, time in zip((8, 32, 128, 512), seconds, strict=True)
    )
    assert decode_step(deployment(), 64, 8192).seconds > decode_step(deployment(), 64, 1024).seconds


def test_two_batches_pay_with_many_sequences_and_cost_with_few() -> None:
    """SGLang's blog: -27 % at 32 sequences per GPU, +25.5 % at 256."""
    one, two = ({batch: decode_step(deployment(batches=count), batch, 2048).seconds for batch in (8, 256)} for count in (1, 2))
    assert one[8] < two[8]
    assert one[256] > two[256]


def test_tensor_parallel_ranks_share_heads_and_widths() -> None:
    shard = sharded(R1, 8)
    assert (shard.num_heads, shard.expert_width, shard.shared_expert_width) == (16, 256, 256)
    assert shard.latent == R1.latent  # latents are repeated
    whole, shared = (decode_step(deployment(ranks=8, attention_tp=degree, expert_tp=degree), 8, 2048) for degree in (1, 8))
    assert shared.layer.attention < whole.layer.attention
    assert (shared.layer.dispatch, whole.layer.reduce) == (0, 0)
    assert shared.layer.reduce > 0
    with pytest.raises(UserError, match="tensor parallelism of 3 does not divide the heads, 128"):
        sharded(R1, 3)


def test_prompts_cost_their_quadratic_part() -> None:
    short, long = (prefill_step(deployment(), 16384, prompt).layer.attend for prompt in (1024, 8192))
    assert 5 < long / short < 8


def test_skew_slows_the_native_placement_and_balance_mends_it() -> None:
    even = decode_step(deployment(ranks=32, slots=9), 64, 2048).seconds
    native = decode_step(deployment(ranks=32, slots=9, skew=0.9, balanced=False), 64, 2048).seconds
    balanced = decode_step(deployment(ranks=32, slots=9, skew=0.9), 64, 2048).seconds
    assert even <= balanced < 1.2 * even < native


def test_drafted_tokens_add_rows_and_a_layer_each() -> None:
    one, two = decode_step(deployment(), 64, 2048), decode_step(deployment(draft_tokens=1, acceptance=0.9), 64, 2048)
    assert one.seconds < two.seconds < 1.9 * one.seconds
    assert two.operators["draft"] > 0 == one.operators["draft"]


def test_every_exchange_waits_for_the_slowest_rank() -> None:
    calm = decode_step(deployment(device=replace(H800, jitter=0.0)), 64, 2048)
    assert calm.layer.waiting == 0
    layer = decode_step(deployment(), 64, 2048).layer
    assert layer.waiting == pytest.approx(H800.jitter * largest_of(64) * layer.computing)
    assert layer.exchanged("dispatch") + layer.exchanged("combine") == pytest.approx(layer.dispatch + layer.combine + layer.waiting)
    assert (largest_of(1), largest_of(2)) == (0.0, pytest.approx(0.564, abs=0.005))


def test_split_attention_balances_at_some_number_of_replicas() -> None:
    a800, dbrx = read_device("a800"), read_model_card("dbrx")
    times = [
        split_layer(
            SplitDeployment(
                model=dbrx,
                attention=a800,
                experts=a800,
                attention_fabric=fabric_of(a800),
                expert_fabric=fabric_of(a800),
                replicas=replicas,
                attention_tp=2,
                expert_nodes=16,
                expert_tp=2,
            ),
            128,
            650,
        )
        for replicas in (1, 4, 16)
    ]
    assert times[0].experts_seconds < times[0].attention_seconds
    assert times[2].experts_seconds > times[2].attention_seconds
    assert times[0].exchange_seconds == pytest.approx(times[1].exchange_seconds)  # bound by what attention sends


@pytest.mark.parametrize("call", [lambda: decode_step(deployment(), 0, 2048), lambda: prefill_step(deployment(), 16, float("nan"))])
def test_impossible_loads_are_refused(call: Any) -> None:
    with pytest.raises(UserError, match="give more than 0"):
        call()
