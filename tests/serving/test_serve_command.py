"""`flowrt serve` as a process of its own: real front ends, groups and expert servers, and what their deaths do to streams."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
GRAPH = ROOT / "examples" / "quickstart.yaml"
ONE = ("--set", "deploy.processes=one")
JSON = {"content-type": "application/json"}
CLOSING = JSON | {"connection": "close"}  # the connection ends with the response
LONG = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
SHORT = LONG | {"max_tokens": 20}
SECONDS = 60.0  # a machine may be busy; no test waits for it when all is well


class Server:
    """The command while it runs."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flowrt", "serve", str(GRAPH), "--port", "0", *options],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self.lines: list[str] = []
        line = self.wait_for("serving ")
        self.port = int(re.search(r":(\d+) \(", line)[1])  # type: ignore[index]
        self.pids = {name: int(pid) for name, pid in re.findall(r"([\w.]+) (\d+)[,)]", line)}

    def wait_for(self, text: str) -> str:
        """Read standard error until a line has this text."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} never came in:\n{''.join(self.lines)}")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def request(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = self.connect()
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, CLOSING)
        return connection.getresponse()

    def json(self, path: str, body: Any = None) -> Any:
        with self.request(path, body) as response:
            text = response.read()
            assert response.status == 200, text
            return json.loads(text)

    def stream(self, body: Any) -> Iterator[Any]:
        """The events of a stream, which must end with [DONE]."""
        with self.request("/v1/completions", body | {"stream": True}) as response:
            assert response.status == 200, response.read()
            for line in response:
                if line == b"data: [DONE]\n":
                    return
                if line.strip():
                    yield json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream was cut off")

    def kill(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGKILL)

    def wait_back(self, name: str) -> None:
        self.pids[name] = int(re.search(r"pid (\d+)", self.wait_for(f"{name} is back"))[1])  # type: ignore[index]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(*ONE)
    yield server
    server.process.terminate()
    try:
        assert server.process.wait(SECONDS) == 0
    finally:
        server.close()


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_stream_and_whole_response_have_the_same_text(server: Server) -> None:
    whole = server.json("/v1/completions", SHORT)
    events = list(server.stream(SHORT | {"stream_options": {"include_usage": True}}))
    assert text_of(events) == whole["choices"][0]["text"] != ""
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 20
    seeded = SHORT | {"temperature": 1, "seed": 5, "n": 2}
    assert server.json("/v1/completions", seeded)["choices"] == server.json("/v1/completions", seeded)["choices"]


def test_chat_uses_the_template_of_the_model(server: Server) -> None:
    body = server.json("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "temperature": 0})
    assert (body["choices"][0]["message"], body["choices"][0]["finish_reason"]) == ({"role": "assistant", "content": " 3"}, "stop")


def test_metrics_count_what_clients_got(server: Server) -> None:
    before = metrics_of(server)
    usage = server.json("/v1/completions", SHORT)["usage"]
    after = metrics_of(server)
    for name, key in (("flowrt_prompt_tokens_total", "prompt_tokens"), ("flowrt_generation_tokens_total", "completion_tokens")):
        assert after[name] - before[name] == usage[key]
    assert after['flowrt_requests_total{finish_reason="length"}'] - before['flowrt_requests_total{finish_reason="length"}'] == 1
    for name in ("attention", "front_end"):
        assert after[f'flowrt_process_up{{process="{name}.0",role="{name}"}}'] == 1


def metrics_of(server: Server) -> dict[str, float]:
    with server.request("/metrics") as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def test_state_is_served(server: Server) -> None:
    assert server.json("/health") == server.json("/ready") == {"status": "ok"}
    assert server.json("/v1/models")["data"][0]["id"] == "tiny-moe"


def test_deaths_of_processes_and_the_end_of_the_server() -> None:
    """One server for all, because a start takes seconds."""
    server = Server("--set", "deploy.experts.servers=2", "--set", "serving.front_ends=2", "--set", "numerics=strict")
    try:
        expected = text_of(list(server.stream(LONG)))
        for name in ("experts.0", "attention.0"):
            check_streams_survive(server, name, expected)
        with ExitStack() as stack:
            check_front_end_dies_alone(server, stack)
        check_streams_finish_when_stopped(server)
        assert server.process.wait(SECONDS) == 0
    finally:
        server.close()


def check_streams_survive(server: Server, name: str, expected: str) -> None:
    """A process of the graph dies: each stream goes on and has the same text."""
    streams = [server.stream(LONG) for _ in range(3)]
    first = [next(stream) for stream in streams]
    server.kill(name)
    assert [text_of([event, *stream]) for event, stream in zip(first, streams, strict=True)] == [expected] * 3
    server.wait_back(name)


def check_front_end_dies_alone(server: Server, stack: ExitStack) -> None:
    """Its connections break; those of the other front end, and new ones, do not."""
    connections: dict[str, http.client.HTTPConnection] = {}
    while len(connections) < 2:
        connection = server.connect()
        stack.callback(connection.close)
        connection.request("GET", "/ready")
        connection.getresponse().read()
        owner = next(name for name in ("front_end.0", "front_end.1") if has_connection(server.pids[name], connection))
        connections.setdefault(owner, connection)
    broken, other = connections["front_end.0"], connections["front_end.1"]
    broken.request("POST", "/v1/completions", json.dumps(LONG | {"stream": True}), JSON)
    response = broken.getresponse()
    response.readline()
    server.kill("front_end.0")
    with pytest.raises((http.client.HTTPException, OSError)):
        response.read()
    other.request("GET", "/ready")
    assert other.getresponse().status == 200
    assert server.json("/v1/completions", SHORT)["usage"]["completion_tokens"] == 20
    server.wait_back("front_end.0")


def check_streams_finish_when_stopped(server: Server) -> None:
    stream = server.stream(LONG)
    events = [next(stream)]
    server.process.terminate()
    server.wait_for("stopping")
    for path, body in (("/ready", None), ("/v1/completions", LONG)):
        with server.request(path, body) as response:
            assert response.status == 503
    events += stream
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def has_connection(pid: int, connection: http.client.HTTPConnection) -> bool:
    port = connection.sock.getsockname()[1]
    return any(each.raddr and each.raddr.port == port for each in psutil.Process(pid).net_connections("tcp"))


def test_streams_of_a_server_that_is_killed_end_with_an_error_event() -> None:
    server = Server(*ONE)
    try:
        stream = server.stream(LONG)
        next(stream)
        front_end = psutil.Process(server.pids["front_end.0"])
        server.process.kill()
        assert list(stream)[-1]["error"]["type"] == "server_error"
        while is_running(front_end):
            time.sleep(0.01)
    finally:
        server.close()


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_address_that_others_reach_needs_a_key() -> None:
    done = run("--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "give --api-key KEY" in done.stderr


def test_address_in_use_is_one_line(server: Server) -> None:
    done = run("--port", str(server.port))
    assert done.returncode == 2
    assert re.fullmatch(r"flowrt: error: 127.0.0.1:\d+ cannot be bound: .*; another program uses it; give another --port\n", done.stderr)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowrt", "serve", str(GRAPH), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)
