"""Workers with fault injection: orders are taken from the control connection and change how the worker computes."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flowrt.actors.control import PeerLeft, StatisticsRequest, as_message
from flowrt.chaos.orders import Note, Order, note_of
from flowrt.chaos.worker import FaultEffects
from flowrt.seams import ThreadCompute
from flowrt.transports.contract import Identity


class FakeWorker(SimpleNamespace):
    """As much of a worker as fault effects touch."""

    def __init__(self) -> None:
        self.acted: list[str] = []
        super().__init__(
            compute=ThreadCompute("fake"),
            act=lambda message: self.acted.append(message.kind),
            lose=lambda peer, reason: self.acted.append(f"lost {peer.name}"),
        )


def new_worker() -> tuple[Any, FaultEffects]:
    worker, effects = FakeWorker(), FaultEffects()
    effects.begin(worker)  # type: ignore[arg-type]
    return worker, effects


async def test_orders_take_effect_in_order_and_other_messages_pass(capsys: pytest.CaptureFixture[str]) -> None:
    worker, effects = new_worker()
    for control in (Order("slow"), StatisticsRequest(), Order("reset"), Order("hang"), StatisticsRequest()):
        effects.act(worker, as_message(control))
    assert worker.acted == [StatisticsRequest.kind, StatisticsRequest.kind]
    notes = [note_of(line) for line in capsys.readouterr().err.splitlines()]
    assert [note.what for note in notes if note is not None] == ["slow", "reset", "hang"]
    await worker.compute.aclose()


class FakeTime:
    """The module `time` as a worker under chaos uses it: a clock that each look moves a little, and a sleep that moves it at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr("flowrt.chaos.worker.time", fake)
    return fake


async def test_a_hang_holds_the_next_call_and_not_the_loop(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, effects = new_worker()
    compute: ThreadCompute = worker.compute
    for _ in range(5):
        await compute.run("short", lambda: None)
    assert compute.is_short("short")
    effects.carry_out(Order("hang", 60.0))
    assert not compute.is_short("short")  # it must not be the loop that stands still
    loop = asyncio.get_running_loop()
    holds, go_on, slept = asyncio.Event(), threading.Event(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        loop.call_soon_threadsafe(holds.set)
        assert go_on.wait(30), "the loop does not turn while the call is held"
        FakeTime.sleep(clock, seconds)

    monkeypatch.setattr(clock, "sleep", sleep)
    call = asyncio.create_task(compute.run("short", lambda: "result"))
    await holds.wait()
    assert not call.done()
    go_on.set()
    assert await call == "result"
    assert slept == [pytest.approx(60.0, abs=0.01)]
    await compute.aclose()


async def test_slow_calls_take_their_factor_wherever_they_run(clock: FakeTime) -> None:
    worker, effects = new_worker()
    compute: ThreadCompute = worker.compute
    effects.carry_out(Order("slow", 60.0, factor=4.0))
    for run in (compute.run("long", lambda: clock.sleep(0.02)), None):
        begun = clock.now
        if run is not None:
            await run
        else:
            compute.run_inline("long", lambda: clock.sleep(0.02))
        assert clock.now - begun == pytest.approx(0.08, abs=2e-3)
    await compute.aclose()


async def test_slow_fault_ends_after_its_duration(clock: FakeTime) -> None:
    worker, effects = new_worker()
    effects.carry_out(Order("slow", 0.1, factor=1e6))
    await worker.compute.run("long", lambda: clock.sleep(0.01))
    assert clock.now == pytest.approx(0.1, abs=2e-3)
    await worker.compute.aclose()


async def test_stall_blocks_the_worker(clock: FakeTime) -> None:
    _, effects = new_worker()
    effects.carry_out(Order("stall", 0.05))
    assert clock.now == pytest.approx(0.05, abs=2e-3)


async def test_lost_servers_are_noted_by_the_worker(capsys: pytest.CaptureFixture[str]) -> None:
    worker, effects = new_worker()
    effects.act(worker, as_message(StatisticsRequest()))
    effects.act(worker, as_message(PeerLeft("experts.1", "one", "was killed")))
    effects.lose(worker, Identity("experts.2", "two"), "its channel ended")
    assert worker.acted == [StatisticsRequest.kind, PeerLeft.kind, "lost experts.2"]
    notes = [note_of(line) for line in capsys.readouterr().err.splitlines()]
    assert [(note.what, note.peer, note.incarnation) for note in notes if isinstance(note, Note)] == [
        ("left", "experts.1", "one"),
        ("left", "experts.2", "two"),
    ]
    await worker.compute.aclose()


async def test_worker_without_fault_injection_rejects_orders() -> None:
    import msgspec

    from flowrt.actors.control import from_message

    with pytest.raises(msgspec.ValidationError, match=r"'control\.order' is not a control message"):
        from_message(as_message(Order("stall", 60.0)))
