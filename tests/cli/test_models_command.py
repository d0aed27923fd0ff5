"""`flowrt models`: what it lists, and what it says of a checkpoint that runs and of one that does not."""

from __future__ import annotations

import shlex
from io import StringIO
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from cli.conftest import flowrt_here
from library_checkpoints import small_config, write
from rich.console import Console

from flowrt.cli import models, quantize
from flowrt.errors import UserError
from flowrt.graph.file import load_graph
from flowrt.launcher.model_facts import facts_of
from flowrt.launcher.start_checks import find_shortage, memory_needs
from flowrt.operators.families.registry import read_model_config

CARD = """\
family: ada
memory: 16 GB
bandwidth: 20 GB/s
flops: {bfloat16: 0.2 TFLOPS, float32: 0.2 TFLOPS}
within: {latency: 60 us, bandwidth: 10 GB/s}
between: roce-100g
devices_per_node: 1
half_rows: 4
"""


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return " ".join(console.file.getvalue().split())


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=200)


def test_the_list_has_both_ways(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    models.print_known(console)
    text = printed(console)
    assert "own operators: dbrx DBRX deepseek_v2 DeepSeek-V2, V2-Lite" in text
    assert "refused (recurrent layers that cannot go on with a prompt in parts, which is tried when the module is loaded): jamba" in text
    assert "gpt_oss" in text
    assert text.count("mixtral") == 1, "what flowrt computes itself is not listed twice"
    monkeypatch.setattr(models, "missing_package", lambda: "greenlet")
    models.print_known(console)
    assert "through transformers: none, as greenlet is not installed" in printed(console)


def test_a_checkpoint_in_transformers(console: Console, tmp_path: Path) -> None:
    models.print_model(write("gpt_oss", tmp_path), console)
    text = printed(console)
    assert "runs by the module of transformers, cut at its experts" in text
    assert "4 of 4 layers with 8 experts, 2 for each token; float32" in text
    assert "default graph attention 1 x (" in text


def test_a_checkpoint_of_ours_by_its_config_alone(console: Console, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    models.print_model(tmp_path / "config.json", console)
    assert "runs by flowrt's own operators (qwen3_moe)" in printed(console)


@pytest.mark.parametrize(
    ("limit", "settings"),
    [
        (1 << 30, []),
        (4_000_000, ["limits.kv_pages=219"]),
        (1_100_000, ["model.dtype=bfloat16", "limits.kv_pages=73"]),
        (900_000, ["model.dtype=bfloat16", "model.expert_weights=int8", "limits.kv_pages=73"]),
        (800_000, ["model.dtype=bfloat16", "model.weights=int8", "model.expert_weights=int8", "limits.kv_pages=68"]),
        (200_000, None),
    ],
)
def test_the_deployment_fits(limit: int, settings: list[str] | None, tmp_path: Path) -> None:
    """The weights of its processes, and pages for a context of 1,024 tokens at least."""
    config = read_model_config(make_checkpoint(tmp_path))
    assert models.fitting_settings(tmp_path, config, limit) == settings
    if settings is not None:
        graph = load_graph(tmp_path, settings, facts_of=facts_of)
        assert find_shortage(graph, memory_needs(graph), limit) is None


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_commands_of_the_deployment_work(name: str, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(name, tmp_path / "a model")
    models.print_model(tmp_path / "a model", console)
    lines = [line.strip() for line in console.file.getvalue().splitlines() if line.startswith("  flowrt ")]  # type: ignore[attr-defined]
    assert [line.split()[1] for line in lines] == ["init", "run", *(["profile", "plan"] if name == "qwen3_moe" else [])]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machine.yaml").write_text(CARD)
    for line in (lines[0], *lines[3:]):  # not the one that measures this machine
        assert flowrt_here(*shlex.split(line)[1:]).returncode == 0, line
    graphs = [Path("a model-graph") / "graph.yaml", *([Path("a model-graph.yaml")] if name == "qwen3_moe" else [])]
    for graph in graphs:
        assert load_graph(graph, facts_of=facts_of).model is not None


def test_what_a_folder_lacks_and_how_it_is_stored_is_shown(console: Console, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "plain", tokenizer=True)
    models.print_model(directory, console)
    assert "tokenizer" not in printed(console)
    written = tmp_path / "in 8 bits"
    quantize.write(directory, written, "int8", None)
    (written / "tokenizer.json").unlink()
    models.print_model(written, console)
    text = printed(console)
    assert "experts stored as int8; model.expert_weights=as_stored keeps them so" in text
    assert "tokenizer none: give token ids" in text
    assert "--prompts FILE" in text


def test_a_damaged_file_of_weights_does_not_run(console: Console, tmp_path: Path) -> None:
    file = make_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:10000])
    with pytest.raises(UserError, match="was cut off"):
        models.print_model(tmp_path, console)
    (tmp_path / "graph.yaml").write_text("flowrt: 1")
    with pytest.raises(UserError, match="is a graph file, not a checkpoint; flowrt graph show"):
        models.print_model(tmp_path / "graph.yaml", console)


def test_sparse_attention_is_named(console: Console, tmp_path: Path) -> None:
    small_config("glm_moe_dsa").save_pretrained(tmp_path)
    models.print_model(tmp_path / "config.json", console)
    assert "160 numbers of KV for each; attention reads 5 tokens, which an indexer chooses" in printed(console)


def test_one_that_cannot_run_is_one_line(console: Console, tmp_path: Path) -> None:
    small_config("deepseek_v4").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model_type: 'deepseek_v4' does not run through transformers here: its module needs more"):
        models.print_model(tmp_path, console)
    with pytest.raises(UserError, match="no such folder"):
        models.print_model(tmp_path / "absent", console)
