"""A small random model, graph files for it, and the real command in a process of its own."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from checkpoints import make_checkpoint

from flowrt.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
PLENTY_SECONDS = 100.0  # a machine may be busy; no test waits for it when all is well


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of single bytes."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=5, layers=2, tokenizer=True)


@pytest.fixture(scope="session")
def graph_file(model: Path) -> Path:
    """One group, two expert servers, all in the command's own process; beside the model, which it names by its folder."""
    path = model.parent / "graph.yaml"
    path.write_text(
        f"flowrt: 1\nmodel: {{path: {model.name}, dtype: float32}}\n"
        "deploy:\n  attention: {groups: 1, micro_batches: 2}\n  experts: {servers: 2}\n"
        "  links: {attention-experts: {link: ub}}\n  processes: one\n"
        "limits: {max_tokens: 4000, kv_pages: 1024}\n"
        "prompts: [one and one, 'two, three', f]\n"
    )
    return path


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "", **changes}


def finished(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A command, to its end."""
    given = {"env": environment(), "text": True, "timeout": PLENTY_SECONDS} | options
    return subprocess.run(command, capture_output=True, check=False, **given)


def flowrt(*words: str | Path, cwd: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    return finished([sys.executable, "-m", "flowrt", *map(str, words)], env=environment(**changes), cwd=cwd)


def flowrt_here(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, called in this process, which has imported torch already. For graphs whose workers are in the command's own process."""
    arguments = ["flowrt", *map(str, words)]
    changed = mock.patch.object(sys, "argv", arguments), mock.patch.dict(os.environ, COLUMNS="")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with redirect_stdout(out), redirect_stderr(err), changed[0], changed[1], pytest.raises(SystemExit) as end:
            main()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, int(end.value.code or 0), out.read(), err.read())


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The line of error, which is all that a command prints that refuses its input."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (done.args, done.stdout, done.stderr)
    assert done.stderr.startswith("flowrt: error: ")
    return done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Started:
    """The command while it runs."""

    def __init__(self, *words: str | Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flowrt", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        self.err = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read standard error until a line matches."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.err += line.decode()
            if match := re.search(pattern, line.decode()):
                return match
        raise AssertionError(f"{pattern} never came in:\n{self.err}")

    def read_answer(self) -> bytes:
        """Waits for the first bytes of an answer."""
        assert self.process.stdout is not None
        return os.read(self.process.stdout.fileno(), 1)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the end; the exit code."""
        out, err = self.process.communicate(timeout=PLENTY_SECONDS)
        self.out, self.err = out.decode(errors="replace"), self.err + err.decode()
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def started() -> Iterator[list[Started]]:
    """Put here what is started, so that it ends with the test."""
    running: list[Started] = []
    yield running
    for each in running:
        each.close()
