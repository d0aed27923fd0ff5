"""Dispatch per client against counts of all ranks: what one client that stalls costs the others (xDeepServe section 3.2).

There a receiver of rows waits until every rank has written its count for the layer, so a rank that is late delays all. The baseline waits
in the same way: each expert server begins a layer when it has the rows of every group. Every row goes to every server, so no rank is
without rows there, and no count is zero.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from flowrt.bench.cases.patterns import Comparison, Runs, Variant, measure, one_link
from flowrt.bench.measure.benchmark import Result
from flowrt.bench.report.figures import Figure, Target

GROUPS, SERVERS, NUM_EXPERTS = 4, 4, 8
ATTENTION_SECONDS, EXPERTS_SECONDS, EXCHANGE_SECONDS = 100e-6, 25e-6, 10e-6
STALL_SECONDS = (0.05, 0.1, 0.2)  # the last one between processes
STALL_TARGET = 1.05
NAMES = "per client", "counts of all ranks"
NUM_LAYERS = 8
NEW_TOKENS = 16


def measure_dispatch(virtual: bool, dilation: float) -> AsyncIterator[Result]:
    stalls = STALL_SECONDS if virtual else STALL_SECONDS[-1:]
    variants = [_variant(all_ranks, seconds) for seconds in (0.0, *stalls) for all_ranks in (False, True)]
    shape = Comparison(variants, partial(_figures, stalls), NUM_LAYERS, NUM_EXPERTS, NEW_TOKENS, top_k=NUM_EXPERTS)
    return measure([shape], virtual, dilation)


def _variant(all_ranks: bool, stall_seconds: float) -> Variant:
    experts: dict[str, Any] = {"servers": SERVERS}
    if all_ranks:
        experts["batches"] = {"min_tags": GROUPS, "max_wait_seconds": 5 * STALL_SECONDS[-1]}
    compute = {"attention": {"row_seconds": ATTENTION_SECONDS}, "experts": {"row_seconds": EXPERTS_SECONDS * SERVERS / NUM_EXPERTS}}
    keys = {
        "deploy": {"attention": {"groups": GROUPS}, "experts": experts, "links": one_link(EXCHANGE_SECONDS)},
        "emulate": {"compute": compute},
        "reliability": {"dead_seconds": 3600},  # the stalled group is not fenced
    }
    name = NAMES[all_ranks]
    if not stall_seconds:
        return Variant(name, keys, GROUPS)
    return Variant(f"{name}, one stalled for {stall_seconds * 1e3:g} ms", keys, GROUPS, "attention.0", stall_seconds)


def _figures(stalls: Sequence[float], runs: Runs) -> Sequence[Figure]:
    # The median over the sequences is that of the groups that do not stall: one in GROUPS does.
    steps = [[statistics.median(run.step_seconds) * 1e6 for run in each] for each in runs]
    undisturbed = steps[:2]
    figures = []
    for number, seconds in enumerate(stalls, 1):
        for all_ranks, stalled in enumerate(steps[2 * number : 2 * number + 2]):
            name = f"step of the others, one client stalled {seconds * 1e3:g} ms, {NAMES[all_ranks]}"
            target, about = None if all_ranks else Target(STALL_TARGET), {"curve": NAMES[all_ranks], "x": seconds * 1e3}
            figures.append(Figure.paired(name, "us", stalled, "undisturbed", undisturbed[all_ranks], target, **about))
    return [*figures, Figure.paired(f"undisturbed step, {NAMES[0]}", "us", undisturbed[0], NAMES[1], undisturbed[1])]
