"""Where the experts are, with as many processes each time: in the processes of the groups, a share in each (co-located); in servers of
their own; or all of them in each group (xDeepServe section 3.2, EaaS section 3.1).

All variants decode the same batch. With experts in half of the processes, the other half has the attention of all sequences. With all
experts in each group, each process holds and reads the weights of all experts that its rows need.

A last comparison lets servers wait for the requests of all groups (EaaS section 3.3), so that they read the weights of an expert once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from flowrt.bench.cases.patterns import Comparison, Runs, Variant, measure
from flowrt.bench.measure.benchmark import Result
from flowrt.bench.measure.modelled import ModelledRun
from flowrt.bench.report.figures import Figure

PROCESSES, NUM_EXPERTS, BATCH = 6, 12, 24
ROW_SECONDS, PAIR_SECONDS = 25e-6, 1e-6  # of attention, and per row of an expert
EXPERT_SECONDS = (5e-6, 10e-6, 20e-6, 60e-6)  # to read the weights of an expert; the first and last between processes
WAIT_SECONDS = 200e-6
NUM_LAYERS, NEW_TOKENS = 4, 10


def measure_colocated(virtual: bool, dilation: float) -> AsyncIterator[Result]:
    comparisons = [_comparison(seconds) for seconds in (EXPERT_SECONDS if virtual else EXPERT_SECONDS[::3])]
    return measure([*comparisons, _waiting(EXPERT_SECONDS[-1])], virtual, dilation)


def _waiting(expert_seconds: float) -> Comparison:
    groups = servers = PROCESSES // 2
    batches = {"min_tags": groups, "max_wait_seconds": WAIT_SECONDS}
    variants = [
        _variant("servers that wait", groups, {"servers": servers, "batches": batches}, expert_seconds, micro_batches=1),
        _variant("servers that do not wait", groups, {"servers": servers}, expert_seconds, micro_batches=1),
    ]

    def figures(runs: Runs) -> Sequence[Figure]:
        speeds, busy = ([[get(run) for run in each] for each in runs] for get in (_speed, _busy))
        return [
            Figure.paired("servers that wait", "tokens/s", speeds[0], "without", speeds[1]),
            Figure.paired("the same, experts busy", "", busy[0], "without", busy[1]),
        ]

    return Comparison(variants, figures, NUM_LAYERS, NUM_EXPERTS, NEW_TOKENS)


def _speed(run: ModelledRun) -> float:
    return run.tokens_per_second


def _busy(run: ModelledRun) -> float:
    return run.busy_share("experts")


def _comparison(expert_seconds: float) -> Comparison:
    half = PROCESSES // 2
    variants = [
        _variant("co-located", PROCESSES, {"servers": "colocated"}, expert_seconds),
        _variant(f"{half} servers", half, {"servers": half}, expert_seconds),
        _variant("experts in each group", PROCESSES, {"servers": 0}, expert_seconds),
    ]
    return Comparison(variants, partial(_figures, expert_seconds), NUM_LAYERS, NUM_EXPERTS, NEW_TOKENS)


def _variant(name: str, groups: int, experts: Mapping[str, Any], expert_seconds: float, micro_batches: int = 2) -> Variant:
    """Micro-batches hide the exchange, where there is one."""
    attention = {"groups": groups, "micro_batches": micro_batches if experts["servers"] else 1}
    costs = {"attention": {"row_seconds": ROW_SECONDS}, "experts": {"row_seconds": PAIR_SECONDS, "expert_seconds": expert_seconds}}
    keys = {
        "deploy": {"attention": attention, "experts": experts, "links": {"attention-experts": {"link": "ub"}}},
        "emulate": {"compute": costs},
    }
    return Variant(f"{name}, {1e6 * expert_seconds:g} us per expert", keys, BATCH)


def _figures(expert_seconds: float, runs: Runs) -> Sequence[Figure]:
    colocated, *others = [[_speed(run) for run in each] for each in runs]
    name, x = f"{1e6 * expert_seconds:g} us per expert: co-located", 1e6 * expert_seconds
    return [
        Figure.paired(name, "tokens/s", colocated, peer, other, curve=f"to {peer}", x=x)
        for peer, other in zip(("servers of their own", "experts in each group"), others, strict=True)
    ]
