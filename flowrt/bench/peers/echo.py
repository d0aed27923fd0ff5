"""Plain echoes, which check and tag nothing: two tasks over asyncio queues, and pyzmq's asyncio sockets between two processes."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import numpy as np

from flowrt.bench.measure.benchmark import BLOCK_SECONDS, Measure
from flowrt.bench.peers.checksum import check
from flowrt.bench.peers.process import Served, start_peer

PYZMQ = "pyzmq asyncio"


class Echo(Protocol):
    """Sends a payload and receives it back."""

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        """Seconds until `payload`, any buffer, is back: the mean or the median of `num_rounds` in sequence."""
        ...


def measure_echo(echo: Echo, payload: Any) -> Measure[float]:
    """Microseconds of a round trip, over BLOCK_SECONDS."""
    num_rounds = 1

    async def measure() -> float:
        nonlocal num_rounds
        seconds = await echo.round_trip_seconds(num_rounds, payload)
        num_rounds = max(1, int(BLOCK_SECONDS / seconds))
        return 1e6 * seconds

    return measure


async def queue_echo_seconds(num_rounds: int, item: object) -> float:
    """Seconds of one echo, there and back, between two tasks over two queues: two wake-ups."""
    there: asyncio.Queue[object] = asyncio.Queue()
    back: asyncio.Queue[object] = asyncio.Queue()

    async def respond() -> None:
        for _ in range(num_rounds):
            await back.put(await there.get())

    async with asyncio.TaskGroup() as group:
        group.create_task(respond())
        start = time.perf_counter()
        for _ in range(num_rounds):
            await there.put(item)
            await back.get()
        seconds = time.perf_counter() - start
    return seconds / num_rounds


class ZeroMQEcho:
    """A PAIR socket to a process that sends back each frame, zero-copy on both sides. `reads`: both ends check every byte."""

    def __init__(self, socket: Any, reads: bool) -> None:
        self._socket, self._reads = socket, reads

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        socket, reads = self._socket, self._reads
        start = time.perf_counter()
        for _ in range(num_rounds):
            await socket.send(payload, copy=False)
            frame = await socket.recv(copy=False)
            if reads:
                check(np.frombuffer(frame.buffer, np.uint8))
        return (time.perf_counter() - start) / num_rounds


@asynccontextmanager
async def zeromq_echo(reads: bool = False) -> AsyncIterator[ZeroMQEcho]:
    import zmq.asyncio

    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        address = f"ipc://{folder}/echo"
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PAIR)
        try:
            socket.bind(address)
            async with start_peer(PYZMQ, __name__, address, "reads" if reads else ""):
                echo = ZeroMQEcho(socket, reads)
                await echo.round_trip_seconds(1, b"\x01")
                yield echo
        finally:
            socket.close(0)
            context.term()


@asynccontextmanager
async def open_peer(address: str, reads: str) -> AsyncIterator[Served]:
    import zmq.asyncio

    socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    socket.connect(address)

    async def echo() -> None:
        while True:
            frame = await socket.recv(copy=False)
            if reads:
                check(np.frombuffer(frame.buffer, np.uint8))
            await socket.send(frame, copy=False)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(echo())
        yield {}, None
        task.cancel()
    socket.close(0)
