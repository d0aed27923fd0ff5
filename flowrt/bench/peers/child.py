"""The process of a peer: serves requests as JSON lines, of any peer that has `open_peer`. Needs the standard library alone.

    python child.py PEER ARGUMENT...

PEER is a module, or the path of a file for an interpreter without flowrt. Its `open_peer(*arguments)` is a context manager, plain or
asynchronous, that gives (facts, respond). The first line written is the facts; then one line `respond(**request)` for each line read.
End-of-file ends the process. What libraries print goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib import import_module
from runpy import run_path
from typing import IO, Any

MAX_LINE_BYTES = 1 << 26


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The loop that workers run on, for both sides of a comparison."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def main(peer: str, arguments: list[str]) -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as responses:
        os.dup2(2, 1)
        sys.stdout = os.fdopen(os.dup(2), "w", buffering=1)  # line by line, so that the output tail is in order
        names = run_path(peer) if peer.endswith(".py") else vars(import_module(peer))
        opened = names["open_peer"](*arguments)
        if hasattr(opened, "__aenter__"):
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_serve_async(opened, responses))
        else:
            with opened as (facts, respond):
                _write(responses, facts)
                for line in sys.stdin:
                    _write(responses, respond(**json.loads(line)))


async def _serve_async(opened: Any, responses: IO[str]) -> None:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with opened as (facts, respond):
        _write(responses, facts)
        while line := await reader.readline():
            _write(responses, await respond(**json.loads(line)))


def _write(responses: IO[str], response: dict[str, Any]) -> None:
    responses.write(json.dumps(response) + "\n")
    responses.flush()


if __name__ == "__main__":
    if not __package__:
        del sys.path[0]  # run by its path: the files beside this one must not hide packages of their names
    main(sys.argv[1], sys.argv[2:])
