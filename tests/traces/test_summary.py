"""The summary of hand-made records: busy, exposed communication and waiting, the slowest node and edge, restarts and gaps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from traces.trace_records import TAG, call, commit, message, worker

from flowrt.trace.records import RecordKind, WorkerTrace
from flowrt.trace.summary import DispatchLoad, TotalTime, summarize, summary_lines
from flowrt.transports.wire.message import Tag

SEND, RECEIVE = RecordKind.SEND, RecordKind.RECEIVE


def test_a_second_of_each_state() -> None:
    """attention computes for 1 s, waits 1 s for the experts, and the response is on its way for 2 s."""
    attention = worker(
        "attention.0",
        *call(0.0, 1.0, ("attention", 1.0)),
        message(SEND, 1.0, "there", part=0),
        message(RECEIVE, 5.0, "back", part=0),
        *call(5.0, 6.0, ("combine", 1.0)),
    )
    experts = worker(
        "experts.0", message(RECEIVE, 2.0, "there", part=0), *call(2.0, 3.0, ("experts", 1.0)), message(SEND, 3.0, "back", part=0)
    )
    summary = summarize([attention, experts])
    assert summary.span_seconds == 6.0
    by_role = {role.role: (role.busy_seconds, role.exposed_seconds, role.waiting_seconds) for role in summary.roles}
    assert by_role == {"attention": (2.0, 2.0, 2.0), "experts": (1.0, 1.0, 4.0)}
    assert (summary.roles[0].busy, summary.roles[0].exposed, summary.roles[0].waiting) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert summary.edges == (TotalTime("back", 1, 2.0), TotalTime("there", 1, 1.0))
    assert [node.name for node in summary.nodes] == ["attention", "combine", "experts"]


def test_communication_under_computing_is_not_exposed_and_two_messages_count_once() -> None:
    records = [message(RECEIVE, 4.0, "in", part=part) for part in (0, 1)]
    busy = worker("experts.0", *call(0.0, 3.0, ("experts", 3.0)), *records, *call(4.0, 5.0, ("experts", 1.0)))
    sender = worker("attention.0", message(SEND, 1.0, "in", part=0), message(SEND, 2.0, "in", part=1))
    (experts,) = [role for role in summarize([busy, sender]).roles if role.role == "experts"]
    assert (experts.busy_seconds, experts.exposed_seconds, experts.waiting_seconds) == (4.0, 1.0, 0.0)


def test_workers_of_a_role_add_up_and_all_are_measured_over_the_whole_run() -> None:
    first, second = worker("experts.0", *call(0.0, 1.0, ("a", 1.0))), worker("experts.1", *call(3.0, 4.0, ("b", 1.0)))
    (experts,) = summarize([first, second]).roles
    assert (experts.num_workers, experts.busy_seconds, experts.waiting_seconds) == (2, 2.0, 6.0)


def test_a_restarted_worker_is_measured_while_it_lived() -> None:
    before = worker("experts.0", *call(1.0, 2.0, ("a", 1.0)), incarnation="1", is_complete=False)
    after = worker("experts.0", *call(6.0, 7.0, ("a", 1.0)), incarnation="2")
    attention = worker("attention.0", *call(0.0, 10.0, ("b", 10.0)))
    summary = summarize([before, after, attention])
    experts = summary.roles[0]
    assert (experts.num_workers, experts.total_seconds, experts.busy_seconds) == (2, 2.0 + 4.0, 2.0)
    assert summary.incomplete == ("experts.0",)
    assert "the last records of experts.0 are missing" in summary_lines(summary)[-1]


def test_the_rest_of_a_call_belongs_to_the_node_that_it_starts_with() -> None:
    """In the simulation nodes take no time and their calls do."""
    summary = summarize([worker("attention.0", *call(0.0, 5.0, ("combine", 1.0), ("attention", 2.0)))])
    assert summary.nodes == (TotalTime("combine", 1, 3.0), TotalTime("attention", 1, 2.0))


def test_messages_with_one_record_alone_do_not_count() -> None:
    lost = worker("attention.0", message(SEND, 0.0, "in", part=0), *call(1.0, 2.0, ("a", 1.0)))
    unknown = worker("experts.0", message(RECEIVE, 1.0, "in", part=7))
    summary = summarize([lost, unknown])
    assert not summary.edges
    assert all(role.exposed_seconds == 0.0 for role in summary.roles)


def test_commits_and_dropped_records_are_counted_and_commits_make_no_role() -> None:
    summary = summarize([worker("gateway", commit(9.0, 0)), worker("experts.0", *call(0.0, 1.0, ("a", 1.0)), num_dropped=5)])
    assert [role.role for role in summary.roles] == ["experts"]
    assert (summary.span_seconds, summary.num_records, summary.num_dropped) == (1.0, 3, 5)
    assert "5 older records were dropped: the trace holds the end of the run" in summary_lines(summary)


def test_dispatch_and_combine_last_from_the_first_send_to_the_last_receive_of_a_layer() -> None:
    def exchange(group: str, begin: float, servers: Sequence[float], responses: Sequence[float]) -> list[WorkerTrace]:
        """`servers`, `responses`: how long each message is on its way, to and from a server of its own."""
        tag = Tag(f"{group}.source@1")
        there = [f"{group}.dispatch.server{number} -> experts.{number}.rows" for number in range(len(servers))]
        back = [f"experts.{number}.results -> {group}.combine.parts" for number in range(len(servers))]
        own = [message(SEND, begin, edge, tag=tag) for edge in there]
        own += [message(RECEIVE, begin + 10 + seconds, edge, tag=tag) for edge, seconds in zip(back, responses, strict=True)]
        others = [message(RECEIVE, begin + seconds, edge, tag=tag) for edge, seconds in zip(there, servers, strict=True)]
        others += [message(SEND, begin + 10, edge, tag=tag) for edge in back]
        return [worker(group, *own), worker("experts.0", *others)]

    summary = summarize([*exchange("attention.0", 0.0, (1.0, 2.0), (1.0, 1.0)), *exchange("attention.1", 0.5, (3.0, 1.0), (4.0, 1.0))])
    dispatch, combine = summary.exchange
    assert (dispatch.name, dispatch.by_group) == ("dispatch", {"attention.0": 2.0, "attention.1": 3.0})
    assert (combine.name, combine.by_group) == ("combine", {"attention.0": 1.0, "attention.1": 4.0})
    assert "combine: 2.50 s per layer, by group 1.00 s to 4.00 s (max/min 4.00)" in summary_lines(summary)


def test_rows_of_dispatch_are_counted_by_server() -> None:
    sizes = {0: (4, 2), 1: (6, 0), 2: (3, 3)}  # by step: rows for two servers
    sent = [
        replace(message(SEND, step, f"a.dispatch.server{server} -> experts.{server}.rows", 0, Tag("a.source@1", step=step)), num_rows=num)
        for step, each in sizes.items()
        for server, num in enumerate(each)
        if num
    ]
    summary = summarize([worker("a", *sent)])
    assert summary.load == DispatchLoad(num_layers=3, num_messages=5, num_rows=18, num_fullest=13, num_mean=9.0)
    expected = "rows to expert servers: 6.0 in 1.7 messages per layer; the fullest server has 1.44 of the mean"
    assert expected in summary_lines(summary)
    assert summarize([worker("a", message(SEND, 0.0, "a.gate.routing -> b.x"))]).load is None


def test_an_empty_trace_has_a_summary() -> None:
    summary = summarize([])
    assert (summary.span_seconds, summary.roles, summary.nodes) == (0.0, (), ())
    assert summary_lines(summary)[0] == "trace: 0 records of 0 us"


def test_tags_of_one_edge_are_distinct() -> None:
    other = TAG.__class__(TAG.source, step=1)
    sender = worker("attention.0", message(SEND, 0.0, "in"), message(SEND, 1.0, "in", tag=other))
    receiver = worker("experts.0", message(RECEIVE, 0.5, "in"), message(RECEIVE, 3.0, "in", tag=other))
    assert summarize([sender, receiver]).edges == (TotalTime("in", 2, 2.5),)
