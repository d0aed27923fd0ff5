"""The expected tokens of a model of exact arithmetic (operators/exact.py), and the nodes of a simulated worker that computes with it.

The simulation uses it: the real graph, messages, pages and exchange, without weights. It reads only the model's config.json from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from flowrt.actors.control import Request
from flowrt.dataflow.subgraph import NodeFunction
from flowrt.engine.batch import SampleSpec
from flowrt.engine.constraint_builder import ConstraintBuilder
from flowrt.exchange.kv_transfer import TransferEnd
from flowrt.graph.model import Graph
from flowrt.operators.exact import ExactModel, Numbers
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.sampling import sample
from flowrt.operators.sampling_inputs import SamplingInputs
from flowrt.workers.model_nodes import build_nodes, config_of, draw_of, site_of


def exact_tokens(graph: Graph, request: Request) -> list[tuple[int, ...]]:
    """The expected token ids of each choice of `request`, independent of the processes that compute them."""
    assert graph.model is not None
    config = config_of(graph)
    model = ExactModel(config)
    params, builder = request.params, _builder_of(graph.model.path)
    ignores_eos = params.ignore_eos and params.structured_outputs is None
    ends = frozenset(params.stop_token_ids) | (frozenset() if ignores_eos else frozenset(config.eos_token_ids))
    found = []
    for choice in range(params.n):
        output: list[int] = []
        while len(output) < request.max_tokens and not (output and output[-1] in ends):
            tokens = [*request.prompt_token_ids, *output]
            x_TH = _residuals(model, tokens)
            counts = {token: output.count(token) for token in tokens} if params.has_penalties else None
            forbidden = ends if len(output) < params.min_tokens and not params.is_constrained else ()
            constraint = builder.constraint(params, output) if params.is_constrained else None
            draw = draw_of(0, SampleSpec(params, request.seed, len(output), choice, counts, forbidden, constraint))
            output.append(int(sample(torch.from_numpy(model.logits(x_TH[-1:])), SamplingInputs.from_draws([draw]))[0]))
        found.append(tuple(output))
    return found


@lru_cache(maxsize=16)
def _builder_of(path: str) -> ConstraintBuilder:
    config = read_model_config(Path(path))
    return ConstraintBuilder(Path(path), config.vocab_size, config.eos_token_ids)


def exact_prompt_logprobs(graph: Graph, prompt_token_ids: Sequence[int]) -> list[float]:
    """The expected logprob of each token of a prompt behind the first."""
    model = ExactModel(config_of(graph))
    logits_TV = torch.from_numpy(model.logits(_residuals(model, prompt_token_ids)))
    following_T1 = torch.tensor(prompt_token_ids[1:]).unsqueeze(1)
    found: list[float] = logits_TV[:-1].log_softmax(-1).gather(1, following_T1).squeeze(1).tolist()
    return found


def _residuals(model: ExactModel, token_ids: Sequence[int]) -> Numbers:
    """The residual stream behind the last layer, computed without pages and processes."""
    shared = bool(model.config.shared_expert_width)
    x_TH = model.embed(np.array(token_ids, dtype=np.int64))
    for layer in range(model.config.num_layers):
        x_TH = model.layer(layer, x_TH, shared)
    return x_TH


def build_exact_nodes(graph: Graph, process: str, now: Callable[[], float] = lambda: 0.0) -> dict[str, NodeFunction | TransferEnd]:
    """Works as build_model_nodes with the computations of an ExactModel."""
    return build_nodes(graph, process, lambda: site_of(graph, process, "cpu", now, exact=ExactModel(config_of(graph))))
