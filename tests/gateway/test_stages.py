"""Requests that a prefill worker begins and a group continues: who may send which token, and what is placed again when one is lost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from gateway.test_gateway import LIMITS, new_gateway, place, sent_in, token_of

from flowrt.actors.control import Crashed, Ended, KvCompleted, KvLost, KvOffer, KvPulled, Prefilled, Prefilling, RunsAlone
from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.gateway.decisions import Decision, SendCancel, SendCompleted, SendRequest
from flowrt.gateway.gateway import Gateway
from flowrt.gateway.stages import MAX_KV_LOST


class Clock:
    seconds = 0.0

    def now(self) -> float:
        return self.seconds


def test_each_stage_has_the_limits_of_its_workers() -> None:
    of_prefill, of_groups = LIMITS.replace(max_num_seqs=1, kv_pages=4), LIMITS.replace(max_num_seqs=3)
    gateway = new_gateway(
        text=False, groups=["g0"], prefill_workers=["p0"], limits_of=lambda worker: of_prefill if worker == "p0" else of_groups
    )
    found = {name: (status.max_num_seqs, status.max_kv_tokens // LIMITS.page_size) for name, status in gateway.workers.items()}
    assert found == {"g0": (3, LIMITS.kv_pages), "p0": (1, 4)}
    placed = [place(gateway) for _ in range(2)]
    assert {each.group for each in placed} == {"p0"}
    assert gateway.place(gateway.reserve(), (1, 2)) == [], "a prefill worker is sent twice the sequences that it runs"


def staged(**more: object) -> Gateway:
    return new_gateway(text=False, prefill_workers=("p0", "p1"), **more)


@pytest.fixture
def gateway() -> Gateway:
    return staged()


def offer(placed: SendRequest, number: int = 1) -> KvOffer:
    return KvOffer(placed.group, "i", number, len(placed.request.prompt_token_ids))


def prefill(gateway: Gateway, placed: SendRequest, text: str = "a") -> SendRequest:
    """The prefill worker sends the first token and its offer. Returns the request as the group gets it."""
    gateway.on_token(placed.group, token_of(placed, text))
    (sent,) = sent_in(gateway.on_transfer(placed.group, Prefilled(placed.request.id, placed.request.attempt, offer(placed))))
    return sent


def begin_prefill(gateway: Gateway, placed: SendRequest) -> list[Decision]:
    kv = msgspec.structs.replace(offer(placed), is_complete=False)
    return gateway.on_transfer(placed.group, Prefilling(placed.request.id, placed.request.attempt, kv))


def pulled(placed: SendRequest) -> KvPulled:
    return KvPulled(placed.request.id, placed.request.attempt)


def cancelled_in(decisions: Sequence[Decision]) -> list[tuple[str, int]]:
    return [(each.group, each.cancel.attempt) for each in decisions if isinstance(each, SendCancel)]


def tokens_in(decisions: Sequence[Decision]) -> list[int]:
    return [token_id for each in decisions if isinstance(each, TokenEvent) for token_id in each.token_ids]


def test_a_request_goes_from_a_prefill_worker_to_a_group(gateway: Gateway) -> None:
    first = place(gateway, (1, 2), max_tokens=4)
    assert (first.group, first.request.stage, first.request.kv) == ("p0", "prefill", None)
    second = prefill(gateway, first)
    assert (second.group, second.request.stage, second.request.attempt) == ("g0", "all", 0)
    assert (second.request.kv, second.request.committed_token_ids) == (offer(first), ((0,),))
    assert gateway.groups_of(0) == ["p0", "g0"]
    assert cancelled_in(gateway.on_transfer("g0", pulled(second))) == [("p0", 0)], "the prefill worker may free its pages"
    assert gateway.groups_of(0) == ["g0"]
    assert tokens_in(gateway.on_token("g0", token_of(second, "b", 1))) == [1]


def test_the_first_token_is_the_prefill_workers_and_the_others_the_groups(gateway: Gateway) -> None:
    first = place(gateway, max_tokens=4)
    assert gateway.on_token("g0", token_of(first, "c")) == []
    assert gateway.on_token("p1", token_of(first, "c")) == []
    assert tokens_in(gateway.on_token("p0", token_of(first, "ab"))) == [0], "it computes one token"
    second = sent_in(gateway.on_transfer("p0", Prefilled("request-0", 0, offer(first))))[0]
    assert gateway.on_token("p0", token_of(second, "b", 1)) == []
    assert gateway.on_token("g0", token_of(second, "c", 0)) == []
    assert tokens_in(gateway.on_token("g0", token_of(second, "bc", 1))) == [1, 2]


def test_messages_of_another_worker_or_attempt_change_nothing(gateway: Gateway) -> None:
    first = place(gateway)
    for worker, attempt in (("p1", 0), ("g0", 0), ("p0", 1)):
        assert gateway.on_transfer(worker, Prefilled("request-0", attempt, offer(first))) == []
    second = prefill(gateway, first)
    for worker, attempt in (("p0", 0), ("g1", 0), ("g0", 1)):
        assert gateway.on_transfer(worker, KvPulled("request-0", attempt)) == []
        assert gateway.on_transfer(worker, KvLost("request-0", attempt, "why")) == []
    assert gateway.on_transfer("p0", Prefilled("request-0", 0, offer(first))) == []
    assert gateway.on_transfer("p0", Prefilled("request-9", 0, offer(first))) == []
    assert gateway.groups_of(0) == ["p0", second.group]


def test_a_prompt_whose_prefill_worker_is_lost_is_computed_elsewhere(gateway: Gateway) -> None:
    place(gateway, max_tokens=4)
    (retried,) = sent_in(gateway.lose_group("p0", "was killed"))
    assert (retried.group, retried.request.attempt, retried.request.stage) == ("p1", 1, "prefill")


def test_kv_that_is_not_pulled_yet_is_lost_with_its_worker(gateway: Gateway) -> None:
    second = prefill(gateway, place(gateway, max_tokens=4))
    decisions = gateway.lose_group("p0", "was killed")
    assert cancelled_in(decisions) == [("g0", 0)]
    (retried,) = sent_in(decisions)
    assert (retried.group, retried.request.attempt, retried.request.stage) == ("p1", 1, "prefill")
    assert retried.request.committed_token_ids == ((0,),)
    assert gateway.on_transfer("g0", pulled(second)) == []
    third = sent_in(gateway.on_transfer("p1", Prefilled("request-0", 1, offer(retried))))[0]
    assert third.request.committed_token_ids == ((0,),)


def test_the_loss_of_a_prefill_worker_after_the_transfer_changes_nothing(gateway: Gateway) -> None:
    second = prefill(gateway, place(gateway, max_tokens=4))
    gateway.on_transfer("g0", pulled(second))
    assert gateway.lose_group("p0", "was killed") == []
    assert tokens_in(gateway.on_token("g0", token_of(second, "b", 1))) == [1]


@pytest.mark.parametrize("is_pulled", [False, True])
def test_a_lost_group_lets_the_prompt_be_prefilled_again(is_pulled: bool, gateway: Gateway) -> None:
    second = prefill(gateway, place(gateway, max_tokens=4))
    if is_pulled:
        gateway.on_transfer("g0", pulled(second))
    decisions = gateway.lose_group("g0", "was killed")
    assert cancelled_in(decisions) == ([] if is_pulled else [("p0", 0)])
    (retried,) = sent_in(decisions)
    assert (retried.group, retried.request.stage, retried.request.attempt) == ("p1", "prefill", 1)


def test_lost_kv_is_computed_again_and_then_by_the_group_itself(gateway: Gateway) -> None:
    placed = place(gateway, max_tokens=4)
    for attempt in range(MAX_KV_LOST):
        second = prefill(gateway, placed)
        decisions = gateway.on_transfer(second.group, KvLost("request-0", attempt, "a byte was wrong"))
        assert cancelled_in(decisions) == [(placed.group, attempt)]
        (placed,) = sent_in(decisions)
    assert (placed.group, placed.request.stage, placed.request.kv, placed.request.attempt) == ("g0", "all", None, MAX_KV_LOST)
    assert tokens_in(gateway.on_token("g0", token_of(placed, "b", 1))) == [1]


def test_without_a_prefill_worker_groups_compute_prompts(gateway: Gateway) -> None:
    first = place(gateway, max_tokens=4)
    gateway.lose_group("p1", "was killed")
    (retried,) = sent_in(gateway.lose_group("p0", "was killed"))
    assert (retried.group, retried.request.stage) == ("g0", "all")
    assert gateway.on_token("p0", token_of(first, "a")) == []
    assert tokens_in(gateway.on_token("g0", token_of(retried, "a"))) == [0]
    gateway.readmit_group("p0")
    assert place(gateway).group == "p0"


def test_requests_wait_for_prefill_workers_that_a_policy_restarts(gateway: Gateway) -> None:
    place(gateway, max_tokens=4)
    gateway.lose_group("p1", "was killed", is_restarting=True)
    assert sent_in(gateway.lose_group("p0", "was killed", is_restarting=True)) == []
    gateway.give_up_group("p1")
    (retried,) = sent_in(gateway.give_up_group("p0"))
    assert (retried.group, retried.request.stage) == ("g0", "all")


def test_a_prompt_in_work_ends_when_no_group_is_left_for_too_long() -> None:
    clock = Clock()
    gateway = staged(now=clock.now, lost_group_seconds=5.0)
    place(gateway, max_tokens=4)
    for group in ("g0", "g1"):
        gateway.lose_group(group, "was killed")
    clock.seconds = 3.0
    gateway.lose_group("p0", "was killed")
    assert gateway.deadline == 5.0, "the wait does not begin again in another prefill worker"
    clock.seconds = 5.0
    decisions = gateway.on_time()
    assert cancelled_in(decisions) == [("p1", 1)]
    assert [each.finish_reason for each in decisions if isinstance(each, EndEvent)] == ["error"]


@pytest.mark.parametrize("stage", ["prefill", "pulling", "pulled"])
def test_a_cancel_reaches_every_worker_that_has_the_request(stage: str, gateway: Gateway) -> None:
    placed = place(gateway, max_tokens=4)
    if stage != "prefill":
        placed = prefill(gateway, placed)
    if stage == "pulled":
        gateway.on_transfer("g0", pulled(placed))
    expected = {"prefill": [("p0", 0)], "pulling": [("p0", 0), ("g0", 0)], "pulled": [("g0", 0)]}
    assert cancelled_in(gateway.cancel(0)) == expected[stage]
    assert all(not worker.num_sequences for worker in gateway.workers.values())


def test_an_end_while_pulling_frees_the_held_pages(gateway: Gateway) -> None:
    second = prefill(gateway, place(gateway, max_tokens=4))
    decisions = gateway.on_ended("g0", Ended("request-0", 0, "error", "no replica is left"))
    assert cancelled_in(decisions) == [("p0", 0)]
    assert gateway.on_transfer("g0", pulled(second)) == []


def test_a_request_that_ends_with_its_first_token_needs_no_group(gateway: Gateway) -> None:
    placed = place(gateway, max_tokens=1)
    gateway.on_token("p0", token_of(placed, "a"))
    decisions = gateway.on_ended("p0", Ended("request-0", 0, "length", None, 0, 1))
    assert [each.finish_reason for each in decisions if isinstance(each, EndEvent)] == ["length"]
    assert gateway.num_unfinished == 0


def test_held_prompts_keep_new_ones_waiting(gateway: Gateway) -> None:
    """One of two workers is sent one sequence more than it runs; those that it holds count until they are pulled."""
    room = 4 + 1
    sent = [place(gateway) for _ in range(2 * room)]
    last = gateway.reserve()
    assert sent_in(gateway.place(last, (1, 2))) == []
    second = prefill(gateway, sent[0])
    assert [each.request.index for each in sent_in(gateway.on_transfer(second.group, pulled(second)))] == [last]


def test_a_request_of_several_choices_is_one_sequence_in_a_prefill_worker() -> None:
    gateway = new_gateway(text=False, groups=["g0"], prefill_workers=["p0"])
    room = 2 * LIMITS.max_num_seqs
    sent = [place(gateway, n=3) for _ in range(room)]
    assert gateway.workers["p0"].num_sequences == room
    assert gateway.place(gateway.reserve(), (1, 2)) == []
    prefill(gateway, sent[0])
    assert gateway.workers["g0"].num_sequences == 3


def test_a_suspect_runs_alone_in_the_prefill_worker_and_in_the_group(gateway: Gateway) -> None:
    second = prefill(gateway, place(gateway, max_tokens=4))
    gateway.on_transfer("g0", pulled(second))
    (retried,) = sent_in(gateway.lose_group("g0", "crashed", may_recur=True))
    assert retried.request.is_suspect
    third = sent_in(gateway.on_transfer(retried.group, Prefilled("request-0", 1, offer(retried))))[0]
    assert third.request.is_suspect, "the prompt alone proves nothing"
    gateway.on_alone(retried.group, RunsAlone("request-0", 1))
    gateway.on_alone(third.group, RunsAlone("request-0", 1))
    gateway.log(0).num_crashes = 1
    decisions = gateway.lose_group(third.group, "crashed", may_recur=True)
    (end,) = [each for each in decisions if isinstance(each, EndEvent)]
    assert "while it computed this request alone" in (end.error or "")
    assert cancelled_in(decisions) == [(retried.group, 1)]


def test_a_crash_of_a_prefill_worker_suspects_what_it_computed_and_not_what_it_held(gateway: Gateway) -> None:
    held, computed = place(gateway, max_tokens=4), [place(gateway, max_tokens=4) for _ in range(2)][1]
    assert (held.group, computed.group) == ("p0", "p0")
    prefill(gateway, held)
    moved = sent_in(gateway.lose_group("p0", "crashed", may_recur=True))
    assert {each.request.index: each.request.is_suspect for each in moved} == {0: False, 2: True}


def test_a_group_gets_a_request_when_its_prefill_begins_and_the_first_token_later(gateway: Gateway) -> None:
    first = place(gateway, (1, 2), max_tokens=4)
    (early,) = sent_in(begin_prefill(gateway, first))
    assert (early.group, early.request.committed_token_ids) == ("g0", ((),))
    assert early.request.kv is not None
    assert not early.request.kv.is_complete
    assert gateway.on_token("g0", token_of(early, "c")) == []
    assert gateway.on_transfer("g0", pulled(early)) == [], "the prompt is not computed"
    assert tokens_in(gateway.on_token("p0", token_of(first, "a"))) == [0]
    decisions = gateway.on_transfer("p0", Prefilled("request-0", 0, offer(first)))
    assert decisions == [SendCompleted("g0", KvCompleted("request-0", 0, offer(first), (0,)))]
    assert cancelled_in(gateway.on_transfer("g0", pulled(early))) == [("p0", 0)]
    assert tokens_in(gateway.on_token("g0", token_of(early, "b", 1))) == [1]


def test_a_request_waits_at_the_gateway_until_a_group_has_room_or_its_prompt_is_computed(gateway: Gateway) -> None:
    early = [(first, sent_in(begin_prefill(gateway, first))) for first in (place(gateway, max_tokens=4) for _ in range(9))]
    assert [len(sent) for _, sent in early] == [1] * 8 + [0], "a group runs four sequences"
    last = early[-1][0]
    gateway.on_token(last.group, token_of(last, "a"))
    (sent,) = sent_in(gateway.on_transfer(last.group, Prefilled(last.request.id, 0, offer(last))))
    assert sent.request.committed_token_ids == ((0,),)


def test_a_group_may_find_that_the_output_is_whole_while_the_prompt_is_computed_again(gateway: Gateway) -> None:
    """The prefill worker crashed between the first token and the end."""
    first = place(gateway, max_tokens=1)
    begin_prefill(gateway, first)
    gateway.on_token("p0", token_of(first, "a"))
    (moved,) = sent_in(gateway.lose_group("p0", "was killed", may_recur=True))
    (early,) = sent_in(begin_prefill(gateway, moved))
    assert ("p1", 1) in cancelled_in(gateway.on_ended(early.group, Ended("request-0", 1, "length", None, 0, 1)))


LOST = KvLost("request-0", 0, "the offer has ended")


def test_the_crash_of_the_group_of_a_prompt_hides_no_suspect(gateway: Gateway) -> None:
    """The group has experts: a part of the prompt has crashed it, which the prefill worker reports after the death."""
    (first,) = sent_in(gateway.lose_group(place(gateway, max_tokens=2).group, "crashed", may_recur=True))
    worker = first.group
    gateway.on_alone(worker, RunsAlone("request-0", 1))
    begin_prefill(gateway, first)
    assert gateway.groups_of(0) == [worker, "g0"]
    assert gateway.lose_group("g0", "crashed", may_recur=True) == []
    assert gateway.groups_of(0) == [worker]
    (moved,) = sent_in(gateway.on_alone(worker, Crashed("request-0", 1, "g0 crashed")))
    assert gateway.log(0).num_crashes == 1
    gateway.on_alone(moved.group, RunsAlone("request-0", 2))
    (end,) = [each for each in gateway.on_alone(moved.group, Crashed("request-0", 2, "g1 crashed")) if isinstance(each, EndEvent)]
    assert end.finish_reason == "error"


@pytest.mark.parametrize("order", [("server", "worker", "report"), ("worker", "server", "report"), ("worker", "report", "server")])
def test_a_report_counts_also_when_the_loss_of_the_prefill_worker_has_moved_the_request(order: tuple[str, ...], gateway: Gateway) -> None:
    """A policy restarts all with a crashed server. The group's messages, that it has pulled the KV and computes the request alone, come
    after the loss of the prefill worker, which holds the KV as far as the gateway knows."""
    in_group = prefill(gateway, place(gateway, max_tokens=4))
    gateway.log(0).num_crashes = 1
    decisions: list[Decision] = []
    for event in order:
        match event:
            case "server":
                decisions += gateway.lose_server("experts.0", "crashed")
            case "worker":
                decisions += gateway.lose_group("p0", "is restarted", is_restarting=True)
                assert gateway.groups_of(0) == ["p1"], "it is placed there, although that is restarted as well"
            case _:
                gateway.on_transfer(in_group.group, pulled(in_group))
                decisions += gateway.on_alone(in_group.group, RunsAlone("request-0", 0))
    (end,) = [each for each in decisions if isinstance(each, EndEvent)]
    assert end.error == "experts.0 crashed while it computed this request alone; the request is not tried again"


def test_suspects_that_a_prefill_worker_holds_go_on_one_after_the_other() -> None:
    """A second crash, of which the gateway was told before the worker's reports, counts for both when both were placed."""
    gateway = new_gateway(text=False, groups=["g0"], prefill_workers=["p0"])
    for placed in [place(gateway, max_tokens=4) for _ in range(2)]:
        gateway.on_transfer("g0", pulled(prefill(gateway, placed)))
    first, second = sent_in(gateway.lose_group("g0", "crashed", may_recur=True))
    gateway.lose_server("experts.0", "crashed")
    for placed in (first, second):
        gateway.on_alone("p0", RunsAlone(placed.request.id, 1))
        gateway.on_transfer("p0", Prefilled(placed.request.id, 1, offer(placed)))
    assert [gateway.log(index).num_crashes for index in (0, 1)] == [1, 1]
    (older,) = sent_in(gateway.readmit_group("g0"))
    assert older.request.index == 0
    assert sent_in(gateway.on_transfer("g0", pulled(older))) == [], "while it may crash the group"
    decisions = gateway.on_token("g0", token_of(older, "b", len(older.request.committed_token_ids[0])))
    (younger,) = sent_in(decisions + gateway.on_ended("g0", Ended("request-0", 1, "length", None)))
    assert younger.request.index == 1


def test_a_request_that_the_end_of_another_has_placed_is_not_blamed_for_the_same_crash() -> None:
    """Both had crashed a process alone, so that one waited."""
    gateway = new_gateway(text=False, groups=["g0"], prefill_workers=["p0"])
    poison, _ = (place(gateway, max_tokens=4) for _ in range(2))
    gateway.on_transfer("g0", pulled(prefill(gateway, poison)))
    gateway.log(0).num_crashes, gateway.log(1).num_crashes = 2, 1
    gateway.lose_group("p0", "is restarted", is_restarting=True)
    gateway.on_alone("g0", RunsAlone("request-0", 0))
    gateway.readmit_group("p0")
    assert gateway.groups_of(1) == [], "it waits for the other one"
    gateway.lose_server("g0", "crashed")
    assert not gateway.is_open("request-0")
    assert gateway.groups_of(1) == ["p0"]
    assert gateway.on_alone("p0", RunsAlone("request-1", gateway.log(1).attempt)) == []
    assert gateway.log(1).num_crashes == 1


def test_the_death_of_a_process_with_several_groups_is_one_crash() -> None:
    """A request is neither sent from one to another of them nor suspected twice."""
    gateway = new_gateway(text=False, groups=["g0", "g1", "g2"])
    placed = place(gateway, max_tokens=4)
    assert placed.group == "g0"
    (moved,) = sent_in(gateway.lose_group("g0", "crashed", beside=["g1"], may_recur=True))
    assert (moved.group, moved.request.attempt) == ("g2", 1)
    assert moved.request.is_suspect
    assert not moved.request.replays_alone


@pytest.mark.parametrize("why", ["error", "crash", "crash alone", "end"])
def test_the_end_of_a_prefill_worker_counts_also_behind_the_loss_of_what_it_streamed(why: str, gateway: Gateway) -> None:
    """A group may report lost KV before the prefill worker's end arrives, which has the same cause."""
    first = place(gateway, max_tokens=2)
    if why == "crash alone":
        (first,) = sent_in(gateway.lose_group("p0", "crashed", may_recur=True))
        gateway.on_alone(first.group, RunsAlone("request-0", 1))
        gateway.log(0).num_crashes = 1
    begin_prefill(gateway, first)
    assert gateway.on_transfer("g0", msgspec.structs.replace(LOST, attempt=first.request.attempt)) == []
    match why:
        case "error":
            decisions = gateway.on_ended("p0", Ended("request-0", 0, "error", "a part crashed two servers"))
        case "end":
            decisions = gateway.on_ended("p0", Ended("request-0", 0, "stop", None, 0, 0))
        case _:
            decisions = gateway.lose_group(first.group, "crashed", may_recur=True)
    if why == "crash":
        (moved,) = sent_in(decisions)
        assert moved.request.is_suspect
    else:
        (end,) = [each for each in decisions if isinstance(each, EndEvent)]
        assert end.finish_reason == ("stop" if why == "end" else "error")


def test_kv_lost_while_the_prompt_is_computed_begins_another_attempt_behind_the_prompt(gateway: Gateway) -> None:
    first = place(gateway, max_tokens=4)
    begin_prefill(gateway, first)
    assert gateway.on_transfer("g0", LOST) == []
    assert tokens_in(gateway.on_token("p0", token_of(first, "a"))) == [0]
    decisions = gateway.on_transfer("p0", Prefilled("request-0", 0, offer(first)))
    (moved,) = sent_in(decisions)
    assert (moved.request.attempt, moved.request.committed_token_ids) == (1, ((0,),))
    assert cancelled_in(decisions) == [("p0", 0)]


@pytest.mark.parametrize(
    "ends", ["group is lost", "group crashes", "group lost it", "prefill worker is lost", "cancel", "group errs", "first token"]
)
def test_what_is_placed_twice_ends_in_both(ends: str, gateway: Gateway) -> None:
    first = place(gateway, max_tokens=4)
    begin_prefill(gateway, first)
    cancelled = {"cancel": [("p0", 0), ("g0", 0)], "group errs": [("p0", 0), ("g0", 0)]}
    match ends:
        case "group is lost":
            decisions = gateway.lose_group("g0", "was killed")
        case "group crashes":
            assert gateway.lose_group("g0", "crashed", may_recur=True) == []
            decisions = gateway.on_transfer("p0", Prefilled("request-0", 0, offer(first)))
        case "group lost it":
            gateway.on_transfer("g0", LOST)
            decisions = gateway.on_transfer("p0", Prefilled("request-0", 0, offer(first)))
        case "prefill worker is lost":
            decisions = gateway.lose_group("p0", "was killed")
        case "cancel":
            decisions = gateway.cancel(0)
        case "group errs":
            decisions = gateway.on_ended("g0", Ended("request-0", 0, "error", "no replica is left"))
        case _:
            gateway.on_token("p0", token_of(first, "a"))
            decisions = gateway.on_ended("p0", Ended("request-0", 0, "stop", None, 0, 1))
    in_group = ends in ("prefill worker is lost", "first token")
    assert cancelled_in(decisions) == cancelled.get(ends, [("g0", 0)] if in_group else [("p0", 0)])
    moved = sent_in(decisions)
    assert [(each.request.attempt, each.request.is_suspect) for each in moved] == (
        [(1, False)] if ends.endswith(("lost", "lost it", "crashes")) else []
    )
    assert all(not worker.num_sequences for worker in gateway.workers.values()) or moved


@pytest.mark.parametrize("waits_for", ["group", "pull"])
def test_a_prompt_is_held_for_a_bounded_time(waits_for: str) -> None:
    """The pages are free, and the prompt is computed again, in the end by the group, whose KV nothing else needs."""
    clock = Clock()
    gateway = staged(now=clock.now, kv_hold_seconds=60.0)
    placed = place(gateway, max_tokens=4)
    for attempt in range(MAX_KV_LOST):
        if waits_for == "pull":
            prefill(gateway, placed)
        else:
            for group in ("g0", "g1"):
                gateway.lose_group(group, "was killed", is_restarting=True)
            gateway.on_transfer(placed.group, Prefilled("request-0", attempt, offer(placed)))
        assert gateway.deadline == clock.seconds + 60.0
        clock.seconds += 59.0
        assert gateway.on_time() == []
        clock.seconds += 1.0
        decisions = gateway.on_time()
        assert (placed.group, attempt) in cancelled_in(decisions)
        if attempt + 1 < MAX_KV_LOST:
            (placed,) = sent_in(decisions)
            assert (placed.request.stage, placed.request.attempt) == ("prefill", attempt + 1)
    assert gateway.deadline is None
    if waits_for == "group":
        assert sent_in(decisions) == []
        decisions = gateway.readmit_group("g0")
    (placed,) = sent_in(decisions)
    assert (placed.group, placed.request.stage, placed.request.kv) == ("g0", "all", None)


def test_the_time_of_a_hold_ends_when_the_group_has_the_kv() -> None:
    gateway = staged(now=Clock().now, kv_hold_seconds=60.0)
    first, second = (prefill(gateway, place(gateway, max_tokens=4)) for _ in range(2))
    assert gateway.deadline == 60.0
    gateway.on_transfer(first.group, pulled(first))
    gateway.cancel(second.request.index)
    assert gateway.deadline is None


def test_a_group_that_pulls_nothing_stops_no_prompt_of_another(gateway: Gateway) -> None:
    """Its request holds pages of a prefill worker; the prompts of others go through what is left, to the other group."""
    stuck = prefill(gateway, place(gateway, [1] * 40, max_tokens=9))
    for _ in range(20):
        each = prefill(gateway, place(gateway, (1, 2), max_tokens=4))
        assert (stuck.group, each.group) == ("g0", "g1")
        gateway.on_transfer(each.group, pulled(each))
        gateway.cancel(each.request.index)
