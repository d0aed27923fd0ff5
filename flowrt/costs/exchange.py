"""What sending costs: exchanges between endpoints, collectives, point to point, and sending while computing. Pure.

Times are linear in bytes beyond a fixed part (DeepEP's published curves have a median R2 of 0.999). Three rules:

* The fixed part is paid once, whatever the skew: only bytes are multiplied by it.
* The load of an endpoint is the larger of the bytes that it sends and those that it receives: links are full duplex.
* A device that reaches its node and other nodes over different ports uses both at once; over one port (UB) it sends one after the other.

Functions take numbers or numpy arrays of one shape, and return the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flowrt.costs.devices import Device
from flowrt.costs.links import LinkProfile, profile_of

Number = TypeVar("Number", float, NDArray[np.floating[Any]])
_SCALE_GROUP, _HEADER_BYTES = 128, 16  # of a row in 8 bits: numbers that share a scale, and where the row belongs (DeepEP)


def row_bytes(hidden_size: int, dtype: str) -> float:
    """Bytes of one row of an exchange. In FP8: H + 4 H / 128 + 16 (DeepEP); in INT8 with one scale per row."""
    if dtype == "fp8":
        return hidden_size + 4 * hidden_size / _SCALE_GROUP + _HEADER_BYTES
    if dtype == "int8":
        return hidden_size + 4 + _HEADER_BYTES
    return hidden_size * (4 if dtype == "float32" else 2)


@dataclass(frozen=True)
class Fabric:
    """The links between equal endpoints, `per_node` of them in a node. `device`: what they are, with its constants of exchanges."""

    within: LinkProfile
    between: LinkProfile
    per_node: int
    device: Device

    @property
    def shares_port(self) -> bool:
        """Whether a device reaches its own node and other nodes over one port."""
        return self.within == self.between

    @property
    def between_bytes_per_second(self) -> float:
        """Of an endpoint, to other nodes, as exchanges reach it."""
        return self.between.bandwidth_bytes_per_second * self.device.between_efficiency

    @property
    def within_bytes_per_second(self) -> float:
        """Of an endpoint, inside its node, as exchanges reach it."""
        return self.within.bandwidth_bytes_per_second * self.device.within_efficiency

    def port_seconds(self, within_bytes: Number, between_bytes: Number) -> Number:
        """Seconds that the busier port of an endpoint takes for its load inside the node and between nodes."""
        near, far = within_bytes / self.within_bytes_per_second, between_bytes / self.between_bytes_per_second
        return near + far if self.shares_port else _larger(near, far)

    def fixed_seconds(self, dtype: str) -> float:
        """The fixed part of an exchange of rows of this dtype."""
        return self.device.exchange_seconds + (self.device.quantize_seconds if dtype in ("fp8", "int8") else 0.0)


def fabric_of(device: Device, within: str | None = None, between: str | None = None, per_node: int | None = None) -> Fabric:
    """The fabric of equal devices; links and the number per node are those of its card unless given."""
    return Fabric(profile_of(within or device.within), profile_of(between or device.between), per_node or device.devices_per_node, device)


def spread(endpoints: int, per_node: int) -> tuple[float, float]:
    """Of rows sent evenly to all endpoints, the sender among them: the share for others in its node, and the share for other nodes."""
    near = min(per_node, endpoints)
    return (near - 1) / endpoints, (endpoints - near) / endpoints


def exchange_seconds(fabric: Fabric, endpoints: int, pairs: Number, hidden_size: int, dtype: str) -> Number:
    """Seconds of a dispatch or combine in which each endpoint has a load of `pairs` rows, one for each expert of a token, spread evenly.

    `pairs`: the larger of those that it sends and receives; give the heaviest endpoint's for the end of the exchange.
    """
    near, far = spread(endpoints, fabric.per_node)
    num_bytes = pairs * row_bytes(hidden_size, dtype)
    return fabric.fixed_seconds(dtype) + fabric.port_seconds(num_bytes * near, num_bytes * far)


@dataclass(frozen=True)
class Routing:
    """How a token chooses: `active` of `experts`, from the best `chosen_groups` of `groups` equal groups."""

    experts: int
    active: int
    groups: int = 1
    chosen_groups: int = 1

    def targets(self, num_targets: int) -> float:
        """Of equal targets (ranks, nodes) that hold the experts in order: the mean number that a token's experts are on."""
        pool = self.experts * self.chosen_groups // self.groups
        held, groups_held = self.experts / num_targets, self.groups / num_targets
        if groups_held <= 1:  # a target holds a part of one group
            return num_targets * self.chosen_groups / self.groups * (1 - _none_of(pool, held, self.active))
        part, none = int(groups_held), 0.0
        for count in range(min(part, self.chosen_groups) + 1):
            ways = math.comb(part, count) * math.comb(self.groups - part, self.chosen_groups - count)
            none += ways / math.comb(self.groups, self.chosen_groups) * _none_of(pool, count * self.experts / self.groups, self.active)
        return num_targets * (1 - none)


def _none_of(pool: int, held: float, active: int) -> float:
    """The chance that none of `active` different experts of a pool is one of `held`."""
    chance = 1.0
    for taken in range(active):
        chance *= max(0.0, (pool - held - taken) / (pool - taken))
    return chance


def bulk_exchange_seconds(fabric: Fabric, endpoints: int, tokens: Number, routing: Routing, hidden_size: int, dtype: str) -> Number:
    """Seconds of a dispatch or combine of prefill: a token travels once to each endpoint with its experts. Where nodes have ports of their
    own, it travels once to each node, and from there over the node's links, through buffers that the same copies fill (DeepEP)."""
    row, local = row_bytes(hidden_size, dtype), min(fabric.per_node, endpoints)
    nodes, arriving = max(1, endpoints // local), tokens * (routing.targets(endpoints) * row)
    if fabric.shares_port:
        near, far = spread(endpoints, fabric.per_node)
        within, between = arriving * near, arriving * far
    else:
        between = tokens * (routing.targets(nodes) * row * (nodes - 1) / nodes)
        within = arriving * ((local - 1) / local) + between
    return fabric.fixed_seconds(dtype) + fabric.port_seconds(within, between)


def transfer_seconds(link: LinkProfile, num_bytes: Number) -> Number:
    """Seconds of one message: constant up to the inflection, the bytes that the link carries in its time per message; then linear."""
    busy = num_bytes / link.bandwidth_bytes_per_second
    return link.latency_seconds + _larger(busy, link.message_seconds + 0 * busy)


def reduce_scatter_seconds(link: LinkProfile, efficiency: float, num_bytes: Number, degree: int) -> Number:
    """Seconds to sum tensors of `num_bytes` of each of `degree` ranks, each keeping its share. An all-gather of the sum takes the same."""
    busy: Number
    if degree == 1:
        busy = 0 * num_bytes
        return busy
    busy = num_bytes * ((degree - 1) / degree) / (link.bandwidth_bytes_per_second * efficiency)
    seconds: Number = link.latency_seconds + _larger(busy, link.message_seconds + 0 * busy)
    return seconds


def all_reduce_seconds(link: LinkProfile, efficiency: float, num_bytes: Number, degree: int) -> Number:
    """A reduce-scatter and an all-gather in one kernel (MixServe, equation 2, with the degree divided out once)."""
    return reduce_scatter_seconds(link, efficiency / 2, num_bytes, degree)


def hybrid_exchange_seconds(
    fabric: Fabric, nodes: int, attention_tp: int, expert_tp: int, tokens: Number, routing: Routing, hidden_size: int
) -> Number:
    """MixServe's dispatch or combine (section III-D), where `attention_tp` ranks share a group's `tokens`, all groups having as many, and
    `expert_tp` ranks of a node share experts: each rank sends its slice between nodes, to those ranks that need it, while the ranks that
    share experts reduce-scatter or all-gather."""
    row, columns = row_bytes(hidden_size, "bfloat16"), fabric.per_node // expert_tp
    wanted = tokens * (routing.targets(nodes * columns) / (nodes * columns) * row)  # of a group by the ranks that share some experts
    groups = nodes * fabric.per_node // attention_tp
    far = wanted * (columns * (nodes - 1) / attention_tp) / fabric.between_bytes_per_second
    near = wanted * (groups * (expert_tp - 1) / expert_tp) / fabric.within_bytes_per_second
    seconds: Number = fabric.device.exchange_seconds + _larger(near, far)
    return seconds


def overlapped_seconds(
    computing: Number, sending: Number, pipelines: int = 1, compute_share: float = 1.0, send_share: float = 0.0, saturation: float = 0.0
) -> Number:
    """Seconds of work whose sending runs beside its computing, in `pipelines` pieces (EPS-MoE, sections III and IV).

    `compute_share`, `send_share`: of the device's cores, what each occupies. Where they ask for more than all, both run slower in
    proportion. Computing is also slower below `saturation` of the cores. The first piece is sent before any computing.
    """
    crowded, scarce = max(1.0, compute_share + send_share), max(1.0, saturation / compute_share)
    first: Number = sending / pipelines
    seconds: Number = first + _larger(computing * (crowded * scarce), (sending - first) * crowded)
    return seconds


def _larger(one: Number, other: Number) -> Number:
    larger: Number = np.maximum(one, other) if isinstance(one, np.ndarray) or isinstance(other, np.ndarray) else max(one, other)
    return larger
