"""What structured output costs: a batch of one running graph with a grammar for every sequence and without, in turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from flowrt.api import open_graph, read_graph
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.decode import measure_batch
from flowrt.bench.measure.benchmark import Result
from flowrt.bench.measure.decoding import prompts_of
from flowrt.bench.measure.graph_side import GraphSide, check_limits
from flowrt.bench.measure.memory import served_model
from flowrt.bench.report.figures import Target
from flowrt.graph.numerics import numerics_text
from flowrt.operators.families.registry import read_model_config
from flowrt.structured_outputs import StructuredOutputs

SCHEMA = '{"type": "array", "minItems": 100000, "items": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 20}]}}'
NAMES = "structured", "without"
TARGET = Target(0.97, at_most=False)  # of the decode speed without


async def measure(graph_file: Path, model: Path | None, options: DecodeOptions) -> AsyncIterator[Result]:
    """The decode speeds of both sides. No output is complete before it has all its tokens, whatever the weights are."""
    (batch,) = options.batch
    graph = read_graph(graph_file, options.overrides, model)
    served = served_model(graph)
    check_limits(graph, options.batch, options.prompt_tokens, options.new_tokens)
    prompts = prompts_of(batch, options.prompt_tokens, read_model_config(Path(served.path)).vocab_size)
    async with open_graph(graph) as running:
        sides = [GraphSide(running, NAMES[0], StructuredOutputs(json=SCHEMA)), GraphSide(running, NAMES[1])]
        async for result in measure_batch(sides, prompts, f"{served.dtype}, {numerics_text(graph)}", options, {}, {"decode": TARGET}):
            if not isinstance(result, str):  # that the tokens differ is no news here
                yield result
