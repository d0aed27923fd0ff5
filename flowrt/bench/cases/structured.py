"""What structured output costs: a batch of one running graph with a grammar for every sequence and without, in turns."""

from __future__ import annotations

from pathlib import Path

from flowrt.api import open_graph
from flowrt.bench.cases.case_options import DecodeOptions
from flowrt.bench.cases.decode import measure_setting, read_served_graph
from flowrt.bench.measure.benchmark import Results
from flowrt.bench.measure.decoding import GraphSide
from flowrt.bench.report.figures import Target
from flowrt.structured_outputs import StructuredOutputs

SCHEMA = '{"type": "array", "minItems": 100000, "items": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 20}]}}'
NAMES = "structured", "without"
TARGET = Target(0.97, at_most=False)  # of the decode speed without


async def measure(graph_file: Path, model: Path | None, options: DecodeOptions) -> Results:
    """The decode speeds of both sides. No output is complete before it has all its tokens, whatever the weights are."""
    async with open_graph(read_served_graph(graph_file, model, options, options.overrides)) as running:
        sides = [GraphSide(running, NAMES[0], StructuredOutputs(json=SCHEMA)), GraphSide(running, NAMES[1])]
        async for result in measure_setting(sides, options, "decode", TARGET):
            if not isinstance(result, str):  # that the tokens differ is no news here
                yield result
