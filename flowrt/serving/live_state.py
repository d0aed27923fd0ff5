"""The state of a served graph as its live page shows it: processes, edges between them, experts, requests. Pure.

Counters only rise; the page computes rates from two states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from flowrt.actors.control import Statistics
from flowrt.gateway.request_metrics import RequestTimes
from flowrt.graph.model import Graph, role_of
from flowrt.histogram import Histogram
from flowrt.launcher.totals import add_experts
from flowrt.serving.exposition import ServedState
from flowrt.serving.graph_status import ProcessState

MAX_OPEN = 100  # requests in progress that are shown


class LiveProcess(msgspec.Struct, frozen=True):
    """`state`: as flowrt ps shows it. `busy_seconds`: time that it computed. `num_pages` 0: not an attention group. `host`: "" where
    there is one host."""

    name: str
    role: str
    is_up: bool
    state: ProcessState
    busy_seconds: float
    resident_bytes: int
    num_restarts: int
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    host: str


class LiveEdge(msgspec.Struct, frozen=True):
    """All edges from one process to another."""

    source: str
    target: str
    transport: str
    num_messages: int
    num_bytes: int


class LiveExperts(msgspec.Struct, frozen=True):
    """`num_pairs`: the (row, expert) pairs that each expert of a layer has computed, by expert."""

    layer: int
    num_pairs: tuple[int, ...]


class LiveRequest(msgspec.Struct, frozen=True):
    """Times are of the same clock as the state's. None: not yet."""

    number: int
    arrived: float
    placed: float | None
    first_token: float | None
    ended: float | None
    reason: str | None
    num_prompt_tokens: int
    num_tokens: int
    num_moved: int


class LiveTimes(msgspec.Struct, frozen=True):
    """How many durations there were, and their sum."""

    count: int
    seconds: float


class LiveState(msgspec.Struct, frozen=True):
    """`seconds`: when it was read. `first_tokens`: from admissions to first tokens. `later_tokens`: between two tokens of a choice.
    `problems`: why the graph is not healthy."""

    seconds: float
    model: str
    is_healthy: bool
    problems: tuple[str, ...]
    num_active: int
    num_waiting: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_ended: Mapping[str, int]
    num_refused: int
    first_tokens: LiveTimes
    later_tokens: LiveTimes
    processes: tuple[LiveProcess, ...]
    edges: tuple[LiveEdge, ...]
    experts: tuple[LiveExperts, ...]
    requests: tuple[LiveRequest, ...]


def live_state(graph: Graph, state: ServedState, problems: tuple[str, ...], now: float) -> LiveState:
    metrics = state.metrics
    requests = (*metrics.ended_requests, *islice(metrics.open_requests(), MAX_OPEN))
    return LiveState(
        seconds=now,
        model=state.model_name,
        is_healthy=state.is_healthy,
        problems=problems,
        num_active=state.num_active,
        num_waiting=state.num_waiting,
        num_prompt_tokens=metrics.num_prompt_tokens,
        num_generation_tokens=metrics.num_generation_tokens,
        num_ended={str(reason): number for reason, number in metrics.ended.items()},
        num_refused=metrics.refused.total(),
        first_tokens=_times(metrics.first_token_seconds),
        later_tokens=_times(metrics.token_seconds),
        processes=tuple(_process(name, each, state) for name, each in state.workers.items()),
        edges=tuple(_edges(graph, state.workers)),
        experts=tuple(_experts(state.workers)),
        requests=tuple(_request(each) for each in requests),
    )


def _times(histogram: Histogram) -> LiveTimes:
    return LiveTimes(histogram.count, histogram.total)


def _process(name: str, found: Statistics, state: ServedState) -> LiveProcess:
    is_up = name not in state.down
    shown: ProcessState = state.states.get(name, "up" if is_up else "down")
    counts = found.resident_bytes, found.num_restarts, found.num_running, found.num_waiting, found.num_pages, found.num_free_pages
    return LiveProcess(name, role_of(name), is_up, shown, found.compute_seconds, *counts, state.hosts.get(name, ""))


def _edges(graph: Graph, workers: Mapping[str, Statistics]) -> Iterator[LiveEdge]:
    ends = {edge.name: graph.ends_of(edge) for edge in graph.edges.values()}
    found: dict[tuple[str, str], LiveEdge] = {}
    for statistics in workers.values():
        for edge in statistics.edges:
            if edge.edge not in ends:  # of a process that has not reported since the graph changed
                continue
            source, target = ends[edge.edge]
            before = found.get((source, target), LiveEdge(source, target, edge.transport, 0, 0))
            counts = before.num_messages + edge.num_messages, before.num_bytes + edge.payload_bytes
            found[source, target] = LiveEdge(source, target, edge.transport, *counts)
    return iter(found.values())


def _experts(workers: Mapping[str, Statistics]) -> Iterator[LiveExperts]:
    for layer, pairs in add_experts(each for statistics in workers.values() for each in statistics.experts).items():
        yield LiveExperts(layer, tuple(pairs.get(expert, 0) for expert in range(max(pairs) + 1)))


def _request(times: RequestTimes) -> LiveRequest:
    moments = times.arrived, times.placed, times.first_token, times.ended
    return LiveRequest(times.number, *moments, times.reason, times.num_prompt_tokens, times.num_tokens, times.num_moved)
