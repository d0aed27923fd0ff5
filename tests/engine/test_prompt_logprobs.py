"""Logprobs of a prompt: which rows they are computed in, and that they come once, with the first token."""

from __future__ import annotations

import math

import msgspec
import pytest
from engine.toy_group import VOCABULARY, next_step, request

from flowrt.actors.control import Ended, KvOffer, Request
from flowrt.actors.outputs import Logprobs, TokenEvent
from flowrt.engine.batch import ScoreSpec
from flowrt.engine.engine import Decision, Engine
from flowrt.engine.validation import find_problem
from flowrt.graph.settings import GraphLimits
from flowrt.sampling_params import MAX_PROMPT_LOGPROBS

LIMITS = GraphLimits(max_num_seqs=4, kv_pages=16, page_size=4, max_tokens=8, max_num_batched_tokens=5)
PROMPT = (5, 6, 7, 8, 9, 10, 11)
EXPECTED = tuple(Logprobs(-float(token_id), ((token_id, -0.5),)) for token_id in PROMPT[1:])


def engine() -> Engine:
    return Engine(LIMITS, 1, 1 << 20, VOCABULARY)


@pytest.fixture
def group() -> Engine:
    return engine()


def scored(number: int = 1, **more: object) -> Request:
    return request("a", PROMPT, max_tokens=2, prompt_logprobs=number, **more)  # type: ignore[arg-type]


def finish(group: Engine, token_id: int = 3, broken: int | None = None) -> tuple[list[ScoreSpec], list[Decision]]:
    """Run one step. The logprob of a prompt's token is minus its id; that of `broken` is not a number."""
    step = next_step(group)
    scores = step.batch.scores
    found = [
        Logprobs(math.nan if each.token_id == broken else -float(each.token_id), ((each.token_id, -0.5), (1, -9.0))) for each in scores
    ]
    return scores, group.step_done(0, step.step, [token_id] * len(step.batch.samples), found)


def first_token(decisions: list[Decision]) -> TokenEvent:
    (token,) = (each for each in decisions if isinstance(each, TokenEvent) and each.index == 0 and each.choice == 0)
    return token


def test_each_row_scores_the_token_behind_it(group: Engine) -> None:
    group.submit(scored())
    assert finish(group) == ([ScoreSpec(row, PROMPT[row + 1], 1) for row in range(5)], [])
    scores, decisions = finish(group)
    assert scores == [ScoreSpec(0, 11, 1)], "the last row is for the first token of the output"
    assert first_token(decisions).prompt_logprobs == EXPECTED
    scores, decisions = finish(group)
    assert (scores, [each.prompt_logprobs for each in decisions if isinstance(each, TokenEvent)]) == ([], [()])


def test_a_prompt_of_one_token_has_none(group: Engine) -> None:
    group.submit(request("a", (5,), max_tokens=1, prompt_logprobs=1))
    scores, decisions = finish(group)
    assert (scores, first_token(decisions).prompt_logprobs) == ([], ())


def test_steps_that_are_rolled_back_or_not_finite_count_once(group: Engine) -> None:
    group.submit(scored())
    finish(group)
    group.next_step(0)
    group.roll_back()
    assert finish(group, broken=11)[1] == [], "the whole prompt is computed again"
    assert [finish(group)[0][0].row, first_token(finish(group)[1]).prompt_logprobs] == [0, EXPECTED]


def test_a_prompt_that_is_not_finite_twice_ends_its_request(group: Engine) -> None:
    group.submit(scored())
    assert finish(group, broken=7)[1] == []
    (end,) = finish(group, broken=7)[1]
    assert isinstance(end, Ended)
    assert end.reason == "error"
    assert group.idle


def test_no_row_comes_from_the_prefix_cache_or_another_choice(group: Engine) -> None:
    for number in range(3):
        group.submit(msgspec.structs.replace(scored(n=2), id=f"r{number}"))
        decisions: list[Decision] = []
        while not group.idle:
            decisions += finish(group)[1]
        token = first_token(decisions)
        assert (token.prompt_logprobs, token.num_cached_tokens) == (EXPECTED, 0)


def test_they_are_not_computed_again_for_a_client_that_has_them(group: Engine) -> None:
    group.submit(scored(attempt=1, committed_token_ids=((4,),)))
    while not group.idle:
        scores, decisions = finish(group)
        assert scores == []
        assert not any(each.prompt_logprobs for each in decisions if isinstance(each, TokenEvent))


def test_a_prefill_worker_sends_them_with_the_first_token(group: Engine) -> None:
    group.submit(msgspec.structs.replace(scored(), stage="prefill"))
    finish(group)
    assert first_token(finish(group)[1]).prompt_logprobs == EXPECTED
    puller, kv = engine(), KvOffer("prefill.0", "1", 1, len(PROMPT))
    puller.submit(msgspec.structs.replace(scored(), kv=kv, committed_token_ids=((3,),)))
    assert puller.next_steps() == []
    puller.pulled("a", 0)
    assert finish(puller)[0] == []


@pytest.mark.parametrize(("number", "is_possible"), [(MAX_PROMPT_LOGPROBS // 2, True), (MAX_PROMPT_LOGPROBS // 2 + 1, False)])
def test_their_number_is_bounded(number: int, is_possible: bool) -> None:
    each = request("a", (1,) * number, max_tokens=1, prompt_logprobs=1)
    limits = GraphLimits(max_num_seqs=1, kv_pages=1 << 20, page_size=16, max_tokens=8)
    problem = find_problem(each, limits, 1 << 20, VOCABULARY)
    assert (problem is None) == is_possible
    assert problem is None or problem.param == "prompt_logprobs"
