"""The gateway as tables of events: committed tokens, events to the client, and messages to the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from gateway.gateways import gateway_of
from group_tokens import group_tokens, number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.actors.control import Cancel, Crashed, Ended, RunsAlone
from flowrt.actors.outputs import ChoiceEvent, EndEvent, Logprobs, TokenEvent
from flowrt.engine.engine import Decision as EngineDecision
from flowrt.engine.engine import Engine
from flowrt.gateway.decisions import Decision, SendCancel, SendRequest
from flowrt.gateway.gateway import Gateway
from flowrt.gateway.routing import WaitingRequest, WorkerStatus
from flowrt.gateway.stop_strings import StopStrings
from flowrt.graph.settings import GraphLimits
from flowrt.sampling_params import SamplingParams

LIMITS = GraphLimits(max_num_seqs=4, kv_pages=32, page_size=4, max_tokens=20, max_num_batched_tokens=16)
VOCABULARY = 26


class Letters:
    """Token n is the n-th letter; token 26 only shows with the token after it, as half a character would."""

    def __init__(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._held = ""

    def push(self, token_id: int) -> str:
        text = self._held + ("é" if token_id == 26 else chr(ord("a") + token_id))
        self._held, text = (text, "") if token_id == 26 else ("", text)
        return text

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def new_gateway(
    groups: Sequence[str] = ("g0", "g1"), text: bool = True, limits: GraphLimits = LIMITS, num_positions: int = 64, **more: Any
) -> Gateway:
    seeds = iter(range(1000, 2000))
    return gateway_of(
        groups,
        limits,
        num_positions,
        VOCABULARY,
        draw_seed=lambda: next(seeds),
        new_detokenizer=Letters if text else None,
        eos_token_ids=frozenset({25}),
        **more,
    )


def place(gateway: Gateway, prompt: Sequence[int] = (1, 2), **parameters: object) -> SendRequest:
    placed = admit(gateway, prompt, SamplingParams(**parameters))  # type: ignore[arg-type]
    assert isinstance(placed, SendRequest)
    return placed


def admit(gateway: Gateway, prompt: Sequence[int], params: SamplingParams = SamplingParams()) -> SendRequest | EndEvent | None:
    """Reserve and place a request. None: it waits for a group."""
    index = gateway.reserve(params)
    decisions = gateway.place(index, prompt)
    return gateway.log(index).end or next(
        (each for each in decisions if isinstance(each, SendRequest) and each.request.index == index), None
    )


@pytest.fixture
def gateway() -> Gateway:
    return new_gateway()


@pytest.fixture
def placed(gateway: Gateway) -> SendRequest:
    """A request of the gateway in g0."""
    return place(gateway)


def group_of(gateway: Gateway, index: int) -> str:
    return next(iter(gateway.groups_of(index)), "g0")


def on_token(gateway: Gateway, token: TokenEvent) -> list[Decision]:
    """A token of the group that has the request now."""
    return gateway.on_token(group_of(gateway, token.request), token)


def on_ended(gateway: Gateway, ended: Ended) -> list[Decision]:
    return gateway.on_ended(group_of(gateway, number_of(ended.request_id)), ended)


def move(gateway: Gateway, index: int, *lost: str) -> SendRequest:
    """Lose the group of a request, and groups that it must avoid, for a moment. Returns its new attempt."""
    (group,) = gateway.groups_of(index)
    assert group is not None
    for each in lost:
        gateway.lose_group(each, "was killed")
    decisions = gateway.lose_group(group, "was killed")
    for each in (group, *lost):
        decisions += gateway.readmit_group(each)
    return next(each for each in decisions if isinstance(each, SendRequest) and each.request.index == index)


def letters(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) - ord("a") for letter in text)


def token_of(placed: SendRequest, text: str, index: int = 0) -> TokenEvent:
    return group_tokens(placed.request.id, placed.request.attempt, index, letters(text))


def test_a_request_is_placed_with_its_parameters(gateway: Gateway) -> None:
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    drawn: dict[str, Any] = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "logprobs": 5, "seed": 11}
    ends: dict[str, Any] = {"max_tokens": 3, "min_tokens": 2, "n": 3, "stop_token_ids": (3,), "ignore_eos": True}
    placed = place(gateway, (7, 8), **penalties, **drawn, **ends)
    request = placed.request
    assert (placed.group, request.index, request.attempt, request.prompt_token_ids, request.max_tokens) == ("g0", 0, 0, (7, 8), 3)
    params = SamplingParams(**penalties, **drawn, **ends)
    assert (request.params, request.seed, request.committed_token_ids) == (params, 11, ())


def test_without_a_seed_one_is_drawn_and_kept(gateway: Gateway, placed: SendRequest) -> None:
    assert placed.request.seed == 1000
    redispatched = move(gateway, placed.request.index)
    assert redispatched.request.seed == 1000
    assert place(gateway).request.seed == 1001
    assert place(gateway, seed=0).request.seed == 0


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(2, 20), (60, 4), (63, 1), (64, 1)])
def test_there_are_as_many_tokens_as_fit(num_prompt_tokens: int, max_tokens: int) -> None:
    assert place(new_gateway(), [1] * num_prompt_tokens).request.max_tokens == max_tokens
    assert place(new_gateway(), [1] * num_prompt_tokens, max_tokens=100_000).request.max_tokens == max_tokens
    assert place(new_gateway(), [1] * num_prompt_tokens, min_tokens=30).request.max_tokens == max_tokens


def test_tokens_become_events_and_the_end_comes_once(gateway: Gateway, placed: SendRequest) -> None:
    assert on_token(gateway, token_of(placed, "hi")) == [TokenEvent(0, 0, (7, 8), "hi")]
    assert on_ended(gateway, Ended(placed.request.id, 0, "length")) == [EndEvent(0, "length")]
    assert (
        on_ended(gateway, Ended(placed.request.id, 0, "length")) == on_token(gateway, token_of(placed, "x", 2)) == gateway.cancel(0) == []
    )
    assert gateway.log(0).token_ids == [7, 8]
    assert gateway.log(0).text == "hi"
    assert gateway.events(0, 1) == [EndEvent(0, "length")]
    assert gateway.num_unfinished == 0
    gateway.forget(0)
    with pytest.raises(KeyError):
        gateway.log(0)


def test_only_the_next_index_of_the_current_attempt_is_committed(gateway: Gateway, placed: SendRequest) -> None:
    on_token(gateway, token_of(placed, "abc"))
    assert on_token(gateway, token_of(placed, "abc")) == []
    assert on_token(gateway, token_of(placed, "cd", 2)) == [TokenEvent(0, 3, (3,), "d")], "what is new of a repeated message"
    redispatched = move(gateway, 0)
    assert (redispatched.request.attempt, redispatched.request.committed_token_ids) == (1, ((0, 1, 2, 3),))
    assert on_token(gateway, token_of(placed, "z", 4)) == [], "the older attempt"
    assert on_ended(gateway, Ended(placed.request.id, 0, "abort")) == []
    assert on_token(gateway, token_of(redispatched, "e", 4)) == [TokenEvent(0, 4, (4,), "e")]
    assert on_ended(gateway, Ended(redispatched.request.id, 1, "stop")) == [EndEvent(0, "stop")]


def test_a_gap_ends_the_request_instead_of_giving_wrong_text(gateway: Gateway, placed: SendRequest) -> None:
    event, cancel = on_token(gateway, token_of(placed, "x", 1))
    assert isinstance(event, EndEvent)
    assert (event.finish_reason, event.error) == ("error", "g0 sent token 1 of request-0 where 0 of 20 were committed")
    assert cancel == SendCancel("g0", Cancel("request-0", 0))


def test_the_log_is_bounded_by_max_tokens(gateway: Gateway) -> None:
    placed = place(gateway, max_tokens=2)
    *_, event, _ = on_token(gateway, token_of(placed, "abc"))
    assert isinstance(event, EndEvent)
    assert event.finish_reason == "error"
    assert len(gateway.log(0).events) == 2


def test_a_failed_request_has_the_reason(gateway: Gateway, placed: SendRequest) -> None:
    assert on_ended(gateway, Ended(placed.request.id, 0, "error", "bad", param="seed")) == [EndEvent(0, "error", "", "bad", "seed")]


@pytest.mark.parametrize(
    ("stop", "expected", "texts", "text"),
    [
        (("lo",), "helloworld", ["h", "e", "", "l", ""], "hel"),
        (("xyz",), "axyb", ["a", "", "", "xyb"], "axyb"),
        (("ab", "bcd"), "xbcd", ["x", "", "", ""], "x"),
        (("aab",), "aaab", ["", "", "a", ""], "a"),
        (("abc", "b"), "ab", ["", "a"], "a"),
        (("q",), "abq", ["a", "b", ""], "ab"),
    ],
)
def test_stop_strings(stop: tuple[str, ...], expected: str, texts: list[str], text: str, gateway: Gateway) -> None:
    placed = place(gateway, stop=stop)
    events: list[TokenEvent] = []
    ends: list[EndEvent] = []
    cancels: list[SendCancel] = []
    for index, letter in enumerate(expected):
        for decision in on_token(gateway, token_of(placed, letter, index)):
            {TokenEvent: events, EndEvent: ends, SendCancel: cancels}[type(decision)].append(decision)  # type: ignore[index, arg-type]
    if not ends:
        ends = [event for event in on_ended(gateway, Ended(placed.request.id, 0, "length")) if isinstance(event, EndEvent)]
        assert ends[0].finish_reason == "length"
        assert not cancels
    else:
        assert ends[0].finish_reason == "stop"
        assert cancels == [SendCancel("g0", Cancel(placed.request.id, 0))]
    assert len(ends) == 1
    assert gateway.log(0).text == text
    assert [event.text for event in events] == texts
    assert gateway.log(0).token_ids == list(letters(expected[: len(events)]))


def test_text_held_back_comes_with_the_end(gateway: Gateway) -> None:
    placed = place(gateway, stop=("bcd",))
    events = on_token(gateway, group_tokens(placed.request.id, 0, 0, (0, 1, 2, 26)))
    assert [event.text for event in events if isinstance(event, TokenEvent)] == ["a"]
    assert on_ended(gateway, Ended(placed.request.id, 0, "length")) == [EndEvent(0, "length", "bcé")]


@pytest.mark.parametrize(("parameters", "text"), [({}, "a"), ({"ignore_eos": True}, "az"), ({"stop_token_ids": (0,)}, "")])
def test_stop_tokens_are_in_the_ids_and_not_in_the_text(parameters: dict[str, object], text: str, gateway: Gateway) -> None:
    placed = place(gateway, **parameters)
    expected = "a" if "stop_token_ids" in parameters else "az"  # z is the end of sequence
    on_token(gateway, token_of(placed, expected))
    on_ended(gateway, Ended(placed.request.id, 0, "stop"))
    assert gateway.log(0).text == text
    assert gateway.log(0).token_ids == list(letters(expected))


def test_without_a_tokenizer_there_are_ids_and_no_stop_strings() -> None:
    gateway = new_gateway(text=False)
    placed = place(gateway)
    assert on_token(gateway, token_of(placed, "a")) == [TokenEvent(0, 0, (0,), "")]
    refused = admit(gateway, (1,), SamplingParams(stop=("x",)))
    assert isinstance(refused, EndEvent)
    assert refused.error == "stop strings need a tokenizer, and the model's directory has none; use stop_token_ids"


def test_refused_requests_have_their_one_end_too() -> None:
    gateway = new_gateway(max_requests=2)
    assert isinstance(admit(gateway, ()), EndEvent)
    reserved = gateway.reserve(SamplingParams(n=3))
    assert gateway.num_unfinished == 1, "a place is taken before anything is done for the request"
    assert gateway.refuse(reserved, "no tokenizer") == [EndEvent(1, "error", "", "no tokenizer")]
    placed = place(gateway)
    place(gateway)
    assert gateway.admission.overload
    assert admit(gateway, (1,)) == EndEvent(4, "error", "", "too many active requests (2, limit 2)")
    assert [len(gateway.events(index)) for index in (0, 1, 4)] == [1, 1, 1]
    gateway.cancel(placed.request.index)
    assert not gateway.admission.overload
    with pytest.raises(ValueError, match="request 3 has not ended"):
        gateway.forget(3)


def test_cancelling_notifies_client_and_worker_once(gateway: Gateway, placed: SendRequest) -> None:
    assert gateway.cancel(0) == [EndEvent(0, "abort"), SendCancel("g0", Cancel("request-0", 0))]
    assert gateway.cancel(0) == gateway.cancel(99) == on_ended(gateway, Ended(placed.request.id, 0, "abort")) == []


def test_each_choice_has_its_tokens_text_and_end(gateway: Gateway) -> None:
    placed = place(gateway, n=2, stop=("lo",))
    name = placed.request.id
    assert on_token(gateway, group_tokens(name, 0, 0, letters("hi"), 1)) == [TokenEvent(0, 0, (7, 8), "hi", 1)]
    assert on_token(gateway, group_tokens(name, 0, 0, letters("l"))) == [TokenEvent(0, 0, (11,), "")]
    assert on_token(gateway, group_tokens(name, 0, 1, letters("ox"))) == [
        TokenEvent(0, 1, (14,), ""),
        ChoiceEvent(0, 0, "stop"),
        SendCancel("g0", Cancel(name, 0, 0)),
    ], "a stop string ends its choice, and what came behind it is dropped"
    assert on_ended(gateway, Ended(name, 0, "abort", choice=0, num_tokens=3)) == [], "the group's answer to that cancel"
    redispatched = move(gateway, 0)
    assert (redispatched.request.committed_token_ids, redispatched.request.ended_choices) == ((letters("lo"), letters("hi")), (0,))
    assert on_ended(gateway, Ended(name, 1, "length", choice=1, num_tokens=2)) == [ChoiceEvent(0, 1, "length"), EndEvent(0, "stop")]
    assert gateway.log(0).text == ""
    assert [choice.finish_reason for choice in gateway.log(0).choices] == ["stop", "length"]
    assert gateway.num_unfinished == 0


def test_cancelling_ends_every_choice_that_goes_on(gateway: Gateway) -> None:
    placed = place(gateway, n=3)
    on_ended(gateway, Ended(placed.request.id, 0, "stop", choice=1, num_tokens=0))
    ends = [ChoiceEvent(0, 0, "abort"), ChoiceEvent(0, 2, "abort"), EndEvent(0, "abort")]
    assert gateway.cancel(0) == [*ends, SendCancel("g0", Cancel(placed.request.id, 0))]
    failed = place(gateway, n=2)
    assert on_ended(gateway, Ended(failed.request.id, 0, "error", "too long")) == [
        ChoiceEvent(1, 0, "error"),
        ChoiceEvent(1, 1, "error"),
        EndEvent(1, "error", "", "too long"),
    ]
    assert {worker.num_sequences for worker in gateway.workers.values()} == {0}


def test_a_lost_last_token_is_an_error(gateway: Gateway, placed: SendRequest) -> None:
    on_token(gateway, token_of(placed, "ab"))
    event, cancel = on_ended(gateway, Ended(placed.request.id, 0, "length", num_tokens=3))
    assert event == EndEvent(0, "error", "", "g0 ended request-0 after 3 tokens, 2 were committed")
    assert isinstance(cancel, SendCancel)


def test_room_that_a_refused_request_leaves_goes_to_those_that_wait() -> None:
    """Whatever ends, all that follows from it is carried out."""
    gateway = new_gateway(("g0",))
    waiting = gateway.reserve(SamplingParams(max_tokens=2))
    gateway._stages.queue = lambda log: None  # it is asked again later, as a request beyond a step at hand is
    log = gateway.log(waiting)
    assert gateway.place(waiting, [1]) == []
    del gateway._stages.queue
    refused = gateway.reserve(SamplingParams(max_tokens=2))
    gateway._stages.queue(log)
    end, sent = gateway.refuse(refused, "no tokenizer")
    assert isinstance(end, EndEvent)
    assert isinstance(sent, SendRequest)
    assert sent.request.id == "request-0"
    assert gateway.refuse(refused, "again") == []


@pytest.mark.parametrize(("stop", "text"), [("b", "aba"), ("ba", "a"), ("bab", "a"), ("ab", "ab")])
def test_stop_strings_end_an_output_behind_min_tokens(stop: str, text: str, gateway: Gateway) -> None:
    """Also one that has begun before."""
    placed = place(gateway, stop=(stop,), min_tokens=2)
    events = on_token(gateway, token_of(placed, "abab"))
    assert gateway.log(0).text == text
    assert isinstance(events[-2], EndEvent)


def test_logprobs_come_with_their_tokens(gateway: Gateway) -> None:
    placed = place(gateway, logprobs=2)
    expected = Logprobs(-0.25, ((1, -0.25), (2, -2.0)))
    assert on_token(gateway, group_tokens(placed.request.id, 0, 0, (1,), 0, (expected,))) == [
        TokenEvent(0, 0, (1,), "b", 0, (expected,)),
    ]


def test_requests_go_to_the_least_loaded_group() -> None:
    gateway = new_gateway(("g0", "g1", "g2"))
    placed = [place(gateway, [1] * length, max_tokens=5) for length in (3, 2, 2, 1, 1)]
    assert [each.group for each in placed] == ["g0", "g1", "g2", "g1", "g2"]
    on_ended(gateway, Ended(placed[1].request.id, 0, "stop"))
    assert place(gateway, max_tokens=5).group == "g1", "one request each in g0 and g1, of 8 and 6 tokens"
    redispatched = move(gateway, placed[0].request.index, "g2")
    assert redispatched.group == "g1"
    gateway.end_all()
    assert {worker.num_sequences for worker in gateway.workers.values()} == {0}


def test_without_a_group_requests_wait_for_one_and_end_after_a_time() -> None:
    now = [100.0]
    gateway = new_gateway(now=lambda: now[0], lost_group_seconds=5.0)
    placed = place(gateway, stop=("bc",))
    on_token(gateway, token_of(placed, "ab"))
    assert gateway.lose_group("g1", "was killed by SIGKILL") == [], "it had no request"
    assert gateway.lose_group("g0", "has ended") == []
    assert (gateway.deadline, gateway.num_unfinished) == (105.0, 1)
    now[0] = 103.0
    assert admit(gateway, (1,)) is None
    now[0] = 104.9
    assert gateway.on_time() == []
    now[0] = 105.0
    error = "no attention group is left to serve the request; g1 was killed by SIGKILL; g0 has ended"
    assert gateway.on_time() == [EndEvent(0, "error", "b", error)]
    assert gateway.deadline == 108.0
    (second,) = gateway.readmit_group("g1")
    assert isinstance(second, SendRequest)
    assert (second.request.index, second.group, gateway.deadline) == (1, "g1", None)


def test_requests_of_a_lost_group_continue_elsewhere(gateway: Gateway) -> None:
    lost, kept = place(gateway, n=2), place(gateway)
    on_token(gateway, token_of(lost, "ab"))
    assert (lost.group, kept.group) == ("g0", "g1")
    cancel, moved = gateway.lose_group("g0", "was marked dead: stopped", is_alive=True)
    assert cancel == SendCancel("g0", Cancel(lost.request.id, 0))
    assert isinstance(moved, SendRequest)
    assert (moved.group, moved.request.attempt, moved.request.committed_token_ids) == ("g1", 1, ((0, 1), ()))
    assert not gateway.is_placed(lost.request, "g0")
    assert gateway.is_placed(moved.request, "g1")
    assert gateway.on_token("g0", token_of(lost, "c", 2)) == []  # it wakes up
    assert gateway.on_token("g0", token_of(moved, "c", 2)) == [], "only the group that has the attempt"
    assert gateway.on_ended("g0", Ended(lost.request.id, 1, "length")) == []
    assert isinstance(on_token(gateway, token_of(moved, "c", 2))[0], TokenEvent)
    gateway.cancel(1)
    assert place(gateway).group == "g1"
    gateway.readmit_group("g0")
    assert place(gateway).group == "g0"


def test_what_does_not_fit_waits_the_oldest_first(gateway: Gateway) -> None:
    """One of two groups is sent one sequence more than it runs."""
    placed = [place(gateway) for _ in range(8)]
    moved = sent_in(gateway.lose_group("g0", "was killed"))
    assert [each.request.index for each in moved] == [0], "g1 had 4 of the 5 that fit"
    assert admit(gateway, (1,)) is None, "requests 2, 4 and 6 come before it"
    (next_one,) = gateway.cancel(1)[2:]
    assert isinstance(next_one, SendRequest)
    assert (next_one.request.index, next_one.request.attempt) == (2, 1)
    assert [each.request.index for each in gateway.readmit_group("g0") if isinstance(each, SendRequest)] == [4, 6, 8]
    gateway.end_all()
    assert {worker.num_sequences for worker in gateway.workers.values()} == {0}
    assert len(placed) == 8


def test_a_request_larger_than_a_group_is_placed_in_an_empty_one() -> None:
    gateway = new_gateway(("g0",))
    first = place(gateway)
    assert admit(gateway, (1,), SamplingParams(n=20)) is None
    *_, large = on_ended(gateway, Ended(first.request.id, 0, "stop"))
    assert isinstance(large, SendRequest)
    assert len(gateway.log(large.request.index).choices) == 20


def sent_in(decisions: Sequence[Decision]) -> list[SendRequest]:
    return [each for each in decisions if isinstance(each, SendRequest)]


def runs_alone(gateway: Gateway, group: str, sent: SendRequest) -> list[Decision]:
    return gateway.on_alone(group, RunsAlone(sent.request.id, sent.request.attempt))


def test_requests_of_a_crashed_group_run_alone_and_only_one_that_did_is_counted() -> None:
    gateway = new_gateway(("g0", "g1", "g2"))
    placed = [place(gateway) for _ in range(9)]
    assert [each.request.index for each in placed if each.group == "g0"] == [0, 3, 6]
    moved = sent_in(gateway.lose_group("g0", "was killed by SIGSEGV", may_recur=True))
    assert [(each.request.index, each.group, each.request.is_suspect) for each in moved] == [
        (0, "g1", True),
        (3, "g2", True),
        (6, "g1", True),
    ]
    on_token(gateway, token_of(moved[0], "a"))
    assert [gateway.log(each.request.index).is_suspect for each in moved] == [False, True, True]
    # The group crashes before it computes the suspect alone: its requests are suspects too.
    gateway.lose_group("g1", "was killed by SIGSEGV", may_recur=True)
    assert {log.index for log in map(gateway.log, range(9)) if log.is_suspect} == {0, 1, 3, 4, 6, 7}
    assert [log.index for log in map(gateway.log, range(9)) if log.replays_alone] == [6], "it was a suspect before"
    runs_alone(gateway, "g1", moved[1])
    assert not gateway.log(3).runs_alone, "g1 does not have it"
    for group in ("g0", "g1"):
        gateway.readmit_group(group)
    runs_alone(gateway, "g2", moved[1])
    assert gateway.log(3).runs_alone
    gateway.on_alone("g2", RunsAlone("request-3", 0, is_over=True))
    assert gateway.log(3).runs_alone, "that is of an older attempt"
    gateway.on_alone("g2", RunsAlone("request-3", moved[1].request.attempt, is_over=True))
    assert not gateway.log(3).runs_alone, "a crash from now on may have another cause"
    runs_alone(gateway, "g2", moved[1])
    (retried,) = [each for each in sent_in(gateway.lose_group("g2", "was killed by SIGSEGV", may_recur=True)) if each.request.index == 3]
    assert {log.index for log in map(gateway.log, range(9)) if log.num_crashes} == {3}
    suspects = {log.index for log in map(gateway.log, range(9)) if log.is_suspect and log.end is None}
    assert suspects == {0, 1, 3, 4, 6, 7}, "requests that were in no step with it are no suspects"
    runs_alone(gateway, retried.group, retried)
    (end,) = [each for each in gateway.lose_group(retried.group, "hung", may_recur=True) if isinstance(each, EndEvent)]
    assert end == EndEvent(3, "error", "", f"{retried.group} hung while it computed this request alone; the request is not tried again")


def test_a_token_ends_the_run_alone_also_of_a_request_that_only_its_group_suspects() -> None:
    """After the crash of a server its group computes it alone, and the gateway learns of it by the report."""
    gateway = new_gateway(("g0",))
    alone, other = place(gateway), place(gateway)
    runs_alone(gateway, "g0", alone)
    on_token(gateway, token_of(alone, "a"))
    assert not gateway.log(0).runs_alone
    gateway.lose_group("g0", "was killed by SIGSEGV", may_recur=True)
    assert [(log.is_suspect, log.num_crashes) for log in (gateway.log(0), gateway.log(other.request.index))] == [(True, 0)] * 2


def test_a_token_clears_the_count_of_crashes() -> None:
    gateway = new_gateway(("g0", "g1"))
    sent = place(gateway)
    for index in range(4):
        runs_alone(gateway, sent.group, sent)
        (moved,) = sent_in(gateway.on_alone(sent.group, Crashed(sent.request.id, sent.request.attempt, "experts.0 crashed")))
        assert (moved.request.is_suspect, gateway.log(0).num_crashes) == (True, 1)
        on_token(gateway, token_of(moved, "a", index))
        assert gateway.log(0).num_crashes == 0
        sent = moved


def test_requests_that_have_crashed_a_process_alone_run_one_after_another() -> None:
    """Each runs alone in a group of its own while one of them crashes a server: the others have parts there, too. So one crash counts for
    none of them."""
    gateway = new_gateway(("g0", "g1", "g2"))
    first = [place(gateway) for _ in range(3)]
    crash = [gateway.on_alone(each.group, Crashed(each.request.id, 0, "experts.0 crashed")) for each in first]
    assert [[each.request.index for each in sent_in(decisions)] for decisions in crash] == [[0], [], []]
    (placed,) = sent_in(crash[0])
    (placed,) = sent_in(gateway.on_alone(placed.group, Crashed(placed.request.id, 1, "experts.1 crashed")))
    assert (placed.request.index, gateway.log(0).num_crashes) == (0, 2)
    decisions = gateway.on_alone(placed.group, Crashed(placed.request.id, 2, "experts.1 crashed"))
    (end,) = [each for each in decisions if isinstance(each, EndEvent)]
    assert (end.request, end.error) == (0, "experts.1 crashed while it computed this request alone; the request is not tried again")
    (second,) = sent_in(decisions)
    assert second.request.index == 1
    assert [each.request.index for each in sent_in(on_token(gateway, token_of(second, "a")))] == [2], "it has a token: the next one's turn"


def test_requests_of_a_crashed_group_come_before_newer_ones_that_waited_for_it() -> None:
    favourite = ["g0"]

    def choose(request: WaitingRequest, workers: Sequence[WorkerStatus]) -> str | None:
        by_name = {worker.name: worker.num_sequences for worker in workers}
        name, room = (favourite[0], 3) if favourite[0] in by_name else (min(by_name), 1)
        return name if by_name[name] < room else None

    gateway = new_gateway(routing=choose)
    place(gateway)
    (alone,) = [each for each in gateway.lose_group("g0", "was killed by SIGSEGV", may_recur=True) if isinstance(each, SendRequest)]
    gateway.readmit_group("g0")
    runs_alone(gateway, "g1", alone)
    gateway.log(0).num_crashes = 1
    favourite[0] = "g1"
    assert [place(gateway).group, place(gateway).group, admit(gateway, (1,))] == ["g1", "g1", None]
    decisions = gateway.lose_group("g1", "was killed by SIGSEGV", may_recur=True)
    assert [each.request for each in decisions if isinstance(each, EndEvent)] == [0]
    assert [each.request.index for each in decisions if isinstance(each, SendRequest)] == [1]


def test_no_request_passes_a_suspect_that_waits_for_room(gateway: Gateway) -> None:
    first, large = place(gateway), place(gateway, n=8)  # as much as a group takes
    gateway.lose_group(large.group, "was killed by SIGSEGV", may_recur=True)
    assert [gateway.groups_of(index) for index in (0, 1)] == [[first.group], []], "there is no room"
    assert admit(gateway, (1,)) is None, "a newer request would take its room, and the next one after it"
    (moved,) = [each for each in on_ended(gateway, Ended(first.request.id, 0, "stop")) if isinstance(each, SendRequest)]
    assert (moved.request.index, moved.request.is_suspect) == (1, True)


def test_a_group_that_is_killed_from_outside_makes_no_suspects(gateway: Gateway) -> None:
    place(gateway)
    (moved,) = gateway.lose_group("g0", "was killed by SIGKILL")
    assert isinstance(moved, SendRequest)
    assert not moved.request.is_suspect


def test_requests_wait_without_limit_for_a_group_that_a_policy_restarts_until_it_is_given_up() -> None:
    now = [100.0]
    gateway = new_gateway(now=lambda: now[0], lost_group_seconds=5.0)
    place(gateway)
    gateway.lose_group("g0", "was killed", is_restarting=True)
    gateway.lose_group("g1", "is restarted with g0", is_restarting=True)
    now[0] = 500.0
    assert (gateway.deadline, gateway.on_time()) == (None, [])
    gateway.give_up_group("g0")
    assert gateway.deadline is None, "the other one returns"
    gateway.give_up_group("g1")
    assert gateway.deadline == 505.0
    (placed,) = gateway.readmit_group("g1")
    assert isinstance(placed, SendRequest)
    assert gateway.deadline is None


def test_a_draining_gateway_admits_no_request(gateway: Gateway, placed: SendRequest) -> None:
    gateway.drain()
    assert admit(gateway, (1,)) == EndEvent(1, "error", "", "the graph is draining and takes no new requests; send them to another one")
    assert [type(each) for each in gateway.lose_group("g0", "was killed")] == [SendRequest]
    assert placed.request.index == 0


def test_the_end_of_the_run_ends_every_request(gateway: Gateway) -> None:
    for _ in range(3):
        place(gateway)
    gateway.cancel(1)
    assert gateway.end_all() == [EndEvent(index, "abort", "", None) for index in (0, 2)]
    assert gateway.end_all() == []


@settings(max_examples=100, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("ab", max_size=5), max_size=8),
    is_included=st.booleans(),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(stops: list[str], pieces: list[str], is_included: bool) -> None:
    watch = StopStrings(stops, is_included)
    shown, stopped = "", False
    for piece in pieces:
        new, stopped = watch.push(piece)
        shown += new
        if stopped:
            break
    shown += watch.flush()
    whole = "".join(pieces)
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert stopped == bool(found)
    if stopped:
        assert any(shown.endswith(stop) for stop in stops) if is_included else not any(stop in shown for stop in stops)
        assert whole.startswith(shown)
    else:
        assert shown == whole


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    pieces=st.lists(st.tuples(st.text("ab", max_size=5), st.booleans()), max_size=8),
    is_included=st.booleans(),
)
def test_stop_strings_that_end_an_output_are_complete_where_they_may_be(
    stops: list[str], pieces: list[tuple[str, bool]], is_included: bool
) -> None:
    """As by looking at all of the text each time; what is shown is as much as no stop string can begin in."""
    watch = StopStrings(stops, is_included)
    shown, whole = "", ""
    for piece, may_end in pieces:
        new, has_stopped = watch.push(piece, may_end)
        shown, before, whole = shown + new, len(whole), whole + piece
        firsts = [(stop, max(0, before - len(stop) + 1)) for stop in stops] if may_end else []
        found = [(at, at + len(stop)) for stop, first in firsts if (at := whole.find(stop, first)) >= 0]
        assert has_stopped == bool(found)
        if found:
            assert shown == whole[: min(found)[is_included]]
            return
        longest = max(length for stop in stops for length in range(len(stop)) if whole.endswith(stop[:length]) or not length)
        assert shown == whole[: len(whole) - longest]
    assert shown + watch.flush() == whole


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_groups=st.integers(1, 3))
def test_gateway_and_engines_together(data: st.DataObject, num_groups: int) -> None:
    """Requests that are routed again, cancelled and reported twice still have indexes 0..n-1, one end, and leave nothing behind."""
    names = [f"g{number}" for number in range(num_groups)]
    gateway = new_gateway(names, max_requests=50)
    engines = {name: Engine(LIMITS, 2, 64, 26) for name in names}
    running: dict[str, list[tuple[int, int, list[int]]]] = {name: [] for name in names}
    indexes: list[int] = []

    def carry_out(decisions: Sequence[EngineDecision]) -> None:
        for decision in decisions:
            for _ in range(data.draw(st.integers(1, 2))):  # a line that repeats
                match decision:
                    case TokenEvent() as token:
                        answers = on_token(gateway, token)
                    case Ended() as ended:
                        answers = on_ended(gateway, ended)
                deliver(answers)

    def deliver(decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, SendCancel):
                cancel = decision.cancel
                carry_out(engines[decision.group].cancel(cancel.request_id, cancel.attempt, cancel.choice))
            elif isinstance(decision, SendRequest):
                carry_out(engines[decision.group].submit(decision.request))

    def step(name: str) -> None:
        for start in engines[name].next_steps():
            # The token is a function of its place and of the seed, so a replay that goes wrong is seen.
            tokens = [(each.seed * 7 + each.token_index * 3 + each.choice) % 25 for each in start.batch.samples]
            running[name].append((start.micro_batch, start.step, tokens))
        if running[name]:
            carry_out(engines[name].step_done(*running[name].pop(0)))

    for event in data.draw(st.lists(st.sampled_from(["admit", "admit", "step", "step", "step", "lose", "cancel"]), max_size=50)):
        alive = [index for index in indexes if gateway.log(index).end is None]
        if event == "admit":
            params = SamplingParams(max_tokens=data.draw(st.integers(1, 20)), n=data.draw(st.sampled_from([1, 1, 3])))
            indexes.append(gateway.reserve(params))
            deliver(gateway.place(indexes[-1], [1] * data.draw(st.integers(1, 12))))
        elif event == "step":
            step(data.draw(st.sampled_from(names)))
        elif alive and event == "cancel":
            deliver(gateway.cancel(data.draw(st.sampled_from(alive))))
        elif alive:
            group = data.draw(st.sampled_from(names))
            deliver(gateway.lose_group(group, "was marked dead", may_recur=data.draw(st.booleans()), is_alive=True))
            deliver(gateway.readmit_group(group))
    for _ in range(2000):
        if all(engine.idle for engine in engines.values()):
            break
        for name in names:
            step(name)
    assert gateway.num_unfinished == 0
    for index in indexes:
        log = gateway.log(index)
        for choice in log.choices:
            tokens = [each for each in log.events if isinstance(each, TokenEvent) and each.choice == choice.index]
            assert [each.index for each in tokens] == list(range(len(choice.token_ids)))
            assert choice.token_ids == [(log.seed * 7 + at * 3 + choice.index) % 25 for at in range(len(tokens))]
            assert choice.finish_reason == "abort" or (choice.finish_reason, len(tokens)) == ("length", log.max_tokens)
        ended = [each.choice for each in log.events if isinstance(each, ChoiceEvent)]
        assert sorted(ended) == (list(range(len(log.choices))) if len(log.choices) > 1 else [])
        assert log.end is not None
        assert log.end.finish_reason in ("length", "abort")
    assert {engine.statistics().num_free_pages for engine in engines.values()} == {LIMITS.kv_pages}
    assert {worker.num_sequences for worker in gateway.workers.values()} <= {0}


def test_what_no_message_could_hold_ends_at_the_gateway(gateway: Gateway) -> None:
    for prompt, parameters in (
        ([1, 1 << 63], SamplingParams()),
        ([-(1 << 63) - 1], SamplingParams()),
        ([1], SamplingParams(max_tokens=10**40)),
        ([1], SamplingParams(min_tokens=10**40)),
        ([1], SamplingParams(stop_token_ids=(1 << 70,))),
        ([1] * ((1 << 20) + 1), SamplingParams()),
    ):
        ended = admit(gateway, prompt, parameters)
        assert isinstance(ended, EndEvent)
        assert ended.finish_reason == "error"
    assert gateway.num_unfinished == 0


def restarted(gateway: Gateway, *groups: str) -> list[SendRequest]:
    """A policy restarts these groups. Returns what they get then."""
    decisions: list[Decision] = []
    for group in groups:
        decisions += gateway.lose_group(group, "is restarted", is_restarting=True)
    for group in groups:
        decisions += gateway.readmit_group(group)
    return [each for each in decisions if isinstance(each, SendRequest)]


@pytest.mark.parametrize("is_first", [True, False])
def test_requests_that_a_policy_restarts_after_a_crash_run_alone(is_first: bool, gateway: Gateway) -> None:
    """The groups are lost before or after the server: what these knew of its parts is gone."""
    for _ in range(3):
        place(gateway)
    waiting: list[SendRequest] = []
    if is_first:
        assert gateway.lose_server("experts.0", "was killed by SIGSEGV") == []
        waiting = restarted(gateway, "g0", "g1")
    else:
        for group in ("g0", "g1"):
            gateway.lose_group(group, "is restarted", is_restarting=True)
        gateway.lose_server("experts.0", "was killed by SIGSEGV")
        waiting = [each for group in ("g0", "g1") for each in gateway.readmit_group(group) if isinstance(each, SendRequest)]
    assert {each.request.index: each.request.is_suspect for each in waiting[-3:]} == {0: True, 1: True, 2: True}


@pytest.mark.parametrize("is_first", [True, False])
def test_requests_that_ran_alone_when_a_policy_restarted_their_groups_are_counted(is_first: bool, gateway: Gateway) -> None:
    """The groups are lost before or after the server. The next time, one of them runs at a time."""
    place(gateway, n=8)  # as much as a group takes
    place(gateway, n=8)
    gateway.lose_server("experts.0", "crashed")
    for each in restarted(gateway, "g0", "g1"):
        runs_alone(gateway, each.group, each)
    if not is_first:
        gateway.lose_group("g1", "is restarted", is_restarting=True)
    for _ in range(2):
        assert not [each for each in gateway.lose_server("experts.0", "was killed by SIGSEGV") if isinstance(each, EndEvent)]
        *_, placed = restarted(gateway, "g0", "g1")
        runs_alone(gateway, placed.group, placed)
    (end,) = [each for each in gateway.lose_server("experts.0", "was killed by SIGSEGV") if isinstance(each, EndEvent)]
    assert end.request == placed.request.index
    assert end.error == "experts.0 was killed by SIGSEGV while it computed this request alone; the request is not tried again"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_report_that_comes_after_the_death_of_the_server_counts(is_late: bool) -> None:
    """The report and the notice of the death come over two connections. One of the next attempt is of another run alone."""
    gateway = new_gateway(("g1",))
    place(gateway)
    gateway.lose_server("experts.0", "crashed")
    (sent,) = restarted(gateway, "g1")
    gateway.lose_server("experts.0", "crashed")
    if not is_late:
        (sent,) = restarted(gateway, "g1")
    runs_alone(gateway, "g1", sent)
    assert (gateway.log(0).num_crashes, gateway.log(0).runs_alone) == ((1, False) if is_late else (0, True))


def test_a_report_that_comes_after_the_death_of_the_server_ends_a_request() -> None:
    """It counts as one that came in time."""
    gateway = new_gateway(("g1",))
    place(gateway)
    gateway.lose_server("experts.0", "crashed")
    for _ in range(2):
        (sent,) = restarted(gateway, "g1")
        gateway.lose_server("experts.0", "was killed by SIGSEGV")
        decisions = runs_alone(gateway, "g1", sent)
    (end,) = [each for each in decisions if isinstance(each, EndEvent)]
    assert end.error == "experts.0 was killed by SIGSEGV while it computed this request alone; the request is not tried again"
    assert [each for each in decisions if isinstance(each, SendCancel)] == [SendCancel("g1", Cancel("request-0", 2))]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_crash_counts_once_for_a_group_that_no_policy_restarts(is_late: bool) -> None:
    """The notice of the death counts it, or the report that comes after it; the group gives the request back."""
    gateway = new_gateway(("g0", "g1"))
    place(gateway)
    gateway.lose_server("g2", "crashed")
    (sent,) = restarted(gateway, "g0")
    if not is_late:
        runs_alone(gateway, sent.group, sent)
    gateway.lose_server("g2", "crashed")
    if is_late:
        runs_alone(gateway, sent.group, sent)
    (moved,) = sent_in(gateway.on_alone(sent.group, Crashed("request-0", sent.request.attempt, "g2 crashed")))
    assert (gateway.log(0).num_crashes, moved.request.attempt) == (1, sent.request.attempt + 1)


def test_tokens_from_before_a_crash_clear_no_suspect() -> None:
    """The group goes on until the policy ends it, and what it had computed arrives after the death of the server."""
    gateway = new_gateway(("g0",))
    first = place(gateway, n=2)
    gateway.lose_server("experts.0", "crashed")
    for choice in range(2):
        gateway.on_token("g0", group_tokens(first.request.id, 0, 0, (7,), choice=choice))
    (replayed,) = restarted(gateway, "g0")
    assert replayed.request.is_suspect
    gateway.on_token("g0", group_tokens(first.request.id, 1, 1, (8,), choice=0))
    gateway.lose_server("experts.0", "crashed")
    gateway.on_token("g0", group_tokens(first.request.id, 1, 1, (8,), choice=1))
    assert gateway.log(0).is_suspect, "the second choice was on trial when the server crashed again"


def test_a_request_that_was_never_in_a_group_is_no_suspect() -> None:
    gateway = new_gateway(("g0",))
    for _ in range(9):
        admit(gateway, (1, 2))
    gateway.lose_server("experts.0", "crashed")
    gateway.lose_group("g0", "is restarted", is_restarting=True)
    assert [gateway.log(index).is_suspect for index in range(9)] == [True] * 8 + [False]
