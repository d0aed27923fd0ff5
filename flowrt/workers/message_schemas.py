"""Builds the schemas of a graph's edges: from the output ports of the kinds of operators, and from the declarations of a user's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

from flowrt.dataflow.schemas import MessageSchema, Spec, parse_spec
from flowrt.graph.derived import derived
from flowrt.graph.extra_tensors import sent_extras
from flowrt.graph.kinds import Port
from flowrt.graph.model import Edge, Graph
from flowrt.graph.numerics import strict_exchanges
from flowrt.operators.model_config import ModelConfig
from flowrt.workers.model_nodes import config_of


@derived
def edge_schemas(graph: Graph) -> dict[int, MessageSchema]:
    """The schema of each edge between two processes, by id."""
    config = None if graph.model is None else config_of(graph)
    sources = frozenset(node.name for node in graph.nodes.values() if node.kind.emits)
    schema_of = partial(MessageSchema, sources=sources, num_micro_batches=graph.micro_batches)
    strict = strict_exchanges(graph)
    found: dict[int, MessageSchema] = {}
    for edge in graph.edges.values():
        source = graph.nodes[edge.source]
        port = source.kind.output(edge.source_port)
        if not graph.crosses(edge):
            continue
        if port is None:
            found[edge.id] = schema_of((_declared(graph, edge),))
        elif config is not None:
            schema = schema_of_port(port, config, source.process in strict, sources, graph.micro_batches)
            if source.kind.kv == "offers":
                states = (parse_spec("uint8[bytes]"),) if config.recurrent_layers else ()
                schema = replace(schema, tensors=schema.tensors + states)
                schema = replace(schema, optional=tuple(map(parse_spec, sent_extras(graph, source.process).values())))
            found[edge.id] = _as_int8(schema) if edge.int8 else schema
    return found


def _as_int8(schema: MessageSchema) -> MessageSchema:
    """The schema of messages whose first tensor, the rows, travels as INT8 with a scale per row at the end (payload.py)."""
    rows, *others = schema.tensors
    assert rows is not None
    scales = Spec("float32", rows.dimensions[:-1])
    return replace(schema, tensors=(Spec("int8", rows.dimensions), *others, scales))


def _declared(graph: Graph, edge: Edge) -> Spec | None:
    """The one tensor of a user's operator, as the graph file declares it at either end."""
    for port in (graph.nodes[edge.source].outputs.get(edge.source_port), graph.nodes[edge.target].inputs.get(edge.target_port)):
        if port is not None and port.tensors:
            return parse_spec(port.tensors[0])
    return None


@lru_cache(maxsize=64)
def schema_of_port(port: Port, config: ModelConfig, strict: bool, sources: frozenset[str], num_micro_batches: int) -> MessageSchema:
    """The schema of the messages of an output port of a built-in operator."""
    dtypes = {"": config.dtype, "wide": "float64" if config.dtype == "float64" else "float32", "pages": config.page_dtype}
    sizes = _sizes_of(config)

    def specs(texts: str) -> tuple[Spec, ...]:
        return tuple(_bound(text, dtypes, sizes) for text in texts.split())

    tensors = port.strict_tensors if strict and port.strict_tensors is not None else port.tensors
    repeated = next(iter(specs(port.repeated)), None)
    return MessageSchema(specs(tensors), sources, num_micro_batches, specs(port.optional), repeated, port.header)


def _sizes_of(config: ModelConfig) -> Mapping[str, int]:
    """The sizes that specs of kinds name (graph/kinds.py)."""
    first, second = config.page_columns
    of_pages = {"kv_heads": config.num_kv_heads, "first_columns": first, "second_columns": second}
    return {"hidden": config.hidden_size, "active": config.num_experts_per_token, **of_pages}


def _bound(text: str, dtypes: Mapping[str, str], sizes: Mapping[str, int]) -> Spec:
    """The spec of a kind in the dtypes and sizes of a model."""
    name, bracket, dimensions = text.partition("[")
    spec = parse_spec(dtypes.get(name, name) + bracket + dimensions)
    return Spec(spec.dtype, tuple(sizes.get(each, each) if isinstance(each, str) else each for each in spec.dimensions))
