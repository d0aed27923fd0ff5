"""The detector marks a process dead in time for each kind of evidence, and never without evidence."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowrt.reliability.detector import (
    DISK_SECONDS,
    REPORT_SECONDS,
    SEEN_SHARE,
    Detector,
    Operation,
    ProcessState,
    StateChange,
    Timeouts,
)
from flowrt.system.process_status import Activity, ProcessSample, ProcessTimes

TICK, HEARTBEAT, HOUR = 0.05, 0.1, 3600.0


@dataclass
class Process:
    """What the system would report about a process, and how its times grow per second."""

    activity: Activity = Activity.ASLEEP
    cpu: float = 0.0
    loop_cpu: float = 0.0
    queued: float = 0.0
    heartbeats: bool = True
    is_reported: bool = True  # by the system
    times: ProcessTimes = ProcessTimes(0.0, 0.0, 0.0)

    def pass_time(self, seconds: float) -> None:
        old = self.times
        self.times = ProcessTimes(
            old.cpu_seconds + self.cpu * seconds,
            old.loop_cpu_seconds + self.loop_cpu * seconds,
            old.queued_seconds + self.queued * seconds,
        )

    @property
    def sample(self) -> ProcessSample | None:
        return ProcessSample(self.activity, self.times) if self.is_reported else None


STOPPED = Process(Activity.STOPPED, heartbeats=False)
ASLEEP = Process(heartbeats=False)
BUSY = Process(Activity.RUNNABLE, cpu=1.0, loop_cpu=1.0, heartbeats=False)
QUEUED = Process(Activity.RUNNABLE, queued=1.0, heartbeats=False)
HEALTHY = Process(cpu=0.3, loop_cpu=0.1)


@dataclass
class Scene:
    """One process `x` under a detector; a tick every 0.05 s and a heartbeat every 0.1 s."""

    detector: Detector = field(default_factory=Detector)
    now: float = 1000.0
    process: Process = field(default_factory=Process)
    reported: list[tuple[float, StateChange]] = field(default_factory=list)
    sequence: int = 0
    launcher_heartbeats: bool = True

    def __post_init__(self) -> None:
        self.detector.add(self.now, "x", "1", self.process.times)
        self.next_heartbeat = self.now + HEARTBEAT / 3

    def play(self, seconds: float, process: Process, tick: float = TICK) -> None:
        """`process` defines the behaviour from now on; its times continue."""
        self.process = dataclasses.replace(process, times=self.process.times)
        for _ in range(round(seconds / tick)):
            self.process.pass_time(tick)
            self.now += tick
            while self.next_heartbeat <= self.now:
                if self.process.heartbeats:
                    self.sequence += 1
                    self.take(self.detector.record_heartbeat(self.next_heartbeat, "x", "1", self.sequence, None, self.process.times))
                self.next_heartbeat += HEARTBEAT
            if self.launcher_heartbeats:
                self.detector.record_launcher_heartbeat(self.now)
            sample = self.process.sample
            self.take(self.detector.tick(self.now, {} if sample is None else dict.fromkeys(self.detector.silent(), sample)))

    def take(self, decisions: list[StateChange]) -> None:
        self.reported += [(self.now, each) for each in decisions]

    @property
    def verdicts(self) -> list[tuple[float, str]]:
        return [(at, each.why) for at, each in self.reported if each.state is ProcessState.DEAD]


@pytest.mark.parametrize(
    ("behaviour", "why", "seconds"),
    [
        (STOPPED, "stopped, no heartbeat for 1.", 1.0),
        (ASLEEP, "asleep, no heartbeat for 1.", 1.0),
        (BUSY, "received 1.0", 1.0),
        (Process(Activity.OTHERS_RUNNABLE, cpu=1.0, heartbeats=False), "received 1.0", 1.0),  # a thread that keeps Python's lock
        (Process(Activity.RUNNABLE, cpu=0.5, loop_cpu=0.5, queued=0.5, heartbeats=False), "received 1.0", 2.0),
        (Process(Activity.DISK, heartbeats=False), "waiting for a disk, no heartbeat for 60.", DISK_SECONDS),
    ],
    ids=["stopped", "asleep", "busy", "lock-kept", "busy-with-half-a-processor", "disk"],
)
@pytest.mark.parametrize("phase", range(4))
def test_each_kind_of_evidence_marks_a_process_dead_in_time(behaviour: Process, why: str, seconds: float, phase: int) -> None:
    scene = Scene()
    scene.next_heartbeat += phase * HEARTBEAT / 4
    scene.play(2.0, HEALTHY)
    fault = scene.now
    scene.play(seconds + 5.0, behaviour)
    ((at, reported),) = scene.verdicts
    assert reported.startswith(why)
    assert seconds - HEARTBEAT - 1e-6 <= at - fault <= seconds * 1.01 + 0.2


@pytest.mark.parametrize(
    "behaviour",
    [
        Process(heartbeats=False, is_reported=False),
        QUEUED,
        dataclasses.replace(QUEUED, queued=0.0),  # the count of a thread's delay stands still until it has its turn
        Process(Activity.RUNNABLE, cpu=4.0, heartbeats=False),  # other threads compute, the loop waits for its turn
        dataclasses.replace(HEALTHY, cpu=4.0, loop_cpu=0.99),
    ],
    ids=["unknown-to-the-system", "in-the-run-queue", "delay-not-counted-yet", "others-compute", "heartbeats-in-time"],
)
def test_hours_without_evidence_mark_no_process_dead(behaviour: Process) -> None:
    scene = Scene()
    scene.play(HOUR, behaviour)
    assert scene.verdicts == []


def starting_scene() -> Scene:
    scene = Scene()
    scene.detector = Detector()
    scene.detector.add(scene.now, "x", "1", is_starting=True)
    return scene


def test_a_process_that_is_stopped_while_it_starts_is_marked_dead() -> None:
    scene = starting_scene()
    scene.play(5.0, BUSY)
    fault = scene.now
    scene.play(5.0, STOPPED)
    ((at, reported),) = scene.verdicts
    assert reported.startswith("stopped for 1.")
    assert 1.0 <= at - fault < 1.2
    assert len(scene.reported) == 1, "it was not suspected before"


@pytest.mark.parametrize("behaviour", [BUSY, ASLEEP, Process(Activity.DISK, heartbeats=False)], ids=["busy", "asleep", "disk"])
def test_a_process_may_start_for_long_and_is_watched_as_ever_afterwards(behaviour: Process) -> None:
    scene = starting_scene()
    for _ in range(20):
        scene.play(0.9, STOPPED)
        scene.play(10.0, behaviour)
    assert scene.reported == []
    scene.detector.add(scene.now, "x", "1", scene.process.times)
    scene.play(5.0, HEALTHY)
    assert scene.reported == []
    scene.play(2.0, ASLEEP)
    assert len(scene.verdicts) == 1


def test_run_queue_delay_extends_the_deadline_of_a_sleeper() -> None:
    """It looks asleep at every look, and has waited for a processor nearly all the time between them."""
    scene = Scene()
    scene.play(20.0, Process(queued=0.97, heartbeats=False))
    assert scene.verdicts == []
    scene.play(30.0, Process(queued=0.9, heartbeats=False))
    assert [why.split(",")[0] for _, why in scene.verdicts] == ["asleep"]


def test_a_short_stop_after_a_long_wait_for_a_processor_is_a_short_stop() -> None:
    scene = Scene()
    for _ in range(100):
        scene.play(5.0, QUEUED)
        scene.play(0.3, STOPPED)
        scene.play(0.2, HEALTHY)
    assert scene.verdicts == []
    assert {each.state for _, each in scene.reported} == {ProcessState.SUSPECT, ProcessState.ALIVE}


@pytest.mark.parametrize(("stall_seconds", "dies"), [(0.3, False), (1.2, True)])
def test_an_hour_in_a_crowd(stall_seconds: float, dies: bool) -> None:
    """Waits of up to 3 s for a processor, and stalls. Those of 0.3 s cost no process; those of 1.2 s do, so the hour proves something."""
    drawn, scene = random.Random(1), Scene()
    while scene.now < 1000.0 + HOUR:
        scene.play(drawn.uniform(0.1, 3.0), dataclasses.replace(QUEUED, cpu=0.12, loop_cpu=0.06, queued=drawn.choice([0.0, 0.9])))
        scene.play(stall_seconds, drawn.choice([STOPPED, ASLEEP, BUSY]))
        scene.play(drawn.uniform(0.1, 3.0), HEALTHY)
    assert bool(scene.verdicts) is dies


def test_short_stalls_are_not_even_suspected() -> None:
    scene = Scene()
    for stall in (STOPPED, ASLEEP, BUSY, QUEUED) * 20:
        scene.play(0.3, stall)
        scene.play(0.2, HEALTHY)
    assert scene.reported == []


def test_silence_does_not_count_while_the_launcher_is_silent() -> None:
    scene = Scene()
    scene.play(1.0, HEALTHY)
    scene.launcher_heartbeats = False
    scene.play(HOUR, ASLEEP)
    assert scene.reported == []
    scene.launcher_heartbeats = True
    scene.play(2.0, ASLEEP)
    assert [each.state for _, each in scene.reported] == [ProcessState.SUSPECT, ProcessState.DEAD]


def test_an_observer_that_was_stopped_counts_only_what_it_watched() -> None:
    scene = Scene()
    scene.play(1.0, HEALTHY)
    scene.now += HOUR
    scene.next_heartbeat = scene.now + 0.01
    scene.play(1.0, HEALTHY)
    assert scene.reported == []
    scene.play(HOUR, ASLEEP, tick=10.0)  # ten looks a minute: a tenth of a second of each counts
    ((at, _),) = scene.verdicts
    assert at == pytest.approx(scene.now - HOUR + 100.0, abs=20.0)


def test_a_suspect_is_cleared_by_a_heartbeat() -> None:
    scene = Scene()
    scene.play(1.0, HEALTHY)
    scene.play(0.7, QUEUED)
    scene.play(1.0, HEALTHY)
    assert [(each.state, each.why) for _, each in scene.reported] == [
        (ProcessState.SUSPECT, "no heartbeat for 0.42 s (runnable)"),
        (ProcessState.ALIVE, "its heartbeats come in time, and no client reports it"),
    ]


def test_an_operation_beyond_its_bound_marks_its_process_dead() -> None:
    detector = Detector()
    detector.add(0.0, "x", "1")
    assert detector.record_heartbeat(0.1, "x", "1", 0, Operation("'experts.1'", 1.9, 2.0)) == []
    assert detector.record_heartbeat(0.2, "x", "1", 1, Operation("'load'", 1e6, 0.0)) == []  # no bound is declared
    assert detector.record_heartbeat(0.3, "x", "1", 2, Operation("'experts.1'", 2.1, 2.0)) == [
        StateChange("x", "1", ProcessState.DEAD, "'experts.1' has run 2.10 s, its bound is 2.00 s")
    ]


def test_a_dead_incarnation_that_works_again_is_cleared_unless_it_was_removed() -> None:
    """What can be replaced is killed and removed; what cannot is fenced until its heartbeats come again, without a passed bound."""
    scene = Scene()
    scene.play(2.0, STOPPED)
    detector = scene.detector
    assert detector.record_heartbeat(scene.now, "x", "1", 10**6, Operation("'call'", 2.0, 1.0)) == []
    scene.sequence = 10**6
    scene.play(1.0, HEALTHY)
    assert [each.state for _, each in scene.reported] == [ProcessState.SUSPECT, ProcessState.DEAD, ProcessState.ALIVE]
    detector.remove(scene.now, "x", "1")
    scene.play(2.0, HEALTHY)
    assert [each.state for _, each in scene.reported] == [ProcessState.SUSPECT, ProcessState.DEAD, ProcessState.ALIVE]


def test_each_incarnation_can_die() -> None:
    scene = Scene()
    scene.play(2.0, STOPPED)
    detector = scene.detector
    detector.add(scene.now, "x", "2", scene.process.times)
    assert detector.watched["x"].state is ProcessState.ALIVE
    scene.play(2.0, STOPPED)
    assert [each.incarnation for _, each in scene.reported if each.state is ProcessState.DEAD] == ["1", "2"]


def test_heartbeats_of_dead_and_unknown_incarnations_are_ignored() -> None:
    detector = Detector()
    detector.add(0.0, "x", "1")
    detector.record_heartbeat(0.1, "x", "1", 0)
    detector.remove(0.2, "x", "1")
    assert detector.record_heartbeat(0.3, "x", "1", 1) == []
    detector.add(0.4, "x", "2")
    detector.add(0.4, "x", "1")  # late news of the old one
    assert detector.watched["x"].incarnation == "2"
    assert detector.record_heartbeat(0.5, "x", "1", 2, Operation("'experts'", 9.0, 1.0)) == []
    assert detector.record_report(0.5, "x", "1", "attention.0", 1.0, 0.1) == []
    assert detector.record_heartbeat(0.6, "x", "2", 5) == []
    assert detector.record_heartbeat(0.7, "x", "2", 5) == []  # a repeated one proves nothing
    assert [each.state for each in detector.record_report(0.8, "x", "2", "attention.0", 1.0, 0.1)] == [ProcessState.SUSPECT]


def test_an_observer_that_was_started_later_learns_from_heartbeats() -> None:
    """Even from one that a dead incarnation had left behind: the next one of the living replaces it when that one is removed."""
    detector = Detector()
    detector.record_heartbeat(0.0, "x", "old", 999)
    detector.remove(0.1, "x", "old")
    for tenth in range(2, 40):
        detector.record_heartbeat(tenth / 10, "x", "new", tenth)
        detector.record_heartbeat(tenth / 10, "y", "1", tenth)
        detector.tick(tenth / 10, {})
    assert {process: (each.incarnation, each.state) for process, each in detector.watched.items()} == {
        "x": ("new", ProcessState.ALIVE),
        "y": ("1", ProcessState.ALIVE),
    }


def test_a_report_of_a_client_lasts_and_is_renewed() -> None:
    scene = Scene()
    for at in (0.0, 1.5):
        scene.play(at, HEALTHY)
        scene.take(scene.detector.record_report(scene.now, "x", "1", "attention.0", 0.5, 0.1))
    renewed = scene.now
    scene.play(6.0, HEALTHY)
    (_, suspected), (cleared_at, cleared) = scene.reported
    assert suspected == StateChange("x", "1", ProcessState.SUSPECT, "attention.0 has waited 0.50 s for it, 0.10 s is usual")
    assert cleared.state is ProcessState.ALIVE
    assert cleared_at == pytest.approx(renewed + REPORT_SECONDS, abs=0.2)


class Evidence(RuleBasedStateMachine):
    """No verdict without evidence, and a verdict soon after it, whatever happens in whatever order.

    The model knows what each process really did since its last heartbeat.
    """

    names = st.sampled_from(["x", "y", "z"])
    timeouts = Timeouts(0.4, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.detector = Detector(self.timeouts)
        self.now = 1000.0
        self.incarnations: dict[str, int] = {}  # the latest of each
        self.processes: dict[str, Process] = {}  # of those that are not dead
        self.since: dict[str, dict[str, float]] = {}  # process -> what it did since its last heartbeat, in seconds
        self.removed: set[str] = set()  # those of which the latest incarnation was
        self.sequence = 0

    def take(self, decisions: list[StateChange], overrun: str | None = None, cleared: str | None = None) -> None:
        for decision in decisions:
            process = decision.process
            assert decision.why
            assert decision.incarnation == str(self.incarnations[process]), "a verdict on an earlier incarnation"
            assert process not in self.removed, "a verdict on a closed connection"
            assert (process in self.processes) != (process == cleared), "only the dead are cleared by a heartbeat, and nothing else follows"
            if decision.state is ProcessState.DEAD:
                did = self.since[process]
                assert (
                    process == overrun
                    or did.get("received", 0.0) >= self.timeouts.dead_seconds - 1e-6
                    or any(did.get(each, 0.0) >= SEEN_SHARE * self.timeouts.dead_seconds - 1e-6 for each in ("stopped", "asleep"))
                ), f"no evidence: {decision.why}"
                del self.processes[process]
            elif process == cleared:
                assert decision.state is ProcessState.ALIVE
                self.processes[process] = Process()

    @rule(process=names)
    def add(self, process: str) -> None:
        self.incarnations[process] = self.incarnations.get(process, 0) + 1
        self.processes[process] = Process()
        self.since[process] = {}
        self.removed.discard(process)
        self.detector.add(self.now, process, str(self.incarnations[process]), ProcessTimes(0.0, 0.0, 0.0))

    @rule(process=names, seconds=st.sampled_from([0.0, 0.5, 2.0]), bound=st.sampled_from([0.0, 1.0]))
    def heartbeat(self, process: str, seconds: float, bound: float) -> None:
        if process not in self.incarnations:
            self.add(process)
        self.sequence += 1
        known = self.processes.get(process)
        if known is not None:
            self.since[process] = {}
        operation = Operation("'call'", seconds, bound)
        times = None if known is None else known.times
        reported = self.detector.record_heartbeat(self.now, process, str(self.incarnations[process]), self.sequence, operation, times)
        overrun = 0 < bound < seconds
        is_dead = known is None and process not in self.removed
        if is_dead:
            self.since[process] = {}
        self.take(reported, process if overrun else None, process if is_dead else None)
        assert not (overrun and process in self.processes), "an operation beyond its bound was not noticed"

    @rule(process=names)
    def heartbeat_of_an_earlier_incarnation(self, process: str) -> None:
        if self.incarnations.get(process, 0) > 1:
            self.sequence += 1
            earlier = str(self.incarnations[process] - 1)
            assert self.detector.record_heartbeat(self.now, process, earlier, self.sequence, Operation("'call'", 9.0, 1.0)) == []

    @rule(process=names)
    def remove(self, process: str) -> None:
        if process in self.incarnations:
            self.detector.remove(self.now, process, str(self.incarnations[process]))
            self.processes.pop(process, None)
            self.removed.add(process)

    @rule(process=names)
    def report(self, process: str) -> None:
        if process in self.incarnations:
            reported = self.detector.record_report(self.now, process, str(self.incarnations[process]), "attention.0", 1.0, 0.1)
            assert all(each.state is ProcessState.SUSPECT for each in reported)
            self.take(reported)

    @rule(process=names, behaviour=st.sampled_from([STOPPED, ASLEEP, BUSY, QUEUED, Process(is_reported=False)]))
    def behave(self, process: str, behaviour: Process) -> None:
        if process in self.processes:
            self.processes[process] = dataclasses.replace(behaviour, times=self.processes[process].times)

    @rule(num=st.integers(1, 30), late=st.sampled_from([0.0, 0.0, 0.0, 0.2, 30.0]), launcher=st.sampled_from([None, 0.0, 1.0]))
    def pass_time(self, num: int, late: float, launcher: float | None) -> None:
        """`launcher`: how late its heartbeats are; None: it sends none now."""
        if launcher is not None:
            self.detector.record_launcher_heartbeat(self.now)
        for _ in range(num):
            passed = TICK + late
            self.now += passed
            if launcher is not None:
                self.detector.record_launcher_heartbeat(self.now - launcher)
            for name, process in self.processes.items():
                process.pass_time(passed)
                did = self.since[name]
                kind = {Activity.STOPPED: "stopped", Activity.ASLEEP: "asleep"}.get(process.activity)
                if not process.is_reported:
                    kind = None
                elif process.activity is Activity.RUNNABLE:
                    kind = "received" if process.loop_cpu else "queued"
                if kind is not None:
                    did[kind] = did.get(kind, 0.0) + passed
                watched = late == 0.0 and launcher == 0.0
                did["watched"] = did.get("watched", 0.0) + passed if watched and kind not in (None, "queued") else 0.0
            samples = {name: sample for name, each in self.processes.items() if (sample := each.sample) is not None}
            self.take(self.detector.tick(self.now, samples))
            overdue = [name for name in self.processes if self.since[name].get("watched", 0.0) > 2 * self.timeouts.dead_seconds + 1.0]
            assert not overdue, "evidence for seconds, and not marked dead"

    @invariant()
    def states_equal_reported_states(self) -> None:
        for process, each in self.detector.watched.items():
            assert (each.state is ProcessState.DEAD) == (process not in self.processes)
            assert (each.why == "") == (each.state is ProcessState.ALIVE)
            assert math.isfinite(each.silent_seconds)


Evidence.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestEvidence = Evidence.TestCase
