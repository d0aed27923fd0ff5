"""The commands of `flowrt bench` that decode a batch by one graph in two ways."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from flowrt.bench.cases.options import DecodeOptions, JsonFile, Pairs, Positive
from flowrt.cli.bench import ModelOption, Overrides, bench_app, run_case

__all__ = ["bench_app"]


@bench_app.command
def reliability(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model with expert servers.")],
    /,
    *,
    pairs: Pairs = 20,
    batch: Annotated[Positive, Parameter(help="Prompts at a time.")] = 8,
    prompt_tokens: Annotated[Positive, Parameter(help="Tokens of each prompt.")] = 16,
    new_tokens: Annotated[int, Parameter(validator=Number(gte=2), help="New tokens of each sequence.")] = 64,
    model: ModelOption = None,
    overrides: Overrides = (),
    json: JsonFile = None,
) -> None:
    """Measure the cost of detector, failover and hedging without failures: the same graph with and without them."""
    from flowrt.bench.cases.reliability import measure, read_graphs

    options = DecodeOptions(batch=(batch,), prompt_tokens=prompt_tokens, new_tokens=new_tokens, overrides=overrides)
    run_case(f"reliability, {graph.name}", measure(read_graphs(graph, model, options), options), pairs, json, model=model)


@bench_app.command(name="log")
def request_log(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model.")],
    /,
    *,
    pairs: Pairs = 20,
    batch: Annotated[Positive, Parameter(help="Prompts at a time, and open requests of a resume.")] = 32,
    prompt_tokens: Annotated[Positive, Parameter(help="Tokens of each prompt.")] = 16,
    new_tokens: Annotated[int, Parameter(validator=Number(gte=2), help="New tokens of each sequence.")] = 64,
    sync: Annotated[bool, Parameter(negative=(), show_default=False, help="Wait for the disk, as with request_log_sync.")] = False,
    model: ModelOption = None,
    overrides: Overrides = (),
    json: JsonFile = None,
) -> None:
    """Measure the cost of a request log, and the time from a resume until each open request has its next token."""
    from flowrt.bench.cases.request_log import measure

    options = DecodeOptions(batch=(batch,), prompt_tokens=prompt_tokens, new_tokens=new_tokens, overrides=overrides)
    run_case(f"log, {graph.name}", measure(graph, model, options, sync), pairs, json, model=model)


@bench_app.command
def api(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model.")],
    /,
    *,
    pairs: Pairs = 20,
    batch: Annotated[Positive, Parameter(help="Requests at a time.")] = 32,
    prompt_tokens: Annotated[Positive, Parameter(help="Tokens of each prompt.")] = 16,
    new_tokens: Annotated[int, Parameter(validator=Number(gte=2), help="New tokens of each request.")] = 64,
    model: ModelOption = None,
    overrides: Overrides = (),
    json: JsonFile = None,
) -> None:
    """Measure the cost of HTTP: streams of a running graph beside its Python API, and the processor time of each process."""
    from flowrt.bench.cases.api_cost import measure

    options = DecodeOptions(batch=(batch,), prompt_tokens=prompt_tokens, new_tokens=new_tokens, overrides=overrides)
    run_case(f"api, {graph.name}", measure(graph, model, options), pairs, json, model=model)


@bench_app.command
def structured(
    graph: Annotated[Path, Parameter(help="A graph file that serves a model with a tokenizer.")],
    /,
    *,
    pairs: Pairs = 20,
    batch: Annotated[Positive, Parameter(help="Prompts at a time.")] = 8,
    prompt_tokens: Annotated[Positive, Parameter(help="Tokens of each prompt.")] = 16,
    new_tokens: Annotated[int, Parameter(validator=Number(gte=2), help="New tokens of each sequence.")] = 64,
    model: ModelOption = None,
    overrides: Overrides = (),
    json: JsonFile = None,
) -> None:
    """Measure what structured output costs: the decode speed with a JSON schema for every sequence beside that without."""
    from flowrt.bench.cases.structured import measure

    options = DecodeOptions(batch=(batch,), prompt_tokens=prompt_tokens, new_tokens=new_tokens, overrides=overrides)
    run_case(f"structured, {graph.name}", measure(graph, model, options), pairs, json, model=model)
