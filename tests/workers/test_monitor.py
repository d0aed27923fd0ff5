"""The monitor: in virtual time with workers and a launcher that forwards their heartbeats, and over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest

from flowrt.actors.control import (
    Connected,
    Control,
    DetectorReport,
    Heartbeat,
    LateResponse,
    Listening,
    PeerJoined,
    PeerLeft,
    Peers,
    Start,
    Statistics,
    StatisticsRequest,
    Stop,
    as_message,
    from_message,
)
from flowrt.actors.heartbeats import send_heartbeats
from flowrt.actors.links import LOST, Link
from flowrt.graph.model import GATEWAY
from flowrt.reliability.detector import ProcessState
from flowrt.reliability.scenario import Crash, Hang, Pause, Scenario, Skew, Slow, Stall
from flowrt.seams import Running, Seams
from flowrt.simulation.faults import Faults
from flowrt.simulation.transport import SimulatedChannel
from flowrt.simulation.world import World, run
from flowrt.system.process_status import Activity, process_activity, process_times
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.stream import StreamChannel
from flowrt.workers.monitor import run_monitor

SEEDS = range(8)
LIMITS = Limits(max_header_bytes=1 << 20, capacity_messages=32)
WORKERS = ("attention.0", "experts.0", "experts.1", "experts.2")
GRAPH = b'{"nodes": {}, "reliability": {"suspect_seconds": 0.4, "dead_seconds": 1.0}}'


def reports(control: Control, state: ProcessState) -> bool:
    return isinstance(control, DetectorReport) and control.state is state


async def work(control: Channel, seams: Seams) -> None:
    """Computes and sends heartbeats until the control connection ends."""
    compute = seams.new_compute("compute")
    link = Link(control, 1000, lambda message: None)
    num_calls = 0

    def read() -> tuple[int, Running | None]:
        return num_calls, compute.running

    async def calls() -> None:
        nonlocal num_calls
        while True:
            await compute.run("call", lambda: None)
            num_calls += 1
            await seams.clock.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(calls()),
            group.create_task(send_heartbeats("1", read, seams.clock, lambda heartbeat: link.post(as_message(heartbeat)), ended=("call",))),
        ]
        await link.run()
        for task in tasks:
            task.cancel()
    await compute.aclose()
    await control.aclose()


@dataclass
class Scene:
    """A launcher that only passes messages on. `reported`: the messages of the monitors, (seconds, text) with the reasons."""

    world: World
    reported: list[tuple[float, Control]] = field(default_factory=list)
    monitor: Channel | None = None

    def pair(self, name: str, gateway: str) -> tuple[SimulatedChannel, SimulatedChannel]:
        node = self.world.next_node(name)
        return SimulatedChannel.pair(self.world.network, (Identity(GATEWAY), gateway), (Identity(name, "1"), node), LIMITS)

    async def notify_monitor(self, control: Control) -> None:
        if self.monitor is not None:
            with contextlib.suppress(*LOST):
                await self.monitor.send(as_message(control))

    def pass_on(self, heartbeat: Control) -> None:
        """A heartbeat that finds no room is dropped: it is useless later, and no process waits for a monitor."""
        if self.monitor is not None:
            with contextlib.suppress(*LOST):
                self.monitor.send_nowait(as_message(heartbeat))

    async def relay(self, name: str, channel: Channel) -> None:
        with contextlib.suppress(*LOST):
            while True:
                control = from_message(await channel.recv())
                assert isinstance(control, Heartbeat)
                self.pass_on(msgspec.structs.replace(control, process=name, pid=self.world.processes[name].pid))
        await self.notify_monitor(PeerLeft(name, "1", "its line ended"))

    async def watch(self, gateway: str, began: float) -> None:
        """Starts a monitor, receives its messages, and starts another when it ends."""
        while True:
            ours, theirs = self.pair("monitor", gateway)
            self.world.start("monitor", lambda seams, theirs=theirs: run_monitor(theirs, seams))
            await ours.send(as_message(Start("monitor", "1", GRAPH, b"")))
            self.monitor = ours
            with contextlib.suppress(*LOST):
                while True:
                    control = from_message(await ours.recv())
                    if not isinstance(control, Listening | Statistics):
                        self.reported.append((self.world.loop.time() - began, control))
            await ours.aclose()

    async def run(self, seconds: float) -> None:
        gateway = self.world.next_node(GATEWAY)
        began = self.world.loop.time()
        lines = {name: self.pair(name, gateway) for name in WORKERS}

        async def launch(seams: Seams) -> None:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.relay(name, ours)) for name, (ours, _) in lines.items()]
                tasks.append(group.create_task(self.watch(gateway, began)))
                tasks.append(group.create_task(send_heartbeats("g", lambda: (0, None), seams.clock, self.pass_on, process=GATEWAY)))
                await seams.clock.sleep(seconds)
                for task in tasks:
                    task.cancel()
            await self.notify_monitor(Stop())
            with contextlib.suppress(*LOST):
                while self.monitor is not None:
                    await self.monitor.recv()
            for channel in (self.monitor, *(ours for ours, _ in lines.values())):
                assert channel is not None
                await channel.aclose()

        for name, (_, theirs) in lines.items():
            self.world.start(name, lambda seams, theirs=theirs: work(theirs, seams))
        launcher = self.world.start(GATEWAY, launch)
        assert await launcher.exit == "exited with status 0"
        for process in self.world.processes.values():
            assert (await process.exit).startswith(("exited with status 0", "was killed"))


def verdicts(seed: int, *faults: object, seconds: float = 8.0) -> list[tuple[float, Control]]:
    async def main(world: World) -> list[tuple[float, Control]]:
        scene = Scene(world)
        Faults(world, Scenario(faults=faults), lambda name: None).begin()
        await scene.run(seconds)
        return scene.reported

    return run(seed, main).result


@pytest.mark.parametrize(
    "faults",
    [
        (),
        (Pause(process="experts.1", at_seconds=2.0, for_seconds=0.3), Stall(process="experts.0", at_seconds=2.1, for_seconds=0.3)),
        (Slow(process="experts.1", at_seconds=1.0, for_seconds=5.0, factor=100.0),),  # a call takes 0.2 s
        (Skew(process="experts.1", rate=0.5), Skew(process="monitor", rate=1.3)),
        (Pause(process="monitor", at_seconds=2.0, for_seconds=4.0),),
        (Pause(process=GATEWAY, at_seconds=2.0, for_seconds=4.0),),
        (Stall(process=GATEWAY, at_seconds=2.0, for_seconds=0.9), Stall(process="monitor", at_seconds=2.3, for_seconds=0.9)),
    ],
    ids=["nothing", "short stalls", "slow computing", "clocks that run wrong", "a stopped monitor", "a stopped launcher", "both late"],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_working_process_is_not_marked_dead(seed: int, faults: tuple[object, ...]) -> None:
    assert not [reported for reported in verdicts(seed, *faults) if reports(reported[1], ProcessState.DEAD)]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Pause(process="experts.1", at_seconds=2.0, for_seconds=3.0), "stopped, no heartbeat for "),
        (Stall(process="experts.1", at_seconds=2.0, for_seconds=3.0), "received "),
        (Hang(process="experts.1", at_seconds=2.0, for_seconds=3.0), "'call', which has not computed for 0."),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_stopped_process_is_marked_dead_once_within_the_bound(seed: int, fault: Pause, why: str) -> None:
    marked_dead = [(at, reported) for at, reported in verdicts(seed, fault) if reports(reported, ProcessState.DEAD)]
    assert [(reported.process, reported.incarnation) for _, reported in marked_dead] == [
        ("experts.1", "1")
    ]  # it wakes at 5 s, and stays dead
    ((at, reported),) = marked_dead
    assert reported.why.startswith(why)
    assert 2.0 + 0.7 < at < 2.0 + 1.2


@pytest.mark.parametrize("seed", SEEDS)
def test_new_monitor_learns_from_heartbeats(seed: int) -> None:
    crash, pause = Crash(process="monitor", at_seconds=2.0), Pause(process="experts.2", at_seconds=3.0, for_seconds=9.0)
    marked_dead = [(at, reported.process) for at, reported in verdicts(seed, crash, pause) if reports(reported, ProcessState.DEAD)]
    assert marked_dead == [(pytest.approx(4.05, abs=0.15), "experts.2")]


@contextlib.asynccontextmanager
async def monitor(settings: bytes) -> AsyncIterator[StreamChannel]:
    """The launcher's end of a control connection, over a real socket, to a monitor that has started with these settings."""
    ours, theirs = socket.socketpair()
    control = await StreamChannel.from_socket(theirs, LIMITS, Identity(GATEWAY))
    async with (
        await StreamChannel.from_socket(ours, LIMITS, Identity("monitor")) as line,
        asyncio.timeout(60),
        asyncio.TaskGroup() as group,
    ):
        group.create_task(run_monitor(control, Seams()))
        await send(line, Start("monitor", "m", b'{"reliability": {%b}}' % settings, b""))
        assert isinstance(await receive(line), Listening)
        yield line


async def send(line: Channel, *words: Control) -> None:
    for word in words:
        await line.send(as_message(word))


async def receive(line: Channel) -> Control:
    return from_message(await line.recv())


async def test_over_a_real_socket() -> None:
    """The whole conversation as the launcher leads it. The time-outs are too long to play a part."""
    async with monitor(b'"suspect_seconds": 600, "dead_seconds": 600') as line:
        await send(line, Peers({}, {}))
        assert isinstance(await receive(line), Connected)
        await send(line, Heartbeat(0, 0.0, 7, "'call'", 2.0, 1.0, "a", process="experts.0"))
        assert await receive(line) == DetectorReport("experts.0", "a", ProcessState.DEAD, "'call' has run 2.00 s, its bound is 1.00 s")
        await send(line, PeerJoined("experts.0", "b", {}), LateResponse("experts.0", "b", 0.5, 0.1, by="attention.0"))
        assert await receive(line) == DetectorReport(
            "experts.0", "b", ProcessState.SUSPECT, "attention.0 has waited 0.50 s for it, 0.10 s is usual"
        )
        await send(
            line,
            PeerLeft("experts.0", "b", "was killed"),
            Heartbeat(1, 0.0, 7, "'call'", 2.0, 1.0, "b", process="experts.0"),
            StatisticsRequest(),
            Stop(),
        )
        assert isinstance(await receive(line), Statistics)  # nothing is reported of an ended incarnation
        assert isinstance(await receive(line), Statistics)


async def test_a_stopped_process_is_marked_dead_over_a_real_socket() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        sleeper.send_signal(signal.SIGSTOP)
        async with monitor(b'"suspect_seconds": 0.05, "dead_seconds": 0.1') as line:
            await send(
                line, PeerJoined("experts.0", "a", {}, sleeper.pid), PeerJoined("experts.1", "a", {})
            )  # the second one is not on this machine
            reported = [await receive(line)]
            while not reports(reported[-1], ProcessState.DEAD):
                reported.append(await receive(line))
            assert (reported[-1].process, reported[-1].incarnation) == ("experts.0", "a")
            assert reported[-1].why.startswith("stopped, no heartbeat for ")
            await send(line, Stop())
            while not isinstance(reported[-1], Statistics):
                reported.append(await receive(line))
            assert [each.process for each in reported if reports(each, ProcessState.DEAD)] == ["experts.0"]
    finally:
        sleeper.kill()
        sleeper.wait()


async def test_heartbeat_clears_a_suspect() -> None:
    async with monitor(b'"suspect_seconds": 0.05, "dead_seconds": 600') as line:
        await send(line, PeerJoined("experts.0", "a", {}))
        assert reports(await receive(line), ProcessState.SUSPECT)
        await send(line, Heartbeat(0, 0.0, 7, incarnation="a", process="experts.0"))
        assert await receive(line) == DetectorReport(
            "experts.0", "a", ProcessState.ALIVE, "its heartbeats come in time, and no client reports it"
        )
        await send(line, Stop())


async def test_monitor_ends_with_its_control_connection() -> None:
    async with monitor(b"") as line:
        await line.aclose()


def test_samples_of_a_process() -> None:
    assert process_activity(os.getpid()) in (Activity.RUNNABLE, Activity.OTHERS_RUNNABLE)
    own = process_times(os.getpid())
    assert own is not None
    assert own.loop_cpu_seconds > 0
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
    try:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        while process_activity(sleeper.pid) is not Activity.ASLEEP:
            os.sched_yield()
        before = process_times(sleeper.pid)
        sleeper.send_signal(signal.SIGSTOP)
        while process_activity(sleeper.pid) is not Activity.STOPPED:
            os.sched_yield()
        after = process_times(sleeper.pid)
        assert before is not None
        assert after is not None
        assert before.cpu_seconds <= after.cpu_seconds < before.cpu_seconds + 1.0
    finally:
        sleeper.kill()
        sleeper.wait()
        sleeper.stdout.close()
    assert process_activity(sleeper.pid) is None
    assert process_times(sleeper.pid) is None


def test_a_processor_received_and_one_waited_for_are_counted() -> None:
    """Two loops share a core: each receives half of it and waits for the other half."""
    core = min(os.sched_getaffinity(0))
    spin = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", spin, str(core)], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for each in loops:
            assert each.stdout is not None
            each.stdout.readline()
        times = [process_times(each.pid) for each in loops]
        while not all(each is not None and each.queued_seconds > 0.1 and each.loop_cpu_seconds > 0.1 for each in times):
            times = [process_times(each.pid) for each in loops]
        assert {process_activity(each.pid) for each in loops} == {Activity.RUNNABLE}
    finally:
        for each in loops:
            each.kill()
            each.wait()
            assert each.stdout is not None
            each.stdout.close()
