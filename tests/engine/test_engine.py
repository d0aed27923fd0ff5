"""The engine as tables of events: the decisions after each event, and the contents of each batch."""

from __future__ import annotations

import msgspec
import pytest
from engine.toy_group import VOCABULARY, ToyGroup, expected_output, next_step, next_token, request
from group_tokens import group_tokens

from flowrt.actors.control import Ended, Request
from flowrt.actors.outputs import Logprobs, TokenEvent
from flowrt.engine.batch import SampleSpec
from flowrt.engine.engine import Engine, reports_of
from flowrt.engine.validation import MAX_REQUEST_TOKENS, num_new_tokens
from flowrt.graph.settings import GraphLimits
from flowrt.sampling_params import SamplingParams

SMALL = GraphLimits(max_num_seqs=4, kv_pages=8, page_size=4, max_tokens=16, max_num_batched_tokens=8)
ROOMY = GraphLimits(max_num_seqs=8, kv_pages=64, page_size=4, max_tokens=64, max_num_batched_tokens=64)


def engine(limits: GraphLimits = SMALL, num_micro_batches: int = 1, **more: int) -> Engine:
    return Engine(limits, num_micro_batches, 100, VOCABULARY, (0,), **more)


@pytest.fixture
def group() -> Engine:
    return engine()


@pytest.fixture
def small() -> ToyGroup:
    return ToyGroup(SMALL)


def test_first_step_holds_the_prompt_and_the_next_one_row(group: Engine) -> None:
    assert group.idle
    assert group.submit(request("a", (5, 6, 7, 8, 9), max_tokens=2, seed=3)) == []
    assert not group.idle
    first = next_step(group)
    assert (first.epoch, first.micro_batch, first.step) == (0, 0, 0)
    batch = first.batch
    assert batch.token_ids == [5, 6, 7, 8, 9]
    assert [len(table) for table in batch.page_tables] == [2]
    assert (batch.query_lengths, batch.kv_lengths, batch.sample_rows) == ([5], [5], [4])
    assert batch.samples == [SampleSpec(SamplingParams(), 3, token_index=0)]
    assert group.next_step(0) is None, "a micro-batch runs one step at a time"
    assert group.step_done(0, 0, [11]) == [group_tokens("a", 0, 0, (11,))]
    second = next_step(group)
    assert (second.step, second.batch.token_ids, second.batch.kv_lengths) == (1, [11], [6])
    assert second.batch.samples[0].token_index == 1
    assert group.step_done(0, 1, [12]) == [group_tokens("a", 0, 1, (12,)), Ended("a", 0, "length", num_tokens=2)]
    assert group.idle
    assert group.next_step(0) is None
    assert group.statistics().num_free_pages == 8


def test_a_chunk_that_does_not_finish_the_prompt_yields_no_sample(group: Engine) -> None:
    group.submit(request("a", range(1, 21), max_tokens=1))
    lengths = []
    for number in range(3):
        step = next_step(group)
        lengths.append(step.batch.query_lengths)
        if number < 2:
            assert step.batch.sample_rows == step.batch.samples == []
            assert group.step_done(0, number, []) == []
        else:
            assert step.batch.sample_rows == [3]
            assert step.batch.kv_lengths == [20]
            assert len(group.step_done(0, number, [7])) == 2
    assert lengths == [[8], [8], [4]]
    rows = group.statistics().step_rows
    assert (rows.counts[:3], rows.total) == ([0, 3, 0], 20)


def test_decoding_rows_come_before_chunks_under_max_num_batched_tokens(small: ToyGroup) -> None:
    small.submit(request("old", (1, 2), max_tokens=10))
    small.step()
    small.submit(request("new", range(1, 13), max_tokens=2))
    (step,) = small.start()
    assert step.batch.sequence_names == ["old/0", "new/0"]
    assert step.batch.query_lengths == [1, 7]
    assert step.batch.sample_rows == [0]
    small.run()


@pytest.mark.parametrize(("num_micro_batches", "shares"), [(1, [8]), (2, [4, 4]), (3, [3, 3, 2])])
def test_micro_batches_get_fair_shares(num_micro_batches: int, shares: list[int]) -> None:
    group = ToyGroup(ROOMY, num_micro_batches)
    group.submit(*(request(f"r{n}", (n,), max_tokens=4) for n in range(8)))
    assert [step.batch.num_sequences for step in group.start()] == shares
    group.run()


def test_micro_batches_are_balanced_again_when_one_runs_empty() -> None:
    group = ToyGroup(ROOMY, 2)
    group.submit(*(request(f"r{n}", (n,), max_tokens=2 if n % 2 else 30) for n in range(8)))  # every second one is in micro-batch 1
    group.start()
    for _ in range(2):
        group.finish(1)
        group.start()
    assert group.engine.statistics().num_running == 4
    assert 1 not in group.running, "micro-batch 0 has all four, and they are in its step"
    group.finish(0)
    assert [step.batch.num_sequences for step in group.start()] == [2, 2]
    group.run()


REFUSALS = [
    (request("x", ()), "the prompt is empty"),
    (request("x", (1, VOCABULARY)), "prompt token 97 at position 1 is outside the vocabulary (0 to 96)"),
    (request("x", (-1,)), "prompt token -1 at position 0"),
    (request("x", max_tokens=0), "max_tokens is 0"),
    (request("x", [1] * 101), "prompt of 101 tokens needs 101 positions, the model has 100 (max_position_embeddings)"),
    (request("x", [1] * 90), "prompt of 90 tokens needs 23 pages, the group has 8 (limits.kv_pages)"),
    (request("x", [1] * 30, max_tokens=4), "prompt of 30 tokens and 4 new tokens need 9 pages, the group has 8 (limits.kv_pages)"),
    (request("x", n=2, ended_choices=(0, 1)), "all 2 choices have ended already"),
    (request("x", stop_token_ids=(97,)), "stop token 97 at position 0 is outside the vocabulary (0 to 96)"),
    (request("x", committed_token_ids=((99,),)), "committed token 99 at position 0"),
    (request("x", max_tokens=1, committed_token_ids=((1, 2),)), "2 committed tokens are more than max_tokens 1"),
]


@pytest.mark.parametrize(
    ("params", "num_prompt_tokens", "expected"),
    [
        (SamplingParams(), 10, 22),
        (SamplingParams(max_tokens=7), 10, 7),
        (SamplingParams(max_tokens=100_000), 10, 22),
        (SamplingParams(max_tokens=100_000), 31, 1),
        (SamplingParams(), 32, 1),
        (SamplingParams(n=128, max_tokens=1 << 40), 10, 22),
    ],
)
def test_requests_get_as_many_tokens_as_fit(params: SamplingParams, num_prompt_tokens: int, expected: int) -> None:
    limits = SMALL.replace(max_tokens=None)
    assert num_new_tokens(params, num_prompt_tokens, limits, 100) == expected
    assert num_new_tokens(params, num_prompt_tokens, limits, 32) == expected
    assert num_new_tokens(params, num_prompt_tokens, limits.replace(max_tokens=5), 100) == min(expected, 5)


def test_outputs_of_all_choices_together_fit_into_a_message() -> None:
    limits = GraphLimits(kv_pages=1 << 20)
    assert num_new_tokens(SamplingParams(n=128), 1000, limits, 1 << 20) == (MAX_REQUEST_TOKENS - 1000) // 128


@pytest.mark.parametrize(("bad", "text"), REFUSALS, ids=[text for _, text in REFUSALS])
def test_a_bad_request_ends_with_a_reason_and_the_others_go_on(bad: Request, text: str, small: ToyGroup) -> None:
    good = [request("g0"), request("g1", seed=1)]
    small.submit(good[0], bad, good[1])
    ended = small.ends[("x", 0)]
    assert ended.reason == "error"
    assert ended.error is not None
    assert text in ended.error
    assert "\n" not in ended.error
    small.run()
    small.check_outputs(*good)


def test_positions_bound_a_request() -> None:
    group = Engine(ROOMY, 1, 20, VOCABULARY)
    assert group.submit(request("fits", [1] * 11, max_tokens=10)) == []
    (refused,) = group.submit(request("long", [1] * 12, max_tokens=10))
    assert isinstance(refused, Ended)
    assert refused.error == "prompt of 12 tokens and 10 new tokens need 21 positions, the model has 20 (max_position_embeddings)"


@pytest.mark.parametrize(
    ("more", "given", "reason"),
    [
        ({}, [5, 0], "stop"),
        ({"ignore_eos": True}, [5, 0, 0], "length"),
        ({"stop_token_ids": (5,)}, [5], "stop"),
        ({"stop_token_ids": (5,), "ignore_eos": True}, [0, 5], "stop"),
        ({"stop_token_ids": (9,)}, [1, 2, 9], "stop"),
    ],
)
def test_stop_tokens_end_the_output_and_belong_to_it(more: dict[str, object], given: list[int], reason: str) -> None:
    group = engine()
    group.submit(request("a", max_tokens=3, **more))
    emitted: list[int] = []
    ends: list[Ended] = []
    for number, token_id in enumerate(given):
        assert not ends
        assert group.next_step(0) is not None
        for decision in group.step_done(0, number, [token_id]):
            if isinstance(decision, TokenEvent):
                emitted += decision.token_ids
            else:
                ends.append(decision)
    assert emitted == given
    assert ends == [Ended("a", 0, reason, num_tokens=len(given))]
    assert group.idle


def test_committed_tokens_are_replayed_and_not_sent_again() -> None:
    whole = request("a", max_tokens=6, seed=4)
    output = expected_output(whole)
    resumed = msgspec.structs.replace(whole, attempt=1, committed_token_ids=(tuple(output[:4]),))
    group = ToyGroup(SMALL)
    group.submit(resumed)
    group.run()
    assert group.first_index[("a", 1)] == 4
    assert group.tokens[("a", 1)] == output[4:]
    assert group.batches[0][1].samples[0].token_index == 4


@pytest.mark.parametrize(("committed", "more", "reason"), [((1, 2), {}, "length"), ((1,), {"stop_token_ids": (1,)}, "stop")])
def test_an_attempt_whose_output_is_complete_ends_at_once(
    committed: tuple[int, ...], more: dict[str, object], reason: str, group: Engine
) -> None:
    assert group.submit(request("a", max_tokens=2, attempt=1, committed_token_ids=(committed,), **more)) == [
        Ended("a", 1, reason, num_tokens=len(committed))
    ]
    assert group.idle


def test_one_end_per_attempt_whatever_is_repeated(group: Engine) -> None:
    first = request("a")
    group.submit(first)
    assert group.submit(first) == [], "alive: a repeated Submit does nothing"
    assert group.cancel("a", 0) == [Ended("a", 0, "abort", num_tokens=0)]
    assert group.cancel("a", 0) == group.submit(first) == [], "over: neither does anything"
    assert group.cancel("b", 0) == [], "not come yet"
    assert group.submit(request("b")) == [Ended("b", 0, "abort")]
    assert group.submit(request("b")) == []
    assert group.submit(request("c", attempt=1)) == []
    assert group.submit(request("c", attempt=0)) == [Ended("c", 0, "abort")], "an older attempt comes late"
    assert group.submit(request("c", attempt=2)) == [Ended("c", 1, "abort", num_tokens=0)], "a newer one takes over"
    assert group.cancel("c", 1) == []
    assert group.cancel("c", 2) == [Ended("c", 2, "abort", num_tokens=0)]
    assert group.idle


def test_what_is_remembered_of_ended_attempts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.engine.engine.MAX_REMEMBERED", 3)
    group = engine()
    for number in range(10):
        group.cancel(f"r{number}", 0)
    assert [bool(group.submit(request(f"r{number}"))) for number in (6, 7)] == [False, True]


def test_cancelling_in_a_step_keeps_the_pages_until_the_step_is_over(small: ToyGroup) -> None:
    small.submit(request("a"), request("b"))
    small.start()
    small.take(small.engine.cancel("a", 0))
    assert small.ends[("a", 0)].reason == "abort"
    assert small.engine.statistics().num_free_pages == 6, "its page may still be written to"
    small.finish(0)
    assert small.engine.statistics().num_free_pages == 7
    assert ("a", 0) not in small.tokens
    small.run()
    assert small.tokens[("b", 0)] == expected_output(request("b"))


def test_a_cancelled_request_in_no_step_frees_its_pages_at_once(group: Engine) -> None:
    group.submit(request("a", range(1, 9), max_tokens=9))
    group.next_step(0)
    group.step_done(0, 0, [5])
    assert group.statistics().num_free_pages == 6
    group.cancel("a", 0)
    assert group.statistics().num_free_pages == 8


def test_rolling_back_drops_the_running_steps_only() -> None:
    requests = [request(f"r{n}", range(1, 4 + n), max_tokens=7, seed=n) for n in range(4)]
    group = ToyGroup(SMALL, num_micro_batches=2)
    group.submit(*requests)
    for _ in range(3):
        group.step()
    group.start()
    group.take(group.engine.cancel("r1", 0))
    late = dict(group.running)
    group.roll_back()
    assert group.engine.epoch == 1
    for micro_batch, step in late.items():
        assert group.engine.step_done(micro_batch, step.step, [1] * len(step.batch.samples)) == [], "late answers to dropped steps"
    for step in group.start():
        assert step.epoch == 1
        assert step.step == late[step.micro_batch].step + 1
        assert group.engine.step_done(step.micro_batch, late[step.micro_batch].step, [1] * len(step.batch.samples)) == []
    group.run()
    for each in requests:
        if each.id != "r1":
            assert group.tokens[(each.id, 0)] == expected_output(each)


def test_a_repeated_step_end_is_harmless_and_a_wrong_one_is_an_error(group: Engine) -> None:
    group.submit(request("a"))
    group.next_step(0)
    with pytest.raises(ValueError, match=r"expected 1 tokens, got 2 \(step 0 of micro-batch 0\)"):
        group.step_done(0, 0, [1, 2])
    with pytest.raises(ValueError, match=r"expected 0 logprobs, got 1 \(step 0 of micro-batch 0\)"):
        group.step_done(0, 0, [1], [Logprobs(-1.0)])
    assert group.step_done(0, 0, [1])
    assert group.step_done(0, 0, [1]) == []
    assert group.step_done(0, 7, [1]) == []


def test_draining_finishes_what_was_taken_and_refuses_the_rest(small: ToyGroup) -> None:
    taken = [request(f"r{n}") for n in range(6)]  # more than max_num_seqs: some are waiting
    small.submit(*taken)
    small.engine.drain()
    small.submit(request("late"))
    assert small.ends[("late", 0)].error == "the group is draining and takes no new requests"
    assert not small.engine.drained
    small.run()
    assert small.engine.drained
    assert all(small.ends[(each.id, 0)].reason == "length" for each in taken)


def test_pages_running_out_preempts_the_youngest_and_changes_no_token() -> None:
    limits = GraphLimits(max_num_seqs=4, kv_pages=8, page_size=2, max_tokens=16, max_num_batched_tokens=16)
    requests = [request(f"r{n}", (n, n + 1), max_tokens=15, seed=n) for n in range(4)]  # each alone needs all 8 pages
    group = ToyGroup(limits, num_micro_batches=2)
    group.submit(*requests)
    group.run()
    assert group.engine.statistics().num_preemptions > 0
    for each in requests:
        assert group.tokens[(each.id, 0)] == expected_output(each)
    assert list(group.ends) == [(each.id, 0) for each in requests], "the oldest ends first"


def test_what_becomes_free_goes_to_the_older_sequence_that_claimed_it() -> None:
    """The other micro-batch goes first, so without the claim a new request would have the pages, and another one the next time."""
    limits = GraphLimits(max_num_seqs=2, kv_pages=8, page_size=1, max_tokens=8, max_num_batched_tokens=8)
    group = engine(limits, num_micro_batches=2)
    group.submit(request("old", (1,), max_tokens=8))
    group.submit(request("young", (2,), max_tokens=8))
    for number in range(4):
        assert len(group.next_steps()) == 2
        group.step_done(0, number, [5])
        if number < 3:
            group.step_done(1, number, [5])
    assert group.statistics().num_free_pages == 0
    assert group.next_step(0) is None, "the younger one's pages are in its step"
    group.cancel("young", 0)
    group.step_done(1, 3, [5])
    group.submit(request("new", (3,)))
    assert group.statistics().num_free_pages == 4
    assert group.next_step(1) is None
    step = next_step(group)
    assert step.batch.sequence_names == ["old/0"]
    step = next_step(group, 1)
    assert step.batch.sequence_names == ["new/0"]


def test_a_claim_ends_with_its_sequence() -> None:
    limits = GraphLimits(max_num_seqs=2, kv_pages=8, page_size=1, max_tokens=8, max_num_batched_tokens=8)
    group = ToyGroup(limits, num_micro_batches=2)
    requests = [request("old", (1,), max_tokens=8), request("young", (2,), max_tokens=8)]
    group.submit(*requests)
    for _ in range(3):
        group.step()
        group.finish(1)
    group.step()
    assert group.start() == [], "the older one has claimed a page"
    group.take(group.engine.cancel("old", 0))
    group.run()
    assert group.tokens[("young", 0)] == expected_output(requests[1])


def test_a_preempted_sequence_waits_for_head_room() -> None:
    """Taken back as soon as its own pages are free, it is preempted again by the next page that an older one needs: this load
    then has 26 preemptions instead of 9."""
    limits = GraphLimits(max_num_seqs=16, kv_pages=20, page_size=16, max_tokens=90, max_num_batched_tokens=64)
    requests = [request(f"r{n}", range(n + 1, n + 5), max_tokens=90, seed=n) for n in range(16)]
    group = ToyGroup(limits)
    group.submit(*requests)
    group.run()
    assert 0 < group.engine.statistics().num_preemptions <= 16


def test_eight_pages_serve_a_request_that_fills_them(small: ToyGroup) -> None:
    full = request("a", [1] * 17, max_tokens=16)  # 17 + 16 - 1 = 32 positions = 8 pages of 4
    small.submit(full)
    small.run()
    assert small.tokens[("a", 0)] == expected_output(full)


def test_a_prompt_of_one_token_does_not_overtake_an_older_one() -> None:
    limits = GraphLimits(max_num_seqs=2, kv_pages=16, page_size=4, max_tokens=16, max_num_batched_tokens=1)
    group = ToyGroup(limits)
    group.submit(request("old", (1, 2)), *(request(f"r{n}", (n,), max_tokens=1) for n in range(8)))
    group.run()
    assert next(iter(group.ends)) == ("old", 0)


def test_strict_chunks_do_not_depend_on_the_neighbours() -> None:
    requests = [request(f"r{n}", range(1, 4 + 5 * n), max_tokens=9, seed=n) for n in range(5)]
    cuts: list[dict[str, list[tuple[int, int]]]] = []
    for max_num_batched_tokens, num_micro_batches, kv_pages in ((32, 1, 64), (7, 2, 64), (4, 1, 12)):
        limits = SMALL.replace(
            max_num_seqs=5, kv_pages=kv_pages, max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=False
        )
        group = ToyGroup(limits, num_micro_batches, chunk_tokens=4)
        group.submit(*requests)
        group.run()
        assert all(group.tokens[(each.id, 0)] == expected_output(each) for each in requests)
        seen: dict[str, list[tuple[int, int]]] = {each.id: [] for each in requests}
        for _, batch in group.batches:
            for name, num_rows, kv_length in zip(batch.sequence_names, batch.query_lengths, batch.kv_lengths, strict=True):
                seen[name.split("/")[0]].append((kv_length, num_rows))
        cuts.append({name: sorted(set(rows)) for name, rows in seen.items()})
    assert cuts[0] == cuts[1] == cuts[2]
    assert group.engine.statistics().num_preemptions > 0, "the last shape replays"


def test_a_chunk_that_does_not_fit_is_not_overtaken() -> None:
    limits = GraphLimits(max_num_seqs=5, kv_pages=64, page_size=4, max_tokens=16, max_num_batched_tokens=5)
    group = ToyGroup(limits, chunk_tokens=4)
    group.submit(request("r0", (1,), max_tokens=4), request("r1", (2,), max_tokens=4))
    group.step()
    group.submit(request("long", range(8), max_tokens=2), request("short", (3,) * 3, max_tokens=2))
    (step,) = group.start()
    assert step.batch.sequence_names == ["r0/0", "r1/0"], "three rows are left, and the older one needs four"
    group.run()


def test_strict_chunks_must_fit_into_a_step() -> None:
    with pytest.raises(ValueError, match=r"chunk_tokens is 9, it must be from 0 to limits.max_num_batched_tokens \(8\)"):
        engine(chunk_tokens=9)


def test_the_toy_model_distinguishes_prefixes() -> None:
    assert len({next_token(prefix, seed) for prefix in ((1, 2), (2, 1), (1, 2, 3)) for seed in (0, 1)}) > 3


def test_a_step_that_fails_is_computed_once_more() -> None:
    group = ToyGroup(ROOMY, num_micro_batches=2)
    requests = [request(f"r{n}", (n, n + 1), max_tokens=6, seed=n) for n in range(5)]
    group.submit(*requests)
    group.start()
    group.fail(0)
    assert group.engine.epoch == 1
    assert not group.ends
    group.run()
    group.check_outputs(*requests)


@pytest.mark.parametrize("replays_alone", [False, True])
def test_a_suspect_replays_beside_others_and_runs_alone_for_its_next_token(replays_alone: bool) -> None:
    group = engine(ROOMY, num_micro_batches=2)
    group.submit(request("other", (1, 2), max_tokens=9))
    (step,) = group.next_steps()
    moved = msgspec.structs.replace(request("moved", (5, 6), max_tokens=9), attempt=1, committed_token_ids=((7, 8, 9),))
    group.submit(msgspec.structs.replace(moved, is_suspect=True, replays_alone=replays_alone))
    (replay,) = group.next_steps() or [None]
    if replays_alone:
        assert replay is None, "a step of another request runs"
        group.step_done(step.micro_batch, step.step, [3])
        (trial,) = group.next_steps()
        assert trial.batch.token_ids == [5, 6, 7, 8, 9]
    else:
        assert replay is not None
        assert (replay.batch.token_ids, replay.batch.samples, replay.alone) == ([5, 6, 7, 8], [], None)
        assert replay.request_id == "moved", "a crash over a part of this step that still comes counts for it"
        assert group.step_done(replay.micro_batch, replay.step, []) == []
        assert group.next_steps() == [], "a step of another request runs"
        group.step_done(step.micro_batch, step.step, [3])
        (trial,) = group.next_steps()
        assert trial.batch.token_ids == [9]
    assert trial.alone is not None
    assert trial.alone.request.id == "moved"
    assert group.step_done(trial.micro_batch, trial.step, [4]) == [group_tokens("moved", 1, 3, (4,))]
    assert len(group.next_steps()) == 2


def test_the_gateway_knows_of_each_step_whether_a_suspect_runs_alone() -> None:
    """Also of one whose logits are not finite, which waits for memory while others run, and of an older suspect that goes first."""
    unfinished = 0
    for kv_pages in range(7, 24):
        limits = GraphLimits(page_size=4, kv_pages=kv_pages, max_num_seqs=4, max_num_batched_tokens=4, enable_prefix_caching=False)
        group = engine(limits, num_micro_batches=1)
        for name in ("first", "second"):
            group.submit(request(name, (1, 2, 3), max_tokens=24))
        for _ in range(3):
            (step,) = group.next_steps()
            group.step_done(0, step.step, [5] * len(step.batch.samples))
        suspect = request("suspect", range(1, 13), max_tokens=16)
        group.submit(msgspec.structs.replace(suspect, attempt=1, committed_token_ids=((5, 5, 5),), is_suspect=True))
        believed, before, is_finite = None, None, True
        for _ in range(60):
            if not (steps := group.next_steps()):
                break
            for report in reports_of(before, steps[0].alone):
                believed = None if report.is_over else report.request_id
            before = steps[0].alone
            others = {sequence.request.id for sequence, _ in group.snapshot().steps[0].parts} - {believed}
            assert believed is None or not others
            tokens = [5] * len(steps[0].batch.samples)
            if before is not None and is_finite:
                is_finite, tokens = False, [-1] * len(tokens)
            elif before is not None and tokens:
                believed = None  # the token tells it
            unfinished += believed is None and not is_finite and before is None
            group.step_done(0, steps[0].step, tokens)
    assert unfinished, "in no case did others run while it waited"


def test_a_step_names_the_one_request_whose_rows_it_has() -> None:
    group = engine(ROOMY, num_micro_batches=1)
    group.submit(request("choices", (1, 2), max_tokens=9, n=2))
    (step,) = group.next_steps()
    assert step.request_id == "choices"
    group.submit(request("other", (3, 4), max_tokens=9))
    group.step_done(step.micro_batch, step.step, [3, 3])
    (step,) = group.next_steps()
    assert step.request_id is None


def test_a_suspect_without_finite_logits_stays_alone() -> None:
    """The gateway knows that it runs alone, and is notified of nothing else before its next token."""
    group = engine(ROOMY, num_micro_batches=2)
    moved = msgspec.structs.replace(request("moved", (5, 6), max_tokens=9), attempt=1, committed_token_ids=((7, 8, 9),), is_suspect=True)
    group.submit(moved)
    (replay,) = group.next_steps()
    group.step_done(replay.micro_batch, replay.step, [])
    (trial,) = group.next_steps()
    assert trial.alone is not None
    group.submit(request("other", (1, 2), max_tokens=9))
    assert group.step_done(trial.micro_batch, trial.step, [-1]) == []
    (second,) = group.next_steps()
    assert second.alone is trial.alone
    assert second.batch.token_ids == [5, 6, 7, 8, 9]
    assert group.step_done(second.micro_batch, second.step, [4]) == [group_tokens("moved", 1, 3, (4,))]
    assert len(group.next_steps()) == 2


def test_a_choice_that_has_passed_its_trial_waits_for_the_others_of_its_request() -> None:
    """It may come to what crashed the first group, and must not do so beside other requests."""
    group = ToyGroup(ROOMY)
    moved = msgspec.structs.replace(request("moved", (5, 6), max_tokens=9, n=2), attempt=1, committed_token_ids=((7, 8, 9), ()))
    group.submit(request("other", (1, 2), max_tokens=9), msgspec.structs.replace(moved, is_suspect=True))
    beside_others: list[tuple[int, int]] = []  # tokens of both choices, when the second one's next is computed in company
    for _ in range(40):
        if not group.start():
            break
        names = set(group.running[0].batch.sequence_names)
        if "moved/1/1" in names and "other/0" in names:
            beside_others.append((len(group.tokens.get(("moved", 1), ())), len(group.tokens.get(("moved", 1, 1), ()))))
        group.finish(0)
    assert beside_others
    assert all(first and second for first, second in beside_others)


def test_sequences_of_a_failed_step_run_alone_and_only_the_one_that_fails_again_ends() -> None:
    group = ToyGroup(ROOMY, num_micro_batches=2)
    requests = [request(f"r{n}", (n + 1, n + 2), max_tokens=6, seed=n) for n in range(6)]
    group.submit(*requests)

    def sequences(micro_batch: int) -> list[str]:
        return group.running[micro_batch].batch.sequence_names

    for _ in range(200):
        group.start()
        if not group.running:
            break
        micro_batch = max(group.running)
        if "r3/0" in sequences(micro_batch):
            alone = len(sequences(micro_batch)) == 1
            if alone:
                assert len(group.running) == 1, "no other micro-batch runs a step meanwhile"
                assert group.is_suspect(micro_batch)
            group.fail(micro_batch)
        else:
            group.finish(micro_batch)
    assert group.engine.idle
    assert group.ends[("r3", 0)] == Ended("r3", 0, "error", "it failed")
    for each in requests:
        if each.id != "r3":
            assert group.tokens[(each.id, 0)] == expected_output(each)
            assert group.ends[(each.id, 0)].reason == "length"
    assert group.engine.statistics().num_free_pages == ROOMY.kv_pages


@pytest.mark.parametrize("num_rows", [2, 11])
def test_sequence_without_finite_logits_is_computed_again_and_no_other(num_rows: int) -> None:
    """Instead of its first and of its fourth token, from a prompt of one or several chunks. The others of the step get their tokens."""
    group = ToyGroup(ROOMY, num_micro_batches=2)
    requests = [request(f"r{n}", range(n, n + num_rows), max_tokens=6, seed=n) for n in range(4)]
    group.submit(*requests)
    left = [0, 3]
    while group.start() or group.running:
        micro_batch = min(group.running)
        num_tokens = len(group.tokens.get(("r2", 0), []))
        is_hit = num_tokens in left
        if group.finish(micro_batch, broken="r2" if is_hit else ""):
            left.remove(num_tokens)
    assert not left
    for each in requests:
        assert group.tokens[(each.id, 0)] == expected_output(each)
        assert group.ends[(each.id, 0)].reason == "length"
    assert group.engine.epoch == 0
    assert group.engine.statistics().num_free_pages == ROOMY.kv_pages
