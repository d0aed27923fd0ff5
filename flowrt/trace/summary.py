"""Summary of a trace: busy, waiting and exposed-communication shares per role, the times of dispatch and combine by group, the slowest node
and the slowest edge. Pure.

The compute stream of a worker is in one of three states:
- busy: in a call of the compute seam.
- exposed communication: not busy while a message for this worker is on its way, from the start of its send to the start of its receive.
- waiting: neither. Other processes compute what it needs, or there is nothing to do.

A message is needed when the worker has received it; one without both of its records does not count. All workers are measured over the
whole trace, from the first record to the last; but an incarnation before a restart until its own last record, and one after a restart
from its own first record.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowrt.graph.model import role_of
from flowrt.observe import duration_text
from flowrt.trace.records import RecordKind, TraceRecord, WorkerTrace
from flowrt.transports.wire.message import Tag

Interval = tuple[float, float]
MessageKey = tuple[str, Tag, int | None]


@dataclass(frozen=True)
class RoleShares:
    """Seconds of the compute streams of all workers of one role, added up."""

    role: str
    num_workers: int = 0  # incarnations
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0
    waiting_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        return self.busy_seconds + self.exposed_seconds + self.waiting_seconds

    @property
    def busy(self) -> float:
        return self._share(self.busy_seconds)

    @property
    def exposed(self) -> float:
        return self._share(self.exposed_seconds)

    @property
    def waiting(self) -> float:
        return self._share(self.waiting_seconds)

    def _share(self, seconds: float) -> float:
        return seconds / self.total_seconds if self.total_seconds else 0.0


@dataclass(frozen=True)
class TotalTime:
    """The time of all calls of a node, or of all messages of an edge on their way."""

    name: str
    num: int
    seconds: float

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.num


@dataclass(frozen=True)
class ExchangeTimes:
    """The time of a dispatch or combine: of the messages of one layer and step of a group, from the first send to the last receive.

    `by_group`: the mean over layers and steps, in seconds. The largest over the smallest is the variance over ranks of xDeepServe, Fig. 20.
    """

    name: str
    by_group: Mapping[str, float]

    @property
    def fastest(self) -> float:
        return min(self.by_group.values())

    @property
    def slowest(self) -> float:
        return max(self.by_group.values())


@dataclass(frozen=True)
class DispatchLoad:
    """What the groups sent to expert servers and trampolines, over all layers and steps. `num_fullest`: rows of the fullest server of each
    layer of a step. `num_mean`: those that each server would have if all had as many."""

    num_layers: int
    num_messages: int
    num_rows: int
    num_fullest: int
    num_mean: float

    @property
    def fullest_to_mean(self) -> float:
        return self.num_fullest / self.num_mean


@dataclass(frozen=True)
class TraceSummary:
    """`nodes` (their calls) and `edges` (their messages): the slowest in total first. `span_seconds`: from the first record to the last."""

    span_seconds: float
    roles: tuple[RoleShares, ...]
    exchange: tuple[ExchangeTimes, ...]  # of the groups of a model
    load: DispatchLoad | None  # None: no rows went to servers
    nodes: tuple[TotalTime, ...]
    edges: tuple[TotalTime, ...]
    num_records: int
    num_dropped: int
    incomplete: tuple[str, ...]  # workers whose last records are missing
    clock_errors: Mapping[str, float]  # bounds of the errors of times, in seconds, by host; without the launcher's own clock


def summarize(traces: Sequence[WorkerTrace]) -> TraceSummary:
    """Summarize the traces of all workers of a run. The incarnations of a worker come in the order of their starts."""
    traced = [trace for trace in traces if any(record.kind != RecordKind.COMMIT for record in trace.records)]
    flights = _flights(record for trace in traced for record in trace.records)
    whole = _span(record for trace in traced for record in trace.records)
    roles: dict[str, RoleShares] = {}
    nodes: dict[str, list[float]] = defaultdict(list)
    for trace in traced:
        incarnations = [other for other in traced if other.worker == trace.worker]
        own = _span(trace.records)
        span = whole[0] if trace is incarnations[0] else own[0], whole[1] if trace is incarnations[-1] else own[1]
        shares = _shares(role_of(trace.worker), trace.records, flights, span)
        roles[shares.role] = _added(roles.get(shares.role), shares)
        for name, seconds in node_seconds(trace.records):
            nodes[name].append(seconds)
    edges: dict[str, list[float]] = defaultdict(list)
    for (edge, _, _), (start, end) in flights.items():
        edges[edge].append(end - start)
    return TraceSummary(
        whole[1] - whole[0],
        tuple(roles.values()),
        _exchange_times(flights),
        _dispatch_load(record for trace in traced for record in trace.records),
        _slowest_first(nodes),
        _slowest_first(edges),
        sum(len(trace.records) for trace in traces),
        sum(trace.num_dropped for trace in traces),
        tuple(trace.worker for trace in traces if not trace.is_complete),
        _clock_errors(traces),
    )


def clock_text(error_seconds: float) -> str:
    """How exactly times of a host are known."""
    if not error_seconds:
        return "the clock of the launcher"
    if error_seconds == math.inf:
        return "times are not aligned: nothing is known of its clock"
    return f"times are aligned, to within {duration_text(error_seconds)}"


def summary_lines(summary: TraceSummary) -> list[str]:
    """The summary as text."""
    lines = [f"trace: {summary.num_records} records of {duration_text(summary.span_seconds)}"]
    width = max([len("role"), *(len(role.role) for role in summary.roles)])
    lines.append(f"  {'role':{width}}  workers    busy  exposed communication  waiting")
    for role in summary.roles:
        lines.append(f"  {role.role:{width}}  {role.num_workers:7}  {role.busy:6.1%}  {role.exposed:21.1%}  {role.waiting:7.1%}")
    for half in summary.exchange:
        line = f"{half.name}: {duration_text(sum(half.by_group.values()) / len(half.by_group))} per layer"
        if half.fastest < half.slowest:
            line += f", by group {duration_text(half.fastest)} to {duration_text(half.slowest)}"
        if half.fastest > 0:
            line += f" (max/min {half.slowest / half.fastest:.2f})"
        lines.append(line)
    if (load := summary.load) is not None:
        means = f"{load.num_rows / load.num_layers:.1f} in {load.num_messages / load.num_layers:.1f} messages per layer"
        lines.append(f"rows to expert servers: {means}; the fullest server has {load.fullest_to_mean:.2f} of the mean")
    for what, units, times in (("node", "calls", summary.nodes), ("edge", "messages on their way", summary.edges)):
        if times:
            slowest = times[0]
            mean = duration_text(slowest.mean_seconds)
            lines.append(f"slowest {what}: {slowest.name}, {duration_text(slowest.seconds)} in {slowest.num} {units}, {mean} each")
    for host, seconds in summary.clock_errors.items():
        lines.append(f"{host}: {clock_text(seconds)}")
    if summary.num_dropped:
        lines.append(f"{summary.num_dropped} older records were dropped: the trace holds the end of the run")
    if summary.incomplete:
        lines.append(f"the last records of {', '.join(summary.incomplete)} are missing: the process was killed")
    return lines


def key_of(record: TraceRecord) -> MessageKey:
    """What the SEND and the RECEIVE of one message have in common."""
    return record.name, record.tags[0], record.part


def node_seconds(records: Iterable[TraceRecord]) -> Iterator[tuple[str, float]]:
    """(node, seconds) for each call of a node. The rest of a call of the compute seam belongs to the node that it starts with."""
    within: list[TraceRecord] = []
    for record in records:
        if record.kind == RecordKind.NODE:
            within.append(record)
        elif record.kind == RecordKind.CALL:
            rest = record.end_seconds - record.start_seconds - sum(each.end_seconds - each.start_seconds for each in within)
            for number, each in enumerate(within):
                yield each.name, each.end_seconds - each.start_seconds + (max(0.0, rest) if number == 0 else 0.0)
            if not within:
                yield record.name, rest
            within.clear()


def _shares(role: str, records: Iterable[TraceRecord], flights: dict[MessageKey, Interval], span: Interval) -> RoleShares:
    calls: list[Interval] = []
    on_their_way: list[Interval] = []
    for record in records:
        if record.kind == RecordKind.CALL:
            calls.append((record.start_seconds, record.end_seconds))
        elif record.kind == RecordKind.RECEIVE and (flight := flights.get(key_of(record))) is not None:
            on_their_way.append(flight)
    calls, both = _union(calls, span), _union([*calls, *on_their_way], span)
    busy, busy_or_exposed = _length(calls), _length(both)
    return RoleShares(role, 1, busy, busy_or_exposed - busy, span[1] - span[0] - busy_or_exposed)


def _flights(records: Iterable[TraceRecord]) -> dict[MessageKey, Interval]:
    """The time of each message on its way."""
    sent: dict[MessageKey, float] = {}
    received: dict[MessageKey, float] = {}
    for record in records:
        if record.kind == RecordKind.SEND:
            sent[key_of(record)] = record.start_seconds
        elif record.kind == RecordKind.RECEIVE:
            received[key_of(record)] = record.start_seconds
    return {key: (sent[key], max(end, sent[key])) for key, end in received.items() if key in sent}


def _clock_errors(traces: Sequence[WorkerTrace]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for trace in traces:
        if trace.clock_error_seconds:
            errors[trace.host] = max(errors.get(trace.host, 0.0), trace.clock_error_seconds)
    return dict(sorted(errors.items()))


def _exchange_times(flights: Mapping[MessageKey, Interval]) -> tuple[ExchangeTimes, ...]:
    """Of dispatch and combine: edges from a node `dispatch`, and edges to a node `combine`."""
    spans: dict[str, dict[tuple[str, Tag], Interval]] = {"dispatch": {}, "combine": {}}
    for (edge, tag, _), (start, end) in flights.items():
        source, _, target = (each.rpartition(".")[0].rpartition(".") for each in edge.partition(" -> "))
        if source[2] == "dispatch":
            key, found = (source[0], tag), spans["dispatch"]
        elif target[2] == "combine":
            key, found = (target[0], tag), spans["combine"]
        else:
            continue
        first, last = found.get(key, (start, end))
        found[key] = min(first, start), max(last, end)
    return tuple(ExchangeTimes(name, _means(found)) for name, found in spans.items() if found)


def _dispatch_load(records: Iterable[TraceRecord]) -> DispatchLoad | None:
    rows: dict[tuple[str, Tag], dict[str, int]] = defaultdict(lambda: defaultdict(int))  # by dispatch node and tag: rows by port
    ports: dict[str, set[str]] = defaultdict(set)
    num_messages = 0
    for record in records:
        node, _, port = record.name.partition(" -> ")[0].rpartition(".")
        if record.kind == RecordKind.SEND and node.rpartition(".")[2] == "dispatch" and port.startswith("server"):
            rows[node, record.tags[0]][port] += record.num_rows
            ports[node].add(port)
            num_messages += 1
    if not rows:
        return None
    num_rows = {key: sum(by_port.values()) for key, by_port in rows.items()}
    num_mean = sum(num / len(ports[node]) for (node, _), num in num_rows.items())
    return DispatchLoad(len(rows), num_messages, sum(num_rows.values()), sum(max(each.values()) for each in rows.values()), num_mean)


def _means(spans: Mapping[tuple[str, Tag], Interval]) -> dict[str, float]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for (group, _), (first, last) in spans.items():
        seconds[group].append(last - first)
    return {group: sum(each) / len(each) for group, each in seconds.items()}


def _span(records: Iterable[TraceRecord]) -> Interval:
    starts_and_ends = [(each.start_seconds, each.end_seconds) for each in records if each.kind != RecordKind.COMMIT]
    return min((start for start, _ in starts_and_ends), default=0.0), max((end for _, end in starts_and_ends), default=0.0)


def _union(intervals: Iterable[Interval], span: Interval) -> list[Interval]:
    """The union of the intervals within `span`, as intervals that do not overlap."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, span[0]), min(end, span[1])
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        elif start < end:
            union.append((start, end))
    return union


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _added(one: RoleShares | None, other: RoleShares) -> RoleShares:
    if one is None:
        return other
    return RoleShares(
        one.role,
        one.num_workers + other.num_workers,
        one.busy_seconds + other.busy_seconds,
        one.exposed_seconds + other.exposed_seconds,
        one.waiting_seconds + other.waiting_seconds,
    )


def _slowest_first(seconds: dict[str, list[float]]) -> tuple[TotalTime, ...]:
    times = [TotalTime(name, len(each), sum(each)) for name, each in seconds.items()]
    return tuple(sorted(times, key=lambda time: (-time.seconds, time.name)))
