"""The ring of a worker, and the launcher's collector."""

from __future__ import annotations

import itertools

from flowrt.actors.control import TraceRecords
from flowrt.actors.outputs import TokenEvent
from flowrt.launcher.trace_collector import TraceCollector
from flowrt.trace.records import MAX_PIECE, NO_RECORDS, RecordKind, TraceRecord, TraceRing, decode
from flowrt.transports.wire.message import Tag


def _filled(num: int, max_kept: int | None = None) -> TraceRing:
    recorder = TraceRing(lambda: 0.0, max_kept)
    for number in range(num):
        recorder.add((RecordKind.SEND, float(number), float(number), "edge", (Tag("source", step=number),), None, 1, 2))
    return recorder


def test_records_come_back_in_pieces() -> None:
    recorder = _filled(MAX_PIECE + 2)
    pieces = [decode(piece) for piece in recorder.take()]
    assert [len(piece) for piece in pieces] == [MAX_PIECE, 2]
    assert pieces[1][1] == TraceRecord(
        RecordKind.SEND, MAX_PIECE + 1.0, MAX_PIECE + 1.0, "edge", (Tag("source", step=MAX_PIECE + 1),), None, 1, 2
    )
    assert not list(recorder.take()), "they are taken once"


def test_a_full_ring_drops_its_oldest_records_and_counts_them() -> None:
    recorder = _filled(5, max_kept=3)
    (piece,) = recorder.take()
    assert [record.start_seconds for record in decode(piece)] == [2.0, 3.0, 4.0]
    assert recorder.num_dropped == 2


def test_the_collector_keeps_the_newest_pieces_and_each_incarnation() -> None:
    (piece,) = _filled(10).take()
    collector = TraceCollector(itertools.count(5.0).__next__, max_bytes=2 * len(piece) + len(piece) // 2)
    for incarnation in ("1", "1", "2"):
        collector.add("experts.0", TraceRecords(incarnation, piece, num_dropped=1))
    collector.add("experts.0", TraceRecords("2", NO_RECORDS, num_dropped=1, is_last=True))
    first, second = collector.traces()
    assert (first.incarnation, len(first.records), first.num_dropped, first.is_complete) == ("1", 10, 11, False)
    assert (second.incarnation, len(second.records), second.num_dropped, second.is_complete) == ("2", 10, 1, True)


def test_the_gateways_own_records_are_its_tokens() -> None:
    collector = TraceCollector(lambda: 3.0)
    collector.add_token(TokenEvent(2, 7, (11,), "text"))
    (trace,) = collector.traces()
    assert (trace.worker, list(trace.records)) == ("gateway", [TraceRecord(RecordKind.COMMIT, 3.0, 3.0, "request 2", (), 7)])


def test_a_piece_that_cannot_be_read_is_left_out() -> None:
    collector = TraceCollector(lambda: 0.0)
    collector.add("experts.0", TraceRecords("1", b"\xc1"))
    assert [list(trace.records) for trace in collector.traces()] == [[]]
