"""Injects the faults of a scenario into a simulated world: begins each fault at its time and reverts it at its end.

The kinds of fault are in flowrt/reliability/scenario.py; cases.py draws scenarios.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from flowrt.actors.probed_link import LOST_AFTER, PROBE_SECONDS
from flowrt.errors import UserError
from flowrt.graph.model import GATEWAY, Graph
from flowrt.reliability import scenario as kinds
from flowrt.reliability.scenario import AnyFault, Scenario
from flowrt.simulation.inside import WorkerInternals
from flowrt.simulation.invariants import processes_hit
from flowrt.simulation.network_conditions import is_hit
from flowrt.simulation.processes import KILLED, SEGFAULT
from flowrt.simulation.simulated_seams import thread_of
from flowrt.simulation.waitables import OUTSIDE
from flowrt.simulation.world import World

FATE = "fate"  # the node of the fault timers: no fault hits it
RETRY_SECONDS = 200e-6  # between attempts of a rollback, which waits until no call of the old epoch computes

NO_GRAPH = Graph({}, {})

T = TypeVar("T")
_End = Callable[[], None]


class Faults:
    """Injects one scenario: `begin` starts its clock; `heal` ends all active faults and cancels the rest."""

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        inside_of: Callable[[str], WorkerInternals | None],
        segfault_one_in: int = 0,
        graph: Graph = NO_GRAPH,
    ) -> None:
        """`inside_of` returns the worker of a process name, or None if it has none. `segfault_one_in`: crashes by
        SIGSEGV. `graph`: says which processes are on a host."""
        self._world, self._graph = world, graph
        self._inside_of = inside_of
        self._scenario = scenario
        self._segfault_one_in, self._random = segfault_one_in, world.random_of("segfaults")
        self._recurring: set[str] = set()  # processes that have crashed or hung as if what they computed were the reason
        self._poisoned: dict[str, float] = {}  # process -> when it first computed the poison
        self._parks: Counter[str] = Counter()
        self._ends: dict[int, _End] = {}  # the ends of active faults, by fault number
        self._begun: list[tuple[float, AnyFault]] = []
        self._over = False
        late = kinds.Pause | kinds.Stall | kinds.Cut | kinds.SlowLink | kinds.Skew
        self._delayed = {name for fault in scenario.faults if isinstance(fault, late) for name in processes_hit(graph, fault)}
        for fault in scenario.faults:
            if isinstance(fault, kinds.TinyQueues):
                world.network.tiny_nodes.add(self._node(fault.process))
                world.num_faults[fault.kind] += 1
            elif isinstance(fault, kinds.Crash | kinds.Slow | kinds.Hang | kinds.Skew) and fault.process == GATEWAY:
                raise UserError(f"{fault.kind} of the gateway: it computes nothing and its death ends the run; name another process")

    @property
    def begun(self) -> list[AnyFault]:
        """The faults whose time has come."""
        return [fault for _, fault in self._begun]

    def has_met(self, process: str) -> bool:
        """Whether a fault has begun that permits the run to mark the process dead or lose it."""
        return self.met_seconds(process) is not None

    def met_seconds(self, process: str) -> float | None:
        """The time at which the first such fault began: a crash, a standstill, late messages to the launcher, or lost connections.
        Processes that share an OS process share faults."""
        together = self._together(process)
        met = [at for at, fault in self._begun if self._silences(fault) and not together.isdisjoint(processes_hit(self._graph, fault))]
        return min([*met, *(at for name, at in self._poisoned.items() if name in together)], default=None)

    def delays(self, processes: Collection[str]) -> bool:
        """Whether some fault stops one of these processes, delays its messages, or changes its clock."""
        return not self._delayed.isdisjoint(processes)

    def may_recur(self, process: str) -> bool:
        """Whether what the process computed may be presumed to be the reason of its death."""
        return not self._recurring.isdisjoint(self._together(process))

    def on_poison(self, process: str, hangs: bool) -> None:
        """The process computes the poison of the case: its compute thread hangs for ever, also beyond the end of another fault, or it
        ends."""
        self._world.num_faults["poisoned"] += 1
        self._recurring.add(process)
        self._poisoned.setdefault(process, self._world.loop.time())
        if hangs:
            self._park(thread_of(self._node(process)))
        else:
            self._world.kill(self._world.processes[process], SEGFAULT)

    def begin(self) -> None:
        loop = self._world.loop
        for number, fault in enumerate(self._scenario.faults):
            loop.call_at_node(loop.time() + fault.at_seconds, FATE, self._begin, number, fault)

    def heal(self) -> None:
        self._over = True
        for number in sorted(self._ends):
            self._ends.pop(number)()

    def _begin(self, number: int, fault: AnyFault) -> None:
        if self._over:
            return
        self._begun.append((self._world.loop.time(), fault))
        end = self._inject(fault)
        if end is not None:
            self._ends[number] = end
            loop = self._world.loop
            loop.call_at_node(loop.time() + fault.ends_seconds - fault.at_seconds, FATE, self._end, number)

    def _end(self, number: int) -> None:
        if (end := self._ends.pop(number, None)) is not None:
            end()

    def _inject(self, fault: AnyFault) -> _End | None:
        """Inject the fault. Returns the function that reverts it, or None. Counts the fault if it hits a living target."""
        world, network = self._world, self._world.network
        nodes = [self._node(name) for name in fault.processes]
        if any(world.loop.is_dead(node) for node in nodes):
            return None
        process = world.processes.get(fault.processes[0])
        world.num_faults[fault.kind] += 1
        match fault:
            case kinds.Crash(process=name):
                if process is None or not world.kill(process, self._signal(name)):
                    world.num_faults[fault.kind] -= 1
            case kinds.Pause():
                return self._suspend(nodes[0], self._park(nodes[0], thread_of(nodes[0])), pauses=1)
            case kinds.Stall(process=name):
                self._recurring.add(name)
                return self._suspend(nodes[0], self._park(nodes[0]), stalls=1)
            case kinds.Hang(process=name):
                self._recurring.add(name)
                return self._park(thread_of(nodes[0]))
            case kinds.Slow(factor=factor) if process is not None and process.computes:
                return _add(factor, [compute.slow_factors for compute in process.computes])
            case kinds.SlowLink(factor=factor):
                return _add(factor, [link.slow_factors for link in network.links(*nodes)])
            case kinds.Cut(direction=direction):
                ways = zip(("there", "back"), network.links(*nodes), strict=True)
                links = [link for way, link in ways if direction in ("both", way)]
                for link in links:
                    link.num_cuts += 1

                def heal() -> None:
                    for link in links:
                        link.heal()

                return heal
            case kinds.Reset():
                if not network.reset(nodes[0], nodes[1]):
                    world.num_faults[fault.kind] -= 1
            case kinds.Duplicate(one_in=one_in):
                return _add(one_in, [link.duplicate_one_in for link in network.links(*nodes)])
            case kinds.Skew(rate=rate) if process is not None and process.clocks:
                for clock in process.clocks:
                    clock.skew(rate)
            case kinds.RollBack(process=name) if (inside := self._inside_of(name)) is not None and inside.has_engine:
                self._roll_back_after(0.0, inside, nodes[0])
            case _:
                world.num_faults[fault.kind] -= 1
        return None

    def _signal(self, process: str) -> str:
        if not is_hit(self._random, self._segfault_one_in):
            return KILLED
        self._recurring.add(process)
        return SEGFAULT

    def _together(self, process: str) -> set[str]:
        """The workers in the OS process of this one, and the standby process that it was."""
        processes = self._world.processes
        found = processes.get(process)
        return {name for name in processes if processes[name] is found} | {process, found.former_name if found is not None else ""}

    def _roll_back(self, inside: WorkerInternals, node: str) -> None:
        """Runs on the node of the worker, as its own code does."""
        if not self._over and not inside.roll_back():
            self._roll_back_after(RETRY_SECONDS, inside, node)

    def _roll_back_after(self, seconds: float, inside: WorkerInternals, node: str) -> None:
        loop = self._world.loop
        loop.call_at_node(loop.time() + seconds, node, self._roll_back, inside, node, context=self._world.context(node))

    def _park(self, *nodes: str) -> _End:
        loop = self._world.loop
        for node in nodes:
            self._parks[node] += 1
            loop.park(node)

        def unpark() -> None:
            for node in nodes:
                self._parks[node] -= 1
                if not self._parks[node]:
                    loop.unpark(node)

        return unpark

    def _suspend(self, node: str, unpark: _End, pauses: int = 0, stalls: int = 0) -> _End:
        """Note what the system would show of a node that is parked, until the returned function is called."""
        loop, suspensions = self._world.loop, self._world.suspensions[node]
        suspensions.add(loop.time(), pauses, stalls)

        def end() -> None:
            suspensions.add(loop.time(), -pauses, -stalls)
            unpark()

        return end

    def _node(self, name: str) -> str:
        """The node of the latest incarnation of a process; before the first start, the node that it will get."""
        if name == GATEWAY:
            return OUTSIDE
        process = self._world.processes.get(name)
        return name if process is None else process.node

    def _silences(self, fault: AnyFault) -> bool:
        if isinstance(fault, kinds.Cut | kinds.SlowLink):
            restarts = self._graph.hosts is not None  # of a host behind the cut: a process that starts meanwhile cannot link
            breaks_link = isinstance(fault, kinds.Cut) and (restarts or fault.for_seconds >= LOST_AFTER * PROBE_SECONDS)
            return breaks_link or GATEWAY in fault.between
        return isinstance(fault, kinds.Crash | kinds.Pause | kinds.Stall | kinds.Hang | kinds.Reset)


def _add(value: T, lists: Sequence[list[T]]) -> _End:
    """Append a value to each list. Returns the function that removes it again."""
    for each in lists:
        each.append(value)

    def remove() -> None:
        for each in lists:
            each.remove(value)

    return remove
