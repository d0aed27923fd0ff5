"""`flowrt serve` as a process of its own, and a client of it. Not a test itself."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flowrt.serving.run_folder import found_graphs

ROOT = Path(__file__).resolve().parents[2]
GRAPH = ROOT / "examples" / "quickstart.yaml"
CLOSING = {"content-type": "application/json", "connection": "close"}  # the connection ends with the response
SECONDS = 60.0  # a machine may be busy; no test waits for it when all is well
STANDS_STILL = ("--set", "reliability.dead_seconds=600")  # a process may be stopped for as long as a test wants


class Server:
    """The command while it runs."""

    def __init__(self, *options: str, key: str = "") -> None:
        self._headers = CLOSING | ({"authorization": f"Bearer {key}"} if key else {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flowrt", "serve", str(GRAPH), "--port", "0", *options, *(["--api-key", key] if key else [])],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self.lines: list[str] = []
        line = self.wait_for("serving ")
        (port,) = re.findall(r":(\d+) \(", line)
        self.port = int(port)
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
        connection.request("GET" if body is None else "POST", path, data, self._headers)
        return connection.getresponse()

    def json(self, path: str, body: Any = None) -> Any:
        with self.request(path, body) as response:
            text = response.read()
            assert response.status == 200, text
            return json.loads(text)

    def open_stream(self, body: Any) -> http.client.HTTPResponse:
        """A stream whose head has come: its request is in progress. `events_of` reads it."""
        response = self.request("/v1/completions", body | {"stream": True})
        assert response.status == 200, response.read()
        return response

    def stream(self, body: Any) -> Iterator[Any]:
        with self.open_stream(body) as response:
            yield from events_of(response)

    @contextmanager
    def stopped(self, *names: str) -> Iterator[None]:
        """These processes stand still, so that no request in them can end meanwhile. Give the server STANDS_STILL."""
        pids = {self.pids[name] for name in names}
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):  # it has died with the launcher
                    os.kill(pid, signal.SIGCONT)

    def kill(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGKILL)

    def wait_back(self, name: str) -> None:
        (pid,) = re.findall(r"pid (\d+)", self.wait_for(f"{name} is back"))
        self.pids[name] = int(pid)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


def end_graphs() -> None:
    """Kill what a failed test leaves of the graphs that are up."""
    for found in found_graphs():
        if found.is_alive and found.description is not None:
            os.kill(found.description.pid, signal.SIGKILL)


def completion_request(fields: object) -> bytes:
    """A whole HTTP request, after which the connection is closed."""
    body = json.dumps(fields).encode()
    head = f"host: localhost\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}"
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + body


def events_of(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The events of a stream, which must end with [DONE]."""
    for line in response:
        if line == b"data: [DONE]\n":
            return
        if line.strip():
            yield json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream was cut off")


def metrics_of(server: Server) -> dict[str, float]:
    with server.request("/metrics") as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}
