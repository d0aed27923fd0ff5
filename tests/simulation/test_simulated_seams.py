"""The simulated seams: results of computations beside a loop, clocks per process, and emulated hardware in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from simulation.outcomes import token_ids

from flowrt.emulation import emulation_report
from flowrt.graph.file import load_graph
from flowrt.launcher.model_facts import facts_of
from flowrt.reliability.scenario import Hang, Scenario
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Seams
from flowrt.simulation.case import Case, SimulatedRequest
from flowrt.simulation.cases import references_of
from flowrt.simulation.faults import Faults
from flowrt.simulation.launchers import simulate
from flowrt.simulation.network_conditions import CALM
from flowrt.simulation.simulated_seams import ComputeDelays
from flowrt.simulation.world import World, run

SEEDS = range(20)
GRAPHS = Path(__file__).resolve().parent / "graphs"
LONG = ComputeDelays(1.0, 2.0, short_one_in=0)


async def one_call(world: World, *faults: object) -> tuple[list[float], float]:
    """The arrival times of the three early outputs of a call, and its end, in seconds from its beginning."""
    loop, came = world.loop, []
    ended = 0.0

    async def work(seams: Seams) -> None:
        nonlocal ended
        compute = seams.new_compute("compute")
        began = loop.time()

        def call() -> None:
            for number in range(3):
                loop.call_soon_threadsafe(lambda number=number: came.append((number, loop.time() - began)))

        await compute.run("call", call)
        ended = loop.time() - began
        assert [number for number, _ in came] == [0, 1, 2]  # all of them, in order, before the end is visible
        await compute.aclose()

    process = world.start("worker", work)
    made = Faults(world, Scenario(faults=faults), lambda name: None)
    made.begin()
    assert await process.exit == "exited with status 0"
    return [when for _, when in came], ended


def test_early_outputs_of_a_call_arrive_before_its_end() -> None:
    early = 0
    for seed in SEEDS:
        came, ended = run(seed, one_call, cost=LONG).result
        assert came == sorted(came)
        assert came[-1] <= ended
        early += came[0] < ended - 0.1
    assert 5 < early < len(SEEDS)  # not always: a call may send all outputs at its end


def test_hung_thread_sends_no_output() -> None:
    for seed in SEEDS:
        came, _ = run(seed, lambda world: one_call(world, Hang(process="worker", for_seconds=5.0)), cost=LONG).result
        assert came[0] >= 5.0


@pytest.mark.parametrize(("one_in", "least", "most"), [(0, 0, 0), (1, 20, 20), (2, 3, 17)])
def test_some_workers_compute_beside_their_loop(one_in: int, least: int, most: int) -> None:
    async def main(world: World) -> bool:
        return bool(world.seams("worker").new_compute("compute").beside_loop)

    beside = [run(seed, main, cost=ComputeDelays(beside_one_in=one_in)).result for seed in SEEDS]
    assert least <= sum(beside) <= most


def test_a_call_is_timed_by_the_clock_of_its_process() -> None:
    async def main(world: World) -> None:
        async def work(seams: Seams) -> None:
            compute = seams.new_compute("compute")
            async with asyncio.TaskGroup() as tasks:
                before = seams.clock.now()
                tasks.create_task(compute.run("call", lambda: None))
                await asyncio.sleep(0.5)
                assert compute.running is not None
                assert compute.running.since_seconds == pytest.approx(before, abs=1e-3)

        assert await world.start("worker", work).exit == "exited with status 0"

    run(0, main, cost=LONG)


def test_emulated_graph_takes_its_modelled_time() -> None:
    graph = load_graph(GRAPHS / "emulated.yaml", facts_of=facts_of)
    assert graph.emulation is not None
    requests = [SimulatedRequest((5, 6, 7), SamplingParams(max_tokens=4, ignore_eos=True), after_seconds=0.0)] * 2
    case = Case(graph, tuple(requests), conditions=CALM, cost=ComputeDelays(1e-6, 1e-5))
    outcome = simulate(case)
    served = outcome.result
    assert served.failure is None
    assert token_ids(served) == tuple(reference[0] for reference in references_of(case))
    emulations = [statistics.emulation for statistics in served.statistics.values() if statistics.emulation is not None]
    account = emulation_report(graph.emulation.dilation, emulations)
    assert len(emulations) == len(graph.process_names())
    assert account.num_computed > 0
    assert account.num_delivered > 0
    assert (account.num_computed_late, account.num_delivered_late) == (0, 0)
    assert outcome.virtual_seconds > max(each.computed.modelled_seconds for each in emulations) > 0.1
