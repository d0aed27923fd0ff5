"""The process of a peer: serves requests as JSON lines, of any peer that has `open_peer`. Needs the standard library alone.

    python child.py PEER ARGUMENT...

PEER is a module, or the path of a file for an interpreter without flowrt. Its `open_peer(*arguments)` is a context manager, plain or
asynchronous, that gives (facts, answer). The first line written is the facts; then one line `answer(**request)` for each line read.
End-of-file ends the process. What libraries print goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
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
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        sys.stdout = os.fdopen(os.dup(2), "w", buffering=1)  # line by line, so that the output tail is in order
        opened = load_peer(peer)(*arguments)
        if hasattr(opened, "__aenter__"):
            loop = new_event_loop()
            try:
                loop.run_until_complete(_serve_async(opened, answers))
            finally:
                loop.close()
        else:
            with opened as (facts, answer):
                _write(answers, facts)
                for line in sys.stdin:
                    _write(answers, answer(**json.loads(line)))


def load_peer(peer: str) -> Callable[..., Any]:
    """`open_peer` of a module, or of a file."""
    if peer.endswith(".py") and (spec := spec_from_file_location("peer", peer)) is not None and spec.loader is not None:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = import_module(peer)
    return module.open_peer  # type: ignore[no-any-return]


async def _serve_async(opened: Any, answers: IO[str]) -> None:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with opened as (facts, answer):
        _write(answers, facts)
        while line := await reader.readline():
            _write(answers, await answer(**json.loads(line)))


def _write(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    if not __package__:
        del sys.path[0]  # run by its path: the files beside this one must not hide packages of their names
    main(sys.argv[1], sys.argv[2:])
