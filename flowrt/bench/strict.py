"""What strict numerics cost: `flowrt bench strict MODEL`.

Here: Options, `measure`: two graphs that differ in `numerics:` alone, in alternating pairs, and the check that strict makes at the
start, timed alone. Not here: the pairs of a batch size (decode.py), what strict does (operators/row_blocks.py, docs/numerics.md).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from flowrt.api import open_graph, read_graph
from flowrt.bench.decode import Found, GraphPeer, Say, measure_cell
from flowrt.bench.decode import Options as DecodeOptions
from flowrt.bench.decoding import prompts_of
from flowrt.bench.graph_side import GraphSide, check_room
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.operators.families.registry import read_model_config

NUM_PROOFS = 3
NUM_SERVERS = 2  # of the graph that is used when none is given


@dataclass(frozen=True, kw_only=True)
class Options:
    """`graph` None: one group and two expert servers, with room for the largest batch."""

    model: Path
    graph: Path | None = None
    dtypes: Sequence[str] = ("float32", "bfloat16")
    batches: Sequence[int] = (1, 8, 32)
    prompt_tokens: int = 64
    new_tokens: int = 32
    num_pairs: int = 20
    overrides: Sequence[str] = ()

    def as_decode(self) -> DecodeOptions:
        """The same, for the pairs."""
        return DecodeOptions(
            model=self.model,
            graph=self.graph or Path(),
            dtypes=self.dtypes,
            batches=self.batches,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            num_pairs=self.num_pairs,
        )


@dataclass
class StrictFound:
    """Of one dtype. `pairs`: tokens per second of strict and fast, and whether their tokens agree; `blocks` by process, for people;
    `proof_seconds`: of the check of all functions of the model, with one process's threads, NUM_PROOFS times."""

    dtype: str
    pairs: Found
    num_threads: int
    blocks: dict[str, str] = field(default_factory=dict)
    proof_seconds: list[float] = field(default_factory=list)


async def measure(options: Options, say: Say) -> AsyncIterator[StrictFound]:
    """Each dtype, one after the other."""
    for dtype in options.dtypes:
        yield await _measure_dtype(options, dtype, say)


def graphs_of(options: Options, dtype: str) -> tuple[Graph, Graph]:
    """(strict, fast): the same processes, threads, limits and placement. Raises GraphError, as for any graph file."""
    overrides = [f"model.dtype={dtype}", "numerics=strict", *options.overrides]
    if options.graph is not None:
        strict = read_graph(options.graph, overrides, options.model)
    else:
        pages = max(options.batches) * -(-(options.prompt_tokens + options.new_tokens) // 16)
        limits = {"max_num_seqs": max(options.batches), "kv_pages": pages, "page_size": 16, "max_tokens": options.new_tokens}
        document = {"flowrt": 1, "model": {"path": str(options.model.absolute())}, "deploy": {"experts": {"servers": NUM_SERVERS}}}
        with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
            path = Path(folder) / "graph.yaml"
            path.write_text(json.dumps({**document, "limits": limits}))
            strict = read_graph(path, overrides)
    return strict, replace(strict, numerics="fast")


async def _measure_dtype(options: Options, dtype: str, say: Say) -> StrictFound:
    strict, fast = graphs_of(options, dtype)
    check_room(strict, list(options.batches), options.prompt_tokens, options.new_tokens)
    num_threads = next((number for number in strict.threads.values() if isinstance(number, int)), 1)
    found = StrictFound(dtype, Found(dtype), num_threads)
    found.proof_seconds = await proof_seconds(options.model, dtype, num_threads)
    vocab_size = read_model_config(options.model).vocab_size
    async with AsyncExitStack() as stack:
        say(f"{dtype}: two graphs load")
        sides = [GraphPeer(GraphSide(await stack.enter_async_context(open_graph(graph))), graph.numerics) for graph in (strict, fast)]
        for batch in options.batches:
            prompts = prompts_of(batch, options.prompt_tokens, vocab_size)
            await measure_cell(found.pairs, options.as_decode(), batch, prompts, sides, strict, say)
        statistics = await sides[0].side.graph.statistics()
    found.blocks = {name: each.strict_blocks for name, each in statistics.items()}
    return found


async def proof_seconds(model: Path, dtype: str, num_threads: int) -> list[float]:
    """How long the check of every function of a model takes, NUM_PROOFS times, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = (sys.executable, "-m", "flowrt.bench.strict", str(model), dtype, str(num_threads))
    child = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=environment)
    out, errors = await child.communicate()
    if child.returncode != 0:
        raise UserError(f"the check of strict numerics failed: {errors.decode(errors='replace').strip().splitlines()[-1]}")
    seconds: list[float] = json.loads(out)
    return seconds


def _prove(model: Path, dtype: str, num_threads: int) -> list[float]:
    import time

    import torch

    from flowrt.operators.proof import prove_model

    torch.set_num_threads(num_threads)
    times = [time.perf_counter()]
    for _ in range(NUM_PROOFS):
        prove_model(model, dtype)
        times.append(time.perf_counter())
    return [end - start for start, end in pairwise(times)]


if __name__ == "__main__":
    print(json.dumps(_prove(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
