"""The worker of a chaos run: it injects faults into itself on orders, and reports when it stops using a peer.

It reads private parts of a worker, as the simulation's `inside.py` does, so that a usual worker has no hooks for any of this.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from flowrt.actors.control import Left
from flowrt.chaos.orders import Note, Order
from flowrt.seams import Seams
from flowrt.transports.contract import Channel, ChannelStatistics, Identity
from flowrt.transports.wire.message import Message
from flowrt.workers.process import Worker, serve

T = TypeVar("T")

_BUSY_SECONDS, _IDLE_SECONDS = 3e-4, 5e-3


async def run_worker(control: Channel, seams: Seams) -> None:
    """The usual worker, which also carries out orders on its control connection."""
    takes_orders = FaultEffects()
    await serve(OrderChannel(control, takes_orders.carry_out), seams, begin=takes_orders.begin)


class OrderChannel(Channel):
    """The control connection; gives orders to `carry_out` and passes all other messages on."""

    scheme: ClassVar[str] = "obeying"

    def __init__(self, inner: Channel, carry_out: Callable[[Order], None]) -> None:
        self.peer = inner.peer
        self._inner, self._obey = inner, carry_out

    async def send(self, message: Message) -> None:
        await self._inner.send(message)

    async def send_acknowledged(self, message: Message) -> None:
        await self._inner.send_acknowledged(message)

    def send_nowait(self, message: Message) -> bool:
        return self._inner.send_nowait(message)

    async def recv(self) -> Message:
        while self._is_order(message := await self._inner.recv()):
            pass
        return message

    def recv_nowait(self) -> Message | None:
        while (message := self._inner.recv_nowait()) is not None and self._is_order(message):
            pass
        return message

    async def aclose(self) -> None:
        await self._inner.aclose()

    @property
    def closed(self) -> bool:
        return self._inner.closed

    def statistics(self) -> ChannelStatistics:
        return self._inner.statistics()

    def _is_order(self, message: Message) -> bool:
        if message.kind != Order.kind:
            return False
        self._obey(message.decode_header(Order))
        return True


class FaultEffects:
    """The effects of orders on one worker."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._held_until = self._slow_until = 0.0
        self._factor = 1.0

    def begin(self, worker: Worker) -> None:
        """Wrap the worker's compute and its handlers of lost peers, before it loads."""
        self._worker = worker
        compute: Any = getattr(worker._compute, "_inner", worker._compute)  # modelled time waits around the real call
        is_short, run_inline, timed = compute.is_short, compute.run_inline, compute._timed
        compute.is_short = lambda label: not self._holds and is_short(label)
        compute.run_inline = lambda label, call: run_inline(label, lambda: self._with_effects(call))
        compute._timed = lambda label, call: timed(label, lambda: self._with_effects(call))
        watched: Any = worker
        act, on_lost = watched._act, watched._on_lost

        def acted(message: Message) -> None:
            act(message)
            if message.kind == Left.kind:
                left = message.decode_header(Left)
                _say(Note("left", time.monotonic(), left.process, left.incarnation))

        def lost(peer: Identity, reason: str) -> None:
            on_lost(peer, reason)
            _say(Note("left", time.monotonic(), peer.name, peer.incarnation))

        watched._act, watched._on_lost = acted, lost

    def carry_out(self, order: Order) -> None:
        """On the worker's loop."""
        now = time.monotonic()
        if order.what == "look":
            _say(Note("held", now, counts=held(self._worker)))
            return
        if order.what == "reset":
            _say(Note(order.what, now, counts={"connections": shut_connections(order.pid)}))
            return
        _say(Note(order.what, now))
        match order.what:
            case "stall":
                time.sleep(order.seconds)
            case "hang":
                self._held_until = now + order.seconds
            case "slow":
                self._slow_until, self._factor = now + order.seconds, order.factor

    @property
    def _holds(self) -> bool:
        return time.monotonic() < self._held_until

    def _with_effects(self, call: Callable[[], T]) -> T:
        """One call of the worker, with the effects that hold now."""
        while (seconds := self._held_until - time.monotonic()) > 0:
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


def held(worker: Any) -> dict[str, int]:
    """What an idle worker should not hold any more, and its outstanding credits."""
    runner, group = worker._runner, worker._group
    counts: dict[str, int] = {}
    if runner is not None:
        counts["rows"] = len(runner._table)
        counts["waiting"] = len(runner.waiting())
        counts["credits away"] = sum(window.size - window.free for window in runner._windows.values())
        counts["credits kept back"] = sum(owed.consumed for owed in runner._owed.values())
    if group is not None:
        engine = group._engine.statistics()
        counts["sequences"] = engine.num_running + engine.num_waiting
        counts["pages held"] = engine.num_pages - engine.num_free_pages
    return counts


def shut_connections(pid: int) -> int:
    """Shut down every connection of this process to the process `pid`, as a failing network would; returns their number."""
    num_shut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            line = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or gone
            continue
        try:
            credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[0] == pid:
                line.shutdown(socket.SHUT_RDWR)
                num_shut += 1
        except OSError:  # of another family, or not connected
            pass
        finally:
            line.close()
    return num_shut


def _say(note: Note) -> None:
    print(note.as_line(), file=sys.stderr, flush=True)
