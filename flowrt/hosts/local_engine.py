"""The `local` engine: this machine plays every host. Host N has the loopback address 127.0.0.N+1, and its processes share no memory with
those of another host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

import msgspec

from flowrt.errors import WorkerDiedError
from flowrt.hosts.messages import HostStart
from flowrt.processes.import_path import import_path
from flowrt.processes.leftover import MARKER, PARENT_MARKER
from flowrt.processes.output_tail import exit_text

GRACE_SECONDS = 3.0  # for a host server to end its processes and itself


def start_server(line: bytes) -> subprocess.Popen[bytes]:
    """Start a host server on this machine, and write its line. Only the caller receives a terminal's Ctrl-C."""
    command = [sys.executable, "-P", "-m", "flowrt.hosts.server"]
    start = msgspec.json.decode(line, type=HostStart)
    marks = {MARKER: f"{start.run_id}.{start.host}", PARENT_MARKER: str(os.getpid())}
    environment = {**os.environ, "PYTHONPATH": import_path(), **marks}
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    assert server.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        server.stdin.write(line + b"\n")
        server.stdin.flush()
    return server


class LocalHostProcess:
    """See flowrt.system.host_engine.HostProcess. Its stdout ends with it, since no process that it starts has it."""

    def __init__(self, name: str) -> None:
        self._name, self.address = name, f"127.0.0.{int(name.rpartition('.')[2]) + 1}"
        self._loop, self._data = asyncio.get_running_loop(), b""
        self._replied: asyncio.Future[bytes] = self._loop.create_future()
        self._server: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()

    async def start(self, line: bytes) -> bytes:
        try:
            self._server = start_server(line)
        except OSError as error:
            raise WorkerDiedError(self._name, f"cannot start: {error}") from error
        assert self._server.stdout is not None
        self._stdout = self._server.stdout.fileno()
        self._loop.add_reader(self._stdout, self._on_readable)
        return await self._replied

    async def wait(self) -> str:
        await self._ended.wait()
        return exit_text(self._server.wait()) if self._server is not None else "was not started"

    def kill(self) -> None:
        """End its stdin: it ends and reaps its processes. Kill it later, if it does not respond."""
        if self._server is not None and self._server.stdin is not None:
            with contextlib.suppress(OSError):  # what is left of its line: it has ended
                self._server.stdin.close()
            self._loop.call_later(GRACE_SECONDS, self._server.kill)

    def close(self) -> None:
        """End it and wait. Idempotent."""
        if self._server is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.remove_reader(self._stdout)
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(GRACE_SECONDS)
        self._server.kill()
        self._server.wait()
        self._ended.set()

    def _on_readable(self) -> None:
        data = os.read(self._stdout, 1 << 16)
        self._data += data
        if not self._replied.done() and (not data or b"\n" in data):
            self._replied.set_result(self._data)
        if not data:
            self._loop.remove_reader(self._stdout)
            self._ended.set()


class LocalEngine:
    """See flowrt.system.host_engine.HostEngine."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self._servers: list[LocalHostProcess] = []

    async def open_host(self, name: str) -> LocalHostProcess:
        process = LocalHostProcess(name)
        self._servers.append(process)
        return process

    async def aclose(self) -> None:
        self.kill_all()

    def kill_all(self) -> None:
        for server in self._servers:
            server.kill()
        while self._servers:
            self._servers.pop().close()
