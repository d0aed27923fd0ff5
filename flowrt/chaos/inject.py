"""Injects faults into the real processes of a running graph, each at its time, and ends them in time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence

from flowrt.api import RunningGraph
from flowrt.chaos.leaks import is_alive
from flowrt.chaos.observer import InjectedFault, RunObserver
from flowrt.chaos.orders import WORKER, Order
from flowrt.chaos.plan import fault_text
from flowrt.errors import NotRunningError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER
from flowrt.observe import duration_text
from flowrt.reliability.scenario import AnyFault, Crash, Hang, Pause, Reset, Scenario, Slow, Stall
from flowrt.seams import Clock

BACK_SECONDS = 60.0  # in which a process that was killed must be back
HELD_SECONDS = 5.0  # in which all workers report what they hold
NOTE_SECONDS = 1.0  # in which a worker that runs reports that it carries out an order

Log = Callable[[str], None]


class Injector:
    """Faults for one run. Create it before the graph is entered: with `takes_orders` it makes the graph start workers that take orders."""

    def __init__(
        self, graph: RunningGraph, observer: RunObserver, clock: Clock, log: Log = lambda text: None, takes_orders: bool = True
    ) -> None:
        self._graph, self._observer, self._clock, self._log = graph, observer, clock, log
        self._num_pauses: Counter[int] = Counter()  # by pid: the end of the last pause wakes the process
        self._killed: set[tuple[str, int, str]] = set()  # incarnations
        self.so_far: Callable[[], str] = lambda: ""  # the state of the load, reported with every fault
        self.phase_of: Callable[[str], str | None] = lambda process: None  # recorded with every fault
        if takes_orders:
            graph.launcher.worker = WORKER

    async def run(self, scenario: Scenario, begun: float) -> None:
        """Inject the scenario, whose times count from `begun`; returns when the last fault is over. When cancelled, it ends the faults
        that it has begun."""
        faults = sorted(scenario.faults, key=lambda fault: fault.at_seconds)
        if len(faults) > 1:
            self._log(f"{len(faults)} faults, the first at {faults[0].at_seconds:g} s, the last at {faults[-1].at_seconds:g} s")
        async with asyncio.TaskGroup() as tasks:
            for number, fault in enumerate(faults, 1):
                place = then = ""
                if len(faults) > 1:
                    place = f" ({number} of {len(faults)})"
                    then = f"next at {faults[number].at_seconds:g} s" if number < len(faults) else "the last"
                tasks.create_task(self._inject(fault, begun, place, then), name=fault_text(fault))

    async def wait_back(self, since: float) -> bool:
        """Wait for the processes lost to faults since then. Returns False when one stays down, was not back in time, or the run has
        failed."""
        lost = (each for each in self._observer.injected_faults if each.at >= since and self._observer.must_return(each))
        latest = {injected.process: injected for injected in lost}
        return all([await self._is_back(injected) for injected in latest.values()])

    async def collect_held(self, names: Sequence[str]) -> None:
        """Make these workers report what they hold (`RunObserver.held`)."""
        self._observer.held.clear()
        for name in names:
            with contextlib.suppress(NotRunningError, WorkerDiedError):
                await self._graph.launcher.send(name, Order("look"))
        await self._observer.wait_until(lambda: self._observer.held.keys() >= set(names), HELD_SECONDS)

    async def _is_back(self, injected: InjectedFault) -> bool:
        observer = self._observer
        await observer.wait_until(lambda: observer.is_back_or_given_up(injected), BACK_SECONDS)
        is_back = observer.back_seconds(injected) < math.inf
        if is_back:
            self._log(f"{injected.process} is back after {duration_text(observer.back_seconds(injected))}")
        elif not observer.failed:
            self._log(f"{injected.process} {'stays down' if observer.is_given_up(injected) else f'is not back after {BACK_SECONDS:g} s'}")
        return is_back

    async def _inject(self, fault: AnyFault, begun: float, place: str, then: str) -> None:
        """Inject one fault at its time, wait until it is over, and end it. `place` and `then` are for the log: which of how many, what
        next."""
        await self._observer.wait_failed(begun + fault.at_seconds - self._clock.now())
        name = fault.processes[0]
        pid = self._graph.launcher.fork_server_pid() if name == FORK_SERVER else self._graph.pids.get(name, 0)
        incarnation = self._graph.launcher.incarnations.get(name, "")
        seconds = fault.ends_seconds - fault.at_seconds
        other, phase = "".join(fault.processes[1:]), self.phase_of(name) or ""
        what = fault_text(fault), fault.kind, name, self._clock.now()
        injected = InjectedFault(*what, pid, incarnation, seconds, other, phase=phase)
        self._observer.injected_faults.append(injected)
        if self._observer.failed:
            injected.missed = "the run had ended"
            return
        try:
            descriptor = os.pidfd_open(pid) if is_alive(pid) and (name, pid, incarnation) not in self._killed else None
        except OSError as error:
            descriptor = None
            if not isinstance(error, ProcessLookupError):
                injected.missed = f"{name} cannot be reached: {error.strerror}"
        if descriptor is None:
            injected.missed = injected.missed or f"{name} is not running"
            self._log(self._progress(f"{injected.text}{place}: {injected.missed}", then))
            return
        try:
            injected.at = self._clock.now()
            match fault:
                case Crash():
                    self._killed.add((name, pid, incarnation))
                    _signal(injected, descriptor, signal.SIGKILL)
                case Pause():
                    self._num_pauses[pid] += 1
                    _signal(injected, descriptor, signal.SIGSTOP)
                case Stall() | Hang():
                    await self._order(injected, Order(fault.kind, seconds))
                case Slow(factor=factor):
                    await self._order(injected, Order(fault.kind, seconds, factor))
                case Reset(between=(_, other)):
                    await self._order(injected, Order(fault.kind, pid=self._graph.pids.get(other, 0)))
            self._log(self._progress(f"{injected.text}{place}, pid {pid}" + (f": {injected.missed}" if injected.missed else ""), then))
            if seconds:  # or until its incarnation is lost, which ends every fault of it
                await self._observer.wait_until(lambda: self._observer.is_lost(injected), injected.at + seconds - self._clock.now())
        finally:
            if isinstance(fault, Pause):
                self._wake(pid, descriptor)
            os.close(descriptor)

    def _wake(self, pid: int, descriptor: int) -> None:
        self._num_pauses[pid] -= 1
        if not self._num_pauses[pid]:
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
            del self._num_pauses[pid]

    def _progress(self, done: str, then: str) -> str:
        return "; ".join(part for part in (done, then, self.so_far()) if part)

    async def _order(self, injected: InjectedFault, order: Order) -> None:
        try:
            await self._graph.launcher.send(injected.process, order)
        except (NotRunningError, WorkerDiedError) as error:
            injected.missed = str(error)
            return
        await self._observer.wait_until(lambda: injected.is_noted, NOTE_SECONDS)  # the worker's note says whether it could


def _signal(injected: InjectedFault, descriptor: int, number: signal.Signals) -> None:
    """The signal may come too late, when the process is dead and its death is not reported yet."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        injected.missed = f"{injected.process} is not running"
