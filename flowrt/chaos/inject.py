"""Faults carried out on the real processes of a running graph, each begun at its time and taken back at its end.

Here: Injector, for scenarios and for kills drawn from a seed. Not here: what faults there are (flowrt/reliability/scenario.py), how
a plan is written (plan.py), what a worker does to itself (worker.py), what came of it (watch.py, measure.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence

from flowrt.api import RunningGraph
from flowrt.chaos.leaks import is_alive
from flowrt.chaos.orders import WORKER, Order
from flowrt.chaos.plan import told
from flowrt.chaos.watch import Deed, Watch
from flowrt.errors import WorkerDiedError
from flowrt.launcher.launcher import NotRunningError
from flowrt.observe import duration_text
from flowrt.reliability.scenario import AnyFault, Crash, Hang, Pause, Reset, Scenario, Slow, Stall
from flowrt.seams import Clock

BACK_SECONDS = 60.0  # in which a process that was killed must be back

Say = Callable[[str], None]


class Injector:
    """Faults for one run. Made before the graph is entered: with `obedient` it has the graph start workers that obey orders."""

    def __init__(self, graph: RunningGraph, watch: Watch, clock: Clock, say: Say = lambda text: None, obedient: bool = True) -> None:
        self._graph, self._watch, self._clock, self._say = graph, watch, clock, say
        self._num_pauses: Counter[int] = Counter()  # that hold a process (by its number) still: only the last one's end wakes it
        self._killed: set[tuple[str, int, str]] = set()  # lives that are over, though they may not be gone yet
        self.so_far: Callable[[], str] = lambda: ""  # said with every fault: how the load fares
        if obedient:
            graph.launcher.worker = WORKER

    async def run(self, scenario: Scenario, begun: float) -> None:
        """Carry out the scenario, whose times count from `begun`; returns when the last fault is over. Cancelled, it takes back what it
        has begun."""
        faults = sorted(scenario.faults, key=lambda fault: fault.at_seconds)
        several = len(faults) > 1
        if several:
            self._say(f"{len(faults)} faults, the first at {faults[0].at_seconds:g} s, the last at {faults[-1].at_seconds:g} s")
        async with asyncio.TaskGroup() as tasks:
            for number, fault in enumerate(faults):
                following = faults[number + 1].at_seconds if number + 1 < len(faults) else None
                then = f"next at {following:g} s" if following is not None else "the last"
                place, then = (f" ({number + 1} of {len(faults)})", then) if several else ("", "")
                tasks.create_task(self._befall(fault, begun, place, then), name=told(fault))

    async def kill_randomly(self, names: Sequence[str], num: int, seed: int, apart_seconds: float) -> bool:
        """Kill one of `names` after another, each when the one before is back and `apart_seconds` have passed. False when one was not
        back in time, or the run has failed: then no more are killed."""
        chance = random.Random(seed)
        for number in range(num):
            deed = await self._do(Crash(process=chance.choice(sorted(names))), f" ({number + 1} of {num})")
            if deed.missed or not await self._is_back(deed):
                return False
            then = f"next kill in {apart_seconds:g} s" if number + 1 < num else "no more kills"
            self._say(f"{deed.process} is back after {duration_text(self._watch.back_seconds(deed))}; {then}")
            await self._watch.wait_failed(apart_seconds)
        return True

    async def look(self, names: Sequence[str], seconds: float = 5.0) -> None:
        """Have these workers say what they hold (`Watch.held`)."""
        self._watch.held.clear()
        for name in names:
            with contextlib.suppress(NotRunningError, WorkerDiedError):
                await self._graph.launcher.send(name, Order("look"))
        await self._watch.wait_until(lambda: self._watch.held.keys() >= set(names), seconds)

    async def _is_back(self, deed: Deed) -> bool:
        watch = self._watch
        await watch.wait_until(lambda: watch.back_seconds(deed) < math.inf or watch.is_given_up(deed), BACK_SECONDS)
        is_back = watch.back_seconds(deed) < math.inf
        if not is_back and not watch.failed:
            self._say(f"{deed.process} {'stays down' if watch.is_given_up(deed) else f'is not back after {BACK_SECONDS:g} s'}")
        return is_back

    async def _befall(self, fault: AnyFault, begun: float, place: str, then: str) -> None:
        await self._watch.wait_failed(begun + fault.at_seconds - self._clock.now())
        await self._do(fault, place, then)

    async def _do(self, fault: AnyFault, place: str, then: str = "") -> Deed:
        """Carry out one fault, wait until it is over, and take it back. `place` and `then` are for people: which of how many, what next."""
        name = fault.processes[0]
        pid = self._graph.pids.get(name, 0)
        incarnation = self._graph.launcher.incarnations.get(name, "")
        seconds = fault.ends_seconds - fault.at_seconds
        deed = Deed(told(fault), fault.kind, name, self._clock.now(), pid, incarnation, seconds, "".join(fault.processes[1:]))
        self._watch.deeds.append(deed)
        if self._watch.failed:
            deed.missed = "the run had ended"
            return deed
        try:
            descriptor = os.pidfd_open(pid) if is_alive(pid) and (name, pid, incarnation) not in self._killed else None
        except OSError as error:
            descriptor = None
            if not isinstance(error, ProcessLookupError):
                deed.missed = f"{name} cannot be reached: {error.strerror}"
        if descriptor is None:
            deed.missed = deed.missed or f"{name} is not there"
            self._say(self._progress(f"{deed.text}{place}: {deed.missed}", then))
            return deed
        try:
            deed.at = self._clock.now()
            match fault:
                case Crash():
                    self._killed.add((name, pid, incarnation))
                    _signal(deed, descriptor, signal.SIGKILL)
                case Pause():
                    self._num_pauses[pid] += 1
                    _signal(deed, descriptor, signal.SIGSTOP)
                case Stall() | Hang():
                    await self._order(deed, Order(fault.kind, seconds))
                case Slow(factor=factor):
                    await self._order(deed, Order(fault.kind, seconds, factor))
                case Reset(between=(_, other)):
                    await self._order(deed, Order(fault.kind, pid=self._graph.pids.get(other, 0)))
            self._say(self._progress(f"{deed.text}{place}, pid {pid}" + (f": {deed.missed}" if deed.missed else ""), then))
            await self._watch.wait_failed(deed.at + seconds - self._clock.now())
        finally:
            if isinstance(fault, Pause):
                self._wake(pid, descriptor)
            os.close(descriptor)
        return deed

    def _wake(self, pid: int, descriptor: int) -> None:
        self._num_pauses[pid] -= 1
        if not self._num_pauses[pid]:
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
            del self._num_pauses[pid]

    def _progress(self, done: str, then: str) -> str:
        return "; ".join(part for part in (done, then, self.so_far()) if part)

    async def _order(self, deed: Deed, order: Order) -> None:
        try:
            await self._graph.launcher.send(deed.process, order)
        except (NotRunningError, WorkerDiedError) as error:
            deed.missed = str(error)


def _signal(deed: Deed, descriptor: int, number: signal.Signals) -> None:
    """Which may come too late: the process is dead, and nobody has said so yet."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        deed.missed = f"{deed.process} is not there"
