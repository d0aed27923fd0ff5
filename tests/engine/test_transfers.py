"""Prompts computed in one group and decoded in another: which pages are held, pulled and freed, and when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine.toy_group import VOCABULARY, request
from group_tokens import group_tokens

from flowrt.actors.control import Ended, KvCompleted, KvLost, KvOffer, KvPulled, Request
from flowrt.actors.outputs import Logprobs, TokenEvent
from flowrt.engine.engine import Decision, Engine, StartStep
from flowrt.engine.transfers import Hold
from flowrt.graph.settings import GraphLimits

LIMITS = GraphLimits(max_num_seqs=4, kv_pages=8, page_size=4, max_tokens=8, max_num_batched_tokens=16)


def new_engine(limits: GraphLimits = LIMITS, **more: Any) -> Engine:
    return Engine(limits, 1, 100, VOCABULARY, **more)


@pytest.fixture
def engine() -> Engine:
    return new_engine()


def prefill_of(each: Request) -> Request:
    return msgspec.structs.replace(each, stage="prefill")


def pulling(each: Request, num_tokens: int | None = None, is_degraded: bool = False) -> Request:
    num_tokens = len(each.prompt_token_ids) if num_tokens is None else num_tokens
    return msgspec.structs.replace(each, kv=KvOffer("prefill.0", "i", 1, num_tokens, is_degraded))


def step(engine: Engine, *token_ids: int) -> tuple[StartStep, list[Decision]]:
    (start,) = engine.next_steps()
    return start, engine.step_done(start.micro_batch, start.step, token_ids)


def num_free(engine: Engine) -> int:
    return engine.statistics().num_free_pages


def test_a_prefilled_prompt_keeps_its_pages_until_the_attempt_is_cancelled(engine: Engine) -> None:
    assert engine.submit(prefill_of(request("a", range(6), max_tokens=8))) == []
    start, decisions = step(engine, 42)
    assert decisions == [group_tokens("a", 0, 0, (42,)), Hold("a", 0, 6, False)]
    assert [(each.pages, each.is_complete) for each in engine.offered_prompts()] == [(tuple(start.batch.page_tables[0]), True)]
    assert (num_free(engine), engine.idle, engine.next_steps()) == (6, False, [])
    assert engine.cancel("a", 1) == []
    assert [type(each) for each in engine.cancel("a", 0)] == [Ended]
    assert (num_free(engine), engine.idle) == (8, True)


def test_held_prompts_stand_in_the_way_of_no_step_but_of_pages(engine: Engine) -> None:
    """Held pages are not taken; the next prompt waits for them, which holds up the gateway."""
    for name, first in (("a", 0), ("b", 20)):
        engine.submit(prefill_of(request(name, range(first, first + 16))))
        step(engine, 5)
    engine.submit(prefill_of(request("c", range(3))))
    assert (num_free(engine), engine.next_steps()) == (0, [])
    engine.cancel("a", 0)
    start, _ = step(engine, 7)
    assert start.batch.sequence_names == ["c/0"]


def test_a_prompt_is_computed_once_for_all_its_choices(engine: Engine) -> None:
    """The logits of its last row are those of each first token."""
    engine.submit(prefill_of(request("a", range(6), n=3, logprobs=1)))
    (start,) = engine.next_steps()
    assert (start.batch.num_rows, start.batch.sample_rows) == (6, [5, 5, 5])
    assert [(each.choice, each.token_index) for each in start.batch.samples] == [(0, 0), (1, 0), (2, 0)]
    logprobs = [Logprobs(-float(choice), ((choice, -1.0),)) for choice in range(3)]
    *tokens, hold = engine.step_done(0, start.step, (10, 11, 12), logprobs)
    assert tokens == [group_tokens("a", 0, 0, (10 + choice,), choice, (logprobs[choice],)) for choice in range(3)]
    assert (hold, num_free(engine)) == (Hold("a", 0, 6, False), 6)


@pytest.mark.parametrize("num_tokens", [24, 32])
def test_a_prompt_that_fills_all_pages_is_prefilled_for_several_choices(num_tokens: int) -> None:
    """No choice may hold pages that another one of its request waits for."""
    engine = new_engine(chunk_tokens=16)  # strict: less than a chunk is not shared
    engine.submit(prefill_of(request("a", range(num_tokens), n=3)))
    step(engine)
    *_, hold = step(engine, 1, 2, 3)[1]
    assert isinstance(hold, Hold)


def test_prompts_of_several_choices_do_not_wait_for_each_other(engine: Engine) -> None:
    for name, first in (("a", 0), ("b", 40)):
        engine.submit(prefill_of(request(name, range(first, first + 13), n=2)))  # 4 of 8 pages each
    (start,) = engine.next_steps()
    decisions = engine.step_done(0, start.step, (1, 2))
    decisions += step(engine, 3, 4)[1]
    assert [each.request_id for each in decisions if isinstance(each, Hold)] == ["a", "b"]


def test_first_tokens_that_end_all_choices_leave_nothing(engine: Engine) -> None:
    engine.submit(prefill_of(request("a", range(6), n=2, stop_token_ids=(9,))))
    _, decisions = step(engine, 9, 9)
    ends = [each for each in decisions if isinstance(each, Ended)]
    assert ends == [Ended("a", 0, "stop", None, choice, 1) for choice in (0, 1)]
    assert (len(decisions), num_free(engine), engine.idle) == (4, 8, True)


def test_a_first_token_ends_its_choice_alone(engine: Engine) -> None:
    engine.submit(prefill_of(request("a", range(6), n=2, stop_token_ids=(9,))))
    _, decisions = step(engine, 9, 8)
    assert [each.choice for each in decisions if isinstance(each, Ended)] == [0]
    assert isinstance(decisions[-1], Hold)


def test_a_choice_without_finite_logits_computes_the_prompt_again_once(engine: Engine) -> None:
    engine.submit(prefill_of(request("a", range(6), n=2)))
    assert step(engine, 5, -1)[1] == []
    assert num_free(engine) == 8
    assert [type(each) for each in step(engine, 5, 6)[1]] == [TokenEvent, TokenEvent, Hold]


@pytest.mark.parametrize("moment", ["waiting", "in a step", "held"])
def test_the_end_of_the_last_choice_ends_the_attempt_of_a_prompt(moment: str, engine: Engine) -> None:
    engine.submit(prefill_of(request("a", range(6), n=3, ended_choices=(1,))))
    if moment != "waiting":
        (start,) = engine.next_steps()
    if moment == "held":
        engine.step_done(0, start.step, (5, 6))
    assert engine.cancel("a", 0, choice=1) == engine.cancel("a", 0, choice=0) == []
    assert [type(each) for each in engine.cancel("a", 0, choice=2)] == [Ended]
    if moment == "in a step":
        assert engine.step_done(0, start.step, (5, 6)) == []
    assert (num_free(engine), engine.idle, engine.next_steps()) == (8, True, [])


def test_a_choice_that_is_stopped_in_the_step_of_its_prompt_gets_no_token(engine: Engine) -> None:
    engine.submit(prefill_of(request("a", range(6), n=2)))
    (start,) = engine.next_steps()
    engine.cancel("a", 0, choice=0)
    assert engine.step_done(0, start.step, (5, 6)) == [group_tokens("a", 0, 0, (6,), 1), Hold("a", 0, 6, False)]


def test_a_choice_with_tokens_is_prefilled_without_another(engine: Engine) -> None:
    """A moved request: the prompt is computed, and the group replays the tokens."""
    engine.submit(prefill_of(request("a", range(6), attempt=1, committed_token_ids=((5, 6),))))
    _, decisions = step(engine, 77)
    (hold,) = decisions
    assert isinstance(hold, Hold)
    assert (hold.attempt, hold.num_tokens) == (1, 6)


def test_a_choice_with_tokens_keeps_the_prompt_when_the_others_end(engine: Engine) -> None:
    """A resumed request: choice 1 had no token yet, and ends with its first one."""
    resumed = request("a", range(6), n=3, stop_token_ids=(9,), attempt=1, committed_token_ids=((5, 6), (), (7,)))
    engine.submit(prefill_of(resumed))
    _, decisions = step(engine, 9)
    assert [each.choice for each in decisions if isinstance(each, TokenEvent)] == [1]
    assert [each.choice for each in decisions if isinstance(each, Ended)] == [1]
    assert [(each.attempt, each.num_tokens) for each in decisions if isinstance(each, Hold)] == [(1, 6)]


def test_a_group_computes_nothing_until_the_kv_is_there(engine: Engine) -> None:
    engine.submit(pulling(request("a", range(6), committed_token_ids=((42,),))))
    assert engine.next_steps() == []
    (pull,) = engine.new_pulls()
    assert (pull.request_id, pull.attempt, len(pull.pages)) == ("a", 0, 2)
    assert engine.new_pulls() == []
    assert engine.is_pulling("a", 0)
    assert not engine.is_pulling("a", 1)
    assert engine.pulled("a", 1) == []
    assert engine.pulled("a", 0) == [KvPulled("a", 0)]
    assert engine.pulled("a", 0) == []
    start, decisions = step(engine, 43)
    assert (start.batch.token_ids, start.batch.kv_lengths, start.batch.page_tables) == ([42], [7], [list(pull.pages)])
    assert decisions == [group_tokens("a", 0, 1, (43,))]


def test_committed_tokens_are_replayed_behind_pulled_kv() -> None:
    engine = new_engine(chunk_tokens=4)
    engine.submit(pulling(request("a", range(6), attempt=2, committed_token_ids=((42, 43, 44),))))
    engine.next_steps()
    engine.new_pulls()
    engine.pulled("a", 2)
    start, decisions = step(engine, 45)
    assert (start.batch.token_ids, start.batch.query_lengths) == ([42, 43, 44], [1, 1, 1])
    assert decisions == [group_tokens("a", 2, 3, (45,))]


def test_other_choices_wait_for_the_pulled_pages_and_share_them(engine: Engine) -> None:
    engine.submit(pulling(request("a", range(6), n=2, committed_token_ids=((42,), (43,)))))
    assert engine.next_steps() == []
    (pull,) = engine.new_pulls()
    engine.pulled("a", 0)
    (start,) = engine.next_steps()
    assert start.batch.query_lengths == [1, 3]
    assert start.batch.page_tables[1][0] == pull.pages[0]


@pytest.mark.parametrize("is_begun", [False, True])
def test_the_worker_is_notified_when_the_choice_that_pulls_ends(is_begun: bool, engine: Engine) -> None:
    """The others compute the prompt: nothing needs its KV any more."""
    engine.submit(pulling(request("a", range(6), n=2)))
    if is_begun:
        engine.next_steps()
        assert len(engine.new_pulls()) == 1
    decisions = engine.cancel("a", 0, 0)
    assert [type(each) for each in decisions] == [Ended, KvPulled]
    (start,) = engine.next_steps()
    assert start.batch.token_ids == [*range(6)]
    assert [type(each) for each in engine.cancel("a", 0)] == [Ended], "it was the last one"


def test_a_pull_is_deferred_while_there_are_no_pages(engine: Engine) -> None:
    engine.submit(request("b", range(20), max_tokens=8))
    step(engine)
    engine.submit(pulling(request("a", range(12), committed_token_ids=((42,),))))
    (start,) = engine.next_steps()
    assert engine.new_pulls() == []
    engine.step_done(start.micro_batch, start.step, (1,))
    engine.cancel("b", 0)
    engine.next_steps()
    assert [pull.request_id for pull in engine.new_pulls()] == ["a"]


def test_a_sequence_that_pulls_is_never_preempted() -> None:
    limits = GraphLimits(max_num_seqs=4, kv_pages=4, page_size=4, max_tokens=8, max_num_batched_tokens=16)
    engine = new_engine(limits)
    engine.submit(request("old", range(3), max_tokens=8))
    step(engine, 1)
    engine.submit(pulling(request("a", range(4), max_tokens=5, committed_token_ids=((42,),))))
    for token in range(8):
        started = engine.next_steps()
        engine.new_pulls()
        for start in started:
            engine.step_done(start.micro_batch, start.step, (token,))
    assert engine.is_pulling("a", 0)
    assert engine.statistics().num_preemptions == 0


@pytest.mark.parametrize("ends", ["cancel", "fail", "newer attempt"])
def test_pages_of_a_pull_that_ends_are_free_at_once(ends: str, engine: Engine) -> None:
    engine.submit(pulling(request("a", range(6), committed_token_ids=((42,),))))
    engine.next_steps()
    engine.new_pulls()
    if ends == "cancel":
        engine.cancel("a", 0)
    elif ends == "fail":
        assert engine.pull_failed("a", 0, "no") == [KvLost("a", 0, "no")]
    else:
        engine.submit(request("a", range(1), attempt=1))
    assert not engine.is_pulling("a", 0)
    assert engine.pulled("a", 0) == []
    assert engine.pull_failed("a", 0, "no") == []
    assert num_free(engine) == 8


def test_degraded_kv_marks_what_is_computed_from_it(engine: Engine) -> None:
    engine.submit(pulling(request("a", range(6), committed_token_ids=((42,),)), is_degraded=True))
    engine.next_steps()
    engine.new_pulls()
    engine.pulled("a", 0)
    _, decisions = step(engine, 43)
    assert [each.degraded for each in decisions if isinstance(each, TokenEvent)] == [True]


def test_an_offer_of_another_length_is_refused(engine: Engine) -> None:
    (ended,) = engine.submit(pulling(request("a", range(6)), num_tokens=5))
    assert isinstance(ended, Ended)
    assert ended.error == "the KV of 5 tokens is offered for a prompt of 6"


def test_a_prompt_is_offered_from_its_first_step_on() -> None:
    engine = new_engine(GraphLimits(max_num_seqs=4, kv_pages=8, page_size=4, max_tokens=8, max_num_batched_tokens=4), streams=True)
    engine.submit(prefill_of(request("a", range(6))))
    assert engine.offered_prompts() == []
    (start,) = engine.next_steps()
    (offered,) = engine.offered_prompts()
    assert (offered.num_committed, offered.num_in_step, offered.step, offered.is_complete) == (0, 4, (0, 0, 0), False)
    assert offered.pages == tuple(start.batch.page_tables[0]) + offered.pages[1:]
    engine.step_done(0, 0, ())
    (offered,) = engine.offered_prompts()
    assert (offered.num_committed, offered.num_in_step) == (4, 4)
    engine.next_steps()
    engine.roll_back()
    engine.next_steps()
    (offered,) = engine.offered_prompts()
    assert (offered.epoch, offered.num_committed, offered.num_in_step, offered.step) == (1, 4, 6, (1, 0, 2))
    engine.step_done(0, 2, (42,))
    (offered,) = engine.offered_prompts()
    assert (offered.num_committed, offered.is_complete) == (6, True)
    engine.cancel("a", 0)
    assert engine.offered_prompts() == []


def test_a_prompt_whose_first_step_is_rolled_back_stays_offered() -> None:
    engine = new_engine(streams=True)
    engine.submit(prefill_of(request("a", range(6))))
    engine.next_steps()
    engine.roll_back()
    (offered,) = engine.offered_prompts()
    assert (offered.num_committed, offered.num_in_step) == (0, 0)
    engine.next_steps()
    (offered,) = engine.offered_prompts()
    assert (offered.epoch, offered.num_in_step) == (1, 6)


@pytest.mark.parametrize("which", ["baseline", "choices", "suspect", "computed again"])
def test_prompts_that_are_offered_when_they_are_complete(which: str) -> None:
    engine = new_engine(streams=which != "baseline")
    each = prefill_of(request("a", range(6), n=2 if which == "choices" else 1))
    engine.submit(msgspec.structs.replace(each, is_suspect=which == "suspect"))
    if which == "computed again":
        step(engine, -1)
    (start,) = engine.next_steps()
    assert engine.offered_prompts() == []
    engine.step_done(start.micro_batch, start.step, (42, 43) if which == "choices" else (42,))
    assert [each.is_complete for each in engine.offered_prompts()] == [True]


def streaming(each: Request) -> Request:
    return msgspec.structs.replace(each, kv=KvOffer("prefill.0", "i", 1, len(each.prompt_token_ids), is_complete=False))


def completed(number: int = 1, is_degraded: bool = False) -> KvCompleted:
    return KvCompleted("a", 0, KvOffer("prefill.0", "i", number, 6, is_degraded), (42,))


@pytest.mark.parametrize("first", ["kv", "token"])
def test_a_group_that_pulls_early_waits_for_the_kv_and_the_first_token(first: str, engine: Engine) -> None:
    engine.submit(streaming(request("a", range(6))))
    engine.next_steps()
    assert [pull.kv.is_complete for pull in engine.new_pulls()] == [False]
    decisions = engine.pulled("a", 0) if first == "kv" else engine.complete_kv(completed(is_degraded=True))
    assert (decisions, engine.next_steps()) == ([], [])
    decisions = engine.complete_kv(completed(is_degraded=True)) if first == "kv" else engine.pulled("a", 0)
    assert decisions == [KvPulled("a", 0)]
    assert engine.complete_kv(completed()) == []
    start, decisions = step(engine, 43)
    assert (start.batch.token_ids, start.batch.kv_lengths) == ([42], [7])
    assert decisions == [group_tokens("a", 0, 1, (43,), degraded=True)]


def test_a_prompt_that_is_complete_before_the_group_has_pages_is_pulled_whole(engine: Engine) -> None:
    engine.submit(streaming(request("a", range(6))))
    assert engine.complete_kv(completed(number=2)) == []
    engine.next_steps()
    assert [(pull.kv.number, pull.kv.is_complete) for pull in engine.new_pulls()] == [(2, True)]
    assert engine.pulled("a", 0) == [KvPulled("a", 0)]


def test_a_pull_ends_when_the_prompt_was_computed_again(engine: Engine) -> None:
    engine.submit(streaming(request("a", range(6))))
    engine.next_steps()
    assert engine.complete_kv(completed(number=2)) == [KvLost("a", 0, "prefill.0 has computed the prompt again")]
    assert engine.complete_kv(completed()) == []
    assert num_free(engine) == 8
