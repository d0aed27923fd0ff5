"""The functions of a model graph's nodes: binds built-in operator names to weights.

Each worker reads only the weights of its own nodes. user_nodes.py builds the functions of a user's graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.subgraph import NodeFunction
from flowrt.engine.batch import Batch, SampleSpec
from flowrt.exchange.dispatch import Combine, Dispatch
from flowrt.exchange.expert_client import ExpertClient
from flowrt.exchange.expert_service import ExpertService
from flowrt.graph.builtin import SOURCE
from flowrt.graph.model import INPUT, OUTPUT, Graph, GraphLimits, Node
from flowrt.graph.placement import expert_map_of, held_experts
from flowrt.operators.attention import attention_for
from flowrt.operators.attention_block import AttentionBlock
from flowrt.operators.dense import DenseMlp, SharedExperts
from flowrt.operators.embedding import Embedding
from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.gate import Gate
from flowrt.operators.head import Head
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.proof import blocks_of, prove
from flowrt.operators.row_blocks import WHOLE, StrictBlocks, describe
from flowrt.operators.sampling import log_probabilities, sample
from flowrt.operators.sampling_inputs import Draw, SamplingInputs
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import TORCH_DTYPES, Checkpoint
from flowrt.transports.wire.message import Tag

log = logging.getLogger("flowrt.worker")

MAX_BATCH_BYTES = 1 << 30  # of rows and intermediate values when an expert server computes several requests in one call
Outputs = list[dict[str, Payload]]
M = TypeVar("M", AttentionBlock[Any], Gate, DenseMlp, SharedExperts, Experts, Head)


def build_model_nodes(
    graph: Graph, process: str, device: torch.device, on_built: Callable[[str, int, int], None], now: Callable[[], float]
) -> dict[str, NodeFunction]:
    """A function for each node of `process` with a built-in operator. `on_built(name, done, total)` reports the loading progress; `now`
    returns seconds, for the profile of products (operators/expert_products.py).

    With strict numerics each module makes its proof (operators/row_blocks.py) before the worker serves requests.
    Raises ModelError when the checkpoint lacks a tensor or a proof fails, ValueError for an operator that is not built in.
    """
    nodes = [node for node in graph.nodes_of(process) if ":" not in node.operator and node.operator not in (SOURCE, INPUT, OUTPUT)]
    if not nodes:
        return {}
    if graph.model is None:
        raise ValueError(f"node {nodes[0].name}: {nodes[0].operator!r} is an operator of a model, and the graph names none")
    directory = Path(graph.model.path)
    config = read_model_config(directory).with_dtype(graph.model.dtype)
    checkpoint = Checkpoint(directory)

    @cache
    def pages() -> KvPages:
        return KvPages.for_model(config, graph.limits_of(process).kv_pages, graph.limits.page_size, device)

    strict = graph.numerics == "strict"
    blocks = blocks_of(config, torch.get_num_threads()) if strict else WHOLE

    def proven(module: M) -> M:
        if strict:
            prove(module, config, device)
        return module

    embedding: Embedding | None = None
    clients = [expert_client(graph, node, config, device, now) for node in nodes if node.operator == "dispatch"]  # a group has one at most
    functions: dict[str, NodeFunction] = {}
    for done, node in enumerate(nodes):
        on_built(node.name, done, len(nodes))
        match node.operator:
            case "embed":
                embedding = Embedding(config, checkpoint, device)
                functions[node.name] = for_each(_EmbedNode(embedding))
            case "attention":
                attention = proven(attention_for(config, checkpoint, range(config.num_layers), device, blocks))
                functions[node.name] = for_each(_AttentionNode(attention, pages()))
            case "gate":
                functions[node.name] = for_each(_GateNode(proven(Gate(config, checkpoint, config.moe_layers, device, blocks))))
            case "mlp":
                functions[node.name] = for_each(_MlpNode(proven(DenseMlp(config, checkpoint, config.dense_layers, device, blocks))))
            case "shared":
                functions[node.name] = for_each(_MlpNode(proven(SharedExperts(config, checkpoint, config.moe_layers, device, blocks))))
            case "dispatch":
                functions[node.name] = Dispatch(clients[0], strict)
            case "experts":
                held = held_experts(node.options["experts"], config.moe_layers)
                functions[node.name] = ExpertService(
                    proven(Experts(config, checkpoint, held, device, blocks, now)),
                    strict,
                    **pair_bounds(config, graph.group_limits(widest=True)),
                )
            case "combine":
                functions[node.name] = Combine(clients[0], strict)
            case "head":
                functions[node.name] = for_each(_HeadNode(proven(Head(config, checkpoint, device, embedding, blocks))))
            case _:
                raise ValueError(
                    f"node {node.name}: {node.operator!r} is not a built-in operator; write module:function for one of your own"
                )
    on_built("", len(nodes), len(nodes))
    if isinstance(blocks, StrictBlocks):
        log.info("%s: strict numerics: %s", process, describe(blocks.sizes))
    return functions


def pair_bounds(config: ModelConfig, limits: GraphLimits) -> dict[str, int]:
    """The maximum number of pairs that an expert service computes in one call, and the maximum per part."""
    pair_bytes = TORCH_DTYPES[config.dtype].itemsize * 2 * (config.hidden_size + config.expert_width)
    return {
        "max_pairs": max(1, MAX_BATCH_BYTES // pair_bytes),
        "max_part_pairs": limits.max_num_batched_tokens * config.num_experts_per_token,
    }


def strict_blocks_text(graph: Graph) -> str:
    """The row blocks that this process has proven for a strict graph's model, as text; "" for none. Call it in the thread that built
    the nodes: another thread may use another number of compute threads."""
    if graph.numerics != "strict" or graph.model is None:
        return ""
    config = read_model_config(Path(graph.model.path)).with_dtype(graph.model.dtype)
    return describe(blocks_of(config, torch.get_num_threads()).sizes)


def batch_payloads(batch: Batch, page_size: int, device: torch.device) -> dict[str, Payload]:
    """The source's outputs for a step: tokens_T, the layout, and the sampling parameters of each sampled row."""
    layout = StepLayout.from_lists(batch.query_lengths, batch.kv_lengths, batch.page_tables, page_size, device)
    draws = [draw_of(row, spec) for row, spec in zip(batch.sample_rows, batch.samples, strict=True)]
    return {
        "tokens": Payload((torch.tensor(batch.token_ids, dtype=torch.int64, device=device),)),
        "layout": Payload(layout.to_tensors()),
        "sampling": Payload(tuple(SamplingInputs.from_draws(draws, device))),
    }


def draw_of(row: int, spec: SampleSpec) -> Draw:
    params = spec.params
    return Draw(
        row,
        params.temperature,
        params.top_k,
        params.top_p,
        spec.seed,
        spec.choice,
        spec.token_index,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.logprobs,
        spec.output_counts,
        spec.forbidden_token_ids,
    )


def for_each(function: Callable[[Firing], dict[str, Payload]]) -> NodeFunction:
    """Wraps a function of one firing as a node function."""

    def run(firings: Sequence[Firing]) -> Outputs:
        return [function(firing) for firing in firings]

    return run


class _EmbedNode:
    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding

    def __call__(self, firing: Firing) -> dict[str, Payload]:
        return {"x": Payload((self._embedding.forward(firing.inputs["tokens"].tensors[0]),))}


class _AttentionNode:
    """Stateful by its pages. The layers of a step get one layout message between them, so it is read once per step and micro-batch."""

    def __init__(self, block: AttentionBlock[Any], pages: KvPages) -> None:
        self._block = block
        self._pages = pages
        self._read: dict[tuple[str, int], tuple[Payload, StepLayout]] = {}

    def __call__(self, firing: Firing) -> dict[str, Payload]:
        layout = self._layout(firing.tag, firing.inputs["layout"])
        residual_TH, normed_TH = self._block.forward(firing.tag.layer, firing.inputs["x"].tensors[0], layout, self._pages)
        return {"residual": Payload((residual_TH,)), "normed": Payload((normed_TH, layout.positions_T))}

    def _layout(self, tag: Tag, payload: Payload) -> StepLayout:
        micro_batch = (tag.source, tag.micro_batch)
        read, layout = self._read.get(micro_batch, (None, None))
        if read is not payload or layout is None:
            layout = StepLayout.from_tensors(payload.tensors)
            self._read[micro_batch] = payload, layout
        return layout


class _GateNode:
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __call__(self, firing: Firing) -> dict[str, Payload]:
        return {"routing": Payload(self._gate.forward(firing.tag.layer, firing.inputs["x"].tensors[0]))}


class _MlpNode:
    def __init__(self, mlp: DenseMlp | SharedExperts) -> None:
        self._mlp = mlp

    def __call__(self, firing: Firing) -> dict[str, Payload]:
        inputs = firing.inputs
        return {"y": Payload((self._mlp.forward(firing.tag.layer, inputs["x"].tensors[0], inputs["residual"].tensors[0]),))}


class _HeadNode:
    """Tokens of the sampled rows, and the requested logprobs: token_S, logprob_L, top_id_LK, top_logprob_LK (sampling.py). A step
    of unfinished prompts returns empty tensors, which also end the step.
    """

    def __init__(self, head: Head) -> None:
        self._head = head

    def __call__(self, firing: Firing) -> dict[str, Payload]:
        inputs = SamplingInputs(*firing.inputs["sampling"].tensors)
        logits_SV = self._head.forward(firing.inputs["x"].tensors[0], inputs.rows_S)
        token_S = sample(logits_SV, inputs)
        if not inputs.logprobs_L.numel():
            return {"tokens": Payload((token_S,))}
        return {"tokens": Payload((token_S, *log_probabilities(logits_SV, token_S, inputs)))}


def expert_client(
    graph: Graph, node: Node, config: ModelConfig, device: torch.device | str = "cpu", now: Callable[[], float] = lambda: 0.0
) -> ExpertClient:
    """The client of a dispatch node, with the expert map of the graph."""
    process_of = {edge.source_port: graph.nodes[edge.target].process for edge in graph.edges_from(node.name)}
    processes = [process_of[f"server{server}"] for server in range(len(node.options["servers"]))]
    return ExpertClient(expert_map_of(graph, node.name, config.moe_layers, config.num_experts), processes, device, now)
