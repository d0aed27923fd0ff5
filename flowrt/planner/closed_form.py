"""Level L3: times of steps in closed form, for equal ranks that run in lock step, with exchanges as collectives. Pure.

It has what flowrt's own runtime has not: tensor parallelism, all-to-all kernels, two batches that overlap. It knows no queues and no turns.
A step takes microseconds to predict, so that a search may ask for thousands of deployments. Level L2 (step.py) has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrt.costs.devices import Device
from flowrt.costs.exchange import (
    Fabric,
    Routing,
    all_reduce_seconds,
    bulk_exchange_seconds,
    exchange_seconds,
    hybrid_exchange_seconds,
    row_bytes,
)
from flowrt.costs.experts import heaviest_rows, largest_of, power_law_chances, server_chances, touched_experts
from flowrt.costs.ping_pong import PingPong
from flowrt.costs.work import FiringLoad
from flowrt.errors import UserError
from flowrt.graph.kinds import kind_of
from flowrt.graph.placement import balanced_placement
from flowrt.kinds.device_times import device_seconds
from flowrt.operators.model_config import ModelConfig

LEVEL = "L3"
Floats = NDArray[np.floating[Any]]


@cache
def sharded(model: ModelConfig, degree: int) -> ModelConfig:
    """What one of `degree` tensor-parallel ranks computes: a share of the heads and of the width of every MLP; latents are repeated.

    Raises UserError where the degree does not divide them.
    """
    if degree == 1:
        return model
    for name, number in (("heads", model.num_heads), ("width of experts", model.expert_width), ("vocabulary", model.vocab_size)):
        if number % degree:
            raise UserError(f"tensor parallelism of {degree} does not divide the {name}, {number}; choose a divisor")
    return replace(
        model,
        num_heads=model.num_heads // degree,
        num_kv_heads=max(1, model.num_kv_heads // degree),
        expert_width=model.expert_width // degree,
        dense_width=model.dense_width // degree,
        shared_expert_width=model.shared_expert_width // degree,
        vocab_size=model.vocab_size // degree,
    )


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer with experts, of the slowest rank: computing, and both directions of the exchange."""

    attention: float
    attend: float  # of `attention`, over cached tokens
    gate: float
    shared: float
    dispatch: float
    experts: float
    combine: float
    reduce: float = 0.0  # all-reduces of tensor parallelism
    starting: float = 0.0  # of dispatch and combine: their fixed parts, which occupy cores and so overlap no computing
    late: tuple[float, float] = (0.0, 0.0)  # for the slowest rank: before dispatch (or reduce), and before combine

    @property
    def computing(self) -> float:
        return self.attention + self.gate + self.shared + self.experts

    @property
    def sending(self) -> float:
        return self.dispatch + self.combine + self.reduce

    @property
    def seconds(self) -> float:
        return self.computing + self.sending + self.waiting

    @property
    def waiting(self) -> float:
        return sum(self.late)

    def exchanged(self, name: str) -> float:
        """Seconds of `dispatch`, `combine` or `reduce` as a profile shows them: with the wait for the slowest rank."""
        before, behind = self.late
        if not self.dispatch:  # an all-reduce waits for both
            before, behind = 0.0, 0.0
        waits = {"dispatch": before, "combine": behind, "reduce": self.waiting - before - behind}
        return float(getattr(self, name)) + waits[name]


@dataclass(frozen=True)
class ClosedStep:
    """A step in closed form. `operators`: seconds of each in a step, of which overlapped ones count in full. `seconds` include the gap."""

    seconds: float
    layer: LayerTimes
    operators: Mapping[str, float] = field(default_factory=dict)

    def share(self, *names: str) -> float:
        """The share of all operators' seconds that these take."""
        return sum(self.operators[name] for name in names) / sum(self.operators.values())


@dataclass(frozen=True, kw_only=True)
class UniformDeployment:
    """A model on equal devices that hold attention and experts alike.

    `ranks` devices: groups of `attention_tp` share attention, groups of `expert_tp` share experts. `slots`: experts on each rank, replicas
    included; None: one of each expert. `shared_ranks`: how many of the ranks hold shared experts only, 0: each computes its own.
    `batches`: 2 for two batches that overlap computing and exchange. `skew`: exponent of the power law of experts' loads; `balanced`: they
    are placed by load. `draft_tokens` per step and sequence (MTP), of which `acceptance` are taken. `gap_seconds`: between steps.
    """

    model: ModelConfig
    device: Device
    fabric: Fabric
    ranks: int
    attention_tp: int = 1
    expert_tp: int = 1
    slots: int | None = None
    shared_ranks: int = 0
    batches: int = 1
    dispatch_dtype: str = "bfloat16"
    combine_dtype: str = "bfloat16"
    skew: float = 0.0
    balanced: bool = True
    draft_tokens: int = 0
    acceptance: float = 0.0
    gap_seconds: float = 0.0

    @property
    def groups(self) -> int:
        return self.ranks // self.attention_tp

    @property
    def expert_ranks(self) -> int:
        return (self.ranks - self.shared_ranks) // self.expert_tp

    @property
    def routing(self) -> Routing:
        gate = self.model.gate
        return Routing(self.model.num_experts, self.model.num_experts_per_token, gate.groups, gate.topk_groups)

    @property
    def slots_per_rank(self) -> int:
        return self.slots or -(-self.model.num_experts // self.expert_ranks)

    @property
    def server_means(self) -> Floats:
        """Mean rows of each expert rank per token of all groups."""
        model, skew = self.model, (self.skew, self.balanced)
        return _server_means(model.num_experts, model.num_experts_per_token, self.expert_ranks, self.slots_per_rank, *skew)


@lru_cache(maxsize=256)
def _server_means(experts: int, active: int, ranks: int, slots: int, skew: float, balanced: bool) -> Floats:
    """float64[ranks]: mean rows per token. Experts come in an order that says nothing about their load."""
    chances = np.random.default_rng(32).permutation(power_law_chances(experts, active, skew))
    native = [tuple(slot % experts for slot in range(rank * slots, (rank + 1) * slots)) for rank in range(ranks)]
    return server_chances(chances, balanced_placement(list(chances), ranks, ranks * slots) if balanced else native)


def decode_step(deployment: UniformDeployment, batch: float, context: float) -> ClosedStep:
    """A step in which each group decodes `batch` sequences of `context` tokens each. Raises UserError for no sequences."""
    if not batch > 0 or not context > 0:
        raise UserError(f"a step needs sequences with context, got {batch:g} with {context:g} tokens; give more than 0 of each")
    rows = batch * (1 + deployment.draft_tokens) / deployment.batches
    layer = layer_times(deployment, rows, batch * context / deployment.batches, rows * context, is_bulk=False)
    return _step(deployment, layer, rows, rows, is_bulk=False)


def prefill_step(deployment: UniformDeployment, tokens: float, prompt: float) -> ClosedStep:
    """A step in which each group computes `tokens` tokens of whole prompts of `prompt` tokens each."""
    if not tokens > 0 or not prompt > 0:
        raise UserError(f"a prefill step needs tokens, got {tokens:g} of prompts of {prompt:g}; give more than 0 of each")
    rows = tokens / deployment.batches
    layer = layer_times(deployment, rows, rows, rows * (prompt + 1) / 2, is_bulk=True)
    return _step(deployment, layer, rows, max(1.0, rows / prompt), is_bulk=True)


def layer_times(deployment: UniformDeployment, rows: float, kv_tokens: float, scores: float, is_bulk: bool) -> LayerTimes:
    """Seconds of one layer with experts, for `rows` of each group: `kv_tokens` of context, and `scores` pairs of a row and a token that it
    attends to. `is_bulk`: rows are exchanged as in prefill."""
    model, device, fabric = deployment.model, deployment.device, deployment.fabric
    local = sharded(model, deployment.attention_tp)

    def seconds(kind: str, load: FiringLoad) -> float:
        return device_seconds(device, kind_of(kind), local, load)

    tokens = rows * deployment.groups
    means = deployment.server_means * tokens
    shared = 0.0
    if model.shared_expert_width:
        share = rows if not deployment.shared_ranks else tokens / deployment.shared_ranks
        shared = seconds("shared", FiringLoad(share))
    expert_rows = heaviest_rows(means) if len(means) > 1 else float(means[0])
    experts = device_seconds(
        device, kind_of("experts"), sharded(model, deployment.expert_tp), FiringLoad(expert_rows, _touched(deployment, expert_rows))
    )
    if deployment.shared_ranks:  # they compute at the same time as routed experts
        experts, shared = max(experts, shared), 0.0
    dispatch = combine = 0.0
    hidden = model.hidden_size
    if deployment.expert_ranks > 1:
        pairs = max(rows * model.num_experts_per_token / deployment.attention_tp, expert_rows)
        if deployment.expert_tp > 1:
            near = replace(fabric, per_node=min(fabric.per_node, deployment.ranks))
            degrees = deployment.attention_tp, deployment.expert_tp
            dispatch = combine = hybrid_exchange_seconds(
                near, deployment.ranks // near.per_node, *degrees, rows, deployment.routing, hidden
            )
        elif is_bulk:
            sent = rows / deployment.attention_tp
            dispatch, combine = (
                bulk_exchange_seconds(fabric, deployment.expert_ranks, sent, deployment.routing, hidden, dtype)
                for dtype in (deployment.dispatch_dtype, deployment.combine_dtype)
            )
        else:
            dispatch, combine = (
                exchange_seconds(fabric, deployment.ranks, pairs, hidden, dtype)
                for dtype in (deployment.dispatch_dtype, deployment.combine_dtype)
            )
    row, attended = row_bytes(hidden, model.dtype), FiringLoad(rows, 0, kv_tokens, scores)
    reduce = reduce_seconds(fabric, rows * row, deployment.attention_tp)
    if deployment.expert_ranks == 1:  # else experts that are cut are summed up within their exchange
        reduce += reduce_seconds(fabric, tokens * row, deployment.expert_tp)
    attention, gate = seconds("attention", attended), seconds("gate", FiringLoad(rows))
    late = device.jitter * largest_of(deployment.ranks)
    return LayerTimes(
        attention=attention,
        attend=attend_seconds(device, local, attended),
        gate=gate,
        shared=shared,
        dispatch=dispatch,
        experts=experts,
        combine=combine,
        reduce=reduce,
        late=(late * (attention + gate + shared), late * experts),
        starting=sum(map(fabric.fixed_seconds, (deployment.dispatch_dtype, deployment.combine_dtype))) if combine else 0.0,
    )


def attend_seconds(device: Device, model: ModelConfig, load: FiringLoad) -> float:
    """Seconds of the part of an attention block that scores cached tokens."""
    device = device.by_dtype.get(model.dtype, device)
    pieces = (kind_of("attention").pieces or (lambda *_: ()))(model, load)
    return sum(device.attend_seconds(piece.work, piece.dtype) for piece in pieces if piece.attends)


def reduce_seconds(fabric: Fabric, num_bytes: float, degree: int) -> float:
    """Seconds of an all-reduce over `degree` ranks; over several nodes the slower link bounds it."""
    if degree == 1:
        return 0.0
    if degree <= fabric.per_node:
        return all_reduce_seconds(fabric.within, fabric.device.within_efficiency, num_bytes, degree)
    return all_reduce_seconds(fabric.between, fabric.device.between_efficiency, num_bytes, degree)


def _touched(deployment: UniformDeployment, expert_rows: float) -> float:
    """Experts with rows on the rank with the most rows."""
    held = deployment.slots_per_rank
    return min(float(held), touched_experts(held, 1, expert_rows)) if held > 1 else min(1.0, expert_rows)


def _step(deployment: UniformDeployment, layer: LayerTimes, rows: float, sampled: float, is_bulk: bool) -> ClosedStep:
    """All layers: those with experts, dense ones, the head, and what drafts tokens."""
    model, device, batches = deployment.model, deployment.device, deployment.batches
    local = sharded(model, deployment.attention_tp)
    if batches == 1:
        period = layer.seconds
    else:  # one batch computes while the other is sent; kernels of prefill take cores for that
        crowded = 1 + (device.bulk_share if is_bulk and layer.sending else 0.0)
        period = max(batches * (layer.computing * crowded + layer.starting), batches * (layer.sending + layer.waiting), layer.seconds)
    head = batches * device_seconds(device, kind_of("head"), local, FiringLoad(sampled))
    mlp = device_seconds(device, kind_of("mlp"), local, FiringLoad(rows)) if model.dense_layers else 0.0
    reduced = reduce_seconds(deployment.fabric, rows * row_bytes(model.hidden_size, model.dtype), deployment.attention_tp)
    dense = batches * (layer.attention + mlp + 2 * reduced) * len(model.dense_layers)
    num_moe, drafts = len(model.moe_layers), deployment.draft_tokens
    draft = drafts * (layer.seconds * batches + head)  # a layer with experts and the head, for each drafted token
    count = batches * num_moe
    operators = {
        "attention": layer.attention * (count + batches * len(model.dense_layers)),
        "dense": batches * mlp * len(model.dense_layers),
        "draft": draft,
        "head": head,
        "gate": layer.gate * count,
        "shared": layer.shared * count,
        "experts": layer.experts * count,
        **{name: layer.exchanged(name) * count for name in ("dispatch", "combine", "reduce")},
    }
    fill = max(0.0, layer.seconds - period / batches)  # the last batch ends behind the others
    return ClosedStep(period * num_moe + fill + dense + head + draft + deployment.gap_seconds, layer, operators)


@dataclass(frozen=True, kw_only=True)
class SplitDeployment:
    """Attention and experts on devices of their own (MegaScale-Infer): `replicas` of attention with `attention_tp` devices each, and a node
    of `expert_tp` devices for each of `expert_nodes`, of which `expert_replicas` hold each expert; `micro_batches` take turns."""

    model: ModelConfig
    attention: Device
    experts: Device
    dispatch_dtype: str = "bfloat16"
    attention_fabric: Fabric
    expert_fabric: Fabric
    replicas: int
    attention_tp: int
    expert_nodes: int
    expert_tp: int
    micro_batches: int = 3
    expert_replicas: int = 1

    @property
    def num_devices(self) -> tuple[int, int]:
        """Devices for attention, and for experts."""
        return self.replicas * self.attention_tp, self.expert_nodes * self.expert_tp


def split_layer(deployment: SplitDeployment, micro_batch: float, context: float) -> PingPong:
    """T_a, T_e and T_c of one micro-batch of `micro_batch` sequences per attention replica (MegaScale-Infer, section 4.1)."""
    return _split_times(deployment, FiringLoad(micro_batch, 0, micro_batch * context))


def split_prefill(deployment: SplitDeployment, tokens: float, prompt: float) -> PingPong:
    """The same for `tokens` tokens of whole prompts of `prompt` tokens on each attention replica."""
    return _split_times(deployment, FiringLoad(tokens, 0, tokens, tokens * (prompt + 1) / 2))


def _split_times(deployment: SplitDeployment, load: FiringLoad) -> PingPong:
    total = load.num_rows * deployment.replicas
    attention, experts = split_attention_seconds(deployment, load), split_expert_seconds(deployment, total)
    for_attention, for_experts = deployment.num_devices
    return PingPong(
        attention * slowest_of(deployment.attention, for_attention),
        experts * slowest_of(deployment.experts, for_experts),
        split_exchange_seconds(deployment, load.num_rows, total),
    )


def slowest_of(device: Device, num_devices: int) -> float:
    """The time of the slowest of so many ranks, as a multiple of the mean."""
    return 1 + device.jitter * largest_of(num_devices)


def split_attention_seconds(deployment: SplitDeployment, load: FiringLoad) -> float:
    """What an attention replica computes of a load in one layer."""
    rows, local = load.num_rows, sharded(deployment.model, deployment.attention_tp)
    shared = (("shared", FiringLoad(rows)),) if deployment.model.shared_expert_width else ()
    seconds = sum(
        device_seconds(deployment.attention, kind_of(kind), local, own)
        for kind, own in (("attention", load), ("gate", FiringLoad(rows)), *shared)
    )
    num_bytes = rows * row_bytes(deployment.model.hidden_size, deployment.model.dtype)
    return seconds + reduce_seconds(deployment.attention_fabric, num_bytes, deployment.attention_tp)


def split_expert_seconds(deployment: SplitDeployment, rows: float) -> float:
    """What an expert node computes of the rows of all replicas in one layer."""
    model, nodes = deployment.model, deployment.expert_nodes
    pairs = rows * model.num_experts_per_token / nodes
    held, chosen = model.num_experts * deployment.expert_replicas / nodes, model.num_experts_per_token / nodes
    load = FiringLoad(pairs, touched_experts(held, chosen, rows))
    seconds = device_seconds(deployment.experts, kind_of("experts"), sharded(model, deployment.expert_tp), load)
    num_bytes = pairs * row_bytes(model.hidden_size, model.dtype)
    return seconds + reduce_seconds(deployment.expert_fabric, num_bytes, deployment.expert_tp)


def split_exchange_seconds(deployment: SplitDeployment, rows: float, total_rows: float) -> float:
    """T_c, the mean of both directions: the rows of a replica leave it while those of all replicas arrive; the slower side bounds it."""
    model = deployment.model
    pairs = total_rows * model.num_experts_per_token / deployment.expert_nodes
    one_way = [
        fabric.fixed_seconds(dtype) + num_rows * row_bytes(model.hidden_size, dtype) / fabric.between_bytes_per_second
        for dtype in (deployment.dispatch_dtype, model.dtype)
        for num_rows, fabric in (
            (rows * model.num_experts_per_token / deployment.attention_tp, deployment.attention_fabric),
            (pairs / deployment.expert_tp, deployment.expert_fabric),
        )
    ]
    return (max(one_way[:2]) + max(one_way[2:])) / 2
