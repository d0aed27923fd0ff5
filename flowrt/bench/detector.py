"""How soon a process that stands still is marked dead, and how often a slow one is: `flowrt bench detector`.

Real processes (beating.py) and a real monitor, with a stand-in for the launcher, which relays heartbeats as the launcher does.
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
from dataclasses import dataclass, field

import msgspec

from flowrt.actors.control import Condemned, Control, Heartbeat, Joined, Left, Start, Stop, Suspected, as_message, from_message
from flowrt.actors.heartbeats import LAUNCHER_HEARTBEAT_SECONDS, send_heartbeats
from flowrt.actors.links import LOST
from flowrt.bench.beating import BLOCK, HANG, SPIN, Habits
from flowrt.bench.pairs import Target, judge, quantile_interval
from flowrt.bench.report import Figure
from flowrt.graph.model import GATEWAY
from flowrt.launcher.transport_choice import usable_cores
from flowrt.processes.fork_server import CONTROL_LIMITS
from flowrt.processes.fork_server_client import ForkServerProcess
from flowrt.reliability.detector import SEEN_SHARE, Timeouts
from flowrt.seams import RealClock, Running
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.stream import StreamChannel
from flowrt.transports.wire.message import Message

STALL_SECONDS, STALL_EVERY_SECONDS, PROCESSES_PER_CORE = 0.3, 10.0, 8
TARGET_SECONDS = 1.2  # p99, from the fault to the verdict
CLAIMED_SECONDS = 3600.0  # of a crowd, without a false verdict
MIN_OF_P99, MIN_OF_VERDICT = 100, 6  # values; of fewer the 99th percentile is the worst, and no median is bounded
_VERDICT_SECONDS = 30.0
_WORKER, _MONITOR = "flowrt.bench.beating:run_beating", "flowrt.workers.monitor:run_monitor"
_SAY_EVERY_TRIES, _SAY_EVERY_SECONDS = 5, 30.0
_PAUSE = "pause"
_FAULTS = {_PAUSE: "loop stopped by SIGSTOP", BLOCK: "loop asleep", SPIN: "loop busy", HANG: "operation hung"}

Say = Callable[[str], None]


def _silent(text: str) -> None:
    """Drops how far a measurement is."""


@dataclass
class _Worker:
    name: str
    incarnation: str
    host: str
    pid: int
    channel: StreamChannel
    relay: asyncio.Task[None] | None = None  # the monitor has none
    heard_at: float = field(default_factory=time.monotonic)
    stalled_seconds: float = 0.0  # of its latest stall


class _Launcher:
    """The source of this process's own heartbeats."""

    incarnation, num_firings = "bench", 0
    running: Running | None = None


class Crowd:
    """Workers that send heartbeats and a monitor that receives them by way of this process."""

    def __init__(self, fork_server: ForkServerProcess, tasks: asyncio.TaskGroup, habits: Habits) -> None:
        self._fork_server, self._tasks = fork_server, tasks
        self._graph = msgspec.json.encode(habits)
        self._monitor: StreamChannel | None = None
        self._own: list[asyncio.Task[None]] = []
        self._num_forks = 0
        self.workers: dict[str, _Worker] = {}
        self.verdicts: asyncio.Queue[tuple[float, Condemned]] = asyncio.Queue()
        self.counts: Counter[str] = Counter()
        self.longest_gap_seconds = 0.0

    async def begin(self, names: Sequence[str]) -> None:
        self._monitor = (await self._fork("monitor", _MONITOR, b"{}")).channel
        heartbeats = send_heartbeats(_Launcher(), RealClock(), self._send_nowait, LAUNCHER_HEARTBEAT_SECONDS, GATEWAY)
        self._own = [
            self._tasks.create_task(self._read_verdicts(self._monitor), name="monitor"),
            self._tasks.create_task(heartbeats, name="own heartbeats"),
        ]
        for name in names:
            await self.start(name)

    async def start(self, name: str) -> None:
        worker = self.workers[name] = await self._fork(name, _WORKER, self._graph)
        worker.relay = self._tasks.create_task(self._relay(worker), name=f"relay of {name}")
        await self._send(Joined(name, worker.incarnation, {}, worker.pid))

    async def kill(self, name: str) -> None:
        """Kill this worker, and notify the monitor."""
        worker = self.workers.pop(name)
        if worker.relay is not None:
            worker.relay.cancel()
        await self._send(Left(name, worker.incarnation, "replaced"))
        await self._fork_server.kill(worker.host, signal.SIGKILL)
        await worker.channel.aclose()

    async def inject(self, name: str, fault: str) -> None:
        worker = self.workers[name]
        if fault == _PAUSE:
            os.kill(worker.pid, signal.SIGSTOP)
        else:
            await worker.channel.send(Message(fault))

    async def stall(self, name: str) -> None:
        """Stop a worker for STALL_SECONDS, or longer when this process has no turn meanwhile."""
        worker, begun = self.workers[name], time.monotonic()
        os.kill(worker.pid, signal.SIGSTOP)
        await asyncio.sleep(STALL_SECONDS)
        os.kill(worker.pid, signal.SIGCONT)
        worker.stalled_seconds = time.monotonic() - begun

    async def end(self) -> None:
        for task in (*self._own, *(worker.relay for worker in self.workers.values() if worker.relay is not None)):
            task.cancel()
        await self._send(Stop())
        for channel in (self._monitor, *(worker.channel for worker in self.workers.values())):
            if channel is not None:
                await channel.aclose()

    async def _fork(self, name: str, worker: str, graph: bytes) -> _Worker:
        self._num_forks += 1
        host, incarnation = f"{name}.{self._num_forks}", f"{self._num_forks:x}"
        pid, (connection,) = await self._fork_server.fork(host, [name], worker, 1, "warning")
        channel = await StreamChannel.from_socket(connection, CONTROL_LIMITS, Identity(name))
        await channel.send(as_message(Start(name, incarnation, graph, b"")))
        return _Worker(name, incarnation, host, pid, channel)

    async def _relay(self, worker: _Worker) -> None:
        with contextlib.suppress(*LOST):
            while True:
                heartbeat = from_message(await worker.channel.recv())
                assert isinstance(heartbeat, Heartbeat)
                now = time.monotonic()
                self.longest_gap_seconds = max(self.longest_gap_seconds, now - worker.heard_at)
                worker.heard_at = now
                self._send_nowait(msgspec.structs.replace(heartbeat, process=worker.name, pid=worker.pid))

    async def _read_verdicts(self, channel: Channel) -> None:
        with contextlib.suppress(*LOST):
            while True:
                control = from_message(await channel.recv())
                self.counts[control.kind] += 1
                if isinstance(control, Condemned):
                    self.verdicts.put_nowait((time.monotonic(), control))

    def _send_nowait(self, heartbeat: Control) -> None:
        """Never waits: a heartbeat that finds no room is of no use later."""
        if self._monitor is not None:
            self._monitor.send_nowait(as_message(heartbeat))

    async def _send(self, control: Control) -> None:
        assert self._monitor is not None
        await self._monitor.send(as_message(control))


@asynccontextmanager
async def new_crowd(names: Sequence[str], habits: Habits) -> AsyncIterator[Crowd]:
    """All processes end with the block."""
    fork_server = ForkServerProcess(
        f"bench-detector-{os.getpid()}", lambda host, line: print(f"[{host}] {line}"), lambda host, status: None
    )
    try:
        await fork_server.start([_WORKER.partition(":")[0], _MONITOR.partition(":")[0]])
        async with asyncio.TaskGroup() as tasks:
            crowd = Crowd(fork_server, tasks, habits)
            await crowd.begin(names)
            yield crowd
            await crowd.end()
    finally:
        await fork_server.aclose()


async def detection_seconds(num_tries: int, num_workers: int = 4, say: Say = _silent) -> dict[str, list[float]]:
    """Seconds from a fault to its verdict, by kind of fault."""
    names = [f"experts.{number}" for number in range(num_workers)]
    seconds: dict[str, list[float]] = {fault: [] for fault in _FAULTS}
    async with new_crowd(names, Habits()) as crowd:
        for number in range(num_tries):
            for fault in _FAULTS:
                name = random.choice(names)
                await asyncio.sleep(random.uniform(1.0, 1.3))  # it has sent heartbeats and computed, and faults fall into any phase
                begun = time.monotonic()
                await crowd.inject(name, fault)
                async with asyncio.timeout(_VERDICT_SECONDS):
                    at, verdict = await crowd.verdicts.get()
                if verdict.process != name:
                    raise AssertionError(f"{verdict.process} was marked dead ({verdict.why}) and not {name} ({fault}, try {number})")
                seconds[fault].append(at - begun)
                await crowd.kill(name)
                await crowd.start(name)
            if (number + 1) % _SAY_EVERY_TRIES == 0:
                say(f"{number + 1} of {num_tries} of each kind, the slowest {max(map(max, seconds.values())):.2f} s")
    return seconds


@dataclass(frozen=True)
class FalseVerdicts:
    """What the detector did while no process stood still for long. `verdicts`: the false ones. `num_long_stalls`: stalls that lasted so
    long, since the benchmark itself had no turn, that a verdict on them is right."""

    num_workers: int
    seconds: float
    num_stalls: int
    num_long_stalls: int
    num_suspected: int
    verdicts: list[str]
    longest_gap_seconds: float  # between two heartbeats of a worker, as they came here


async def count_false_verdicts(seconds: float, num_workers: int, say: Say = _silent) -> FalseVerdicts:
    """All workers compute all the time, and each is stopped for STALL_SECONDS once in STALL_EVERY_SECONDS."""
    names = [f"experts.{number}" for number in range(num_workers)]
    enough_seconds = SEEN_SHARE * Timeouts().dead_seconds
    num_stalls = num_long_stalls = 0
    verdicts: list[str] = []
    async with new_crowd(names, Habits(rest_seconds=0.0)) as crowd:
        await asyncio.sleep(1.0)
        begun = said = time.monotonic()
        while (now := time.monotonic()) < begun + seconds:
            if now - said >= _SAY_EVERY_SECONDS:
                said = now
                say(f"{now - begun:.0f} s of {seconds:.0f} s, {num_stalls} stalls, {len(verdicts)} false verdicts")
            for name in names:
                await crowd.stall(name)
                num_stalls += 1
                num_long_stalls += crowd.workers[name].stalled_seconds >= enough_seconds
                await asyncio.sleep(max(0.0, STALL_EVERY_SECONDS / num_workers - STALL_SECONDS))
                while not crowd.verdicts.empty():
                    _, verdict = crowd.verdicts.get_nowait()
                    if not (verdict.why.startswith("stopped") and crowd.workers[verdict.process].stalled_seconds >= enough_seconds):
                        verdicts.append(f"{verdict.process}: {verdict.why}")
        silent = max(time.monotonic() - worker.heard_at for worker in crowd.workers.values())  # no heartbeat since
        longest = max(crowd.longest_gap_seconds, silent)
        watched = time.monotonic() - begun
        return FalseVerdicts(num_workers, watched, num_stalls, num_long_stalls, crowd.counts[Suspected.kind], verdicts, longest)


async def measure(num_tries: int, seconds: float, num_workers: int | None = None, say: Say = _silent) -> AsyncIterator[Figure | str]:
    """The lines of `flowrt bench detector`; num_tries or seconds 0: without that part."""
    if num_tries:
        for fault, values in (await detection_seconds(num_tries, say=say)).items():
            yield Figure.alone(f"{_FAULTS[fault]}, until marked dead", "s", values)
            yield f"{_FAULTS[fault]}: {times_text(values)}"
    if seconds:
        found = await count_false_verdicts(seconds, num_workers or PROCESSES_PER_CORE * usable_cores(), say)
        verdict = "not met" if found.verdicts else "met" if found.seconds >= CLAIMED_SECONDS else "not resolved: the claim is for an hour"
        long_stalls = f" ({found.num_long_stalls} of them long enough for a verdict)" if found.num_long_stalls else ""
        yield (
            f"false verdicts: {len(found.verdicts)} (target: 0; {verdict}) in {found.seconds:.0f} s, {found.num_workers} processes "
            f"computing on {usable_cores()} cores, {found.num_stalls} stalls of {STALL_SECONDS} s{long_stalls}; "
            f"{found.num_suspected} suspicions, longest gap between two heartbeats {found.longest_gap_seconds:.2f} s"
        )
        for each in found.verdicts:
            yield f"false verdict: {each}"


def times_text(seconds: Sequence[float]) -> str:
    """The median, the 99th percentile where there are enough values for one, the worst, and whether the target is met."""
    in_order = sorted(seconds)
    parts = [f"p50 {in_order[(len(in_order) - 1) // 2]:.3f} s"]
    if len(in_order) >= MIN_OF_P99:
        parts.append(f"p99 {in_order[math.ceil(0.99 * len(in_order)) - 1]:.3f} s")
    low, high = quantile_interval(in_order, 0.99) if len(in_order) >= MIN_OF_VERDICT else (-math.inf, math.inf)
    verdict = judge(low, high, Target(TARGET_SECONDS))
    return f"{', '.join(parts)}, worst {in_order[-1]:.3f} s of {len(in_order)} (target: p99 <= {TARGET_SECONDS} s; {verdict})"
