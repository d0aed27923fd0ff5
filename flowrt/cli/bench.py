"""`flowrt bench hop|transports|m2n|links|start|detector|reliability|decode|...`: the figures that flowrt publishes, measured where you are.

Here: the subcommands as a cyclopts App, which the main command line mounts, and what is refused before anything is measured.
Not here: what they measure (flowrt/bench).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from flowrt.errors import UserError

bench_app = App(name="bench", help="Measure flowrt against its peers, in alternating pairs. Close what else runs first.")

Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Positives = Annotated[list[int] | None, Parameter(negative=(), consume_multiple=True, validator=Number(gte=1))]
JsonFile = Annotated[str | None, Parameter(help='Write figures and machine to this file as JSON; "-" for standard output.')]


def _check(json: str | None, plot: str | None = None, model: Path | None = None) -> None:
    """Raises UserError now rather than after minutes of measuring."""
    from flowrt.bench.plots import check_plot
    from flowrt.cli.record import check_writable
    from flowrt.operators.families.registry import read_model_config
    from flowrt.operators.model_config import ModelError

    if json is not None:
        check_writable(json)
    check_plot(plot)
    if model is not None:
        try:
            read_model_config(model)
        except ModelError as error:
            raise UserError(str(error)) from None


@bench_app.command
def hop(
    *,
    pairs: Annotated[Positive, Parameter(help="Alternating pairs per figure; a claim takes 20 or more.")] = 40,
    json: JsonFile = None,
    within: Annotated[bool, Parameter(negative=(), help="Only within one process.", show_default=False)] = False,
) -> None:
    """What a message costs: within one process against asyncio queues, between two against pyzmq."""
    from flowrt.bench.commands import hop as measure

    _check(json)
    measure(pairs, json, within)


@bench_app.command
def transports(
    *,
    pairs: Annotated[Positive, Parameter(help="Alternating pairs per figure; a claim takes 20 or more.")] = 20,
    json: JsonFile = None,
    plot: Annotated[str | None, Parameter(help="Draw latency and bandwidth over size here (.svg, .png); else beside the JSON.")] = None,
) -> None:
    """Each transport from actor to actor, every byte read and checked, against the peers that are installed."""
    from flowrt.bench.commands import transports as measure

    _check(json, plot)
    measure(pairs, json, plot)


@bench_app.command
def m2n(
    *,
    senders: Annotated[Positive, Parameter(help="Processes that send.")] = 4,
    receivers: Annotated[Positive, Parameter(help="Processes that receive.")] = 4,
    bytes: Annotated[Positive, Parameter(help="What each sender gives each receiver in a round.")] = 256 << 10,
    pairs: Annotated[Positive, Parameter(help="Alternating pairs per figure, of 100 rounds each; a claim takes 20 or more.")] = 20,
    transport: Annotated[str, Parameter(help="The transport of every edge.")] = "auto",
    json: JsonFile = None,
) -> None:
    """Every sender to every receiver, every byte read and checked, against gloo's all_to_all and isend."""
    from flowrt.bench.commands import m2n as measure

    _check(json)
    measure(senders, receivers, bytes, pairs, transport, json)


@bench_app.command
def links(
    *,
    profile: Annotated[str, Parameter(help="ub, nvlink, hccs, roce-200g, roce-400g, vpc, or latency_seconds=..,bandwidth_...=..")] = "ub",
    dilation: Annotated[
        float | None, Parameter(validator=Number(gt=0), help="Of all times. [default: one that this machine allows]")
    ] = None,
    rounds: Annotated[Positive, Parameter(help="Times each case is measured; at least 6 for an interval.")] = 6,
    transport: Annotated[str, Parameter(help="What carries the messages below the emulation.")] = "auto",
    json: JsonFile = None,
) -> None:
    """Emulated links between processes against their own profile: latency, bandwidth, and eight flows that share a NIC."""
    from flowrt.bench.commands import links as measure

    _check(json)
    measure(profile, dilation, rounds, transport, json)


@bench_app.command
def start(
    graph: Annotated[Path, Parameter(help="A graph file with prompts of its own.")],
    /,
    *,
    runs: Annotated[Positive, Parameter(help="Runs that are counted; one more goes before.")] = 10,
    model: Annotated[Path | None, Parameter(help="A Hugging Face model directory, instead of the graph's.")] = None,
    json: JsonFile = None,
) -> None:
    """From `flowrt run` to its first token, with the files it reads in memory already, and where the time goes."""
    from flowrt.bench.commands import start as measure

    _check(json, model=model)
    measure(graph, runs, json, model)


@bench_app.command
def detector(
    *,
    tries: Annotated[Positive, Parameter(help="Tries per kind of standstill, three seconds each.")] = 20,
    seconds: Annotated[
        float, Parameter(validator=Number(gte=0), help="How long to watch a crowd of slow processes; the claim is for 3600.")
    ] = 120.0,
    workers: Annotated[Positive | None, Parameter(validator=Number(gte=1), help="Size of the crowd. [default: eight per core]")] = None,
    json: JsonFile = None,
) -> None:
    """Measure how soon a process that stands still is marked dead, and how often a slow one is."""
    from flowrt.bench.commands import detector as measure

    _check(json)
    measure(tries, seconds, workers, json)


@bench_app.command
def reliability(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model by expert servers.")],
    /,
    *,
    pairs: Annotated[Positive, Parameter(help="Alternating pairs; a claim takes 20 or more.")] = 20,
    batch: Annotated[Positive, Parameter(help="Prompts at a time.")] = 8,
    prompt_tokens: Annotated[Positive, Parameter(help="Tokens of each prompt.")] = 16,
    new_tokens: Annotated[Positive, Parameter(help="Tokens of each answer.")] = 64,
    model: Annotated[Path | None, Parameter(help="A Hugging Face model directory, instead of the graph's.")] = None,
    overrides: Annotated[list[str] | None, Parameter(name="--set", negative=(), help="path=value, for both graphs.")] = None,
    json: JsonFile = None,
) -> None:
    """What detector, failover and hedging cost while nothing happens: the same graph with and without them, in turns."""
    from flowrt.bench.commands import reliability as measure
    from flowrt.bench.reliability import Options

    _check(json, model=model)
    options = Options(
        graph=graph,
        model=model,
        overrides=tuple(overrides or ()),
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        num_pairs=pairs,
    )
    measure(options, json)


@bench_app.command
def decode(
    model: Annotated[Path, Parameter(help="A Hugging Face model directory.")],
    /,
    *,
    graph: Annotated[Path, Parameter(help="The graph file that serves it; its own model is not used.")],
    dtype: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True, help="[default: float32 bfloat16]")] = None,
    batch: Annotated[Positives, Parameter(help="Batch sizes. [default: 1 8 32]")] = None,
    prompt_tokens: Annotated[Positive, Parameter(help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[Positive, Parameter(help="Tokens of each answer; the first belongs to the prefill.")] = 32,
    pairs: Annotated[Positive, Parameter(help="Alternating pairs per batch size; a claim takes 20 or more.")] = 20,
    overrides: Annotated[list[str] | None, Parameter(name="--set", negative=(), help="path=value, for the graph.")] = None,
    against: Annotated[Path | None, Parameter(help="A second graph file, measured against instead of transformers.")] = None,
    against_set: Annotated[
        list[str] | None,
        Parameter(negative=(), help="path=value, for the second graph, which is the first one then, if --against names none."),
    ] = None,
    vllm: Annotated[str | None, Parameter(help="A Python interpreter that has vLLM's CPU build: a second peer.")] = None,
    json: JsonFile = None,
    plot: Annotated[str | None, Parameter(help="Draw the ratios into this file (.svg, .png, .pdf).")] = None,
) -> None:
    """Prefill and decode in tokens per second, against the fastest expert implementation of transformers on the same cores.

    Tokens are compared, memory is held against its bound, and where a decode
    step's time goes is shown. Exit code 1: float32 tokens differ.
    """
    from flowrt.bench.decode import Options
    from flowrt.bench.decode_command import run

    _check(json, plot, model)
    if against is None and not against_set and find_spec("transformers") is None:
        raise UserError("the peer is transformers, which is not installed; pip install transformers, or name another graph with --against")
    options = Options(
        model=model,
        graph=graph,
        dtypes=tuple(dtype or ("float32", "bfloat16")),
        batches=tuple(batch or (1, 8, 32)),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        num_pairs=pairs,
        overrides=tuple(overrides or ()),
        against=graph if against is None and against_set else against,
        against_overrides=tuple(against_set or ()),
        vllm=vllm,
    )
    raise SystemExit(run(options, json, plot))


@bench_app.command
def operators(
    model: Annotated[Path | None, Parameter(help="A Hugging Face model directory. [default: random weights of the sizes below]")] = None,
    /,
    *,
    dtype: Annotated[Literal["float32", "bfloat16"], Parameter(help="Of weights and products.")] = "float32",
    rows: Annotated[Positives, Parameter(help="[default: 1 4 8 32 128 512]")] = None,
    context: Annotated[Positive, Parameter(help="Tokens that each row attends to.")] = 64,
    layers: Annotated[Positive, Parameter(help="Layers with experts that are timed in turn.")] = 4,
    threads: Annotated[Positive, Parameter(help="Compute threads. One is timed by its processor time, which load disturbs less.")] = 1,
    hidden: Annotated[Positive, Parameter(help="Without a model: width of a row.")] = 1024,
    width: Annotated[Positive, Parameter(help="Width of an expert.")] = 512,
    experts: Annotated[Positive, Parameter(help="Experts of a layer.")] = 32,
    top_k: Annotated[Positive, Parameter(help="Experts of a row.")] = 4,
    vocabulary: Annotated[Positive, Parameter(help="Tokens of the vocabulary.")] = 32000,
    json: JsonFile = None,
    plot: Annotated[str | None, Parameter(help="Draw the fractions of the limit into this file (.svg, .png, .pdf).")] = None,
) -> None:
    """Each operator's time against its roofline: bytes over measured bandwidth, multiplications over the measured rate."""
    from flowrt.bench.operators_command import run
    from flowrt.bench.roofline import Options

    if top_k > experts:
        raise UserError(f"--top-k is {top_k}, more than --experts, which is {experts}")
    sizes = {"hidden": hidden, "width": width, "experts": experts, "top-k": top_k, "vocabulary": vocabulary}
    _check(json, plot, model)
    options = Options(
        model=model,
        sizes=sizes,
        dtype=dtype,
        rows=tuple(rows or (1, 4, 8, 32, 128, 512)),
        context=context,
        layers=layers,
        num_threads=threads,
    )
    run(options, json, plot)


@bench_app.command
def strict(
    model: Annotated[Path, Parameter(help="A Hugging Face model directory.")],
    /,
    *,
    graph: Annotated[Path | None, Parameter(help="A graph file. [default: one group and two expert servers]")] = None,
    dtype: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True, help="[default: float32 bfloat16]")] = None,
    batch: Annotated[Positives, Parameter(help="Batch sizes. [default: 1 8 32]")] = None,
    prompt_tokens: Annotated[Positive, Parameter(help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[Positive, Parameter(help="Tokens of each answer.")] = 32,
    pairs: Annotated[Positive, Parameter(help="Alternating pairs per batch size; a claim takes 20 or more.")] = 20,
    overrides: Annotated[list[str] | None, Parameter(name="--set", negative=(), help="path=value, for both graphs.")] = None,
    json: JsonFile = None,
) -> None:
    """What strict numerics cost: two graphs that differ in `numerics:` alone, the blocks in use, and the check at the start."""
    from flowrt.bench.strict import Options
    from flowrt.bench.strict_command import run

    _check(json, model=model)
    options = Options(
        model=model,
        graph=graph,
        dtypes=tuple(dtype or ("float32", "bfloat16")),
        batches=tuple(batch or (1, 8, 32)),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        num_pairs=pairs,
        overrides=tuple(overrides or ()),
    )
    run(options, json)
