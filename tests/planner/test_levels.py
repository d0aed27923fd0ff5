"""A few of the draws of compare_levels.py: level L2 agrees with the runtime in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
from planner.compare_levels import MAX_WORST, NUM_LAYERS, Compared, Drawn, compare, draw, report

from flowrt.api import read_graph
from flowrt.bench.cases.small_model import write_small_model
from flowrt.operators.families.registry import read_model_config
from flowrt.planner.deployment import deployment_of

SEEDS = (1, 3, 8)


@pytest.mark.parametrize("seed", SEEDS)
def test_both_levels_agree_on_a_drawn_graph(seed: int, tmp_path: Path) -> None:
    drawn = draw(seed)
    found = compare(drawn, write_small_model(tmp_path, NUM_LAYERS, drawn.num_experts, drawn.top_k))
    assert found is not None
    assert abs(found.error) <= MAX_WORST, drawn.text


def test_trampolines_of_groups_count_beside_prefill_workers(tmp_path: Path) -> None:
    """Prefill workers send past them."""
    model = write_small_model(tmp_path, NUM_LAYERS, 8, 2)
    deploy = {"attention": {"groups": 2}, "experts": {"servers": 4, "trampoline": "always"}, "prefill": {"workers": 1}}
    compute = {"attention": {"fixed_seconds": 1e-4}, "experts": {"fixed_seconds": 1e-4}}
    keys = {"flowrt": 1, "model": {"path": str(model)}, "deploy": deploy, "emulate": {"dilation": 1, "compute": compute}}
    found = deployment_of(read_graph(keys), read_model_config(model))
    assert sorted(len(server.behind) for server in found.servers) == [0, 0, 2, 2]


def test_both_levels_agree_on_what_a_runtime_adds(tmp_path: Path) -> None:
    card = tmp_path / "own.yaml"
    card.write_text(
        "family: hopper\nmemory: 1 GB\nbandwidth: 30 GB/s\nflops: {bfloat16: 200 GFLOPS, float32: 100 GFLOPS}\nstep: 300 us\n"
        "sequence: 20 us\nfiring: 70 us\nmessage: 20 us\nexpert: 5 us\ndtypes: {float32: {fixed: 30 us}}\n"
        "within: {latency: 30 us, bandwidth: 3 GB/s}\nbetween: roce-100g\n"
    )
    drawn = Drawn(
        0,
        {
            "deploy": {
                "attention": {"groups": 2},
                "experts": {"servers": 2},
                "links": {"attention-experts": {"link": {"latency": "30 us", "bandwidth": "3 GB/s"}}},
            },
            "emulate": {"dilation": 1, "devices": {"attention": str(card), "experts": str(card)}},
            "limits": {"max_num_seqs": 4, "kv_pages": 16},
        },
        num_experts=4,
        top_k=2,
        batch=4,
    )
    found = compare(drawn, write_small_model(tmp_path / "model", NUM_LAYERS, drawn.num_experts, drawn.top_k))
    assert found is not None
    assert abs(found.error) <= MAX_WORST


def test_the_report_holds_errors_and_order_to_their_targets() -> None:
    def pair(ours: float, theirs: float) -> Compared:
        return Compared(draw(0), ours, theirs, 0.0, 0.0)

    good = [pair(1.0, 1.01), pair(2.0, 2.01), pair(3.0, 3.2)]
    assert report(good)[1]
    assert not report([*good, pair(4.0, 5.0)])[1]  # one is far off
    assert not report([pair(1.0, 1.09), pair(1.08, 1.0)])[1]  # the wrong order
