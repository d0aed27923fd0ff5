"""Emulated links: wraps a worker's channels as the links that the graph names, and checks that the machine's timers suffice.

transports/emulation/channel.py emulates one channel; flowrt/workers/emulated.py emulates computing.
"""

from __future__ import annotations

from collections.abc import Callable

from flowrt.actors.links import LinkPlan
from flowrt.costs.links import profile_of
from flowrt.emulation import Lateness, check_dilation
from flowrt.graph.kinds import kind_of
from flowrt.graph.model import Graph
from flowrt.graph.settings import Emulation
from flowrt.seams import Seams
from flowrt.timer import Timer, measure_lateness
from flowrt.transports.contract import Channel, Limits
from flowrt.transports.emulation.channel import EmulatedChannel
from flowrt.transports.emulation.nic import Nic


class EmulatedLinks:
    """One worker's NICs, one per kind of link. `lateness` measures its received messages. Close it after the links."""

    def __init__(self, emulation: Emulation, timer: Timer) -> None:
        self.lateness = Lateness()
        self._emulation, self._timer = emulation, timer
        self._nics: dict[str, Nic] = {}
        self.new_channel: Callable[[Channel, Nic, Limits], EmulatedChannel] = EmulatedChannel

    def wrap(self, plan: LinkPlan, channel: Channel) -> Channel:
        """Wrap `channel` as the plan's link. Returns `channel` itself when the plan names no link."""
        if plan.link is None:
            return channel
        nic = self._nics.get(plan.link)
        if nic is None:
            profile = profile_of(plan.link).shared_by(self._emulation.processes_per_nic)
            nic = self._nics[plan.link] = Nic(profile, self._timer, self._emulation.dilation, self.lateness.note)
        return self.new_channel(channel, nic, plan.limits)

    def close(self) -> None:
        for nic in self._nics.values():
            nic.close()


async def check_machine(graph: Graph, seams: Seams) -> None:
    """Raises UserError when waits on this machine are too coarse for the dilation of an emulated graph."""
    if graph.emulation is not None:
        timer = seams.new_timer()
        try:
            lateness = await measure_lateness(timer)
        finally:
            timer.close()
        check_dilation(graph.emulation.dilation, modelled_seconds(graph), lateness[0])


def modelled_seconds(graph: Graph) -> dict[str, float]:
    """The shortest waits that an emulated graph needs, undilated, by name: the charge for computing, and an empty message on each kind of
    link. Empty when nothing is emulated.
    """
    if graph.emulation is None:
        return {}
    found = {f"a row of {operator}": cost.shortest_seconds(kind_of(operator).charges) for operator, cost in graph.emulation.compute.items()}
    for edge in graph.edges.values():
        if edge.link is not None and graph.nodes[edge.source].process != graph.nodes[edge.target].process:
            profile = profile_of(edge.link).shared_by(graph.emulation.processes_per_nic)
            found[f"a message on link {edge.link}"] = profile.seconds(0)
    return found
