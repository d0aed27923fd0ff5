"""Specs of ports, such as "float32[rows,64]", and message schemas of edges, against which each received message is checked first.

The notation is in flowrt/graph/notation.py; checks between two ports before the start are in flowrt/graph/checks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from flowrt.dataflow.payload import Payload, spec_of
from flowrt.graph.notation import parse_tensor_spec
from flowrt.transports.wire.message import Tag, Tensor, TensorSpec

MAX_KNOWN_SOURCES = 1024  # a source has a different name in each incarnation
MAX_FITTING = 1024  # combinations of sizes and specs that a schema remembers


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


@dataclass(frozen=True)
class MessageSchema:
    """Count, dtype and shape of the tensors of an edge's messages, their header, and the range of their tags.

    `tensors` come first, one each; None matches any tensor. Then `optional` tensors follow, all or none, and any number of `repeated`
    ones. A named dimension has the same size in all tensors of a message except the repeated ones. `sources`: the nodes that emit tags.
    """

    tensors: tuple[Spec | None, ...]
    sources: frozenset[str]
    num_micro_batches: int
    optional: tuple[Spec, ...] = ()
    repeated: Spec | None = None
    header: type[msgspec.Struct] | None = None
    known_sources: set[str] = field(default_factory=set, compare=False, repr=False)
    fitting: set[tuple[object, ...]] = field(default_factory=set, compare=False, repr=False)  # sizes and specs of tensors that fit

    def sizes(self, payload: Payload) -> dict[str, int]:
        """Sizes of the free dimensions of a payload that fits the schema."""
        sizes: dict[str, int] = {}
        for spec, tensor in zip(self.tensors, payload.tensors, strict=False):
            if spec is not None:
                sizes.update((name, size) for name, size in zip(spec.dimensions, tensor.shape, strict=False) if isinstance(name, str))
        return sizes

    def fault_of_tensors(self, tensors: Sequence[Tensor], sizes: dict[str, int]) -> str | None:
        """The error in the tensors of a message, or None if they fit. `sizes` holds the free dimensions known so far."""
        found = (*sizes.items(), *[tensor.spec for tensor in tensors])
        if found in self.fitting:
            return None
        sizes = dict(sizes)
        expected: tuple[Spec | None, ...] = self.tensors
        if (extra := len(tensors) - len(expected)) != 0:
            if extra < 0 or (extra != len(self.optional) and self.repeated is None):
                return f"{len(tensors)} tensors, expected {len(expected)}"
            expected += self.optional if self.repeated is None else (self.repeated,) * extra
        for place, (spec, tensor) in enumerate(zip(expected, tensors, strict=True)):
            if spec is not None and (fault := check_spec(spec, tensor.spec, sizes if spec is not self.repeated else {})):
                return f"tensor {place} is {fault}, expected {spec}"
        if len(self.fitting) >= MAX_FITTING:
            self.fitting.clear()
        self.fitting.add(found)
        return None

    def fault_of_tag(self, tag: Tag) -> str | None:
        """The error in the tag of a message, or None if it is in range."""
        if tag.source not in self.known_sources:
            if tag.source.partition("@")[0] not in self.sources:
                return f"a tag of {tag.source[:80]!r}, which emits none"
            if len(self.known_sources) < MAX_KNOWN_SOURCES:
                self.known_sources.add(tag.source)
        if tag.epoch < 0 or tag.step < 0 or not 0 <= tag.micro_batch < self.num_micro_batches:
            return f"a tag out of range: epoch {tag.epoch}, micro-batch {tag.micro_batch}, step {tag.step}"
        return None
