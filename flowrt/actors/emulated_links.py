"""Emulated links: wraps a worker's channels as the links that the graph names, and checks that the machine's timers suffice.

transports/emulation/channel.py emulates one channel; flowrt/workers/emulated.py emulates computing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from flowrt.actors.link import CREDIT
from flowrt.actors.links import LinkPlan
from flowrt.costs.links import profile_of
from flowrt.emulation import Lateness, check_dilation
from flowrt.graph.emulated import device_of
from flowrt.graph.kinds import kind_of
from flowrt.graph.model import Graph
from flowrt.graph.settings import Emulation
from flowrt.seams import Seams
from flowrt.timer import Timer, measure_lateness
from flowrt.transports.contract import Channel, Limits
from flowrt.transports.emulation.channel import EmulatedChannel
from flowrt.transports.emulation.nic import Nic, payload_bytes
from flowrt.transports.wire.message import Message


class EmulatedLinks:
    """One worker's NICs, one per kind of link. `lateness` measures its received messages. `num_bytes`: the payload of a message on the
    emulated hardware; `num_like`: for how many messages one stands that carries no KV. Messages on `control_edges` overtake others, as
    returned credits do. Close it after the links."""

    def __init__(
        self,
        emulation: Emulation,
        timer: Timer,
        num_bytes: Callable[[Message], float] = payload_bytes,
        num_like: int = 1,
        control_edges: Collection[int] = (),
    ) -> None:
        self.lateness = Lateness()
        self._emulation, self._timer, self._num_bytes, self._num_like = emulation, timer, num_bytes, num_like
        self._control_edges = control_edges
        self._nics: dict[str, Nic] = {}
        self.new_channel: Callable[[Channel, Nic, Limits, Callable[[Message], bool]], EmulatedChannel] = EmulatedChannel

    def wrap(self, plan: LinkPlan, channel: Channel) -> Channel:
        """Wrap `channel` as the plan's link. Returns `channel` itself when the plan names no link."""
        if plan.link is None:
            return channel
        nic = self._nics.get(plan.link)
        if nic is None:
            profile = profile_of(plan.link).shared_by(self._emulation.processes_per_nic)
            nic = self._nics[plan.link] = Nic(profile, self._timer, self._emulation.dilation, self.lateness.note, self._num_bytes)
        if not plan.carries_kv:
            nic = nic.for_several(self._num_like)
        return self.new_channel(channel, nic, plan.limits, self._has_priority)

    def _has_priority(self, message: Message) -> bool:
        return message.kind == CREDIT or message.edge in self._control_edges

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
    for node in graph.nodes.values():  # what follows in a call only makes it longer
        if node.kind.charges and node.operator not in graph.emulation.compute and (device := device_of(graph, node.process)) is not None:
            found[f"a call of {node.operator} on {device.name}"] = device.fixed_seconds
    for edge in graph.edges.values():
        if edge.link is not None and graph.nodes[edge.source].process != graph.nodes[edge.target].process:
            profile = profile_of(edge.link).shared_by(graph.emulation.processes_per_nic)
            found[f"a message on link {edge.link}"] = profile.seconds(0)
    return found
