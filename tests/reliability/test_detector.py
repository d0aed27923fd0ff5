"""The detector: tables of events, and a state machine that knows only the promises."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowrt.reliability.detector import (
    DISTRUST_SECONDS,
    LAG_SECONDS,
    REPORT_SECONDS,
    Cleared,
    Condemned,
    Decision,
    Detector,
    State,
    Suspected,
    Timeouts,
)

# (seconds, event, arguments) -> decisions, as "verdict process incarnation: why"
Event = tuple[float, str, tuple[object, ...]]


def told(decisions: list[Decision] | None) -> list[str]:
    return [f"{type(each).__name__} {each.process} {each.incarnation}: {each.why}" for each in decisions or []]


def play(events: list[Event], tick_seconds: float = 0.05) -> tuple[Detector, list[tuple[float, str]]]:
    """Carry the events out in order, with ticks between them as an observer that is never late makes them."""
    detector = Detector()
    said: list[tuple[float, str]] = []
    ticked = -0.03  # never at the instant of another event
    for at, event, arguments in events:
        while ticked + tick_seconds <= at:
            ticked += tick_seconds
            said += [(ticked, text) for text in told(detector.tick(ticked))]
        said += [(at, text) for text in told(getattr(detector, event)(at, *arguments))]
    return detector, [(round(at, 2), text) for at, text in said]


def beats(process: str, incarnation: str, start: float, end: float, every: float = 0.1, first: int = 0) -> list[Event]:
    num = round((end - start) / every)
    return [(start + every * i, "beat", (process, incarnation, first + i)) for i in range(num)]


def at_the_same_time(*rows: list[Event]) -> list[Event]:
    return sorted((event for row in rows for event in row), key=lambda event: event[0])


def others(end: float) -> list[list[Event]]:
    """Two who beat all the time, so that a third's silence is its own."""
    return [beats("a", "1", 0.0, end), beats("b", "1", 0.0, end)]


END: Event = (6.0, "tick", ())


@pytest.mark.parametrize(
    ("name", "events", "expected"),
    [
        (
            "a loop that stands still",
            beats("x", "1", 0.0, 1.0),
            [(1.32, "Suspected x 1: no beat for 0.42 s"), (1.92, "Condemned x 1: no beat for 1.02 s")],
        ),
        (
            "never a beat after it joined",
            [(1.0, "joined", ("x", "1"))],
            [(1.42, "Suspected x 1: no beat for 0.42 s"), (2.02, "Condemned x 1: no beat for 1.02 s")],
        ),
        (
            "stalls of 0.3 s change nothing",
            beats("x", "1", 0.0, 6.0, every=0.3),
            [],
        ),
        (
            "half a second is suspect, and cleared by a beat",
            [*beats("x", "1", 0.0, 1.0), *beats("x", "1", 1.5, 6.0, first=50)],
            [(1.32, "Suspected x 1: no beat for 0.42 s"), (1.5, "Cleared x 1: it beats, and nobody complains")],
        ),
        (
            "a hung operation of a loop that turns",
            [
                *beats("x", "1", 0.0, 1.0),
                (1.0, "beat", ("x", "1", 10, "'experts.1'", 1.9, 2.0)),
                (1.1, "beat", ("x", "1", 11, "'experts.1'", 2.0, 2.0)),
                (1.2, "beat", ("x", "1", 12, "'experts.1'", 2.1, 2.0)),
            ],
            [(1.2, "Condemned x 1: 'experts.1' has run 2.10 s, its bound is 2.00 s")],
        ),
        (
            "a slow operation of no declared bound",
            [*beats("x", "1", 0.0, 1.0), (1.0, "beat", ("x", "1", 10, "'load'", 1e6, 0.0)), *beats("x", "1", 1.1, 6.0, first=11)],
            [],
        ),
        (
            "others have found it dead: no verdict",
            [*beats("x", "1", 0.0, 1.0), (1.0, "left", ("x", "1"))],
            [],
        ),
        (
            "a dead one that wakes stays dead; a new life is alive, and can die",
            [
                *beats("x", "1", 0.0, 1.0),
                *beats("x", "1", 2.5, 3.0, first=20),
                (3.0, "joined", ("x", "2")),
                *beats("x", "2", 3.0, 3.5),
                *beats("x", "1", 3.5, 4.0, first=30),
            ],
            [
                (1.32, "Suspected x 1: no beat for 0.42 s"),
                (1.92, "Condemned x 1: no beat for 1.02 s"),
                (3.82, "Suspected x 2: no beat for 0.42 s"),
                (4.42, "Condemned x 2: no beat for 1.02 s"),
            ],
        ),
        (
            "a client's complaint suspects, never condemns",
            [*beats("x", "1", 0.0, 1.0), (1.0, "reported", ("x", "1", "attention.0", 0.5, 0.02)), *beats("x", "1", 1.0, 6.0, first=10)],
            [
                (1.0, "Suspected x 1: attention.0 has waited 0.50 s for it, 0.02 s is usual"),
                (3.0, "Cleared x 1: it beats, and nobody complains"),
            ],
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_follows_from_what(name: str, events: list[Event], expected: list[tuple[float, str]]) -> None:
    _, said = play(at_the_same_time(events, *others(6.0), [END]))
    assert [entry for entry in said if " x " in entry[1]] == [(pytest.approx(at, abs=0.011), text) for at, text in expected]
    assert not [entry for entry in said if " x " not in entry[1]]


def test_words_of_lives_that_are_over_are_ignored_and_counted() -> None:
    detector = Detector()
    detector.joined(0.0, "x", "1")
    detector.beat(0.1, "x", "1", 0)
    detector.left(0.2, "x", "1")
    assert detector.beat(0.3, "x", "1", 1) == []  # woken
    assert detector.num_ignored == 1
    detector.joined(0.4, "x", "2")
    detector.joined(0.4, "x", "1")  # late news of the old one
    assert detector.lives["x"].incarnation == "2"
    assert detector.beat(0.5, "x", "1", 2, "'experts'", 9.0, 1.0) == []
    assert detector.reported(0.5, "x", "1", "attention.0", 1.0, 0.1) == []
    assert detector.beat(0.6, "x", "2", 5) == []
    assert detector.beat(0.7, "x", "2", 5) == []  # a repeated one proves nothing
    assert detector.num_ignored == 4
    assert [type(each) for each in detector.reported(0.8, "x", "2", "attention.0", 1.0, 0.1)] == [Suspected]
    assert detector.lives["x"].heard_at == 0.6


def test_an_observer_that_was_started_later_learns_from_beats() -> None:
    """Even from one that a life now over had left behind: the life that beats is known a second later."""
    detector = Detector()
    for tenth in range(40):
        if tenth == 0:
            detector.beat(0.0, "x", "old", 999)
        detector.beat(tenth / 10, "x", "new", tenth)
        detector.beat(tenth / 10, "y", "1", tenth)
        detector.tick(tenth / 10)
    assert {process: (life.incarnation, life.state) for process, life in detector.lives.items()} == {
        "x": ("new", State.ALIVE),
        "y": ("1", State.ALIVE),
    }


@pytest.mark.parametrize(("lag", "dead_after"), [(0.0, 1.0), (0.3, 1.3), (0.9, 1.9), (5.0, 2.0)])
def test_a_late_observer_waits_longer_by_as_much(lag: float, dead_after: float) -> None:
    """5 s is beyond what may be added: then it counts anew from when it was back."""
    detector = Detector()
    for process in "abx":
        detector.joined(0.0, process, "1")
    detector.tick(0.1, lag)
    for process in "abx":
        detector.beat(0.1, process, "1", 0)
    said: list[tuple[float, str]] = []
    for hundredth in range(11, 400):
        now = hundredth / 100
        if hundredth % 10 == 0:
            for process in "ab":
                detector.beat(now, process, "1", hundredth)
        said += [(now, text) for text in told(detector.tick(now))]
    assert [entry[0] for entry in said if entry[1].startswith("Condemned x")] == [pytest.approx(0.1 + dead_after, abs=0.02)]
    assert not [text for _, text in said if " x " not in text]


def test_an_observer_that_was_stopped_condemns_nobody_for_it() -> None:
    detector = Detector()
    for process in "abc":
        detector.joined(0.0, process, "1")
    assert detector.tick(60.0, 59.95) == []
    for process in "abc":
        detector.beat(60.1, process, "1", 600)
    assert detector.tick(60.2) == []


def test_all_silent_at_once_is_held_for_the_observers_own_fault_but_not_for_ever() -> None:
    detector, said = play(at_the_same_time(*(beats(process, "1", 0.0, 1.0) for process in "abcde"), [END]))
    condemned = [at for at, text in said if text.startswith("Condemned")]
    assert len(condemned) == 5
    assert condemned == [pytest.approx(1.32 + DISTRUST_SECONDS, abs=0.051)] * 5
    # When they come back, one after the other, nobody is dead.
    back = [beats(process, "1", 2.5 + 0.07 * number, 6.0, first=100) for number, process in enumerate("abcde")]
    detector, said = play(at_the_same_time(*(beats(process, "1", 0.0, 1.0) for process in "abcde"), *back, [END]))
    assert not [text for _, text in said if text.startswith("Condemned")]
    assert {life.state for life in detector.lives.values()} == {State.ALIVE}


def test_doubt_puts_nobody_off_for_longer_than_it_may_last() -> None:
    """It begins when y is overdue already; another falls silent in that moment."""
    detector = Detector()
    detector.joined(0.0, "y", "1")
    detector.joined(0.75, "x", "1")
    condemned = [
        (now, each.process)
        for now in (0.9, 1.2, 1.5, 1.8, 2.1, 2.4, 2.7, 2.99, 3.01)
        for each in detector.tick(now)
        if isinstance(each, Condemned)
    ]
    assert condemned == [(3.01, "y")]


def test_who_stands_in_line_for_a_processor_has_longer_but_not_for_ever() -> None:
    detector = Detector()
    condemned: list[tuple[float, str]] = []
    for process in "abxy":
        detector.joined(0.0, process, "1")
    for tenth in range(60):
        now = tenth / 10 + 0.05
        for process in "ab":
            detector.beat(now, process, "1", tenth)
        detector.starved(now, {"x"} if now < 5 else ())
        condemned += [(now, each.process) for each in detector.tick(now) if isinstance(each, Condemned)]
    assert condemned == [(pytest.approx(1.05), "y"), (pytest.approx(3.05), "x")]


def test_time_in_line_is_forgiven_whatever_befalls_it_next() -> None:
    """In line for 1.5 s, then stopped: the stop alone must last for a second. Then it beats, and nothing is forgiven any more."""
    detector = Detector()
    condemned: list[tuple[float, str]] = []
    for process in "abx":
        detector.joined(0.0, process, "1")
    for tenth in range(200):
        now = tenth / 10 + 0.05
        for process in "ab":
            detector.beat(now, process, "1", tenth)
        if 1.9 < now < 2.0 or 5.0 < now < 5.1:
            detector.beat(now, "x", "1", tenth)
        detector.starved(now, {"x"} if now < 1.5 or 2.0 < now < 3.5 else ())
        condemned += [(now, each.process) for each in detector.tick(now) if isinstance(each, Condemned)]
    assert condemned == [(pytest.approx(4.55), "x")]


def test_silence_counts_only_as_far_as_somebody_could_have_told() -> None:
    """Whoever passes the beats on stands still: all are silent, and nobody is condemned however long it takes."""
    detector = Detector()
    for tenth in range(10):
        detector.path_beat(tenth / 10, 0.0)
        for process in "ab":
            detector.beat(tenth / 10, process, "1", tenth)
    said: list[str] = []
    for tenth in range(10, 100):
        said += told(detector.tick(tenth / 10))
    said += told(detector.path_beat(10.0, 9.0))  # it is back, and says by how much it was late
    for tenth in range(100, 120):
        said += told(detector.path_beat(tenth / 10, 0.0))
        said += told(detector.beat(tenth / 10, "a", "1", tenth))  # b hung meanwhile
    assert [text.split(":")[0] for text in said] == ["Suspected b 1"]  # its time-outs are longer now
    for tenth in range(120, 130):
        said += told(detector.path_beat(tenth / 10, 0.0))
        said += told(detector.beat(tenth / 10, "a", "1", tenth))
    assert [text.split(":")[0] for text in said] == ["Suspected b 1", "Condemned b 1"]


class Promises(RuleBasedStateMachine):
    """What holds whatever happens. The model knows when each process was last heard of and how late the observer was, no more."""

    names = st.sampled_from(["x", "y", "z"])
    timeouts = Timeouts(0.4, 1.0)
    tick_seconds = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.detector = Detector(self.timeouts)
        self.now = 1000.0
        self.lives: dict[str, int] = {}  # the latest life of each
        self.heard: dict[str, float] = {}  # of those whose latest life is not over
        self.overrun: set[str] = set()
        self.condemned: set[tuple[str, str]] = set()
        self.sequence = 0

    def take(self, decisions: list[Decision], due: frozenset[str] | set[str] = frozenset()) -> None:
        for decision in decisions:
            process, life = decision.process, (decision.process, decision.incarnation)
            assert decision.why
            assert decision.incarnation == str(self.lives[process]), "a verdict on a life that is over"
            assert process in self.heard, "a verdict on the dead"
            if isinstance(decision, Condemned):
                assert life not in self.condemned
                assert process in due or self.now - self.heard[process] > self.timeouts.dead_seconds, "its beats came in time"
                self.condemned.add(life)
                del self.heard[process]

    @rule(process=names)
    def join(self, process: str) -> None:
        self.lives[process] = self.lives.get(process, 0) + 1
        self.detector.joined(self.now, process, str(self.lives[process]))
        self.heard[process] = self.now

    @rule(process=names, running=st.sampled_from([0.0, 0.5, 2.0]), bound=st.sampled_from([0.0, 1.0]))
    def beat(self, process: str, running: float, bound: float) -> None:
        self.sequence += 1
        if process not in self.lives:
            self.lives[process] = 1
            self.heard[process] = self.now
        elif process in self.heard:
            self.heard[process] = self.now
        overrun = bound > 0 and running > bound
        said = self.detector.beat(self.now, process, str(self.lives[process]), self.sequence, "'call'", running, bound)
        alive = process in self.heard
        self.take(said, {process} if overrun else set())
        assert not (alive and overrun and process in self.heard), "an operation beyond its bound was not noticed"

    @rule(process=names)
    def beat_of_an_old_life(self, process: str) -> None:
        if self.lives.get(process, 0) > 1:
            before = self.detector.num_ignored
            self.sequence += 1
            assert self.detector.beat(self.now, process, str(self.lives[process] - 1), self.sequence, "'call'", 9.0, 1.0) == []
            assert self.detector.num_ignored == before + 1

    @rule(process=names)
    def leave(self, process: str) -> None:
        if process in self.lives:
            self.detector.left(self.now, process, str(self.lives[process]))
            self.heard.pop(process, None)

    @rule(process=names)
    def report(self, process: str) -> None:
        if process in self.lives:
            said = self.detector.reported(self.now, process, str(self.lives[process]), "attention.0", 1.0, 0.1)
            assert all(isinstance(each, Suspected) for each in said)
            self.take(said)

    @rule(num=st.integers(1, 15), late=st.sampled_from([0.0, 0.0, 0.0, 0.2, 0.9, 30.0]))
    def pass_time(self, num: int, late: float) -> None:
        for _ in range(num):
            self.now += self.tick_seconds + late
            self.take(self.detector.tick(self.now, late))
            if late > self.timeouts.dead_seconds:  # it was away, and counts anew
                self.heard = dict.fromkeys(self.heard, self.now)
            # With all it may add for its own lag and for the doubt whether it is itself to blame.
            longest = self.timeouts.dead_seconds + DISTRUST_SECONDS + min(self.detector.stretch(self.now), self.timeouts.dead_seconds)
            overdue = [process for process, heard in self.heard.items() if self.now - heard > longest + 1e-6]
            assert not overdue, "silent, and not condemned"

    @invariant()
    def states_are_what_was_said(self) -> None:
        for process, life in self.detector.lives.items():
            assert (life.state is State.DEAD) == (process not in self.heard)
            assert (life.why == "") == (life.state is State.ALIVE)


Promises.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPromises = Promises.TestCase


def test_one_silent_among_many_is_condemned_within_a_tick() -> None:
    """The bound without lag and without doubt: dead_seconds and one tick, whatever the phase of the last beat."""
    for phase in range(10):
        last = 1.0 + phase / 100
        _, said = play(at_the_same_time(*others(6.0), [*beats("x", "1", 0.0, 1.0), (last, "beat", ("x", "1", 99))], [END]))
        (at,) = [at for at, text in said if text.startswith("Condemned x")]
        assert math.isclose(at, last + 1.0, abs_tol=0.0501)
        assert at >= last + 1.0 - 1e-9


def test_little_lags_are_no_lags() -> None:
    detector = Detector()
    detector.tick(1.0, LAG_SECONDS)
    assert detector.stretch(1.0) == 0.0
    detector.tick(2.0, 0.5)
    assert detector.stretch(2.0) == 0.5
    assert detector.stretch(11.9) == 0.5
    assert detector.stretch(12.1) == 0.0


def test_a_complaint_lasts_and_is_renewed() -> None:
    detector = Detector()
    detector.joined(0.0, "x", "1")
    said: list[Decision] = []
    for tenth in range(60):
        now = tenth / 10
        said += detector.beat(now, "x", "1", tenth)
        if tenth in (10, 25):
            said += detector.reported(now, "x", "1", "attention.0", 0.5, 0.1)
        said += detector.tick(now)
    assert [type(each) for each in said] == [Suspected, Cleared]
    assert REPORT_SECONDS == 2.0
