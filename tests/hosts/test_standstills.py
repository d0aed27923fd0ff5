"""Processes that stand still on another host: the host server sends their samples, and the monitor's verdict replaces them."""

from __future__ import annotations

import contextlib
import math
import signal
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest
from end_to_end.test_expert_failover import Story, kill_once, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from left_processes import left_processes
from served_models import Served

import flowrt
from flowrt.actors.control import Control, Heartbeat, LateProcess, as_message, from_message
from flowrt.hosts.messages import HostMessage
from flowrt.hosts.messages import from_message as host_message
from flowrt.hosts.sampling import RelayedWorker
from flowrt.launcher import events
from flowrt.processes.leftover import marked_processes
from flowrt.reliability.detector import SAMPLE_SECONDS, SEEN_SHARE, TICK_SECONDS, Detector, ProcessState, StateChange
from flowrt.seams import Seams
from flowrt.system.process_status import Activity, ProcessSample, ProcessTimes
from flowrt.transports.wire.message import Message

TIMES = ProcessTimes(1.0, 0.5, 0.25)


class StillClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        raise AssertionError


def test_a_worker_is_sampled_only_while_its_heartbeats_are_late() -> None:
    clock, times, sent = StillClock(), [TIMES], list[Message]()
    seams = Seams(clock=clock, process_times=lambda pid: times[0], process_activity=lambda pid: Activity.ASLEEP)
    has_room = True

    def send(message: Message) -> bool:
        sent.extend([message] if has_room else [])
        return has_room

    worker = RelayedWorker(1, send, seams)

    def tick(count: int) -> list[object]:
        for _ in range(count):
            clock.seconds += TICK_SECONDS
            worker.tick(clock.seconds, TICK_SECONDS)
        headers: list[object] = [message.header for message in sent]
        sent.clear()
        return headers

    assert tick(2) == []
    times[0] = later = ProcessTimes(2.0, 0.5, 0.25)
    first, sample = tick(1)
    assert first == LateProcess(ProcessSample(Activity.RUNNABLE, TIMES), 0.0), "as it was when its silence began"
    assert isinstance(sample, LateProcess)
    assert (sample.sample, sample.silent_seconds) == (ProcessSample(Activity.ASLEEP, later), pytest.approx(3 * TICK_SECONDS))
    assert sample.silent_seconds >= SAMPLE_SECONDS
    assert len(tick(1)) == 1
    worker.on_message(as_message(Heartbeat(0, 0.0, 0)))
    has_room = False
    assert tick(5) == []
    has_room = True
    first, sample = tick(1)
    assert first == LateProcess(ProcessSample(Activity.RUNNABLE, later), 0.0), "sent when there is room"


@dataclass
class RelayPath:
    """From a worker over its host server to the monitor, in steps of a tick. Messages wait while it is cut, and keep their order."""

    activity: Activity = Activity.ASLEEP
    times: ProcessTimes = ProcessTimes(0.0, 0.0, 0.0)
    verdicts: list[float] = field(default_factory=list)
    longest_still_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.clock, self.detector, self.waiting, self.sequence = StillClock(), Detector(), list[Control](), 0
        seams = Seams(clock=self.clock, process_times=lambda pid: self.times, process_activity=lambda pid: self.activity)
        self.worker = RelayedWorker(1, self.relay, seams)
        self.detector.add(0.0, "x", "1")
        self.still_seconds = 0.0

    def tick(self, is_still: bool, is_cut: bool) -> None:
        """Heartbeats and samples come every other tick; a worker that stands still keeps its activity."""
        self.clock.seconds += TICK_SECONDS
        self.sequence += 1
        busy = TICK_SECONDS if self.activity is Activity.RUNNABLE and is_still else 0.0
        self.times = ProcessTimes(self.times.cpu_seconds + busy, self.times.loop_cpu_seconds + busy, 0.0)
        if is_still:
            self.still_seconds += TICK_SECONDS
            self.longest_still_seconds = max(self.longest_still_seconds, self.still_seconds)
        elif self.sequence % 2:
            heartbeat = as_message(Heartbeat(self.sequence, 0.0, 0, incarnation="1", process="x"))
            self.worker.on_message(heartbeat)
            self.relay(heartbeat)
            self.still_seconds = 0.0
        self.worker.tick(self.clock.seconds, TICK_SECONDS)
        while self.waiting and not is_cut:
            match self.waiting.pop(0):
                case Heartbeat(sequence=sequence):
                    self.take(self.detector.record_heartbeat(self.clock.seconds, "x", "1", sequence))
                case LateProcess(sample, silent_seconds):
                    self.detector.record_sample("x", "1", sample, silent_seconds)
        self.take(self.detector.tick(self.clock.seconds, {}))

    def relay(self, message: Message) -> bool:
        self.waiting.append(from_message(Message(message.kind, header=msgspec.msgpack.encode(message.header))))
        return True

    def take(self, decisions: list[StateChange]) -> None:
        self.verdicts += [self.clock.seconds for each in decisions if each.state is ProcessState.DEAD]


periods = st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans()), max_size=8)


@given(periods, st.sampled_from([Activity.ASLEEP, Activity.STOPPED, Activity.RUNNABLE]), st.integers(0, 40))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_a_verdict_follows_a_standstill_and_never_a_cut_of_the_path(
    periods: list[tuple[int, bool, bool]], activity: Activity, num_cut: int
) -> None:
    path = RelayPath(activity)
    for count, is_still, is_cut in periods:
        for _ in range(count):
            path.tick(is_still, is_cut)
    for _ in range(60):
        path.tick(is_still=False, is_cut=False)
    assert not path.verdicts or path.longest_still_seconds >= SEEN_SHARE
    path.verdicts.clear()
    began = path.clock.seconds
    for number in range(num_cut + 40):
        path.tick(is_still=True, is_cut=number < num_cut)
    (at,) = path.verdicts
    assert 0.9 <= at - began <= max(1.0, num_cut * TICK_SECONDS) + 1.0


numbers = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308])
samples = st.builds(ProcessSample, st.sampled_from(Activity), st.builds(ProcessTimes, numbers, numbers, numbers))


@given(st.lists(st.tuples(samples, numbers, st.booleans()), max_size=12))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_numbers_of_no_process_give_no_verdict_before_its_silence(messages: list[tuple[ProcessSample, float, bool]]) -> None:
    """The host server of a run is authenticated, but may be wrong."""
    detector = Detector()
    detector.add(0.0, "x", "1")
    for number, (sample, silent_seconds, has_heartbeat) in enumerate(messages):
        header = msgspec.msgpack.encode(LateProcess(sample, silent_seconds, "x", "1"))
        late = from_message(Message(LateProcess.kind, header=header))
        assert isinstance(late, LateProcess)
        for incarnation in ("1", "2"):
            detector.record_sample("x", incarnation, late.sample, late.silent_seconds)
        detector.record_sample("y", "1", late.sample, late.silent_seconds)
        if has_heartbeat:
            detector.record_heartbeat(number * TICK_SECONDS, "x", "1", number)
        assert all(each.state is not ProcessState.DEAD for each in detector.tick(number * TICK_SECONDS, {}))
    assert detector.watched.keys() == {"x"}


@given(st.binary(max_size=64))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_other_bytes_are_no_message(header: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        assert isinstance(from_message(Message(LateProcess.kind, header=header)), LateProcess)
    with contextlib.suppress(msgspec.DecodeError):
        assert isinstance(host_message(Message("host", header=header)), HostMessage)


@pytest.mark.parametrize("victim", ["experts", "attention"])
async def test_a_stopped_process_is_replaced_and_no_token_changes(served: Served, tmp_path: Path, victim: str) -> None:
    deploy = {"attention": {"groups": 2}, "experts": {"servers": 2, "replicas": 2}}
    path = served.write(tmp_path, deploy, numerics="strict", hosts={"engine": "local", "count": 2})
    story, dead = Story(), list[str]()

    def note(event: events.Event) -> None:
        story.note(event)
        if isinstance(event, events.WorkerMarkedDead):
            dead.append(f"{event.name}: {event.why}")

    async with flowrt.open(path, on_event=note) as running:
        run_id, process_hosts = running.launcher.run_id, running.launcher.graph.process_hosts
        name = next(name for name, host in process_hosts.items() if host == "host.1" and name.startswith(victim))
        pids = [marked.pid for marked in marked_processes() if marked.run_id.startswith(run_id)]
        pid = next(pid for pid in pids if psutil.Process(pid).name() == f"fr:{name}")
        assert await tokens_of(running, served.prompts[:4], kill_once(pid, signal.SIGSTOP)) == served.expected[:4]
        await story.until(lambda story: story.back == [name])
        assert story.lost == [name]
        assert len(dead) == 1
        assert dead[0].startswith(f"{name}: stopped, no heartbeat for ")
        assert not left_processes([pid])
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == served.expected[:4]
