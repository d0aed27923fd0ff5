"""What the prefix cache saves when a prompt begins as an earlier one, and what it costs when none does: one graph with and without it.

Prompts of a pair are new to both graphs. The cache is full from the third pair on, so that each prompt evicts older ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from flowrt.api import RunningGraph, open_graph, read_graph
from flowrt.bench.cases.small_model import write_small_model
from flowrt.bench.measure.benchmark import Results, Trial, open_all
from flowrt.bench.measure.decoding import GraphSide, prompts_of
from flowrt.bench.report.figures import Figure, Target
from flowrt.bench.report.report import print_progress
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.operators.families.registry import read_model_config

NAMES = "with the prefix cache", "without"
SHARE = 0.8  # of the rows that are not computed
COST = Target(1.03)
BATCH, NEW_TOKENS = 8, 32  # of decoding
SIZES = {"num_layers": 4, "num_experts": 8, "hidden": 256, "width": 256}  # of the model, when none is given
PAGE_SIZE, CHUNK_TOKENS = 16, 64


@dataclass(frozen=True)
class _Prompted:
    """Seconds to the first token of the first and of the second request of a pair, and both tokens."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[Sequence[int]] = field(default_factory=list)


def read_graphs(model: Path, numerics: str, num_tokens: int, overrides: Sequence[str]) -> tuple[Graph, Graph]:
    """(with, without): one group, with pages for three prompts of so many tokens."""
    limits = {"kv_pages": 3 * -(-num_tokens // PAGE_SIZE), "page_size": PAGE_SIZE, "chunk_tokens": CHUNK_TOKENS, "max_num_seqs": BATCH}
    keys = {"flowrt": 1, "model": {"path": str(model.absolute())}, "numerics": numerics, "limits": limits}
    graph = read_graph(keys, overrides)
    cached, uncached = (graph.replace(limits=graph.limits.replace(enable_prefix_caching=each)) for each in (True, False))
    return cached, uncached


async def measure(model: Path | None, prefix: int, suffix: int, overrides: Sequence[str]) -> Results:
    with TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = model or write_small_model(Path(folder), **SIZES)
        config = read_model_config(model)
        if prefix + suffix >= config.max_position_embeddings:
            raise UserError(f"{model}: the model has {config.max_position_embeddings} positions, fewer than {prefix} + {suffix} tokens")
        for numerics in ("fast", "strict"):
            print_progress(f"{numerics}: loading two graphs")
            async with open_all(map(open_graph, read_graphs(model, numerics, prefix + suffix, overrides))) as running:
                sides = [partial(_prompt_twice, graph, random.Random(numerics), config.vocab_size, prefix, suffix) for graph in running]
                yield Trial(sides, partial(_first_token_figures, numerics, Target(suffix / (SHARE * (prefix + suffix)))))
                decoding = [partial(_decode, GraphSide(graph), prompts_of(BATCH, suffix, config.vocab_size)) for graph in running]
                name = f"seconds per token, {BATCH} sequences, full cache, {numerics}"
                yield Trial.paired(name, "us", decoding[0], NAMES[1], decoding[1], COST)


async def _prompt_twice(graph: RunningGraph, draw: random.Random, vocab_size: int, prefix: int, suffix: int) -> _Prompted:
    """Two requests one after the other with new prompts, whose first `prefix` tokens are equal."""
    tokens = draw.choices(range(3, vocab_size), k=prefix + 2 * suffix)
    found = _Prompted()
    for prompt in (tokens[: prefix + suffix], tokens[:prefix] + tokens[prefix + suffix :]):
        begin = time.perf_counter()
        completion = await graph.complete(prompt, max_tokens=1, ignore_eos=True)
        found.seconds.append(time.perf_counter() - begin)
        found.tokens.append(completion.token_ids)
    return found


def _first_token_figures(numerics: str, target: Target, values: Sequence[Sequence[_Prompted]]) -> list[Figure]:
    if numerics == "strict" and [each.tokens for each in values[0]] != [each.tokens for each in values[1]]:
        raise UserError("strict numerics: tokens differ with and without the prefix cache")
    first, second = ([[each.seconds[number] * 1e3 for each in side] for side in values] for number in (0, 1))
    return [
        Figure.paired(f"first token, shared beginning, {numerics}", "ms", second[0], NAMES[1], second[1], target),
        Figure.paired(f"first token, new prompt, {numerics}", "ms", first[0], NAMES[1], first[1], COST),
    ]


async def _decode(side: GraphSide, prompts: list[list[int]]) -> float:
    """Microseconds per token."""
    return 1e6 / (await side.run(prompts, NEW_TOKENS)).speed("decode", 0)
