"""Arranges the records of a run as slices on streams, linked by flows. Pure; perfetto_file.py writes them.

Each incarnation of a worker has the streams receive, compute and send; the gateway has commit. Slices of a stream are nested or do not
overlap. A flow links the slices of one part: dispatch, its send, its receive at the expert server, the experts, and back to the combine.
A message without a part has a flow of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from flowrt.graph.model import Edge, Graph
from flowrt.trace.records import RecordKind, TraceRecord, WorkerTrace
from flowrt.transports.wire.message import Tag

STREAMS = {RecordKind.RECEIVE: "receive", RecordKind.CALL: "compute", RecordKind.SEND: "send", RecordKind.COMMIT: "commit"}


@dataclass(eq=False)
class Slice:
    """One record on a stream, in nanoseconds. `flows` pass through it; `ended_flows` end in it. A commit is an instant."""

    record: TraceRecord
    start: int
    end: int
    children: list[Slice] = field(default_factory=list)
    flows: list[int] = field(default_factory=list)
    ended_flows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerTimeline:
    """The streams of one incarnation of a worker, by name, each in order of time."""

    trace: WorkerTrace
    streams: Mapping[str, list[Slice]]

    def slices(self) -> Iterator[Slice]:
        for slices in self.streams.values():
            for each in slices:
                yield each
                yield from each.children


def timelines_of(traces: Sequence[WorkerTrace], graph: Graph) -> list[WorkerTimeline]:
    timelines = [_timeline(trace) for trace in traces]
    _link(timelines, graph)
    return timelines


def _timeline(trace: WorkerTrace) -> WorkerTimeline:
    streams: dict[str, list[Slice]] = {}
    nodes: list[TraceRecord] = []  # of the next call
    for record in trace.records:
        if record.kind == RecordKind.NODE:
            nodes.append(record)
            continue
        stream = streams.setdefault(STREAMS[record.kind], [])
        placed = _after(stream, record, stream[-1].end if stream else 0)
        stream.append(placed)
        if record.kind == RecordKind.CALL:
            for node in nodes:
                placed.children.append(_after(placed.children, node, placed.start, placed.end))
            nodes.clear()
    for node in nodes:  # of a call that has not ended
        stream = streams.setdefault("compute", [])
        stream.append(_after(stream, node, stream[-1].end if stream else 0))
    return WorkerTimeline(trace, {name: streams[name] for name in STREAMS.values() if name in streams})


def _after(before: list[Slice], record: TraceRecord, earliest: int, latest: int | None = None) -> Slice:
    """The slice of a record that begins at `earliest` or later, after those `before` it, and ends at `latest` or earlier."""
    if before:
        earliest = max(earliest, before[-1].end)
    start, end = max(earliest, round(record.start_seconds * 1e9)), round(record.end_seconds * 1e9)
    if latest is not None:
        start, end = min(start, latest), min(end, latest)
    return Slice(record, start, max(start, end))


def _link(timelines: Sequence[WorkerTimeline], graph: Graph) -> None:
    """Give each flow to its slices, in order of time. A flow with one slice alone is left out: the other records are missing."""
    nodes: dict[tuple[str, Tag], list[Slice]] = defaultdict(list)
    messages: list[tuple[Edge, Slice]] = []
    for timeline in timelines:
        for each in timeline.slices():
            if each.record.kind == RecordKind.NODE:
                for tag in each.record.tags:
                    nodes[each.record.name, tag].append(each)
            elif each.record.kind in (RecordKind.SEND, RecordKind.RECEIVE) and (edge := graph.edges.get(each.record.name)) is not None:
                messages.append((edge, each))
    flows: dict[int, dict[Slice, None]] = defaultdict(dict)
    num_before = Counter[tuple[bool, str, Tag]]()
    for edge, each in messages:
        is_sent = each.record.kind == RecordKind.SEND
        end, tag = edge.source if is_sent else edge.target, each.record.tags[0]
        linked = [each]
        if firings := nodes.get((end, tag)):  # several, when a server got two parts of a tag: they fire in order
            node = firings[min(num_before[is_sent, end, tag], len(firings) - 1)]
            if is_sent and node.start <= each.start:
                linked = [node, each]
            elif not is_sent and node.start >= each.start:  # else: a part that came after another cover was complete
                linked = [each, node]
        num_before[is_sent, end, tag] += 1
        flows[flow_id(each.record)].update(dict.fromkeys(linked))
    for flow, found in flows.items():
        *before, last = sorted(found, key=lambda each: (each.start, each.end))
        for each in before:
            each.flows.append(flow)
        if before:
            last.ended_flows.append(flow)


def flow_id(message: TraceRecord) -> int:
    """The same for all messages of one part, in every process."""
    key = message.tags[0], message.part if message.part is not None else message.name
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest()) or 1
