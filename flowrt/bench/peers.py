"""What flowrt is measured against: plain echoes, written as one would write them by hand, with nothing checked and nothing tagged.

Here: `queue_echo_seconds` (two tasks, two asyncio queues), ZeroMQEcho (pyzmq's asyncio sockets over ipc, against a child process).
Not here: the turns (pairs.py), our own side (hop.py). Called by hop.py; the child is this file, run as a module.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self


async def queue_echo_seconds(num_rounds: int, item: object) -> float:
    """Seconds of one echo, there and back, between two tasks over two queues: two wake-ups."""
    there: asyncio.Queue[object] = asyncio.Queue()
    back: asyncio.Queue[object] = asyncio.Queue()

    async def answer() -> None:
        for _ in range(num_rounds):
            await back.put(await there.get())

    async with asyncio.TaskGroup() as group:
        group.create_task(answer())
        start = time.perf_counter()
        for _ in range(num_rounds):
            await there.put(item)
            await back.get()
        seconds = time.perf_counter() - start
    return seconds / num_rounds


class ZeroMQEcho:
    """A PAIR socket to a child process that sends back each frame it gets, zero-copy on both sides. `reading`: both read and check
    every byte (operators.py)."""

    name = "pyzmq asyncio"

    def __init__(self, reading: bool = False) -> None:
        self._reading = reading
        self._folder = tempfile.TemporaryDirectory(prefix="flowrt-bench-")
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: Any = None

    async def __aenter__(self) -> Self:
        import zmq.asyncio

        address = f"ipc://{self._folder.name}/echo"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.bind(address)
        self._child = _start_child(address, self._reading)
        await self.round_trip_seconds(1, b"\x01")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close(0)
        self._context.term()
        if self._child is not None:
            assert self._child.stdin is not None
            self._child.stdin.close()  # its end-of-file is the child's end, also if we die
            self._child.kill()
            self._child.wait()
        self._folder.cleanup()

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        """Seconds until `payload`, any buffer, is back; the mean of `num_rounds` one after the other."""
        socket = self._socket
        look = _check if self._reading else _ignore
        start = time.perf_counter()
        for _ in range(num_rounds):
            await socket.send(payload, copy=False)
            look(await socket.recv(copy=False))
        return (time.perf_counter() - start) / num_rounds


def _start_child(address: str, reading: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "flowrt.bench.peers", address, "reading" if reading else ""], stdin=subprocess.PIPE)


def _ignore(frame: Any) -> None:
    pass


def _check(frame: Any) -> None:
    import numpy as np

    from flowrt.bench.operators import check

    check(np.frombuffer(frame.buffer, np.uint8))


async def _answer(address: str, look: Callable[[Any], None]) -> None:
    import zmq.asyncio

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    socket.connect(address)

    async def echo() -> None:
        while True:
            frame = await socket.recv(copy=False)
            look(frame)
            await socket.send(frame, copy=False)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(echo())
        await ended.wait()
        task.cancel()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The loop that workers run on, for both sides of a comparison."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


if __name__ == "__main__":
    assert Path(sys.argv[1].removeprefix("ipc://")).is_absolute()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_answer(sys.argv[1], _check if sys.argv[2] else _ignore))
