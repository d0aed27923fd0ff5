"""How a NIC's direction is shared: tables small enough to check by hand, and a slow model that recomputes everything at every event."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowrt.costs.links import LINK_NUMBERS, PROFILES, profile_of
from flowrt.graph.notation import parse_link
from flowrt.transports.emulation.nic_model import SharedDirection

Message = tuple[str, float, float]  # flow, begin, work


def finishes(messages: list[Message]) -> list[tuple[float, str]]:
    """(when, flow) of every message, all known from the beginning."""
    direction = SharedDirection()
    for flow, begin, work in messages:
        assert direction.add(flow, begin, work) == 0.0
    found = []
    while (done := direction.step(math.inf)) is not None:
        found.append((done[0], str(done[1])))
    assert direction.next_event() is None
    return found


@pytest.mark.parametrize(
    ("bulk", "priority", "passed", "expected"),
    [
        ([("a", 0, 10)], [(2, 1)], [3], [(11, "a")]),
        ([("a", 0, 10)], [(2, 1), (2, 1)], [3, 4], [(12, "a")]),  # one after another
        ([("a", 0, 2)], [(2, 1)], [3], [(2, "a")]),
        ([("a", 5, 2)], [(4, 2)], [6], [(8, "a")]),  # what begins meanwhile waits
        ([("a", 0, 4), ("b", 0, 4)], [(2, 1)], [3], [(9, "a"), (9, "b")]),
    ],
)
def test_messages_of_high_priority_have_the_line_for_themselves(
    bulk: list[Message], priority: list[tuple[float, float]], passed: list[float], expected: list[tuple[float, str]]
) -> None:
    direction = SharedDirection()
    for flow, begin, work in bulk:
        direction.add(flow, begin, work)
    assert [direction.interrupt(*each) for each in priority] == [(time, 0.0) for time in passed]
    found = []
    while (done := direction.step(math.inf)) is not None:
        found.append((done[0], str(done[1])))
    assert found == expected


def test_messages_of_high_priority_on_an_idle_line_are_forgotten() -> None:
    direction = SharedDirection()
    for number in range(2000):
        assert direction.interrupt(number, 0.5) == (number + 0.5, 0.0)
    assert len(direction._pauses) < 300
    direction.add("a", 1999.0, 1.0)
    assert direction.step(math.inf) == (2000.5, "a")


@dataclass
class _Job:
    flow: str
    begin: Fraction
    left: Fraction


def slow_model(messages: list[Message]) -> list[tuple[float, str]]:
    """The slow model: it recomputes the served messages after every event, in exact fractions."""
    queues: dict[str, list[_Job]] = {}
    for flow, begin, work in messages:
        queues.setdefault(flow, []).append(_Job(flow, Fraction(begin), Fraction(work)))
    time, found = Fraction(0), []
    while any(queues.values()):
        heads = [queue[0] for queue in queues.values() if queue]
        served = [job for job in heads if job.begin <= time]
        later = [job.begin for job in heads if job.begin > time]
        if not served:
            time = min(later)
            continue
        step = min(job.left for job in served) * len(served)
        if later:
            step = min(step, min(later) - time)
        time += step
        for job in served:
            job.left -= step / len(served)
            if job.left == 0:
                queues[job.flow].pop(0)
                found.append((float(time), job.flow))
    return found


_MESSAGES = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=14)


def _in_order(messages: list[tuple[str, int, int]]) -> list[Message]:
    return [(flow, float(begin), float(work)) for flow, begin, work in sorted(messages, key=lambda message: message[1])]


@given(_MESSAGES)
@example([("a", 0, 10), ("b", 0, 1)])  # a small one pays twice its own time, not that of bulk
def test_shares_are_equal_and_the_line_never_idles(messages: list[tuple[str, int, int]]) -> None:
    ordered = _in_order(messages)
    found, expected = finishes(ordered), slow_model(ordered)
    assert sorted(flow for _, flow in found) == sorted(flow for _, flow in expected)
    for flow in "abcd":
        ours, theirs = ([time for time, other in each if other == flow] for each in (found, expected))
        assert ours == pytest.approx(theirs)


def test_messages_that_end_together_are_reported_in_the_order_in_which_they_began() -> None:
    assert finishes([(name, 0, 1) for name in "abcdefgh"]) == [(8, name) for name in "abcdefgh"]
    assert finishes([("a", 0, 3), ("a", 5, 1), ("b", 4, 2)]) == [(3, "a"), (7, "b"), (7, "a")]


@given(_MESSAGES)
def test_nothing_is_faster_than_alone_and_the_last_ends_with_the_work(messages: list[tuple[str, int, int]]) -> None:
    ordered = _in_order(messages)
    found = finishes(ordered)
    assert [time for time, _ in found] == sorted(time for time, _ in found)
    for flow in "abcd":
        sent = [(begin, work) for other, begin, work in ordered if other == flow]
        for (begin, work), time in zip(sent, [time for time, other in found if other == flow], strict=True):
            assert time >= begin + work - 1e-9
    busy_until = 0.0
    for _, begin, work in ordered:
        busy_until = max(busy_until, begin) + work
    assert found[-1][0] == pytest.approx(busy_until)


@given(_MESSAGES, st.integers(1, 9))
def test_late_arrivals_count_from_their_own_time(messages: list[tuple[str, int, int]], delay: int) -> None:
    """A message added `delay` after its begin gives the same times, unless a finish after that begin was returned already."""
    ordered = _in_order(messages)
    direction, found, moved = SharedDirection(), [], 0.0
    for flow, begin, work in ordered:
        while (done := direction.step(begin + delay - 1)) is not None:
            found.append((done[0], str(done[1])))
        moved += direction.add(flow, begin, work)
    while (done := direction.step(math.inf)) is not None:
        found.append((done[0], str(done[1])))
    if not moved:
        for flow in "abcd":
            ours, theirs = ([time for time, other in each if other == flow] for each in (found, finishes(ordered)))
            assert ours == pytest.approx(theirs)


def test_arrivals_before_the_last_event_are_moved_and_counted() -> None:
    direction = SharedDirection()
    direction.add("a", 0.0, 2.0)
    assert direction.step(5.0) == (2.0, "a")
    assert direction.add("b", 0.5, 1.0) == 1.5  # its own begin is over: a finish after it was given out
    assert direction.step(5.0) == (3.0, "b")


def test_work_after_a_finish_begins_at_that_instant_however_late_the_step() -> None:
    direction, times = SharedDirection(), []
    direction.add("a", 0.0, 1.0)
    while (done := direction.step(100.0)) is not None:
        times.append(done[0])
        if len(times) < 5:
            direction.add("a", done[0], 1.0)
    assert times == [1, 2, 3, 4, 5]


def test_finish_without_further_arrivals() -> None:
    direction = SharedDirection()
    direction.add("a", 0.0, 4.0)
    direction.add("b", 0.0, 1.0)
    assert direction.step(0.0) is None
    assert [direction.finish_without_arrivals(flow) for flow in "abc"] == [5.0, 2.0, None]


def test_profiles_give_the_source_of_each_number() -> None:
    for name, profile in PROFILES.items():
        assert profile.name == name
        assert set(profile.sources) == set(LINK_NUMBERS)
        assert all(text.startswith(("read: ", "derived: ", "assumed: ", "assumed")) for text in profile.sources.values())
        assert profile.seconds(1 << 20) == pytest.approx(
            profile.latency_seconds + profile.message_seconds + (1 << 20) / profile.bandwidth_bytes_per_second
        )


def test_the_numbers_behind_ub() -> None:
    """1 MB in under 20 us by the source; sharing splits bandwidth and message rate, not latency."""
    ub = PROFILES["ub"]
    assert 19e-6 < ub.seconds(1_000_000) < 20.2e-6
    half = ub.shared_by(2)
    assert half.bandwidth_bytes_per_second == ub.bandwidth_bytes_per_second / 2
    assert (half.message_seconds, half.latency_seconds) == (2 * ub.message_seconds, ub.latency_seconds)


def test_own_numbers_and_what_is_no_link() -> None:
    own = profile_of("latency_seconds=2e-06,bandwidth_bytes_per_second=1e9,message_seconds=0.0")
    assert (own.latency_seconds, own.bandwidth_bytes_per_second, own.message_seconds) == (2e-6, 1e9, 0.0)
    assert profile_of("ub") is PROFILES["ub"]
    for text in (
        "ubb",
        "",
        "latency_seconds=1",
        "bandwidth_bytes_per_second=0",
        "bandwidth_bytes_per_second=1,x=2",
        "latency_seconds=nan,",
    ):
        with pytest.raises(ValueError, match=r"write a profile's name|unknown link|unknown number|is not a number|above 0"):
            parse_link(text)
