"""The states of a request at an expert server (EaaS section 3.2): its client dies, and its connection breaks, in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from simulation.outcomes import finish_reasons
from simulation.test_deaths import load, requests

from flowrt.reliability.scenario import AnyFault, Crash, Reset, Scenario
from flowrt.simulation.case import Case
from flowrt.simulation.cases import run_case
from flowrt.simulation.faults import Faults
from flowrt.simulation.network_conditions import NetworkConditions
from flowrt.transports.wire.codec import decode

GROUP, SERVER = "attention.0", "experts.1"
TIMES = [0.01 + 2.6e-3 * number for number in range(8)]
SLOW_NETWORK = NetworkConditions(min_delay_seconds=1e-3, max_delay_seconds=5e-3)  # so that requests are on the way most of the time
STATES = {"empty", "written", "at the server", "computed"}


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The states of the requests of GROUP at SERVER at the moments of the faults."""
    found: set[str] = set()
    inject = Faults._inject

    def noted(faults: Faults, fault: Any) -> Any:
        found.update(_states(faults))
        return inject(faults, fault)

    monkeypatch.setattr(Faults, "_inject", noted)
    return found


def _states(faults: Faults) -> Iterator[str]:
    group = faults._inside_of(GROUP)
    assert group is not None
    edges = [edge for edge in group._part("runner")._outbound.edges.values() if edge.peer == SERVER]
    num_requests = sum(len(edge.outstanding) for edge in edges)
    if not num_requests:
        yield "empty"
    there, back = 0, 0  # messages on the way
    for channel in faults._world.network.open_channels():
        ends = [faults._node(name) for name in (GROUP, SERVER)]
        for kind, parts in channel._on_the_way if {channel.node, channel.other_node} == {*ends} else ():
            if kind == "message" and decode(parts, channel.limits)[0].kind == "data":
                there, back = there + (channel.node == ends[1]), back + (channel.node == ends[0])
    if there:
        yield "written"
    if back:
        yield "computed"
    if num_requests > there + back:
        yield "at the server"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", [Crash(process=GROUP), Reset(between=(GROUP, SERVER))], ids=lambda fault: fault.kind)
def test_no_token_changes_whatever_the_state_of_a_request(states: set[str], fault: AnyFault) -> None:
    for seed, at in enumerate(TIMES):
        scenario = Scenario(faults=(msgspec.structs.replace(fault, at_seconds=at),), expect="tokens")
        outcome = run_case(Case(load("2x3.yaml"), tuple(requests(3, apart=1e-3)), scenario, seed, SLOW_NETWORK))
        assert finish_reasons(outcome.result) == ("length",) * 3
        assert outcome.num_faults["restarted"] in ((1,) if isinstance(fault, Crash) else (0, 1))  # a reset may find no open link
    assert states == STATES
