"""What a rank of a deployment holds: bytes of weights, and room for the KV of sequences. Pure."""

from __future__ import annotations

from functools import cache

from flowrt.costs.devices import Device
from flowrt.operators.families.family import part_bytes, part_shapes, parts_to_read
from flowrt.operators.model_config import EXPERT_PARTS, ModelConfig

RESERVE = 0.10  # of a device's memory for activations, buffers and the runtime: vLLM's default leaves as much (gpu_memory_utilization 0.9)


@cache
def attention_bytes(model: ModelConfig) -> int:
    """All weights but those of routed experts."""
    return sum(num_bytes * layers for part, (num_bytes, layers) in _parts(model).items() if part not in EXPERT_PARTS)


@cache
def expert_bytes(model: ModelConfig) -> int:
    """One routed expert, in all its layers."""
    return sum(num_bytes * layers for part, (num_bytes, layers) in _parts(model).items() if part in EXPERT_PARTS)


def model_bytes(model: ModelConfig) -> int:
    return attention_bytes(model) + model.num_experts * expert_bytes(model)


def _parts(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Part -> its bytes in a layer, and the number of its layers."""
    shapes = part_shapes(model)
    return {part: (part_bytes(model, part, shapes[part]), len([*layers])) for part, layers in parts_to_read(model).items()}


def kv_bytes(model: ModelConfig, tensor_parallel: int = 1) -> float:
    """KV of one token on one of so many ranks: heads are shared among them, a latent is repeated."""
    return model.kv_bytes / min(tensor_parallel, model.num_kv_heads)


def usable_bytes(device: Device) -> float:
    return device.memory_bytes * (1 - RESERVE)


def kv_tokens(model: ModelConfig, device: Device, weights: float, tensor_parallel: int = 1, pipeline: int = 1) -> float:
    """The tokens whose KV fits beside `weights` bytes on each rank of a group; below 0: the weights alone do not fit."""
    return (usable_bytes(device) - weights) / (kv_bytes(model, tensor_parallel) / pipeline)
