"""How soon a process that stands still is condemned, and how often a slow one wrongly is: `flowrt bench detector`.

Here: real processes (beating.py) and a real monitor, with a stand-in for the launcher that passes beats on, as the launcher does. Not
here: the detector (flowrt/reliability/detector.py) and what a run makes of its verdicts (`flowrt chaos` measures that).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from flowrt.actors.control import Condemned, Control, Heartbeat, Joined, Left, Start, Stop, Suspected, as_message, from_message
from flowrt.actors.heartbeats import LAUNCHER_HEARTBEAT_SECONDS, send_heartbeats
from flowrt.actors.links import LOST
from flowrt.bench.beating import BLOCK, HANG, Habits
from flowrt.bench.pairs import Target, judge, quantile_interval
from flowrt.bench.report import Figure
from flowrt.graph.model import GATEWAY
from flowrt.launcher.transport_choice import usable_cores
from flowrt.processes.fork_server import CONTROL_LIMITS
from flowrt.processes.fork_server_client import ForkServerProcess
from flowrt.seams import RealClock, Running
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.stream import StreamChannel
from flowrt.transports.wire.message import Message

STALL_SECONDS, STALL_EVERY_SECONDS, OVERSUBSCRIBED = 0.3, 10.0, 4
TARGET_SECONDS = 1.2  # p99, from the fault to the verdict
_PATIENCE_SECONDS = 30.0
_WORKER, _MONITOR = "flowrt.bench.beating:run_beating", "flowrt.workers.monitor:run_monitor"
_SAY_EVERY_TRIES, _SAY_EVERY_SECONDS = 5, 30.0
CLAIMED_SECONDS = 3600.0  # of slow processes, none of them condemned
MIN_OF_P99, MIN_OF_VERDICT = 100, 6  # values; of fewer the 99th percentile is the worst, and no median is bounded
_FAULTS = {"pause": "loop stopped by SIGSTOP", "block": "loop blocked", "hang": "operation hung"}

Say = Callable[[str], None]


def _unheard(text: str) -> None:
    """Nobody wants to know how far it is."""


@dataclass
class _Life:
    name: str
    incarnation: str
    host: str
    pid: int
    channel: StreamChannel
    relay: asyncio.Task[None] | None = None
    heard_at: float = 0.0


class _Own:
    """The sources of this process's own beats."""

    incarnation, num_firings = "bench", 0
    running: Running | None = None


class Nursery:
    """Workers that beat, a monitor that listens, and this process between them."""

    def __init__(self, fork_server: ForkServerProcess, tasks: asyncio.TaskGroup, habits: Habits) -> None:
        self._fork_server, self._tasks = fork_server, tasks
        self._graph = msgspec.json.encode(habits)
        self._monitor: StreamChannel | None = None
        self._own: list[asyncio.Task[None]] = []
        self._num_lives = 0
        self.lives: dict[str, _Life] = {}
        self.verdicts: asyncio.Queue[tuple[float, Condemned]] = asyncio.Queue()
        self.counts: Counter[str] = Counter()
        self.longest_gap_seconds = 0.0

    async def begin(self, names: Sequence[str]) -> None:
        life = await self._fork("monitor", _MONITOR, b"{}")
        self._monitor = life.channel
        self._own = [
            self._tasks.create_task(self._hear(life.channel), name="monitor"),
            self._tasks.create_task(
                send_heartbeats(_Own(), RealClock(), self._pass_on, LAUNCHER_HEARTBEAT_SECONDS, GATEWAY), name="own beats"
            ),
        ]
        for name in names:
            await self.give_birth(name)

    async def give_birth(self, name: str) -> None:
        life = self.lives[name] = await self._fork(name, _WORKER, self._graph)
        life.heard_at = time.monotonic()
        life.relay = self._tasks.create_task(self._relay(life), name=f"relay of {name}")
        await self._tell(Joined(name, life.incarnation, {}, life.pid))

    async def bury(self, name: str) -> None:
        """Kill this life, and tell the monitor."""
        life = self.lives.pop(name)
        assert life.relay is not None
        life.relay.cancel()
        await self._tell(Left(name, life.incarnation, "replaced"))
        await self._fork_server.kill(life.host, signal.SIGKILL)
        await life.channel.aclose()

    async def order(self, name: str, fault: str) -> None:
        if fault == "pause":
            os.kill(self.lives[name].pid, signal.SIGSTOP)
        else:
            await self.lives[name].channel.send(Message(HANG if fault == "hang" else BLOCK))

    async def end(self) -> None:
        for task in (*self._own, *(life.relay for life in self.lives.values() if life.relay is not None)):
            task.cancel()
        await self._tell(Stop())
        for channel in (self._monitor, *(life.channel for life in self.lives.values())):
            if channel is not None:
                await channel.aclose()

    async def _fork(self, name: str, worker: str, graph: bytes) -> _Life:
        self._num_lives += 1
        host = f"{name}.{self._num_lives}"
        pid, (line,) = await self._fork_server.fork(host, [name], worker, 1, "warning")
        channel = await StreamChannel.from_socket(line, CONTROL_LIMITS, Identity(name))
        incarnation = f"{self._num_lives:x}"
        await channel.send(as_message(Start(name, incarnation, graph, b"")))
        return _Life(name, incarnation, host, pid, channel)

    async def _relay(self, life: _Life) -> None:
        with contextlib.suppress(*LOST):
            while True:
                heartbeat = from_message(await life.channel.recv())
                assert isinstance(heartbeat, Heartbeat)
                now = time.monotonic()
                self.longest_gap_seconds = max(self.longest_gap_seconds, now - life.heard_at)
                life.heard_at = now
                self._pass_on(msgspec.structs.replace(heartbeat, process=life.name, pid=life.pid))

    async def _hear(self, channel: Channel) -> None:
        with contextlib.suppress(*LOST):
            while True:
                word = from_message(await channel.recv())
                self.counts[word.kind] += 1
                if isinstance(word, Condemned):
                    self.verdicts.put_nowait((time.monotonic(), word))

    def _pass_on(self, heartbeat: Control) -> None:
        """Never waits: a beat that finds no room is of no use later."""
        if self._monitor is not None:
            self._monitor.send_nowait(as_message(heartbeat))

    async def _tell(self, control: Control) -> None:
        assert self._monitor is not None
        await self._monitor.send(as_message(control))


@asynccontextmanager
async def nursery(names: Sequence[str], habits: Habits) -> AsyncIterator[Nursery]:
    """Ends, and ends them all, with the block."""
    fork_server = ForkServerProcess(
        f"bench-detector-{os.getpid()}", lambda host, line: print(f"[{host}] {line}"), lambda host, status: None
    )
    try:
        await fork_server.start([_WORKER.partition(":")[0], _MONITOR.partition(":")[0]])
        async with asyncio.TaskGroup() as tasks:
            made = Nursery(fork_server, tasks, habits)
            await made.begin(names)
            yield made
            await made.end()
    finally:
        await fork_server.aclose()


async def notice(num_tries: int, num_workers: int = 4, say: Say = _unheard) -> dict[str, list[float]]:
    """Seconds from a fault to its verdict, by kind of fault."""
    names = [f"experts.{number}" for number in range(num_workers)]
    seconds: dict[str, list[float]] = {fault: [] for fault in _FAULTS}
    async with nursery(names, Habits()) as made:
        for number in range(num_tries):
            for fault in _FAULTS:
                name = random.choice(names)
                await asyncio.sleep(random.uniform(1.0, 1.3))  # it has beaten, and computed, and faults fall into any phase
                begun = time.monotonic()
                await made.order(name, fault)
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    at, verdict = await made.verdicts.get()
                if verdict.process != name:
                    raise AssertionError(
                        f"{verdict.process} was condemned ({verdict.why}), and {name} was not well ({fault}, try {number})"
                    )
                seconds[fault].append(at - begun)
                await made.bury(name)
                await made.give_birth(name)
            if (number + 1) % _SAY_EVERY_TRIES == 0:
                say(f"{number + 1} of {num_tries} of each kind, the slowest {max(map(max, seconds.values())):.2f} s")
    return seconds


@dataclass(frozen=True)
class Wrongly:
    """A run in which nobody stood still for long: what was said of whom nevertheless."""

    num_workers: int
    seconds: float
    num_stalls: int
    num_suspected: int
    condemned: list[str]
    longest_gap_seconds: float  # between two beats of a worker, as they came here


async def wrongly(seconds: float, num_workers: int, say: Say = _unheard) -> Wrongly:
    """Everybody computes all the time, and each is stopped for STALL_SECONDS once in STALL_EVERY_SECONDS."""
    names = [f"experts.{number}" for number in range(num_workers)]
    num_stalls = 0
    async with nursery(names, Habits(rest_seconds=0.0)) as made:
        await asyncio.sleep(1.0)
        begun = said = time.monotonic()
        end = begun + seconds
        while (now := time.monotonic()) < end:
            if now - said >= _SAY_EVERY_SECONDS:
                said = now
                say(f"{now - begun:.0f} s of {seconds:.0f} s, {num_stalls} stalls, {made.verdicts.qsize()} condemned")
            for name in names:
                life = made.lives[name]
                os.kill(life.pid, signal.SIGSTOP)
                num_stalls += 1
                await asyncio.sleep(STALL_SECONDS)
                os.kill(life.pid, signal.SIGCONT)
                await asyncio.sleep(max(0.0, STALL_EVERY_SECONDS / num_workers - STALL_SECONDS))
        condemned = []
        while not made.verdicts.empty():
            _, verdict = made.verdicts.get_nowait()
            condemned.append(f"{verdict.process}: {verdict.why}")
        silent = max(time.monotonic() - life.heard_at for life in made.lives.values())  # and not heard of again yet
        longest = max(made.longest_gap_seconds, silent)
        return Wrongly(num_workers, seconds, num_stalls, made.counts[Suspected.kind], condemned, longest)


async def measure(num_tries: int, seconds: float, num_workers: int | None = None, say: Say = _unheard) -> AsyncIterator[Figure | str]:
    """What `flowrt bench detector` tells; num_tries or seconds 0: without that part."""
    if num_tries:
        for fault, values in (await notice(num_tries, say=say)).items():
            yield Figure.alone(f"{_FAULTS[fault]}, until condemned", "s", values)
            yield f"{_FAULTS[fault]}: {told_times(values)}"
    if seconds:
        found = await wrongly(seconds, num_workers or OVERSUBSCRIBED * usable_cores(), say)
        verdict = "not met" if found.condemned else "met" if found.seconds >= CLAIMED_SECONDS else "not resolved: the claim is for an hour"
        yield (
            f"false evictions: {len(found.condemned)} (target: 0; {verdict}) in {found.seconds:.0f} s, {found.num_workers} processes "
            f"computing on {usable_cores()} cores, {found.num_stalls} stalls of {STALL_SECONDS} s; {found.num_suspected} suspicions, "
            f"longest gap between two beats {found.longest_gap_seconds:.2f} s"
        )
        for each in found.condemned:
            yield f"wrongly condemned: {each}"


def told_times(seconds: Sequence[float]) -> str:
    """For people: the middle, the 99th percentile where there are enough for one, the worst, and what comes of the target."""
    in_order = sorted(seconds)
    parts = [f"p50 {in_order[(len(in_order) - 1) // 2]:.3f} s"]
    if len(in_order) >= MIN_OF_P99:
        parts.append(f"p99 {in_order[math.ceil(0.99 * len(in_order)) - 1]:.3f} s")
    low, high = quantile_interval(in_order, 0.99) if len(in_order) >= MIN_OF_VERDICT else (-math.inf, math.inf)
    verdict = judge(low, high, Target(TARGET_SECONDS))
    return f"{', '.join(parts)}, worst {in_order[-1]:.3f} s of {len(in_order)} (target: p99 <= {TARGET_SECONDS} s; {verdict})"
