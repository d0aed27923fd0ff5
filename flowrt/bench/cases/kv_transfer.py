"""What a KV transfer costs a request: from its first token, which the prefill worker sends when the prompt is computed, to its second one.

The peer is a group that computes the prompt itself: there, the same time is one step. What is longer is the exposed time of the transfer.
KV that is pulled while the prompt is computed is measured, and KV that is pulled when the prompt is complete.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from flowrt.api import RunningGraph, open_graph, read_graph
from flowrt.bench.cases.case_options import LatencyOptions, StreamOptions
from flowrt.bench.cases.latency import measure_streams
from flowrt.bench.cases.small_model import write_small_model
from flowrt.bench.measure.benchmark import Results, Trial, open_all
from flowrt.bench.measure.decoding import follow_tokens
from flowrt.bench.report.figures import Figure, Target
from flowrt.bench.report.report import print_progress
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.operators.families.registry import read_model_config
from flowrt.sampling_params import SamplingParams
from flowrt.system.machine_limits import usable_cores

SIZES = {"num_layers": 8, "num_experts": 4, "hidden": 512, "width": 256, "heads": 8, "kv_heads": 4, "head_dim": 64}  # 16 KiB of KV a token
EXPOSED = Target(0.1)  # of the time to the first token
BANDWIDTH = Target(0.5, at_most=False)  # of one core's memcpy
INTERFERENCE = Target(1 / 3)  # of the 99th percentile between tokens where a group does both
PAGE_SIZE = 16
_LINKS = {"prefill-attention": {"transport": "shm"}}
_STREAM_PROMPT = 16  # tokens of the prompts of sequences that run while others arrive
MIN_SECONDS = 1e-6  # of a transfer: two measured times may differ by less than nothing


@dataclass(frozen=True)
class _TokenTimes:
    """Seconds to the first token, and from there to the second."""

    first: float
    second: float


def read_graphs(model: Path, num_tokens: int, overrides: Sequence[str]) -> list[Graph]:
    """Reads three graphs: prefill workers whose KV is pulled while they compute, or when it is complete, and no prefill worker."""
    limits = {"kv_pages": 2 * (num_tokens // PAGE_SIZE + 1), "page_size": PAGE_SIZE}
    keys: dict[str, Any] = {"flowrt": 1, "model": {"path": str(model.absolute())}, "limits": limits}
    variants: list[dict[str, Any]] = [{"workers": 1}, {"workers": 1, "stream": False}, {"workers": 0}]
    return [read_graph({**keys, "deploy": {"prefill": prefill, "links": _LINKS}}, overrides) for prefill in variants]


async def measure(model: Path | None, num_tokens: int, overrides: Sequence[str]) -> Results:
    with TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = model or write_small_model(Path(folder), **SIZES)
        config = read_model_config(model)
        if num_tokens + 2 > config.max_position_embeddings:
            raise UserError(f"{model}: the model has {config.max_position_embeddings} positions, fewer than {num_tokens} tokens need")
        num_bytes = num_tokens * config.kv_bytes
        print_progress("loading three graphs")
        async with open_all(map(open_graph, read_graphs(model, num_tokens, overrides))) as graphs:
            sides: list[Any] = [partial(_second_token, graph, random.Random(0), config.vocab_size, num_tokens) for graph in graphs]
            source, target = np.ones(num_bytes, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8)
            yield Trial([*sides, partial(_copy_seconds, source, target)], partial(_figures, num_tokens, num_bytes))


def read_interference_graphs(model: Path, num_tokens: int, options: StreamOptions, overrides: Sequence[str]) -> dict[str, Graph]:
    """A prefill worker on the first usable core and a group on the second; then groups on both, by the rows of their steps. The experts are
    inside. Raises UserError where no process can have a core of its own."""
    if usable_cores() < 2 or not hasattr(os, "sched_getaffinity"):
        raise UserError("a prefill worker with a core of its own needs two cores, and a system that binds processes to cores")
    first, second = sorted(os.sched_getaffinity(0))[:2]
    pages = (options.streams + 2) * -(-(_STREAM_PROMPT + options.new_tokens) // PAGE_SIZE) + 2 * -(-num_tokens // PAGE_SIZE)
    limits = {"kv_pages": pages, "page_size": PAGE_SIZE, "max_num_seqs": options.streams + 2}
    keys: dict[str, Any] = {"flowrt": 1, "model": {"path": str(model.absolute())}}
    apart = {"prefill": {"workers": 1, "cores": first}, "attention": {"cores": second}, "links": _LINKS}
    graphs = {"prefill apart": read_graph({**keys, "deploy": apart, "limits": limits}, overrides)}
    for rows in options.chunks:
        together = {"attention": {"cores": f"{first},{second}"}}
        sizes = {**limits, "max_num_batched_tokens": rows}
        graphs[f"together, steps of {rows}"] = read_graph({**keys, "deploy": together, "limits": sizes}, overrides)
    return graphs


async def measure_interference(model: Path | None, num_tokens: int, options: StreamOptions, overrides: Sequence[str]) -> Results:
    """Inter-token latency of sequences that run while prompts of so many tokens arrive."""
    with TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = model or write_small_model(Path(folder), **SIZES)
        graphs, streams = read_interference_graphs(model, num_tokens, options, overrides), options.streams
        load = LatencyOptions(streams=streams, prompt_tokens=_STREAM_PROMPT, new_tokens=options.new_tokens, arriving_tokens=num_tokens)
        async with aclosing(measure_streams(graphs, load, INTERFERENCE)) as results:
            async for result in results:
                yield result


async def _second_token(graph: RunningGraph, draw: random.Random, vocab_size: int, num_tokens: int) -> _TokenTimes:
    prompt = draw.choices(range(3, vocab_size), k=num_tokens)
    begin = time.perf_counter()
    index = await graph.submit(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    times = [time.perf_counter() async for _ in follow_tokens(graph, index)]
    return _TokenTimes(times[0] - begin, times[1] - times[0])


async def _copy_seconds(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> float:
    begin = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - begin


def _figures(num_tokens: int, num_bytes: int, values: Sequence[Sequence[Any]]) -> list[Figure]:
    streamed, complete, together, memcpy = values
    figures: list[Figure] = []
    for name, apart, target in (("while it is computed", streamed, EXPOSED), ("when it is complete", complete, None)):
        exposed = [ours.second - theirs.second for ours, theirs in zip(apart, together, strict=True)]
        gaps = [[each.second * 1e3 for each in side] for side in (apart, together)]
        shares = [each / ours.first for each, ours in zip(exposed, apart, strict=True)]
        figures += [
            Figure.paired(f"first to second token, {num_tokens} tokens, pulled {name}", "ms", gaps[0], "without prefill worker", gaps[1]),
            Figure.alone("  exposed time of the transfer", "ms", [each * 1e3 for each in exposed]),
            Figure.alone("  of the time to the first token", "", shares, target),
        ]
    rates = [[num_bytes / max(each, MIN_SECONDS) / 1e9 for each in side] for side in (exposed, memcpy)]
    seconds = [[(each.first + each.second) * 1e3 for each in side] for side in (streamed, complete)]
    return [
        *figures,
        Figure.paired(f"  {num_bytes / 1e6:.0f} MB in that time", "GB/s", rates[0], "memcpy of one core", rates[1], BANDWIDTH),
        Figure.paired("second token, pulled while it is computed", "ms", seconds[0], "when it is complete", seconds[1]),
    ]
