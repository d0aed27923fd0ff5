"""`flowrt run`: answers, the JSON record, exit codes, interrupts, plain lines and a terminal."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from cli.conftest import PLENTY_SECONDS, ROOT, Started, Terminal, environment, finished, flowrt, flowrt_here, refusal
from reference_model import ReferenceModel

from flowrt.actors.control import Statistics
from flowrt.api import read_graph
from flowrt.cli.options import RunOptions
from flowrt.cli.record import record_text
from flowrt.cli.run import RunSession, new_console
from flowrt.cli.text import OutputStream
from flowrt.errors import NotRunningError
from flowrt.launcher.start_checks import memory_needs
from flowrt.operators import weights

KEYS = {"index", "prompt", "prompt_token_ids", "token_ids", "text", "finish_reason", "error", "degraded", "ttft_seconds", "itl_seconds"}


def requests_of(path: Path) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads(path.read_text())["requests"]
    return requests


@pytest.fixture(scope="module")
def plain(graph_file: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run over the graph's own prompts, with options that override the file."""
    record = tmp_path_factory.mktemp("plain") / "record.json"
    record.write_text("of an earlier run")
    words = ("--max-tokens", "12", "--model", model, "--set", "deploy.experts.servers=3", "--json", record)
    return flowrt_here("run", graph_file, *words), record


def test_a_run_answers_and_ends_well(plain: tuple[subprocess.CompletedProcess[str], Path], model: Path) -> None:
    done, path = plain
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert [request["index"] for request in record["requests"]] == [0, 1, 2]
    for request in record["requests"]:
        assert request.keys() == KEYS
        truth = ReferenceModel(model, "float32").generate(request["prompt_token_ids"], 12)
        assert request["token_ids"] == list(truth)
        assert request["finish_reason"] == "length"
        assert request["error"] is None
        assert request["ttft_seconds"] > 0
        itl = request["itl_seconds"]
        assert itl.keys() == {"mean", "p50", "p99"}
        assert 0 <= itl["p50"] <= itl["p99"]
    assert not list(path.parent.glob(".*")), "the temporary file is gone"


def test_numbers_that_are_not_finite_become_null_in_the_record() -> None:
    text = record_text({"requests": [{"logprobs": [math.nan, -1.5]}], "summary": {"seconds": math.inf}})
    assert json.loads(text) == {"requests": [{"logprobs": [None, -1.5]}], "summary": {"seconds": None}}


def test_the_summary_accounts_for_processes_and_edges(plain: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    summary = json.loads(plain[1].read_text())["summary"]
    assert summary["exit_code"] == 0
    assert summary["num_tokens"] == 36
    assert summary["num_finished"] == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    assert [process["name"] for process in summary["processes"]] == ["attention.0", "experts.0", "experts.1", "experts.2"]
    assert all(process["resident_bytes"] > 0 for process in summary["processes"])
    pairs = {(edge["source"], edge["target"]): edge for edge in summary["edges"]}
    there, back = pairs["attention.0", "experts.2"], pairs["experts.2", "attention.0"]
    assert there["transport"] == back["transport"] == "inproc"
    assert there["link"] == "ub"
    assert there["num_messages"] == back["num_messages"] > 0, "every request of an expert server is answered"
    assert there["payload_bytes"] > 0
    assert summary["start_seconds"] > 0
    assert summary["tokens_per_second"] > 0


def test_plain_lines_outside_a_terminal(plain: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = plain
    assert "\x1b" not in done.stdout + done.stderr
    heads = [line for line in done.stdout.splitlines() if not line.startswith("    ")]
    assert sorted(heads) == ["[0] one and one", "[1] two, three", "[2] f"], "standard output has prompts and answers alone"
    assert re.search(r"^attention\.0 +\d+ +embed, attention, gate, head +inproc", done.stderr, re.MULTILINE)
    assert re.search(r"^experts\.2 +attention\.0 +inproc +\d+ ", done.stderr, re.MULTILINE), "a link that is not emulated is not shown"
    assert re.search(r"^time to first token +\d", done.stderr, re.MULTILINE)
    assert "flowrt: experts.2 loaded" in done.stderr
    assert not any(line.endswith(" ") for line in done.stderr.splitlines())


def test_slow_loading_shows_how_many_bytes_are_loaded(graph_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes = weights._read_bytes

    def read_slowly(*arguments: Any) -> None:
        time.sleep(0.2)
        read_bytes(*arguments)

    monkeypatch.setattr(weights, "_read_bytes", read_slowly)
    monkeypatch.setattr("flowrt.workers.process.PROGRESS_SECONDS", 0.2)
    done = flowrt_here("run", graph_file, "--prompt", "one and one", "--max-tokens", "2")
    assert done.returncode == 0
    found = re.findall(r"^flowrt: loading weights (\S+) of (\S+) MB, \S+ MB/s$", done.stderr, re.MULTILINE)
    total = sum(need.weight_bytes for need in memory_needs(read_graph(graph_file)).values())
    assert found, done.stderr
    assert all(0 <= float(loaded) <= float(of) == round(total / 1e6, 1) for loaded, of in found)
    assert len(found) < 5, "one in ten seconds"


def test_quiet_prints_the_answer_alone(graph_file: Path) -> None:
    words = ("run", graph_file, "--prompt", "one and one", "--max-tokens", "12")
    whole, quiet = flowrt_here(*words), flowrt_here(*words, "--quiet")
    assert (quiet.returncode, quiet.stderr, quiet.stdout) == (0, "", whole.stdout)
    assert "time to first token" in whole.stderr
    stop = re.findall("[A-Z]", whole.stdout)[-1]
    ended = flowrt_here(*words, "--quiet", "--stop", stop, "--stop", "never there", "--ignore-eos")
    assert ended.stdout.strip() == whole.stdout[: whole.stdout.index(stop)].strip()


def test_a_text_file_has_a_prompt_per_line(graph_file: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\r\n\n{two}\n")
    done = flowrt_here("run", graph_file, "--prompts", prompts, "--max-tokens", "2", "--quiet", "--json", tmp_path / "record.json")
    assert done.returncode == 0, done.stderr
    assert [request["prompt"] for request in requests_of(tmp_path / "record.json")] == ["one", "{two}"]


def test_a_record_that_cannot_be_written_is_a_failure_with_one_line(graph_file: Path) -> None:
    done = flowrt_here("run", graph_file, "--prompt", "one", "--max-tokens", "2", "--quiet", "--json", "/dev/full")
    assert done.returncode == 1, "bad input is what is found before anything starts"
    assert done.stderr == "flowrt: error: --json /dev/full: cannot be written (No space left on device); give another path\n"
    assert done.stdout, "the answer is there"


def test_requests_that_fail_leave_the_others_untouched(
    plain: tuple[subprocess.CompletedProcess[str], Path], graph_file: Path, tmp_path: Path
) -> None:
    """One run with every key that a line of --prompts can have; the record on standard output."""
    before = requests_of(plain[1])[0]
    drawn = {"prompt": "one and one", "temperature": 1.5, "top_p": 0.95, "top_k": 400, "max_tokens": 24, "ignore_eos": True}
    end = before["text"][4:6]
    lines = [
        {"prompt_token_ids": before["prompt_token_ids"]},
        {"prompt_token_ids": [3] * 5000},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [5, 512]},
        {"prompt_token_ids": [5, 10**30]},
        {"prompt": ""},
        {**drawn, "seed": 7},
        {**drawn, "seed": 7},
        {**drawn, "seed": 8},
        {"prompt": "one and one", "stop": [end]},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = flowrt_here("run", graph_file, "--prompts", prompts, "--max-tokens", "12", "--json", "-")
    assert done.returncode == 1, done.stderr
    requests = json.loads(done.stdout)["requests"]
    assert requests[0]["token_ids"] == before["token_ids"]
    reasons = {1: "the model has 4096", 2: "empty", 3: "token 512", 4: "is outside the vocabulary", 5: "empty"}
    for index, request in enumerate(requests):
        if index in reasons:
            assert request["finish_reason"] == "error", request
            assert reasons[index] in request["error"]
            assert request["token_ids"] == []
            assert request["ttft_seconds"] is None
            assert request["itl_seconds"] == {"mean": None, "p50": None, "p99": None}
        else:
            assert request["finish_reason"] in ("stop", "length"), request
    assert requests[6]["token_ids"] == requests[7]["token_ids"] != requests[8]["token_ids"]
    assert len(requests[6]["token_ids"]) == 24
    assert requests[9]["finish_reason"] == "stop"
    assert requests[9]["text"] == before["text"][: before["text"].index(end)]
    assert "[2] 0 token ids: \n    (error: the prompt is empty" in done.stderr, "people read standard error then"


def test_a_group_that_is_killed_ends_the_run_without_recovery(graph_file: Path, tmp_path: Path, started: list[Started]) -> None:
    sets = ("--set", "deploy.processes=many", "--set", "reliability.recovery=off")
    words = (*sets, "--prompt", "never ends", "--max-tokens", "4000", "--json", tmp_path / "record.json")
    running = Started("run", graph_file, *words)
    started.append(running)
    pid = int(running.wait_for(r"attention\.0 started, pid (\d+)")[1])
    running.wait_for("ready after")
    running.read_answer()
    os.kill(pid, signal.SIGKILL)
    assert running.end() == 3
    assert re.search(r"^flowrt: error: attention\.0 was killed", running.err, re.MULTILINE), running.err
    assert "Traceback" not in running.err
    (request,) = requests_of(tmp_path / "record.json")
    assert request["finish_reason"] == "error"
    assert request["error"].startswith("attention.0 was killed")
    assert request["token_ids"]
    assert json.loads((tmp_path / "record.json").read_text())["summary"]["died"]["process"] == "attention.0"


def test_a_server_that_is_killed_comes_back(graph_file: Path, tmp_path: Path, started: list[Started]) -> None:
    words = ("--set", "deploy.processes=many", "--prompt", "ends well", "--max-tokens", "200", "--json", tmp_path / "record.json")
    running = Started("run", graph_file, "--set", "reliability.unavailable_expert_seconds=60", *words)
    started.append(running)
    pid = int(running.wait_for(r"experts\.1 started, pid (\d+)")[1])
    running.wait_for("ready after")
    running.read_answer()
    os.kill(pid, signal.SIGKILL)
    running.wait_for(r"flowrt: experts\.1 is back after [\d.]+ s, pid \d+")
    assert running.end() == 0
    assert "flowrt: experts.1 was killed by SIGKILL; the run goes on without it" in running.err
    assert running.err.count("experts.1 started") == 1
    (request,) = requests_of(tmp_path / "record.json")
    assert request["finish_reason"] in ("stop", "length")


_INTERRUPTED = """
import os, signal
from flowrt.cli.app import main
from flowrt.cli.record import Record
records, add = {}, Record.add
def add_and_interrupt(self, event, now):
    add(self, event, now)
    records[self.index] = self
    if sum(record.is_running for record in records.values()) == NUM_RUNNING:
        Record.add = add
        os.kill(os.getpid(), signal.SIGINT)
Record.add = add_and_interrupt
main()
"""


def interrupted_run(num_running: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A run that gets SIGINT when so many of its requests have a token. The signal comes from the run itself, whose workers share its loop:
    sent by another process it could come after their end."""
    code = _INTERRUPTED.replace("NUM_RUNNING", str(num_running))
    return finished([sys.executable, "-c", code, "run", *map(str, words)])


def test_one_interrupt_lets_running_requests_finish(graph_file: Path, tmp_path: Path) -> None:
    done = interrupted_run(1, graph_file, "--prompt", "finishes", "--max-tokens", "64", "--json", tmp_path / "record.json")
    assert done.returncode == 130
    assert "1 running request finishes; press Ctrl-C again to end at once" in done.stderr
    (request,) = requests_of(tmp_path / "record.json")
    assert request["finish_reason"] in ("stop", "length")
    assert "time to first token" in done.stderr, "it ends in order, with its account"


def test_an_interrupt_refuses_requests_that_wait(graph_file: Path, tmp_path: Path) -> None:
    """Two of four run at a time."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(4 * (json.dumps({"prompt_token_ids": [5], "max_tokens": 64, "ignore_eos": True}) + "\n"))
    words = ("--set", "limits.max_num_seqs=2", "--set", "deploy.attention.micro_batches=1", "--prompts", prompts)
    done = interrupted_run(2, graph_file, *words, "--json", tmp_path / "record.json")
    assert done.returncode == 130
    assert "2 running requests finish, 2 waiting are refused; press Ctrl-C again" in done.stderr
    requests = requests_of(tmp_path / "record.json")
    assert [(request["finish_reason"], len(request["token_ids"])) for request in requests] == [("length", 64)] * 2 + [("abort", 0)] * 2
    assert done.stdout.count("\n    (aborted)\n") == 2


def test_interrupt_while_the_command_is_imported_ends_it_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "cyclopts.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True:\n    signal.pause()\n")
    done = flowrt("--version", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "flowrt: interrupted\n")


def test_interrupt_before_the_run_takes_the_signal_over_ends_it_with_one_line() -> None:
    """As while it reads the graph file and the model."""
    code = """
import os, signal
from flowrt.cli.app import app, main
app.command(lambda: os.kill(os.getpid(), signal.SIGINT), name="interrupted")
main()
"""
    done = finished([sys.executable, "-c", code, "interrupted"])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "flowrt: interrupted\n")


_STUCK = """
import sys, threading
import flowrt.cli.run, flowrt.seams
from flowrt.cli.app import main
flowrt.cli.run.STUCK_SECONDS = 0.3
def block(self, label, call):
    print("blocked", file=sys.stderr, flush=True)
    threading.Event().wait()
flowrt.seams.ThreadCompute.timed = block
main()
"""


def test_a_computation_that_never_returns_does_not_keep_the_command(graph_file: Path) -> None:
    """All workers in the command's own process, whose compute thread hangs: a termination still ends it, with the code of one."""
    words = [sys.executable, "-c", _STUCK, "run", str(graph_file)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stderr is not None
            while "blocked" not in (line := process.stderr.readline()):
                assert line, "it ended before it computed"
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=PLENTY_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "leaving without it" in err


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)], ids=["twice", "terminated"])
def test_a_second_interrupt_or_a_termination_ends_at_once(
    numbers: tuple[signal.Signals, ...], graph_file: Path, tmp_path: Path, started: list[Started]
) -> None:
    words = ("--prompt", "never ends", "--max-tokens", "4000", "--json", tmp_path / "record.json")
    running = Started("run", graph_file, "--set", "deploy.processes=2", *words)
    started.append(running)
    running.wait_for("ready after")
    running.read_answer()
    children = psutil.Process(running.process.pid).children(recursive=True)
    assert len(children) >= 3, "the fork server and two processes of workers"
    for number in numbers:
        running.signal(number)
        running.wait_for("interrupted: ")
    assert running.end() == 130
    assert "ending at once" in running.err
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    (request,) = requests_of(tmp_path / "record.json")
    assert request["finish_reason"] == "abort"
    assert 0 < len(request["token_ids"]) < 4000
    assert json.loads((tmp_path / "record.json").read_text())["summary"]["interrupted"] is True


def test_a_reader_that_leaves_is_no_fault(graph_file: Path, started: list[Started]) -> None:
    running = Started("run", graph_file, "--prompt", "never ends", "--max-tokens", "4000")
    started.append(running)
    running.read_answer()
    assert running.process.stdout is not None
    running.process.stdout.close()
    running.process.stdout = None
    assert running.process.wait(PLENTY_SECONDS) == 141
    assert running.process.stderr is not None
    err = running.process.stderr.read().decode()
    running.process.stderr.close()
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def on_terminal(graph_file: Path) -> tuple[int, str]:
    """A run whose standard output and error are a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "flowrt", "run", str(graph_file), "--max-tokens", "12"]
    variables = environment(TERM="xterm-256color", NO_COLOR="") | {"COLUMNS": "80", "LINES": "30"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    seen = b""
    try:
        while select.select([ours], [], [], PLENTY_SECONDS)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # Linux: the other side is closed
                break
        return process.wait(PLENTY_SECONDS), seen.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_terminal_shows_the_start_the_answers_and_the_tables(graph_file: Path) -> None:
    code, seen = on_terminal(graph_file)
    assert code == 0, seen
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    for text in ("starting 3 workers", "ready after", "[0] one and one", "[2] f", "12 tokens, length", "between processes", "inproc"):
        assert text in shown
    assert "\x1b[?25h" in seen, "the cursor is back"


def test_no_color_removes_colour_alone_and_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    console = new_console(OutputStream(out))
    assert console.is_terminal
    console.print("[bold red]text[/]")
    assert out.getvalue() == "\x1b[1mtext\x1b[0m\n"
    monkeypatch.setenv("TERM", "dumb")
    assert not new_console(OutputStream(Terminal())).is_terminal


async def test_summary_sends_no_further_requests(graph_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped worker would never respond: the final statistics of workers that end in order are enough."""
    out, statistics = OutputStream(io.StringIO()), {"experts.0": Statistics(num_firings=3)}
    session = RunSession(graph_file, RunOptions(prompt=("one",)), {}, out, out)

    class Graph:
        max_requests = 1
        final_statistics: ClassVar[dict[str, Statistics]] = {}

        async def __aenter__(self) -> Graph:
            return self

        async def __aexit__(self, *_: object) -> None:
            self.final_statistics = statistics  # type: ignore[misc]

        async def submit(self, *_: object, **__: object) -> int:
            raise NotRunningError

    session._graph = Graph()  # type: ignore[assignment]
    await session._serve()
    assert session._statistics == statistics


def test_an_empty_prompt_is_refused_before_anything_starts(graph_file: Path) -> None:
    error = refusal(flowrt_here("run", graph_file, "--prompt", "one", "--prompt", ""))
    assert error == "flowrt: error: a --prompt is empty: the model's tokenizer makes no token of it; give it a text\n"


def test_answers_that_the_graph_cuts_are_named(graph_file: Path, model: Path) -> None:
    small = ("--set", "limits.kv_pages=3", "--set", "limits.page_size=4", "--set", "model.expert_weights=int8")
    done = flowrt_here("run", graph_file, "--model", model, *small, "--max-tokens", "100", "--prompt", "1 2 3")
    assert "1 answer was cut: a prompt and its answer have at most 12 tokens (limits.kv_pages, or the model)" in done.stderr
    assert "expert_weights int8" in done.stderr
    done = flowrt_here("run", graph_file, "--model", model, "--set", "limits.max_tokens=2", "--max-tokens", "100", "--prompt", "1 2 3")
    assert "1 answer was cut: limits.max_tokens is 2" in done.stderr
    done = flowrt_here("run", graph_file, "--model", model, "--max-tokens", "2", "--prompt", "1 2 3")
    assert " cut:" not in done.stderr
    assert "expert_weights" not in done.stderr
