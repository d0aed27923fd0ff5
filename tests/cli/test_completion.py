"""`flowrt --install-completion`: what it installs for each shell, and what bash then completes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cli.conftest import environment, flowrt

_COMPLETE = """
. "$1"
COMP_WORDS=({words}); COMP_CWORD={place}; COMPREPLY=(); _flowrt; echo "${{COMPREPLY[@]}}"
"""
COMPLETED = [("flowrt simu", "simulate"), ("flowrt run --qui", "--quiet"), ("flowrt graph sch", "schema"), ("flowrt chaos --ki", "--kills")]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    done = flowrt("--install-completion", "--shell", "bash", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    script = tmp_path / ".local/share/bash-completion/completions/flowrt"
    assert str(script) in (tmp_path / ".bashrc").read_text()
    return script


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("words", "completion"), COMPLETED)
def test_bash_completes_commands_and_options(installed: Path, words: str, completion: str) -> None:
    script = _COMPLETE.format(words=words, place=len(words.split()) - 1)
    done = subprocess.run(["bash", "-c", script, "bash", str(installed)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == completion


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(("words", "completion"), COMPLETED)
def test_fish_completes_commands_and_options(tmp_path: Path, words: str, completion: str) -> None:
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "", "XDG_DATA_HOME": ""}
    assert flowrt("--install-completion", "--shell", "fish", **home).returncode == 0
    script = f"source {tmp_path}/.config/fish/completions/flowrt.fish; complete -C '{words}'"
    done = subprocess.run(["fish", "-c", script], capture_output=True, text=True, check=True, env=environment(**home))
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == [completion]


@pytest.mark.parametrize(
    ("shell", "place"), [("zsh", ".zsh/completions/_cyclopts_flowrt"), ("fish", ".config/fish/completions/flowrt.fish")]
)
def test_other_shells_get_a_script(tmp_path: Path, shell: str, place: str) -> None:
    done = flowrt("--install-completion", "--shell", shell, HOME=str(tmp_path), ZDOTDIR="", XDG_CONFIG_HOME="", XDG_DATA_HOME="")
    assert done.returncode == 0, done.stderr
    script = tmp_path / place
    assert "simulate" in script.read_text()
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n", str(script)], check=True)


def test_a_home_that_cannot_be_written_is_one_line() -> None:
    done = flowrt("--install-completion", "--shell", "bash", HOME="/proc/none")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("flowrt: error: /proc/none")
