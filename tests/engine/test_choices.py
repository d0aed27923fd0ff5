"""Several choices per request: shared prompt pages, separate ends, sampled tokens and reported values."""

from __future__ import annotations

import pytest
from engine.toy_group import VOCABULARY, ToyGroup, expected_output, next_step, request
from group_tokens import group_tokens

from flowrt.actors.control import Ended, Request
from flowrt.actors.outputs import Logprobs, TokenEvent
from flowrt.engine.engine import Engine
from flowrt.graph.settings import GraphLimits

LIMITS = GraphLimits(max_num_seqs=4, kv_pages=16, page_size=4, max_tokens=16, max_num_batched_tokens=8)


@pytest.fixture
def group() -> ToyGroup:
    return ToyGroup(LIMITS)


def outputs(group: ToyGroup, each: Request) -> list[list[int]]:
    return [group.tokens[(each.id, each.attempt, choice)[: 3 if choice else 2]] for choice in range(each.params.n)]


def test_the_prompt_is_computed_once_and_its_whole_pages_are_shared() -> None:
    each = request("a", range(1, 12), max_tokens=3, n=3)  # 11 tokens: two whole pages, and three tokens in the third
    group = ToyGroup(LIMITS)
    group.submit(each)
    rows = []
    for _ in range(3):
        (step,) = group.start()
        rows.append(dict(zip(step.batch.sequence_names, step.batch.query_lengths, strict=True)))
        if len(rows) == 3:
            tables = dict(zip(step.batch.sequence_names, step.batch.page_tables, strict=True))
        group.finish(0)
    assert rows == [{"a/0": 8}, {"a/0": 3, "a/0/1": 3, "a/0/2": 2}, {"a/0": 1, "a/0/1": 1, "a/0/2": 1}], "the last page is each one's own"
    assert [table[:2] for table in tables.values()] == [tables["a/0"][:2]] * 3
    assert len({table[2] for table in tables.values()}) == 3
    group.run()
    assert outputs(group, each) == [expected_output(each, choice=choice) for choice in range(3)]


def test_a_choice_is_what_it_would_be_alone() -> None:
    each = request("a", range(1, 12), max_tokens=8, n=4)
    group = ToyGroup(LIMITS, num_micro_batches=2)
    group.submit(each)
    group.run(max)
    alone = ToyGroup(LIMITS)
    for choice in range(4):
        others = tuple(other for other in range(4) if other != choice)
        alone.submit(request(f"b{choice}", range(1, 12), max_tokens=8, n=4, ended_choices=others))
    alone.run()
    assert outputs(group, each) == [alone.tokens[(f"b{choice}", 0, choice)[: 3 if choice else 2]] for choice in range(4)]
    assert len({tuple(output) for output in outputs(group, each)}) == 4


def test_pages_run_out_among_choices() -> None:
    """Eight pages, four choices that need seven each when alone: three of them are shared."""
    limits = GraphLimits(max_num_seqs=4, kv_pages=8, page_size=4, max_tokens=16, max_num_batched_tokens=8)
    each = request("a", range(1, 14), max_tokens=16, n=4)
    group = ToyGroup(limits, num_micro_batches=2)
    group.submit(each, request("b", (5,), max_tokens=16))
    group.run()
    assert group.engine.statistics().num_preemptions > 0
    assert outputs(group, each) == [expected_output(each, choice=choice) for choice in range(4)]


def test_strict_chunks_are_those_of_a_choice_alone() -> None:
    """Chunks of 6 tokens, pages of 4: a prompt is shared up to a multiple of 12, so that a choice's rows are cut as if it had computed
    all of the prompt."""
    limits = GraphLimits(max_num_seqs=4, kv_pages=64, page_size=4, max_tokens=16, max_num_batched_tokens=40)
    group = ToyGroup(limits, chunk_tokens=6)
    group.submit(request("a", range(1, 24), max_tokens=2, n=2))
    group.run()
    cuts: dict[str, list[int]] = {"a/0": [], "a/0/1": []}
    for _, batch in group.batches:
        for name, kv_length in zip(batch.sequence_names, batch.kv_lengths, strict=True):
            cuts[name].append(kv_length)
    assert cuts == {"a/0": [6, 12, 18, 23, 24], "a/0/1": [18, 23, 24]}


def test_shared_pages_outlive_the_choice_that_filled_them(group: ToyGroup) -> None:
    each = request("a", range(1, 10), max_tokens=6, n=2)
    group.submit(each)
    for _ in range(2):
        group.step()
    assert group.engine.statistics().num_free_pages == 16 - 4
    group.take(group.engine.cancel("a", 0, choice=0))
    assert group.engine.statistics().num_free_pages == 16 - 3
    assert group.ends[("a", 0)] == Ended("a", 0, "abort", num_tokens=1)
    group.run()
    assert group.tokens[("a", 0, 1)] == expected_output(each, choice=1)
    assert group.engine.idle


def test_others_come_in_while_a_choice_waits_for_the_prompt(group: ToyGroup) -> None:
    group.submit(request("a", range(1, 30), max_tokens=2, n=2), request("b", (1, 2), max_tokens=2))
    group.start()
    assert group.engine.statistics().num_running == 2
    group.run()
    assert set(group.ends) == {("a", 0), ("a", 0, 1), ("b", 0)}


def test_when_the_first_choice_goes_before_the_prompt_is_through_the_next_computes_it(group: ToyGroup) -> None:
    each = request("a", range(1, 21), max_tokens=3, n=3)
    group.submit(each)
    group.step()
    group.take(group.engine.cancel("a", 0, choice=0))
    assert group.engine.statistics().num_free_pages == 16
    group.run()
    assert [group.tokens[("a", 0, choice)] for choice in (1, 2)] == [expected_output(each, choice=choice) for choice in (1, 2)]


def test_each_choice_ends_for_itself_and_the_request_with_the_last() -> None:
    group = Engine(LIMITS, 1, 100, VOCABULARY, (0,))
    group.submit(request("a", (1, 2), max_tokens=2, n=2))
    group.next_step(0)
    assert group.step_done(0, 0, [0, 5]) == [
        group_tokens("a", 0, 0, (0,)),
        Ended("a", 0, "stop", num_tokens=1),
        group_tokens("a", 0, 0, (5,), choice=1),
    ]
    assert not group.idle
    assert group.cancel("a", 0, choice=0) == [], "it has ended"
    assert group.submit(request("a", (1, 2), max_tokens=2, n=2)) == []
    group.next_step(0)
    assert group.step_done(0, 1, [6]) == [group_tokens("a", 0, 1, (6,), choice=1), Ended("a", 0, "length", choice=1, num_tokens=2)]
    assert group.idle
    assert group.cancel("a", 0) == group.submit(request("a", (1, 2), max_tokens=2, n=2)) == []


def test_cancelling_a_request_ends_all_its_choices_and_frees_all_its_pages() -> None:
    group = ToyGroup(LIMITS, num_micro_batches=2)
    group.submit(request("a", range(1, 12), max_tokens=9, n=6))
    for _ in range(3):
        group.start()
        group.finish(min(group.running))
    group.start()
    group.take(group.engine.cancel("a", 0))
    assert {ended.reason for ended in group.ends.values()} == {"abort"}
    assert len(group.ends) == 6
    for micro_batch in list(group.running):
        group.finish(micro_batch)
    assert group.engine.statistics().num_free_pages == 16
    assert group.engine.idle


def test_an_attempt_goes_on_behind_what_each_choice_had() -> None:
    whole = request("a", range(1, 8), max_tokens=6, n=3)
    expected = [expected_output(whole, choice=choice) for choice in range(3)]
    group = ToyGroup(LIMITS)
    committed = (tuple(expected[0][:4]), (), tuple(expected[2]))
    group.submit(request("a", range(1, 8), max_tokens=6, n=3, attempt=1, committed_token_ids=committed))
    assert group.ends[("a", 1, 2)] == Ended("a", 1, "length", choice=2, num_tokens=6)
    group.run()
    assert group.tokens == {("a", 1): expected[0][4:], ("a", 1, 1): expected[1]}
    group.submit(request("a", range(1, 8), max_tokens=6, n=3, attempt=2, committed_token_ids=committed, ended_choices=(0, 2)))
    group.run()
    assert group.tokens[("a", 2, 1)] == expected[1]
    assert ("a", 2) not in group.ends


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_tokens_that_would_end_it_are_forbidden_until_there_are_min_tokens(ignore_eos: bool) -> None:
    group = Engine(LIMITS, 1, 100, VOCABULARY, (0, 3))
    group.submit(request("a", max_tokens=4, min_tokens=2, stop_token_ids=(9,), ignore_eos=ignore_eos))
    seen = []
    for number in range(4):
        step = next_step(group)
        seen.append(set(step.batch.samples[0].forbidden_token_ids))
        group.step_done(0, number, [7])
    end_ids = {9} if ignore_eos else {0, 3, 9}
    assert seen == [end_ids, end_ids, set(), set()]


def test_penalties_count_the_output_again_after_a_replay() -> None:
    """Counts are a function of the tokens alone: of prompt and output, and equal after preemption, rollback and a new attempt."""
    limits = GraphLimits(max_num_seqs=4, kv_pages=8, page_size=2, max_tokens=16, max_num_batched_tokens=16)
    penalties = {"frequency_penalty": 0.5}
    requests = [request(f"r{n}", (n, n + 1), max_tokens=15, seed=n, **penalties) for n in range(4)]
    group = ToyGroup(limits, num_micro_batches=2)
    group.submit(*requests)
    group.start()
    group.roll_back()
    group.run()
    assert group.engine.statistics().num_preemptions > 0
    group.check_outputs(*requests)
    resumed = request("r1", (1, 2), max_tokens=15, seed=1, attempt=1, committed_token_ids=((3, 1, 3),), **penalties)
    engine = Engine(limits, 1, 100, VOCABULARY)
    engine.submit(resumed)
    (step,) = engine.next_steps()
    assert step.batch.samples[0].output_counts == {1: 1, 2: 0, 3: 2}


def test_logprobs_are_sent_as_requested() -> None:
    group = Engine(LIMITS, 1, 100, VOCABULARY)
    group.submit(request("a", (1,), max_tokens=2, logprobs=1))
    group.submit(request("b", max_tokens=2))
    group.submit(request("c", max_tokens=2, logprobs=0))
    group.next_step(0)
    expected = [Logprobs(-0.5, ((7, -0.5), (8, -1.5)))] * 2
    decisions = group.step_done(0, 0, [7, 7, 7], expected)
    assert [each.logprobs for each in decisions if isinstance(each, TokenEvent)] == [
        (Logprobs(-0.5, ((7, -0.5),)),),
        (),
        (Logprobs(-0.5),),
    ]


@pytest.mark.parametrize("num_choices", [1, 3])
def test_logits_that_are_not_finite_twice_end_their_request_alone(num_choices: int) -> None:
    """Whichever choice has them. The other requests of the step go on, and all pages come back."""
    group = ToyGroup(LIMITS, num_micro_batches=2)
    group.submit(request("good", (5, 6), max_tokens=4), request("bad", (1, 2), max_tokens=9, n=num_choices))
    for number in range(20):
        group.start()
        for micro_batch in sorted(group.running):
            group.finish(micro_batch, broken="bad" if number >= 2 else "")
    assert group.ends[("bad", 0)].reason == "error"
    assert "not finite" in (group.ends[("bad", 0)].error or "")
    assert sum(end.request_id == "bad" for end in group.ends.values()) == 1
    group.run()
    assert group.tokens[("good", 0)] == expected_output(request("good", (5, 6), max_tokens=4))
