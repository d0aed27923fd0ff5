"""Builds the schemas of a graph's edges: from the output of each built-in operator, and from the declarations of a user's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

from flowrt.dataflow.parts import BundleHeader, PartHeader, PlanHeader
from flowrt.dataflow.schemas import MessageSchema, Spec, parse_spec
from flowrt.exchange.kv_transfer import ChunkHeader, PullHeader
from flowrt.graph.builtin import FORWARD, KV_PACK, KV_UNPACK, RETURN, SOURCE
from flowrt.graph.extra_tensors import sent_extras
from flowrt.graph.model import INPUT, Edge, Graph
from flowrt.graph.numerics import strict_exchanges
from flowrt.graph.reach import emits
from flowrt.operators.model_config import ModelConfig
from flowrt.workers.model_nodes import config_of


def edge_schemas(graph: Graph) -> dict[int, MessageSchema]:
    """The schema of each edge between two processes, by id."""
    config = None if graph.model is None else config_of(graph)
    sources = frozenset(node.name for node in graph.nodes.values() if emits(node.operator))
    schema_of = partial(MessageSchema, sources=sources, num_micro_batches=graph.micro_batches)
    strict = strict_exchanges(graph)
    found: dict[int, MessageSchema] = {}
    for edge in graph.edges.values():
        source, target = graph.nodes[edge.source], graph.nodes[edge.target]
        if source.process == target.process:
            continue
        sent = {} if config is None else _sent_by_operators(config, source.process in strict, sources, graph.micro_batches)
        is_users = ":" in source.operator or source.operator == INPUT
        schema = schema_of((_declared(graph, edge),)) if is_users else sent.get((source.operator, edge.source_port.rstrip("0123456789")))
        if schema is not None and source.operator == KV_PACK:
            schema = replace(schema, optional=tuple(map(parse_spec, sent_extras(graph, source.process).values())))
        if schema is not None:
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


@lru_cache(maxsize=4)
def _sent_by_operators(
    config: ModelConfig, strict: bool, sources: frozenset[str], num_micro_batches: int
) -> Mapping[tuple[str, str], MessageSchema]:
    """By operator and output port; a port's number is left out."""
    schema_of = partial(MessageSchema, sources=sources, num_micro_batches=num_micro_batches)

    def specs(*texts: str) -> tuple[Spec, ...]:
        return tuple(parse_spec(f"{config.dtype}{text}" if text.startswith("[") else text) for text in texts)

    hidden, active = config.hidden_size, config.num_experts_per_token
    wide = "float64" if config.dtype == "float64" else "float32"
    rows = schema_of(specs(f"[rows,{hidden}]"))
    index = parse_spec("int64[any]")
    part = schema_of(specs(f"[rows,{hidden}]", "int64[pairs]", "int64[pairs]", "[pairs]"), header=PartHeader)
    responses = specs(f"[{'pairs' if strict else 'rows'},{hidden}]")
    latent = config.latent
    kv = [f"[tokens,{config.num_kv_heads},{config.head_dim}]"] * 2
    if latent is not None:
        kv = [f"[tokens,1,{latent.rank}]", f"[tokens,1,{latent.rope_width}]"]
    weighted = schema_of(specs(f"[rows,{active}]"), repeated=index, header=PlanHeader)
    return {
        (SOURCE, "tokens"): schema_of(specs("int64[rows]")),
        (SOURCE, "layout"): schema_of(specs("int64[rows]", "int64[rows]", "int64[starts]", "int64[sequences]", "int64[sequences,pages]")),
        (SOURCE, "sampling"): schema_of(
            specs(
                "int64[5,samples]",
                "float64[6,samples]",
                "int64[unfiltered]",
                "int64[filtered]",
                "int64[3,penalized]",
                "int64[2,biased]",
                "float64[biased]",
                "int64[masked]",
                "uint8[masked,mask_bytes]",
                "int64[logprobs]",
                "int64[ranks]",
                "int64[2,scored]",
            )
        ),
        ("embed", "x"): rows,
        ("attention", "normed"): rows,
        ("attention", "residual"): rows,
        ("gate", "routing"): schema_of(specs(f"int64[rows,{active}]", f"[rows,{active}]")),
        ("mlp", "y"): rows,
        ("shared", "y"): rows,
        ("dispatch", "plan"): weighted if strict else schema_of((), repeated=index, header=PlanHeader),
        ("dispatch", "server"): part,
        ("dispatch", "via"): schema_of(
            specs(f"[distinct,{hidden}]", "int64[rows]", "int64[pairs]", "int64[pairs]", "[pairs]"), header=BundleHeader
        ),
        (FORWARD, "server"): part,
        ("experts", "results"): schema_of(responses, header=PartHeader),
        (KV_UNPACK, "pull"): schema_of((), header=PullHeader),
        (KV_PACK, "chunk"): schema_of(specs(*kv), header=ChunkHeader),
        (RETURN, "group"): schema_of(responses, header=PlanHeader),
        ("combine", "y"): rows,
        ("head", "tokens"): schema_of(
            specs("int64[samples]"), optional=specs(f"{wide}[logprobs]", "int64[logprobs,ranks]", f"{wide}[logprobs,ranks]")
        ),
    }
