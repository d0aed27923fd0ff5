"""Sizes of weights and rows, of which kinds of operators make their bytes and flops. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from flowrt.costs.work import FiringLoad, Work
from flowrt.operators.families.family import part_shapes, parts_to_read
from flowrt.operators.model_config import ModelConfig
from flowrt.transports.wire.message import DTYPE_BYTES


def weight_elements(config: ModelConfig, parts: Iterable[str]) -> int:
    """The weights of those parts that the model has, in one layer, as a mean over the layers that have any; of expert parts those of one
    expert."""
    shapes, read = part_shapes(config), parts_to_read(config)
    found = {part: frozenset(read[part]) for part in parts if part in read}
    num_layers = len(frozenset[int]().union(*found.values()))
    return sum(prod(shapes[part]) * len(layers) for part, layers in found.items()) // max(1, num_layers)


def row_bytes_of(config: ModelConfig, load: FiringLoad) -> float:
    """Returns the bytes of a load's rows in the width of the residual stream."""
    return load.num_rows * config.hidden_size * DTYPE_BYTES[config.dtype]


def weights_work(config: ModelConfig, parts: Iterable[str], load: FiringLoad) -> Work:
    """The weights are read once, and each is multiplied with every row."""
    elements = weight_elements(config, parts)
    return Work(elements * DTYPE_BYTES[config.dtype], 2 * load.num_rows * elements)
