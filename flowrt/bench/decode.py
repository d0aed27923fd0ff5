"""Prefill and decode in tokens per second, against what a user would pick instead: `flowrt bench decode`.

Here: Options, `measure`: which sides there are, their turns, the targets, the memory. Not here: one run of one side (graph_side.py,
peer_process.py), where a step's time goes (step_split.py), the table (decode_report.py).

All sides of a comparison are loaded at once and work in turns, with the same prompts; the one that is not asked sleeps. transformers
is tried with each of its expert implementations before the pairs of a batch size, and the fastest one at each phase is the peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flowrt.api import open_graph, read_graph
from flowrt.bench.decoding import Comparison, Prompts, Run, compare, decode_speed, prefill_speed, prompts_of
from flowrt.bench.graph_side import GraphSide, check_room
from flowrt.bench.limits import usable_cores
from flowrt.bench.memory import Memory, memory_of
from flowrt.bench.pairs import Target
from flowrt.bench.peer_process import IMPLEMENTATIONS, PeerProcess
from flowrt.bench.report import Figure
from flowrt.bench.step_split import StepSplit, split_of
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.operators.families.registry import read_model_config

Say = Callable[[str], None]
SETTLE_SECONDS = 0.05  # threads that have computed may spin for some milliseconds before they sleep
MAX_GATHERED_BYTES = 2 << 30  # "batched_mm" copies an expert's weights for each pair of row and slot
HOPELESS = 2.5  # an implementation so many times slower than another is not tried again
TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """`against`: a second graph is the peer, and transformers is left out. `vllm`: an interpreter that has vLLM."""

    model: Path
    graph: Path
    dtypes: Sequence[str] = ("float32", "bfloat16")
    batches: Sequence[int] = (1, 8, 32)
    prompt_tokens: int = 64
    new_tokens: int = 32
    num_pairs: int = 20
    overrides: Sequence[str] = ()
    against: Path | None = None
    against_overrides: Sequence[str] = ()
    vllm: str | None = None

    def check(self) -> None:
        """Raises UserError for numbers that measure nothing."""
        for name, value in (("--prompt-tokens", self.prompt_tokens), ("--pairs", self.num_pairs), *(("--batch", b) for b in self.batches)):
            if value < 1:
                raise UserError(f"{name} is {value}, it must be at least 1")
        if self.new_tokens < 2:
            raise UserError(f"--new-tokens is {self.new_tokens}, it must be at least 2: the first token belongs to the prefill")
        if self.vllm is not None and self.against is not None:
            raise UserError("--vllm and --against exclude each other: a second graph is measured against the first alone")


@dataclass
class Found:
    """Everything that one dtype gave."""

    dtype: str
    figures: list[Figure] = field(default_factory=list)
    comparisons: dict[str, Comparison] = field(default_factory=dict)  # by "PEER, batch N"
    tried: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)  # batch -> implementation -> phase -> tokens/s
    splits: dict[int, list[StepSplit]] = field(default_factory=dict)  # by batch
    memory: Memory | None = None


class Side(Protocol):
    """Who decodes. `label(phase)` names it in the table."""

    def label(self, phase: str) -> str: ...
    async def run(self, prompts: Prompts, new_tokens: int, margins: bool) -> Run: ...


async def measure(options: Options, say: Say) -> AsyncIterator[Found]:
    """What each dtype gave, one after the other; `say` is told each figure as it comes."""
    options.check()
    for dtype in options.dtypes:
        yield await _measure_dtype(options, dtype, say)


async def _measure_dtype(options: Options, dtype: str, say: Say) -> Found:
    found = Found(dtype)
    graph = _graph(options.graph, options, dtype, options.overrides)
    batches = list(options.batches)
    check_room(graph, batches, options.prompt_tokens, options.new_tokens)
    vocab_size = read_model_config(options.model).vocab_size
    async with AsyncExitStack() as stack:
        peers: list[_TransformersSide | _VllmSide | GraphPeer] = []
        if options.against is not None:
            second = _graph(options.against, options, dtype, options.against_overrides)
            check_room(second, batches, options.prompt_tokens, options.new_tokens)
            peers.append(GraphPeer(GraphSide(await stack.enter_async_context(open_graph(second))), options.against.stem))
        else:
            say(f"{dtype}: transformers loads")
            process = PeerProcess.transformers(options.model, dtype, usable_cores(), IMPLEMENTATIONS)
            peers.append(_TransformersSide(await stack.enter_async_context(process), options.prompt_tokens))
        if options.vllm is not None:
            say(f"{dtype}: vLLM loads")
            length = options.prompt_tokens + options.new_tokens
            process = PeerProcess.vllm(options.vllm, options.model, dtype, usable_cores(), length)
            peers.append(_VllmSide(await stack.enter_async_context(process)))
        say(f"{dtype}: the graph loads")
        ours = GraphSide(await stack.enter_async_context(open_graph(graph)))
        for batch in batches:
            prompts = prompts_of(batch, options.prompt_tokens, vocab_size)
            for peer in peers:
                if isinstance(peer, _TransformersSide):
                    found.tried[batch] = await peer.choose_fastest(prompts, options.new_tokens, say)
            await measure_cell(found, options, batch, prompts, [GraphPeer(ours, "flowrt"), *peers], graph, say)
            found.splits[batch] = await split_of(ours, prompts, options.new_tokens)
        found.memory = memory_of(ours.graph)
    return found


async def measure_cell(found: Found, options: Options, batch: int, prompts: Prompts, sides: Sequence[Side], graph: Graph, say: Say) -> None:
    """One batch size: a round that is not counted, whose tokens and margins are the peers' answers, then the pairs."""
    runs: list[list[Run]] = [[] for _ in sides]
    first = []
    for side in sides:
        first.append(await side.run(prompts, options.new_tokens, margins=True))
        await asyncio.sleep(SETTLE_SECONDS)
    for pair in range(options.num_pairs):
        for place in range(len(sides)):
            number = (pair + place) % len(sides)
            runs[number].append(await sides[number].run(prompts, options.new_tokens, margins=False))
            await asyncio.sleep(SETTLE_SECONDS)
    for number, side in enumerate(sides[1:], start=1):
        comparison = found.comparisons.setdefault(f"{side.label('decode')}, batch {batch}", Comparison())
        for run in (first[0], *runs[0]):
            compare(run, first[number], comparison)
        for phase in ("prefill", "decode"):
            values = [[speed(run, phase, batch * options.prompt_tokens) for run in each] for each in (runs[0], runs[number])]
            target = target_of(phase, batch, options, side, graph)
            name = f"{phase} {batch}"
            figure = Figure.paired(name, "tokens/s", values[0], side.label(phase), values[1], target)
            found.figures.append(figure)
            say(f"{found.dtype} {name}: {figure.ours.median:.4g} tokens/s, ratio to {side.label(phase)} {figure.ratio}")
        say(f"{found.dtype} tokens, batch {batch}, against {side.label('decode')}: {comparison}")


def speed(run: Run, phase: str, num_prompt_tokens: int) -> float:
    """Tokens per second of a phase."""
    return prefill_speed(run, num_prompt_tokens) if phase == "prefill" else decode_speed(run)


def target_of(phase: str, batch: int, options: Options, side: Side, graph: Graph) -> Target | None:
    """What the ratio of speeds should be. Against another graph: experts apart may cost a tenth at batch 8 and 32."""
    if isinstance(side, GraphPeer):
        apart, together = len(graph.process_names()), side.side.graph.graph.process_names()
        return Target(0.9, at_most=False) if phase == "decode" and batch in (8, 32) and apart > len(together) else None
    if phase == "prefill":
        return Target(1.0, at_most=False) if options.prompt_tokens >= 512 and batch == 8 else None
    if isinstance(side, _VllmSide):
        return Target(1.0, at_most=False)
    bound = {1: 1.0, 8: 1.5, 32: 1.5}.get(batch)
    return Target(bound, at_most=False) if bound is not None else None


def _graph(path: Path, options: Options, dtype: str, overrides: Sequence[str]) -> Graph:
    return read_graph(path, [f"model.dtype={dtype}", *overrides], options.model)


class GraphPeer:
    """A graph as one of the sides."""

    def __init__(self, side: GraphSide, name: str) -> None:
        self.side, self._name = side, name

    def label(self, phase: str) -> str:
        return self._name

    async def run(self, prompts: Prompts, new_tokens: int, margins: bool) -> Run:
        return await self.side.run(prompts, new_tokens)


class _VllmSide:
    def __init__(self, process: PeerProcess) -> None:
        self._process = process

    def label(self, phase: str) -> str:
        return self._process.name

    async def run(self, prompts: Prompts, new_tokens: int, margins: bool) -> Run:
        return run_from(await self._process.ask(prompts=prompts, new_tokens=new_tokens))


class _TransformersSide:
    """`chosen`: the implementation of each phase."""

    def __init__(self, process: PeerProcess, prompt_tokens: int) -> None:
        self._process, self._prompt_tokens = process, prompt_tokens
        names = process.facts["implementations"]
        if not names:
            raise UserError("transformers has none of the expert implementations " + ", ".join(IMPLEMENTATIONS))
        self.chosen = {"prefill": names[0], "decode": names[0]}
        self._hopeless: set[str] = set()  # far behind at one batch size: not tried at the next, where it would take minutes

    def label(self, phase: str) -> str:
        return str(self.chosen[phase])

    async def run(self, prompts: Prompts, new_tokens: int, margins: bool) -> Run:
        answer = await self._process.ask(prompts=prompts, new_tokens=new_tokens, margins=margins, **self.chosen)
        return run_from(answer)

    async def choose_fastest(self, prompts: Prompts, new_tokens: int, say: Say) -> dict[str, dict[str, float]]:
        """Try each implementation on this batch, TRIES times unless it is far behind; returns the speeds, by implementation and phase."""
        facts = self._process.facts
        speeds: dict[str, dict[str, float]] = {}
        num_prompt_tokens = len(prompts) * self._prompt_tokens
        await self.run(prompts, new_tokens, margins=False)  # who is first must not pay for what is made once per shape
        for name in facts["implementations"]:
            tried = {"decode": name, "prefill": name}
            gathered = [facts["expert_bytes"] * facts["num_active"] * rows for rows in (len(prompts), num_prompt_tokens)]
            if name in self._hopeless or (name == "batched_mm" and gathered[0] > MAX_GATHERED_BYTES):
                continue
            if name == "batched_mm" and gathered[1] > MAX_GATHERED_BYTES:
                tried["prefill"] = self.chosen["prefill"]
            best = speeds[name] = dict.fromkeys(("prefill", "decode") if tried["prefill"] == name else ("decode",), 0.0)
            for _ in range(TRIES):
                self.chosen = tried
                run = await self.run(prompts, new_tokens, margins=False)
                for phase in best:
                    best[phase] = max(best[phase], speed(run, phase, num_prompt_tokens))
                if all(best[phase] * HOPELESS < max(each.get(phase, 0.0) for each in speeds.values()) for phase in best):
                    self._hopeless.add(name)
                    break
            self.chosen = {phase: fastest(speeds, phase) for phase in ("prefill", "decode")}
            say(f"transformers, batch {len(prompts)}, {name}: " + ", ".join(f"{phase} {value:.4g}" for phase, value in best.items()))
        return speeds


def fastest(speeds: dict[str, dict[str, float]], phase: str) -> str:
    """The implementation with the highest speed of those that tried this phase."""
    return max((name for name in speeds if phase in speeds[name]), key=lambda name: speeds[name][phase])


def run_from(answer: dict[str, Any]) -> Run:
    """A peer's answer as a run."""
    tokens = answer["tokens"]
    decode_tokens = sum(len(each) - 1 for each in tokens)
    return Run(answer["prefill_seconds"], answer["decode_seconds"], decode_tokens, tokens, answer["margins"])
