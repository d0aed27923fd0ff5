"""A tiny integer model in place of a checkpoint: the real graph, messages, pages and exchange, without rounding.

`build_exact_nodes` replaces model_nodes.build_model_nodes. `exact_tokens` computes the expected tokens without pages, batches, parts or
processes. Dispatch, combine, the expert service and sampling are the real ones.

The simulation uses it: a lost, duplicated, stale or misplaced value changes a number and all later ones, and a step costs
microseconds. It reads only the model's config.json from disk.

Legend: as in operators/. Numbers are float64 and stay below 2**53, so that sums are the same in every order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from flowrt.actors.control import Request
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.subgraph import NodeFunction
from flowrt.engine.batch import SampleSpec
from flowrt.exchange.dispatch import Combine, Dispatch
from flowrt.exchange.expert_service import ExpertService
from flowrt.graph.model import Graph
from flowrt.graph.placement import held_experts
from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.sampling import log_probabilities, sample
from flowrt.operators.sampling_inputs import SamplingInputs
from flowrt.operators.step_layout import StepLayout
from flowrt.workers.model_nodes import draw_of, expert_client, for_each

MODULUS = 1_000_003.0  # of everything that goes from layer to layer
_LOGITS = 10_007.0
_FACTORS = np.array([1.0, 31.0, 997.0, 7.0])
_SHIFTS = np.array([3.0, 1009.0, 77.0, 500_009.0])

Numbers = NDArray[Any]


class ExactModel:
    """The arithmetic, row by row. `x` is the residual stream: at most some layers' sums of numbers below MODULUS."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._moe = frozenset(config.moe_layers)
        self._factors_H, self._shifts_H = np.resize(_FACTORS, config.hidden_size), np.resize(_SHIFTS, config.hidden_size)
        self._multipliers_V = (np.arange(config.vocab_size) * 7919.0 + 1) % _LOGITS

    def embed(self, tokens_T: Numbers) -> Numbers:
        return np.asarray((tokens_T[:, None] * 7919.0 + 17) * self._factors_H % MODULUS + self._shifts_H)

    def key(self, x_TH: Numbers) -> Numbers:
        """The value that a row stores in the KV pages."""
        return np.asarray(x_TH % MODULUS)

    def contexts(self, layer: int, keys_LH: Numbers, num_rows: int) -> Numbers:
        """Contexts of the last `num_rows` positions of a sequence with these keys. Each position includes itself."""
        weights_L = (np.arange(len(keys_LH)) * 7919 + layer * 31) % 997 + 1.0
        sums_LH = (keys_LH * weights_L[:, None]).cumsum(axis=0)
        return np.asarray((sums_LH[len(sums_LH) - num_rows :] + layer) % MODULUS)

    def route(self, normed_TH: Numbers) -> tuple[Numbers, Numbers]:
        """Returns expert_ids_TA (distinct within a row) and weights_TA."""
        num_experts, num_active = self.config.num_experts, self.config.num_experts_per_token
        first_T = normed_TH[:, 0].astype(np.int64)
        step_T = normed_TH[:, 1].astype(np.int64) % max(1, num_experts // max(1, num_active)) + 1
        slots_A = np.arange(num_active)
        ids_TA = (first_T[:, None] + slots_A * step_T[:, None]) % num_experts  # (A - 1) steps are less than one round
        return ids_TA, (normed_TH[:, 2:3] + slots_A * 3) % 7 + 1

    def expert(self, layer: int, expert_P: Numbers, x_PH: Numbers) -> Numbers:
        """Unweighted expert outputs, one row per pair."""
        return np.asarray((x_PH * (expert_P[:, None] * 31 + layer * 17 + 5) + expert_P[:, None] * 1009) % MODULUS)

    def dense(self, layer: int, normed_TH: Numbers) -> Numbers:
        return np.asarray((normed_TH * 5 + layer) % MODULUS)

    def logits(self, x_SH: Numbers) -> Numbers:
        sums_S = ((x_SH % MODULUS) * self._factors_H).sum(axis=1) % _LOGITS
        return np.asarray(sums_S[:, None] * self._multipliers_V % _LOGITS / 1000)

    def layer(self, layer: int, x_TH: Numbers, shared: bool) -> Numbers:
        """A whole layer of one sequence that was never seen before, for the reference."""
        normed_TH = (3 * self.key(x_TH) + self.contexts(layer, self.key(x_TH), len(x_TH))) % MODULUS
        if layer not in self._moe:
            return np.asarray(x_TH + self.dense(layer, normed_TH))
        total_TH = x_TH + self.dense(layer, normed_TH) if shared else x_TH.copy()
        ids_TA, weights_TA = self.route(normed_TH)
        for slot in range(ids_TA.shape[1]):
            total_TH += weights_TA[:, slot : slot + 1] * self.expert(layer, ids_TA[:, slot], normed_TH)
        return np.asarray(total_TH)


def exact_tokens(graph: Graph, request: Request) -> list[tuple[int, ...]]:
    """The expected token ids of each choice of `request`, independent of the processes that compute them."""
    config = _config_of(graph)
    model = ExactModel(config)
    shared = any(node.operator == "shared" for node in graph.nodes.values())
    ends = frozenset(request.params.stop_token_ids) | (frozenset() if request.params.ignore_eos else frozenset(config.eos_token_ids))
    params = request.params
    found = []
    for choice in range(params.n):
        output: list[int] = []
        while len(output) < request.max_tokens and not (output and output[-1] in ends):
            x_TH = model.embed(np.array([*request.prompt_token_ids, *output], dtype=np.int64))
            for layer in range(config.num_layers):
                x_TH = model.layer(layer, x_TH, shared)
            tokens = [*request.prompt_token_ids, *output]
            counts = {token: output.count(token) for token in tokens} if params.has_penalties else None
            forbidden = ends if len(output) < params.min_tokens else ()
            draw = draw_of(0, SampleSpec(params, request.seed, len(output), choice, counts, forbidden))
            output.append(int(sample(torch.from_numpy(model.logits(x_TH[-1:])), SamplingInputs.from_draws([draw]))[0]))
        found.append(tuple(output))
    return found


def build_exact_nodes(graph: Graph, process: str, now: Callable[[], float] = lambda: 0.0) -> dict[str, NodeFunction]:
    """A function for each node of `process`, like build_model_nodes."""
    config = _config_of(graph)
    model, strict = ExactModel(config), graph.numerics == "strict"
    nodes = graph.nodes_of(process)
    clients = [expert_client(graph, node, config, now=now) for node in nodes if node.operator == "dispatch"]
    functions: dict[str, NodeFunction] = {}
    for node in nodes:
        match node.operator:
            case "embed":
                functions[node.name] = for_each(lambda firing: {"x": _payload(model.embed(_array(firing, "tokens")))})
            case "attention":
                functions[node.name] = for_each(_ExactAttention(model, graph.limits_of(process).kv_pages, graph.limits.page_size))
            case "gate":
                functions[node.name] = for_each(lambda firing: {"routing": _payload(*model.route(_array(firing, "x")))})
            case "mlp" | "shared":
                functions[node.name] = for_each(_dense(model))
            case "dispatch":
                functions[node.name] = Dispatch(clients[0], strict)
            case "experts":
                held = held_experts(node.options["experts"], config.moe_layers)
                functions[node.name] = ExpertService(cast("Experts", ExactExperts(model, held)), strict)
            case "combine":
                functions[node.name] = Combine(clients[0], strict)
            case "head":
                functions[node.name] = for_each(_head(model))
    return functions


class ExactExperts:
    """Like flowrt.operators.experts.Experts. Raises KeyError for an expert that this server does not hold."""

    def __init__(self, model: ExactModel, held: Mapping[int, Sequence[int]]) -> None:
        self._model = model
        self._held = {layer: frozenset(experts) for layer, experts in held.items()}

    def forward(self, layer: int, x_RH: torch.Tensor, row_P: torch.Tensor, expert_P: torch.Tensor, weight_P: torch.Tensor) -> torch.Tensor:
        y_PH = self.forward_pairs(layer, x_RH, row_P, expert_P).numpy() * weight_P.numpy()[:, None]
        y_RH = np.zeros(x_RH.shape)
        np.add.at(y_RH, row_P.numpy(), y_PH)
        return torch.from_numpy(y_RH)

    def forward_pairs(self, layer: int, x_RH: torch.Tensor, row_P: torch.Tensor, expert_P: torch.Tensor) -> torch.Tensor:
        experts = expert_P.numpy()
        if missing := set(experts.tolist()) - self._held[layer]:
            raise KeyError(f"experts {sorted(missing)} of layer {layer} are not held here")
        return torch.from_numpy(self._model.expert(layer, experts, x_RH.numpy()[row_P.numpy()]))


class _ExactAttention:
    def __init__(self, model: ExactModel, num_pages: int, page_size: int) -> None:
        self._model = model
        self._page_size = page_size
        self._keys = np.zeros((model.config.num_layers, num_pages * page_size, model.config.hidden_size))

    def __call__(self, firing: Firing) -> dict[str, Payload]:
        layer, model, page_size = firing.tag.layer, self._model, self._page_size
        layout = StepLayout.from_tensors(firing.inputs["layout"].tensors)
        x_TH, keys = _array(firing, "x"), self._keys[layer]
        keys[layout.slots_T.numpy()] = model.key(x_TH)
        table_SG, contexts = layout.page_table_SG.numpy(), []
        for pages_G, num_rows, length in zip(table_SG, layout.query_lengths, layout.kv_lengths, strict=True):
            positions = np.arange(length)
            slots = pages_G[positions // page_size] * page_size + positions % page_size
            contexts.append(model.contexts(layer, keys[slots], num_rows))
        normed_TH = (3 * model.key(x_TH) + np.concatenate(contexts)) % MODULUS
        return {"residual": firing.inputs["x"], "normed": Payload((torch.from_numpy(normed_TH), layout.positions_T))}


def _dense(model: ExactModel) -> Callable[[Firing], dict[str, Payload]]:
    return lambda firing: {"y": _payload(_array(firing, "residual") + model.dense(firing.tag.layer, _array(firing, "x")))}


def _head(model: ExactModel) -> Callable[[Firing], dict[str, Payload]]:
    def run(firing: Firing) -> dict[str, Payload]:
        inputs = SamplingInputs(*firing.inputs["sampling"].tensors)
        logits_SV = torch.from_numpy(model.logits(_array(firing, "x")[inputs.rows_S.numpy()]))
        token_S = sample(logits_SV, inputs)
        if not inputs.logprobs_L.numel():
            return {"tokens": Payload((token_S,))}
        return {"tokens": Payload((token_S, *log_probabilities(logits_SV, token_S, inputs)))}

    return run


def _config_of(graph: Graph) -> ModelConfig:
    if graph.model is None:
        raise ValueError("the graph names no model")
    return read_model_config(Path(graph.model.path))


def _array(firing: Firing, port: str) -> Numbers:
    return np.asarray(firing.inputs[port].tensors[0].numpy())


def _payload(*arrays: Numbers) -> Payload:
    return Payload(tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
