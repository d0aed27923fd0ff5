"""Heartbeats: their content, their times, and how a hung operation is distinguished from a long one."""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
from collections.abc import Callable

import pytest

from flowrt.actors.control import Control, Ended, Heartbeat, from_message
from flowrt.actors.control_link import ControlLink
from flowrt.actors.heartbeats import FIRST_STILL_SECONDS, HEARTBEAT_SECONDS, OperationWatch, send_heartbeats
from flowrt.reliability.scenario import Scenario, Stall
from flowrt.seams import BOUND_SECONDS, STILL_SECONDS, Running, Seams, ThreadCompute
from flowrt.simulation.faults import Faults
from flowrt.simulation.world import World, run
from flowrt.system.process_status import other_threads_want_processor
from flowrt.transports.conformance.connection_checks import HERE, THERE
from flowrt.transports.conformance.kit import SMALL, fill, receive_all, within
from flowrt.transports.inproc import InprocChannel


def heartbeats_of(seconds: float, *faults: object, block: tuple[float, float] = (0.0, 0.0)) -> list[tuple[float, Heartbeat]]:
    """(time, heartbeat) pairs of a process in virtual time."""

    async def main(world: World) -> list[tuple[float, Heartbeat]]:
        sent: list[tuple[float, Heartbeat]] = []
        began = world.loop.time()

        def send(control: Control) -> None:
            assert isinstance(control, Heartbeat)
            sent.append((round(world.loop.time() - began, 6), control))

        async def work(seams: Seams) -> None:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(send_heartbeats("a", lambda: (3, None), seams.clock, send))
                await seams.clock.sleep(seconds)
                task.cancel()

        process = world.start("x", work)
        Faults(world, Scenario(faults=faults), lambda name: None).begin()
        await process.exit
        return sent

    return run(0, main).result


async def test_heartbeats_overtake_other_messages_that_wait_for_the_launcher() -> None:
    one, two = InprocChannel.pair(SMALL, HERE, THERE)
    async with one, two:
        num_before = fill(one)
        link = ControlLink("p", one, 16, lambda message: None, lambda: None)
        for number in range(3):
            link.send(Ended(f"r{number}", 0, "stop"))
        link.send(Heartbeat(sequence=7, lag_seconds=0.0, num_firings=0))
        running = asyncio.ensure_future(link.run())
        await receive_all(two, 0, num_before)
        received = [from_message(await within(two.recv(), "a message to the launcher")) for _ in range(4)]
        assert [type(each) for each in received] == [Ended, Heartbeat, Ended, Ended], "the first one may be on its way"
        running.cancel()
        await asyncio.wait([running])


def test_heartbeat_reports_its_sources_at_even_intervals() -> None:
    sent = heartbeats_of(1.05)
    assert [at for at, _ in sent] == [pytest.approx(HEARTBEAT_SECONDS * i, abs=1e-5) for i in range(11)]
    assert [heartbeat.sequence for _, heartbeat in sent] == list(range(11))
    assert sent[4][1] == Heartbeat(4, 0.0, 3, incarnation="a")


@pytest.mark.parametrize(
    ("stalled", "lag", "then"),
    [
        (0.11, 0.0, 0.2),  # the loop computed for 10 ms: no lag to report, and the next heartbeat is on time
        (0.18, 0.08, 0.2),
        (0.75, 0.65, 0.85),  # what was missed is not made up for
    ],
)
def test_late_heartbeat_reports_its_delay(stalled: float, lag: float, then: float) -> None:
    """The loop is blocked from 0.01 s until `stalled`."""
    sent = heartbeats_of(2.0, Stall(process="x", at_seconds=0.01, for_seconds=stalled - 0.01))
    assert sent[1][0] == pytest.approx(stalled, abs=2e-3)
    assert sent[1][1].lag_seconds == pytest.approx(lag, abs=2e-3)
    assert sent[2][0] == pytest.approx(then, abs=2e-3)
    assert sent[2][1].lag_seconds == 0.0


Look = tuple[float, float | None]  # when, processor time


def excess(watch: OperationWatch, now: float, running: Running) -> float:
    """By how much the operation is beyond its bound; below 0: it is not."""
    _, seconds, bound = watch.look(now, running)
    return seconds - bound


def looks(rows: list[Look], still: float = STILL_SECONDS) -> list[float]:
    """The excess at each look at one operation."""
    watch = OperationWatch(ended=["call"])
    return [excess(watch, now, Running("call", 7.0, 60.0, computed, still)) for now, computed in rows]


def every_tenth(start: float, end: float, computes: float) -> list[Look]:
    return [(start + i / 10, computes * i / 10) for i in range(round((end - start) * 10))]


@pytest.mark.parametrize(
    ("name", "rows", "hung_after"),
    [
        ("computes for long", every_tenth(0.0, 50.0, 1.0), None),
        ("computes for too long", every_tenth(0.0, 70.0, 1.0), 60.1),
        ("stands still from its beginning", every_tenth(0.0, 3.0, 0.0), 0.8),
        ("only looks whether it may go on", every_tenth(0.0, 3.0, 0.005), 0.8),
        ("has a thirtieth of a processor", every_tenth(0.0, 50.0, 0.03), None),
        ("stands still after a while", [*every_tenth(0.0, 2.0, 1.0), *((2.0 + i / 10, 1.9) for i in range(20))], 2.7),
        ("now and then", [(i / 10, float(i // 7)) for i in range(400)], None),
        ("was not looked at: the process was stopped", [(0.0, 0.0), (0.1, 0.0), (30.0, 0.0), (30.1, 0.1)], None),
        ("no count of processor time", [(i / 10, None) for i in range(500)], None),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_hung_and_long_operations_are_distinguished(name: str, rows: list[Look], hung_after: float | None) -> None:
    hung = [now for (now, _), beyond in zip(rows, looks(rows), strict=True) if beyond > 1e-9]
    assert (hung[0] if hung else None) == (None if hung_after is None else pytest.approx(hung_after, abs=0.11))


def test_time_in_the_run_queue_and_time_without_looks_extend_the_bound() -> None:
    watch = OperationWatch(ended=["call"])
    for tenth in range(5000):  # nine tenths of it in the run queue
        running = Running("call", 7.0, 60.0, 0.01 * tenth, STILL_SECONDS, queued_seconds=0.09 * tenth)
        assert excess(watch, tenth / 10, running) < 0
    assert watch.look(9000.0, Running("call", 7.0, 60.0, 50.0, STILL_SECONDS, queued_seconds=450.0))[1] < 60.0  # it was stopped


def test_waiting_for_a_processor_is_not_a_standstill() -> None:
    watch = OperationWatch(ended=["call"])
    wants = True
    running = Running("call", 7.0, 60.0, 1.0, STILL_SECONDS, lambda: wants)
    for i in range(50):
        assert excess(watch, i / 10, running) < 0
    wants = False
    hung = [i for i in range(50, 80) if excess(watch, i / 10, running) > 0]
    assert hung[0] == 57


def test_another_call_restarts_the_measurement_and_a_declared_wait_is_allowed() -> None:
    watch = OperationWatch(ended=["call"])
    for i in range(100):  # calls that stand still for 0.5 s each
        assert excess(watch, i / 10, Running("call", float(i // 5), 60.0, 1.0, STILL_SECONDS)) < 0
    assert max(looks([(i / 10, 1.0) for i in range(590)], still=math.inf)) < 0
    assert watch.look(10.0, None) == (None, 0.0, 0.0)


def test_operation_of_which_no_call_has_ended_in_the_run_may_stand_still_for_longer() -> None:
    watch = OperationWatch(ended=["before"])
    assert watch.note_ended(["here", "before"]) == ("here",)
    assert watch.note_ended(["here", "before"]) == ()
    for label, still in (("before", STILL_SECONDS), ("here", STILL_SECONDS), ("new", FIRST_STILL_SECONDS)):
        bounds = [watch.look(0.1 * number, Running(label, 7.0, 60.0, 1.0, STILL_SECONDS))[2] for number in range(3)]
        assert bounds[-1] == pytest.approx(still)


def test_a_busy_thread_hides_no_hung_one() -> None:
    """The compute thread begins another call before each heartbeat; that of a second thread stands still."""

    async def main(world: World) -> Heartbeat:
        sent: list[Heartbeat] = []
        clock = world.seams("x").clock

        def send(control: Control) -> None:
            assert isinstance(control, Heartbeat)
            sent.append(control)

        def read() -> tuple[int, Running, None, Running]:
            busy = Running("layers", clock.now(), BOUND_SECONDS, clock.now(), STILL_SECONDS)
            return len(sent), busy, None, Running("grammar", 0.0, BOUND_SECONDS, 0.0, STILL_SECONDS)

        task = asyncio.create_task(send_heartbeats("a", read, clock, send))
        await clock.sleep(FIRST_STILL_SECONDS + 1.0)
        task.cancel()
        await asyncio.wait([task])
        return sent[-1]

    last = run(0, main).result
    assert last.running is not None
    assert "'grammar', which has not computed" in last.running
    assert 0 < last.bound_seconds < last.running_seconds


def test_standstill_is_named_in_the_label() -> None:
    watch = OperationWatch()
    for i in range(6):
        label, _, _ = watch.look(i / 10, Running("experts", 1.0, 60.0, 2.0, STILL_SECONDS))
    assert label == "'experts', which has not computed for 0.50 s,"


async def test_a_thread_that_waits_stands_still_and_one_that_computes_does_not() -> None:
    compute = ThreadCompute("compute x")
    loop = asyncio.get_running_loop()
    computing, enough, go = asyncio.Event(), threading.Event(), threading.Event()
    data = bytes(1 << 20)

    def compute_then_wait() -> None:
        loop.call_soon_threadsafe(computing.set)
        while not enough.is_set():
            hashlib.sha256(data).digest()
        go.wait()

    def computed() -> float:
        assert compute.running is not None
        assert compute.running.computed_seconds is not None
        return compute.running.computed_seconds

    async def until(condition: Callable[[], bool]) -> None:
        """For what comes to be sooner or later; the test's own time limit ends what does not."""
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(compute.run("call", compute_then_wait))
        await computing.wait()
        await until(other_threads_want_processor)
        early = computed()
        await until(lambda: computed() > early)
        enough.set()
        await until(lambda: not other_threads_want_processor())  # it has reached its wait
        late = computed()
        assert not other_threads_want_processor()
        assert computed() == late
        go.set()
        await task
    assert compute.running is None
    await compute.aclose()


async def test_bounds_are_declared_or_found() -> None:
    compute = ThreadCompute("compute x", inline_seconds=0.0)
    loop = asyncio.get_running_loop()

    async def look_at(label: str, bound_seconds: float | None = None) -> Running:
        entered, go = asyncio.Event(), threading.Event()

        def call() -> None:
            loop.call_soon_threadsafe(entered.set)
            go.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(compute.run(label, call, bound_seconds))
            await entered.wait()
            running = compute.running
            go.set()
        assert running is not None
        return running

    first = await look_at("call")
    assert (first.bound_seconds, first.still_seconds) == (BOUND_SECONDS, STILL_SECONDS)
    compute._longest_seconds["call"] = 10.0
    assert (await look_at("call")).bound_seconds == 200.0  # 20 times the longest
    declared = await look_at("call", 3600.0)
    assert (declared.bound_seconds, declared.still_seconds, declared.computed_seconds) == (3600.0, math.inf, None)
    await compute.aclose()
