"""Emulated hardware: equal tokens, no step faster than its model, early refusals, and void results when the machine is too slow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from served_models import Served

import flowrt
from flowrt.emulation import emulation_report
from flowrt.errors import UserError
from flowrt.seams import Seams
from flowrt.timer import LoopTimer

NUM_LAYERS, NUM_TOKENS = 3, 4
LINK = {"latency_seconds": 1e-3, "bandwidth_bytes_per_second": 1e9, "message_seconds": 1e-4}


class QuietTimer(LoopTimer):
    """Waits that end exactly, so that the test machine does not decide whether the graph may start."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0

    def now(self) -> float:
        return self._seconds

    async def wait_until(self, when: float) -> None:
        self._seconds = when


QUIET = Seams(new_timer=QuietTimer)


@pytest.mark.parametrize(("processes", "servers"), [("many", 2), (1, 2), ("many", 0)])
async def test_the_tokens_are_the_same_and_no_step_is_faster_than_its_model(
    served: Served, tmp_path: Path, processes: str | int, servers: int
) -> None:
    deploy = {"experts": {"servers": servers}, "links": {"attention-experts": {"link": LINK}}, "processes": processes}
    emulate = {"dilation": 10, "compute": {"attention": {"fixed_seconds": 1e-3}, "experts": {"fixed_seconds": 5e-4}}}
    graph = served.write(tmp_path, deploy, emulate=emulate)
    seconds = QUIET.clock.now()
    async with flowrt.open(graph, seams=QUIET) as running:
        begin = QUIET.clock.now()
        done = await running.complete(served.prompts[2], flowrt.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        seconds = QUIET.clock.now() - begin
    assert list(done.token_ids) == served.expected[2][:NUM_TOKENS]
    there_and_back = 2 * (LINK["latency_seconds"] + LINK["message_seconds"]) if servers else 0.0
    assert seconds >= 10 * NUM_TOKENS * NUM_LAYERS * (1e-3 + 5e-4 + there_and_back)

    emulations = {name: each.emulation for name, each in running.final_statistics.items() if each.emulation is not None}
    assert set(emulations) == {"attention.0", *(f"experts.{server}" for server in range(servers))}
    attention = emulations["attention.0"]
    charged = 1e-3 + (0.0 if servers else 5e-4)
    assert attention.computed.modelled_seconds == pytest.approx(10 * NUM_TOKENS * NUM_LAYERS * charged)
    for name, statistics in running.final_statistics.items():
        received = sum(
            edge.num_messages
            for other in running.final_statistics.values()
            for edge in other.edges
            if running.graph.nodes[running.graph.edges[edge.edge].target].process == name
        )
        assert emulations[name].delivered.num >= received, statistics  # and the credits that came back


async def test_result_is_void_when_reality_is_slower_than_the_model(served: Served, tmp_path: Path) -> None:
    emulate = {"dilation": 1, "compute": {"attention": {"fixed_seconds": 1e-9}}}
    graph = served.write(tmp_path, {"processes": 1}, emulate=emulate)
    async with flowrt.open(graph, seams=QUIET) as running:
        await running.complete(served.prompts[0], flowrt.SamplingParams(max_tokens=2, ignore_eos=True))
    account = emulation_report(1.0, [each.emulation for each in running.final_statistics.values() if each.emulation is not None])
    assert account.void
    assert account.num_computed_late == account.num_computed == 2


async def test_dilation_too_small_for_this_machine_is_refused_before_the_start(served: Served, tmp_path: Path) -> None:
    class CoarseTimer(QuietTimer):
        async def wait_until(self, when: float) -> None:
            self._seconds = when + 1e-4

    graph = served.write(tmp_path, {"experts": {"servers": 1}, "links": {"attention-experts": {"link": "ub"}}}, emulate={"dilation": 133})
    running = flowrt.open(graph, seams=dataclasses.replace(QUIET, new_timer=CoarseTimer))
    with pytest.raises(UserError, match="133 is too small here; write 140 or more: a message on link ub is 15 us"):
        async with running:
            pass
    assert running.pids == {}
