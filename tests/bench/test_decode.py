"""The decode benchmark: what counts as a run, when tokens agree, who the peer is, and one run of the whole. No time is asserted."""

from __future__ import annotations

import asyncio
import io
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import load_truth, make_checkpoint, truth_greedy
from rich.console import Console

import flowrt
from flowrt.bench.decode import Found, Options, fastest, measure, run_from
from flowrt.bench.decode_report import print_found, report_of
from flowrt.bench.decoding import Comparison, Run, compare, decode_speed, first_difference, prefill_speed, prompts_of, run_of
from flowrt.bench.graph_side import GraphSide, TurnClock, check_room
from flowrt.bench.limits import MachineLimits
from flowrt.bench.memory import Memory, checkpoint_elements, kv_bytes, resident_bytes, weights_asked_for
from flowrt.bench.pairs import Target
from flowrt.bench.peer_process import PeerProcess
from flowrt.bench.report import Figure, Machine
from flowrt.bench.step_split import StepSplit, min_bytes_per_step, thread_times
from flowrt.errors import UserError
from flowrt.operators.families.registry import read_model_config

FAKE_PEER = """
import json, sys
print(json.dumps({"implementations": ["eager"], "expert_bytes": 1, "num_active": 1, "vocab_size": 512}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["new_tokens"] == 13:
        sys.exit("the peer's last word")
    answer = {"prefill_seconds": 0.5, "decode_seconds": 0.25, "tokens": [[1, 2, 3] for _ in request["prompts"]], "margins": None}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("decode"), seed=5, tokenizer=False)


def write_graph(model: Path, folder: Path, name: str = "graph", **deploy: Any) -> Path:
    path = folder / f"{name}.yaml"
    document = {"flowrt": 1, "model": {"path": str(model)}, "deploy": {"experts": {"servers": 2}, **deploy}, "limits": {"max_num_seqs": 4}}
    path.write_text(json.dumps(document))
    return path


# --- what a run is ----------------------------------------------------------------------------------------------------------


def test_prompts_are_those_of_the_peers_script_and_all_different() -> None:
    prompts = prompts_of(32, 64, 32000)
    assert prompts[2][3] == (7 * 2 + 13 * 3) % 31990 + 3
    assert len({tuple(prompt) for prompt in prompts}) == 32
    assert all(3 <= token < 512 for prompt in prompts_of(8, 600, 512) for token in prompt)


def test_tokens_before_the_last_first_one_are_neither_prefill_nor_decode() -> None:
    """Sequence 0 was through its prompt at 1 s and had three tokens when sequence 1 had its first, at 3 s."""
    run = run_of(3.0, [[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0]], [[1, 2, 3, 4], [5, 6, 7]])
    assert (run.prefill_seconds, run.decode_seconds, run.decode_tokens) == (3.0, 2.0, 3)
    assert decode_speed(run) == 1.5
    assert prefill_speed(run, 60) == 20.0


async def test_all_that_happens_in_one_turn_of_the_loop_has_one_time() -> None:
    clock = TurnClock()
    first = clock.now()
    assert clock.now() == first
    await asyncio.sleep(0)
    assert clock.now() > first


# --- tokens -----------------------------------------------------------------------------------------------------------------


def test_a_difference_is_counted_once_per_sequence_with_the_margin_at_its_place() -> None:
    ours = Run(1.0, 1.0, 6, [[1, 2, 3], [1, 9, 9], [4, 5, 6]])
    theirs = Run(1.0, 1.0, 6, [[1, 2, 3], [1, 2, 9], [4, 5, 7]], margins=[[9.0] * 3, [8.0, 0.25, 8.0], [7.0, 7.0, 0.5]])
    found = Comparison()
    compare(ours, theirs, found)
    assert (found.num_compared, found.num_different, found.margins) == (3, 2, [0.25, 0.5])
    assert str(found) == "2 of 3 sequences differ, at top-two margins of logits up to 0.5 (median 0.5)"
    same = Comparison()
    compare(theirs, theirs, same)
    assert str(same) == "all 3 sequences equal"


def test_a_shorter_answer_differs_where_it_ends() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 2, 3]) == 2
    with pytest.raises(ValueError):
        compare(Run(1, 1, 1, [[1]]), Run(1, 1, 1, [[1], [2]]), Comparison())


# --- who the peer is, and the targets -----------------------------------------------------------------------------------------


def test_the_fastest_is_chosen_for_each_phase_among_those_that_tried_it() -> None:
    speeds = {"eager": {"prefill": 50.0, "decode": 10.0}, "grouped_mm": {"prefill": 40.0, "decode": 20.0}, "batched_mm": {"decode": 30.0}}
    assert fastest(speeds, "prefill") == "eager"
    assert fastest(speeds, "decode") == "batched_mm"


async def test_a_peer_that_ends_is_named_with_its_last_word(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(FAKE_PEER)
    async with PeerProcess("a peer", [sys.executable, str(script)]) as peer:
        assert peer.facts["vocab_size"] == 512
        run = run_from(await peer.ask(prompts=[[1], [2]], new_tokens=3))
        assert (run.decode_tokens, decode_speed(run)) == (4, 16.0)
        with pytest.raises(UserError, match=r"a peer ended by itself: the peer's last word"):
            await peer.ask(prompts=[[1]], new_tokens=13)
    with pytest.raises(UserError, match="cannot be started"):
        await PeerProcess("none", [str(tmp_path / "no-such-python")]).__aenter__()


@pytest.mark.parametrize("word", ["", "exit"])
async def test_what_a_peer_started_ends_with_it(tmp_path: Path, word: str) -> None:
    """Whether it is ended or has ended by itself."""
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '1000'], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)\n"
        "print(json.dumps({'child': child.pid}), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    async with PeerProcess("a peer", [sys.executable, str(script)]) as peer:
        child = os.pidfd_open(peer.facts["child"])
        assert not has_ended(child, 0.0)
        if word:
            with pytest.raises(UserError, match="ended by itself"):
                await peer.ask(word=word)
            assert not has_ended(child, 0.0)
    assert has_ended(child, 20.0)
    os.close(child)


def has_ended(pidfd: int, max_seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], max_seconds)[0])


async def test_the_vllm_peer_speaks_the_protocol_without_flowrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of that name with the few calls that are used; the real one is not installed where tests run."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import types\n"
        "class SamplingParams:\n"
        "    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize): self.max_tokens = max_tokens\n"
        "class LLM:\n"
        "    def __init__(self, *, model, skip_tokenizer_init, dtype, max_model_len, enforce_eager, enable_prefix_caching):\n"
        "        print('noise on standard output')\n"
        "        config = types.SimpleNamespace(get_vocab_size=lambda: 77)\n"
        "        self.llm_engine = types.SimpleNamespace(model_config=config)\n"
        "    def generate(self, prompts, params, use_tqdm):\n"
        "        made = lambda p: types.SimpleNamespace(token_ids=[p['prompt_token_ids'][0] + i for i in range(params.max_tokens)])\n"
        "        return [types.SimpleNamespace(outputs=[made(p)]) for p in prompts]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with PeerProcess.vllm(sys.executable, tmp_path, "float32", 1, 64) as peer:
        assert peer.facts["vocab_size"] == 77
        run = run_from(await peer.ask(prompts=[[5], [9]], new_tokens=3))
    assert run.tokens == [[5, 6, 7], [9, 10, 11]]
    assert run.decode_tokens == 4


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"batches": (0,)}, "--batch is 0"),
        ({"new_tokens": 1}, "--new-tokens is 1"),
        ({"num_pairs": 0}, "--pairs is 0"),
        ({"vllm": "python", "against": Path("b.yaml")}, "exclude each other"),
    ],
)
def test_options_that_measure_nothing_are_refused(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        Options(model=Path("m"), graph=Path("g"), **changed).check()


def test_a_graph_without_room_for_the_batch_is_refused_with_the_way_out(model: Path, tmp_path: Path) -> None:
    graph = flowrt.open(write_graph(model, tmp_path)).graph
    check_room(graph, [1, 4], 64, 32)
    with pytest.raises(UserError, match=r"limits.max_num_seqs is 4, and a batch of 32 needs 32; add --set limits.max_num_seqs=32"):
        check_room(graph, [1, 32], 64, 32)
    with pytest.raises(UserError, match=r"limits.kv_pages=1252"):
        check_room(graph, [4], 5000 - 4, 8)


# --- memory and limits -------------------------------------------------------------------------------------------------------


def test_weights_are_counted_per_copy(model: Path, tmp_path: Path) -> None:
    config = read_model_config(model)
    experts, others = checkpoint_elements(model)
    assert experts == config.num_layers * config.num_experts * 3 * config.hidden_size * config.expert_width
    once = flowrt.open(write_graph(model, tmp_path)).graph
    twice = flowrt.open(write_graph(model, tmp_path, attention={"groups": 2}, experts={"servers": 3, "replicas": 2})).graph
    inside = flowrt.open(write_graph(model, tmp_path, experts={"servers": 0})).graph
    assert weights_asked_for(once) == weights_asked_for(inside) == 4 * (experts + others)
    assert weights_asked_for(twice) == 2 * weights_asked_for(once)
    assert kv_bytes(once) == 4 * 512 * 16 * config.num_layers * 2 * config.num_kv_heads * config.head_dim


def test_memory_is_held_against_weights_pages_and_processes() -> None:
    assert Memory(3, 1, 1000, 10).bound_bytes == 1150 + 10 + 3 * 250_000_000
    assert Memory(1, 250_000_000, 0, 0).met
    assert not Memory(1, 250_000_001, 0, 0).met
    assert "not met" in str(Memory(1, 10**9, 0, 0))


def test_pages_that_processes_share_count_once() -> None:
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


def test_a_step_reads_only_experts_that_some_row_goes_to(model: Path) -> None:
    config = read_model_config(model)
    experts, others = checkpoint_elements(model)
    without_table = others - config.vocab_size * config.hidden_size
    one, many = (min_bytes_per_step(config, others, experts, batch, 0) for batch in (1, 10_000))
    assert one == pytest.approx(4 * (without_table + experts * config.num_experts_per_token / config.num_experts))
    assert many == pytest.approx(4 * (without_table + experts))
    assert min_bytes_per_step(config, others, experts, 1, 100) - one == pytest.approx(4 * 100 * config.num_layers * config.kv_width)


def test_a_roofline_is_the_slower_of_reading_and_computing() -> None:
    limits = MachineLimits(2, 10.0, {"float32": 100.0})
    assert limits.seconds(50, 100, "float32") == 5.0
    assert limits.seconds(5, 1000, "float32") == 10.0


def test_the_times_of_a_thread_are_found_where_the_system_tells_them() -> None:
    mine = thread_times(os.getpid())
    assert mine.first > 0
    assert thread_times(2**22 + 1).first == 0


def test_a_split_divides_the_step() -> None:
    split = StepSplit("experts.0", step=0.1, operators=0.06, inline=0.01, loop_cpu=0.03, other_cpu=0.05, queued=0.004)
    assert split.python == pytest.approx(0.02)
    assert split.waiting == pytest.approx(0.02)
    assert set(split.as_json()) >= {"process", "step", "operators", "python", "waiting"}


# --- tables ---------------------------------------------------------------------------------------------------------------------


def test_the_tables_fit_into_eighty_columns() -> None:
    pairs = [float(number) for number in range(20, 40)]
    figures = [
        Figure.paired(f"decode {b}", "tokens/s", [2.5 * each for each in pairs], "grouped_mm", pairs, Target(1.5, at_most=False))
        for b in (1, 32)
    ]
    split = StepSplit("attention.0", step=0.1, operators=0.06, inline=0.01, loop_cpu=0.03, other_cpu=0.05, queued=0.004)
    found = Found("bfloat16", figures, {"grouped_mm, batch 1": Comparison(4, 1, [0.1])}, {}, {32: [split]}, Memory(3, 10**9, 10**8, 10**6))
    out = io.StringIO()
    print_found(found, MachineLimits(2, 3e10, {"bfloat16": 1e11}), {32: 1e9}, Console(file=out, width=80, highlight=False))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "decode 32     80.0" not in text
    assert "2.50 (2.50 to 2.50)    >= 1.5  met" in text
    assert "a step takes 100.0 ms, at least 33.3" in text
    assert "1 of 4 sequences differ" in text
    record = report_of([found], Machine("a processor", 2, "Linux 6", {}, 0.5), {}).as_json()
    json.dumps(record)
    assert record["figures"][0]["name"] == "decode 1 bfloat16"
    assert record["details"]["bfloat16"]["splits_seconds"][32][0]["python"] == pytest.approx(0.02)


# --- all of it ------------------------------------------------------------------------------------------------------------------


async def test_a_graph_gives_the_tokens_of_the_truth(model: Path, tmp_path: Path) -> None:
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


def test_the_whole_command_against_transformers(model: Path, tmp_path: Path) -> None:
    """On one core: peers' threads that spin for each other are slow beside other tests."""
    script = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "import flowrt.bench.decode; flowrt.bench.decode.TRIES = 1; from flowrt.cli.app import main; main()"
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


async def test_two_graphs_are_measured_against_each_other(model: Path, tmp_path: Path) -> None:
    options = Options(
        model=model,
        graph=write_graph(model, tmp_path, processes="one"),
        dtypes=("float32",),
        batches=(2,),
        prompt_tokens=8,
        new_tokens=24,
        num_pairs=1,
        against=write_graph(model, tmp_path, "together", experts={"servers": 0}, processes="one"),
    )
    told: list[str] = []
    (found,) = [each async for each in measure(options, told.append)]
    assert [figure.peer for figure in found.figures] == ["together", "together"]
    assert found.comparisons["together, batch 2"].num_different == 0
    assert any("all 4 sequences equal" in text for text in told)
