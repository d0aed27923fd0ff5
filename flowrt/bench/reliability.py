"""What watching costs while nothing happens: `flowrt bench reliability GRAPH`.

Here: Options, `graphs_of`, `measure`: a graph with detector, failover and hedging, and the same one without, in alternating pairs. Not
here: what they do when something happens (`flowrt chaos`), one run of one graph (graph_side.py), the statistics (pairs.py).

Both graphs are loaded, and the one that is not asked still makes its beats, of some 15 us each: this small part of what is measured falls
on both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from flowrt.api import open_graph, read_graph
from flowrt.bench.decoding import Comparison, Run, compare, prompts_of
from flowrt.bench.graph_side import GraphSide, check_room
from flowrt.bench.pairs import Target, take_turns
from flowrt.bench.report import Figure
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.recovery import may_die
from flowrt.operators.families.registry import read_model_config

KEYS = {"detector": ("true", "false"), "recovery": ("fine", "off"), "hedge": ("true", "false")}  # key -> on, off
TARGET = Target(0.97, at_most=False)  # of throughput without
SETTLE_SECONDS = 0.05  # threads that have computed may spin for some milliseconds before they sleep

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. `batch` prompts at a time, each answered with `new_tokens`."""

    graph: Path
    model: Path | None = None
    overrides: Sequence[str] = ()
    batch: int = 8
    prompt_tokens: int = 16
    new_tokens: int = 64
    num_pairs: int = 20


def graphs_of(options: Options) -> tuple[Graph, Graph]:
    """(with, without): they differ in `KEYS` alone. Raises UserError for what cannot be measured, before anything starts."""
    for name in ("batch", "prompt_tokens", "num_pairs"):
        if (number := getattr(options, name)) < 1:
            raise UserError(f"--{name.removeprefix('num_').replace('_', '-')} is {number}; give a number of 1 or more")
    if options.new_tokens < 2:
        raise UserError(f"--new-tokens is {options.new_tokens}; give a number of 2 or more")
    switched = [[*options.overrides, *(f"reliability.{key}={words[side]}" for key, words in KEYS.items())] for side in (0, 1)]
    on, off = (read_graph(options.graph, overrides, options.model) for overrides in switched)
    if on.model is None:
        raise UserError(f"{options.graph}: this graph serves no model; this benchmark asks a model's")
    if not may_die(on):
        raise UserError(f"{options.graph}: no process of it may die, so nothing is watched; use --set deploy.experts.servers=3")
    check_room(on, [options.batch], options.prompt_tokens, options.new_tokens)
    return on, off


async def measure(options: Options, graphs: tuple[Graph, Graph], say: Say) -> AsyncIterator[Figure | str]:
    """The throughput of `graphs_of` in turns, and whether their answers agree."""
    model = graphs[0].model
    assert model is not None
    prompts = prompts_of(options.batch, options.prompt_tokens, read_model_config(Path(model.path)).vocab_size)
    say("two graphs load")
    async with AsyncExitStack() as stack:
        sides = [GraphSide(await stack.enter_async_context(open_graph(graph))) for graph in graphs]
        runs: list[list[Run]] = [[], []]

        def turn(number: int) -> Callable[[], Awaitable[float]]:
            async def measured() -> float:
                await asyncio.sleep(SETTLE_SECONDS)
                run = await sides[number].run(prompts, options.new_tokens)
                runs[number].append(run)
                if len(runs[0]) == len(runs[1]) > 1:
                    both = ", ".join(f"{name} {tokens_per_second(each[-1]):.1f}" for name, each in zip(("on", "off"), runs, strict=True))
                    say(f"pair {len(runs[0]) - 1} of {options.num_pairs}: {both} tokens/s")
                return tokens_per_second(run)

            return measured

        on, off = await take_turns([turn(0), turn(1)], options.num_pairs)
    agreement = Comparison()
    for ours, theirs in zip(*runs, strict=True):
        compare(ours, theirs, agreement)
    yield Figure.paired(f"throughput, {options.batch} at a time", "tokens/s", on, "without", off, TARGET)
    yield f"tokens with and without: {agreement}" + ("" if graphs[0].numerics == "strict" else " (numerics are fast)")


def tokens_per_second(run: Run) -> float:
    """All new tokens, from the submission of the prompts on."""
    return sum(map(len, run.tokens)) / (run.prefill_seconds + run.decode_seconds)
