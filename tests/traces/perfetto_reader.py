"""Reads a Perfetto trace back with the protobuf classes of the perfetto package: slices by track, and the flows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent


@dataclass
class ReadSlice:
    """A slice or an instant (`end` None), in nanoseconds. `depth`: how many slices it is nested in."""

    name: str
    category: str
    start: int
    depth: int
    values: dict[str, int | str]
    flows: list[int]
    ended_flows: list[int]
    end: int | None = None


@dataclass
class ReadTrace:
    """`tracks`: (process name, stream) -> slices in order of their starts. `labels`: by process name."""

    tracks: dict[tuple[str, str], list[ReadSlice]] = field(default_factory=dict)
    labels: dict[str, list[str]] = field(default_factory=dict)

    def slices(self) -> list[ReadSlice]:
        return [each for slices in self.tracks.values() for each in slices]


def read_trace(content: bytes) -> ReadTrace:
    """Raises AssertionError for slices that overlap, for times that go back, and for an event on an unknown track."""
    trace = Trace()
    trace.ParseFromString(content)
    found = ReadTrace()
    processes: dict[int, str] = {}
    tracks: dict[int, list[ReadSlice]] = {}
    open_slices: dict[int, list[ReadSlice]] = {}
    latest = 0
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            assert described.uuid not in (*processes, *tracks)
            if described.HasField("process"):
                assert described.process.pid > 0
                processes[described.uuid] = described.process.process_name
                found.labels[described.process.process_name] = list(described.process.process_labels)
            else:
                key = processes[described.parent_uuid], described.name
                assert key not in found.tracks
                tracks[described.uuid] = found.tracks[key] = []
            continue
        event: Any = packet.track_event
        assert packet.timestamp >= latest
        latest = packet.timestamp
        stack = open_slices.setdefault(event.track_uuid, [])
        if event.type == TrackEvent.TYPE_SLICE_END:
            stack.pop().end = packet.timestamp
            continue
        values = {each.name: each.string_value if each.HasField("string_value") else each.int_value for each in event.debug_annotations}
        (category,) = event.categories
        each = ReadSlice(event.name, category, packet.timestamp, len(stack), values, list(event.flow_ids), list(event.terminating_flow_ids))
        tracks[event.track_uuid].append(each)
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            stack.append(each)
        else:
            assert event.type == TrackEvent.TYPE_INSTANT
    assert not any(open_slices.values()), "a slice has no end"
    return found


def check_flows(trace: ReadTrace) -> dict[int, list[ReadSlice]]:
    """Each flow begins in one slice, passes through others, and ends in one that begins no earlier. Returns its slices in that order."""
    passing: dict[int, list[ReadSlice]] = {}
    ends: dict[int, ReadSlice] = {}
    for each in trace.slices():
        for flow in each.flows:
            passing.setdefault(flow, []).append(each)
        for flow in each.ended_flows:
            assert flow not in ends, "a flow ends twice"
            ends[flow] = each
    assert passing.keys() == ends.keys(), "a flow has a begin without an end, or the reverse"
    flows = {}
    for flow, end in ends.items():
        flows[flow] = [*sorted(passing[flow], key=lambda each: each.start), end]
        assert flows[flow][-2].start <= end.start
    return flows
