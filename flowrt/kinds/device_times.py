"""What a call of an operator costs on a device: the one place that planner, emulation and simulation ask."""

from __future__ import annotations

from flowrt.costs.devices import Device
from flowrt.costs.work import FiringLoad, KernelWork
from flowrt.graph.kinds import Kind
from flowrt.kinds.weights import product_dtype
from flowrt.operators.model_config import ModelConfig


def device_seconds(device: Device, kind: Kind, config: ModelConfig, load: FiringLoad) -> float:
    """Seconds of one call of an operator in one layer of the model: 0.0 for a kind that only moves rows, and for a load without rows."""
    if kind.work is None or not load.num_rows:
        return 0.0
    if kind.pieces is not None:
        pieces = kind.pieces(config, load)
    else:
        rows = load.num_rows / load.num_experts if kind.holds_experts and load.num_experts else load.num_rows
        pieces = (KernelWork(kind.work(config, load), product_dtype(config, kind.parts), rows),)
    return device.fixed_seconds + sum(_busy_seconds(device, piece) for piece in pieces)


def _busy_seconds(device: Device, piece: KernelWork) -> float:
    efficiency = device.attention_efficiency if piece.attends else device.efficiency(piece.rows, piece.dtype)
    return device.busy_seconds(piece.work, piece.dtype, efficiency)
