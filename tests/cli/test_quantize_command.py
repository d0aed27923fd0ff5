"""`flowrt quantize`: what it prints, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from cli.conftest import flowrt_here, refusal
from safetensors.torch import load_file, save_file

from flowrt.cli import quantize

TINY = Path(__file__).parents[2] / "examples" / "tiny-moe"
PROMPTS = TINY.parent / "prompts.jsonl"


@pytest.mark.parametrize("words", [[], ["--weights", "fp8", "--prompts", str(PROMPTS)]])
def test_a_checkpoint_is_written(words: list[str], tmp_path: Path) -> None:
    done = flowrt_here("quantize", TINY, tmp_path / "out", *words)
    assert done.returncode == 0
    kept = words[1] if words else "int8"
    lines = done.stdout.splitlines()
    assert lines[0] == f"wrote {tmp_path}/out: 112 of 135 tensors in {kept}, 3.8 MiB to 2.2 MiB"
    assert lines[1].startswith("error of a matrix, relative to its weights: median ")
    assert lines[2].startswith(f"to keep the weights of experts so: flowrt run {tmp_path}/out --set model.expert_weights=as_stored")
    assert len(lines) == 3


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, without_weights = tmp_path / "out", make_checkpoint(tmp_path / "model", layers=1)
    (without_weights / "model.safetensors").unlink()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(quantize, "missing_package", lambda: "transformers")
    for words, text in (
        ((tmp_path / "nothing", out), "no such folder"),
        ((TINY, tmp_path), "exists already; give a new folder"),
        ((TINY, out, "--prompts", tmp_path / "nothing.txt"), "no such file"),
        ((without_weights, out), "holds no *.safetensors file"),
        ((TINY, out, "--prompts", PROMPTS), "computes texts with transformers, and transformers is not installed"),
        ((TINY, tmp_path / "file" / "out"), "Not a directory"),
    ):
        assert text in refusal(flowrt_here("quantize", *words))
    assert not out.exists()


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    file = make_checkpoint(tmp_path / "model", layers=1) / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "experts.1.down_proj" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    error = refusal(flowrt_here("quantize", tmp_path / "model", tmp_path / "out"))
    assert f"tensor {name} has values that are not finite; copy the model's files again" in " ".join(error.split())


def test_the_hint_is_one_that_works(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", layers=1, width=37)
    done = flowrt_here("quantize", tmp_path / "model", tmp_path / "out")
    assert done.returncode == 0
    assert "as_stored is not possible (the matrices of experts have 74 rows" in done.stdout
