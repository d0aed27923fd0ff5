"""The totals of a worker over all its incarnations."""

from __future__ import annotations

import msgspec

from flowrt.actors.control import EdgeStatistics, ExpertStatistics, NodeStatistics, Statistics
from flowrt.launcher.totals import total


def test_totals_of_one_incarnation_are_its_own() -> None:
    statistics = Statistics(edges=(EdgeStatistics(3, "shm", 5, 50),), num_firings=7, resident_bytes=9, strict_blocks="rows of 4")
    assert total(None, statistics) == statistics


def test_counts_are_summed_and_states_are_the_last_ones() -> None:
    first = Statistics(
        edges=(EdgeStatistics(3, "shm", 5, 50, 0.5, 2.0, (1, 3)), EdgeStatistics(4, "shm", 1, 10)),
        nodes=(NodeStatistics("a", 1, 2, 0.5, 4), NodeStatistics("b", 1, 1, 1.0, 2)),
        num_firings=7,
        compute_seconds=1.5,
        inline_seconds=0.5,
        num_steps=2,
        step_row_counts=(2, 0),
        map_version=2,
        num_micro_batches=4,
        late_wakeups=1,
        resident_bytes=9,
    )
    edges = EdgeStatistics(1, "zmq", 2, 20), EdgeStatistics(3, "zmq", 1, 5, 0.25, 1.0, (0, 2))
    last = Statistics(edges, (NodeStatistics("b", 2, 4, 0.25, 1),), num_firings=1, num_steps=1, step_row_counts=(0, 1), resident_bytes=4)
    last = msgspec.structs.replace(last, map_version=1, num_micro_batches=3)
    assert total(total(total(None, first), Statistics()), last, 2) == Statistics(
        edges=(EdgeStatistics(1, "zmq", 2, 20), EdgeStatistics(3, "zmq", 6, 55, 0.75, 3.0, (1, 5)), EdgeStatistics(4, "shm", 1, 10)),
        nodes=(NodeStatistics("a", 1, 2, 0.5), NodeStatistics("b", 3, 5, 1.25, 1)),
        num_firings=8,
        compute_seconds=1.5,
        inline_seconds=0.5,
        num_steps=3,
        step_row_counts=(2, 1),
        map_version=3,
        num_micro_batches=3,
        late_wakeups=1,
        resident_bytes=4,
        num_restarts=2,
    )


def test_pairs_of_experts_are_summed_though_an_incarnation_holds_others() -> None:
    first = Statistics(experts=(ExpertStatistics(2, (1,), (9,)), ExpertStatistics(1, (4, 0), (10, 20))))
    both = total(first, Statistics(experts=(ExpertStatistics(1, (4, 5), (1, 2)),)))
    assert both.experts == (ExpertStatistics(1, (0, 4, 5), (20, 11, 2)), ExpertStatistics(2, (1,), (9,)))
