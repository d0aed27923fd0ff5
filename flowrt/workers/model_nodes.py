"""The functions of a model graph's nodes, and what its sources emit.

Each worker reads only the weights of its own nodes. flowrt/kinds says how a node is built. user_nodes.py builds the functions of a user's
graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowrt.dataflow.payload import Payload
from flowrt.dataflow.subgraph import NodeFunction
from flowrt.engine.batch import Batch, SampleSpec
from flowrt.exchange.kv_transfer import TransferEnd
from flowrt.graph.derived import derived
from flowrt.graph.model import Graph
from flowrt.graph.numerics import is_strict, strict_exchanges, strict_processes
from flowrt.kinds.site import Site
from flowrt.operators.exact import ExactModel
from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.proof import blocks_of, prove
from flowrt.operators.row_blocks import WHOLE, describe
from flowrt.operators.sampling_inputs import Draw, SamplingInputs, Score
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weight_memory import WeightMemory
from flowrt.operators.weights import Checkpoint


def build_model_nodes(
    graph: Graph,
    process: str,
    device: torch.device | str,
    now: Callable[[], float],
    on_built: Callable[[str, int, int], None],
    memory: WeightMemory | None = None,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, NodeFunction | TransferEnd]:
    """A function, or an end of KV transfers, for each node of `process` whose kind of operator has one. `on_built(name, done, total)`
    reports the loading progress. The rest: see `site_of`.

    Raises ModelError when the checkpoint lacks a tensor or a proof fails.
    """
    return build_nodes(graph, process, lambda: site_of(graph, process, device, now, memory, on_read), on_built)


def build_nodes(
    graph: Graph, process: str, new_site: Callable[[], Site], on_built: Callable[[str, int, int], None] = lambda name, done, total: None
) -> dict[str, NodeFunction | TransferEnd]:
    """`new_site` is called where there is something to build."""
    nodes = [(node, node.kind.build) for node in graph.nodes_of(process)]
    builds = [(node, build) for node, build in nodes if build is not None]
    if not builds:
        return {}
    site, functions = new_site(), dict[str, NodeFunction | TransferEnd]()
    for done, (node, build) in enumerate(builds):
        on_built(node.name, done, len(builds))
        functions[node.name] = build(site, node)
    on_built("", len(builds), len(builds))
    return functions


def site_of(
    graph: Graph,
    process: str,
    device: torch.device | str,
    now: Callable[[], float],
    memory: WeightMemory | None = None,
    on_read: Callable[[int], None] = lambda num_bytes: None,
    exact: ExactModel | None = None,
) -> Site:
    """The site of the nodes of a process. Its modules have weights; those of experts are in `memory` if it is given. `on_read` is called
    with the bytes of each weight that was read. With strict numerics each makes its proof (operators/row_blocks.py) before the worker
    serves requests, unless the process that filled the memory has made it. `now` returns seconds, for the profile of products
    (operators/expert_products.py). `exact`: compute with it instead.
    """
    config, strict = config_of(graph), process in strict_exchanges(graph)
    if exact is not None:
        return Site(graph, process, config, device, now, strict, None, WHOLE, WHOLE, lambda module: None, exact)
    checkpoint, proofs = Checkpoint(_directory_of(graph), memory, on_read), blocks_of(config, torch.get_num_threads())
    blocks, of_experts = proofs if is_strict(graph, process) else WHOLE, proofs if strict else WHOLE

    def proven(module: Any) -> None:
        if (of_experts if isinstance(module, Experts) else blocks).strict:
            proofs.adopt(checkpoint.note(f"{type(module).__name__} in {torch.get_num_threads()} threads", partial(sizes_of, module)))

    def sizes_of(module: Any) -> dict[str, tuple[int, ...]]:
        prove(module, config, device)
        return dict(proofs.sizes)

    return Site(graph, process, config, device, now, strict, checkpoint, blocks, of_experts, proven)


@derived
def config_of(graph: Graph) -> ModelConfig:
    """The configuration of the graph's model, with the graph's dtype and end-of-sequence ids."""
    directory = _directory_of(graph)
    model = graph.model
    assert model is not None
    config = read_model_config(directory, model.dtype, model.implementation, **model.kept)
    return replace(config, eos_token_ids=model.eos_token_ids)


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
    layout = StepLayout.from_lists(batch.query_lengths, batch.kv_lengths, batch.page_tables, page_size, device, batch.slots)
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
