"""`flowrt quantize`: what it prints, and bad input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from flowrt.cli import app, quantize

TINY = Path(__file__).parents[2] / "examples" / "tiny-moe"
PROMPTS = TINY.parent / "prompts.jsonl"


def called(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["flowrt", "quantize", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("words", [[], ["--weights", "fp8", "--prompts", str(PROMPTS)]])
def test_a_checkpoint_is_written(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called([str(TINY), str(tmp_path / "out"), *words], monkeypatch) == 0
    kept = words[1] if words else "int8"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"wrote {tmp_path}/out: 112 of 135 tensors in {kept}, 3.8 MiB to 2.2 MiB"
    assert lines[1].startswith("error of a matrix, relative to its weights: median ")
    assert lines[2].startswith(f"to keep the weights of experts so: flowrt run {tmp_path}/out --set model.expert_weights=as_stored")
    assert len(lines) == 3


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: str) -> str:
        assert called(words, monkeypatch) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1, text
        return text

    out = str(tmp_path / "out")
    assert "no such folder" in error(str(tmp_path / "nothing"), out)
    assert "exists already; give a new folder" in error(str(TINY), str(tmp_path))
    assert "no such file" in error(str(TINY), out, "--prompts", str(tmp_path / "nothing.txt"))
    assert "holds no *.safetensors file" in error(str(_without_weights(tmp_path)), out)
    monkeypatch.setattr(quantize, "missing_package", lambda: "transformers")
    assert "computes texts with transformers, and transformers is not installed" in error(str(TINY), out, "--prompts", str(PROMPTS))
    (tmp_path / "file").write_text("")
    assert "Not a directory" in error(str(TINY), str(tmp_path / "file" / "out"))
    assert not Path(out).exists()


def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_checkpoint(tmp_path / "model", layers=1) / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "experts.1.down_proj" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    assert called([str(tmp_path / "model"), str(tmp_path / "out")], monkeypatch) == 2
    assert f"tensor {name} has values that are not finite; copy the model's files again" in " ".join(capsys.readouterr().err.split())


def test_the_hint_is_one_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "model", layers=1, width=37)
    assert called([str(tmp_path / "model"), str(tmp_path / "out")], monkeypatch) == 0
    assert "as_stored is not possible (the matrices of experts have 74 rows" in capsys.readouterr().out


def _without_weights(folder: Path) -> Path:
    made = make_checkpoint(folder / "model", layers=1)
    (made / "model.safetensors").unlink()
    return made
