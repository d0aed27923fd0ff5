"""Parses and formats the small notations of graph files: "0-5,7" for ids, "layer+1" for tags, "float32[rows,64]" for tensors, links, names.

Every parser raises ValueError with a text for the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from flowrt.costs.links import LINK_NUMBERS, PROFILES, link_label, link_numbers
from flowrt.errors import nearest, shortened, shown
from flowrt.transports.wire.message import DTYPE_BYTES, MAX_DIMENSIONS, Tag

MAX_LAYER = 4096
MAX_ID = 1 << 16  # bounds what "0-99999999999" may allocate

PORT_NAME = "[A-Za-z0-9_-]+"
NAME = rf"{PORT_NAME}(\.{PORT_NAME})*"
_NAME, _PORT = re.compile(NAME), re.compile(PORT_NAME)
_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_SPEC = re.compile(r"([a-z0-9_]+)\[([^\[\]]*)\]")
_DIMENSION = re.compile(r"\d{1,12}|[A-Za-z_][A-Za-z0-9_]*")
_OPERATOR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True)
class LayerSet:
    """The layers of a tag that an edge carries. None: every layer."""

    layers: frozenset[int] | None = None

    def __contains__(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def __str__(self) -> str:
        """As written in a graph file: "0-2,5"; "" for every layer."""
        runs: list[list[int]] = []
        for layer in sorted(self.layers or ()):
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class TagStep:
    """How a tag changes along an edge: not at all, to the next layer, to the next step, or to a given layer.

    A graph file writes `tag: layer+1`, `tag: step+1` or `tag: layer=3`. A cycle must hold an edge to the next layer or step.
    """

    kind: Literal["same", "next_layer", "next_step", "to_layer"] = "same"
    layer: int = 0

    @property
    def advances(self) -> bool:
        return self.kind in ("next_layer", "next_step")

    def apply(self, tag: Tag) -> Tag:
        if self.kind == "same":
            return tag
        if self.kind == "next_step":
            return Tag(tag.source, tag.epoch, tag.micro_batch, tag.step + 1, 0)
        layer = tag.layer + 1 if self.kind == "next_layer" else self.layer
        return Tag(tag.source, tag.epoch, tag.micro_batch, tag.step, layer)

    def __str__(self) -> str:
        return {"same": "", "next_layer": "layer+1", "next_step": "step+1", "to_layer": f"layer={self.layer}"}[self.kind]


ALL_LAYERS, SAME_TAG = LayerSet(), TagStep()  # of most edges


def is_name(text: str) -> bool:
    """Whether `text` may name a node or a process: letters, digits, "_" and "-", in parts separated by single dots."""
    return len(text) <= 200 and _NAME.fullmatch(text) is not None


def is_port_name(text: str) -> bool:
    """Whether `text` may name a port: as for a node, without dots."""
    return len(text) <= 100 and _PORT.fullmatch(text) is not None


def is_edge_end(text: str) -> bool:
    """Whether `text` is node.port."""
    node, dot, port = text.rpartition(".")
    return bool(dot) and is_name(node) and is_port_name(port)


def is_user_operator(text: str) -> bool:
    """Whether `text` is "module:function" (dots allowed on both sides)."""
    return _OPERATOR.fullmatch(text) is not None


def parse_ids(text: str | int) -> tuple[int, ...]:
    """The sorted ids of "0-5,7" or 3; "" gives none. Raises ValueError for an id given twice."""
    if isinstance(text, int):
        text = str(text)
    ids: set[int] = set()
    for part in text.replace(" ", "").split(",") if text.strip() else []:
        match = _RUN.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not an id or range; write ids as '0-5,7'")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part} runs backwards; write {last}-{first}")
        if last > MAX_ID:
            raise ValueError(f"{last} is too large; ids end at {MAX_ID}")
        run = range(first, last + 1)
        twice = next((i for i in run if i in ids), None)
        if twice is not None:
            raise ValueError(f"{twice} is given twice; name each id once")
        ids.update(run)
    return tuple(sorted(ids))


def format_ids(ids: Iterable[int]) -> str:
    """The inverse of `parse_ids`."""
    return str(LayerSet(frozenset(ids)))


def parse_layers(text: str | int | None) -> LayerSet:
    """The layers of "0-2,5" or 3; None and "" give every layer."""
    if text is None or text == "":
        return ALL_LAYERS
    layers = parse_ids(text)
    if layers and layers[-1] > MAX_LAYER:
        raise ValueError(f"layer {layers[-1]} is too large; layers end at {MAX_LAYER}")
    return LayerSet(frozenset(layers))


def parse_tag(text: str) -> TagStep:
    """The change of "layer+1", "step+1" or "layer=3"; "" changes nothing."""
    if text == "":
        return SAME_TAG
    if text == "layer+1":
        return TagStep("next_layer")
    if text == "step+1":
        return TagStep("next_step")
    match = re.fullmatch(r"layer=(\d{1,5})", text)
    if match is None:
        raise ValueError(f"{text!r} is not a change of a tag; write layer+1, step+1, or layer=N")
    if int(match[1]) > MAX_LAYER:
        raise ValueError(f"layer {match[1]} is too large; layers end at {MAX_LAYER}")
    return TagStep("to_layer", int(match[1]))


def parse_tensor_spec(text: str) -> tuple[str, tuple[str | int, ...]]:
    """dtype and dimensions of "float32[rows,64]": numbers are fixed, words are free. "int64[]" is a scalar."""
    match = _SPEC.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a tensor; write it as 'float32[rows,64]'")
    dtype, body = match[1], match[2]
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r} in {text!r}; {nearest(dtype, DTYPE_BYTES)}")
    parts = body.split(",") if body else []
    if len(parts) > MAX_DIMENSIONS:
        raise ValueError(f"{text!r} has {len(parts)} dimensions; write at most {MAX_DIMENSIONS}")
    for part in parts:
        if _DIMENSION.fullmatch(part) is None:
            raise ValueError(f"{part!r} in {text!r} is not a dimension; write a number or a word")
    return dtype, tuple(int(part) if part.isdigit() else part for part in parts)


def specs_disagree(given: str, taken: str) -> str | None:
    """Why a port that takes `taken` cannot receive a tensor of `given`; None when it can."""
    (dtype_a, dims_a), (dtype_b, dims_b) = parse_tensor_spec(given), parse_tensor_spec(taken)
    if dtype_a != dtype_b:
        return f"expected {dtype_b}, got {dtype_a}"
    if len(dims_a) != len(dims_b):
        return f"expected {len(dims_b)} dimensions, got {len(dims_a)}"
    for a, b in zip(dims_a, dims_b, strict=True):
        if isinstance(a, int) and isinstance(b, int) and a != b:
            return f"expected dimension {b}, got {a}"
    return None


def parse_link(link: str | Mapping[str, float | str]) -> str:
    """The label of a link: a profile's name, or that of the user's numbers (link_label)."""
    if isinstance(link, str):
        if link in PROFILES:
            return link
        if "=" not in link:
            raise ValueError(f"unknown link {link!r}; {nearest(link, PROFILES)}, or give numbers: {{{', '.join(LINK_NUMBERS)}}}")
        try:
            link = dict(link_numbers(link))
        except ValueError:
            raise ValueError(f"{link!r} is not a link; write a profile's name or {'=..,'.join(LINK_NUMBERS)}=..") from None
    return link_label(link)


def shown_value(value: object) -> str:
    """A value of a file for an error text: short, in YAML's words."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return shortened(shown(value), 60)
