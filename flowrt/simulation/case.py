"""Defines a case: the complete input of one simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from flowrt.graph.model import Graph
from flowrt.launcher.launcher import RESPONSE_SECONDS
from flowrt.reliability.scenario import Scenario
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.changes import DrawnChange
from flowrt.simulation.log_disk import LogConditions
from flowrt.simulation.network_conditions import CALM, NetworkConditions
from flowrt.simulation.processes import ProcessConditions
from flowrt.simulation.simulated_seams import ComputeDelays
from flowrt.simulation.simulated_trace import SimulatedTrace

CHANGE_SECONDS = 30.0  # more for each change of the graph
GRACE_SECONDS = 60.0  # virtual time beyond the start, the last fault and its deadline; a longer run is stuck


@dataclass(frozen=True)
class SimulatedRequest:
    """A client's request, as token ids, and how the client behaves.

    after_seconds: when it comes after the request before; None: drawn. cancel_seconds: it leaves after so long, if it is still there.
    leaves_after: it leaves after so many events. pause_seconds: between two events that it reads. reads_late: it reads nothing until the
    request has ended. is_unreadable: its text cannot be tokenized.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    after_seconds: float | None = None
    cancel_seconds: float | None = None
    leaves_after: int | None = None
    pause_seconds: float = 0.0
    reads_late: bool = False
    is_unreadable: bool = False

    @property
    def may_leave(self) -> bool:
        return self.cancel_seconds is not None or self.leaves_after is not None


@dataclass(frozen=True)
class SimulatedCall:
    """A call of a graph of user operators: each input gets one integer, `value`.

    after_seconds: when it comes after the call before. cancel_seconds: its caller leaves after so long.
    """

    value: int
    after_seconds: float = 0.0
    cancel_seconds: float | None = None


@dataclass(frozen=True)
class Poison:
    """A token and the effect of computing it: its group crashes or hangs, its part crashes (`part`) or hangs (`hung_part`) an expert
    server, its operator raises, or its values are not numbers."""

    token_id: int
    effect: Literal["crash", "hang", "part", "hung_part", "raise", "nan"] = "crash"


@dataclass(frozen=True)
class Glitch:
    """One wrong result in the run: the firing with this number of all nodes with this operator raises, or its values are not numbers."""

    operator: str
    effect: Literal["raise", "nan"]
    number: int


@dataclass(frozen=True)
class Case:
    """The graph (expanded), its requests or calls, and the conditions. The number of a fault, request or call is its index here.

    exact: use the integer model (flowrt/workers/exact_nodes.py) instead of weights. faults_from_launch: the scenario's times count from
    the launch instead of the first request. worker: the entry of each worker. front_ends: processes that clients connect to; 0: they call
    the gateway.
    """

    graph: Graph
    requests: tuple[SimulatedRequest, ...]
    scenario: Scenario = Scenario()
    seed: int = 0
    conditions: NetworkConditions = NetworkConditions()
    cost: ComputeDelays = ComputeDelays()
    processes: ProcessConditions = ProcessConditions()
    exact: bool = True
    faults_from_launch: bool = False
    max_requests: int = 1024
    worker: str = "flowrt.simulation.observed_run:run_worker"
    front_ends: int = 0
    poison: Poison | None = None
    glitch: Glitch | None = None
    drain_seconds: float | None = None  # the owner drains the run so long after the first request
    log: LogConditions | None = None  # the run has a request log
    calls: tuple[SimulatedCall, ...] = ()  # in place of requests, for a graph without a model
    trace: SimulatedTrace | None = field(default=None, compare=False)  # of a graph with a model
    changes: tuple[DrawnChange, ...] = ()  # of the graph, one after another

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that the run may have."""
        return self.graph, *(change.graph for change in self.changes)

    @property
    def max_seconds(self) -> float:
        """The virtual time in which the run must end."""
        of_changes = len(self.changes) * CHANGE_SECONDS
        return RESPONSE_SECONDS + self.scenario.ends_seconds + self.scenario.deadline_seconds + GRACE_SECONDS + of_changes


@dataclass(frozen=True)
class Kept:
    """The parts of a drawn case that are kept. None: all."""

    faults: tuple[int, ...] | None = None
    requests: tuple[int, ...] | None = None
    calm: bool = False  # calm network conditions and the usual compute cost

    def of(self, case: Case) -> Case:
        faults, requests, calls = case.scenario.faults, case.requests, case.calls
        if self.faults is not None:
            faults = tuple(fault for number, fault in enumerate(faults) if number in self.faults)
        if self.requests is not None:
            requests = tuple(request for number, request in enumerate(requests) if number in self.requests)
            calls = tuple(call for number, call in enumerate(calls) if number in self.requests)
        case = replace(case, scenario=msgspec.structs.replace(case.scenario, faults=faults), requests=requests, calls=calls)
        return replace(case, conditions=CALM, cost=ComputeDelays(), processes=ProcessConditions()) if self.calm else case
