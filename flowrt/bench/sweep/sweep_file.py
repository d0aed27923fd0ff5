"""Reads sweep files: variants of a graph, what each of them runs, and the figures that compare them.

    graph:                                # keys of a graph file
      deploy: {attention: {groups: 1}, experts: {servers: 1}}
      emulate: {compute: {attention: {row_seconds: 100e-6}, experts: {row_seconds: 50e-6}}}
    small_model: {num_layers: 16}         # a checkpoint with random weights for it, with the fields of SmallModel
    decode: {new_tokens: 8}               # what each variant runs: a batch that it decodes, or traffic
    set:                                  # a variant has one value of each of these
      deploy.experts.servers: [1, 2]      # the values of a key
      number:                             # or names, each for values of several keys
        1 micro-batch: {deploy.attention.micro_batches: 1, decode.batch: 1}
        2 micro-batches: {deploy.attention.micro_batches: 2, decode.batch: 2}
    figures:                              # a metric of a variant, or its ratio to another one
      - {metric: tokens_per_second, of: {number: 2 micro-batches}, against: {number: 1 micro-batch}, at_least: 1.8}

Under `set`, keys that begin with `decode.`, `traffic.` or `small_model.` are of this file, all others are of the graph. A figure stands for
one of each value that `of` and `against` leave open: of lists, and of everything in `set` that `of` does not name; `against` names what
differs there. Only variants of figures run. `flowrt sim GRAPH --sweep FILE` runs all variants of a file that has no more than `set` and
`figures`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from os.path import isfile
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, field

from flowrt.bench.cases.small_model import SmallModel
from flowrt.bench.report.figures import Target
from flowrt.bench.sweep.metrics import DECODE, METRICS, TRAFFIC
from flowrt.document import Document, Path_, read_document, with_values
from flowrt.errors import UserError, nearest
from flowrt.graph.problems import read_sections
from flowrt.graph.settings import Section

MAX_VARIANTS = 1000
OWN_SECTIONS = ("decode", "traffic", "small_model")
_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")

Positive: TypeAlias = Annotated[int, Meta(ge=1)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]
_Choice: TypeAlias = str | int | float | bool | tuple[str | int | float | bool, ...]
Names: TypeAlias = tuple[str, ...]  # of a variant: its value of each key under `set`


class DecodeSection(Section, frozen=True):
    """Sequences that start and are decoded together. Default of `batch`: as many as the groups take. `stop` names a process that stands
    still meanwhile, for `stop_seconds`. `apart_seconds`: from the first sequence of a group to that of the next one."""

    batch: Positive | None = None
    new_tokens: Annotated[int, Meta(ge=2)] = 8
    stop: str = ""
    stop_seconds: _Seconds = math.inf
    apart_seconds: _Seconds = 0.0


class TrafficSection(Section, frozen=True):
    """Requests, as of `flowrt sim --traffic`; the path of a trace is relative to the sweep file. They come at `factor` times their rate."""

    load: str = ""
    requests: Positive | None = None
    factor: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0


class ProcessesSection(Section, frozen=True):
    """What differs between real processes: `only` some of the values, and keys, as under `set`."""

    only: dict[str, tuple[_Choice, ...]] = field(default_factory=dict)
    set: dict[str, Any] = field(default_factory=dict)


class FigureSection(Section, frozen=True):
    """A figure. `at`: the role or process of busy shares, or the node that sends messages. `below_tokens`: of requests with shorter
    prompts. `label` and `curve` may have values of the variant in braces: {number}, {deploy.experts.servers}, and `curve` {against}. `x`:
    the key, or the word under `set`, that is drawn along the x axis."""

    metric: str | tuple[str, ...]
    at: str = ""
    below_tokens: Positive | None = None
    of: dict[str, _Choice] = field(default_factory=dict)
    against: dict[str, _Choice] = field(default_factory=dict)
    at_least: float | None = None
    at_most: float | None = None
    label: str = ""
    x: str = ""
    curve: str = ""

    @property
    def target(self) -> Target | None:
        if self.at_least is not None:
            return Target(self.at_least, at_most=False)
        return None if self.at_most is None else Target(self.at_most)


class SweepSections(Section, frozen=True):
    """The keys of a sweep file."""

    set: dict[str, tuple[Any, ...] | dict[str, dict[str, Any]]]
    graph: dict[str, Any] = field(default_factory=dict)
    small_model: SmallModel | None = None
    decode: DecodeSection | None = None
    traffic: TrafficSection | None = None
    processes: ProcessesSection = ProcessesSection()
    figures: tuple[FigureSection, ...] = ()


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of one metric and one variant, `against` another one or alone."""

    section: FigureSection
    metric: str
    of: Names
    against: Names | None
    label: str
    peer: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A sweep file. `is_real`: between real processes."""

    document: Document
    is_real: bool = False

    @cached_property
    def sections(self) -> SweepSections:
        return read_sections(self.document, SweepSections, "a sweep file")

    @cached_property
    def axes(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By key under `set`, and by the name of its value: the keys that this sets."""
        given = self.sections.set.items()
        return {key: {str(each): {key: each} for each in values} if isinstance(values, tuple) else values for key, values in given}

    @cached_property
    def figure_sections(self) -> tuple[FigureSection, ...]:
        """Those of the file; without any, tokens per second over the first key under `set`, with a line for each value of the others."""
        first, *others = self.axes
        metric = "output_tokens_per_second" if self.sections.decode is None else "tokens_per_second"
        return self.sections.figures or (FigureSection(metric=metric, x=first, curve=self._names_template(others)),)

    @property
    def labels(self) -> dict[str, str]:
        """Of the axes of the plot."""
        for each in self.figures:
            if each.about:
                words = METRICS[each.metric].words
                return {"xlabel": each.section.x, "ylabel": words if each.against is None else f"{words}, as a ratio"}
        return {}

    @property
    def variants(self) -> Iterator[Names]:
        return product(*self.axes.values())

    def settings(self, names: Names) -> dict[str, Any]:
        """The keys that a variant sets, and their values."""
        return {key: value for axis, name in zip(self.axes, names, strict=True) for key, value in self.axes[axis][name].items()}

    def document_of(self, names: Names) -> Document:
        """The file with the keys of a variant in their places."""
        values = []
        for axis, name in zip(self.axes, names, strict=True):
            path = ("set", axis, name) if isinstance(self.sections.set[axis], dict) else ("set", axis)
            values += [(_own_key(key), value, self.document.where((*path, key))) for key, value in self.axes[axis][name].items()]
        if self.is_real:
            changes = self.sections.processes.set.items()
            values += [(_own_key(key), value, self.document.where(("processes", "set", key))) for key, value in changes]
        return with_values(self.document, values)

    def sections_of(self, names: Names) -> SweepSections:
        return read_sections(self.document_of(names), SweepSections, "a sweep file")

    @cached_property
    def figures(self) -> list[ComparedFigure]:
        """All that the figures of the file stand for, between real processes those of the values that `processes` leaves."""
        return [each for number in range(len(self.figure_sections)) for each in self._figures_of(number)]

    def _figures_of(self, number: int) -> Iterator[ComparedFigure]:
        section, place = self.figure_sections[number], ("figures", number)
        metrics = (section.metric,) if isinstance(section.metric, str) else section.metric
        for metric in metrics:
            if metric not in METRICS:
                self.document.fail((*place, "metric"), f"there is no metric {metric!r}; {nearest(metric, METRICS)}")
            if METRICS[metric].of != (DECODE if self.sections.decode is not None else TRAFFIC):
                self.document.fail((*place, "metric"), f"{metric} is a metric of {METRICS[metric].of}:, which the file does not have")
        if section.at_least is not None and section.at_most is not None:
            self.document.fail((*place, "at_most"), "a figure has one target; remove at_least or at_most")
        chosen = {axis: list(names) for axis, names in self.axes.items()} | self._chosen(section.of, (*place, "of"))
        others = self._chosen(section.against, (*place, "against"))
        for metric, of, changed in product(metrics, product(*chosen.values()), product(*others.values())):
            other = {**dict(zip(self.axes, of, strict=True)), **dict(zip(others, changed, strict=True))}
            against = tuple(other.values()) if others else None
            if self.is_real and not all(map(self._has_processes, filter(None, (of, against)))):
                continue
            peer = ", ".join(changed)
            label = self._text(section.label or self._default_label(metric, section, chosen), of, (*place, "label"))
            about = {}
            if section.x:
                curve = self._text(section.curve, of, (*place, "curve"), {"against": peer})
                about = {"x": self._value(section.x, of, (*place, "x")), "curve": curve}
            yield ComparedFigure(section, metric, of, against, label, peer, about)

    def _chosen(self, choices: Mapping[str, Any], place: Path_) -> dict[str, list[str]]:
        return {axis: self.names_on(axis, chosen, (*place, axis)) for axis, chosen in choices.items()}

    def names_on(self, axis: str, chosen: Any, place: Path_) -> list[str]:
        if axis not in self.axes:
            self.document.fail(place, f"nothing under set: is called {axis!r}; {nearest(axis, self.axes)}")
        names = [str(each) for each in (chosen if isinstance(chosen, tuple) else (chosen,))]
        for name in names:
            if name not in self.axes[axis]:
                self.document.fail(place, f"{axis} has no value {name!r}; {nearest(name, self.axes[axis])}")
        return names

    def _has_processes(self, names: Names) -> bool:
        only = self._chosen(self.sections.processes.only, ("processes", "only"))
        return all(name in only.get(axis, (name,)) for axis, name in zip(self.axes, names, strict=True))

    def _names_template(self, axes: Iterable[str]) -> str:
        return ", ".join(f"{axis}={{{axis}}}" if isinstance(self.sections.set[axis], tuple) else f"{{{axis}}}" for axis in axes)

    def _default_label(self, metric: str, section: FigureSection, chosen: Mapping[str, list[str]]) -> str:
        shown = (axis for axis in self.axes if axis in section.of or len(chosen[axis]) > 1)
        names = self._names_template(shown)
        about = f" of {section.at}" if section.at else f" below {section.below_tokens} tokens" if section.below_tokens else ""
        return f"{names}: {METRICS[metric].words}{about}"

    def _text(self, template: str, names: Names, place: Path_, more: Mapping[str, str] = {}) -> str:
        """`template` with the values of a variant in place of the words in braces."""

        def value(found: re.Match[str]) -> str:
            return more[found[1]] if found[1] in more else str(self._value(found[1], names, place))

        return _PLACEHOLDER.sub(value, template)

    def _value(self, word: str, names: Names, place: Path_) -> Any:
        if word in self.axes:
            return self.settings(names).get(word, names[list(self.axes).index(word)])
        document, path = self.document_of(names), tuple(_own_key(word).split("."))
        if not document.has(path):
            self.document.fail(place, f"{word!r} is neither under set: nor a key of the variant; {nearest(word, self.axes)}")
        return document.at(path)


def read_sweep(path: Path, is_real: bool = False) -> Sweep:
    """Raises UserError with file and line for what is no sweep."""
    if not isfile(path):
        raise UserError(f"{path}: no such file; write one with set: {{deploy.experts.servers: [2, 4]}}")
    sweep = Sweep(read_document(path), is_real)
    _check(sweep)
    return sweep


def _check(sweep: Sweep) -> None:
    document = sweep.document
    for axis, values in sweep.axes.items():
        if not values:
            document.fail(("set", axis), "has no value; write [2, 4], or names with their keys")
    if not sweep.axes:
        document.fail(("set",), "is empty; write the values of a key, as set: {deploy.experts.servers: [2, 4]}")
    if (number := math.prod(map(len, sweep.axes.values()))) > MAX_VARIANTS:
        document.fail(("set",), f"{number} combinations are more than {MAX_VARIANTS}; give fewer values")
    for axis, names in sweep.sections.processes.only.items():
        sweep.names_on(axis, names, ("processes", "only", axis))
    _ = sweep.figures  # which are checked when they are read


def _own_key(key: str) -> str:
    """The path in a sweep file of a key that a variant sets."""
    return key if key.partition(".")[0] in OWN_SECTIONS else f"graph.{key}"
