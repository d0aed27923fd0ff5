"""The offset of another clock: its error is within the stated bound, whatever the delays, the drift and the stamps."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from flowrt.actors.control import TraceRecords
from flowrt.launcher.trace_collector import TraceCollector
from flowrt.system.clock_offset import MAX_DRIFT, SAME_CLOCK, UNKNOWN_CLOCK, ClockExchange, ClockOffset, ClockStamp
from flowrt.trace.records import RecordKind, TraceRing


@pytest.mark.parametrize("seed", range(20))
def test_offset_is_known_within_the_stated_error(seed: int) -> None:
    """Heartbeats in both directions, with delays of any size that differ between the directions."""
    chance, time = random.Random(seed), 0.0
    offset, drift = chance.uniform(-1e5, 1e5), chance.uniform(-0.95, 0.95) * MAX_DRIFT
    here, there = ClockExchange(lambda: time), ClockExchange(lambda: offset + (1 + drift) * time)
    errors = []
    delays = [10 ** chance.uniform(-5, -1) for _ in range(2)]
    for _ in range(100):
        time += chance.uniform(0, 1)
        for sender, receiver, delay in ((here, there, delays[0]), (there, here, delays[1])):
            stamp = msgspec.msgpack.decode(msgspec.msgpack.encode(sender.stamp()), type=ClockStamp)
            time += delay * chance.uniform(1, 10)
            receiver.receive(stamp)
        for known, true in ((here.offset, offset + drift * time), (there.offset, -offset - drift * time)):
            assert abs(known.seconds - true) <= known.error_at(time if known is here.offset else offset + (1 + drift) * time) + 1e-9
        errors.append(here.offset.error_at(time))
    assert errors[-1] < math.inf
    assert errors[-1] <= min(errors[:3]) + MAX_DRIFT * time, "the best stamp counts"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e308, -1.0])
def test_stamps_of_no_clock_change_nothing(number: float) -> None:
    exchange = ClockExchange(lambda: 10.0)
    exchange.receive(ClockStamp(110.0, 9.0, 0.5))
    known = exchange.offset
    assert (known.seconds, known.at_seconds) == (100.25, 10.0)
    for stamp in (ClockStamp(number, number, number), ClockStamp(5.0, number, 0.0), ClockStamp(5.0, 9.9, number), ClockStamp(5.0, 11.0)):
        exchange.receive(stamp)
        assert exchange.offset == known
    assert math.isfinite(exchange.stamp().sent_seconds)


def test_a_bound_grows_until_a_newer_stamp_is_better() -> None:
    time = 0.0
    exchange = ClockExchange(lambda: time)
    exchange.receive(ClockStamp(50.0, -0.001))
    first = exchange.offset
    time = 1.0
    exchange.receive(ClockStamp(51.0, 0.9))
    assert exchange.offset == first, "the newer stamp took longer"
    time = 1e6
    exchange.receive(ClockStamp(52.0 + 1e6, time - 0.1))
    assert exchange.offset.at_seconds == time


def records(clock: ClockOffset) -> tuple[list[float], float]:
    """Times of the records of a worker whose clock has shown 105 and 107, and their error."""
    ring = TraceRing(lambda: 0.0)
    for at in (105.0, 107.0):
        ring.add((RecordKind.CALL, at, at, "gate", (), None, 0, 0))
    (piece,) = ring.take()
    collector = TraceCollector(lambda: 0.0)
    collector.add("experts.0", TraceRecords("1", piece), "host.1", clock)
    (trace,) = collector.traces()
    return [each.start_seconds for each in trace.records], trace.clock_error_seconds


def test_records_of_another_host_are_aligned() -> None:
    assert records(ClockOffset(100.0, 0.25, 7.0)) == ([5.0, 7.0], 0.25 + 2 * MAX_DRIFT)
    assert records(SAME_CLOCK) == ([105.0, 107.0], 0.0)
    assert records(UNKNOWN_CLOCK) == ([105.0, 107.0], math.inf)
