"""The benchmarks of prefix cache and KV transfer: their graphs, loads and figures. No time is asserted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from flowrt.bench.cases import kv_transfer, latency, prefix
from flowrt.bench.cases.case_options import LatencyOptions, StreamOptions
from flowrt.bench.measure.benchmark import run_benchmark
from flowrt.errors import UserError
from flowrt.graph.notation import format_ids
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


def test_exposed_time_is_what_the_transfer_adds_to_the_second_token(model: Path) -> None:
    streamed, complete, together = kv_transfer.read_graphs(model, 100, [])
    for apart in (streamed, complete):
        assert [name for name in apart.process_names() if name not in together.process_names()] == ["prefill.0"]
    assert [any(node.operator == "kv_progress" for node in each.nodes.values()) for each in (streamed, complete)] == [True, False]
    config = read_model_config(model)
    num_bytes = 100 * config.kv_elements * 4
    assert num_bytes == 100 * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    firsts = [kv_transfer._TokenTimes(*each) for each in ((1.0, 0.15), (1.0, 0.3), (1.1, 0.1))]
    figures = kv_transfer._figures(100, 2_000_000_000, [*([each] for each in firsts), [0.1]])
    expected = [150.0, 50.0, 0.05, 300.0, 200.0, 0.2, 10.0, 1150.0]
    assert [each.ours.median for each in figures] == [pytest.approx(each) for each in expected]
    assert [each.verdict is not None for each in figures] == [False, False, True, False, False, False, True, False]


def latency_options(**more: object) -> LatencyOptions:
    return LatencyOptions(**{"streams": 2, "prompt_tokens": 4, "new_tokens": 6, "overrides": ("deploy.processes=one",), **more})


def test_latency_measures_one_graph_with_and_without_a_setting(model: Path, tmp_path: Path) -> None:
    options = latency_options(arriving_tokens=40, against=("deploy.processes=one", "limits.max_num_batched_tokens=16"))
    graphs = latency.read_graphs(model, None, options)
    assert [graph.limits.max_num_batched_tokens for graph in graphs.values()] == [512, 16]
    report = run_benchmark("latency", latency.measure(graphs, options), num_pairs=1)
    names = [figure.name.split(",")[0] for figure in report.figures]
    assert names == [*["inter-token latency"] * 3, "first token of a prompt that arrives"]
    assert {figure.peer for figure in report.figures} == {"deploy.processes=one limits.max_num_batched_tokens=16"}


def test_latency_of_a_first_request_starts_the_graph_each_time(model: Path) -> None:
    options = latency_options(first=True, overrides=("deploy.processes=one", "jitter.warm_up=true"), against=("deploy.processes=one",))
    report = run_benchmark("latency", latency.measure(latency.read_graphs(model, None, options), options), num_pairs=1)
    assert [figure.name for figure in report.figures] == ["first token of the first request, deploy.processes=one jitter.warm_up=true"]


def test_latency_of_equal_graphs_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match="both graphs are the same"):
        latency.read_graphs(model, None, latency_options(against=("deploy.processes=one",)))


def test_the_best_graph_of_those_beside_it_counts() -> None:
    values = [[latency.StreamTimes([gap] * 9, [1.0])] for gap in (0.02, 0.2, 0.1)]
    figures = latency.latency_figures(["apart", "steps of 64", "steps of 128"], kv_transfer.INTERFERENCE, values)
    assert {figure.peer for figure in figures} == {"steps of 128"}
    assert [figure.ratio.median for figure in figures if figure.ratio is not None] == pytest.approx([0.2, 0.2, 0.2, 1.0])
    assert [figure.target is not None for figure in figures] == [False, True, False, False]


def test_prefill_apart_has_a_core_of_its_own(model: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        with pytest.raises(UserError, match="needs two cores"):
            kv_transfer.read_interference_graphs(model, 100, StreamOptions(streams=3), [])
        return
    apart, *together = kv_transfer.read_interference_graphs(model, 100, StreamOptions(streams=3, chunks=(16, 32)), []).values()
    assert apart.cores == {"prefill.0": str(cores[0]), "attention.0": str(cores[1])}
    assert [each.limits.max_num_batched_tokens for each in together] == [16, 32]
    assert {each.cores["attention.0"] for each in together} == {format_ids(cores)}
    assert all(each.process_names() == ["attention.0"] for each in together)
