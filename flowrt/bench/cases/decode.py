"""Prefill and decode in tokens per second, beside transformers, vLLM's CPU build, or a second graph.

All sides are loaded at once and work in turns, with the same prompts. transformers is tried with each of its expert implementations before
the pairs of a batch size; the fastest one of each phase is the peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from flowrt.api import open_graph, read_graph
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.measure.benchmark import Results, Trial
from flowrt.bench.measure.decoding import DecodeRun, GraphSide, Prompts, TokenAgreement, check_limits, prompts_of
from flowrt.bench.measure.limits import measure_limits_apart
from flowrt.bench.measure.memory import memory_of, served_model, vocab_size
from flowrt.bench.measure.step_split import StepSplit, min_bytes_per_step, split_of
from flowrt.bench.peers import decode_vllm
from flowrt.bench.peers.process import Peer, start_peer
from flowrt.bench.report.figures import Figure, Target
from flowrt.bench.report.report import BenchmarkReport, ReportSection, new_table, print_progress
from flowrt.costs.work import MachineLimits
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.numerics import numerics_text
from flowrt.operators.families.registry import read_model_config
from flowrt.system.machine_limits import usable_cores

PHASES = ("prefill", "decode")
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
SETTLE_SECONDS = 0.05  # threads that have computed may spin for some milliseconds before they sleep
MAX_GATHERED_BYTES = 2 << 30  # "batched_mm" copies an expert's weights for each pair of row and slot
MAX_SLOWDOWN = 2.5  # an implementation so many times slower than another is tried no more
TRIES = 3


TRANSFORMERS, VLLM = "flowrt.bench.peers.decode_transformers", str(Path(decode_vllm.__file__))


async def measure(
    model: Path,
    graph_file: Path,
    options: DecodeOptions,
    against: Path | None = None,
    against_overrides: Sequence[str] = (),
    vllm: str | None = None,
) -> Results:
    """`against`: a second graph is the peer instead of transformers. `vllm`: an interpreter that has vLLM, one more peer."""
    if vllm is not None and against is not None:
        raise UserError("--vllm and --against exclude each other: a second graph is measured against the first alone")
    limits = await measure_limits_apart(usable_cores(), tuple(options.dtype))
    yield ReportSection("limits", vars(limits))
    num_ids = read_model_config(model).vocab_size
    for dtype in options.dtype:
        graph = read_served_graph(graph_file, model, options, [f"model.dtype={dtype}", *options.overrides])
        async with AsyncExitStack() as stack:
            peers, second = list[DecodeSide](), None
            if against is not None:
                second = read_served_graph(against, model, options, [f"model.dtype={dtype}", *against_overrides])
                peers.append(GraphSide(await stack.enter_async_context(open_graph(second)), against.stem))
            else:
                print_progress(f"{dtype}: loading transformers")
                started = start_peer("transformers", TRANSFORMERS, model, dtype, usable_cores(), *IMPLEMENTATIONS)
                peers.append(TransformersSide(*await stack.enter_async_context(started), options.prompt_tokens))
            if vllm is not None:
                print_progress(f"{dtype}: loading vLLM")
                length = options.prompt_tokens + options.new_tokens
                started = start_peer("vllm", VLLM, model, dtype, usable_cores(), length, python=vllm)
                peers.append(ProcessSide((await stack.enter_async_context(started))[0]))
            print_progress(f"{dtype}: loading the graph")
            ours = GraphSide(await stack.enter_async_context(open_graph(graph)))
            agreements: dict[str, TokenAgreement] = {}
            tried: dict[int, dict[str, dict[str, float]]] = {}
            splits: dict[int, list[StepSplit]] = {}
            for batch in options.batch:
                prompts = prompts_of(batch, options.prompt_tokens, num_ids)
                for peer in peers:
                    if isinstance(peer, TransformersSide):
                        tried[batch] = await peer.choose_fastest(prompts, options.new_tokens)
                async for result in measure_batch([ours, *peers], prompts, dtype, options, agreements):
                    yield result
                splits[batch] = await split_of(ours, prompts, options.new_tokens)
            memory = memory_of(ours.graph)
            yield f"memory, {dtype}: {memory}"
        record = {
            "tokens": agreement_record(agreements),
            "same_weights": served_model(graph).kept == ({} if second is None else served_model(second).kept),
            "tried_tokens_per_second": tried,
            "splits_seconds": {batch: [each.as_json() for each in rows] for batch, rows in splits.items()},
            "memory": {**vars(memory), "bound_bytes": memory.bound_bytes, "met": memory.met},
        }
        context = options.prompt_tokens + options.new_tokens // 2
        tables = [_split_table(dtype, batch, rows, graph, limits, context) for batch, rows in splits.items() if rows]
        yield ReportSection(dtype, record, tables)
    yield (
        f"least time of a step: weights, keys and values read once at {limits.read_bytes_per_second / 1e9:.1f} GB/s, as measured with"
        f" {limits.num_threads} threads; operators: with the transfer to their thread; queued: the event loop was ready, without a core"
    )


async def measure_batch(
    sides: Sequence[DecodeSide],
    prompts: Prompts,
    dtype: str,
    options: DecodeOptions,
    agreements: dict[str, TokenAgreement],
    targets: Mapping[str, Target] | None = None,
) -> Results:
    """The speeds of the first side beside each other one. `agreements` get whether its tokens are theirs, by "PEER, batch N".

    `targets`: the target of each speed that is reported, instead of those of PHASES.
    """
    batch = len(prompts)
    runs: list[list[DecodeRun]] = [[] for _ in sides]

    def figures(values: Sequence[Sequence[DecodeRun]]) -> list[Figure]:
        found = []
        for side, theirs in zip(sides[1:], values[1:], strict=True):
            for phase in targets or PHASES:
                speeds = [[run.speed(phase, batch * options.prompt_tokens) for run in each] for each in (values[0], theirs)]
                target = targets[phase] if targets else target_of(phase, batch, options, sides[0], side)
                found.append(Figure.paired(f"{phase} {batch} {dtype}", "tokens/s", speeds[0], side.label(phase), speeds[1], target))
        return found

    async def measure_run(side: DecodeSide, done: list[DecodeRun]) -> DecodeRun:
        """The first run, which is not counted, has margins."""
        await asyncio.sleep(SETTLE_SECONDS)
        done.append(await side.run(prompts, options.new_tokens, margins=not done))
        return done[-1]

    yield Trial([partial(measure_run, side, done) for side, done in zip(sides, runs, strict=True)], figures)
    for side, theirs in zip(sides[1:], runs[1:], strict=True):
        agreement = agreements[f"{side.label('decode')}, batch {batch}"] = TokenAgreement()
        for run in runs[0]:
            agreement.compare(run, theirs[0])
        yield f"tokens, {dtype}, batch {batch}, against {side.label('decode')}: {agreement}"


def agreement_record(agreements: dict[str, TokenAgreement]) -> dict[str, Any]:
    return {peer: {**vars(each), "text": str(each)} for peer, each in agreements.items()}


def have_different_tokens(report: BenchmarkReport) -> bool:
    """Float32 tokens that differ from a peer's with the same weights: an error of flowrt, not a matter of rounding."""
    details = report.details.get("float32", {})
    return details.get("same_weights", True) and any(each["num_different"] for each in details.get("tokens", {}).values())


def target_of(phase: str, batch: int, options: DecodeOptions, ours: DecodeSide, peer: DecodeSide) -> Target | None:
    """Returns the target of the ratio of speeds. Against another graph: experts in other processes may cost a tenth at batch 8 and 32."""
    bound: float | None
    if isinstance(peer, GraphSide):
        apart, together = (side.graph.graph.process_names() for side in (ours, peer) if isinstance(side, GraphSide))
        bound = 0.9 if phase == "decode" and batch in (8, 32) and len(apart) > len(together) else None
    elif phase == "prefill":
        bound = 1.0 if options.prompt_tokens >= 512 and batch == 8 else None
    else:
        bound = {1: 1.0, 8: 1.5, 32: 1.5}.get(batch) if isinstance(peer, TransformersSide) else 1.0
    return Target(bound, at_most=False) if bound is not None else None


def read_served_graph(path: Path, model: Path | None, options: DecodeOptions, overrides: Sequence[str]) -> Graph:
    """Raises UserError for a graph that serves no model, or whose limits would queue or refuse a batch."""
    graph = read_graph(path, overrides, model)
    served_model(graph)
    check_limits(graph, options.batch, options.prompt_tokens, options.new_tokens)
    return graph


def prompts_for(graph: Graph, options: DecodeOptions) -> Prompts:
    """The prompts of the first batch size."""
    return prompts_of(options.batch[0], options.prompt_tokens, vocab_size(graph))


def measure_setting(sides: Sequence[GraphSide], options: DecodeOptions, phase: str, target: Target) -> Results:
    """One speed of a graph with a setting, beside that of the same graph without it."""
    graph = sides[0].graph.graph
    label = f"{served_model(graph).dtype}, {numerics_text(graph)}"
    return measure_batch(sides, prompts_for(graph, options), label, options, {}, {phase: target})


def _split_table(dtype: str, batch: int, splits: Sequence[StepSplit], graph: Graph, limits: MachineLimits, context: int) -> RenderableType:
    least = min_bytes_per_step(graph, batch, context) / limits.read_bytes_per_second
    title = f"decode {batch}, {dtype}: a step takes {1e3 * splits[0].step:.1f} ms, at least {1e3 * least:.1f}; of it, in ms"
    parts = ("operators", "python", "waiting", "queued", "loop_cpu", "other_cpu")
    rows = [(each.process, *(f"{1e3 * getattr(each, part):.1f}" for part in parts)) for each in splits]
    return new_table(title, "process", "operators", "Python", "waiting", "queued", "cpu loop", "cpu others", rows=rows)


class ProcessSide:
    """A peer in a process of its own."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.chosen: dict[str, str] = {}  # the expert implementation of each phase

    def label(self, phase: str) -> str:
        return self.chosen.get(phase, self._peer.name)

    async def run(self, prompts: Prompts, new_tokens: int, margins: bool = False) -> DecodeRun:
        response = await self._peer.request(prompts=prompts, new_tokens=new_tokens, margins=margins, **self.chosen)
        return DecodeRun(decode_tokens=sum(len(each) - 1 for each in response["tokens"]), **response)


class TransformersSide(ProcessSide):
    def __init__(self, peer: Peer, facts: dict[str, Any], prompt_tokens: int) -> None:
        super().__init__(peer)
        self._facts, self._prompt_tokens = facts, prompt_tokens
        if not facts["implementations"]:
            raise UserError("transformers has none of the expert implementations " + ", ".join(IMPLEMENTATIONS))
        self.chosen = dict.fromkeys(PHASES, facts["implementations"][0])
        self._too_slow: set[str] = set()  # far behind at one batch size: not tried at the next, where it would take minutes

    async def choose_fastest(self, prompts: Prompts, new_tokens: int) -> dict[str, dict[str, float]]:
        """Tries each implementation on this batch, TRIES times unless it is far behind; returns the speeds, by implementation and phase."""
        speeds: dict[str, dict[str, float]] = {}
        num_prompt_tokens = len(prompts) * self._prompt_tokens
        await self.run(prompts, new_tokens)  # the first must not pay for what is made once per shape
        for name in self._facts["implementations"]:
            tried = {"decode": name, "prefill": name}
            gathered = [self._facts["expert_bytes"] * self._facts["num_active"] * rows for rows in (len(prompts), num_prompt_tokens)]
            if name in self._too_slow or (name == "batched_mm" and gathered[0] > MAX_GATHERED_BYTES):
                continue
            if name == "batched_mm" and gathered[1] > MAX_GATHERED_BYTES:
                tried["prefill"] = self.chosen["prefill"]
            best = speeds[name] = dict.fromkeys((phase for phase in PHASES if tried[phase] == name), 0.0)
            for _ in range(TRIES):
                self.chosen = tried
                run = await self.run(prompts, new_tokens)
                for phase in best:
                    best[phase] = max(best[phase], run.speed(phase, num_prompt_tokens))
                if all(best[phase] * MAX_SLOWDOWN < max(each.get(phase, 0.0) for each in speeds.values()) for phase in best):
                    self._too_slow.add(name)
                    break
            self.chosen = {phase: fastest(speeds, phase) for phase in PHASES}
            found = ", ".join(f"{phase} {value:.4g}" for phase, value in best.items())
            print_progress(f"transformers, batch {len(prompts)}, {name}: {found}")
        return speeds


DecodeSide = GraphSide | ProcessSide  # one of the programs that decode; `label(phase)` names it in the table


def fastest(speeds: dict[str, dict[str, float]], phase: str) -> str:
    """The implementation with the highest speed of those that tried this phase."""
    return max((name for name in speeds if phase in speeds[name]), key=lambda name: speeds[name][phase])
