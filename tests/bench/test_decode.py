"""The decode benchmark: what counts as a run, when tokens agree, which peer is chosen, and whole commands. No time is asserted."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import load_truth, make_checkpoint, truth_greedy
from safetensors.torch import load_file

import flowrt
from flowrt.bench.cases import decode
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.decode import fastest, have_different_tokens, measure
from flowrt.bench.measure.benchmark import run_benchmark
from flowrt.bench.measure.decoding import DecodeRun, GraphSide, TokenAgreement, TurnClock, check_limits, first_difference, prompts_of
from flowrt.bench.measure.memory import GraphMemory, kv_bytes, resident_bytes, weights_bytes
from flowrt.bench.measure.step_split import StepSplit, min_bytes_per_step
from flowrt.bench.report.report import BenchmarkReport, Machine, ReportSection
from flowrt.costs.work import MachineLimits, Work
from flowrt.errors import UserError
from flowrt.operators.families.registry import read_model_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("decode"), seed=5, tokenizer=False)


def write_graph(model: Path, folder: Path, name: str = "graph", **deploy: Any) -> Path:
    path = folder / f"{name}.yaml"
    document = {"flowrt": 1, "model": {"path": str(model)}, "deploy": {"experts": {"servers": 2}, **deploy}, "limits": {"max_num_seqs": 4}}
    path.write_text(json.dumps(document))
    return path


# --- what a run is ----------------------------------------------------------------------------------------------------------


def test_prompts_are_all_different() -> None:
    prompts = prompts_of(32, 64, 32000)
    assert prompts[2][3] == (7 * 2 + 13 * 3) % 31990 + 3
    assert len({tuple(prompt) for prompt in prompts}) == 32
    assert all(3 <= token < 512 for prompt in prompts_of(8, 600, 512) for token in prompt)


def test_tokens_before_the_last_first_one_count_as_neither_phase() -> None:
    """Sequence 0 was through its prompt at 1 s and had three tokens when sequence 1 had its first, at 3 s."""
    run = DecodeRun.of(3.0, [[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0]], [[1, 2, 3, 4], [5, 6, 7]])
    assert (run.prefill_seconds, run.decode_seconds, run.decode_tokens) == (3.0, 2.0, 3)
    assert run.speed("decode", 60) == 1.5
    assert run.speed("prefill", 60) == 20.0


async def test_events_in_one_turn_of_the_loop_have_one_time() -> None:
    clock = TurnClock()
    first = clock.now()
    assert clock.now() == first
    await asyncio.sleep(0)
    assert clock.now() > first


# --- tokens -----------------------------------------------------------------------------------------------------------------


def test_difference_counts_once_per_sequence_with_its_margin() -> None:
    ours = DecodeRun(1.0, 1.0, 6, [[1, 2, 3], [1, 9, 9], [4, 5, 6]])
    theirs = DecodeRun(1.0, 1.0, 6, [[1, 2, 3], [1, 2, 9], [4, 5, 7]], margins=[[9.0] * 3, [8.0, 0.25, 8.0], [7.0, 7.0, 0.5]])
    found = TokenAgreement()
    found.compare(ours, theirs)
    assert (found.num_compared, found.num_different, found.margins) == (3, 2, [0.25, 0.5])
    assert str(found) == "2 of 3 sequences differ, at top-two margins of logits up to 0.5 (median 0.5)"
    same = TokenAgreement()
    same.compare(theirs, theirs)
    assert str(same) == "all 3 sequences equal"


def test_shorter_sequence_differs_at_its_end() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 2, 3]) == 2
    with pytest.raises(ValueError):
        TokenAgreement().compare(DecodeRun(1, 1, 1, [[1]]), DecodeRun(1, 1, 1, [[1], [2]]))


# --- which peer is chosen -----------------------------------------------------------------------------------------


def test_fastest_implementation_is_chosen_for_each_phase() -> None:
    speeds = {"eager": {"prefill": 50.0, "decode": 10.0}, "grouped_mm": {"prefill": 40.0, "decode": 20.0}, "batched_mm": {"decode": 30.0}}
    assert fastest(speeds, "prefill") == "eager"
    assert fastest(speeds, "decode") == "batched_mm"


def test_graph_without_room_for_the_batch_is_refused_with_the_key_to_set(model: Path, tmp_path: Path) -> None:
    graph = flowrt.open(write_graph(model, tmp_path)).graph
    check_limits(graph, [1, 4], 64, 32)
    with pytest.raises(UserError, match=r"limits.max_num_seqs is 4, and a batch of 32 needs 32; add --set limits.max_num_seqs=32"):
        check_limits(graph, [1, 32], 64, 32)
    with pytest.raises(UserError, match=r"limits.kv_pages=1252"):
        check_limits(graph, [4], 5000 - 4, 8)


def checkpoint_elements(model: Path) -> tuple[int, int]:
    """(elements of routed experts, of everything else), as the files have them."""
    sizes = {name: tensor.numel() for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return experts, sum(sizes.values()) - experts


# --- memory and limits -------------------------------------------------------------------------------------------------------


def test_weights_count_once_per_replica(model: Path, tmp_path: Path) -> None:
    config = read_model_config(model)
    experts, others = checkpoint_elements(model)
    assert experts == config.num_layers * config.num_experts * 3 * config.hidden_size * config.expert_width
    once = flowrt.open(write_graph(model, tmp_path)).graph
    twice = flowrt.open(write_graph(model, tmp_path, attention={"groups": 2}, experts={"servers": 3, "replicas": 2})).graph
    inside = flowrt.open(write_graph(model, tmp_path, experts={"servers": 0})).graph
    assert weights_bytes(once) == weights_bytes(inside) == 4 * (experts + others)
    assert weights_bytes(twice) == 2 * weights_bytes(once)
    assert kv_bytes(once) == 4 * 512 * 16 * config.num_layers * 2 * config.num_kv_heads * config.head_dim


def test_memory_bound_has_weights_pages_and_processes() -> None:
    assert GraphMemory(3, 1, 1000, 10).bound_bytes == 1150 + 10 + 3 * 250_000_000
    assert GraphMemory(1, 250_000_000, 0, 0).met
    assert not GraphMemory(1, 250_000_001, 0, 0).met
    assert "not met" in str(GraphMemory(1, 10**9, 0, 0))


def test_shared_pages_count_once() -> None:
    code = f"""
import os, sys, time
kept = bytearray({64 << 20})
for at in range(0, len(kept), 4096):
    kept[at] = 1
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
sys.stdin.read()
os.kill(child, 9)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        held = [resident_bytes(pid) for pid in (parent.pid, child)]
        assert all((32 << 20) <= each < (64 << 20) for each in held)  # a half each, and what an interpreter needs
        assert (64 << 20) <= sum(held) < (80 << 20)
        parent.communicate()
    assert resident_bytes(child) == 0


def test_step_reads_only_experts_that_some_row_is_routed_to(model: Path, tmp_path: Path) -> None:
    config = read_model_config(model)
    graph = flowrt.open(write_graph(model, tmp_path)).graph
    experts, others = checkpoint_elements(model)
    without_table = others - config.vocab_size * config.hidden_size
    one, many = (min_bytes_per_step(graph, batch, 0) for batch in (1, 10_000))
    assert one == pytest.approx(4 * (without_table + experts * config.num_experts_per_token / config.num_experts))
    assert many == pytest.approx(4 * (without_table + experts))
    assert min_bytes_per_step(graph, 1, 100) - one == pytest.approx(4 * 100 * config.num_layers * config.kv_width)
    narrow = flowrt.open(write_graph(model, tmp_path), overrides=["model.expert_weights=int8"]).graph
    scales = 4 * config.num_experts * len(config.moe_layers) * (2 * config.expert_width + config.hidden_size)
    assert min_bytes_per_step(narrow, 10_000, 0) == pytest.approx(4 * without_table + experts + scales)


def test_roofline_is_the_slower_of_reading_and_computing() -> None:
    limits = MachineLimits(2, 10.0, {"float32": 100.0})
    assert limits.seconds(Work(50, 100), "float32") == 5.0
    assert limits.seconds(Work(5, 1000), "float32") == 10.0


def test_split_divides_the_step() -> None:
    split = StepSplit("experts.0", step=0.1, operators=0.06, inline=0.01, loop_cpu=0.03, other_cpu=0.05, queued=0.004)
    assert split.python == pytest.approx(0.02)
    assert split.waiting == pytest.approx(0.02)
    assert set(split.as_json()) >= {"process", "step", "operators", "python", "waiting"}


# --- whole commands ------------------------------------------------------------------------------------------------------------------


async def test_every_run_computes_its_prompts(model: Path, tmp_path: Path) -> None:
    """Also where several sides share a graph: a prompt that is cached would take no time."""
    prompts = prompts_of(2, 33, 512)
    async with flowrt.open(write_graph(model, tmp_path, processes="one")) as graph:
        runs = [await GraphSide(graph).run(prompts[:number], 6) for number in (2, 2, 1)]
    assert [run.num_cached_tokens for run in runs] == [0, 0, 0]


async def test_graph_gives_the_tokens_of_transformers(model: Path, tmp_path: Path) -> None:
    prompts = prompts_of(4, 9, 512)
    expected = [truth_greedy(load_truth(model), prompt, 24) for prompt in prompts]
    async with flowrt.open(write_graph(model, tmp_path, processes="one")) as graph:
        side = GraphSide(graph)
        run = await side.run(prompts, 24)
        refused = GraphSide(graph)
        with pytest.raises(UserError, match="a request ended with error"):
            await refused.run([[]], 6)
    assert run.tokens == expected
    assert 0 < run.decode_tokens <= 4 * 23


def test_decode_command_beside_transformers(model: Path, tmp_path: Path) -> None:
    """On one core: threads of the peer that spin for each other are slow beside other tests."""
    script = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "import flowrt.bench.cases.decode as d; d.TRIES = 1; from flowrt.cli.app import main; main()"
    )
    words = ["bench", "decode", str(model), "--graph", str(write_graph(model, tmp_path)), "--dtype", "float32", "--batch", "1", "4"]
    words += ["--prompt-tokens", "8", "--new-tokens", "24", "--pairs", "1", "--json", str(tmp_path / "figures.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "for trying out" in done.stdout
    record = json.loads((tmp_path / "figures.json").read_text())
    assert [figure["name"] for figure in record["figures"]] == [f"{phase} {b} float32" for b in (1, 4) for phase in ("prefill", "decode")]
    tokens = record["details"]["float32"]["tokens"].values()
    assert [each["num_different"] for each in tokens] == [0, 0]
    assert [each["num_compared"] for each in tokens] == [2, 8]
    processes = [split["process"] for split in record["details"]["float32"]["splits_seconds"]["4"]]
    assert processes == ["attention.0", "experts.0", "experts.1"]
    assert record["details"]["float32"]["memory"]["met"]
    assert set(record["details"]["float32"]["tried_tokens_per_second"]["1"]) >= {"eager"}


def test_two_graphs_are_measured_against_each_other(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def known_limits(num_threads: int, dtypes: tuple[str, ...]) -> MachineLimits:
        return MachineLimits(2, 10e9, dict.fromkeys(dtypes, 100e9))

    monkeypatch.setattr(decode, "measure_limits_apart", known_limits)  # the test of the command measures them
    options = DecodeOptions(dtype=("float32",), batch=(2,), prompt_tokens=8, new_tokens=16)
    graph = write_graph(model, tmp_path, processes="one")
    together = write_graph(model, tmp_path, "together", experts={"servers": 0}, processes="one")
    report = run_benchmark("decode", measure(model, graph, options, together), num_pairs=1)
    assert [figure.peer for figure in report.figures] == ["together", "together"]
    assert report.details["float32"]["tokens"]["together, batch 2"]["num_different"] == 0
    assert not have_different_tokens(report)
    text = capsys.readouterr().out
    assert "all 4 sequences equal" in text
    assert "a step takes" in text


def test_only_different_float32_tokens_are_an_error() -> None:
    for dtype, same, is_error in (("float32", True, True), ("float32", False, False), ("bfloat16", True, False)):
        tokens = {"tokens": {"eager, batch 1": vars(TokenAgreement(4, 1, [0.1]))}, "same_weights": same}
        assert have_different_tokens(BenchmarkReport("decode", Machine.here(), [], sections=[ReportSection(dtype, tokens)])) is is_error


async def test_two_kinds_of_peers_exclude_each_other(model: Path, tmp_path: Path) -> None:
    graph = write_graph(model, tmp_path)
    with pytest.raises(UserError, match="--vllm and --against exclude each other"):
        await anext(measure(model, graph, DecodeOptions(), against=graph, vllm="python"))
