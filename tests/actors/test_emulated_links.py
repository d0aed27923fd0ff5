"""Which channels of a worker become emulated links, and what an emulated graph requires of the machine."""

from __future__ import annotations

import pytest

from flowrt.actors.emulated_links import EmulatedLinks, check_machine, modelled_seconds
from flowrt.actors.link_plan import plan_links
from flowrt.emulation import Lateness
from flowrt.errors import UserError
from flowrt.graph.model import Edge, Graph, Node, from_json, to_json
from flowrt.graph.settings import ComputeCost, Emulation
from flowrt.seams import Seams
from flowrt.timer import LoopTimer
from flowrt.transports.contract import Identity, Limits
from flowrt.transports.emulation.channel import EmulatedChannel
from flowrt.transports.inproc import InprocChannel
from flowrt.transports.wire.message import Message

NODES = {name: Node(name, f"ops:{name}", process) for name, process in (("a", "left"), ("b", "right"), ("c", "third"))}
EDGES = [
    Edge("a", "y", "b", "x", transport="inproc", link="ub", credits=1),
    Edge("a", "y", "c", "x", transport="inproc", credits=1),
]
GRAPH = Graph.of(NODES.values(), EDGES, emulation=Emulation(100.0, processes_per_nic=2))


def test_a_plan_names_the_link_only_where_it_is_emulated() -> None:
    assert {plan.peer: plan.link for plan in plan_links(GRAPH, "left")} == {"right": "ub", "third": None}
    assert {plan.link for plan in plan_links(GRAPH.replace(emulation=None), "left")} == {None}


def test_the_emulation_travels_to_workers() -> None:
    assert from_json(to_json(GRAPH)).emulation == GRAPH.emulation


async def test_channels_of_one_worker_share_its_nic_and_others_stay_as_they_are() -> None:
    links = EmulatedLinks(Emulation(1.0), LoopTimer())
    plans = {plan.peer: plan for plan in plan_links(GRAPH, "left")}
    pairs = [InprocChannel.pair(Limits(), Identity("left"), Identity(name)) for name in ("right", "right", "third")]
    wrapped = [links.wrap(plans[name], one) for (one, _), name in zip(pairs, ("right", "third"), strict=False)]
    repeated = links.wrap(plans["right"], pairs[2][0])
    assert isinstance(wrapped[0], EmulatedChannel)
    assert wrapped[1] is pairs[1][0]
    assert isinstance(repeated, EmulatedChannel)
    assert wrapped[0]._nic is repeated._nic
    for channel in (*wrapped, repeated, *(channel for pair in pairs for channel in pair)):
        await channel.aclose()
    links.close()


async def test_what_is_received_is_counted() -> None:
    timer = LoopTimer()
    plan = next(plan for plan in plan_links(GRAPH, "left") if plan.link is not None)
    sides = [EmulatedLinks(Emulation(1.0), timer) for _ in range(2)]
    one, two = (
        side.wrap(plan, channel)
        for side, channel in zip(sides, InprocChannel.pair(Limits(), Identity("left"), Identity("right")), strict=True)
    )
    await one.send(Message("data"))
    await two.recv()
    assert (sides[0].lateness, sides[1].lateness.num) == (Lateness(), 1)
    await one.aclose()
    await two.aclose()
    for side in sides:
        side.close()


def test_requirements_of_a_graph_on_the_machine() -> None:
    assert modelled_seconds(GRAPH.replace(emulation=None)) == {}
    emulation = Emulation(100.0, {"attention": ComputeCost(1e-3), "experts": ComputeCost(1e-3, 1e-4, 2e-4)}, processes_per_nic=2)
    assert modelled_seconds(GRAPH.replace(emulation=emulation)) == {
        "a row of attention": 1e-3,
        "a row of experts": pytest.approx(1.3e-3),
        "a message on link ub": pytest.approx(14e-6 + 2 * 1e-6),
    }


async def test_a_machine_too_coarse_is_refused() -> None:
    class Coarse(LoopTimer):
        async def wait_until(self, when: float) -> None:
            self._late = when + 1e-3

        def now(self) -> float:
            return getattr(self, "_late", 0.0)

    await check_machine(GRAPH.replace(emulation=None), Seams(new_timer=Coarse))
    with pytest.raises(UserError, match="write 1300 or more: a message on link ub is 16 us, a wait"):
        await check_machine(GRAPH, Seams(new_timer=Coarse))
