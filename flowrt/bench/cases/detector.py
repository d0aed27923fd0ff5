"""How soon a process that stands still is marked dead, and how often a slow one is: real processes and a real monitor.

This process relays heartbeats to the monitor, as the launcher does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from flowrt.actors.control import Control, DetectorReport, Heartbeat, PeerJoined, PeerLeft, Start, Stop, as_message, from_message
from flowrt.actors.heartbeats import LAUNCHER_HEARTBEAT_SECONDS, send_heartbeats
from flowrt.actors.links import LOST
from flowrt.bench.measure.benchmark import Results
from flowrt.bench.peers.heartbeats import BLOCK, HANG, SPIN, WorkHabits
from flowrt.bench.report.figures import MIN_VALUES_OF_P99, Figure, Target, nearest_rank, tail_interval, verdict_of
from flowrt.bench.report.report import print_progress
from flowrt.graph.model import GATEWAY
from flowrt.processes.fork_server_client import LocalBackend
from flowrt.reliability.detector import SEEN_SHARE, ProcessState, Timeouts
from flowrt.seams import RealClock
from flowrt.system.machine_limits import usable_cores
from flowrt.system.process_backend import ProcessSpec, WorkerProcess
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.wire.message import Message

STALL_SECONDS, STALL_EVERY_SECONDS, PROCESSES_PER_CORE = 0.3, 10.0, 8
P99_TARGET = Target(1.2)  # seconds from the fault until the process is marked dead
CLAIMED_SECONDS = 3600.0  # of a crowd, without a process marked dead wrongly
MAX_VERDICT_SECONDS = 30.0
_WORKER, _MONITOR = "flowrt.bench.peers.heartbeats:run_worker", "flowrt.workers.monitor:run_monitor"
REPORT_EVERY_TRIES, REPORT_EVERY_SECONDS = 5, 30.0
_PAUSE = "pause"
_FAULTS = {_PAUSE: "loop stopped by SIGSTOP", BLOCK: "loop asleep", SPIN: "loop busy", HANG: "operation hung"}


@dataclass
class WatchedWorker:
    name: str
    incarnation: str
    process: WorkerProcess
    channel: Channel
    last_heartbeat_at: float = field(default_factory=time.monotonic)
    stalled_seconds: float = 0.0  # of its latest stall

    @property
    def may_be_marked_dead(self) -> bool:
        """Whether its latest stall was so long, since this process had no turn meanwhile, that marking it dead is right."""
        return self.stalled_seconds >= SEEN_SHARE * Timeouts().dead_seconds


class _OutputPrinter:
    """Prints the output of all processes. Their other notices are not needed: this process ends them itself."""

    def on_dying(self, *notice: object) -> None:
        return

    on_exited = on_backend_lost = on_dying

    def on_output(self, name: str, line: str) -> None:
        print_progress(f"[{name}] {line}")


class Crowd:
    """Workers that send heartbeats and a monitor that receives them by way of this process."""

    def __init__(self, backend: LocalBackend, tasks: asyncio.TaskGroup, monitor: Channel, habits: WorkHabits) -> None:
        self._backend, self._tasks, self._monitor = backend, tasks, monitor
        self._graph = msgspec.json.encode(habits)
        self._num_started = 0
        own = send_heartbeats("bench", lambda: (0, None), RealClock(), self._send_nowait, LAUNCHER_HEARTBEAT_SECONDS, GATEWAY)
        self._relays = {"reports": tasks.create_task(self._read_reports()), "own": tasks.create_task(own)}
        self.workers: dict[str, WatchedWorker] = {}
        self.reports: asyncio.Queue[tuple[float, DetectorReport]] = asyncio.Queue()
        self.num_suspected = 0
        self.longest_gap_seconds = 0.0

    async def start(self, name: str) -> None:
        self._num_started += 1
        worker = self.workers[name] = await fork_worker(self._backend, name, self._num_started, _WORKER, self._graph)
        self._relays[name] = self._tasks.create_task(self._relay(worker), name=f"relay of {name}")
        await self._send(PeerJoined(name, worker.incarnation, {}, worker.process.pid))

    async def kill(self, name: str) -> None:
        """Kills this worker and notifies the monitor."""
        worker = self.workers.pop(name)
        self._relays.pop(name).cancel()
        await self._send(PeerLeft(name, worker.incarnation, "replaced"))
        worker.process.kill()
        await worker.channel.aclose()

    async def inject(self, name: str, fault: str) -> None:
        worker = self.workers[name]
        if fault == _PAUSE:
            os.kill(worker.process.pid, signal.SIGSTOP)
        else:
            await worker.channel.send(Message(fault))

    async def stall(self, name: str) -> None:
        """Stops a worker for STALL_SECONDS, or longer when this process has no turn meanwhile."""
        worker, begun = self.workers[name], time.monotonic()
        os.kill(worker.process.pid, signal.SIGSTOP)
        await asyncio.sleep(STALL_SECONDS)
        os.kill(worker.process.pid, signal.SIGCONT)
        worker.stalled_seconds = time.monotonic() - begun

    async def end(self) -> None:
        for task in self._relays.values():
            task.cancel()
        await self._send(Stop())
        for channel in (self._monitor, *(worker.channel for worker in self.workers.values())):
            await channel.aclose()

    async def _relay(self, worker: WatchedWorker) -> None:
        with contextlib.suppress(*LOST):
            while True:
                heartbeat = from_message(await worker.channel.recv())
                assert isinstance(heartbeat, Heartbeat)
                now = time.monotonic()
                self.longest_gap_seconds = max(self.longest_gap_seconds, now - worker.last_heartbeat_at)
                worker.last_heartbeat_at = now
                self._send_nowait(msgspec.structs.replace(heartbeat, process=worker.name, pid=worker.process.pid))

    async def _read_reports(self) -> None:
        with contextlib.suppress(*LOST):
            while True:
                control = from_message(await self._monitor.recv())
                self.num_suspected += isinstance(control, DetectorReport) and control.state is ProcessState.SUSPECT
                if isinstance(control, DetectorReport) and control.state is ProcessState.DEAD:
                    self.reports.put_nowait((time.monotonic(), control))

    def _send_nowait(self, heartbeat: Control) -> None:
        """Never waits: a heartbeat that does not fit is of no use later."""
        self._monitor.send_nowait(as_message(heartbeat))

    async def _send(self, control: Control) -> None:
        await self._monitor.send(as_message(control))


async def fork_worker(backend: LocalBackend, name: str, number: int, worker: str, graph: bytes) -> WatchedWorker:
    """The incarnation `number` of a worker."""
    host, incarnation = f"{name}.{number}", f"{number:x}"
    process = await backend.start(ProcessSpec(host, (Identity(name, incarnation),), worker))
    (channel,) = process.controls
    await channel.send(as_message(Start(name, incarnation, graph, b"")))
    return WatchedWorker(name, incarnation, process, channel)


@asynccontextmanager
async def new_crowd(names: Sequence[str], habits: WorkHabits) -> AsyncIterator[Crowd]:
    """All processes end with the block."""
    preload = [_WORKER.partition(":")[0], _MONITOR.partition(":")[0]]
    backend = await LocalBackend.open(f"bench-detector-{os.getpid()}", _OutputPrinter(), preload, len(names) + 1, 120.0)
    try:
        async with asyncio.TaskGroup() as tasks:
            monitor = await fork_worker(backend, "monitor", 0, _MONITOR, b"{}")
            crowd = Crowd(backend, tasks, monitor.channel, habits)
            for name in names:
                await crowd.start(name)
            yield crowd
            await crowd.end()
    finally:
        await backend.aclose()


async def detection_seconds(num_tries: int, num_workers: int = 4) -> dict[str, list[float]]:
    """Seconds from a fault until its process is marked dead, by kind of fault."""
    names = [f"experts.{number}" for number in range(num_workers)]
    seconds: dict[str, list[float]] = {fault: [] for fault in _FAULTS}
    async with new_crowd(names, WorkHabits()) as crowd:
        for number in range(num_tries):
            for fault in _FAULTS:
                name = random.choice(names)
                await asyncio.sleep(random.uniform(1.0, 1.3))  # it has sent heartbeats and computed, and faults fall into any phase
                begun = time.monotonic()
                await crowd.inject(name, fault)
                async with asyncio.timeout(MAX_VERDICT_SECONDS):
                    at, report = await crowd.reports.get()
                if report.process != name:
                    raise AssertionError(f"{report.process} was marked dead ({report.why}) and not {name} ({fault}, try {number})")
                seconds[fault].append(at - begun)
                await crowd.kill(name)
                await crowd.start(name)
            if (number + 1) % REPORT_EVERY_TRIES == 0:
                print_progress(f"{number + 1} of {num_tries} of each kind, the slowest {max(map(max, seconds.values())):.2f} s")
    return seconds


@dataclass
class FalseDeaths:
    """What the detector did while no process stood still for long. `false_deaths`: processes marked dead wrongly. `num_long_stalls`:
    stalls so long that marking their process dead is right."""

    num_workers: int
    seconds: float = 0.0
    num_stalls: int = 0
    num_long_stalls: int = 0
    num_suspected: int = 0
    false_deaths: list[str] = field(default_factory=list)
    longest_gap_seconds: float = 0.0  # between two heartbeats of a worker, as they came here

    def __str__(self) -> str:
        verdict = "not met" if self.false_deaths else "met" if self.seconds >= CLAIMED_SECONDS else "undecided: the claim is for an hour"
        long_stalls = f" ({self.num_long_stalls} of them long enough to be marked dead)" if self.num_long_stalls else ""
        return (
            f"processes marked dead wrongly: {len(self.false_deaths)} (target: 0; {verdict}) in {self.seconds:.0f} s, {self.num_workers} "
            f"processes computing on {usable_cores()} cores, {self.num_stalls} stalls of {STALL_SECONDS} s{long_stalls}; "
            f"{self.num_suspected} suspicions, longest gap between two heartbeats {self.longest_gap_seconds:.2f} s"
        )


async def count_false_deaths(seconds: float, num_workers: int) -> FalseDeaths:
    """All workers compute all the time, and each is stopped for STALL_SECONDS once in STALL_EVERY_SECONDS."""
    names = [f"experts.{number}" for number in range(num_workers)]
    found = FalseDeaths(num_workers)
    async with new_crowd(names, WorkHabits(rest_seconds=0.0)) as crowd:
        await asyncio.sleep(1.0)
        begun = reported = time.monotonic()
        while found.seconds < seconds:
            for name in names:
                await crowd.stall(name)
                found.num_stalls += 1
                found.num_long_stalls += crowd.workers[name].may_be_marked_dead
                await asyncio.sleep(max(0.0, STALL_EVERY_SECONDS / num_workers - STALL_SECONDS))
                while not crowd.reports.empty():
                    _, report = crowd.reports.get_nowait()
                    if not (report.why.startswith("stopped") and crowd.workers[report.process].may_be_marked_dead):
                        found.false_deaths.append(f"{report.process}: {report.why}")
            found.seconds = (now := time.monotonic()) - begun
            if now - reported >= REPORT_EVERY_SECONDS:
                reported = now
                print_progress(f"{found.seconds:.0f} s of {seconds:.0f} s, {found.num_stalls} stalls, {len(found.false_deaths)} wrong")
        gaps = [now - worker.last_heartbeat_at for worker in crowd.workers.values()]  # no heartbeat since
        found.longest_gap_seconds = max(crowd.longest_gap_seconds, *gaps)
        found.num_suspected = crowd.num_suspected
    return found


async def measure(num_tries: int, seconds: float, num_workers: int | None = None) -> Results:
    """The lines of `flowrt bench detector`; num_tries or seconds 0: without that part."""
    if num_tries:
        for fault, values in (await detection_seconds(num_tries)).items():
            yield Figure.alone(f"{_FAULTS[fault]}, until marked dead", "s", values)
            yield f"{_FAULTS[fault]}: {times_text(values)}"
    if seconds:
        found = await count_false_deaths(seconds, num_workers or PROCESSES_PER_CORE * usable_cores())
        for line in (str(found), *(f"marked dead wrongly: {each}" for each in found.false_deaths)):
            yield line


def times_text(seconds: Sequence[float]) -> str:
    """The median, the 99th percentile where there are enough values for one, the worst, and whether the target is met."""
    parts = [f"p50 {nearest_rank(seconds, 0.5):.3f} s"]
    if len(seconds) >= MIN_VALUES_OF_P99:
        parts.append(f"p99 {nearest_rank(seconds, 0.99):.3f} s")
    verdict = verdict_of(*tail_interval(seconds, len(seconds)), P99_TARGET)
    return f"{', '.join(parts)}, worst {max(seconds):.3f} s of {len(seconds)} (target: p99 {P99_TARGET} s; {verdict})"
