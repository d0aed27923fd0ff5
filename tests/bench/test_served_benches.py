"""The benchmarks of a served graph beside itself under other settings: graphs that differ in them alone, figures, and whole runs. No time
is asserted."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

from flowrt.bench.cases import api_cost, kv_transfer, latency, log_cost, prefix, reliability, restart, strict, structured
from flowrt.bench.cases.case_options import DecodeOptions, LatencyOptions, StreamOptions
from flowrt.bench.measure.benchmark import run_benchmark
from flowrt.errors import UserError
from flowrt.graph.notation import format_ids
from flowrt.operators.families.registry import read_model_config

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
SMALL = ("deploy.attention.groups=1", "deploy.experts.servers=2")


def options(batch: int = 8, **fields: Any) -> DecodeOptions:
    return DecodeOptions(**{"batch": (batch,), "prompt_tokens": 16, "new_tokens": 64, **fields})


# --- HTTP ---------------------------------------------------------------------------------------------------------------------


def test_streams_and_calls_run_in_turns() -> None:
    chosen = options(2, prompt_tokens=4, new_tokens=24, overrides=SMALL)
    speed, *times = run_benchmark("api", api_cost.measure(QUICKSTART, None, chosen), num_pairs=1).figures
    assert speed.ratio is not None
    assert speed.ratio.count == 1
    assert [each.name.partition(", ")[2] for each in times][::3] == ["front ends", "client of HTTP, not counted"]
    assert times[-1].ours.median > 0


# --- structured output --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_no_constrained_output_ends_before_the_others() -> None:
    chosen = options(2, prompt_tokens=4, new_tokens=32, overrides=("deploy.processes=one",))
    (figure,) = run_benchmark("structured", structured.measure(QUICKSTART, None, chosen), num_pairs=1).figures
    assert (figure.name, figure.peer) == ("decode 2 float32, fast", "without")
    assert figure.ratio is not None


# --- detector, failover and hedging -------------------------------------------------------------------------------------------


def test_graphs_differ_in_reliability_alone() -> None:
    on, off = reliability.read_graphs(QUICKSTART, None, options(overrides=("reliability.hedge=false",)))
    assert [getattr(on.reliability, key) for key in reliability.KEYS] == [True, "fine", True]
    assert [getattr(off.reliability, key) for key in reliability.KEYS] == [False, "off", False]
    assert off.replace(reliability=on.reliability) == on


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (options(200), "limits.max_num_seqs is 16, and a batch of 200 needs 100"),
        (options(overrides=("deploy.processes=one",)), "all workers share one process"),
    ],
)
def test_graphs_that_cannot_be_measured_are_refused(options: DecodeOptions, text: str) -> None:
    with pytest.raises(UserError, match=text):
        reliability.read_graphs(QUICKSTART, None, options)


def test_both_graphs_run_in_turns_and_give_equal_tokens() -> None:
    chosen = options(2, overrides=(*SMALL, "numerics=strict"), prompt_tokens=4, new_tokens=16)
    report = run_benchmark("reliability", reliability.measure(reliability.read_graphs(QUICKSTART, None, chosen), chosen), num_pairs=2)
    (figure,) = report.figures
    assert figure.ratio is not None
    assert figure.ratio.count == 2
    assert figure.verdict == "undecided"  # two pairs bound nothing
    equal = "all 6 sequences equal"  # with those of the round that is not counted
    assert report.notes == [f"tokens, float32, strict, batch 2, against without: {equal}"]


# --- request log --------------------------------------------------------------------------------------------------------------

LOGGED = options(4, prompt_tokens=8, new_tokens=16, overrides=("deploy.processes=2", "numerics=strict"))


def test_graphs_differ_in_the_log_alone(tmp_path: Path) -> None:
    logged, plain = log_cost.read_graphs(QUICKSTART, None, LOGGED, tmp_path, synced=True)
    assert (logged.reliability.request_log, logged.reliability.request_log_sync) == (str(tmp_path / "log"), True)
    assert not plain.reliability.request_log
    assert plain.replace(reliability=logged.reliability) == logged


@pytest.mark.slow
def test_report_has_the_cost_and_the_time_of_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_benchmark("log", log_cost.measure(QUICKSTART, None, LOGGED, synced=False), 1)
    throughput, start, tokens = report.figures
    assert throughput.peer == "without"
    assert start.name == "start of the graph to the next token of 4 open requests"
    assert start.ours.median > tokens.ours.median > 0
    assert any("all 8 sequences equal" in note for note in report.notes)


# --- restart ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["deploy.experts.servers=0", "deploy.experts.replicas=1"], r"the run cannot lose experts\.0"),
        ([*SMALL, "deploy.attention.threads=1", "deploy.experts.threads=2"], r"no standby process can replace experts\.0: "),
    ],
)
def test_graphs_whose_process_cannot_be_restarted_are_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        restart.read_graphs(QUICKSTART, None, overrides)


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes and reads /proc")
def test_processes_are_killed_in_turns() -> None:
    graphs = restart.read_graphs(QUICKSTART, None, SMALL)
    assert all(graph.replace(reliability=graphs[0].reliability) == graphs[0] for graph in graphs)
    report = run_benchmark("restart", restart.measure(graphs), num_pairs=1)
    assert [figure.unit for figure in report.figures] == ["s", "s", "s", "s", "GB"]
    assert all(figure.ratio is not None and figure.ratio.count == 1 for figure in report.figures)


# --- strict numerics ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served-benches"), seed=6, layers=1, tokenizer=False)


def test_graphs_differ_in_numerics_alone(model: Path, tmp_path: Path) -> None:
    exact, fast = strict.read_graphs(model, None, "bfloat16", DecodeOptions(batch=(1, 32), prompt_tokens=64, new_tokens=32))
    assert (exact.numerics, fast.numerics) == ("strict", "fast")
    assert exact.replace(numerics="fast") == fast
    assert set(fast.threads.values()) == {1}  # what strict makes of auto
    assert (exact.limits.max_num_seqs, exact.limits.kv_pages) == (32, 32 * 6)
    with pytest.raises(UserError, match=r"roles have numerics of their own \(attention strict and prefill fast\); remove them"):
        strict.read_graphs(model, None, "bfloat16", DecodeOptions(overrides=("deploy.prefill={workers: 1, numerics: fast}",)))
    own = tmp_path / "own.yaml"
    own.write_text(f"flowrt: 1\nmodel: {{path: {model}}}\ndeploy: {{experts: {{servers: 3}}}}\n")
    mine, _ = strict.read_graphs(model, own, "float32", DecodeOptions(batch=(8,), overrides=("deploy.experts.servers=4",)))
    assert len(mine.process_names()) == 5


def test_report_has_both_speeds_blocks_and_the_check_at_the_start(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = tmp_path / "one.yaml"
    one.write_text(f"flowrt: 1\nmodel: {{path: {model}}}\ndeploy: {{processes: one}}\n")
    chosen = DecodeOptions(dtype=("float32",), batch=(2,), prompt_tokens=6, new_tokens=32)
    report = run_benchmark("strict", strict.measure(model, one, chosen), num_pairs=1)
    assert [(figure.name, figure.peer) for figure in report.figures] == [(f"{phase} 2 float32", "fast") for phase in ("prefill", "decode")]
    assert not any(figure.target for figure in report.figures)
    found = report.details["float32"]
    assert found["tokens"]["fast, batch 2"]["num_compared"] == 4
    assert all(seconds > 0 for seconds in found["proof_seconds"])
    assert len(found["proof_seconds"]) == strict.NUM_PROOFS
    assert found["blocks"]["attention.0"].startswith("blocks of ")
    assert "experts" in found["blocks"]["attention.0"]
    text = capsys.readouterr().out
    assert "float32, attention.0: blocks of " in text
    assert f"median of {strict.NUM_PROOFS}" in text


# --- prefix cache, KV transfer, latency -----------------------------------------------------------------------------------------


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
