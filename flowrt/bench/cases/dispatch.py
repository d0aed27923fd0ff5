"""Dispatch per client against counts of all ranks: what one client that stalls costs the others (xDeepServe section 3.2).

There a receiver of rows waits until every rank has written its count for the layer, so a rank that is late delays all. The baseline waits
in the same way: each expert server begins a layer when it has the rows of every group. Every row goes to every server, so no rank is
without rows there, and no count is zero.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Sequence
from typing import Any

from flowrt.bench.cases.patterns import Comparison, Runs, Variant, measure, one_link
from flowrt.bench.measure.benchmark import Result
from flowrt.bench.report.figures import Figure, Target

GROUPS, SERVERS, NUM_EXPERTS = 4, 4, 8
ATTENTION_SECONDS, EXPERTS_SECONDS, EXCHANGE_SECONDS = 100e-6, 25e-6, 10e-6
STALL_SECONDS = 0.2
STALL_TARGET = 1.05
NUM_LAYERS = 8
NEW_TOKENS = 16


def measure_dispatch(virtual: bool, dilation: float) -> AsyncIterator[Result]:
    variants = [
        _variant(name, all_ranks, stopped)
        for all_ranks, name in ((False, "per client"), (True, "counts of all ranks"))
        for stopped in ("", "attention.0")
    ]
    shape = Comparison(variants, _figures, NUM_LAYERS, NUM_EXPERTS, NEW_TOKENS, top_k=NUM_EXPERTS)
    return measure([shape], virtual, dilation)


def _variant(name: str, all_ranks: bool, stopped: str) -> Variant:
    experts: dict[str, Any] = {"servers": SERVERS}
    if all_ranks:
        experts["batches"] = {"min_tags": GROUPS, "max_wait_seconds": 5 * STALL_SECONDS}
    compute = {"attention": {"row_seconds": ATTENTION_SECONDS}, "experts": {"row_seconds": EXPERTS_SECONDS * SERVERS / NUM_EXPERTS}}
    keys = {
        "deploy": {"attention": {"groups": GROUPS}, "experts": experts, "links": one_link(EXCHANGE_SECONDS)},
        "emulate": {"compute": compute},
        "reliability": {"dead_seconds": 3600},  # the stalled group is not fenced
    }
    return Variant(f"{name}, one stalled" if stopped else name, keys, GROUPS, stopped, STALL_SECONDS)


def _figures(runs: Runs) -> Sequence[Figure]:
    # The median over the sequences is that of the groups that do not stall: one in GROUPS does.
    steps = [[statistics.median(run.step_seconds) * 1e6 for run in each] for each in runs]
    client, client_stalled, all_ranks, all_stalled = steps
    return [
        Figure.paired("step of the others, one client stalled", "us", client_stalled, "undisturbed", client, Target(STALL_TARGET)),
        Figure.paired("the same with counts of all ranks", "us", all_stalled, "undisturbed", all_ranks),
        Figure.paired("undisturbed step, per client", "us", client, "all ranks", all_ranks),
    ]
