"""The matching table: collects inputs by node and tag, and returns the firings that are complete. Pure: no torch, no loop, no clock.

A row is (node, tag) and holds the inputs that have arrived for it. Waiting is represented only by a row in this table, so a rollback
deletes rows and cancels no coroutine. One thread at a time touches a row: the compute call for rows of fused nodes, the event loop
for all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from flowrt.dataflow.parts import Cover
from flowrt.graph.model import Edge, Node
from flowrt.transports.wire.message import Tag


class Firing(msgspec.Struct, frozen=True):
    """A node with all its inputs for one tag. The input of a gather port is a list in plan order.

    `via` lists the ids of the edges that carried the inputs. If an edge responds to one of them, it carries this firing's result.
    """

    node: str
    tag: Tag
    inputs: dict[str, Any]
    via: tuple[int, ...] = ()


class Arrival(msgspec.Struct, frozen=True):
    """Result of `arrive`: the firings that are now ready (a stateful node may release later steps too), or that the message was dropped."""

    firings: tuple[Firing, ...] = ()
    dropped: bool = False


NO_STEP = -1  # of a tag that stands for a whole epoch
FINISHED_TAGS = 1024  # finished gather rows to remember, so that a late message opens no new row

_WAITS = Arrival()
_DROPPED = Arrival(dropped=True)


@dataclass(slots=True)
class _MatchingRow:
    inputs: dict[str, Any] = field(default_factory=dict)
    covers: defaultdict[str, Cover[Any]] = field(default_factory=partial(defaultdict, Cover))
    via: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Inputs that a node needs at one layer."""

    ports: frozenset[str]
    gathers: tuple[tuple[str, str], ...]  # (gather port, its count port)
    alone: bool  # one message completes the inputs


class MatchingTable:
    """Matches the inputs of `nodes` by tag.

    `plan_of(value)` reads the message of a count port: the ids of the expected parts, or their number if they carry no ids.
    `part_of(value)` reads the id of a part in the message of a gather port. `failed`: (source, step) of calls
    for which a stateful node does not wait; `forgotten`: by source, the step up to which all calls have ended.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        edges: Iterable[Edge],
        plan_of: Callable[[Any], tuple[int, ...] | int],
        part_of: Callable[[Any], int | None],
        failed: Container[tuple[str, int]] = (),
        forgotten: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._failed, self._forgotten = failed, forgotten
        self.use(nodes, edges)
        self._plan_of, self._part_of = plan_of, part_of
        self._rows: dict[tuple[str, Tag], _MatchingRow] = {}
        self._next_step: dict[tuple[str, str, int, int], int] = {}  # stateful nodes: (node, source, epoch, micro-batch) -> step
        self._held: dict[tuple[str, str, int, int], dict[int, list[Firing]]] = {}
        self._finished: dict[tuple[str, Tag], None] = {}  # gather rows that have fired, oldest first

    def use(self, nodes: Iterable[Node], edges: Iterable[Edge]) -> None:
        """Match by these nodes and edges from now on. Each port that an edge led to must still have one, and no other may have one."""
        self._nodes: Mapping[str, Node] = {node.name: node for node in nodes}
        into: dict[str, list[Edge]] = {name: [] for name in self._nodes}
        for edge in edges:
            if edge.target in into:
                into[edge.target].append(edge)
        self._edges_into = into
        self._shapes: dict[tuple[str, int], _Shape] = {}

    def __len__(self) -> int:
        """Number of incomplete rows plus firings held back for an earlier step."""
        return len(self._rows) + sum(len(firings) for steps in self._held.values() for firings in steps.values())

    def arrive(self, edge: Edge, tag: Tag, value: Any, via: Iterable[int] = ()) -> Arrival:
        """Add a message for `edge.target`. `tag` already has the edge's step applied. `via`: edges of requests that the target responds to.

        Raises ValueError when a `one` port receives a second message for a tag: that is an error of the graph, not of the network.
        """
        shape = self._shapes.get((edge.target, tag.layer)) or self._shape(edge.target, tag.layer)
        node = self._nodes[edge.target]
        if shape.alone:
            only = Firing(edge.target, tag, {edge.target_port: value}, (edge.id,))
            return Arrival(self._in_turn(only) if node.stateful else (only,))
        key = (edge.target, tag)
        row = self._rows.get(key)
        port = node.inputs[edge.target_port]
        part = self._part_of(value) if port.takes == "gather" else None
        if row is None:
            if part is not None and port.takes == "gather":
                return _DROPPED  # the plan is emitted before its parts: no row means that the tag is complete
            if port.takes == "gather" and key in self._finished:
                return _DROPPED  # more messages than the plan expects
            row = self._rows[key] = _MatchingRow()
        if port.takes == "gather":
            if not row.covers[port.name].arrive(part, value):
                return _DROPPED
            row.via.append(edge.id)
        else:
            row.via.append(edge.id)  # before the error: `drop` then returns this message's credit too
            if port.name in row.inputs:
                raise ValueError(f"{edge.target}.{port.name} got a second message for {tag}; a port that takes one gets one per tag")
            row.inputs[port.name] = value
            row.via += via
        for gather, count in shape.gathers:
            if count == port.name:
                self._expect(row, gather, value)
        firing = self._complete(key, row, shape)
        if firing is None:
            return _WAITS
        if shape.gathers:
            self._finished[key] = None
            if len(self._finished) > FINISHED_TAGS:
                del self._finished[next(iter(self._finished))]
        return Arrival(self._in_turn(firing) if node.stateful else (firing,))

    def take(self, node: str, tag: Tag) -> Firing | None:
        """Delete the row of a node and tag. Returns its inputs so far as a firing; None if there is no row."""
        row = self._rows.pop((node, tag), None)
        return None if row is None else Firing(node, tag, row.inputs, tuple(row.via))

    def alone(self, edge: Edge, layer: int) -> bool:
        """Whether a message of `edge` at `layer` is the only input of a stateless node, so that the caller may fire without this table."""
        return self._shape(edge.target, layer).alone and not self._nodes[edge.target].stateful

    def supersede(self, node: str, port: str, tag: Tag, part: int, by: Iterable[int]) -> bool:
        """Replace a lost or late part. Returns False when the tag no longer waits for anything."""
        row = self._rows.get((node, tag))
        if row is None or port not in row.covers:
            return False
        row.covers[port].supersede(part, by)
        return True

    def missing(self, node: str, port: str, tag: Tag) -> list[int]:
        """Ids of parts that a tag still waits for, in plan order; [] when the tag is complete or its plan has not arrived."""
        row = self._rows.get((node, tag))
        cover = None if row is None else row.covers.get(port)
        return [] if cover is None else cover.missing()

    def drop(self, stale: Callable[[Tag], bool]) -> tuple[int, list[int]]:
        """Delete all rows and held firings whose tag is stale (rollback).

        Returns how many were deleted, and one edge id per deleted message, so that the caller can return the credits.
        """
        # A fused firing on the compute thread may add and complete rows concurrently. `pop` gives each row to exactly one of the two.
        rows = [row for key in list(self._rows) if stale(key[1]) and (row := self._rows.pop(key, None)) is not None]
        via = [edge for row in rows for edge in row.via]
        dropped = len(rows)
        for key in [key for key in (*self._next_step, *self._held) if stale(Tag(key[1], key[2], key[3], NO_STEP))]:
            self._next_step.pop(key, None)
            held = [firing for firings in self._held.pop(key, {}).values() for firing in firings]
            via += [edge for firing in held for edge in firing.via]
            dropped += len(held)
        return dropped, via

    def sources(self) -> set[str]:
        """The sources of the tags of all rows and held firings."""
        return {tag.source for _, tag in self._rows} | {key[1] for key in self._held}

    def release(self) -> tuple[list[Firing], list[int]]:
        """Take the failed calls out of the order of the stateful nodes.

        Returns the firings that waited only for these, and one edge id per message of the dropped firings of these calls.
        """
        firings: list[Firing] = []
        via: list[int] = []
        for key, held in list(self._held.items()):
            for step in [step for step in held if (key[1], step) in self._failed]:
                via += [edge for firing in held.pop(step) for edge in firing.via]
            firings += self._from_step(key, self._next_step.get(key, 0))
        return firings, via

    def waiting(self) -> list[tuple[str, Tag, list[str]]]:
        """(node, tag, ports still empty) of every row, to diagnose a stuck graph."""
        found = []
        for (node, tag), row in list(self._rows.items()):
            shape = self._shape(node, tag.layer)
            empty = sorted(shape.ports - row.inputs.keys())
            empty += [gather for gather, _ in shape.gathers if gather not in row.covers or row.covers[gather].complete() is None]
            found.append((node, tag, empty))
        return found

    def _expect(self, row: _MatchingRow, gather: str, value: Any) -> None:
        plan = self._plan_of(value)
        if isinstance(plan, int):
            row.covers[gather].expect_count(plan)
        else:
            row.covers[gather].expect(plan)

    def _complete(self, key: tuple[str, Tag], row: _MatchingRow, shape: _Shape) -> Firing | None:
        if len(row.inputs) < len(shape.ports):
            return None
        inputs = row.inputs
        for gather, _ in shape.gathers:
            values = row.covers[gather].complete()
            if values is None:
                return None
            inputs[gather] = values
        if self._rows.pop(key, None) is None:  # a rollback has deleted the row meanwhile
            return None
        node, tag = key
        return Firing(node, tag, inputs, tuple(row.via))

    def _in_turn(self, firing: Firing) -> tuple[Firing, ...]:
        """Release a stateful node's firings in step order per micro-batch: step s after step s-1. A new epoch starts at its first step."""
        tag = firing.tag
        key = (firing.node, tag.source, tag.epoch, tag.micro_batch)
        expected = self._next_step.get(key, tag.step if tag.epoch else 0)
        if tag.step > expected:
            self._held.setdefault(key, {}).setdefault(tag.step, []).append(firing)
            return tuple(self._from_step(key, expected)) if self._failed else ()
        if tag.step < expected:
            return (firing,)
        return (firing, *self._from_step(key, expected + 1))

    def _from_step(self, key: tuple[str, str, int, int], expected: int) -> list[Firing]:
        """Take the held firings of step `expected` and those that follow without a gap; failed calls leave none."""
        firings: list[Firing] = []
        held = self._held.get(key, {})
        expected = max(expected, self._forgotten.get(key[1], -1) + 1)
        while expected in held or (key[1], expected) in self._failed:
            firings += held.pop(expected, ())
            expected += 1
        self._next_step[key] = expected
        if not held:
            self._held.pop(key, None)
        return firings

    def _shape(self, node: str, layer: int) -> _Shape:
        known = self._shapes  # before the edges: `use` replaces it last
        shape = known.get((node, layer))
        if shape is None:
            fed = {edge.target_port for edge in self._edges_into[node] if arrives_at(edge, layer)}
            ports = self._nodes[node].inputs
            gathers = tuple((name, ports[name].count or "") for name in sorted(fed) if ports[name].takes == "gather")
            gathers += tuple(
                (name, port.count)
                for name, port in ports.items()
                if port.takes == "gather" and port.count in fed and name not in fed and port.count is not None
            )
            single = frozenset(name for name in fed if ports[name].takes == "one")
            shape = _Shape(single, gathers, alone=len(single) == 1 and not gathers)
            known[node, layer] = shape
        return shape


def arrives_at(edge: Edge, layer: int) -> bool:
    """Whether `edge` can carry a message to its target whose tag, stepped along the edge, has this layer."""
    if edge.tag.kind == "same":
        return layer in edge.layers
    if edge.tag.kind == "next_layer":
        return layer >= 1 and layer - 1 in edge.layers
    return layer == (edge.tag.layer if edge.tag.kind == "to_layer" else 0)
