"""Selection policies: which waiting firings of a node run next in one call, and when.

A policy is a pure object: waiting firings and the time in, a batch or the time to look again out. ReadyFirings calls it whenever the
compute seam is free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from flowrt.dataflow.matching import Firing
from flowrt.graph.model import Node
from flowrt.graph.settings import Batching, Emulation
from flowrt.transports.wire.message import Tag

ROUNDING_SECONDS = 1e-6  # a timer that is set to the end of a wait may end this much before it, because its sums round differently


class SelectionPolicy(Protocol):
    """`select` returns the firings of the next call, or the time (seconds of the runner's clock) at which to look again.

    `waiting` are the node's firings in order of arrival, at least one. `takes_one` is true for a policy that always selects the
    first alone, without a look at the time; its short firings may run on the event loop, as soon as their messages are accepted.
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
    (EaaS section 3.3). The wait counts from the moment at which the batch could have run. The batch that waits longest comes first."""

    takes_one = False

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._since: dict[Tag, float] = {}  # tag of a batch's first firing -> when the batch could have run

    def select(self, waiting: Sequence[Firing], now: float) -> Sequence[Firing] | float:
        batching = self._batching
        batches: dict[int, list[Firing]] = {}
        for firing in waiting:
            batches.setdefault(firing.tag.layer if batching.same_layer else 0, []).append(firing)
        if not batching.max_wait_seconds:
            return next(iter(batches.values()))
        since = self._since = {batch[0].tag: self._since.get(batch[0].tag, now) for batch in batches.values()}
        for batch in batches.values():
            if len(batch) >= batching.min_tags or now + ROUNDING_SECONDS >= since[batch[0].tag] + batching.max_wait_seconds:
                return batch
        return min(since.values()) + batching.max_wait_seconds


class DomainTurns:
    """Domains take turns: a call has tags of one domain (xDeepServe section 5.2). Each server keeps the turn by itself and waits for no
    other one. A domain without a batch is skipped; its turn also ends after `turn_calls` calls while another domain has one. So a batch
    waits for at most (domains - 1) x turn_calls calls of other domains. Within a domain: BoundedWait."""

    takes_one = False

    def __init__(self, batching: Batching) -> None:
        self._domain_of = {source: domain for domain, sources in enumerate(batching.domains) for source in sources}
        self._policies = [BoundedWait(batching) for _ in batching.domains]
        self._turn_calls = batching.turn_calls
        self._turn = self._calls = 0  # whose turn it is, and its calls so far

    def select(self, waiting: Sequence[Firing], now: float) -> Sequence[Firing] | float:
        domains: list[list[Firing]] = [[] for _ in self._policies]
        for firing in waiting:
            domains[self._domain_of[firing.tag.source.partition("@")[0]]].append(firing)
        first = self._turn + (self._calls >= self._turn_calls)
        wake_at = math.inf
        for domain in ((first + place) % len(domains) for place in range(len(domains))):
            if not domains[domain]:
                continue
            found = self._policies[domain].select(domains[domain], now)
            if not isinstance(found, float):
                self._calls = self._calls + 1 if domain == self._turn else 1
                self._turn = domain
                return found
            wake_at = min(wake_at, found)
        return wake_at


def by_layer(batch: Sequence[Firing]) -> list[list[Firing]]:
    """The firings of a batch, layer by layer. Each layer is a call of its own: its responses leave before the next one is computed."""
    layers: dict[int, list[Firing]] = {}
    for firing in batch:
        layers.setdefault(firing.tag.layer, []).append(firing)
    return [*layers.values()]


def policy_of(node: Node, emulation: Emulation | None = None) -> SelectionPolicy:
    """The policy of a node; emulated hardware waits for a dilated time."""
    if node.batches is None:
        return OldestFirst()
    dilation = emulation.dilation if emulation is not None else 1.0
    batching = node.batches.replace(max_wait_seconds=node.batches.max_wait_seconds * dilation)
    return DomainTurns(batching) if batching.domains else BoundedWait(batching)
