"""The functions of a model graph's nodes: binds built-in operator names to weights.

Each worker reads only the weights of its own nodes. user_nodes.py builds the functions of a user's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from flowrt.actors.link_plan import KV_CHUNK_BYTES
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.schemas import Spec, parse_spec
from flowrt.dataflow.subgraph import NodeFunction
from flowrt.engine.batch import Batch, SampleSpec
from flowrt.exchange.dispatch import Combine, Dispatch
from flowrt.exchange.expert_client import ExpertClient
from flowrt.exchange.expert_service import ExpertService
from flowrt.exchange.kv_transfer import KvPack, KvUnpack, TransferEnd
from flowrt.exchange.trampoline import Collect, Return, Trampolines, forward
from flowrt.graph.builtin import KV_EXTRA, KV_PROGRESS, SOURCE
from flowrt.graph.extra_tensors import num_bytes, received_extras, sent_extras
from flowrt.graph.model import INPUT, OUTPUT, Graph, Node
from flowrt.graph.numerics import is_strict, strict_exchanges, strict_processes
from flowrt.graph.placement import expert_map_of, held_experts
from flowrt.graph.settings import GraphLimits
from flowrt.graph.trampoline import forwarded_servers, group_ports, window_of
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
from flowrt.operators.row_blocks import WHOLE, describe
from flowrt.operators.sampling import log_probabilities, sample
from flowrt.operators.sampling_inputs import Draw, SamplingInputs, Score
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weight_memory import WeightMemory
from flowrt.operators.weights import TORCH_DTYPES, Checkpoint
from flowrt.transports.wire.message import Tag

MAX_BATCH_BYTES = 1 << 30  # of rows and intermediate values when an expert server computes several requests in one call
MAX_SCORED_ROWS = 256  # rows of prompts whose logits are in memory at once
Outputs = dict[str, Payload]
Computations = Callable[[Node], Any]  # a node -> the `forward` of its module; of an `experts` node, the module
M = TypeVar("M", AttentionBlock[Any], Gate, DenseMlp, SharedExperts, Experts, Head)


def build_model_nodes(
    graph: Graph,
    process: str,
    device: torch.device | str,
    on_built: Callable[[str, int, int], None],
    now: Callable[[], float],
    computations: Callable[[Graph, str, torch.device | str, Callable[[], float]], Computations] | None = None,
) -> dict[str, NodeFunction | TransferEnd]:
    """A function, or a sink, for each node of `process` with a built-in operator. `on_built(name, done, total)` reports the loading
    progress; `now` returns seconds, for the profile of products (operators/expert_products.py). `computations` replaces those of the
    checkpoint.

    Raises ModelError when the checkpoint lacks a tensor or a proof fails, ValueError for an operator that is not built in.
    """
    others = (SOURCE, INPUT, OUTPUT, KV_PROGRESS, KV_EXTRA)
    nodes = [node for node in graph.nodes_of(process) if ":" not in node.operator and node.operator not in others]
    if not nodes:
        return {}
    if graph.model is None:
        raise ValueError(f"node {nodes[0].name}: {nodes[0].operator!r} is an operator of a model, and the graph names none")
    config, strict = config_of(graph), process in strict_exchanges(graph)
    computation_of = (computations or checkpoint_computations)(graph, process, device, now)
    clients = [_expert_client(graph, node, config, device, now) for node in nodes if node.operator == "dispatch"]  # a group has one at most
    functions: dict[str, NodeFunction | TransferEnd] = {}
    for done, node in enumerate(nodes):
        on_built(node.name, done, len(nodes))
        match node.operator:
            case "dispatch":
                functions[node.name] = Dispatch(clients[0], strict)
            case "combine":
                functions[node.name] = Combine(clients[0], strict)
            case "forward":
                functions[node.name] = forward
            case "return":
                functions[node.name] = Return(group_ports(graph, node.name))
            case "collect":
                functions[node.name] = Collect(clients[0].parts, strict)
            case "kv_pack":
                int8_pulls = [edge.request_id for edge in graph.edges_from(node.name) if edge.int8 and edge.request_id is not None]
                extras = sent_extras(graph, process)
                max_bytes = min(KV_CHUNK_BYTES, graph.limits_of(process).max_message_bytes - num_bytes(extras))
                functions[node.name] = KvPack(computation_of(node), int8_pulls, max_bytes, _specs(extras))
            case "kv_unpack":
                functions[node.name] = KvUnpack(computation_of(node), _specs(received_extras(node)))
            case "experts":
                bounds = pair_bounds(config, graph.group_limits(widest=True))
                functions[node.name] = ExpertService(computation_of(node), strict, **bounds)
            case "attention":
                functions[node.name] = _for_each(_AttentionNode(computation_of(node)))
            case operator if operator in _FIRE:
                functions[node.name] = _for_each(partial(_FIRE[operator], computation_of(node)))
            case _:
                raise ValueError(
                    f"node {node.name}: {node.operator!r} is not a built-in operator; write module:function for one of your own"
                )
    on_built("", len(nodes), len(nodes))
    return functions


def _specs(tensors: Mapping[str, str]) -> dict[str, Spec]:
    return {name: parse_spec(text) for name, text in tensors.items()}


def checkpoint_computations(
    graph: Graph,
    process: str,
    device: torch.device | str,
    now: Callable[[], float],
    memory: WeightMemory | None = None,
    on_read: Callable[[], None] = lambda: None,
) -> Computations:
    """Modules with weights; those of experts are in `memory` if it is given. `on_read` is called with each tensor that is read. With strict
    numerics each makes its proof (operators/row_blocks.py) before the worker serves requests, unless the process that filled the memory has
    made it."""
    config, checkpoint = config_of(graph), Checkpoint(_directory_of(graph), memory, on_read)
    proofs = blocks_of(config, torch.get_num_threads())
    blocks = proofs if is_strict(graph, process) else WHOLE
    of_experts = proofs if process in strict_exchanges(graph) else WHOLE
    pages = cache(lambda: KvPages.for_model(config, graph.limits_of(process).kv_pages, graph.limits_of(process).page_size, device))
    embedding = cache(lambda: Embedding(config, checkpoint, device))
    embeds = any(node.operator == "embed" for node in graph.nodes_of(process))

    def proven(module: M) -> M:
        if (of_experts if isinstance(module, Experts) else blocks).strict:
            proofs.adopt(checkpoint.note(f"{type(module).__name__} in {torch.get_num_threads()} threads", partial(sizes_of, module)))
        return module

    def sizes_of(module: M) -> dict[str, tuple[int, ...]]:
        prove(module, config, device)
        return dict(proofs.sizes)

    def computation_of(node: Node) -> Any:
        match node.operator:
            case "embed":
                return embedding().forward
            case "attention":
                block = proven(attention_for(config, checkpoint, range(config.num_layers), device, blocks))
                return partial(block.forward, pages=pages())
            case "kv_pack" | "kv_unpack":
                return pages()
            case "gate":
                return proven(Gate(config, checkpoint, config.moe_layers, device, blocks)).forward
            case "mlp":
                return proven(DenseMlp(config, checkpoint, config.dense_layers, device, blocks)).forward
            case "shared":
                return proven(SharedExperts(config, checkpoint, config.moe_layers, device, blocks)).forward
            case "experts":
                held = held_experts(node.options["experts"], config.moe_layers)
                return proven(Experts(config, checkpoint, held, device, of_experts, now))
            case _:
                return proven(Head(config, checkpoint, device, embedding() if embeds else None, blocks)).forward

    return computation_of


def pair_bounds(config: ModelConfig, limits: GraphLimits) -> dict[str, int]:
    """The maximum number of pairs that an expert service computes in one call, and the maximum per part."""
    pair_bytes = TORCH_DTYPES[config.dtype].itemsize * 2 * (config.hidden_size + config.expert_width)
    return {
        "max_pairs": max(1, MAX_BATCH_BYTES // pair_bytes),
        "max_part_pairs": limits.max_num_batched_tokens * config.num_experts_per_token,
    }


def config_of(graph: Graph) -> ModelConfig:
    """The configuration of the graph's model, with the graph's dtype and end-of-sequence ids."""
    directory = _directory_of(graph)
    assert graph.model is not None
    return replace(read_model_config(directory, graph.model.dtype), eos_token_ids=graph.model.eos_token_ids)


def _directory_of(graph: Graph) -> Path:
    if graph.model is None:
        raise ValueError("the graph names no model")
    return Path(graph.model.path)


def strict_blocks_text(graph: Graph, process: str) -> str:
    """The row blocks that this process has proven for the model, as text; "" if it computes nothing strictly. Call it in the thread that
    built the nodes: another thread may use another number of compute threads."""
    if process not in strict_processes(graph) or graph.model is None:
        return ""
    return describe(blocks_of(config_of(graph), torch.get_num_threads()).sizes)


def batch_payloads(batch: Batch, page_size: int, device: torch.device) -> dict[str, Payload]:
    """The source's outputs for a step: tokens_T and the layout."""
    layout = StepLayout.from_lists(batch.query_lengths, batch.kv_lengths, batch.page_tables, page_size, device)
    return {
        "tokens": Payload((torch.tensor(batch.token_ids, dtype=torch.int64, device=device),)),
        "layout": Payload(layout.to_tensors()),
    }


def sampling_payload(batch: Batch, device: torch.device) -> Payload:
    """The source's output for the head: how each sampled row is drawn. Masks of constrained rows take time: compute it beside the loop."""
    draws = [draw_of(row, spec) for row, spec in zip(batch.sample_rows, batch.samples, strict=True)]
    return Payload(tuple(SamplingInputs.from_draws(draws, device, [Score(*each) for each in batch.scores])))


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
        params.logit_bias,
        params.min_p,
        None if spec.constraint is None else spec.constraint.mask(),
    )


def _for_each(function: Callable[[Firing], Outputs]) -> NodeFunction:
    """Wraps a function of one firing as a node function."""

    def run(firings: Sequence[Firing]) -> list[Outputs]:
        return [function(firing) for firing in firings]

    return run


class _AttentionNode:
    """Stateful by its pages. The layers of a step get one layout message between them, so it is read once per step and micro-batch."""

    def __init__(self, forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._forward = forward
        self._read: dict[tuple[str, int], tuple[Payload, StepLayout]] = {}

    def __call__(self, firing: Firing) -> Outputs:
        layout = self._layout(firing.tag, firing.inputs["layout"])
        residual_TH, normed_TH = self._forward(firing.tag.layer, firing.inputs["x"].tensors[0], layout)
        return {"residual": Payload((residual_TH,)), "normed": Payload((normed_TH,))}

    def _layout(self, tag: Tag, payload: Payload) -> StepLayout:
        micro_batch = (tag.source, tag.micro_batch)
        read, layout = self._read.get(micro_batch, (None, None))
        if read is not payload or layout is None:
            layout = StepLayout.from_tensors(payload.tensors)
            self._read[micro_batch] = payload, layout
        return layout


def _embed(forward: Callable[..., torch.Tensor], firing: Firing) -> Outputs:
    return {"x": Payload((forward(firing.inputs["tokens"].tensors[0]),))}


def _gate(forward: Callable[..., tuple[torch.Tensor, ...]], firing: Firing) -> Outputs:
    return {"routing": Payload(forward(firing.tag.layer, firing.inputs["x"].tensors[0]))}


def _mlp(forward: Callable[..., torch.Tensor], firing: Firing) -> Outputs:
    inputs = firing.inputs
    return {"y": Payload((forward(firing.tag.layer, inputs["x"].tensors[0], inputs["residual"].tensors[0]),))}


def _head(forward: Callable[..., torch.Tensor], firing: Firing) -> Outputs:
    """Tokens of the sampled rows, and the requested logprobs, of samples and then of prompts: token_S, logprob_L, top_id_LK,
    top_logprob_LK (sampling.py). A step of unfinished prompts returns empty tensors, which also end the step.
    """
    inputs, x_TH = SamplingInputs(*firing.inputs["sampling"].tensors), firing.inputs["x"].tensors[0]
    logits_SV = forward(x_TH, inputs.rows_S)
    token_S = sample(logits_SV, inputs)
    num_ranks, found = inputs.ranks_K.numel(), []
    if inputs.logprobs_L.numel():
        found.append(log_probabilities(logits_SV[inputs.logprobs_L], token_S[inputs.logprobs_L], num_ranks))
    for row_G, token_G in (part_2G.unbind() for part_2G in inputs.scored_2G.split(MAX_SCORED_ROWS, dim=1) if part_2G.numel()):
        found.append(log_probabilities(forward(x_TH, row_G), token_G, num_ranks))
    return {"tokens": Payload((token_S, *map(torch.cat, zip(*found, strict=True))))}


_FIRE: dict[str, Callable[..., Outputs]] = {"embed": _embed, "gate": _gate, "mlp": _mlp, "shared": _mlp, "head": _head}


def _expert_client(graph: Graph, node: Node, config: ModelConfig, device: torch.device | str, now: Callable[[], float]) -> ExpertClient:
    """The client of a dispatch node, with the expert map of the graph."""
    process_of = {edge.source_port: graph.nodes[edge.target].process for edge in graph.edges_from(node.name)}
    processes = [process_of[f"server{server}"] for server in range(len(node.options["servers"]))]
    edges = forwarded_servers(graph, node.name)
    forwarding = {number: process_of[f"via{number}"] for number in edges}
    trampolines = Trampolines(edges, forwarding, {number: window_of(graph, process) for number, process in forwarding.items()})
    return ExpertClient(expert_map_of(graph, node.name, config.moe_layers, config.num_experts), processes, device, now, trampolines)
