"""Checks tensors against the specs of ports: "float32[rows,64]".

The notation is in flowrt/graph/notation.py; checks between two ports before the start are in flowrt/graph/checks.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flowrt.dataflow.payload import spec_of
from flowrt.graph.notation import parse_tensor_spec
from flowrt.transports.wire.message import TensorSpec


@dataclass(frozen=True)
class Spec:
    """dtype and dimensions of a port. A word is a free dimension; equal words have equal sizes within one firing."""

    dtype: str
    dimensions: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dimensions))}]"


def parse_spec(text: str) -> Spec:
    """Parse the text of a spec. Raises ValueError with the expected notation."""
    return Spec(*parse_tensor_spec(text))


def check_tensor(spec: Spec, tensor: torch.Tensor, sizes: dict[str, int]) -> str | None:
    """Like `check_spec`, for a tensor."""
    return check_spec(spec, spec_of(tensor), sizes)


def check_spec(spec: Spec, actual: TensorSpec, sizes: dict[str, int]) -> str | None:
    """None when `actual` fits, else its description. `sizes` holds the free dimensions known so far in this firing and is extended."""
    if actual.dtype != spec.dtype or len(actual.shape) != len(spec.dimensions):
        return _text(actual)
    for size, dimension in zip(actual.shape, spec.dimensions, strict=True):
        expected = sizes.setdefault(dimension, size) if isinstance(dimension, str) else dimension
        if size != expected:
            return _text(actual) if isinstance(dimension, int) else f"{_text(actual)}, where {dimension} is {expected}"
    return None


def _text(actual: TensorSpec) -> str:
    return f"{actual.dtype}[{','.join(map(str, actual.shape))}]"
