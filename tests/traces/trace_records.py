"""Hand-made records of a trace."""

from __future__ import annotations

from typing import Any

from flowrt.trace.records import RecordKind, TraceRecord, WorkerTrace
from flowrt.transports.wire.message import Tag

TAG = Tag("attention.0.source@1")


def call(start: float, end: float, *nodes: tuple[str, float], tags: tuple[Tag, ...] = (TAG,)) -> list[TraceRecord]:
    """A call of the compute seam, behind its nodes (name, seconds), which follow each other from its start."""
    records, since = [], start
    for name, seconds in nodes:
        records.append(TraceRecord(RecordKind.NODE, since, since + seconds, name, tags, None, 3))
        since += seconds
    return [*records, TraceRecord(RecordKind.CALL, start, end, nodes[0][0])]


def message(kind: RecordKind, start: float, edge: str, part: int | None = None, tag: Tag = TAG) -> TraceRecord:
    return TraceRecord(kind, start, start, edge, (tag,), part, 3, 48)


def commit(at: float, index: int) -> TraceRecord:
    return TraceRecord(RecordKind.COMMIT, at, at, "request 0", (), index)


def worker(name: str, *records: TraceRecord, incarnation: str = "1", **missing: Any) -> WorkerTrace:
    return WorkerTrace(name, incarnation, records, **missing)
