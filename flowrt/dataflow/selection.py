"""Selection policies: which waiting firings of a node run next in one call, and when (DESIGN section 1).

A policy is a pure object: waiting firings and the time in, a batch or the time to look again out. ReadyFirings calls it whenever the
compute seam is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from flowrt.dataflow.matching import Firing
from flowrt.graph.model import Batching, Emulation, Node
from flowrt.transports.wire.message import Tag

ROUNDING_SECONDS = 1e-6  # a timer that is set to the end of a wait may end this much before it, because its sums round differently
IsAlone = Callable[[Firing], bool]


class SelectionPolicy(Protocol):
    """`select` returns the firings of the next call, or the time (seconds of the runner's clock) at which to look again.

    `waiting` are the node's firings in order of arrival, at least one. `takes_one` is true for a policy that always selects the
    first alone, without a look at the time: such firings may run on the event loop.
    """

    takes_one: bool

    def select(self, waiting: Sequence[Firing], now: float) -> Sequence[Firing] | float: ...


class OldestFirst:
    """One tag per call, in order of arrival."""

    takes_one = True

    def select(self, waiting: Sequence[Firing], now: float) -> Sequence[Firing]:
        return waiting[:1]


class BoundedWait:
    """Several tags per call. A batch is complete at `min_tags`, and waits at most `max_wait_seconds` for that
    (EaaS section 3.3). The wait counts from the moment at which the batch could have run. The batch that waits longest comes first.
    A firing that `is_alone` is a batch of its own, before all others."""

    takes_one = False

    def __init__(self, batching: Batching, is_alone: IsAlone = lambda firing: False) -> None:
        self._batching, self._is_alone = batching, is_alone
        self._since: dict[Tag, float] = {}  # tag of a batch's first firing -> when the batch could have run

    def select(self, waiting: Sequence[Firing], now: float) -> Sequence[Firing] | float:
        batching = self._batching
        batches: dict[int, list[Firing]] = {}
        for firing in waiting:
            if self._is_alone(firing):
                return [firing]
            batches.setdefault(firing.tag.layer if batching.same_layer else 0, []).append(firing)
        if not batching.max_wait_seconds:
            return next(iter(batches.values()))
        since = self._since = {batch[0].tag: self._since.get(batch[0].tag, now) for batch in batches.values()}
        for batch in batches.values():
            if len(batch) >= batching.min_tags or now + ROUNDING_SECONDS >= since[batch[0].tag] + batching.max_wait_seconds:
                return batch
        return min(since.values()) + batching.max_wait_seconds


def policy_of(node: Node, emulation: Emulation | None = None, is_alone: IsAlone = lambda firing: False) -> SelectionPolicy:
    """The policy of a node; emulated hardware waits for a dilated time."""
    if node.batches is None:
        return OldestFirst()
    dilation = emulation.dilation if emulation is not None else 1.0
    return BoundedWait(replace(node.batches, max_wait_seconds=node.batches.max_wait_seconds * dilation), is_alone)
