"""Trace files, read back with the protobuf classes of the perfetto package."""

from __future__ import annotations

from pathlib import Path

import pytest
from traces.perfetto_reader import check_flows, read_trace
from traces.trace_records import TAG, call, commit, message, worker

from flowrt.errors import UserError
from flowrt.graph.model import Edge, Graph, Node, PortSpec
from flowrt.trace import perfetto_file
from flowrt.trace.perfetto_file import check_trace_file, perfetto_bytes
from flowrt.trace.records import RecordKind, WorkerTrace
from flowrt.trace.timeline import timelines_of
from flowrt.transports.wire.message import Tag

SEND, RECEIVE = RecordKind.SEND, RecordKind.RECEIVE


def _node(name: str, process: str, *ports: str) -> Node:
    return Node(name, name, process, {port: PortSpec(port) for port in ports}, {"out": PortSpec("out")})


GRAPH = Graph.of(
    [_node("dispatch", "attention.0", "x"), _node("experts", "experts.0", "rows"), _node("combine", "attention.0", "parts")],
    [
        Edge("dispatch", "out", "experts", "rows", name="there"),
        Edge("experts", "out", "combine", "parts", name="back", response_to="there"),
    ],
)


def _read(*traces: WorkerTrace):  # type: ignore[no-untyped-def]
    return read_trace(perfetto_bytes(timelines_of(traces, GRAPH)))


ATTENTION = worker(
    "attention.0",
    *call(0.0, 3.0, ("attention", 1.0), ("dispatch", 1.0)),
    message(SEND, 1.5, "there", part=4),
    message(RECEIVE, 7.0, "back", part=4),
    *call(7.0, 8.0, ("combine", 1.0)),
)
EXPERTS = worker("experts.0", message(RECEIVE, 4.0, "there", part=4), *call(4.0, 6.0, ("experts", 2.0)), message(SEND, 6.0, "back", part=4))


def test_tracks_slices_and_the_flow_of_a_part() -> None:
    trace = _read(ATTENTION, EXPERTS, worker("gateway", commit(8.5, 0)))
    assert list(trace.tracks) == [
        *(("attention.0 1", stream) for stream in ("receive", "compute", "send")),
        *(("experts.0 1", stream) for stream in ("receive", "compute", "send")),
        ("gateway 1", "commit"),
    ]
    compute = trace.tracks["attention.0 1", "compute"]
    assert [(each.name, each.category, each.depth) for each in compute] == [
        ("attention", "call", 0),
        ("attention", "node", 1),
        ("dispatch", "node", 1),
        ("combine", "call", 0),
        ("combine", "node", 1),
    ]
    assert (compute[2].start, compute[2].end) == (1_000_000_000, 2_000_000_000)
    tag = {"source": TAG.source, "epoch": 0, "micro_batch": 0, "step": 0, "layer": 0}
    assert compute[2].values == {**tag, "rows": 3}
    assert trace.tracks["attention.0 1", "send"][0].values == {**tag, "part": 4, "rows": 3, "bytes": 48}
    assert trace.tracks["gateway 1", "commit"][0].values == {"index": 0}
    (flow,) = check_flows(trace).values()
    assert [each.name for each in flow] == ["dispatch", "there", "there", "experts", "back", "back", "combine"]


def test_parts_of_one_tag_have_flows_of_their_own_and_a_batch_takes_part_in_several() -> None:
    tags = TAG, Tag("attention.1.source@1")
    sends = [message(SEND, 0.0, "there", part=0, tag=tag) for tag in tags] + [message(SEND, 0.0, "there", part=1, tag=TAG)]
    receives = [message(RECEIVE, 1.0, "there", part=0, tag=tag) for tag in tags]
    trace = _read(worker("attention.0", *sends), worker("experts.0", *receives, *call(2.0, 3.0, ("experts", 1.0), tags=tags)))
    flows = check_flows(trace)
    assert len(flows) == 2, "the third part was not received"
    batch = trace.tracks["experts.0 1", "compute"][1]
    assert batch.ended_flows == list(flows)
    assert batch.values["tags"] == "attention.0.source@1 0 0 0 0; attention.1.source@1 0 0 0 0"


def test_records_that_overlap_by_rounding_are_cut() -> None:
    first, second = call(0.0, 1.0000000004, ("experts", 1.1)), call(0.9, 2.0, ("experts", 1.1))
    compute = _read(worker("experts.0", *first, *second)).tracks["experts.0 1", "compute"]
    assert [(each.start, each.end) for each in compute if each.category == "call"] == [(0, 1_000_000_000), (1_000_000_000, 2_000_000_000)]


def test_a_call_that_has_not_ended_shows_its_nodes() -> None:
    *nodes, _ = call(0.0, 2.0, ("attention", 1.0), ("dispatch", 1.0))
    assert [each.depth for each in _read(worker("attention.0", *nodes)).tracks["attention.0 1", "compute"]] == [0, 0]


def test_each_incarnation_has_its_tracks_and_labels_for_what_is_missing() -> None:
    killed = worker("experts.0", *call(0.0, 1.0, ("experts", 1.0)), num_dropped=7, is_complete=False)
    trace = _read(killed, worker("experts.0", *call(2.0, 3.0, ("experts", 1.0)), incarnation="2"))
    assert trace.labels == {"experts.0 1": ["7 older records were dropped", "the last records are missing"], "experts.0 2": []}
    assert set(trace.tracks) == {("experts.0 1", "compute"), ("experts.0 2", "compute")}


def test_bad_files_and_a_missing_package_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_trace_file(str(tmp_path / "run.pftrace"))
    with pytest.raises(UserError, match=r"--trace .*: there is no folder"):
        check_trace_file(str(tmp_path / "none" / "run.pftrace"))
    with pytest.raises(UserError, match="a trace is binary"):
        check_trace_file("-")
    monkeypatch.setattr(perfetto_file, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install -e "\.\[trace\]"'):
        check_trace_file(str(tmp_path / "run.pftrace"))
