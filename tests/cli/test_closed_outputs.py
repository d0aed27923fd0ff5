"""Unwritable standard output or error: one line and exit code 1; the run continues where only progress output is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import PLENTY_SECONDS, environment, finished, refusal
from cyclopts import App
from cyclopts.argument import Argument

from flowrt.cli.app import app

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


WORDS = ("--prompt", "a", "--max-tokens", "2")


def shell(words: str, graph_file: Path) -> subprocess.CompletedProcess[str]:
    """`words` in a shell, where {run} is the command with the graph."""
    run = f"'{sys.executable}' -m flowrt run '{graph_file}' {' '.join(WORDS)}"
    line = ["sh", "-c", words.format(run=run)]
    return finished(line)


def run_with_full(stream: str, graph_file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command, with this stream to a full disk."""
    command = [sys.executable, "-m", "flowrt", "run", str(graph_file), *WORDS, *options]
    with open("/dev/full", "wb") as full:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        return subprocess.run(command, **streams, text=True, env=environment(), timeout=PLENTY_SECONDS, check=False)


def assert_reported(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if "error" in line] == [done.stderr.splitlines()[-1]]
    assert "standard output cannot be written" in done.stderr


def test_closed_output_is_reported(graph_file: Path) -> None:
    assert_reported(shell("{run} >&-", graph_file))


@pytest.mark.parametrize("options", [(), ("--json", "-")], ids=["text", "json"])
def test_unwritable_answers_are_reported(graph_file: Path, options: tuple[str, ...]) -> None:
    assert_reported(run_with_full("stdout", graph_file, *options))


def test_a_reader_of_the_record_that_left_is_reported_by_the_code(graph_file: Path) -> None:
    done = shell("({run} --json -; echo $? >&2) | true", graph_file)
    assert done.stderr.splitlines()[-1] == "141"
    assert "error" not in done.stderr


def test_progress_to_a_full_disk_or_a_closed_stream_is_not_missed(graph_file: Path) -> None:
    for done in (run_with_full("stderr", graph_file), shell("{run} 2>&-", graph_file)):
        assert done.returncode == 0
        assert done.stdout.strip()


def test_too_few_descriptors_to_begin_with(graph_file: Path) -> None:
    assert "too few open files are allowed (RLIMIT_NOFILE is 20" in refusal(shell("ulimit -n 20; {run}", graph_file))


def test_every_output_that_may_be_standard_output_takes_a_hyphen_as_its_own_argument() -> None:
    def outputs(part: App) -> Iterator[Argument]:
        if part.default_command is not None:
            yield from (each for each in part.assemble_argument_collection() if "standard output" in (each.parameter.help or ""))
        for name in part:
            if not name.startswith("-"):
                yield from outputs(part[name])

    found = [*outputs(app)]
    assert len(found) > 20
    assert all(each.parameter.allow_leading_hyphen for each in found), [each.name for each in found]
