"""What strict numerics cost: two graphs that differ in `numerics:` alone, and the check at the start, timed alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowrt.api import open_graph, read_graph
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.decode import agreement_record, measure_batch
from flowrt.bench.measure.benchmark import Results, open_all
from flowrt.bench.measure.decoding import GraphSide, TokenAgreement, check_limits, prompts_of
from flowrt.bench.peers.process import start_peer
from flowrt.bench.report.report import ReportSection, print_progress
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.numerics import is_exact, numerics_text
from flowrt.operators.families.registry import read_model_config

NUM_PROOFS = 3
NUM_SERVERS = 2  # of the graph that is used when none is given
PAGE_SIZE = 16


def read_graphs(model: Path, graph_file: Path | None, dtype: str, options: DecodeOptions) -> tuple[Graph, Graph]:
    """(strict, fast): the same processes, threads, limits and placement. Without a graph file: one group and two expert servers."""
    overrides = [f"model.dtype={dtype}", "numerics=strict", *options.overrides]
    if graph_file is not None:
        strict = read_graph(graph_file, overrides, model)
    else:
        pages = max(options.batch) * -(-(options.prompt_tokens + options.new_tokens) // PAGE_SIZE)
        limits = {"max_num_seqs": max(options.batch), "kv_pages": pages, "page_size": PAGE_SIZE, "max_tokens": options.new_tokens}
        keys = {"flowrt": 1, "model": {"path": str(model.absolute())}, "deploy": {"experts": {"servers": NUM_SERVERS}}, "limits": limits}
        strict = read_graph(keys, overrides)
    if not is_exact(strict):
        raise UserError(f"roles have numerics of their own ({numerics_text(strict)}); remove them for this benchmark")
    check_limits(strict, options.batch, options.prompt_tokens, options.new_tokens)
    return strict, strict.replace(numerics="fast", role_numerics={})


async def measure(model: Path, graph_file: Path | None, options: DecodeOptions) -> Results:
    vocab_size = read_model_config(model).vocab_size
    for dtype in options.dtype:
        graphs = read_graphs(model, graph_file, dtype, options)
        num_threads = next((number for number in graphs[0].threads.values() if isinstance(number, int)), 1)
        async with start_peer("the check of strict numerics", __name__, model, dtype, num_threads) as (_, facts):
            seconds: list[float] = facts["seconds"]
        agreements: dict[str, TokenAgreement] = {}
        print_progress(f"{dtype}: loading two graphs")
        async with open_all(map(open_graph, graphs)) as running:
            sides = [GraphSide(each, graph.numerics) for each, graph in zip(running, graphs, strict=True)]
            for batch in options.batch:
                prompts = prompts_of(batch, options.prompt_tokens, vocab_size)
                async for result in measure_batch(sides, prompts, dtype, options, agreements):
                    yield result
            blocks = {name: each.strict_blocks for name, each in (await sides[0].graph.statistics()).items()}
        for text in dict.fromkeys(blocks.values()):
            yield f"{dtype}, {', '.join(name for name in blocks if blocks[name] == text)}: {text}"
        median = statistics.median(seconds)
        yield f"check of all functions at the start, {dtype}: {median:.2f} s with {num_threads} threads, median of {len(seconds)}"
        record = {"tokens": agreement_record(agreements), "blocks": blocks, "threads": num_threads, "proof_seconds": seconds}
        yield ReportSection(dtype, record)


@contextmanager
def open_peer(model: str, dtype: str, num_threads: str) -> Iterator[tuple[dict[str, Any], None]]:
    """How long the check of every function of a model takes, NUM_PROOFS times, in a process of its own."""
    import torch

    from flowrt.operators.proof import prove_model

    torch.set_num_threads(int(num_threads))
    seconds = []
    for _ in range(NUM_PROOFS):
        start = time.perf_counter()
        prove_model(Path(model), dtype)
        seconds.append(time.perf_counter() - start)
    yield {"seconds": seconds}, None
