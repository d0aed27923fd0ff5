"""Closed equations of the papers that hold for any size: payloads, volumes, pipeline counts, replica slots, fleet sizes. Pure.

ping_pong.py has MegaScale-Infer's equations 1 to 5. papers' own errors are corrected: MixServe divides the degree out twice.
"""

from __future__ import annotations

import math


def m2n_bytes(micro_batch: int, active: int, num_experts: int, hidden_size: int, tensor_parallel: int, item_bytes: int = 2) -> float:
    """Mean bytes from one attention rank to one expert for a micro-batch (MegaScale-Infer, section 7.3)."""
    return micro_batch * active / num_experts * hidden_size * item_bytes / tensor_parallel


def knee_rows(flops_per_second: float, bytes_per_second: float, item_bytes: int = 2) -> float:
    """Rows at which a matrix product takes as long to compute as its weights take to read (MegaScale-Infer, section 2): 2 flops per weight
    and row against `item_bytes` per weight."""
    return flops_per_second / bytes_per_second * item_bytes / 2


def expert_use(rows: float, active: int, num_experts: int, knee: float) -> float:
    """The share of the peak that experts reach when each gets its share of `rows` (MegaScale-Infer, section 2)."""
    return min(1.0, rows * active / num_experts / knee)


def pipeline_gain(communication: float, computing: float, pipelines: int, fixed_each: float) -> float:
    """Seconds saved by cutting a layer into so many pipelines (EPS-MoE, section IV-D): min(communication, computing) (N - 1) / N - k N."""
    return min(communication, computing) * (pipelines - 1) / pipelines - fixed_each * pipelines


def best_pipelines(communication: float, computing: float, fixed_each: float, max_pipelines: int) -> int:
    """The number of pipelines that saves the most: near sqrt(C / k); 1 where nothing is gained. Times in seconds, none below 0."""
    if fixed_each <= 0:
        return max_pipelines
    ideal = math.sqrt(min(communication, computing) / fixed_each)
    tried = {min(max_pipelines, max(1, round_(ideal))) for round_ in (math.floor, math.ceil)}
    best = max(tried, key=lambda count: (pipeline_gain(communication, computing, count, fixed_each), -count))
    return best if pipeline_gain(communication, computing, best, fixed_each) > 0 else 1


def exchanged_volumes(activations: float, degree: int, targets: float) -> tuple[float, float, float]:
    """Volume of a layer's communication over `degree` ranks (EPS-MoE, section IV-B), in the unit of `activations` (those of one device):
    of tensor parallelism, 2 P (D - 1); the least and the most of expert parallelism, 2 P (D - 1) / D and that times `targets`."""
    split = 2 * activations * (degree - 1) / degree
    return 2 * activations * (degree - 1), split, split * targets


def collective_rows(rows: float, active: int, tensor_parallel: int, expert_parallel: int) -> tuple[float, float]:
    """Rows' worth of hidden states that a rank sends in one layer (MixServe, equations 1 to 3, with the degree divided out once): in an
    all-reduce over the tensor-parallel ranks, and in the dispatch and combine over the expert-parallel ranks."""
    reduced = 2 * rows * (tensor_parallel - 1) / tensor_parallel
    return reduced, 2 * rows * active * (expert_parallel - 1) / expert_parallel


def replica_slots(num_experts: int, redundant: int, devices: int) -> int:
    """Experts that each device holds, with redundant ones. Raises ValueError when devices would hold different numbers."""
    slots, left = divmod(num_experts + redundant, devices)
    if left:
        raise ValueError(f"{num_experts} + {redundant} experts do not divide into {devices} equal devices")
    return slots


def fleet_nodes(tokens_per_day: float, tokens_per_second_per_node: float) -> float:
    """Nodes that keep up with a day's tokens, evenly spread; sum over prefill and decode."""
    return tokens_per_day / 86400 / tokens_per_second_per_node
