"""Decoding of an emulated graph in modelled time: how fast, and how busy each process was.

`modelled_run` measures a running graph. `simulated_run` runs a graph in virtual time: the same launcher, gateway, workers and emulation
without faults (flowrt/simulation), where computing and sending cost nothing but their modelled times, and equal runs give equal figures.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from flowrt.actors.control import Statistics
from flowrt.api import RunningGraph, open_graph
from flowrt.bench.measure.decoding import TurnClock, follow_tokens, prompts_of
from flowrt.bench.measure.memory import vocab_size
from flowrt.errors import UserError
from flowrt.graph.model import GATEWAY, Graph, role_of
from flowrt.graph.recovery import pipelines
from flowrt.launcher import events
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.network_conditions import NetworkConditions
from flowrt.simulation.processes import ProcessConditions, SimulatedBackend
from flowrt.simulation.simulated_seams import ComputeDelays
from flowrt.simulation.world import World, run
from flowrt.system.process_backend import BackendOwner

T = TypeVar("T")
PROMPT_TOKENS = 2
Stop = Callable[[], Callable[[], None]]  # stops a process, and returns what lets it go on
IDEAL_NETWORK = NetworkConditions(min_delay_seconds=0.0, max_delay_seconds=0.0, slow_one_in=0, duplicate_one_in=0, bytes_per_second=1e15)
NO_DELAYS = ComputeDelays(0.0, 0.0, short_one_in=0, beside_one_in=0)


@dataclass(frozen=True)
class ModelledRun:
    """What decoding one batch took, in seconds of the modelled hardware, while all its sequences ran.

    `step_seconds`: from one token of a sequence to its next, by sequence. `busy`: by process, the share of the time in which it computed.
    `sent`: by edge, messages and payload bytes per step, over all steps of the batch.
    """

    step_seconds: tuple[float, ...]
    busy: Mapping[str, float]
    sent: Mapping[str, tuple[float, float]]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def mean_step_seconds(self) -> float:
        return sum(self.step_seconds) / len(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return sum(1 / seconds for seconds in self.step_seconds)

    def busy_share(self, role: str) -> float:
        """The mean over the processes of `role`."""
        shares = [share for process, share in self.busy.items() if role_of(process) == role]
        return sum(shares) / len(shares)


async def modelled_run(
    graph: RunningGraph,
    batch: int,
    new_tokens: int,
    stop: Stop | None = None,
    stop_seconds: float = math.inf,
    apart_seconds: float = 0.0,
    temperature: float = 0.0,
) -> ModelledRun:
    """Decode `batch` sequences of `new_tokens` new tokens, of which those count that come while all sequences run.

    `stop` stops a process meanwhile, for `stop_seconds` of modelled time or to the end; the sequences that then get no tokens do not
    count. `apart_seconds`: from the first request of a group to that of the next, in modelled time. `temperature`: greedy sequences of a
    small model repeat their tokens, and with them their experts. Raises UserError for a graph without emulation, a failed request, and too
    few tokens.
    """
    emulation = graph.graph.emulation
    if emulation is None or graph.graph.model is None:
        raise UserError("modelled time needs a graph with emulate: that serves a model")
    num_groups = len(pipelines(graph.graph))
    clock = TurnClock(graph.launcher.seams.clock.now)
    times: list[list[float]] = [[] for _ in range(batch)]
    tokens: list[list[int]] = [[] for _ in range(batch)]
    began, ended = asyncio.Event(), asyncio.Event()

    async def follow(number: int, index: int) -> None:
        try:
            async for event in follow_tokens(graph, index):
                times[number] += [clock.now()] * len(event.token_ids)
                tokens[number] += event.token_ids
                if event.index == 0 and all(times):
                    began.set()
        finally:
            ended.set()

    async def stand_still(stop: Stop) -> None:
        go_on = stop()
        try:
            await graph.launcher.seams.clock.sleep(stop_seconds * emulation.dilation)
        finally:
            go_on()

    idle = await graph.statistics()
    async with asyncio.TaskGroup() as tasks:
        for number, prompt in enumerate(prompts_of(batch, PROMPT_TOKENS, vocab_size(graph.graph))):
            params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=temperature, seed=number)
            tasks.create_task(follow(number, await graph.submit(prompt, params)))
            if apart_seconds and number + 1 < num_groups:
                await graph.launcher.seams.clock.sleep(apart_seconds * emulation.dilation)
        await began.wait()
        first, before = clock.now(), await graph.statistics()
        standstill = tasks.create_task(stand_still(stop)) if stop is not None else None
        await ended.wait()
        last = clock.now()
        if standstill is not None:
            standstill.cancel()
        after = await graph.statistics()
    within = [[seconds for seconds in each if first <= seconds <= last] for each in times]
    if stop is not None:
        within = [each for each in within if len(each) > 1]
    if not within or min(map(len, within)) < 2:
        raise UserError(f"{new_tokens} new tokens are too few: not all sequences ran at once for two tokens; use more")
    steps = tuple((each[-1] - each[0]) / (len(each) - 1) / emulation.dilation for each in within)
    sent = _sent(idle, await graph.statistics())
    return ModelledRun(steps, _busy(before, after, last - first), sent, tuple(map(tuple, tokens)))


def _busy(before: Mapping[str, Statistics], after: Mapping[str, Statistics], seconds: float) -> dict[str, float]:
    """Returns by process with modelled computing the share of `seconds` in which it computed."""
    return {
        name: (end.emulation.computed.modelled_seconds - begin.emulation.computed.modelled_seconds) / seconds
        for name, end in after.items()
        if end.emulation is not None and (begin := before[name]).emulation is not None
    }


def _sent(before: Mapping[str, Statistics], after: Mapping[str, Statistics]) -> dict[str, tuple[float, float]]:
    """Counts by edge the messages and payload bytes per step of all groups together."""
    num_steps = sum(after[name].num_steps - before[name].num_steps for name in after)
    sent = {}
    for name, counters in after.items():
        earlier = {edge.edge: edge for edge in before[name].edges}
        for edge in counters.edges:
            was = earlier[edge.edge]
            sent[edge.edge] = (edge.num_messages - was.num_messages) / num_steps, (edge.payload_bytes - was.payload_bytes) / num_steps
    return sent


def stop_process(graph: RunningGraph, process: str) -> Callable[[], None]:
    """Stop a process with SIGSTOP. Returns what lets it go on."""
    pid = graph.pids[process]
    os.kill(pid, signal.SIGSTOP)
    return partial(os.kill, pid, signal.SIGCONT)


def simulated_run(
    graph: Graph, batch: int, new_tokens: int, stopped: str = "", stop_seconds: float = math.inf, apart_seconds: float = 0.0
) -> ModelledRun:
    """Makes a `modelled_run` in virtual time. `stopped`: a process that stands still meanwhile."""

    async def call(world: World, running: RunningGraph) -> ModelledRun:
        stop = partial(_stop_simulated, world, stopped) if stopped else None
        return await modelled_run(running, batch, new_tokens, stop, stop_seconds, apart_seconds)

    return in_virtual_time(graph, call)


def in_virtual_time(
    graph: Graph,
    call: Callable[[World, RunningGraph], Awaitable[T]],
    *,
    restart_seconds: float | None = None,
    max_seconds: float = 3600.0,
    on_event: Callable[[World, events.Event], None] = lambda world, event: None,
    trace: str | None = None,
) -> T:
    """What `call` returns of the graph, which runs in virtual time meanwhile. `restart_seconds`: until a process that died is started
    anew; None: nothing fails, so that the run detects and hedges nothing. `on_event`: is called in virtual time. `trace`: a file, as of
    `flowrt.open`. `max_seconds`: of virtual time, after which the run counts as one without end."""

    async def main(world: World) -> T:
        async def open_backend(run_id: str, owner: BackendOwner, *settings: Any, **more: Any) -> SimulatedBackend:
            return await SimulatedBackend.open(world, owner, drawn)

        world.one_clock = True  # the two ends of an emulated link compare times
        seams = replace(world.seams(GATEWAY), open_backend=open_backend)
        async with open_graph(quiet, seams=seams, on_event=partial(on_event, world), trace=trace) as running:
            return await call(world, running)

    # Heartbeats, and looks at the clock in dilated time, are most of the events of a run without faults. Waits take no real time.
    emulation = None if graph.emulation is None else graph.emulation.replace(dilation=1.0)
    quiet, drawn = graph.replace(emulation=emulation), ProcessConditions()
    if restart_seconds is None:
        quiet = quiet.replace(reliability=graph.reliability.replace(detector=False, hedge=False))
    else:
        drawn = ProcessConditions(restart_seconds=(max(restart_seconds, 1e-9),) * 2)
    return run(0, main, conditions=IDEAL_NETWORK, cost=NO_DELAYS, max_seconds=max_seconds).result


def _stop_simulated(world: World, process: str) -> Callable[[], None]:
    nodes = world.processes[process].nodes
    for node in nodes:
        world.loop.park(node)

    def go_on() -> None:
        for node in nodes:
            world.loop.unpark(node)

    return go_on
