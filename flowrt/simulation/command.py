"""Runs `flowrt simulate`: graphs with faults under many seeds in virtual time.

For a seed that fails it prints the smallest case that still fails and the command that replays this case; the
exit code is then 1.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flowrt.errors import UserError
from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph
from flowrt.graph.scenario_file import load_scenario
from flowrt.launcher.model_facts import facts_of
from flowrt.operators.model_config import ModelError
from flowrt.reliability.scenario import KINDS, AnyFault
from flowrt.simulation.calls import AnyServed
from flowrt.simulation.campaign import CampaignCounts, Failure, campaign, digest_line, fails
from flowrt.simulation.case import Case, Kept
from flowrt.simulation.cases import draw
from flowrt.simulation.record import SeedRecord
from flowrt.simulation.shrink import shrink
from flowrt.simulation.simulate_options import SimulationOptions
from flowrt.simulation.simulated_trace import SimulatedTrace
from flowrt.simulation.world import Outcome
from flowrt.trace.perfetto_file import check_trace_file, write_trace
from flowrt.trace.records import WorkerTrace
from flowrt.trace.summary import summarize, summary_lines

REPORT_EVERY = 100
ALL_KINDS_FROM = 1000  # from this number of seeds on, each kind of fault must have occurred
MAX_FAILURES = 10  # then the campaign ends


def run(names: Sequence[str], given: SimulationOptions) -> int:
    """Returns the exit code: 0 if all invariants held under each seed, 1 if not. Raises UserError for invalid input."""
    if given.trace is not None:
        check_trace_file(given.trace)
        if given.seeds != 1:
            raise UserError(f"--trace {given.trace}: the trace of one seed can be written, not of {given.seeds}; add --seeds 1")
    os.environ["OMP_NUM_THREADS"] = "1"  # before a worker imports torch: the seed does not determine its threads
    try:
        graphs = [_load(path) for path in _files(names)]
    except ModelError as error:
        raise UserError(str(error)) from None
    if given.trace is not None and any(graph.model is None for graph in graphs):
        raise UserError(f"--trace {given.trace}: only runs of a model are traced; leave out graphs without model:")
    trace = SimulatedTrace() if given.trace is not None else None
    scenario = None if given.scenario is None else load_scenario(given.scenario, graphs[0])
    kept = Kept(_numbers(given.keep_faults), _numbers(given.keep_requests), given.calm)
    if (record := None if given.record is None else SeedRecord(given.record)) is not None and kept != Kept():
        raise UserError("--record is for whole seeds; leave out --keep-faults, --keep-requests and --calm")
    replay = shlex.join(["flowrt", "simulate", *names, *(["--scenario", str(given.scenario)] if given.scenario else [])])
    replay += (" --weights" if given.weights else "") + (f" --cancel {given.cancel}" if given.cancel else "")
    replay += " --draw-graphs" if given.draw_graphs else ""

    draw_case = partial(
        draw, graphs=graphs, scenario=scenario, exact=not given.weights, num_cancelled=given.cancel, draws_graphs=given.draw_graphs
    )

    def on_run(case: Case, outcome: Outcome[AnyServed] | Failure, counts: CampaignCounts) -> bool:
        if given.trace is not None and trace is not None:
            _write_trace(given.trace, trace.traces(), case.graph)
        if record is not None:
            record.note(case.seed, isinstance(outcome, Failure))
        if isinstance(outcome, Failure):
            print(f"seed {case.seed}: {outcome.text}", file=sys.stderr)
            _print_smallest(draw_case(case.seed), kept, replay, shrinks=not given.no_shrink)
        elif given.digests:
            print(digest_line(case, outcome), flush=True)
        if counts.num_seeds % REPORT_EVERY == 0 or counts.num_seeds == given.seeds:
            print(f"{counts.num_seeds} seeds, {len(counts.failures)} failed, {counts.num_steps} steps", flush=True)
        return len(counts.failures) < MAX_FAILURES

    seeds = range(given.first, given.first + given.seeds)
    try:
        missing: Iterable[int] = seeds if record is None else record.missing(seeds)
        counts = campaign((replace(kept.of(draw_case(seed)), trace=trace) for seed in missing), on_run)
    finally:
        if record is not None:
            record.flush()
    if record is not None:
        print(record.total())
    print(f"outcomes: {_counts(counts.outcomes)}; virtual time {counts.virtual_seconds:.0f} s")
    print(f"faults: {_counts(counts.faults)}")
    print(f"rare: {_counts(counts.branches)}")
    unmet = [kind for kind in KINDS if not counts.faults[kind]]
    if unmet and counts.num_seeds >= ALL_KINDS_FROM and scenario is None:
        print(f"no seed met {', '.join(unmet)}: the draw of faults is wrong", file=sys.stderr)
        return 1
    return 1 if counts.failures or (record is not None and record.has_failed(seeds)) else 0


def _write_trace(name: str, traces: Sequence[WorkerTrace], graph: Graph) -> None:
    write_trace(name, traces, graph)
    print(*summary_lines(summarize(traces)), sep="\n", file=sys.stderr)


def _files(names: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for name in names:
        path = Path(name)
        files += sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{', '.join(names)}: no *.yaml in it; give a graph file or a folder of graph files")
    return files


def _load(path: Path) -> Graph:
    return load_graph(path, facts_of=facts_of)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return () if text == "-" else tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UserError(f"{text!r} is not a list of numbers; write 0,2 or -") from None


def _print_smallest(case: Case, kept: Kept, replay: str, shrinks: bool) -> None:
    """Prints the smallest part of a failing case, and the command that replays it."""
    if shrinks and kept == Kept():
        kept = shrink(case, fails)
    left = kept.of(case)
    options = [f"--first {case.seed}", "--seeds 1"]
    if kept.faults is not None and len(kept.faults) < len(case.scenario.faults):
        options.append(f"--keep-faults {','.join(map(str, kept.faults)) or '-'}")
    if kept.requests is not None and len(kept.requests) < len(case.requests):
        options.append(f"--keep-requests {','.join(map(str, kept.requests))}")
    options += ["--calm"] * kept.calm
    network = "a calm network" if kept.calm else "its network conditions"
    print(f"  with {len(left.requests)} requests, {network}, {_faults_text(left.scenario.faults)}", file=sys.stderr)
    print(f"  again: {replay} {' '.join(options)}", file=sys.stderr, flush=True)


def _faults_text(faults: Sequence[AnyFault]) -> str:
    return "; ".join(f"{fault.kind} of {' and '.join(fault.processes)} at {fault.at_seconds:.4f} s" for fault in faults) or "no fault"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
