"""Observation of deaths, restarts and resources: notes among output lines, times per incarnation, leaks read from /proc."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrt.api import read_graph
from flowrt.chaos.inject import Injector
from flowrt.chaos.leaks import Holding, children_of, holding_of, is_alive, leaks_between
from flowrt.chaos.measure import END_SECONDS, LOOK_SECONDS, clients_of, once_settled, unreturned
from flowrt.chaos.observer import InjectedFault, RunObserver
from flowrt.chaos.orders import Note, Order, note_of
from flowrt.launcher import events
from flowrt.reliability.scenario import Reset, Scenario
from flowrt.seams import Seams

ROOT = Path(__file__).resolve().parents[2]
LEFT = "process 7 is left"


@dataclass
class HandClock:
    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_a_note_is_read_back_and_other_lines_are_not_taken() -> None:
    note = Note("left", 12.5, "experts.1", "a1b2")
    assert note_of(note.as_line()) == note
    observer = RunObserver(HandClock())
    for line in ("Traceback (most recent call last):", "@chaos ", "@chaos {}", '@chaos {"what": 1, "why": 2}', "@chaos [1]"):
        assert note_of(line) is None
        assert not observer.take_line("experts.0", line)
    assert observer.take_line("attention.0", note.as_line())
    assert observer.notes == [("attention.0", note)]


def test_times_belong_to_the_ended_incarnation() -> None:
    """The last of the clients counts, each with its first note; notes about another incarnation do not."""
    clock = HandClock()
    observer = RunObserver(clock, {"experts.1": {"attention.0", "attention.1"}})
    first, second = (InjectedFault("kill experts.1", "crash", "experts.1", *each) for each in ((1.0, 10, "one"), (5.0, 11, "two")))
    observer.injected_faults += [first, second]
    for process, at, incarnation in (
        ("attention.0", 1.002, "one"),
        ("attention.1", 1.005, "one"),
        ("attention.1", 1.500, "one"),
        ("attention.0", 5.003, "two"),
    ):
        observer.take_line(process, Note("left", at, "experts.1", incarnation).as_line())
    for at, event in (
        (1.001, events.WorkerLost("experts.1", "was killed by SIGKILL")),
        (2.0, events.WorkerRestarted("experts.1", 11, 1.0)),
        (5.001, events.WorkerLost("experts.1", "was killed by SIGKILL")),
    ):
        clock.seconds = at
        observer.on_event(event)
    assert observer.left_seconds(first) == pytest.approx(0.005)
    assert observer.lost_seconds(first) == pytest.approx(0.001)
    assert observer.back_seconds(first) == pytest.approx(1.0)
    assert observer.left_seconds(second) == math.inf  # attention.1 may use it still
    assert observer.back_seconds(second) == math.inf


def test_order_begins_when_the_worker_reports_it() -> None:
    observer = RunObserver(HandClock())
    observer.injected_faults += [InjectedFault("stall experts.0 for 1 s", "stall", "experts.0", at, for_seconds=1.0) for at in (1.0, 4.0)]
    observer.take_line("experts.0", Note("stall", 1.25).as_line())
    observer.take_line("experts.0", Note("stall", 4.5).as_line())
    assert [injected.at for injected in observer.injected_faults] == [1.25, 4.5]


def test_what_came_of_a_later_fault_is_not_put_down_to_an_earlier_one() -> None:
    clock = HandClock()
    observer = RunObserver(clock)
    pause = "pause experts.0", "pause", "experts.0"
    short, long = (InjectedFault(*pause, at, 10, "one", seconds) for at, seconds in ((1.0, 0.3), (5.0, 9.0)))
    observer.injected_faults += [short, long]
    observer.take_line("attention.0", Note("left", 6.0, "experts.0", "one").as_line())
    clock.seconds = 6.1
    observer.on_event(events.WorkerLost("experts.0", "was marked dead"))
    assert (observer.left_seconds(short), observer.lost_seconds(short)) == (math.inf, math.inf)
    assert (observer.left_seconds(long), observer.lost_seconds(long)) == (pytest.approx(1.0), pytest.approx(1.1))


@pytest.mark.parametrize(
    ("injected", "explained"),
    [
        (InjectedFault("kill", "crash", "experts.1", 1.0), True),
        (InjectedFault("reset", "reset", "experts.1", 1.0), True),
        (InjectedFault("reset from there", "reset", "attention.0", 1.0, other="experts.1"), True),
        (InjectedFault("long pause", "pause", "experts.1", 1.0, for_seconds=2.0), True),
        (InjectedFault("short pause", "pause", "experts.1", 1.0, for_seconds=0.3), False),
        (InjectedFault("slow", "slow", "experts.1", 1.0, for_seconds=9.0), False),
        (InjectedFault("another", "crash", "experts.0", 1.0), False),
        (InjectedFault("later", "crash", "experts.1", 3.0), False),
        (InjectedFault("missed", "crash", "experts.1", 1.0, missed="it is not there"), False),
    ],
    ids=lambda value: value.text if isinstance(value, InjectedFault) else "",
)
def test_losses_with_and_without_cause_are_distinguished(injected: InjectedFault, explained: bool) -> None:
    assert injected.explains("experts.1", 2.0, dead_seconds=1.0) == explained


def test_a_reset_that_found_no_connection_did_nothing() -> None:
    observer = RunObserver(HandClock())
    for at, num in ((1.0, 0), (2.0, 2)):
        observer.injected_faults.append(InjectedFault("reset", "reset", "attention.0", at, other="experts.1"))
        observer.take_line("attention.0", Note("reset", at + 0.1, counts={"connections": num}).as_line())
    assert [injected.missed for injected in observer.injected_faults] == ["no connection to experts.1 was open", ""]


async def test_waiting_ends_with_what_is_waited_for_with_time_and_with_the_run() -> None:
    observer = RunObserver(HandClock())
    assert await observer.wait_until(lambda: True, 60.0)
    assert not await observer.wait_until(lambda: False, 0.0)
    observer.on_event(events.RunFailed(RuntimeError("over")))
    assert not await observer.wait_until(lambda: False, 60.0)


def test_what_a_process_holds_is_counted() -> None:
    before = holding_of(os.getpid())
    descriptor = os.memfd_create("planted")
    try:
        after = holding_of(os.getpid())
    finally:
        os.close(descriptor)
    assert after.descriptors == before.descriptors + 1
    assert before.threads >= 1
    assert before.resident_bytes > 1 << 20
    assert holding_of(1 << 30) == Holding()


def test_children_are_counted_with_theirs_while_they_live() -> None:
    script = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        try:
            assert {child.pid, grandchild} <= children_of(os.getpid())
        finally:
            os.kill(grandchild, 9)
            child.kill()
    assert child.pid not in children_of(os.getpid())
    assert not is_alive(child.pid)


def test_leaks_are_what_is_held_more_of() -> None:
    before = {"launcher": Holding(10, 2, tasks=7), "experts.0": Holding(5, 1), "experts.1": Holding(5, 1, tasks=4)}
    after = {"launcher": Holding(11, 2, tasks=7), "experts.0": Holding(4, 3, tasks=4), "experts.1": Holding(5, 1, tasks=5)}
    after["monitor"] = Holding(9, 9)
    assert leaks_between(before, after) == [
        "launcher: 11 descriptors, 10 before",
        "experts.0: 3 maps of memory, 1 before",
        "experts.1: 5 tasks, 4 before",
    ]


@pytest.mark.parametrize(
    ("num_looks", "left", "seconds"), [(0, [], 0.0), (1, [], LOOK_SECONDS), (50, [], 50 * LOOK_SECONDS), (1000, [LEFT], END_SECONDS)]
)
async def test_what_ends_in_time_is_not_left_behind(num_looks: int, left: list[str], seconds: float) -> None:
    clock, looks = HandClock(), iter([[LEFT]] * num_looks)

    async def look() -> list[str]:
        return next(looks, [])

    assert await once_settled(look, clock) == left
    assert clock.seconds == pytest.approx(seconds, abs=2 * LOOK_SECONDS if left else 1e-6)


def test_slots_and_credits_not_returned_are_reported() -> None:
    whole = {"attention.0": {"credits outstanding": 3, "rows": 0, "sequences": 0}, "experts.0": {"credits unsent": 3, "rows": 0}}
    assert unreturned(whole) == []
    lost = {"attention.0": {"credits outstanding": 4, "rows": 1, "pages held": 2}, "experts.0": {"credits unsent": 3}}
    assert unreturned(lost) == [
        "attention.0: 1 rows left",
        "attention.0: 2 pages held left",
        "4 credits are outstanding, 3 of them wait to be returned",
    ]


def test_clients_of_a_server_are_the_processes_that_use_it() -> None:
    groups, servers = {"attention.0", "attention.1"}, {f"experts.{number}" for number in range(3)}
    graph = read_graph(ROOT / "examples" / "quickstart.yaml")
    assert clients_of(graph) == dict.fromkeys(servers, groups) | dict.fromkeys(groups, servers)
    forwarding = clients_of(read_graph(ROOT / "examples" / "quickstart.yaml", ["deploy.experts.trampoline=always"]))
    assert forwarding.keys() == servers | groups, "a trampoline is a server too"
    assert all(server not in forwarding[server] and forwarding[server] & groups for server in servers)


async def test_a_fault_that_the_worker_cannot_inject_is_not_logged_as_injected() -> None:
    """The worker reports it after the order was sent."""
    clock = Seams().clock
    logged: list[str] = []
    observer = RunObserver(clock)

    async def send(process: str, order: Order) -> None:
        line = Note(order.what, clock.now(), counts={"connections": 0}).as_line()
        asyncio.get_running_loop().call_soon(observer.take_line, process, line)

    pids = {"attention.0": os.getpid(), "experts.0": os.getpid()}
    graph: Any = SimpleNamespace(pids=pids, launcher=SimpleNamespace(send=send, incarnations={}, worker=""))
    scenario = Scenario(faults=(Reset(between=("attention.0", "experts.0")),))
    await Injector(graph, observer, clock, logged.append).run(scenario, clock.now())
    (injected,) = observer.injected_faults
    assert injected.missed == "no connection to experts.0 was open"
    assert logged == [f"{injected.text}, pid {os.getpid()}: no connection to experts.0 was open"]
