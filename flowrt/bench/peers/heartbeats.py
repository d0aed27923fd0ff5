"""A worker that computes and sends heartbeats: what the detector's benchmark stops, blocks and hangs."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time

import msgspec

from flowrt.actors.control import Control, Start, as_message, from_message
from flowrt.actors.heartbeats import send_heartbeats
from flowrt.actors.links import Link
from flowrt.seams import Running, Seams
from flowrt.transports.contract import Channel
from flowrt.transports.wire.message import Message

# Orders: the next call never returns; the event loop sleeps; it computes.
HANG, BLOCK, SPIN = "bench.hang", "bench.block", "bench.spin"
_HASHED_BYTES = 4 << 20
_BLOCKED_SECONDS = 5.0


class WorkHabits(msgspec.Struct):
    """What a worker does between faults. It travels in place of a graph."""

    rest_seconds: float = 0.02  # between two calls; 0: it computes all the time


class HashingWorker:
    """It hashes, call after call."""

    def __init__(self, start: Start, seams: Seams) -> None:
        self.num_firings = 0
        self.compute = seams.new_compute(start.name)
        self._hangs = False
        self._rest_seconds = msgspec.json.decode(start.graph, type=WorkHabits).rest_seconds
        self._bytes = bytes(_HASHED_BYTES)

    async def work(self) -> None:
        while True:
            await self.compute.run("experts", self._call)
            self.num_firings += 1
            await asyncio.sleep(self._rest_seconds)

    def on_message(self, message: Message) -> None:
        if message.kind == HANG:
            self._hangs = True
        elif message.kind == BLOCK:
            time.sleep(_BLOCKED_SECONDS)
        elif message.kind == SPIN:
            end = time.thread_time() + _BLOCKED_SECONDS
            while time.thread_time() < end:
                pass

    def _call(self) -> None:
        if self._hangs:
            threading.Event().wait()
        hashlib.sha256(self._bytes).digest()


async def run_worker(control: Channel, seams: Seams) -> None:
    """Works until the control connection ends."""
    start = from_message(await control.recv())
    assert isinstance(start, Start)
    worker = HashingWorker(start, seams)
    connection = Link(control, 1 << 10, worker.on_message)

    def send(heartbeat: Control) -> None:
        connection.post(as_message(heartbeat))

    def read() -> tuple[int, Running | None]:
        return worker.num_firings, worker.compute.running

    async with asyncio.TaskGroup() as group:
        heartbeats = send_heartbeats(start.incarnation, read, seams.clock, send, ended=("experts",))
        tasks = [group.create_task(worker.work(), name="work"), group.create_task(heartbeats, name="heartbeats")]
        await connection.run()
        for task in tasks:
            task.cancel()
    await worker.compute.aclose()
