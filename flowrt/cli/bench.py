"""`flowrt bench ...`: the commands that measure flowrt, with their options and the checks before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from flowrt.bench.cases.case_options import (
    DecodeOptions,
    JsonFile,
    LatencyOptions,
    ManyRequestsOptions,
    ModelOption,
    OperatorOptions,
    Overrides,
    Pairs,
    PlotFile,
    Positive,
    ServedOptions,
    StreamOptions,
    SweepOptions,
)
from flowrt.bench.load.load_options import LoadOptions
from flowrt.chaos.chaos_options import RecoveryOptions
from flowrt.cli.options import Switch, check_api_key
from flowrt.errors import UserError, install_command
from flowrt.system.output_file import STDOUT

if TYPE_CHECKING:
    from flowrt.bench.measure.benchmark import Results
    from flowrt.bench.report.report import BenchmarkReport

bench_app = App(name="bench", help="Compare flowrt with its peers in alternating pairs. Close other programs first.")

_WITHOUT_COMPUTING = ("hop", "transports", "m2n")  # one thread of OpenMP is enough
ModelDirectory = Annotated[Path, Parameter(help="A Hugging Face model directory.")]
SweepFiles = Annotated[Path, Parameter(help="Sweep files.")]
ServedGraph = Annotated[Path, Parameter(help="A graph file that serves a model.")]


def run_case(
    name: str,
    results: Results,
    num_pairs: int,
    json: str | None,
    details: Mapping[str, Any] | None = None,
    draw: Callable[[BenchmarkReport, str], None] | None = None,
    plot: str | None = None,
    model: Path | None = None,
    command: str = "flowrt bench",
) -> BenchmarkReport:
    """Checks what the benchmark needs, measures, writes the report and draws it, by default its ratios. Raises UserError."""
    from flowrt.bench.measure.benchmark import run_benchmark
    from flowrt.bench.report.plots import check_plot, plot_ratios
    from flowrt.operators.families.registry import read_model_config
    from flowrt.operators.model_config import ModelError
    from flowrt.system.output_file import check_writable

    if json is not None:
        check_writable(json)
    check_plot(plot)
    if model is not None:
        try:
            read_model_config(model)
        except ModelError as error:
            raise UserError(str(error)) from None
    if name.partition(",")[0] in _WITHOUT_COMPUTING:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = run_benchmark(name, results, num_pairs, json, details, command)
    if plot is not None:
        (draw or plot_ratios)(report, plot)
    return report


def run_served(name: str, graph: Path, options: ServedOptions, results: Results) -> None:
    """Run a case on one graph, as `run_case`."""
    run_case(f"{name}, {graph.name}", results, options.pairs, options.json, model=options.model)


@bench_app.command
def hop(
    *, pairs: Pairs = 40, json: JsonFile = None, within: Annotated[Switch, Parameter(help="Measure only within one process.")] = False
) -> None:
    """Measure the cost of a message: within one process beside asyncio queues, between two beside pyzmq."""
    from flowrt.bench.cases.hop import measure

    run_case("hop", measure(within), pairs, json)


@bench_app.command
def transports(
    *,
    pairs: Pairs = 20,
    json: JsonFile = None,
    plot: Annotated[
        str | None, Parameter(help="Draw latency and bandwidth over size into this file (.svg, .png, .pdf). [default: beside the JSON]")
    ] = None,
) -> None:
    """Measure each transport from actor to actor beside installed peers. Every byte is read and checked."""
    from flowrt.bench.cases.transports import measure
    from flowrt.bench.report.plots import plot_transports

    picture = plot or (str(Path(json).with_suffix(".svg")) if json is not None and json != "-" else None)
    run_case("transports", measure(), pairs, json, draw=plot_transports, plot=picture)


@bench_app.command
def m2n(
    *,
    senders: Annotated[Positive, Parameter(help="Processes that send.")] = 4,
    receivers: Annotated[Positive, Parameter(help="Processes that receive.")] = 4,
    bytes: Annotated[Positive, Parameter(help="Bytes that each sender sends each receiver in a round.")] = 256 << 10,
    pairs: Annotated[Pairs, Parameter(help="Alternating pairs per figure, of 100 rounds each; a claim takes 20 or more.")] = 20,
    transport: Annotated[str, Parameter(help="The transport of every edge.")] = "auto",
    json: JsonFile = None,
) -> None:
    """Measure messages from every sender to every receiver, beside gloo's all_to_all and isend. Every byte is read and checked."""
    from flowrt.bench.cases.m2n import measure

    run_case(f"m2n, {senders} to {receivers}, {bytes} bytes", measure(senders, receivers, bytes, transport), pairs, json)


@bench_app.command
def model(
    *,
    refit: Annotated[Switch, Parameter(help="Fit constants anew, with all rows and without each.")] = False,
    plot: PlotFile = None,
    json: JsonFile = None,
) -> None:
    """Compare what the cost model predicts with what others have published; nothing is measured.

    Exit code 1: an identity does not hold, or a score is missed.
    """
    from flowrt.bench.cases.model import compare_published
    from flowrt.bench.report.plots import check_plot
    from flowrt.system.output_file import check_writable

    if json is not None:
        check_writable(json)
    check_plot(plot)
    raise SystemExit(int(not compare_published(json, plot, refit)))


@bench_app.command
def machine(
    card: Annotated[str, Parameter(help="The card of this machine, which flowrt profile wrote.")],
    /,
    *,
    threads: Annotated[Positive, Parameter(help="Compute threads of each process, as in the profile.")] = 1,
    dtype: Annotated[Literal["bfloat16", "float32"], Parameter(help="Dtype of the model.")] = "bfloat16",
    shapes: Annotated[int, Parameter(validator=Number(gte=1, lte=30), help="Number of deployments and batches.")] = 30,
    json: JsonFile = None,
) -> None:
    """Compare decode and prefill of real runs on this machine with what its card predicts, and the deployment that is picked."""
    from flowrt.bench.cases.machine import check_card, measure
    from flowrt.costs.devices import read_device

    check_card(device := read_device(card))
    run_case("machine", measure(device, threads, dtype, shapes), 1, json, {"threads": threads, "dtype": dtype})


@bench_app.command
def links(
    *,
    profile: Annotated[str, Parameter(help="a link that flowrt doctor lists, or latency_seconds=..,bandwidth_...=..")] = "ub",
    dilation: Annotated[
        float | None, Parameter(validator=Number(gt=0), help="Factor of all times. [default: one that this machine allows]")
    ] = None,
    rounds: Annotated[Positive, Parameter(help="Measurements of each case; an interval takes at least 6.")] = 6,
    transport: Annotated[str, Parameter(help="The transport that carries the emulated messages.")] = "auto",
    json: JsonFile = None,
) -> None:
    """Compare emulated links between processes with their profile: latency, bandwidth, and eight flows that share a NIC."""
    from flowrt.bench.cases.links import measure

    run_case(f"links, {profile}", measure(profile, dilation, transport), rounds, json)


@bench_app.command
def start(
    graph: Annotated[Path, Parameter(help="A graph file with prompts of its own.")],
    /,
    *,
    runs: Annotated[Positive, Parameter(help="Number of measured runs, after one that is not counted.")] = 10,
    model: ModelOption = None,
    json: JsonFile = None,
) -> None:
    """Measure the time from `flowrt run` to its first token, and its parts, with files already in the page cache."""
    from flowrt.bench.cases.start import measure

    run_case("start", measure(graph, model), runs, json, {"graph": graph.name}, model=model)


@bench_app.command
def detector(
    *,
    tries: Annotated[int, Parameter(validator=Number(gte=0), help="Faults of each kind, about three seconds each.")] = 20,
    seconds: Annotated[float, Parameter(validator=Number(gte=0), help="Seconds to watch slow processes; a claim takes an hour.")] = 120.0,
    workers: Annotated[
        Positive | None, Parameter(validator=Number(gte=1), help="Number of slow processes. [default: eight per core]")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Measure how soon a stopped process is marked dead, and how often a slow process is marked dead wrongly."""
    from flowrt.bench.cases.detector import measure

    run_case("detector", measure(tries, seconds, workers), 1, json)


@bench_app.command
def restart(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model with expert servers and replicas.")],
    /,
    *,
    pairs: Pairs = 20,
    model: ModelOption = None,
    process: Annotated[str, Parameter(help="The process to kill.")] = "experts.0",
    overrides: Overrides = (),
    json: JsonFile = None,
) -> None:
    """Measure how soon a killed process is back: from a standby process, from weights in shared memory, and from files."""
    from flowrt.bench.cases.restart import measure, read_graphs

    run_case(f"restart, {graph.name}", measure(read_graphs(graph, model, overrides, process), process), pairs, json, model=model)


@bench_app.command
def recovery(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model with expert servers and several groups.")],
    /,
    *,
    options: RecoveryOptions = RecoveryOptions(),
    pairs: Pairs = 20,
    model: ModelOption = None,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Compare recovery policies: the tokens that a load loses when an expert server or a group is killed."""
    from flowrt.chaos.recovery import measure, plot_recovery, read_graphs

    prepared = read_graphs(graph, model, options)
    run_case(f"recovery, {graph.name}", measure(prepared), pairs, json, asdict(options), plot_recovery, plot, model)


@bench_app.command
def prefix(
    *,
    model: Annotated[Path | None, Parameter(help="A Hugging Face model directory. [default: a small model with random weights]")] = None,
    shared: Annotated[Positive, Parameter(help="Tokens that both prompts of a pair have in common, at their beginning.")] = 1024,
    suffix: Annotated[Positive, Parameter(help="Further tokens of each prompt.")] = 128,
    pairs: Pairs = 20,
    overrides: Overrides = (),
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Measure the time to the first token of a prompt that shares its beginning with an earlier one, with and without the prefix cache."""
    from flowrt.bench.cases.prefix import measure

    details = {"model": model.name if model is not None else None, "shared": shared, "suffix": suffix}
    run_case("prefix", measure(model, shared, suffix, overrides), pairs, json, details, plot=plot, model=model)


@bench_app.command
def kv_transfer(
    *,
    model: Annotated[Path | None, Parameter(help="A Hugging Face model directory. [default: a small model with random weights]")] = None,
    tokens: Annotated[Positive, Parameter(help="Tokens of each prompt.")] = 4000,
    streams: StreamOptions = StreamOptions(),
    pairs: Pairs = 20,
    overrides: Overrides = (),
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Measure how long a KV transfer delays the second token, beside a group that computes the prompt itself.

    With --streams, measure the inter-token latency of running sequences while
    prompts arrive: with a prefill worker on one core and the group on another,
    beside a group that computes prompts and tokens on both.
    """
    from flowrt.bench.cases.kv_transfer import measure, measure_interference

    details = {"model": model.name if model is not None else None, "tokens": tokens, **asdict(streams)}
    results = measure_interference(model, tokens, streams, overrides) if streams.streams else measure(model, tokens, overrides)
    run_case("kv-transfer", results, pairs, json, details, plot=plot, model=model)


@bench_app.command
def latency(
    graph: ServedGraph,
    /,
    *,
    options: LatencyOptions = LatencyOptions(),
    pairs: Pairs = 20,
    model: ModelOption = None,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Compare the inter-token latency of a graph under two sets of settings: p50, p99 and the longest."""
    from flowrt.bench.cases.latency import measure, read_graphs

    results = measure(read_graphs(graph, model, options), options)
    run_case(f"latency, {graph.name}", results, pairs, json, asdict(options), plot=plot, model=model)


@bench_app.command
def sweep(*files: SweepFiles, options: SweepOptions = SweepOptions()) -> None:
    """Compare the variants of a graph that sweep files describe, such as examples/sweeps/*.yaml, in virtual time or between processes.

    With several files, the names of --json and --plot get the name of each.
    """
    from flowrt.bench.report.plots import plot_curves
    from flowrt.bench.sweep.run import measure_sweep
    from flowrt.bench.sweep.sweep_file import read_sweep

    if not files:
        raise UserError("name a sweep file, such as examples/sweeps/overlap.yaml")
    if len(files) > 1 and options.json == STDOUT:
        raise UserError("--json - is for one sweep file; name a file")
    sweeps = {file: read_sweep(file, options.processes) for file in files}
    for file, each in sweeps.items():
        json, plot = (path and (path if len(files) == 1 else _with_stem(path, file.stem)) for path in (options.json, options.plot))
        draw, results = None if options.processes else plot_curves, measure_sweep(each, options.dilation)
        run_case(file.stem, results, options.pairs, json, {"axes": each.labels}, draw, plot, command="flowrt bench sweep")


def _with_stem(path: str, stem: str) -> str:
    return str(Path(path).with_stem(f"{Path(path).stem}-{stem}"))


@bench_app.command
def decode(
    model: ModelDirectory,
    /,
    *,
    graph: Annotated[Path, Parameter(help="The graph file that serves MODEL; the file's own model is not used.")],
    options: DecodeOptions = DecodeOptions(),
    pairs: Pairs = 20,
    against: Annotated[Path | None, Parameter(help="Compare with this graph file instead of transformers.")] = None,
    against_set: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            show_default=False,
            help="Override a key of the second graph, as path=value; without --against this is GRAPH with these keys.",
        ),
    ] = (),
    vllm: Annotated[str | None, Parameter(help="Also compare with vLLM's CPU build in this Python interpreter.")] = None,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Measure prefill and decode in tokens per second, beside the fastest expert implementation of transformers on the same cores.

    The command also compares the tokens, checks memory against its bound, and
    shows where the time of a decode step goes. Exit code 1: float32 tokens differ.
    """
    from flowrt.bench.cases.decode import have_different_tokens, measure

    second = against or (graph if against_set else None)
    if second is None and find_spec("transformers") is None:
        raise UserError("the peer is transformers, which is not installed; pip install transformers, or name another graph with --against")
    against_name = second.name if second is not None else None
    details = {"model": model.name, "graph": graph.name, "against": against_name, **asdict(options)}
    results = measure(model, graph, options, second, against_set, vllm)
    report = run_case("decode", results, pairs, json, details, plot=plot, model=model)
    raise SystemExit(int(have_different_tokens(report)))


@bench_app.command
def operators(
    model: Annotated[Path | None, Parameter(help="A Hugging Face model directory. [default: random weights of the sizes below]")] = None,
    /,
    *,
    options: OperatorOptions = OperatorOptions(),
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Measure each operator beside its roofline, from the measured bandwidth and the measured rate of multiplications."""
    from flowrt.bench.cases.operators import measure
    from flowrt.bench.report.plots import plot_operators

    if options.top_k > options.experts:
        raise UserError(f"--top-k is {options.top_k}, more than --experts, which is {options.experts}")
    details = {"model": model.name if model is not None else None, "sizes": options.sizes, **asdict(options)}
    run_case("operators", measure(model, options), 1, json, details, plot_operators, plot, model)


@bench_app.command
def serve(*, options: LoadOptions = LoadOptions()) -> None:
    """Send a load to any server of OpenAI's API and measure its responses, with the options and the table of `vllm bench serve`.

    The key of the server is read from OPENAI_API_KEY. Exit code 1: no request succeeded.
    """
    if find_spec("httptools") is None:
        raise UserError(f"flowrt bench serve needs httptools: {install_command('serve')}")
    from flowrt.bench.load.measure import bench_serve

    key = os.environ.get("OPENAI_API_KEY") or None
    check_api_key(key, "OPENAI_API_KEY")
    raise SystemExit(int(not bench_serve(options, key)))


@bench_app.command
def strict(
    model: ModelDirectory,
    /,
    *,
    graph: Annotated[Path | None, Parameter(help="A graph file. [default: one group and two expert servers]")] = None,
    options: DecodeOptions = DecodeOptions(),
    pairs: Pairs = 20,
    json: JsonFile = None,
) -> None:
    """Measure the cost of strict numerics: two graphs that differ only in `numerics:`, their row blocks, and the start-up proof."""
    from flowrt.bench.cases.strict import measure

    details = {"model": model.name, "graph": graph.name if graph is not None else None, **asdict(options)}
    run_case("strict", measure(model, graph, options), pairs, json, details, model=model)


@bench_app.command
def reliability(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model with expert servers.")],
    /,
    *,
    options: ServedOptions = ServedOptions(),
) -> None:
    """Measure the cost of detector, failover and hedging without failures: the same graph with and without them."""
    from flowrt.bench.cases.reliability import measure, read_graphs

    run_served("reliability", graph, options, measure(read_graphs(graph, options.model, options.decode), options.decode))


@bench_app.command(name="log")
def request_log(
    graph: ServedGraph,
    /,
    *,
    options: ManyRequestsOptions = ManyRequestsOptions(),
    sync: Annotated[Switch, Parameter(help="Wait for the disk, as with request_log_sync.")] = False,
) -> None:
    """Measure the cost of a request log, and the time from a resume until each of `--batch` open requests has its next token."""
    from flowrt.bench.cases.log_cost import measure

    run_served("log", graph, options, measure(graph, options.model, options.decode, sync))


@bench_app.command
def api(graph: ServedGraph, /, *, options: ManyRequestsOptions = ManyRequestsOptions()) -> None:
    """Measure the cost of HTTP: streams of a running graph beside its Python API, and the processor time of each process."""
    from flowrt.bench.cases.api_cost import measure

    run_served("api", graph, options, measure(graph, options.model, options.decode))


@bench_app.command
def structured(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model with a tokenizer.")],
    /,
    *,
    options: ServedOptions = ServedOptions(),
) -> None:
    """Measure what structured output costs: the decode speed with a JSON schema for every sequence beside that without."""
    from flowrt.bench.cases.structured import measure

    run_served("structured", graph, options, measure(graph, options.model, options.decode))
