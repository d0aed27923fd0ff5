"""Writes the records of a run as a Perfetto trace, with the `perfetto` package.

The package is optional (extra `trace`) and loads when a trace is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from importlib.util import find_spec
from typing import Any

from flowrt.errors import UserError, install_command
from flowrt.graph.model import Graph
from flowrt.system.output_file import STDOUT, check_writable, write_bytes
from flowrt.trace.records import RecordKind, TraceRecord, WorkerTrace
from flowrt.trace.summary import clock_text
from flowrt.trace.timeline import STREAMS, Slice, WorkerTimeline, timelines_of

_SEQUENCE = 1  # all packets belong to one sequence of writes


def check_trace_file(name: str, option: str = "--trace") -> None:
    """Raises UserError now rather than after the run, when no trace could be written to this file."""
    if find_spec("perfetto") is None or find_spec("perfetto.trace_builder") is None:
        raise UserError(f"{option} needs the package perfetto: {install_command('trace')}")
    if name == STDOUT:
        raise UserError(f"{option} {name}: a trace is binary; give the path of a file")
    check_writable(name, option)


def write_trace(name: str, traces: Sequence[WorkerTrace], graph: Graph) -> None:
    """Raises LostOutputError."""
    write_bytes(name, perfetto_bytes(timelines_of(traces, graph)), "--trace")


def perfetto_bytes(timelines: Sequence[WorkerTimeline]) -> bytes:
    """The content of a trace file: a process per incarnation of a worker, with a track per stream."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackDescriptor, TrackEvent
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    events: list[Iterable[tuple[int, int, int, Slice]]] = []
    for number, timeline in enumerate(timelines, 1):
        process = builder.add_packet()
        process.trusted_packet_sequence_id = _SEQUENCE
        described = process.track_descriptor
        described.uuid = number * len(STREAMS) * 2
        described.process.pid = number  # workers may share a process; a track per worker needs a number of its own
        described.process.process_name = f"{timeline.trace.worker} {timeline.trace.incarnation}"
        described.process.process_labels.extend(labels_of(timeline.trace))
        described.child_ordering = TrackDescriptor.EXPLICIT
        for rank, stream in enumerate(STREAMS.values(), 1):
            if stream in timeline.streams:
                packet = builder.add_packet()
                packet.trusted_packet_sequence_id = _SEQUENCE
                track = packet.track_descriptor
                track.uuid, track.parent_uuid, track.name, track.sibling_order_rank = described.uuid + rank, described.uuid, stream, rank
                events.append(_events(timeline.streams[stream], track.uuid))
    types = {_BEGIN: TrackEvent.TYPE_SLICE_BEGIN, _END: TrackEvent.TYPE_SLICE_END, _INSTANT: TrackEvent.TYPE_INSTANT}
    for time, kind, track_uuid, each in merge(*events, key=lambda event: event[0]):
        packet = builder.add_packet()
        packet.timestamp, packet.trusted_packet_sequence_id = time, _SEQUENCE
        event = packet.track_event
        event.type, event.track_uuid = types[kind], track_uuid
        if kind != _END:
            event.name = each.record.name
            event.categories.append(each.record.kind.name.lower())
            event.flow_ids.extend(each.flows)
            event.terminating_flow_ids.extend(each.ended_flows)
            _annotate(event, each.record)
    content: bytes = builder.serialize()
    return content


def labels_of(trace: WorkerTrace) -> list[str]:
    """The host of a worker, how exactly its times are known, and what is missing of its trace."""
    labels = [f"{trace.host}, {clock_text(trace.clock_error_seconds)}"] if trace.host else []
    labels += [f"{trace.num_dropped} older records were dropped"] if trace.num_dropped else []
    return labels if trace.is_complete else [*labels, "the last records are missing"]


_BEGIN, _END, _INSTANT = range(3)


def _events(slices: Iterable[Slice], track: int) -> Iterator[tuple[int, int, int, Slice]]:
    """(time, kind, track, slice) of the slices of a stream, in order of time; at one moment, in the order of their nesting."""
    for each in slices:
        if each.record.kind == RecordKind.COMMIT:
            yield each.start, _INSTANT, track, each
            continue
        yield each.start, _BEGIN, track, each
        yield from _events(each.children, track)
        yield each.end, _END, track, each


def _annotate(event: Any, record: TraceRecord) -> None:
    values: dict[str, int | str] = {}
    if len(record.tags) == 1:
        (tag,) = record.tags
        values = {"source": tag.source, "epoch": tag.epoch, "micro_batch": tag.micro_batch, "step": tag.step, "layer": tag.layer}
    elif record.tags:
        values["tags"] = "; ".join(f"{tag.source} {tag.epoch} {tag.micro_batch} {tag.step} {tag.layer}" for tag in record.tags)
    if record.part is not None:
        values["index" if record.kind == RecordKind.COMMIT else "part"] = record.part
    if record.num_rows:
        values["rows"] = record.num_rows
    if record.num_bytes:
        values["bytes"] = record.num_bytes
    for name, value in values.items():
        annotation = event.debug_annotations.add()
        annotation.name = name
        if isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.string_value = value
