"""A peer in a process of its own: started, sent requests, ended with all that it started (the protocol: child.py)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from flowrt.bench.peers.child import MAX_LINE_BYTES
from flowrt.errors import UserError
from flowrt.processes.import_path import import_path

LOAD_SECONDS, RESPONSE_SECONDS, END_SECONDS = 600.0, 1200.0, 10.0
_OUTPUT_TAIL_BYTES = 4096
CHILD = Path(__file__).with_name("child.py")

Served = tuple[dict[str, Any], Callable[..., Awaitable[dict[str, Any]]] | None]  # what an asynchronous `open_peer` gives; None: no requests


async def start_flowrt(*arguments: str, stdout: int, stderr: int) -> Process:
    """Runs a command of this flowrt."""
    command, environment = (sys.executable, "-P", "-m", "flowrt", *arguments), {**os.environ, "PYTHONPATH": import_path()}
    return await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=stdout, stderr=stderr, env=environment)


class Peer:
    """A running peer. Between requests it waits for input and uses no core."""

    def __init__(self, name: str, child: Process, errors: IO[bytes]) -> None:
        self.name, self.pid, self._child, self._errors = name, child.pid, child, errors
        self._stdin, self._stdout = cast("asyncio.StreamWriter", child.stdin), cast("asyncio.StreamReader", child.stdout)

    async def request(self, **request: Any) -> dict[str, Any]:
        """The response to one request. Raises UserError, with the last line that the peer wrote, when it ended or does not respond."""
        self._stdin.write(msgspec.json.encode(request) + b"\n")
        with suppress(BrokenPipeError, ConnectionResetError):  # the peer has ended: reading reports its output
            await self._stdin.drain()
        return await self.receive(RESPONSE_SECONDS)

    async def receive(self, timeout_seconds: float) -> dict[str, Any]:
        """The next line of the peer. Raises UserError as `request`."""
        try:
            async with asyncio.timeout(timeout_seconds):
                line = await self._stdout.readline()
        except TimeoutError:
            raise UserError(f"{self.name} has not responded for {timeout_seconds:g} s; {self._last_output()}") from None
        if not line:
            await self.end(END_SECONDS)  # what it writes at its end is written
            raise UserError(f"{self.name} ended by itself: {self._last_output()}")
        return cast("dict[str, Any]", msgspec.json.decode(line))

    async def end(self, grace_seconds: float) -> None:
        """End-of-file on its standard input ends a peer; after `grace_seconds` its process group is killed."""
        self._stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._child.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        await self._child.wait()

    def _last_output(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _OUTPUT_TAIL_BYTES))
        lines = [line.strip(" |") for line in self._errors.read().decode(errors="replace").splitlines()]
        texts = (line for line in reversed(lines) if any(map(str.isalnum, line)))  # not the frame of an ExceptionGroup
        return next(texts, "it wrote nothing")


@asynccontextmanager
async def start_peer(
    name: str, peer: str, *arguments: object, python: str | None = None, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[Peer, dict[str, Any]]]:
    """Runs `peer`, a module of flowrt, or a file for the interpreter `python`. Gives the peer and its facts once it has loaded.

    Raises UserError when it cannot be started.
    """
    own = {"PYTHONPATH": import_path()} if python is None else {}
    program = ["-P", "-m", f"{__package__}.child"] if python is None else [str(CHILD)]
    with tempfile.TemporaryFile() as errors:
        try:
            child = await asyncio.create_subprocess_exec(
                python or sys.executable,
                *program,
                peer,
                *map(str, arguments),
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                env={**os.environ, **own, **(environment or {})},
                limit=MAX_LINE_BYTES,
                start_new_session=True,  # its process group ends with it: vLLM has processes of its own
            )
        except OSError as error:
            raise UserError(f"{python} cannot be started ({error.strerror}); give the path of a Python interpreter") from error
        started, grace_seconds = Peer(name, child, errors), 0.0
        try:
            yield started, await started.receive(LOAD_SECONDS)
            grace_seconds = END_SECONDS
        finally:
            await started.end(grace_seconds)
