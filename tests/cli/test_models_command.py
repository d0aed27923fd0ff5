"""`flowrt models`: what it lists, and what it says of a checkpoint that runs and of one that does not."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from library_checkpoints import small_config, write
from rich.console import Console

from flowrt.cli import models
from flowrt.errors import UserError


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return " ".join(console.file.getvalue().split())


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=200)


def test_the_list_has_both_ways(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    models.print_known(console)
    text = printed(console)
    assert "own operators: dbrx, deepseek_v2" in text
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
