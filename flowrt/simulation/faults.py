"""Faults in virtual time: a scenario carried out on a world, each fault begun at its time and taken back at its end.

Here: Faults. Not here: what faults there are (flowrt/reliability/scenario.py), how a node stands still or a link holds frames (loop.py,
weather.py), which scenarios are drawn (cases.py). Used by cluster.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from flowrt.errors import UserError
from flowrt.graph.model import GATEWAY
from flowrt.reliability.scenario import (
    AnyFault,
    Crash,
    Cut,
    Duplicate,
    Hang,
    Pause,
    Reset,
    RollBack,
    Scenario,
    Skew,
    Slow,
    SlowLink,
    Stall,
    TinyQueues,
)
from flowrt.simulation.inside import Inside
from flowrt.simulation.simulated_seams import thread_of
from flowrt.simulation.waitables import OUTSIDE
from flowrt.simulation.world import World

FATE = "fate"  # the node of all this: no fault befalls it
RETRY_SECONDS = 200e-6  # of a roll-back, which waits until nothing of the old epoch computes

_End = Callable[[], None]


class Faults:
    """`begin` starts the scenario's clock; `heal` ends what has begun and calls off the rest."""

    def __init__(self, world: World, scenario: Scenario, inside_of: Callable[[str], Inside | None]) -> None:
        """`inside_of` gives the worker of a process name, None for what has none."""
        self._world = world
        self._inside_of = inside_of
        self._scenario = scenario
        self._parks: Counter[str] = Counter()
        self._ends: dict[int, _End] = {}  # of faults that have begun, by their number
        self._begun: list[AnyFault] = []
        self._over = False
        for fault in scenario.faults:
            if isinstance(fault, TinyQueues):
                world.network.tiny_nodes.add(self._node(fault.process))
                world.num_faults[fault.kind] += 1
            elif isinstance(fault, Crash | Slow | Hang | Skew) and fault.process == GATEWAY:
                raise UserError(f"{fault.kind} of the gateway: it computes nothing and its death ends the run; name another process")

    def has_met(self, process: str) -> bool:
        """Whether a fault has begun after which the run may mark the process dead or lose it: it died or stood still, its messages to the
        launcher were late, or connections of it were lost."""
        processes = self._world.processes
        together = {name for name in processes if processes[name] is processes.get(process)} | {process}
        return any(not together.isdisjoint(fault.processes) and _silences(fault) for fault in self._begun)

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
        self._begun.append(fault)
        end = self._befall(fault)
        if end is not None:
            self._ends[number] = end
            loop = self._world.loop
            loop.call_at_node(loop.time() + fault.ends_seconds - fault.at_seconds, FATE, self._end, number)

    def _end(self, number: int) -> None:
        if (end := self._ends.pop(number, None)) is not None:
            end()

    def _befall(self, fault: AnyFault) -> _End | None:
        """Do it; what takes it back, if anything does. Each is counted when it meets something that lives."""
        world, network = self._world, self._world.network
        nodes = [self._node(name) for name in fault.processes]
        if any(world.loop.is_dead(node) for node in nodes):
            return None
        process = world.processes.get(fault.processes[0])
        world.num_faults[fault.kind] += 1
        match fault:
            case Crash():
                if process is None or not world.kill(process):
                    world.num_faults[fault.kind] -= 1
            case Pause():
                return self._park(nodes[0], thread_of(nodes[0]))
            case Stall():
                if process is not None:
                    process.stalls.append((world.loop.time(), world.loop.time() + fault.ends_seconds - fault.at_seconds))
                return self._park(nodes[0])
            case Hang():
                return self._park(thread_of(nodes[0]))
            case Slow(factor=factor) if process is not None and process.computes:
                computes = list(process.computes)
                for compute in computes:
                    compute.slow_factors.append(factor)

                def slow_down_no_more() -> None:
                    for compute in computes:
                        compute.slow_factors.remove(factor)

                return slow_down_no_more
            case SlowLink(factor=factor):
                links = [network.link(*nodes), network.link(*reversed(nodes))]
                for link in links:
                    link.slow_factors.append(factor)

                def speed_up() -> None:
                    for link in links:
                        link.slow_factors.remove(factor)

                return speed_up
            case Cut(direction=direction):
                ways = [] if direction == "back" else [network.link(*nodes)]
                ways += [] if direction == "there" else [network.link(*reversed(nodes))]
                for way in ways:
                    way.num_cuts += 1

                def heal() -> None:
                    for way in ways:
                        way.heal()

                return heal
            case Reset():
                if not network.reset(nodes[0], nodes[1]):
                    world.num_faults[fault.kind] -= 1
            case Duplicate(one_in=one_in):
                links = [network.link(*nodes), network.link(*reversed(nodes))]
                for link in links:
                    link.duplicate_one_in.append(one_in)

                def stop() -> None:
                    for link in links:
                        link.duplicate_one_in.remove(one_in)

                return stop
            case Skew(rate=rate) if process is not None and process.clocks:
                for clock in process.clocks:
                    clock.skew(rate)
            case RollBack(process=name) if (inside := self._inside_of(name)) is not None and inside.has_engine:
                context = world.context(nodes[0])
                world.loop.call_at_node(world.loop.time(), nodes[0], self._roll_back, inside, nodes[0], context=context)
            case _:
                world.num_faults[fault.kind] -= 1
        return None

    def _roll_back(self, inside: Inside, node: str) -> None:
        """On the worker's own node, as its own code would."""
        if not self._over and not inside.roll_back():
            loop = self._world.loop
            context = self._world.context(node)
            loop.call_at_node(loop.time() + RETRY_SECONDS, node, self._roll_back, inside, node, context=context)

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

    def _node(self, name: str) -> str:
        """The node of the latest life of a process; before its first, the one that it will have."""
        if name == GATEWAY:
            return OUTSIDE
        process = self._world.processes.get(name)
        return name if process is None else process.node


def _silences(fault: AnyFault) -> bool:
    return isinstance(fault, Crash | Pause | Stall | Hang | Reset) or (isinstance(fault, Cut | SlowLink) and GATEWAY in fault.between)
