"""Level L1 for traffic: the runtime itself serves drawn or recorded requests in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flowrt.actors.control import Statistics
from flowrt.api import RunningGraph
from flowrt.bench.measure.decoding import follow_tokens
from flowrt.bench.measure.memory import vocab_size
from flowrt.bench.measure.modelled import in_virtual_time
from flowrt.errors import FAILURE, NotRunningError, UserError, WorkerDiedError
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.launcher.start_checks import check_has_weights
from flowrt.operators.families.registry import read_model_config
from flowrt.planner.requests import TrafficTimes
from flowrt.planner.traffic import RequestArrival, Traffic, prompt_of
from flowrt.reliability.scenario import Crash, Scenario
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Clock
from flowrt.simulation.faults import Faults
from flowrt.simulation.world import World

FIRST_TOKEN_ID = 3  # of drawn prompts; smaller ids are often special tokens
LEVEL = "L1"
MAX_SECONDS_BEHIND = 24 * 3600.0  # of virtual time, behind the last arrival


FAULTS = ("crash", "pause", "stall", "hang", "slow", "slow_link", "cut", "reset")  # others test the runtime only


class NothingAnsweredError(UserError):
    """The faults ended every request: the input is good, and the run has failed."""

    exit_code = FAILURE


@dataclass(frozen=True)
class Disturbance:
    """Faults of a run. Their times count from the begin of the traffic. `restart_seconds`: until a process that died is started anew."""

    scenario: Scenario
    restart_seconds: float

    def __post_init__(self) -> None:
        for fault in self.scenario.faults:
            if fault.kind not in FAULTS:
                raise UserError(f"{fault.kind} has no meaning in modelled time; level L1 has {', '.join(FAULTS)}")


def simulated_traffic(
    graph: Graph,
    traffic: Traffic,
    disturbance: Disturbance | None = None,
    trace: str | None = None,
    on_progress: Callable[[int, int], None] = lambda ended, total: None,
) -> TrafficTimes:
    """Serve the traffic in virtual time. `trace`: a file for a Perfetto trace. `on_progress`: gets how many requests have ended, of all.

    Raises UserError for a graph without emulation, and for a request that cannot be served; those that faults end are counted."""
    if graph.emulation is None or graph.model is None:
        raise UserError("level L1 needs a graph with emulate: that serves a model; add emulate:, or use --level L2")
    check_has_weights(graph)
    traffic.check_context(read_model_config(Path(graph.model.path)).max_position_embeddings)
    served = _ServedTraffic(traffic, disturbance, on_progress)
    restart = None if disturbance is None else disturbance.restart_seconds
    max_seconds = traffic.arrivals[-1].at_seconds + (restart or 0.0) + MAX_SECONDS_BEHIND
    return in_virtual_time(graph, served.run, restart_seconds=restart, max_seconds=max_seconds, on_event=served.on_event, trace=trace)


class _ReceivedResponse(NamedTuple):
    """A request that got all of its tokens. Times are those of its clock."""

    num_input: int
    arrived: float
    times: list[float]


class _ServedTraffic:
    """One run of the traffic."""

    def __init__(self, traffic: Traffic, disturbance: Disturbance | None, on_progress: Callable[[int, int], None]) -> None:
        self._traffic, self._disturbance, self._on_progress = traffic, disturbance, on_progress
        self._responses, self._errors, self._events = list[_ReceivedResponse](), list[str](), list[tuple[float, str]]()
        self._began_at = self._dilation = 0.0
        self._first_arrival = math.inf
        self._num_here = self._max_here = self._num_output = 0

    def on_event(self, world: World, event: events.Event) -> None:
        text = f"the run failed: {event.error}" if isinstance(event, events.RunFailed) else events.news(event)
        if text is not None and self._dilation:
            self._events.append(((world.loop.time() - self._began_at) / self._dilation, text))

    async def run(self, world: World, graph: RunningGraph) -> TrafficTimes:
        emulation, traffic, num_ids = graph.graph.emulation, self._traffic, vocab_size(graph.graph)
        assert emulation is not None
        clock, self._dilation, self._began_at = graph.launcher.seams.clock, emulation.dilation, world.loop.time()
        places = asyncio.Semaphore(traffic.concurrency or len(traffic.arrivals))
        faults = None if self._disturbance is None else Faults(world, self._disturbance.scenario, lambda name: None, graph=graph.graph)
        if faults is not None:
            faults.begin()

        async def serve(number: int, arrival: RequestArrival) -> None:
            if traffic.concurrency is None:
                await clock.sleep(arrival.at_seconds * self._dilation)
            async with places:
                try:
                    await self._follow(graph, clock, arrival, prompt_of(number, arrival, range(FIRST_TOKEN_ID, num_ids)))
                except (UserError, WorkerDiedError, NotRunningError) as error:
                    if faults is None:
                        raise
                    self._errors.append(str(error))
                self._on_progress(len(self._responses) + len(self._errors), len(traffic.arrivals))

        async with asyncio.TaskGroup() as tasks:
            for number, arrival in enumerate(traffic.arrivals):
                tasks.create_task(serve(number, arrival))
        if faults is not None:
            self._note_faults(world, faults)
            faults.heal()
        if not self._responses:
            raise NothingAnsweredError(f"no request got all of its tokens: {self._errors[0]}")
        return await self._result(graph)

    def _note_faults(self, world: World, faults: Faults) -> None:
        """Tell of faults that no event tells of, and of those that came too late to happen."""
        end = (world.loop.time() - self._began_at) / self._dilation
        for fault in [] if self._disturbance is None else self._disturbance.scenario.faults:
            where = " and ".join(fault.processes)
            if fault not in faults.begun:
                self._events.append((end, f"the traffic is over: {fault.kind} of {where} at {fault.at_seconds:g} s has not happened"))
            elif not isinstance(fault, Crash):
                self._events.append((fault.at_seconds / self._dilation, f"{fault.kind} of {where}"))
        self._events.sort(key=lambda event: event[0])

    async def _follow(self, graph: RunningGraph, clock: Clock, arrival: RequestArrival, prompt: Sequence[int]) -> None:
        arrived, times = clock.now(), list[float]()
        self._first_arrival = min(self._first_arrival, arrived)
        self._num_here += 1
        self._max_here = max(self._max_here, self._num_here)
        try:
            index = await graph.submit(prompt, SamplingParams(max_tokens=arrival.num_output, ignore_eos=True))
            async for event in follow_tokens(graph, index):
                self._num_here -= not times
                times += [clock.now()] * len(event.token_ids)
        finally:
            self._num_here -= not times
            self._num_output += len(times)
        self._responses.append(_ReceivedResponse(arrival.num_input, arrived, times))

    async def _result(self, graph: RunningGraph) -> TrafficTimes:
        counters: Mapping[str, Statistics] = {}
        with contextlib.suppress(*(UserError, WorkerDiedError, NotRunningError) if self._errors else ()):
            counters = await graph.statistics()
        computed = {name: each.emulation.computed.modelled_seconds for name, each in counters.items() if each.emulation is not None}
        num_steps, num_rows = (sum(getattr(each, name) for each in counters.values()) for name in ("num_steps", "num_rows"))
        answers = self._responses
        seconds = (max(each.times[-1] for each in answers) - self._first_arrival) / self._dilation
        return TrafficTimes(
            seconds,
            np.array([each.num_input for each in answers]),
            np.array([each.times[0] - each.arrived for each in answers]) / self._dilation,
            np.array([each.times[-1] - each.arrived for each in answers]) / self._dilation,
            np.full(len(answers), math.nan),
            np.array([after - before for each in answers for before, after in pairwise(each.times)]) / self._dilation,
            sum(each.num_input for each in self._traffic.arrivals),
            self._num_output,
            self._max_here,
            num_rows / max(1, num_steps),
            None,
            {name: each / self._dilation / seconds for name, each in computed.items()},
            LEVEL,
            len(self._errors),
            tuple(self._events),
            _expert_pairs(counters),
        )


def _expert_pairs(counters: Mapping[str, Statistics]) -> dict[int, list[float]]:
    found: dict[int, dict[int, float]] = {}
    for layer in (each for own in counters.values() for each in own.experts):
        pairs = found.setdefault(layer.layer, {})
        for expert, num in zip(layer.expert_ids, layer.num_pairs, strict=True):
            pairs[expert] = pairs.get(expert, 0.0) + num
    return {layer: [pairs.get(expert, 0.0) for expert in range(max(pairs) + 1)] for layer, pairs in found.items()}
