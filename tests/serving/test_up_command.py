"""A graph that stays up: `flowrt up`, `ps`, `logs`, `drain`, `down`, `run --attach` and `flowrt.attach`."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import environment, finished, refusal
from cli.conftest import flowrt as run_flowrt
from left_processes import left_processes
from serving.server_process import GRAPH, SECONDS, end_graphs

import flowrt
from flowrt.cli import graphs
from flowrt.cli.attach import run_attached
from flowrt.cli.options import RunOptions
from flowrt.errors import NO_READER, NotRunningError, UserError
from flowrt.sampling_params import SamplingParams
from flowrt.serving.run_folder import VARIABLE, find_graph

ONE = ("--set", "deploy.processes=one", "--port", "0")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    yield tmp_path / "run"
    end_graphs()


def up(*options: str) -> subprocess.CompletedProcess[str]:
    """Not in this process, since it forks."""
    return run_flowrt("up", GRAPH, *options)


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert graphs.ps(is_json=True) == 0
    shown: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return shown


def test_graph_stays_up_until_it_is_stopped(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notices"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notices"))
        done = up("--name", "a", *ONE)
        assert done.returncode == 0, done.stderr
        systemd.settimeout(SECONDS)
        assert systemd.recv(100) == b"READY=1"
    starting, is_up = done.stderr.splitlines()
    assert starting == "flowrt: starting a; flowrt logs a shows its progress"
    assert re.fullmatch(r"flowrt: a is up, serving tiny-moe at http://127.0.0.1:\d+ \(pid \d+\); flowrt down a stops it", is_up)
    pids = {process.pid for process in asyncio.run(flowrt.attach("a").status()).processes}
    assert "a is up already (pid " in refusal(up("--name", "a", *ONE))
    check_shown(capsys)
    check_attached(capsys)
    check_drained(capsys)
    capsys.readouterr()
    assert graphs.down("a", at_once=False) == 0
    assert capsys.readouterr().err == "flowrt: a is down\n"
    assert not left_processes(pids)
    assert list(directory.iterdir()) == []
    with pytest.raises(UserError, match="there is no graph a"):
        flowrt.attach("a")


def check_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (graph,) = listed(capsys)
    assert (graph["name"], graph["state"], graph["model"]) == ("a", "ready", "tiny-moe")
    states = {process["name"]: process["state"] for process in graph["processes"]}
    assert states.keys() >= {"launcher", "attention.0", "experts.0", "front_end.0"}
    assert set(states.values()) == {"up"}
    graphs.ps(is_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"a  ready  pid \d+  for .*  0 of \d+ requests$", lines[0])
    assert re.match(r"  model tiny-moe at http://127\.0\.0\.1:\d+$", lines[1])
    assert lines[2].split() == ["process", "state", "pid", "heartbeat", "cpu", "memory", "requests", "restarts"]
    assert len({len(line) for line in lines[2:-1] if "launcher" in line or "attention" in line}) == 1, "aligned"
    address = graph["url"].removeprefix("http://").split(":")
    public = http.client.HTTPConnection(address[0], int(address[1]), timeout=SECONDS)
    public.request("GET", "/admin/status")
    assert public.getresponse().status == 404, "admin calls come over the socket only"
    public.close()
    graphs.logs(None, follows=False, tail=None)
    assert "serving tiny-moe" in capsys.readouterr().out


def check_attached(capsys: pytest.CaptureFixture[str]) -> None:
    """The answers are those of a graph that this process runs."""
    graph, prompt = flowrt.attach(), "What is 1 + 2?"
    drawn = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=8, logit_bias=((5, 9.0),))
    with flowrt.start(GRAPH, overrides=["deploy.processes=one"]) as own:
        scored = SamplingParams(n=2, max_tokens=2, prompt_logprobs=3)
        for params in (SamplingParams(max_tokens=12, logprobs=2), drawn, scored):
            expected, completion = own.complete(prompt, params), asyncio.run(graph.complete(prompt, params))
            check_prompt_logprobs(completion, expected)
            assert completion.prompt_token_ids == expected.prompt_token_ids
            for choice, other in zip(completion.choices, expected.choices, strict=True):
                assert (choice.token_ids, choice.text, choice.finish_reason) == (other.token_ids, other.text, other.finish_reason)
                assert choice.logprobs == pytest.approx(other.logprobs, abs=1e-4)
                assert [dict(top).keys() for top in choice.top_logprobs] == [dict(top).keys() for top in other.top_logprobs]
        messages = [{"role": "user", "content": prompt}]
        assert asyncio.run(graph.complete(messages=messages)) == own.complete(messages=messages)
        scored_chat = asyncio.run(graph.complete(messages=messages, max_tokens=1, prompt_logprobs=0))
        check_prompt_logprobs(scored_chat, own.complete(messages=messages, max_tokens=1, prompt_logprobs=0))
    refused = asyncio.run(graph.complete([1, 10**6], max_tokens=1))
    assert (refused.finish_reason, refused.choices[0].token_ids) == ("error", ())
    assert "1000000" in str(refused.error)
    capsys.readouterr()
    options = RunOptions(prompt=(prompt,), chat=True, attach="a", quiet=True)
    assert run_attached(None, options, {}) == 0
    assert capsys.readouterr().out == "3\n"
    for lost in (options, replace(options, json="-")):
        with open("/dev/full", "w") as full, redirect_stdout(full), pytest.raises(UserError, match="standard output cannot be written"):
            run_attached(None, lost, {})
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as unread, redirect_stdout(unread):
            assert run_attached(None, lost, {}) == NO_READER
    with pytest.raises(UserError, match="--set cannot be given with --attach"):
        run_attached(None, RunOptions(prompt=(prompt,), attach="a", overrides=("x=1",)), {})


def check_prompt_logprobs(completion: flowrt.Completion, expected: flowrt.Completion) -> None:
    assert len(completion.prompt_logprobs) == len(expected.prompt_logprobs)
    for own, other in zip(completion.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert own.token == pytest.approx(other.token, abs=1e-4)
        assert own.top == tuple((token_id, pytest.approx(logprob, abs=1e-4)) for token_id, logprob in other.top)


def check_drained(capsys: pytest.CaptureFixture[str]) -> None:
    assert graphs.drain("a") == 0
    assert [graph["state"] for graph in listed(capsys)] == ["draining"]
    completion = asyncio.run(flowrt.attach("a").complete("Once", max_tokens=2))
    assert completion.error == "the graph is draining and takes no new requests; send them to another one"


def test_killed_graph_is_dead_and_its_name_free(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert up("--name", "a", *ONE).returncode == 0
    status = asyncio.run(flowrt.attach("a").status())
    launcher = next(process.pid for process in status.processes if process.name == "launcher")
    os.kill(launcher, signal.SIGKILL)
    assert not left_processes(process.pid for process in status.processes)
    while find_graph("a").is_alive:  # until its last thread has ended
        time.sleep(0.01)
    assert [graph["state"] for graph in listed(capsys)] == ["dead"]
    with pytest.raises(NotRunningError, match="a is dead"):
        flowrt.attach("a")
    assert up("--name", "a", *ONE).returncode == 0
    assert [graph["state"] for graph in listed(capsys)] == ["ready"]
    description = find_graph("a").description
    assert description is not None
    os.kill(description.pid, signal.SIGSTOP)
    monkeypatch.setattr(graphs, "STOP_SECONDS", 0.1)
    assert graphs.down("a", at_once=True) == 1
    assert list(directory.iterdir()) == []


def test_graph_that_does_not_start_leaves_nothing(directory: Path) -> None:
    refusal(up("--name", "a", "--set", "reliability.recovery=nonsense"))
    assert not directory.exists()
    refusal(up("--name", "a", "--port", "0", "--ssl-certfile", str(GRAPH)))
    assert not directory.exists() or list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("sent", "code", "text"),
    [(signal.SIGTERM, 130, "flowrt: interrupted\n"), (signal.SIGKILL, 3, "a was killed by SIGKILL while it started")],
)
def test_start_that_is_ended_leaves_nothing(directory: Path, sent: signal.Signals, code: int, text: str) -> None:
    """SIGTERM reaches the command, SIGKILL the process that it has started."""
    command = [sys.executable, "-m", "flowrt", "up", str(GRAPH), "--name", "a", *ONE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        process.stderr.readline()  # it has begun
        while (description := find_graph("a").description) is None:
            time.sleep(0.01)
        os.kill(process.pid if sent == signal.SIGTERM else description.pid, sent)
        assert text in process.stderr.read()
        assert process.wait(SECONDS) == code
    assert not left_processes({description.pid})
    assert list(directory.iterdir()) == []


_SIGNAL_AT_THE_FORK = """
import os, signal, sys
from flowrt.__main__ import main
fork = os.fork
def fork_late():
    os.kill(os.getpid(), signal.SIGTERM)
    return fork()
os.fork = fork_late
sys.argv = ["flowrt", *sys.argv[1:]]
main()
"""


def test_signal_at_the_fork_ends_both(directory: Path) -> None:
    done = finished([sys.executable, "-c", _SIGNAL_AT_THE_FORK, "up", str(GRAPH), "--name", "a", *ONE])
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "flowrt: interrupted")
    assert list(directory.iterdir()) == []
