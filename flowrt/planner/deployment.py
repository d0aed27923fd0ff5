"""Defines a Deployment: what a model of a run needs to know, wherever it comes from. Pure.

`deployment_of` reads a graph: placement, trampolines, selection policies and costs are those that the runtime reads. A planner and
published rows build a Deployment directly, also for patterns that flowrt does not run (tensor parallelism, collectives).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from flowrt.costs.devices import Device
from flowrt.costs.exchange import Fabric, fabric_of
from flowrt.costs.experts import Floats, chances_of_counts, power_law_chances
from flowrt.costs.links import LinkProfile, profile_of
from flowrt.costs.work import FiringLoad
from flowrt.errors import UserError
from flowrt.graph.emulated import StandIn, device_of, emulated_config
from flowrt.graph.kinds import kind_of
from flowrt.graph.model import Edge, Graph
from flowrt.graph.numerics import strict_exchanges
from flowrt.graph.placement import even_placement, expert_map_of, server_nodes, servers_behind
from flowrt.graph.settings import Batching, ComputeCost
from flowrt.kinds.device_times import device_seconds, exchange_seconds
from flowrt.operators.model_config import ModelConfig
from flowrt.planner import memory
from flowrt.planner.closed_form import reduce_seconds, sharded
from flowrt.reliability.expert_map import ExpertMap, servers_by_expert
from flowrt.transports.wire.message import DTYPE_BYTES

INT64_BYTES = 8
SUMMED_PARTS = frozenset({"attention_output", "dense_down", "shared_down", "expert_down"})  # whose products tensor parallel ranks add up
NO_LINK = LinkProfile("none", 0.0, math.inf)


class RankTimes(Protocol):
    """How long one rank computes."""

    @property
    def device(self) -> Device | None:
        """The device that computes; None where times are given."""

    def seconds(self, operator: str, load: FiringLoad) -> float:
        """Seconds of one call of a built-in operator, by the name of its kind; 0.0 for one that takes no modelled time."""

    def exchange_seconds(self, num_messages: float) -> float:
        """Seconds of a firing of the exchange beside operators, with so many messages in and out."""


@dataclass(frozen=True)
class ChargedTimes:
    """The times of `emulate.compute` of a graph file, and `others` of operators without one. A layer is one of `num_like` that share a
    charge."""

    costs: Mapping[str, ComputeCost]
    others: RankTimes | None = None
    num_like: int = 1

    @property
    def device(self) -> Device | None:
        return None if self.others is None else self.others.device

    def seconds(self, operator: str, load: FiringLoad) -> float:
        cost = self.costs.get(operator)
        if cost is None:
            return 0.0 if self.others is None else self.others.seconds(operator, load)
        return cost.seconds(*load) / (1 if kind_of(operator).per_step else self.num_like)

    def exchange_seconds(self, num_messages: float) -> float:
        return 0.0 if self.others is None else self.others.exchange_seconds(num_messages)


@dataclass(frozen=True)
class DeviceTimes:
    """The times of a model on a device. `tensor_parallel` ranks share each call evenly and sum their results (all-reduce) over links of
    `fabric`; an expert is cut in the same way."""

    device: Device
    model: ModelConfig
    tensor_parallel: int = 1
    fabric: Fabric | None = None

    def seconds(self, operator: str, load: FiringLoad) -> float:
        kind = kind_of(operator)
        own = device_seconds(self.device, kind, sharded(self.model, self.tensor_parallel), load)
        if self.tensor_parallel == 1 or SUMMED_PARTS.isdisjoint(kind.parts):
            return own
        rows = load.num_rows / (self.model.num_experts_per_token if kind.holds_experts else 1)
        num_bytes = rows * self.model.hidden_size * DTYPE_BYTES[self.model.dtype]
        return own + reduce_seconds(self.fabric or fabric_of(self.device), num_bytes, self.tensor_parallel)

    def exchange_seconds(self, num_messages: float) -> float:
        return exchange_seconds(self.device, num_messages)


class ExpertSkew(NamedTuple):
    """How unevenly rows choose experts: the chance of the i-th busiest expert falls as i ** -exponent. Which one that is, is drawn for each
    layer."""

    exponent: float = 0.0

    def chances(self, model: ModelConfig, layer: int) -> Floats:
        """float64[E]: the chance of each expert that a row chooses it; they add up to the active experts of a row."""
        chances = power_law_chances(model.num_experts, model.num_experts_per_token, self.exponent)
        return chances if not self.exponent else np.random.default_rng((0x5E, layer)).permutation(chances)


class RowBytes(NamedTuple):
    """The bytes of a message of the exchange, in proportion to its rows and to its (row, expert) pairs."""

    row: float
    pair: float = 0.0

    def of(self, num_rows: float, num_pairs: float) -> float:
        return self.row * num_rows + self.pair * num_pairs


@dataclass(frozen=True)
class AttentionGroup:
    """A group of attention ranks that computes steps of its own: one rank, or `tensor` ranks that share each layer. `home`: the expert
    server in the same process, None for one without."""

    name: str
    times: RankTimes
    domain: int = 0
    home: int | None = None

    @property
    def process(self) -> str:
        """The process that its source is in."""
        return self.name.partition(".source")[0]


@dataclass(frozen=True)
class ExpertServer:
    """A rank that holds experts. `behind`: the servers for which it is a trampoline, itself included; () for none."""

    name: str
    times: RankTimes
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model on ranks that exchange part by part, as in flowrt. Lock-step deployments: closed_form.py.

    `groups` compute attention, `servers` hold experts by `placement`, of which trampolines are not part. `batching` says which of the parts
    that wait a server takes. `prefill`: groups that compute prompts; `prefill_link`: on which KV moves. `link`: of all exchanges.
    `dispatch_bytes`, `combine_bytes`: of requests to servers, and of their responses. `counts`: measured pairs of each expert, by layer, in
    place of `skew`.
    `draft_tokens`: tokens that a step drafts for each sequence (MTP), of which `acceptance` are taken on average.
    `gap_seconds`: between two steps of a group. `shared_devices`: on which all ranks compute in turns; None: each has its own.
    `early`: parts leave before the shared experts are computed.
    """

    model: ModelConfig
    groups: tuple[AttentionGroup, ...]
    servers: tuple[ExpertServer, ...] = ()
    placement: ExpertMap
    micro_batches: int = 1
    batching: Batching = Batching()
    link: LinkProfile = NO_LINK
    dispatch_bytes: RowBytes
    combine_bytes: RowBytes
    prefill: tuple[AttentionGroup, ...] = ()
    prefill_link: LinkProfile = NO_LINK
    skew: ExpertSkew = ExpertSkew()
    counts: Mapping[int, Sequence[float]] = field(default_factory=dict)
    draft_tokens: int = 0
    acceptance: float = 0.0
    gap_seconds: float = 0.0
    shared_devices: int | None = None
    early: bool = False
    max_num_seqs: int = 256  # of a group
    max_batched_tokens: int = 8192  # of a step of a group
    kv_tokens: int | None = None  # for which a group has room; None: not limited
    policy: str = "cache_aware"  # by which the gateway chooses a group

    def __post_init__(self) -> None:
        if not self.groups:
            raise UserError("a deployment needs at least one group; give attention ranks")
        if self.micro_batches < 1:
            raise UserError(f"{self.micro_batches} micro-batches: give 1 or more")
        if missing := self.placement.missing():
            raise UserError(f"no server holds expert {missing[0]}; give deploy.experts.servers, or place every expert of the model")

    @property
    def is_local(self) -> bool:
        """Each group holds all experts, so that a step is one call."""
        return not self.servers

    @property
    def is_colocated(self) -> bool:
        """Expert servers are in the processes of groups."""
        return any(group.home is not None for group in self.groups)

    @property
    def num_ranks(self) -> int:
        """Processes with a compute seam of their own: groups, prefill workers, and servers that are not in the process of a group."""
        homes = {group.home for group in self.groups if group.home is not None}
        return len(self.groups) + len(self.prefill) + len(self.servers) - len(homes)

    @cached_property
    def experts_held(self) -> Floats:
        """float64[servers]: the experts of each server, the mean over layers."""
        tables = [] if self.is_local else [self.placement.table(layer) for layer in self.model.moe_layers]
        held = np.zeros(len(self.servers))
        for table in set(tables):
            weight = tables.count(table) / len(tables)
            for servers in table:
                held[list(servers)] += weight
        return held

    def shortage(self) -> str | None:
        """What does not fit into the memory of its device: weights of a rank, and KV of a group; None: everything does. All
        of the memory counts, also what `flowrt plan` keeps free for activations: what this names cannot even be loaded."""
        model, held = self.model, self.experts_held * memory.expert_bytes(self.model)
        whole = model.num_experts * memory.expert_bytes(model)
        own = {server.name: (server.times.device, float(held[number])) for number, server in enumerate(self.servers)}
        for group in (*self.groups, *self.prefill):
            at_home = whole if self.is_local else 0.0 if group.home is None else own.pop(self.servers[group.home].name)[1]
            kv = (self.kv_tokens or 0) * memory.kv_bytes(model)
            own[group.process] = group.times.device, memory.attention_bytes(model) + at_home + kv
        for name, (device, needed) in own.items():
            if device is not None and needed > device.memory_bytes:
                return f"{name} needs {needed / 1e9:.0f} GB for weights and KV, {device.name} has {device.memory_bytes / 1e9:.0f} GB"
        return None

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gains in a step."""
        return 1.0 + self.acceptance * self.draft_tokens

    @property
    def rows_per_sequence(self) -> int:
        """Rows of a decoding sequence in a step."""
        return 1 + self.draft_tokens

    def chances(self, layer: int) -> Floats:
        """As ExpertSkew.chances, by the measured counts of the layer where there are any. Raises UserError for counts that are none."""
        counts = self.counts.get(layer)
        if counts is None:
            return self.skew.chances(self.model, layer)
        try:
            if len(counts) != self.model.num_experts:
                raise ValueError(f"{len(counts)} numbers, the model has {self.model.num_experts} experts")
            return chances_of_counts(counts, self.model.num_experts_per_token)
        except ValueError as error:
            raise UserError(f"counts of layer {layer}: {error}") from None


def even_map(num_experts: int, num_servers: int, replicas: int = 1) -> ExpertMap:
    """The even placement that a graph file gets without `placement:`. Raises UserError for numbers that do not fit."""
    try:
        held = even_placement(num_experts, num_servers, replicas)
    except ValueError as error:
        raise UserError(f"{error}; write 1 <= replicas <= servers <= experts x replicas") from None
    return ExpertMap(servers_by_expert(dict(enumerate(held)), num_experts))


def message_bytes(
    model: ModelConfig, *, int8_dispatch: bool = False, int8_combine: bool = False, strict: bool = False
) -> tuple[RowBytes, RowBytes]:
    """Of requests and of responses of flowrt's exchange: rows in the model's dtype or as INT8 with a scale per row; requests also
    have a row number, an expert and a weight for each pair. With strict numerics a response has a row per pair."""
    item = model.item_bytes

    def row(is_int8: bool) -> float:
        return model.hidden_size + DTYPE_BYTES["float32"] if is_int8 else model.hidden_size * item

    back = row(int8_combine)
    return RowBytes(row(int8_dispatch), 2 * INT64_BYTES + item), RowBytes(0, back) if strict else RowBytes(back)


def emulated_times(graph: Graph, model: ModelConfig) -> dict[str, RankTimes]:
    """By process, the times of `emulate:`: its `compute`, and those of devices for other operators. Raises UserError without any."""
    emulation = graph.emulation
    if emulation is None or not (emulation.compute or emulation.devices):
        raise UserError("the graph has no modelled times; write emulate: with devices or compute")
    costs = {_plain(operator): cost for operator, cost in emulation.compute.items()}
    card = emulated_config(graph)
    num_like = 1 if card is None else StandIn.of(card, model).moe
    found, by_device = dict[str, RankTimes](), dict[str, RankTimes]()  # ranks with equal times share one object
    for process in graph.process_names():
        device = device_of(graph, process)
        name = "" if device is None else device.name
        if name not in by_device:
            by_device[name] = ChargedTimes(costs, None if device is None else DeviceTimes(device, card or model), num_like)
        found[process] = by_device[name]
    return found


def _placement(graph: Graph, dispatch: str, checkpoint: ModelConfig, model: ModelConfig) -> ExpertMap:
    """The placement of the graph in the layers of `model`, for which those of its checkpoint stand."""
    placement = expert_map_of(graph, dispatch, checkpoint.moe_layers, checkpoint.num_experts)
    if model is checkpoint or not placement.by_layer:
        return placement
    num_like = len(model.moe_layers) // len(checkpoint.moe_layers)
    layers = {layer: placement.table(checkpoint.moe_layers[number // num_like]) for number, layer in enumerate(model.moe_layers)}
    return ExpertMap(placement.replicas, layers)


def deployment_of(
    graph: Graph,
    model: ModelConfig,
    times: Mapping[str, RankTimes] | None = None,
    skew: ExpertSkew = ExpertSkew(),
    counts: Mapping[int, Sequence[float]] = MappingProxyType({}),
) -> Deployment:
    """The deployment that a graph describes. `model`: the config of its checkpoint; with `emulate.model` the result has that of the card.
    `times`: by process; by default those of its `emulate:`.

    Raises UserError for a graph without a model or without modelled times.
    """
    if graph.model is None:
        raise UserError("the graph serves no model; only a graph with model: can be predicted")
    times = emulated_times(graph, model) if times is None else times
    checkpoint, model = model, emulated_config(graph) or model
    sources = [node for node in graph.nodes.values() if node.kind.schedules]
    prefill = {node.process for node in graph.nodes.values() if node.kind.kv == "offers"}
    group = next((node.process for node in sources if node.process not in prefill), sources[0].process)  # prefill may pass trampolines by
    dispatch = next(node for node in graph.nodes_of(group) if node.kind.dispatches)
    nodes = server_nodes(graph, dispatch.name)
    experts = {number: graph.nodes[name] for number, name in sorted(nodes.items()) if graph.nodes[name].kind.holds_experts}
    requests = [edge for edge in graph.edges.values() if graph.nodes[edge.target].kind.serves and graph.crosses(edge)]
    homes = {node.process: number for number, node in experts.items()} if requests else {}
    behind = {nodes[number]: tuple(sorted(found)) for number, found in servers_behind(graph, dispatch.name).items()}
    forwards = {graph.nodes[name].process: found for name, found in behind.items()}
    batching = next(iter(experts.values())).batches or Batching()
    domain_of = {source: number for number, own in enumerate(batching.domains) for source in own}
    groups = {
        node.process: AttentionGroup(node.name, times[node.process], domain_of.get(node.name, 0), homes.get(node.process))
        for node in sources
    }
    servers = tuple(ExpertServer(each.process, times[each.process], forwards.get(each.process, ())) for each in experts.values())
    pulls = [edge for edge in graph.edges.values() if graph.nodes[edge.source].kind.kv == "offers" and graph.crosses(edge)]
    names = {edge.name for edge in requests}
    dispatch_bytes, combine_bytes = message_bytes(
        model,
        int8_dispatch=any(edge.int8 for edge in requests),
        int8_combine=any(edge.int8 for edge in graph.edges.values() if edge.response_to in names),
        strict=dispatch.process in strict_exchanges(graph),
    )
    limits, placement = graph.group_limits(), _placement(graph, dispatch.name, checkpoint, model)
    return Deployment(
        model=model,
        groups=tuple(group for process, group in groups.items() if process not in prefill),
        servers=servers if requests else (),
        placement=placement.without_servers(nodes.keys() - experts.keys()),
        micro_batches=min(graph.micro_batches, limits.max_micro_batches),
        batching=batching,
        link=_link(graph, requests),
        dispatch_bytes=dispatch_bytes,
        combine_bytes=combine_bytes,
        prefill=tuple(group for process, group in groups.items() if process in prefill),
        prefill_link=_link(graph, pulls),
        skew=skew,
        counts=counts,
        early=True,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_num_batched_tokens,
        kv_tokens=limits.kv_pages * limits.page_size,
        policy=graph.routing,
    )


def _link(graph: Graph, edges: Sequence[Edge]) -> LinkProfile:
    """The share of a NIC that each process has for the link of these edges; without an emulated one no message takes time."""
    label = next((edge.link for edge in edges if edge.link is not None), None)
    if label is None or graph.emulation is None:
        return NO_LINK
    return profile_of(label).shared_by(graph.emulation.processes_per_nic)


def _plain(operator: str) -> str:
    """The operator of a model in transformers under the name of the one whose place it takes."""
    name = operator.removeprefix("transformers_")
    return "attention" if name == "layer" else name
