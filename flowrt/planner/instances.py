"""Level L3: what one instance of a deployment does with traffic: time to first token and between tokens, by its rate. Pure.

An instance is the smallest unit that serves requests on its own. Uniform ones hold attention and experts on every device, by a strategy of
MixServe's grammar; split ones hold them on devices of their own (MegaScale-Infer). Closed forms give the time of a step at some batch
sizes; between them it is interpolated, so that thousands of questions cost a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from flowrt.costs.devices import NodeGroup
from flowrt.costs.exchange import Fabric, fabric_of, row_bytes, transfer_seconds
from flowrt.costs.ping_pong import PingPong
from flowrt.costs.work import FiringLoad
from flowrt.graph.kinds import kind_of
from flowrt.kinds.device_times import device_seconds
from flowrt.operators.model_config import ModelConfig
from flowrt.planner import memory
from flowrt.planner.closed_form import (
    SplitDeployment,
    UniformDeployment,
    decode_step,
    prefill_step,
    sharded,
    slowest_of,
    split_attention_seconds,
    split_exchange_seconds,
    split_expert_seconds,
    split_prefill,
)
from flowrt.planner.queues import waiting_seconds
from flowrt.planner.strategies import Strategy

Stage = Literal["all", "prefill", "decode"]
Floats = NDArray[np.floating[Any]]
MAX_LOAD = 0.95  # of what computes prompts: above, waits grow without use
STEP_TOKENS = 8192  # of prompts that one step of a group computes
MAX_BATCH = 1024  # sequences of a group
BISECTIONS = 24


@dataclass(frozen=True)
class Workload:
    """Traffic in a steady state: mean tokens of a request, requests per second, and how much prompts vary (squared coefficient of
    variation)."""

    num_input: float
    num_output: float
    rate: float
    variation: float = 0.0

    @property
    def tokens(self) -> float:
        """For which a sequence needs room at its end."""
        return self.num_input + self.num_output

    @property
    def context(self) -> float:
        """Tokens of a decoding sequence, the mean over its output."""
        return self.num_input + self.num_output / 2


@dataclass(frozen=True)
class Slo:
    """The most seconds, as means over requests: to the first token, and between tokens."""

    ttft: float = math.inf
    itl: float = math.inf


@dataclass(frozen=True)
class OperatingPoint:
    """An instance at a rate, in requests per second. `ttft`, `itl`: mean seconds; 0.0 for a stage that it does not have. `batch`: decoding
    sequences of each group. `prompt_share`: of the time in which groups compute prompts."""

    rate: float
    ttft: float
    itl: float
    batch: float
    prompt_share: float

    def meets(self, slo: Slo) -> bool:
        return self.ttft <= slo.ttft and self.itl <= slo.itl


class Instance(Protocol):
    """What a plan is made of."""

    @property
    def devices(self) -> Mapping[int, int]:
        """The number of its devices by the number of their group of nodes."""

    @property
    def rate_bound(self) -> float:
        """A rate, in requests per second, that it cannot exceed."""

    def operate(self, rate: float) -> OperatingPoint | None:
        """None: it cannot carry this rate."""


def largest_rate(instance: Instance, slo: Slo) -> float:
    """The most requests per second within the limits; 0.0: none. More requests make nothing quicker."""
    low, high = 0.0, instance.rate_bound
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        operation = instance.operate(middle)
        low, high = (middle, high) if operation is not None and operation.meets(slo) else (low, middle)
    return low


class Throughput:
    """Tokens per second by batch, of steps of which some have been computed. `seconds`: of a step with these batches."""

    def __init__(self, batches: Floats, seconds: Floats) -> None:
        self._batches, self._seconds = batches, seconds
        self._rates = np.maximum.accumulate(batches / seconds)

    def step_seconds(self, batch: float) -> float:
        return float(np.interp(batch, self._batches, self._seconds))

    def batch_at(self, rate: float) -> float | None:
        """The batch that gives so many tokens per second; a smaller one than the first keeps its step time. None: none gives it."""
        if rate > self._rates[-1]:
            return None
        if rate <= self._rates[0]:
            return float(rate * self._seconds[0])
        return float(np.interp(rate, self._rates, self._batches))

    @property
    def largest(self) -> float:
        return float(self._rates[-1])


def batch_sizes(most: float) -> Floats:
    """1, 4, 16, ... and the largest: steps are nearly straight lines between them."""
    most = math.floor(min(MAX_BATCH, most))
    return np.array(sorted({*(1 << power for power in range(0, most.bit_length(), 2)), most}), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class UniformInstance:
    """Attention and experts on every device, in lock step. `group`: the number of the cluster's group of nodes that it is on, `nodes`.
    `batches`: 2 for two batches that overlap computing and exchange. It computes prompts and decodes; see OneStage for less."""

    model: ModelConfig
    nodes: NodeGroup
    group: int
    strategy: Strategy
    workload: Workload
    batches: int = 1
    skew: float = 0.0
    dispatch_dtype: str = "bfloat16"

    @property
    def devices(self) -> Mapping[int, int]:
        return {self.group: self.strategy.num_devices}

    @property
    def num_groups(self) -> int:
        return self.strategy.data

    @cached_property
    def weight_bytes(self) -> float:
        """Of one device."""
        model, strategy = self.model, self.strategy
        held = max(1.0, model.num_experts / strategy.expert)
        experts = math.ceil(held) * memory.expert_bytes(model) / strategy.expert_tp
        return (memory.attention_bytes(model) / strategy.attention_tp + experts) / strategy.pipeline

    @cached_property
    def max_sequences(self) -> float:
        """Sequences of a group for whose KV its devices have room; below 0: not even the weights fit."""
        strategy = self.strategy
        tokens = memory.kv_tokens(self.model, self.nodes.device, self.weight_bytes, strategy.attention_tp, strategy.pipeline)
        return tokens / self.workload.tokens

    @property
    def fits(self) -> bool:
        return self.max_sequences >= 1

    @cached_property
    def deployment(self) -> UniformDeployment:
        """One stage of the pipeline."""
        strategy = self.strategy
        return UniformDeployment(
            model=self.model,
            device=self.nodes.device,
            fabric=fabric_of_nodes(self.nodes),
            ranks=strategy.num_devices // strategy.pipeline,
            attention_tp=strategy.attention_tp,
            expert_tp=strategy.expert_tp,
            batches=self.batches,
            dispatch_dtype=self.dispatch_dtype,
            skew=self.skew,
        )

    def _hops(self, rows: float) -> float:
        """Seconds between the stages of the pipeline."""
        num_bytes = rows * row_bytes(self.model.hidden_size, self.model.dtype)
        return (self.strategy.pipeline - 1) * transfer_seconds(self.deployment.fabric.between, num_bytes)

    def stage_batch(self, batch: float) -> float:
        """The sequences that a stage computes at a time; of fewer sequences than stages, some stages have none."""
        return max(batch / self.strategy.pipeline, 1.0)

    @cached_property
    def throughput(self) -> Throughput:
        """Of a group that decodes. Stages of a pipeline take turns with as many parts of the batch."""
        batches = batch_sizes(self.max_sequences)
        parts = map(self.stage_batch, batches)
        steps = [decode_step(self.deployment, part, self.workload.context).seconds + self._hops(part) for part in parts]
        return Throughput(batches, np.array(steps))

    @cached_property
    def prompt_seconds(self) -> tuple[float, float]:
        """Seconds of one prompt in a group by itself, and the seconds of the instance that a prompt takes where prompts wait."""
        prompt = self.workload.num_input
        num = max(1, int(STEP_TOKENS / prompt))
        one = prefill_step(self._unbatched, prompt, prompt).seconds
        many = prefill_step(self.deployment, num * prompt, prompt).seconds if num * prompt > 1 else one
        return one + self._hops(prompt), min(many / num, one) / (self.num_groups * self.strategy.pipeline)

    @property
    def _unbatched(self) -> UniformDeployment:
        return self.deployment if self.batches == 1 else replace(self.deployment, batches=1)

    @property
    def rate_bound(self) -> float:
        return self.bound_of("all")

    def operate(self, rate: float) -> OperatingPoint | None:
        return self.operate_stage(rate, "all")

    def bound_of(self, stage: Stage) -> float:
        """A rate, in requests per second, that the stage cannot exceed."""
        computing = math.inf if stage == "decode" else 1 / self.prompt_seconds[1]
        decoding = math.inf if stage == "prefill" else self.num_groups * self.throughput.largest / self.workload.num_output
        return min(computing, decoding)

    def operate_stage(self, rate: float, stage: Stage) -> OperatingPoint | None:
        """As `operate`, of one stage."""
        share = wait = alone = 0.0
        if stage != "decode":
            alone, each = self.prompt_seconds
            share, servers = rate * each, self.num_groups * self.strategy.pipeline
            if share > MAX_LOAD:
                return None
            wait = waiting_seconds(rate, each * servers, servers, self.workload.variation)
        if stage == "prefill":
            return OperatingPoint(rate, wait + alone, 0.0, 0.0, share)
        batch = self.throughput.batch_at(rate * self.workload.num_output / self.num_groups / (1 - share))
        if batch is None:
            return None
        itl = self.throughput.step_seconds(batch) / (1 - share)
        # A prompt waits for the step that runs and for other prompts; its last token leaves with a step of all.
        return OperatingPoint(rate, wait + alone + 1.5 * itl if stage == "all" else 0.0, itl, batch, share)


@dataclass(frozen=True)
class OneStage:
    """A uniform instance that only decodes, or only computes prompts."""

    whole: UniformInstance
    stage: Literal["prefill", "decode"]

    @property
    def devices(self) -> Mapping[int, int]:
        return self.whole.devices

    @property
    def rate_bound(self) -> float:
        return self.whole.bound_of(self.stage)

    def operate(self, rate: float) -> OperatingPoint | None:
        return self.whole.operate_stage(rate, self.stage)


class SplitCurves:
    """T_a, T_e and T_c of one layer by rows, for groups and servers of one kind: computed at some numbers, interpolated between them."""

    def __init__(self, deployment: SplitDeployment, workload: Workload, max_sequences: float) -> None:
        """`deployment`: with one replica."""
        self.deployment, self._sizes = deployment, batch_sizes(max(1.0, max_sequences))
        loads = [FiringLoad(size, 0, size * workload.context) for size in self._sizes]
        self._attention = np.array([split_attention_seconds(deployment, load) for load in loads])
        self._rows = np.array([4.0**power for power in range(10)])
        self._experts = np.array([split_expert_seconds(deployment, rows) for rows in self._rows])
        head = kind_of("head"), sharded(deployment.model, deployment.attention_tp)
        self._head = np.array([device_seconds(deployment.attention, *head, FiringLoad(size)) for size in self._sizes])
        self.prompt = split_prefill(deployment, workload.num_input, workload.num_input)

    def layer(self, sizes: Floats, groups: float) -> tuple[Floats, Floats, Floats]:
        """T_a, T_e and T_c of micro-batches of these sizes in each of so many groups."""
        one, (_, for_experts) = self.deployment, self.deployment.num_devices
        attention = np.interp(sizes, self._sizes, self._attention) * slowest_of(one.attention, round(groups) * one.attention_tp)
        experts = np.interp(sizes * groups, self._rows, self._experts) * slowest_of(one.experts, for_experts)
        exchange = [split_exchange_seconds(one, float(size), float(size * groups)) for size in sizes]
        return attention, experts, np.array(exchange)

    def head(self, sizes: Floats) -> Floats:
        """Seconds of the head of the model."""
        seconds: Floats = np.interp(sizes, self._sizes, self._head)
        return seconds


@dataclass(frozen=True, kw_only=True)
class SplitInstance:
    """Groups compute attention, servers hold experts, `micro_batches` of each group take turns (MegaScale-Infer). `attention_group`,
    `expert_group`: the numbers of the cluster's groups of nodes that they are on. `domains` of groups take turns at the servers
    (xDeepServe). `workers` compute prompts, on devices like those of groups and with the same servers; 0: groups compute their own."""

    model: ModelConfig
    attention_nodes: NodeGroup
    expert_nodes: NodeGroup
    attention_group: int
    expert_group: int
    workload: Workload
    attention_tp: int
    servers: int
    expert_tp: int
    groups: int = 1
    replicas: int = 1
    micro_batches: int = 1
    domains: int = 1
    workers: int = 0
    dispatch_dtype: str = "bfloat16"
    known: SplitCurves | None = field(default=None, compare=False)

    @property
    def devices(self) -> Mapping[int, int]:
        found = {self.attention_group: (self.groups + self.workers) * self.attention_tp}
        found[self.expert_group] = found.get(self.expert_group, 0) + self.servers * self.expert_tp
        return found

    @cached_property
    def curves(self) -> SplitCurves:
        if self.known is not None:
            return self.known
        deployment = SplitDeployment(
            model=self.model,
            attention=self.attention_nodes.device,
            experts=self.expert_nodes.device,
            attention_fabric=fabric_of_nodes(self.attention_nodes),
            expert_fabric=fabric_of_nodes(self.expert_nodes),
            replicas=1,
            attention_tp=self.attention_tp,
            expert_nodes=self.servers,
            expert_tp=self.expert_tp,
            expert_replicas=self.replicas,
            dispatch_dtype=self.dispatch_dtype,
        )
        return SplitCurves(deployment, self.workload, self.max_sequences)

    @property
    def server_bytes(self) -> float:
        """Weights of one device of a server."""
        held = math.ceil(self.model.num_experts * self.replicas / self.servers)
        return held * memory.expert_bytes(self.model) / self.expert_tp

    @cached_property
    def max_sequences(self) -> float:
        """Sequences of a group for whose KV its devices have room; below 0: not even the weights fit."""
        weights = memory.attention_bytes(self.model) / self.attention_tp
        return memory.kv_tokens(self.model, self.attention_nodes.device, weights, self.attention_tp) / self.workload.tokens

    @property
    def fits(self) -> bool:
        return self.max_sequences >= self.micro_batches and self.server_bytes <= memory.usable_bytes(self.expert_nodes.device)

    @cached_property
    def _sizes(self) -> Floats:
        return batch_sizes(self.max_sequences / self.micro_batches)

    def layer(self, micro_batch: float) -> PingPong:
        """Of one micro-batch of so many sequences in one layer."""
        times = self.curves.layer(np.array([micro_batch]), self.groups / self.domains)
        return PingPong(*(float(each[0]) for each in times))

    @cached_property
    def _layers(self) -> tuple[Floats, Floats, Floats, Floats]:
        return *self.curves.layer(self._sizes, self.groups / self.domains), self.curves.head(self._sizes)

    def _steps(self, attention_share: float, server_share: float) -> Throughput:
        """While prompts take these shares of groups and servers."""
        attention, experts, sending, head = self._layers
        attention, experts, num = attention / (1 - attention_share), experts / (1 - server_share), self.micro_batches
        # Domains take turns at the servers as micro-batches of one domain do (equation 5, with the servers' turns of all domains).
        period = np.maximum(num * np.maximum(attention, self.domains * experts), attention + experts + 2 * sending)
        return Throughput(self._sizes * num, self.model.num_layers * period + num * head)

    @property
    def rate_bound(self) -> float:
        prompt, layers = self.curves.prompt, self.model.num_layers
        return min(
            self.groups * self._steps(0, 0).largest / self.workload.num_output,
            1 / (layers * prompt.experts_seconds),
            (self.workers or self.groups) / (layers * prompt.attention_seconds),
        )

    def operate(self, rate: float) -> OperatingPoint | None:
        prompt, layers, workers = self.curves.prompt, self.model.num_layers, self.workers or self.groups
        server_share = rate * layers * prompt.experts_seconds
        if server_share > MAX_LOAD:
            return None
        alone = layers * (prompt.attention_seconds + prompt.experts_seconds / (1 - server_share) + 2 * prompt.exchange_seconds)
        busy = layers * max(prompt.attention_seconds, prompt.round_seconds / self.micro_batches)
        if rate * busy / workers > MAX_LOAD:
            return None
        own_share = 0.0 if self.workers else rate * layers * prompt.attention_seconds / workers
        steps = self._steps(own_share, server_share)
        batch = steps.batch_at(rate * self.workload.num_output / self.groups)
        if batch is None:
            return None
        itl = steps.step_seconds(batch)
        ttft = waiting_seconds(rate, busy, workers, self.workload.variation) + alone
        if not self.workers:
            return OperatingPoint(rate, ttft + 1.5 * itl, itl, batch, own_share)
        # The worker gives the first token; the second one waits for the KV.
        return OperatingPoint(rate, ttft, itl + self._transfer_seconds() / self.workload.num_output, batch, own_share)

    def _transfer_seconds(self) -> float:
        """Of the KV of a prompt, from its worker to its group."""
        return kv_transfer_seconds(self.model, fabric_of_nodes(self.attention_nodes), self.workload.num_input, self.attention_tp)


def kv_transfer_seconds(model: ModelConfig, fabric: Fabric, tokens: float, links: int = 1) -> float:
    """Seconds to move the KV of so many tokens to another node over so many links."""
    return transfer_seconds(fabric.between, tokens * memory.kv_bytes(model, links))


def fabric_of_nodes(nodes: NodeGroup) -> Fabric:
    return fabric_of(nodes.device, nodes.within, nodes.between, nodes.devices_per_node)
