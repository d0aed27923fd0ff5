"""Implements `flowrt sim`: predicts what a graph does with traffic, at level L1 or L2, and prints it with its level."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column
from rich.text import Text

from flowrt.api import read_graph
from flowrt.bench.report.plots import check_plot, new_picture, save_picture
from flowrt.cli.planning_options import DEFAULT_TRAFFIC, SimOptions
from flowrt.cli.tables import new_console, new_table, print_table
from flowrt.cli.text import OutputStream
from flowrt.costs.quantities import read_quantity
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.recovery import pipelines
from flowrt.graph.scenario_file import load_scenario
from flowrt.launcher.model_facts import config_of
from flowrt.observe import duration_text
from flowrt.operators.model_config import ModelError
from flowrt.planner.deployment import Deployment, ExpertSkew, deployment_of
from flowrt.planner.requests import TrafficTimes, traffic_times
from flowrt.planner.traffic import Traffic, parse_traffic
from flowrt.system.interrupt import end_at_once
from flowrt.system.output_file import STDOUT, check_writable, json_text, write_file
from flowrt.system.signals import ENDING
from flowrt.trace.perfetto_file import check_trace_file

PERCENTILES = (50, 90, 99)
CLOSED_LOOP_ROUNDS = 4  # requests of the default traffic for each sequence of the groups
MAX_CLOSED_LOOP = 1000
DEFAULT_RESTART = "3min"
_LATENCIES = {
    "first_token": "time to first token",
    "inter_token": "inter-token latency",
    "latency": "request latency",
    "queue": "wait for the first step",
}
_FIGURES = (
    "output_tokens_per_second",
    "first_token_p50_seconds",
    "first_token_p99_seconds",
    "inter_token_p50_seconds",
    "inter_token_p99_seconds",
)


def sim(path: Path, options: SimOptions) -> int:
    """Simulate the graph, or each graph of the sweep, and report. Returns the exit code. Raises UserError for bad input."""
    if options.json is not None:
        check_writable(options.json)
    check_plot(options.plot)
    if options.trace is not None:
        check_trace_file(options.trace)
        if options.sweep is not None:
            raise UserError("--trace is of one run; leave out --sweep")
    out = OutputStream(sys.stderr if options.json == STDOUT else sys.stdout)
    if options.restart is not None and options.scenario is None:
        raise UserError("--restart is of processes that die; add --scenario FILE")
    if options.sweep is None:
        found = _simulate(read_graph(path, options.overrides), options)
        _print(found, out)
        result: Any = figures_of(found)
        if options.plot is not None:
            _plot_latencies(found, options.plot)
    else:
        result = _sweep(path, options, options.sweep, out)
    if options.json is not None:
        write_file(options.json, json_text(result))
    out.check()
    return 0


def _sweep(path: Path, options: SimOptions, file: Path, out: OutputStream) -> Any:
    """Simulate all variants of the sweep file, and report them. Returns the figures for JSON."""
    from flowrt.bench.report.plots import plot_curves
    from flowrt.bench.report.report import BenchmarkReport, Machine, print_report
    from flowrt.bench.sweep.metrics import MeasuredVariant
    from flowrt.bench.sweep.run import exact, figure_of
    from flowrt.bench.sweep.sweep_file import read_sweep

    sweep = read_sweep(file)
    for key in ("graph", "small_model", "decode", "traffic", "processes"):
        if key in sweep.document.value:
            sweep.document.fail((key,), "belongs to flowrt bench sweep; here the command line names the graph and its traffic")
    rows, runs = [], {}
    for names in sweep.variants:
        settings = sweep.settings(names)
        point = {axis: settings.get(axis, name) for axis, name in zip(sweep.axes, names, strict=True)}
        print(f"flowrt: {', '.join(f'{key}={value}' for key, value in point.items())}", file=sys.stderr, flush=True)
        graph = read_graph(path, (*options.overrides, *(f"{key}={json.dumps(value)}" for key, value in settings.items())))
        found = _simulate(graph, options)
        rows.append({"set": point, **figures_of(found)})
        runs[names] = [MeasuredVariant(graph, found)]
    report = BenchmarkReport(
        f"{file.name}, level {options.level}",
        Machine.here(),
        [exact(figure_of(each, runs)) for each in sweep.figures],
        about={"axes": sweep.labels},
        command="flowrt sim --sweep",
    )
    console = new_console(out)
    _print_sweep(list(sweep.axes), rows, console)
    if sweep.sections.figures:
        print_report(report, console)
    if options.plot is not None:
        plot_curves(report, options.plot)
    return {"variants": rows, "figures": [each.as_json() for each in report.figures]} if sweep.sections.figures else rows


def _simulate(graph: Graph, options: SimOptions) -> TrafficTimes:
    traffic = _traffic(graph, options)
    if options.level == "L1":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before a worker imports torch: its small products wait for no other thread
        from flowrt.bench.measure.modelled_traffic import Disturbance, simulated_traffic

        disturbance = None
        if options.scenario is not None:
            scenario = load_scenario(options.scenario, graph)
            disturbance = Disturbance(scenario, read_quantity(options.restart or DEFAULT_RESTART, "s", "--restart"))
        with _interrupts_end():
            return simulated_traffic(graph, traffic, disturbance, options.trace, _on_progress)
    for name in ("scenario", "trace"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} needs the runtime itself, in virtual time; add --level L1")
    if graph.model is None:
        raise UserError("the graph serves no model; level L2 needs model:")
    try:
        model = config_of(graph.model)
    except ModelError as error:
        raise UserError(str(error)) from None
    deployment = deployment_of(graph, model, skew=ExpertSkew(options.skew))
    note_shortage(deployment)
    return traffic_times(deployment, traffic, seed=options.seed, on_progress=_on_progress)


@contextmanager
def _interrupts_end() -> Iterator[None]:
    """A signal that ends a command ends this process at once: as an exception it would come up inside a simulated worker, which takes it
    for a failure of its own. Nothing is left behind: all workers are objects in this process."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    own = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in own:
        signal.signal(number, end_at_once)
    try:
        yield
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)


def note_shortage(deployment: Deployment) -> None:
    """Say on stderr that a device has too little memory; times are predicted all the same."""
    if (text := deployment.shortage()) is not None:
        OutputStream(sys.stderr).write_now(f"flowrt: {text}; its times are predicted as if that fitted\n")


def _traffic(graph: Graph, options: SimOptions) -> Traffic:
    if options.traffic is not None:
        return parse_traffic(options.traffic, options.requests)
    places = graph.group_limits().max_num_seqs * len(pipelines(graph))
    requests = options.requests or min(MAX_CLOSED_LOOP, CLOSED_LOOP_ROUNDS * places)
    return parse_traffic(f"{DEFAULT_TRAFFIC},concurrency={places}", requests)


# --- figures ----------------------------------------------------------------------------------------------------------------


def figures_of(found: TrafficTimes) -> dict[str, Any]:
    """All figures of a result, with units in their names; those that are not known are left out."""
    result: dict[str, Any] = {
        "level": found.level,
        "seconds": found.seconds,
        "num_requests": len(found.latencies) + found.num_failed,
        "num_failed_requests": found.num_failed,
        "num_input_tokens": found.num_input,
        "num_output_tokens": found.num_output,
        "output_tokens_per_second": found.output_per_second,
        "requests_per_second": found.requests_per_second,
        "max_waiting_requests": found.max_waiting,
        "mean_step_rows": found.mean_rows,
    }
    for name, values in _latencies(found).items():
        result[f"{name}_mean_seconds"] = float(values.mean())
        result |= {f"{name}_p{share}_seconds": float(np.percentile(values, share)) for share in PERCENTILES}
    if found.events:
        result["events"] = [{"seconds": seconds, "text": text} for seconds, text in found.events]
    if found.busy:
        rank = max(found.busy, key=found.busy.__getitem__)
        result |= {"busiest_rank": rank, "busiest_rank_share": found.busy[rank]}
    if (step := found.step) is not None:
        result["step"] = {
            "seconds": step.seconds,
            "operator_seconds": dict(step.operators),
            "bubble_share": step.bubble_share,
            "server_busy_share": float(step.server_busy.mean()) if len(step.server_busy) else None,
            "slowest_rank": step.slowest_rank[0],
            "slowest_rank_busy_share": step.slowest_rank[1],
            "slowest_edge": list(step.slowest_edge[:2]),
            "slowest_edge_seconds": step.slowest_edge[2],
        }
        for name, times in (("dispatch", step.dispatch), ("combine", step.combine)):
            result["step"] |= {f"{name}_mean_seconds": times.mean, f"{name}_min_seconds": times.least, f"{name}_max_seconds": times.most}
    return result


def _latencies(found: TrafficTimes) -> dict[str, NDArray[np.float64]]:
    values = {"first_token": found.first_tokens, "inter_token": found.gaps, "latency": found.latencies, "queue": found.queued}
    return {name: each for name, each in values.items() if len(each) and np.isfinite(each).all()}


# --- output -----------------------------------------------------------------------------------------------------------------


def _print(found: TrafficTimes, out: OutputStream) -> None:
    console = new_console(out)
    titles = "mean", *(f"p{share}" for share in PERCENTILES)
    table = new_table(console, Column(f"level {found.level}"), *(Column(name, justify="right") for name in titles))
    for name, values in _latencies(found).items():
        shown = [values.mean(), *(np.percentile(values, share) for share in PERCENTILES)]
        table.add_row(_LATENCIES[name], *(duration_text(float(each)) for each in shown))
    print_table(table, console)
    for line in _sentences(found):
        console.print(Text(line))


def _sentences(found: TrafficTimes) -> Iterator[str]:
    for seconds, text in found.events:
        yield f"at {duration_text(seconds)}: {text}"
    if found.num_failed:
        yield f"{found.num_failed} of {len(found.latencies) + found.num_failed} requests ended with an error; latencies are of the others"
    num = len(found.latencies)
    yield (
        f"{num} request{'s' * (num != 1)} in {duration_text(found.seconds)}: {found.output_per_second:.1f} output tokens per second, "
        f"{found.requests_per_second:.2f} requests per second; up to {found.max_waiting} waited for a first token"
    )
    if (step := found.step) is None:
        rank = max(found.busy, key=found.busy.__getitem__, default="")
        if rank:
            yield f"busiest process: {rank}, {100 * found.busy[rank]:.0f} % of the time; a step had {found.mean_rows:.1f} rows on average"
        return
    sequences = step.num_sequences / len(step.by_group)
    took = duration_text(step.seconds)
    yield f"while each group decodes {sequences:.1f} sequences, as on average, a step takes {took}; a rank spends in it"
    for name, seconds in sorted(step.operators.items(), key=lambda item: -item[1]):
        yield f"  {name:<10} {duration_text(seconds):>10}  {100 * seconds / step.seconds:5.1f} %"
    servers = f"; expert servers compute for {100 * step.server_busy.mean():.1f} % of it" if len(step.server_busy) else ""
    yield f"groups wait for experts and messages for {100 * step.bubble_share:.1f} % of a step{servers}"
    for name, times in (("dispatch", step.dispatch), ("combine", step.combine)):
        if times.most:
            least, most = duration_text(times.least), duration_text(times.most)
            yield f"a message of {name} takes {duration_text(times.mean)} on average, {least} to {most}"
    yield f"slowest node: {step.slowest_rank[0]}, computes for {100 * step.slowest_rank[1]:.1f} % of such steps"
    if step.slowest_edge[0]:
        source, target, seconds = step.slowest_edge
        yield f"slowest edge: {source} -> {target}, {duration_text(seconds)} a message"


def _print_sweep(axes: Sequence[str], rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    titles = (*axes, "tokens/s", "first token p50", "p99", "inter-token p50", "p99")
    table = new_table(console, *(Column(title, justify="right") for title in titles))
    for row in rows:
        latencies = (duration_text(row[name]) if name in row else "-" for name in _FIGURES[1:])
        table.add_row(*map(str, row["set"].values()), f"{row[_FIGURES[0]]:.1f}", *latencies)
    print_table(table, console)
    console.print(Text(f"level {rows[0]['level']}; tokens/s are output tokens per second"))


def _plot_latencies(found: TrafficTimes, path: str) -> None:
    """How many of the requests, or tokens, took at most how long."""
    picture, axes = new_picture((8.0, 4.5))
    for name, values in _latencies(found).items():
        times = np.sort(values)
        axes.step(times, np.arange(1, len(times) + 1) / len(times), where="post", label=_LATENCIES[name])
    axes.set(xscale="log", xlabel="seconds", ylabel="share that took at most so long", title=f"level {found.level}")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize="small")
    save_picture(picture, path)


def _on_progress(ended: int, total: int) -> None:
    """A bar on a terminal; it ends with the last request."""
    if not sys.stderr.isatty() or (ended % max(1, total // 100) and ended != total):
        return
    filled = 40 * ended // total
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (40 - filled)}] {ended} of {total} requests{chr(10) * (ended == total)}")
    sys.stderr.flush()
