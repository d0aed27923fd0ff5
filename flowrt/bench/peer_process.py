"""A peer that decodes, in a process of its own: started, asked by JSON lines, ended.

Here: PeerProcess, the parent's side of the protocol that transformers_peer.py describes. Not here: the children (transformers_peer.py,
vllm_peer.py), what is asked and claimed (decode.py). A peer that is not asked waits for a line, so it takes no core.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flowrt.errors import UserError

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
LOAD_SECONDS, ANSWER_SECONDS = 600.0, 1200.0
_MAX_LINE_BYTES = 1 << 26


class PeerProcess:
    """`async with` starts it and waits until it has loaded; `facts` is its first line. Raises UserError, with what it wrote, when it
    ends or keeps silent."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self._command, self._environment = list(command), environment
        self._child: Process | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __aexit__

    @classmethod
    def transformers(cls, model: Path, dtype: str, num_threads: int, implementations: Sequence[str] = IMPLEMENTATIONS) -> Self:
        command = [sys.executable, "-m", "flowrt.bench.transformers_peer", str(model), dtype, str(num_threads), *implementations]
        return cls("transformers", command, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})

    @classmethod
    def vllm(cls, python: str, model: Path, dtype: str, num_threads: int, max_length: int) -> Self:
        script = Path(__file__).with_name("vllm_peer.py")
        return cls("vllm", [python, str(script), str(model), dtype, str(num_threads), str(max_length)])

    async def __aenter__(self) -> Self:
        environment = {**os.environ, **(self._environment or {})}
        try:
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=self._errors,
                env=environment,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,  # so that what the peer starts ends with it: vLLM has processes of its own
            )
        except OSError as error:
            self._errors.close()
            raise UserError(f"{self._command[0]} cannot be started ({error.strerror}); give the path of a Python interpreter") from error
        try:
            self.facts = await self._read(LOAD_SECONDS)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        child = self._child
        if child is not None:
            assert child.stdin is not None
            child.stdin.close()  # its end-of-file is the child's end, also if we die
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
        self._errors.close()

    async def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request."""
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request).encode() + b"\n")
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: reading says with which words
            await self._child.stdin.drain()
        return await self._read(ANSWER_SECONDS)

    async def _read(self, max_seconds: float) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdout is not None
        try:
            async with asyncio.timeout(max_seconds):
                line = await self._child.stdout.readline()
        except TimeoutError:
            raise UserError(f"{self.name} has not answered for {max_seconds:g} s; {self._output_tail()}") from None
        if not line:
            raise UserError(f"{self.name} ended by itself: {self._output_tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _output_tail(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"
