"""Sizes of weights and rows, of which kinds of operators make their bytes and flops. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod

from flowrt.costs.work import FiringLoad, Work
from flowrt.operators.families.family import part_bytes, part_shapes, parts_to_read
from flowrt.operators.model_config import EXPERT_PARTS, KEPT_PARTS, LIBRARY_EXPERT, ModelConfig
from flowrt.transports.wire.message import DTYPE_BYTES


@lru_cache(maxsize=1024)  # predictions ask for the same few, thousands of times
def weight_elements(config: ModelConfig, parts: tuple[str, ...]) -> int:
    """The weights of those parts that the model has, in one layer, as a mean over the layers that have any; of expert parts those of one
    expert."""
    return _per_layer(config, parts, {part: prod(shape) for part, shape in part_shapes(config).items()})


@lru_cache(maxsize=1024)
def weight_bytes(config: ModelConfig, parts: tuple[str, ...]) -> int:
    """The bytes in which they are held, in one layer."""
    return _per_layer(config, parts, {part: part_bytes(config, part, shape) for part, shape in part_shapes(config).items()})


def _per_layer(config: ModelConfig, parts: Iterable[str], sizes: Mapping[str, int]) -> int:
    read = parts_to_read(config)
    found = {part: frozenset(read[part]) for part in parts if part in read}
    num_layers = len(frozenset[int]().union(*found.values()))
    return sum(sizes[part] * len(layers) for part, layers in found.items()) // max(1, num_layers)


def row_bytes_of(config: ModelConfig, load: FiringLoad) -> float:
    """Returns the bytes of a load's rows in the width of the residual stream."""
    return load.num_rows * config.hidden_size * DTYPE_BYTES[config.dtype]


def weights_work(config: ModelConfig, parts: tuple[str, ...], load: FiringLoad) -> Work:
    """The weights are read once, and each is multiplied with every row."""
    return Work(weight_bytes(config, parts), 2 * load.num_rows * weight_elements(config, parts))


def product_dtype(config: ModelConfig, parts: Iterable[str]) -> str:
    """What products with these weights are computed in: the type that they are held in; with INT8, only if rows become INT8, too."""
    of_experts = (*EXPERT_PARTS, LIBRARY_EXPERT)
    kept = [config.expert_weights if part in of_experts else config.weights for part in parts if part in (*of_experts, *KEPT_PARTS)]
    computed = [each for each in kept if each != "dtype" and (each != "int8" or config.activations == "int8")]
    return computed[0] if computed else config.dtype
