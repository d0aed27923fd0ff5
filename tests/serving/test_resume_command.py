"""`flowrt up --resume` and `flowrt serve --resume`: the launcher is killed while it streams, and clients read on at the next one."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import flowrt, refusal
from serving.server_process import GRAPH, SECONDS, end_graphs

from flowrt.errors import UserError
from flowrt.serving.run_folder import VARIABLE, find_graph

NUM_STREAMS = 8


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    yield tmp_path / "run"
    end_graphs()


def up(tmp_path: Path, *options: str) -> None:
    settings = ("deploy.processes=2", "numerics=strict", f"reliability.request_log={tmp_path / 'log'}", "reliability.detector=false")
    done = flowrt("up", str(GRAPH), "--name", "a", "--port", "0", *(word for each in settings for word in ("--set", each)), *options)
    assert done.returncode == 0, done.stderr


def send_to_stopped_workers(client: Client, folder: Path) -> http.client.HTTPConnection:
    """Send a request that is in the log, and open for certain: the workers are stopped before."""
    (graph,) = json.loads(flowrt("ps", "--json").stdout)
    for pid in {process["pid"] for process in graph["processes"] if process["name"].startswith(("attention", "experts"))}:
        os.kill(pid, signal.SIGSTOP)

    def num_bytes() -> int:
        return sum(path.stat().st_size for path in (folder / "log").glob("*.log"))

    before = num_bytes()
    connection = client.send()
    while num_bytes() == before:
        time.sleep(0.01)
    return connection


def kill_launcher() -> None:
    found = find_graph("a")
    assert found.description is not None
    os.kill(found.description.pid, signal.SIGKILL)
    while find_graph("a").is_alive:
        time.sleep(0.01)


class Client:
    """One stream: its request, and the events that it has got."""

    def __init__(self, number: int, prefix: str = "stream") -> None:
        self.id, self.text, self.position, self.has_ended = f"{prefix}-{number}", dict[int, str](), "", False
        prompt, n = f"What is {number} + {number + 7}?", 2 if number % 3 == 0 else 1
        common = {"max_tokens": 60, "n": n, "stream": True, "temperature": 0.8 * (number % 2), "seed": number, "logit_bias": {"0": -100.0}}
        is_chat = number % 4 == 0
        self._path = "/v1/chat/completions" if is_chat else "/v1/completions"
        self._body = common | ({"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt})
        self._response: http.client.HTTPResponse | None = None

    def open(self, key: str = "") -> None:
        self._read_head(self.send(key))

    def send(self, key: str = "") -> http.client.HTTPConnection:
        return self._request("POST", self._path, json.dumps(self._body), {"x-request-id": self.id}, key)

    def reopen(self, key: str = "") -> None:
        self._read_head(self._request("GET", f"/v1/requests/{self.id}?stream=true", None, {"last-event-id": self.position}, key))

    @staticmethod
    def _request(method: str, path: str, body: str | None, headers: dict[str, str], key: str) -> http.client.HTTPConnection:
        described = find_graph("a").description
        assert described is not None
        (port,) = re.findall(r":(\d+)", described.url)
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=4 * SECONDS)
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        connection.request(method, path, body, {"content-type": "application/json", "connection": "close"} | headers | authorization)
        return connection

    def _read_head(self, connection: http.client.HTTPConnection) -> None:
        self._response = connection.getresponse()
        assert self._response.status == 200, self._response.read()

    def read(self, num_events: int | None = None) -> None:
        """Read so many events, or to the end, which a killed launcher brings, too."""
        assert self._response is not None
        position = ""
        while num_events is None or num_events > 0:
            try:
                line = self._response.readline().decode().strip()
            except (http.client.HTTPException, OSError):
                return
            if line.startswith("id: "):
                position = line.removeprefix("id: ")
            if line == "data: [DONE]" or (not line and self._response.isclosed()):
                self._response.close()
                return
            if line.startswith("data: "):
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    continue
                for choice in event["choices"]:
                    text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                    self.text[choice["index"]] = self.text.get(choice["index"], "") + text
                    self.has_ended |= choice["finish_reason"] is not None
                self.position = position or self.position
                num_events = None if num_events is None else num_events - 1


def test_clients_read_on_after_the_launcher_was_killed(tmp_path: Path) -> None:
    up(tmp_path, "--api-key", "secret")
    whole = [Client(number, "whole") for number in range(NUM_STREAMS)]
    for client in whole:
        client.open("secret")
    for client in whole:
        client.read()
    clients = [Client(number) for number in range(NUM_STREAMS)]
    for client in clients:
        client.open("secret")
    for number, client in enumerate(clients):
        client.read(1 + number)
    kill_launcher()
    for client in clients:
        client.read()  # what had been sent
    assert not all(client.has_ended for client in clients), "some were open"

    assert "a had an API key, which is not kept" in refusal(flowrt("up", "--resume", "a"))
    resumed = flowrt("up", "--resume", "a", FLOWRT_API_KEY="secret")
    assert resumed.returncode == 0, resumed.stderr
    for client in clients:
        client.reopen("secret")
    for client in clients:
        client.read()
    assert [client.text for client in clients] == [client.text for client in whole]
    assert "a is up already (pid " in refusal(flowrt("up", "--resume", "a", FLOWRT_API_KEY="secret"))
    assert "resumed requests: " in flowrt("logs", "a").stderr + flowrt("logs", "a").stdout
    assert flowrt("down", "a").returncode == 0
    with pytest.raises(UserError, match="there is no graph a"):
        find_graph("a")


def test_what_cannot_be_resumed_is_one_line(tmp_path: Path) -> None:
    for arguments, text in (
        (("up", "--resume", "b"), "there is no graph 'b' to resume; give its graph file"),
        (("serve", str(GRAPH), "--resume", "--port", "0"), "has no request log to resume from; set reliability.request_log"),
    ):
        assert text in refusal(flowrt(*arguments))
    up(tmp_path)
    with contextlib.closing(send_to_stopped_workers(Client(1), tmp_path)):
        kill_launcher()
    log = ("--set", f"reliability.request_log={tmp_path / 'log'}", "--port", "0")
    other = flowrt("serve", str(GRAPH), "--resume", *log)
    assert other.returncode == 2, other.stderr
    assert "open requests of numerics strict, this graph has fast" in other.stderr.splitlines()[-1]
    assert "leave out all but --resume and --api-key" in refusal(flowrt("up", "--resume", "a", "--port", "1"))
