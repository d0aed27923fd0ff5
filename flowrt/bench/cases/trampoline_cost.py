"""Trampolines beside the direct exchange: messages per sender, bytes on all links, and decode steps over the number of servers and groups
(xDeepServe section 3.3, Fig. 8).

There a group updates the metadata of each server in each layer, with rows or without. flowrt sends no message without rows, so its direct
messages are fewer than the servers: both are compared with those to the trampolines.

Links have the latency and the cost per message of `ub`, and a row takes as long on them as one of ROW_BYTES. Each group decodes so many
rows per layer that they go to nearly every server. The groups take their steps at different times, or, for the worst case, at the same
time: then all messages of a hop meet at its NICs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flowrt.bench.cases.patterns import Comparison, Runs, Variant, measure
from flowrt.bench.cases.small_model import HIDDEN
from flowrt.bench.measure.benchmark import Result
from flowrt.bench.measure.modelled import ModelledRun
from flowrt.bench.report.figures import Figure, Target
from flowrt.costs.links import PROFILES

UB = PROFILES["ub"]
ROW_BYTES = 7168  # of DeepSeek-R1, as INT8
ATTENTION_SECONDS, PAIR_SECONDS = 100e-6, 0.2e-6  # per call, and per row of an expert
ROWS, ROWS_IN_STEP, TOP_K = 16, 64, 8  # of a group; the latter go to all 32 servers
SPREAD_SECONDS = 200e-6  # about a layer: the groups begin within it
NUM_LAYERS, NEW_TOKENS = 2, 5
SIZES = ((16, 4), (32, 2), (32, 8), (48, 8), (64, 2), (64, 8))  # servers and groups, in virtual time
TARGET_SIZE, MESSAGES_TARGET = (32, 8), 0.25  # past the crossover; the size between processes
OS_PROCESSES = 8  # that have the 40 workers
PROCESS_EXPERTS_SECONDS = 5e-6  # per call, between processes: the rows of a call alone cost less than this machine needs for them


def measure_trampoline(virtual: bool, dilation: float) -> AsyncIterator[Result]:
    if virtual:
        comparisons = [*(_comparison(*size) for size in SIZES), _comparison(*TARGET_SIZE, in_step=True)]
    else:
        comparisons = [_comparison(*TARGET_SIZE, virtual=False)]
    return measure(comparisons, virtual, dilation)


def _comparison(servers: int, groups: int, in_step: bool = False, virtual: bool = True) -> Comparison:
    variants = [_variant(servers, groups, key, in_step, virtual) for key in ("always", "never")]
    return Comparison(variants, partial(_figures, servers, groups, in_step), NUM_LAYERS, servers, NEW_TOKENS, TOP_K)


def _variant(servers: int, groups: int, trampoline: str, in_step: bool, virtual: bool) -> Variant:
    rows = ROWS_IN_STEP if in_step else ROWS
    link = {
        "latency_seconds": UB.latency_seconds,
        "message_seconds": UB.message_seconds,
        "bandwidth_bytes_per_second": UB.bandwidth_bytes_per_second * 4 * HIDDEN / ROW_BYTES,
    }
    compute = {
        "attention": {"fixed_seconds": ATTENTION_SECONDS},
        "experts": {"fixed_seconds": 0.0 if virtual else PROCESS_EXPERTS_SECONDS, "row_seconds": PAIR_SECONDS},
    }
    keys: dict[str, Any] = {
        "deploy": {
            "attention": {"groups": groups},
            "experts": {"servers": servers, "trampoline": trampoline},
            "links": {"attention-experts": {"link": link}},
            "processes": "many" if virtual else OS_PROCESSES,
        },
        "emulate": {"compute": compute},
        "limits": {"max_num_seqs": rows},
    }
    apart_seconds = 0.0 if in_step else SPREAD_SECONDS / groups
    return Variant(f"{servers} servers, {groups} groups, trampoline: {trampoline}", keys, groups * rows, apart_seconds=apart_seconds)


def _figures(servers: int, groups: int, in_step: bool, runs: Runs) -> Sequence[Figure]:
    size = f"{servers} servers, {groups} groups{' in step' if in_step else ''}"
    bundled, direct = ([run.mean_step_seconds * 1e6 for run in each] for each in runs)
    about = {} if in_step else {"curve": f"{groups} groups", "x": servers}
    figures = [replace(Figure.paired(f"{size}: decode step", "us", bundled, "direct", direct), about=about)]
    updates = [[_sent(run, "dispatch.")[0] for run in each] for each in runs]
    num_bytes = [[_sent(run)[1] / 1024 for run in each] for each in runs]
    target = Target(MESSAGES_TARGET) if (servers, groups) == TARGET_SIZE else None
    figures.append(Figure.paired(f"{size}: messages of a group per layer", "", updates[0], "direct", updates[1]))
    of_all = [each / servers for each in updates[0]]
    figures.append(Figure.alone(f"{size}: metadata updates of a group", "of one per server", of_all, target))
    figures.append(Figure.paired(f"{size}: KiB of a layer, on all links", "KiB", num_bytes[0], "direct", num_bytes[1]))
    return figures


def _sent(run: ModelledRun, source: str = "") -> tuple[float, float]:
    """Messages and bytes of a step of a group, per layer, on the edges that begin with the node `source`."""
    found = [sent for edge, sent in run.sent.items() if f".{source}" in edge.partition(" -> ")[0]]
    messages, num_bytes = (sum(column) / NUM_LAYERS for column in zip(*found, strict=True))
    return messages, num_bytes
