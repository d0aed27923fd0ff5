"""The benchmarks of prefix cache, routing and KV transfer: their graphs, loads and figures. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from flowrt.bench.cases import kv_transfer, prefix, routing
from flowrt.bench.measure.benchmark import run_benchmark
from flowrt.operators.families.registry import read_model_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("prefill-benches"), seed=6, layers=1, tokenizer=False)


def test_prefix_measures_one_graph_with_and_without_the_cache(model: Path) -> None:
    cached, plain = prefix.read_graphs(model, "strict", 100, ["limits.page_size=8"])
    assert (cached.limits.enable_prefix_caching, plain.limits.enable_prefix_caching) == (True, False)
    assert cached.limits.kv_pages == 3 * 7


def test_prefix_reports_both_requests_and_decoding(model: Path) -> None:
    report = run_benchmark("prefix", prefix.measure(model, 64, 16, ["deploy.processes=one"]), num_pairs=1)
    names = [figure.name for figure in report.figures]
    assert names[:2] == ["first token, shared beginning, fast", "first token, new prompt, fast"]
    assert names[2].endswith("full cache, fast")
    assert len(names) == 6


def test_loads_are_the_same_for_each_policy_and_within_the_limits() -> None:
    for begins_alike in (False, True):
        one, two = (routing.draw_load(3, 50, 1e4, begins_alike) for _ in range(2))
        assert one == two
        assert min(len(each.prompt) for each in one) >= 1
        assert max(len(each.prompt) for each in one) <= routing.MAX_PROMPT_TOKENS
    assert len({each.prompt[: routing.TEXT_TOKENS] for each in one}) <= routing.TEXTS


def test_exposed_time_is_what_the_transfer_adds_to_the_second_token(model: Path) -> None:
    streamed, complete, together = kv_transfer.read_graphs(model, 100, [])
    for apart in (streamed, complete):
        assert [name for name in apart.process_names() if name not in together.process_names()] == ["prefill.0"]
    assert [any(node.operator == "kv_progress" for node in each.nodes.values()) for each in (streamed, complete)] == [True, False]
    config = read_model_config(model)
    num_bytes = kv_transfer.kv_bytes(config, 100)
    assert num_bytes == 100 * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    firsts = [kv_transfer._TokenTimes(*each) for each in ((1.0, 0.15), (1.0, 0.3), (1.1, 0.1))]
    figures = kv_transfer._figures(100, 2_000_000_000, [*([each] for each in firsts), [0.1]])
    expected = [150.0, 50.0, 0.05, 300.0, 200.0, 0.2, 10.0, 1150.0]
    assert [each.ours.median for each in figures] == [pytest.approx(each) for each in expected]
    assert [each.verdict is not None for each in figures] == [False, False, True, False, False, False, True, False]
