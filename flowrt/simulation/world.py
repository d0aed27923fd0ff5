"""Defines a simulated world: its processes, the seams of every node, and `run`, which runs a program in it to its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from flowrt.seams import Seams
from flowrt.simulation.errors import SimulationError, UnhandledError
from flowrt.simulation.loop import START_SECONDS, VirtualLoop
from flowrt.simulation.network_conditions import NetworkConditions
from flowrt.simulation.simulated_seams import ComputeDelays, SimulatedClock, SimulatedCompute, thread_of
from flowrt.simulation.transport import SimulatedNetwork
from flowrt.simulation.waitables import OUTSIDE, current_node, set_result
from flowrt.system.process_status import Activity, ProcessTimes
from flowrt.timer import LoopTimer

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SimulatedProcess:
    """One incarnation of a simulated process. `node` is its name, and its number when it is not the first of that name."""

    def __init__(self, name: str, node: str, parent: str, exit: asyncio.Future[str]) -> None:
        self.name, self.node, self.parent = name, node, parent  # `parent`: the node that started it
        self.former_name = ""  # of a standby process that has become another one
        self.exit = exit  # how it ended, set when the parent is notified
        self.clocks: list[SimulatedClock] = []  # one per worker, as are these
        self.computes: list[SimulatedCompute] = []
        self.pid = 0
        self.how = ""  # it was killed, at the moment of the kill
        self.num_unread: Callable[[], int] = int  # messages that it has sent to the launcher

    @property
    def nodes(self) -> tuple[str, str]:
        """Returns the nodes of its loop and its compute thread."""
        return self.node, thread_of(self.node)


class Suspensions:
    """The pauses and stalls of a node. Each stall takes processor time, except while the node is paused."""

    def __init__(self) -> None:
        self.num_pauses = self._num_stalls = 0
        self._cpu_seconds = self._since = 0.0

    def add(self, now: float, pauses: int = 0, stalls: int = 0) -> None:
        """Add pauses and stalls that begin, or take away those that end."""
        self._cpu_seconds, self._since = self.cpu_seconds(now), now
        self.num_pauses += pauses
        self._num_stalls += stalls

    def cpu_seconds(self, now: float) -> float:
        is_busy = self._num_stalls and not self.num_pauses
        return self._cpu_seconds + (now - self._since if is_busy else 0.0)


@dataclass(frozen=True)
class MachineClock:
    """Differs from virtual time by an offset and a drift, in seconds and seconds per second."""

    offset_seconds: float = 0.0
    drift: float = 0.0

    def at(self, seconds: float) -> float:
        return self.offset_seconds + (1.0 + self.drift) * seconds


class World:
    """The nodes of one run and what they share."""

    def __init__(self, seed: int, loop: VirtualLoop, conditions: NetworkConditions, cost: ComputeDelays) -> None:
        self.seed = seed
        self.loop = loop
        loop.tick_seconds = conditions.tick_seconds
        self.network = SimulatedNetwork(loop, seed, conditions)
        self.one_clock = False  # all processes share the clock of one machine; set it before they start
        self.machine_clocks: dict[str, MachineClock] = {}  # of nodes that are not on the launcher's machine
        self.processes: dict[str, SimulatedProcess] = {}  # the latest incarnation of each name
        self.deaths: list[Callable[[SimulatedProcess], None]] = []  # called at the moment of a `kill`, before any process is notified
        self.suspensions: defaultdict[str, Suspensions] = defaultdict(Suspensions)  # by node, also of those to come
        self.num_faults: Counter[str] = Counter()  # faults that hit a living target, by kind
        self._cost = cost
        self._by_pid: dict[int, SimulatedProcess] = {}
        self._num_incarnations = 0
        self._num_starts: Counter[str] = Counter()
        self._random = random.Random(f"world {seed}")

    def seams(self, node: str) -> Seams:
        """The seams for one process of the run."""
        chance = random.Random(f"node {node} {self.seed}")
        offset = chance.uniform(0.0, 1000.0)
        clock = SimulatedClock(self.loop, 0.0 if self.one_clock else offset)
        process = next((each for each in self.processes.values() if each.node == node), None)

        def new_compute(name: str, inline_seconds: float = 0.0) -> SimulatedCompute:
            compute = SimulatedCompute(self.loop, node, random.Random(f"compute {name} {node} {self.seed}"), self._cost, clock)
            if process is not None:
                process.computes.append(compute)
            return compute

        if process is not None:
            process.clocks.append(clock)
        return Seams(
            clock=clock,
            machine_now=lambda: self.machine_clock(node).at(self.loop.time()),
            new_incarnation=self.new_incarnation,
            new_seed=lambda: chance.getrandbits(63),
            new_key=self.new_key,
            new_compute=new_compute,
            transport=self.network.transport,
            new_timer=LoopTimer,
            resident_bytes=lambda process=0: 0,
            process_times=self.process_times,
            process_activity=self.process_activity,
            random=chance,
            compiled=False,  # a case runs the modules that make the decisions, and faults are planted in them
        )

    def machine_clock(self, node: str) -> MachineClock:
        return self.machine_clocks.get(node, MachineClock())

    def context(self, node: str) -> Context:
        """A context in which everything belongs to `node`; give it to TaskGroup.create_task."""
        context = copy_context()
        context.run(current_node.set, node)
        return context

    def new_incarnation(self) -> str:
        self._num_incarnations += 1
        return f"{self._num_incarnations:04x}"

    def random_of(self, what: str) -> random.Random:
        """A separate random generator, so that the draws of one part of a run do not change those of other parts."""
        return random.Random(f"{what} {self.seed}")

    def new_key(self) -> bytes:
        """A random key for the run, drawn from the seed."""
        return self._random.randbytes(32)

    # processes

    def next_node(self, name: str) -> str:
        """The node of the next process of this name, before it is started."""
        starts = self._num_starts[name]
        return name if not starts else f"{name}~{starts + 1}"

    def start(
        self,
        name: str,
        main: Callable[[Seams], Coroutine[Any, Any, None]],
        aliases: Iterable[str] = (),
        machine_clock: MachineClock | None = None,
    ) -> SimulatedProcess:
        """Run `main` as a process, found in `processes` by its aliases too. Its end is reported through `exit`; no task awaits it, so
        that it can be cut off. `machine_clock`: of its machine; None: that of the process that starts it."""
        node, here = self.next_node(name), current_node.get()
        self.machine_clocks[node] = machine_clock or self.machine_clock(here)
        self._num_starts[name] += 1
        process = SimulatedProcess(name, node, here, self.loop.create_future())
        process.pid = len(self._by_pid) + 1
        self._by_pid[process.pid] = process
        self.processes |= dict.fromkeys((name, *aliases), process)
        task = self.loop.create_task(main(self.seams(node)), name=f"process {node}", context=self.context(node))

        def ended(task: asyncio.Task[None]) -> None:
            has_failed = not task.cancelled() and task.exception() is not None
            self._report_exit(process, f"exited with status {int(has_failed)}")

        task.add_done_callback(ended, context=self.context(node))
        return process

    def rename(self, process: SimulatedProcess, name: str) -> None:
        """A standby process becomes the process `name`."""
        del self.processes[process.name]
        process.former_name, process.name = process.name, name
        self.processes[name] = process
        self.num_faults["standby process used"] += 1

    def kill(self, process: SimulatedProcess, how: str = "was killed by SIGKILL") -> bool:
        """As kill -9: no code of it runs any more, its channels end, its parent is notified. Returns False if it had already ended."""
        if not self.is_alive(process):
            return False
        for node in process.nodes:
            self.loop.kill(node)
        self.network.lose(process.node)
        process.how = how
        for on_death in self.deaths:
            on_death(process)
        self._report_exit(process, how)
        return True

    def process_times(self, pid: int) -> ProcessTimes | None:
        """Processor times as the system reports them; only stalls of the loop take processor time."""
        process, now = self._by_pid.get(pid), self.loop.time()
        if process is None or process.exit.done():
            return None
        stalled = self.suspensions[process.node].cpu_seconds(now)
        return ProcessTimes(stalled, stalled, 0.0)

    def process_activity(self, pid: int) -> Activity | None:
        process = self._by_pid.get(pid)
        if process is None or not self.is_alive(process):
            return None
        if self.suspensions[process.node].num_pauses:
            return Activity.STOPPED
        return Activity.RUNNABLE if self.loop.is_parked(process.node) else Activity.ASLEEP

    def leftovers(self) -> list[str]:
        """Processes, channels and listeners that still exist although all processes should have ended."""
        left = [f"process {process.node}" for process in dict.fromkeys(self.processes.values()) if self.is_alive(process)]
        left += [f"channel from {channel.label}" for channel in self.network.open_channels() if not self.loop.is_dead(channel.node)]
        return left + [f"listener {address} of {listener.node}" for address, listener in self.network.listeners.items()]

    def is_alive(self, process: SimulatedProcess) -> bool:
        return not process.exit.done() and not self.loop.is_dead(process.node)

    def _report_exit(self, process: SimulatedProcess, how: str) -> None:
        when = self.loop.time() + self._random.uniform(20e-6, 500e-6)
        node = OUTSIDE if self.loop.is_dead(process.parent) else process.parent
        self.loop.call_at_node(when, node, set_result, process.exit, how)


@dataclass(frozen=True)
class Outcome(Generic[T_co]):
    """The outcome of a run. Equal seeds and code give equal digests, in every process."""

    result: T_co
    digest: str
    virtual_seconds: float
    num_steps: int
    num_faults: Mapping[str, int] = field(default_factory=dict)  # by kind, of faults that hit a living target


def joined(outcomes: Sequence[Outcome[Any]], result: T) -> Outcome[T]:
    """One outcome of several runs of a seed, one after another."""
    if len(outcomes) == 1:
        digest = outcomes[0].digest
    else:
        digest = hashlib.blake2b("".join(each.digest for each in outcomes).encode(), digest_size=16).hexdigest()
    faults = sum((Counter(each.num_faults) for each in outcomes), Counter[str]())
    return Outcome(result, digest, sum(each.virtual_seconds for each in outcomes), sum(each.num_steps for each in outcomes), faults)


def run(
    seed: int,
    main: Callable[[World], Coroutine[Any, Any, T]],
    *,
    conditions: NetworkConditions | None = None,
    cost: ComputeDelays | None = None,
    max_seconds: float = 3600.0,
    max_steps: float = math.inf,
) -> Outcome[T]:
    """Run `main(world)` to its end in virtual time.

    Raises what it raises, DeadlockError, LivelockError, and UnhandledError when a task was left running or an error went unseen.
    The collector of cycles is off meanwhile, because the seed does not determine its order, and runs once at the end.
    """
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()  # exclude older objects from the collection of the run's own garbage
    try:
        loop = partial(VirtualLoop, seed, max_seconds=max_seconds, max_steps=max_steps)
        return _run(seed, main, conditions or NetworkConditions(), cost or ComputeDelays(), loop())  # no name here keeps the loop
    finally:
        gc.collect()  # the loop itself and the objects of dead processes, before `unfreeze` mixes them with older objects
        gc.unfreeze()
        if collecting:
            gc.enable()


def _run(
    seed: int, main: Callable[[World], Coroutine[Any, Any, T]], conditions: NetworkConditions, cost: ComputeDelays, loop: VirtualLoop
) -> Outcome[T]:
    try:
        world = World(seed, loop, conditions, cost)
        try:
            result = loop.run_until_complete(main(world))
        except BaseException as error:
            error.add_note(f"in the simulated run of seed {seed}")
            with contextlib.suppress(SimulationError):  # the first error is the one to report
                loop.finish()
            raise
        outcome = Outcome(result, loop.digest(), loop.time() - START_SECONDS, loop.num_steps, world.num_faults)
        left = loop.finish()
        gc.collect()
        loop.raise_failures()
        if left:
            raise UnhandledError(f"seed {seed}: tasks left running at the end: {', '.join(left)}")
        return outcome
    finally:
        with contextlib.suppress(Exception):  # tasks of dead processes may end in any way
            loop.bury()
        loop.close()
