"""The worker of a chaos run: it injects faults into itself on orders, and reports when it stops using a peer.

A usual worker has no part in any of this.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from flowrt.actors.control import PeerLeft
from flowrt.chaos.orders import Note, Order
from flowrt.seams import Seams
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.wire.message import Message
from flowrt.workers.process import Worker, WorkerObserver, serve

T = TypeVar("T")

_BUSY_SECONDS, _IDLE_SECONDS = 3e-4, 5e-3


async def run_worker(control: Channel, seams: Seams) -> None:
    """The usual worker, which also carries out orders from its control connection."""
    await serve(control, seams, FaultEffects())


class FaultEffects(WorkerObserver):
    """The effects of orders on one worker. It wraps the worker's compute."""

    def __init__(self) -> None:
        self._hung_until = self._slow_until = 0.0
        self._factor = 1.0

    def begin(self, worker: Worker) -> None:
        self._worker = worker
        self._compute = compute = cast(Any, getattr(worker.compute, "inner", worker.compute))  # modelled time waits around the real call
        is_short, run_inline, timed = compute.is_short, compute.run_inline, compute.timed
        compute.is_short = lambda label: time.monotonic() >= self._hung_until and is_short(label)
        compute.run_inline = lambda label, call: run_inline(label, lambda: self._with_effects(call))
        compute.timed = lambda label, call: timed(label, lambda: self._with_effects(call))

    def act(self, worker: Worker, message: Message) -> None:
        if message.kind == Order.kind:
            self.carry_out(message.decode_header(Order))
            return
        worker.act(message)
        if message.kind == PeerLeft.kind:
            left = message.decode_header(PeerLeft)
            _report(Note("left", time.monotonic(), left.process, left.incarnation))

    def lose(self, worker: Worker, peer: Identity, reason: str) -> None:
        worker.lose(peer, reason)
        _report(Note("left", time.monotonic(), peer.name, peer.incarnation))

    def carry_out(self, order: Order) -> None:
        """Carries the order out on the worker's loop."""
        now = time.monotonic()
        match order.what:
            case "look":
                _report(Note("held", now, counts=held(self._worker)))
                return
            case "reset":
                _report(Note(order.what, now, counts={"connections": shut_connections(order.pid)}))
                return
            case "hang":
                self._hung_until = now + order.seconds
            case "slow":
                self._slow_until, self._factor = now + order.seconds, order.factor
                self._compute.slowness = order.factor  # of modelled times
                asyncio.get_running_loop().call_later(order.seconds, self._end_slowness)
        _report(Note(order.what, now))
        if order.what == "stall":
            time.sleep(order.seconds)

    def _end_slowness(self) -> None:
        if time.monotonic() >= self._slow_until:  # no later order
            self._compute.slowness = 1.0

    def _with_effects(self, call: Callable[[], T]) -> T:
        """Run one call of the worker with the effects of this moment."""
        while (seconds := self._hung_until - time.monotonic()) > 0:
            time.sleep(seconds)  # in one call, so that it takes no processor time
        begun = time.monotonic()
        result = call()
        now = time.monotonic()
        if now < self._slow_until:
            _slow_down(min(now + (self._factor - 1.0) * (now - begun), self._slow_until))
        return result


def _slow_down(until: float) -> None:
    """Compute a little now and then until `until`, so that the call is slow and not hung."""
    while (now := time.monotonic()) < until:
        while time.monotonic() < now + _BUSY_SECONDS:
            pass
        time.sleep(min(_IDLE_SECONDS, max(0.0, until - time.monotonic())))


def held(worker: Worker) -> dict[str, int]:
    """Counts of its tasks, of the things that an idle worker must not hold, and of its outstanding credits."""
    counts = {"tasks": len(asyncio.all_tasks())}
    if (data_path := worker.data_path) is None:
        return counts
    now = data_path.runner.snapshot()
    counts |= {"rows": now.num_rows, "waiting": len(data_path.runner.waiting())}
    counts["credits outstanding"] = sum(size - free for free, size in now.credits.values())
    counts["credits unsent"] = sum(consumed for consumed, _ in now.consumed.values())
    if data_path.group is not None:
        engine = data_path.group.snapshot().counts
        counts["sequences"] = engine.num_running + engine.num_waiting
        counts["pages held"] = engine.num_pages - engine.num_free_pages
    return counts


def shut_connections(pid: int) -> int:
    """Shut down every connection of this process to the process `pid`, as a failing network would; returns their number."""
    num_shut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                if struct.unpack("3i", credentials)[0] == pid:
                    connection.shutdown(socket.SHUT_RDWR)
                    num_shut += 1
        except OSError:  # closed meanwhile, of another family, or not connected
            continue
    return num_shut


def _report(note: Note) -> None:
    print(note.as_line(), file=sys.stderr, flush=True)
