"""Emulated workers: charged operations, modelled time in virtual time, void figures, and the smallest dilation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from virtual_time import in_virtual_time

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.emulation import (
    EmulatedCompute,
    EmulationStatistics,
    Lateness,
    check_dilation,
    emulation_report,
    smallest_dilation,
)
from flowrt.errors import UserError
from flowrt.graph.explicit import ports_of
from flowrt.graph.kinds import kind_of
from flowrt.graph.model import Edge, Graph, Node, PortSpec
from flowrt.graph.notation import LayerSet
from flowrt.graph.settings import ComputeCost, Emulation
from flowrt.operators.step_layout import StepLayout
from flowrt.seams import Running
from flowrt.timer import FineTimer, LoopTimer, measure_lateness, new_timer
from flowrt.transports.wire.message import Tag
from flowrt.workers.emulated import EmulatedWorker

T = TypeVar("T")


class SleepingCompute:
    """A compute seam whose calls take virtual seconds: a call is how long it takes and what it charges."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.running: Running | None = None
        self.slowness = 1.0

    def is_short(self, label: str) -> bool:
        return label == "short"

    def run_inline(self, label: str, call: Callable[[], T]) -> T:
        return call()

    async def run(self, label: str, call: Callable[[], T], bound_seconds: float = 60.0) -> T:
        await asyncio.sleep(self.seconds)
        return call()

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize(
    ("real", "charged", "taken", "late"),
    [
        (0.1, 0.5, 5.0, 0),  # waits for its modelled time, dilated by 10
        (5.2, 0.5, 5.2, 0),  # a little longer: within a twentieth
        (9.0, 0.5, 9.0, 1),  # reality is slower
        (3.0, 0.0, 3.0, 0),  # nothing charged: the time it takes
    ],
)
@in_virtual_time
async def test_a_call_takes_its_modelled_time(real: float, charged: float, taken: float, late: int) -> None:
    inner, timer = SleepingCompute(), LoopTimer()
    compute = EmulatedCompute(inner, timer, 10.0, {"node"})
    await compute.run("node", lambda: compute.charge(1e-3))  # so that something is modelled
    inner.seconds, begin = real, timer.now()
    assert await compute.run("node", lambda: compute.charge(charged) or 7) == 7
    assert timer.now() - begin == pytest.approx(taken)
    assert (compute.lateness.num, compute.lateness.num_late) == (1 + (charged > 0), late)
    assert compute.free_seconds == (0.0 if charged else pytest.approx(real))


@in_virtual_time
async def test_a_slow_device_takes_longer_for_what_it_charges_meanwhile() -> None:
    inner, timer, found = SleepingCompute(), LoopTimer(), list[float]()
    compute = EmulatedCompute(inner, timer, 10.0, {"node"})
    send = compute.at_modelled_time(lambda begin: found.append(timer.now() - begin))
    for inner.slowness in (1.0, 3.0, 1.0):
        begin = timer.now()
        await compute.run("node", lambda begin=begin: (compute.charge(0.1), send(begin), compute.charge(0.1)))
        found.append(timer.now() - begin)
    assert compute.lateness.num_late == 0
    assert found == [pytest.approx(seconds) for seconds in (1.0, 2.0, 3.0, 6.0, 1.0, 2.0)]


@in_virtual_time
async def test_what_charges_is_never_short_and_what_waits_is_visible() -> None:
    timer = LoopTimer()
    compute = EmulatedCompute(SleepingCompute(), timer, 1.0, {"node", "short"})
    assert not compute.is_short("short")
    assert EmulatedCompute(SleepingCompute(), timer, 1.0, {"node"}).is_short("short")
    running = asyncio.ensure_future(compute.run("node", lambda: compute.charge(2.0)))
    await asyncio.sleep(1.0)
    assert compute.running is not None
    assert compute.running.label == "node"
    assert compute.running.bound_seconds == 62.0
    with pytest.raises(RuntimeError, match="one call at a time"):
        await compute.run("other", lambda: None)
    await running
    assert compute.running is None


@in_virtual_time
async def test_outputs_leave_a_call_when_what_came_before_them_is_computed() -> None:
    timer, found = LoopTimer(), list[tuple[str, float]]()
    compute = EmulatedCompute(SleepingCompute(), timer, 10.0, {"node"})
    begin = timer.now()
    send = compute.at_modelled_time(lambda name: found.append((name, timer.now() - begin)))

    def call() -> None:
        for charged, name in ((0.2, "first"), (0.3, "second")):
            compute.charge(charged)
            send(name)
        compute.charge(0.5)

    await compute.run("node", call)
    found.append(("end", timer.now() - begin))
    with pytest.raises(ZeroDivisionError):
        await compute.run("node", lambda: (compute.charge(1.0), send("of a failure"), 1 / 0))
    expected = (("first", 2.0), ("second", 5.0), ("end", 10.0), ("of a failure", 10.0))
    assert found == [(name, pytest.approx(seconds)) for name, seconds in expected]


@in_virtual_time
async def test_late_outputs_make_a_call_late() -> None:
    inner, timer = SleepingCompute(), LoopTimer()
    inner.seconds = 5.0
    compute = EmulatedCompute(inner, timer, 10.0, {"node"})
    send = compute.at_modelled_time(lambda name: None)
    await compute.run("node", lambda: (compute.charge(0.1), send("after a second"), compute.charge(0.9)))
    assert compute.lateness.num_late == 1


@in_virtual_time
async def test_a_cancelled_wait_leaves_nothing() -> None:
    compute = EmulatedCompute(SleepingCompute(), LoopTimer(), 1.0, {"node"})
    waiting = asyncio.ensure_future(compute.run("node", lambda: compute.charge(1000.0)))
    await asyncio.sleep(1.0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert compute.running is None
    assert compute.lateness.num == 0


def _graph(costs: dict[str, ComputeCost]) -> Graph:
    def node(name: str, operator: str, process: str) -> Node:
        kind = kind_of(operator)
        if kind.is_users:
            return Node(name, operator, process, {"x": PortSpec("x")}, {"y": PortSpec("y")})
        return Node(name, operator, process, *ports_of(kind, {}, ()), {}, kind.stateful, kind.batches)

    nodes = [node("a.attention", "attention", "a"), node("e.experts", "experts", "e"), node("o", "m:f", "o"), node("p", "m:g", "p")]
    return Graph.of(nodes, [Edge("a.attention", "y", "o", "x", layers=LayerSet())], emulation=Emulation(1.0, costs))


def _attention(layer: int, query_lengths: list[int], kv_lengths: list[int]) -> Firing:
    pages = [list(range(-(-length // 4))) for length in kv_lengths]
    layout = StepLayout.from_lists(query_lengths, kv_lengths, pages, 4)
    inputs = {"x": Payload((torch.zeros(sum(query_lengths), 2),)), "layout": Payload(layout.to_tensors())}
    return Firing("a.attention", Tag("s", layer=layer), inputs)


def _experts(*parts: tuple[int, list[int]]) -> list[Firing]:
    """A firing for each (layer, expert of each pair)."""
    firings = []
    for place, (layer, experts) in enumerate(parts):
        rows = Payload((torch.zeros(1, 2), torch.zeros(len(experts), dtype=torch.int64), torch.tensor(experts), torch.ones(len(experts))))
        firings.append(Firing("e.experts", Tag("s", layer=layer, micro_batch=place), {"rows": rows}))
    return firings


@pytest.mark.parametrize(
    ("process", "firings", "charged"),
    [
        ("a", [_attention(3, [1], [1])], 1.00101),
        ("a", [_attention(3, [1, 1, 6], [9, 1, 7])], 1.00817),
        ("e", _experts((3, [5])), 60.01),
        ("e", _experts((3, [5, 6, 5])), 70.03),  # an expert with two rows
        ("e", _experts((3, [5]), (3, [5, 6])), 70.03),  # requests of one layer are one batch
        ("e", _experts((3, [5]), (4, [5, 6]), (3, [6])), 140.04),
        ("o", [Firing("o", Tag("s"), {"x": Payload((torch.zeros(7, 2),))})], 0.0),
        ("p", [Firing("p", Tag("s"), {"x": Payload((torch.zeros(7, 2),))})], 0.7),
        ("p", [Firing("p", Tag("s"), {"x": Payload((torch.tensor(1.0),))})], 0.1),
        ("p", [Firing("p", Tag("s"), {"x": [Payload((torch.zeros(2),)), Payload((torch.zeros(3),))]})], 0.5),
    ],
)
@in_virtual_time
async def test_what_is_charged(process: str, firings: list[Firing], charged: float) -> None:
    node = firings[0].node
    costs = {"attention": ComputeCost(1.0, 1e-3, 1e6, 1e-5), "experts": ComputeCost(50.0, 1e-2, 10.0, 1e6)}
    costs["m:g"] = ComputeCost(row_seconds=0.1)
    emulated = EmulatedWorker(_graph(costs), process, SleepingCompute(), LoopTimer())
    functions = emulated.charged({node: lambda firings: [{} for _ in firings]})
    assert await emulated.compute.run(node, lambda: functions[node](firings)) == [{}] * len(firings)
    emulated.close()
    assert emulated.statistics().computed.modelled_seconds == pytest.approx(charged)


@in_virtual_time
async def test_what_is_not_modelled_is_not_charged() -> None:
    emulated = EmulatedWorker(_graph({"attention": ComputeCost(1.0)}), "e", SleepingCompute(), LoopTimer())
    functions = emulated.charged({"e.experts": len})
    assert await emulated.compute.run("e.experts", lambda: functions["e.experts"](_experts((0, [1])))) == 1
    assert emulated.statistics() == EmulationStatistics()
    emulated.close()


def _worker(late: tuple[int, float] = (0, 0.0), delivered_late: tuple[int, float] = (0, 0.0), free: float = 0.0) -> EmulationStatistics:
    return EmulationStatistics(Lateness(1000, *late, modelled_seconds=100.0), Lateness(1000, *delivered_late), free)


@pytest.mark.parametrize(
    ("workers", "void", "sentences"),
    [
        ([], False, []),
        ([_worker()], False, []),
        ([_worker((20, 0.3)), _worker()], False, ["20 of 2000 computations", "300.0 ms", "hold"]),
        ([_worker((21, 0.0)), _worker()], True, ["21 of 2000 computations took longer than modelled", "VOID"]),
        ([_worker(delivered_late=(11, 1e-3))], True, ["11 of 1000 messages came later", "1.0 ms", "VOID"]),
        ([_worker(free=5.0)], False, []),
        ([_worker(free=6.0)], True, ["6 % of its computing", "VOID"]),
        ([EmulationStatistics(Lateness(), Lateness(5), 9.0)], False, []),  # nothing of it is modelled
    ],
)
def test_when_figures_are_void(workers: list[EmulationStatistics], void: bool, sentences: list[str]) -> None:
    account = emulation_report(100.0, workers)
    assert account.void == void
    text = "\n".join(account.sentences)
    assert bool(text) == bool(sentences)
    for words in sentences:
        assert words in text


def test_late_is_more_than_a_twentieth_of_its_own_time() -> None:
    lateness = Lateness()
    lateness.note(1.0, 0.04)
    lateness.note(10.0, 0.4)
    assert (lateness.num, lateness.num_late) == (2, 0)
    lateness.note(1.0, 0.15)
    assert (lateness.num_late, lateness.worst_seconds) == (1, pytest.approx(0.1))


@pytest.mark.parametrize(
    ("times", "error", "smallest"),
    [
        ({"a": 1e-3, "b": 15e-6}, 60e-6, (80.0, "b")),
        ({"a": 1.0}, 60e-6, (1.0, "a")),
        ({"a": 1e-6}, 61.3e-6, (1300.0, "a")),
        ({"a": 1e-6}, 0.0, (1.0, "a")),
        ({}, 1.0, (1.0, "")),
    ],
)
def test_the_smallest_dilation(times: dict[str, float], error: float, smallest: tuple[float, str]) -> None:
    assert smallest_dilation(times, error) == (pytest.approx(smallest[0]), smallest[1])
    check_dilation(smallest[0], times, error)
    if smallest[0] > 1:
        with pytest.raises(UserError, match=f"write {smallest[0]:g} or more: {smallest[1]} is"):
            check_dilation(0.98 * smallest[0], times, error)


async def test_the_fine_timer_calls_in_order_never_early_and_not_what_was_cancelled(loop_kind: str) -> None:
    timer = new_timer()
    called: list[tuple[str, bool]] = []
    start = timer.now()
    alarms = [timer.call_at(start + at, lambda at=at: called.append((f"{at:g}", timer.now() >= start + at))) for at in (4e-3, 1e-3, 2e-3)]
    alarms[2].cancel()
    await timer.wait_until(start + 5e-3)
    await timer.wait_until(start)  # over already
    assert called == [("0.001", True), ("0.004", True)]
    waiting = asyncio.ensure_future(timer.wait_until(start + 1000.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    timer.close()
    timer.close()


async def test_lateness_is_measured_by_blocks() -> None:
    timer = new_timer()
    assert isinstance(timer, FineTimer | LoopTimer)
    blocks = await measure_lateness(timer, num_blocks=3, num_waits=4, wait_seconds=1e-4)
    assert len(blocks) == 3
    assert blocks == sorted(blocks)
    assert blocks[0] >= 0.0
    timer.close()


@in_virtual_time
async def test_the_loops_timer_is_exact_in_virtual_time() -> None:
    assert await measure_lateness(LoopTimer(), 2, 5) == [0.0, 0.0]
