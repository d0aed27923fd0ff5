"""`flowrt demo`, `flowrt init` and `flowrt run MODEL_DIR`: what a new user types, from a folder without any file of the checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli import conftest

from flowrt.cli.init import DEMO, PROMPTS, write_graph


def flowrt(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return conftest.flowrt(*words, cwd=folder)


def test_demo_answers_from_any_folder(tmp_path: Path) -> None:
    done = flowrt(tmp_path, "demo", "--prompt", "What is 347 + 285?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["632"]
    assert "experts.2" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_init_writes_a_file_that_validates_and_runs(tmp_path: Path) -> None:
    written = flowrt(tmp_path, "init", "new/folder")
    assert (written.returncode, written.stdout) == (0, "wrote new/folder/graph.yaml; run it: flowrt run new/folder/graph.yaml\n")
    assert ": valid; 1 attention group and 2 expert servers" in flowrt(tmp_path, "graph", "validate", "new/folder/graph.yaml").stdout
    done = flowrt(tmp_path, "run", "new/folder/graph.yaml")
    assert done.returncode == 0, done.stderr
    assert {"632", "3 4 5 6 7 8"} <= {line.strip() for line in done.stdout.splitlines()}


def test_init_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "graph.yaml").write_text("mine")
    done = flowrt(tmp_path, "init", ".")
    assert (done.returncode, done.stderr) == (2, "flowrt: error: graph.yaml: exists already; give another folder\n")
    assert (tmp_path / "graph.yaml").read_text() == "mine"
    assert flowrt(tmp_path, "init", "graph.yaml").returncode == 2


def test_a_model_of_ones_own(tmp_path: Path, model: Path) -> None:
    """Without a graph file, and with one that init has written: the same shape, and no prompt of the demo."""
    done = flowrt(tmp_path, "run", str(model), "--prompt", "one", "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert "\n1 request: " in done.stderr
    assert "experts.1" in done.stderr
    written = flowrt(tmp_path, "init", "mine", "--model", str(model))
    assert written.stdout == 'wrote mine/graph.yaml; run it: flowrt run mine/graph.yaml --prompt "Once upon a time"\n'
    assert f"for {model} in" in flowrt(tmp_path, "graph", "validate", "mine/graph.yaml").stdout
    assert "there is no prompt; give --prompt TEXT" in conftest.refusal(flowrt(tmp_path, "run", "mine/graph.yaml"))


def test_init_suggests_a_prompt_that_the_model_can_answer(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied, chats = tmp_path / "copied", tmp_path / "chats"
    shutil.copytree(DEMO / "tiny-moe", copied)
    shutil.copytree(model, chats)
    (chats / "tokenizer.json").write_bytes((DEMO / "tiny-moe" / "tokenizer.json").read_bytes())
    (chats / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for number, (folder, suggestion) in enumerate([(copied, ""), (chats, ' --chat --prompt "What is the capital of France?"')]):
        write_graph(tmp_path / str(number), folder)
        assert capsys.readouterr().out.endswith(f"{number}/graph.yaml{suggestion}\n")
    assert PROMPTS[0] in (tmp_path / "0" / "graph.yaml").read_text()


@pytest.mark.parametrize("words", [("run", "org/name"), ("init", "x", "--model", "org/name"), ("graph", "show", "org/name")])
def test_a_hub_id_gets_the_command_that_downloads_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert "hf download org/name --local-dir name" in conftest.refusal(flowrt(tmp_path, *words))
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_what_flowrt_needs_is_one_line() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from flowrt.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, "demo"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert re.match(r"flowrt: error: \S+ has no module \w+; run the Python that", done.stderr)
