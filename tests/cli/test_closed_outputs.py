"""Unwritable standard output or error: one line and exit code 1; the run continues where only progress output is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli.conftest import PLENTY_SECONDS, environment

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def shell(words: str, graph_file: Path) -> subprocess.CompletedProcess[str]:
    """`words` in a shell, where {run} is the command with the graph."""
    run = f"'{sys.executable}' -m flowrt run '{graph_file}' --prompt a --max-tokens 2"
    line = ["sh", "-c", words.format(run=run)]
    return subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=PLENTY_SECONDS, check=False)


@pytest.mark.parametrize("words", ["{run} >&-", "{run} >/dev/full", "{run} --json - >/dev/full"])
def test_unwritable_answers_are_reported(graph_file: Path, words: str) -> None:
    done = shell(words, graph_file)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if "error" in line] == [done.stderr.splitlines()[-1]]
    assert "standard output cannot be written" in done.stderr


@pytest.mark.parametrize("words", ["{run} 2>/dev/full", "{run} 2>&-"])
def test_progress_that_cannot_be_written_is_not_missed(graph_file: Path, words: str) -> None:
    done = shell(words, graph_file)
    assert done.returncode == 0
    assert done.stdout.strip()


def test_too_few_descriptors_to_begin_with(graph_file: Path) -> None:
    done = shell("ulimit -n 20; {run}", graph_file)
    assert done.returncode == 2
    assert done.stderr.startswith("flowrt: error: too few open files are allowed (RLIMIT_NOFILE is 20")
    assert done.stderr.count("\n") == 1
