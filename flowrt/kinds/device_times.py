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
    own = device.by_dtype.get(config.dtype, device)
    step = device.step_seconds + load.num_rows * device.sequence_seconds if kind.ends_step else 0.0
    return step + own.fixed_seconds + load.num_experts * own.expert_seconds + sum(_busy_seconds(own, piece) for piece in pieces)


def exchange_seconds(device: Device, num_messages: float) -> float:
    """Seconds that a firing of the exchange between groups and servers takes beside operators, with so many messages in and out."""
    return device.firing_seconds + num_messages * device.message_seconds


def _busy_seconds(device: Device, piece: KernelWork) -> float:
    if piece.attends:
        return device.attend_seconds(piece.work, piece.dtype)
    return device.busy_seconds(piece.work, piece.dtype, device.efficiency(piece.rows, piece.dtype))
