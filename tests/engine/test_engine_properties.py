"""Engine invariants under drawn requests, micro-batches, limits, cancels and rollbacks."""

from __future__ import annotations

from engine.toy_group import ToyGroup, expected_output, request
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.graph.settings import GraphLimits

TEXT = [(7 * number) % 97 for number in range(40)]
BEGINNING = st.builds(lambda num_tokens, rest: [*TEXT[:num_tokens], *rest], st.integers(1, 40), st.lists(st.integers(0, 96), max_size=2))
PROMPT = st.lists(st.integers(0, 96), min_size=1, max_size=40) | BEGINNING
EOS = (13, 57)


@st.composite
def drawn_limits(draw: st.DrawFn) -> GraphLimits:
    return GraphLimits(
        max_num_seqs=draw(st.integers(1, 9)),
        kv_pages=draw(st.integers(1, 14)),
        page_size=draw(st.sampled_from([1, 2, 4, 8])),
        max_tokens=24,
        max_num_batched_tokens=draw(st.integers(1, 40)),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        dynamic_micro_batches=draw(st.booleans()),
        prefix_states=draw(st.integers(0, 4)),
    )


@settings(max_examples=120, deadline=None)
@given(
    limits=drawn_limits(),
    num_micro_batches=st.integers(1, 4),
    strict=st.booleans(),
    recurrent=st.booleans(),
    target_seconds=st.sampled_from([0.0, 0.0, 0.5, 1.1, 2.5]),
    data=st.data(),
)
def test_every_schedule_gives_the_tokens_of_a_request_alone(
    limits: GraphLimits, num_micro_batches: int, strict: bool, recurrent: bool, target_seconds: float, data: st.DataObject
) -> None:
    limits = limits.replace(target_step_seconds=target_seconds)
    chunk_tokens = data.draw(st.integers(1, limits.max_num_batched_tokens)) if strict else 0
    group = ToyGroup(limits, num_micro_batches, EOS, chunk_tokens, recurrent)
    drawn = st.tuples(PROMPT, st.integers(1, 24), st.sampled_from([1, 1, 1, 2, 4]), st.integers(0, 9))
    requests = [
        request(
            f"r{number}",
            prompt,
            max_tokens,
            seed=number,
            ignore_eos=bool(number % 2),
            n=num_choices,
            min_tokens=min(min_tokens, max_tokens),
            presence_penalty=1.0 if number % 3 == 0 else 0.0,
            cache_salt="other" if number % 5 == 4 else "",
        )
        for number, (prompt, max_tokens, num_choices, min_tokens) in enumerate(data.draw(st.lists(drawn, min_size=1, max_size=12)))
    ]
    pending = list(requests)
    cancelled: set[str] = set()
    failed: set[str] = set()  # requests whose suspect failed again
    for event in data.draw(
        st.lists(st.sampled_from(["submit", "submit", "step", "step", "step", "cancel", "roll back", "fail", "repeat"]), max_size=60)
    ):
        match event:
            case "submit" if pending:
                group.submit(pending.pop(0))
            case "step":
                group.start()
                if group.running:
                    group.finish(data.draw(st.sampled_from(sorted(group.running))))
            case "cancel":
                victim = data.draw(st.sampled_from(requests))
                cancelled.add(victim.id)
                group.take(group.engine.cancel(victim.id, 0, data.draw(st.sampled_from([None, 0, 1]))))
            case "roll back":
                group.roll_back()
            case "fail":
                group.start()
                if group.running:
                    failed.update(group.fail(data.draw(st.sampled_from(sorted(group.running)))))
            case "repeat":
                done = [each for each in requests if each not in pending]
                if done:
                    group.submit(data.draw(st.sampled_from(done)))
    group.submit(*pending)
    group.run(max)
    for each in requests:
        num_pages = -(-(len(each.prompt_token_ids) + each.max_tokens - 1) // limits.page_size)
        ends = {key: ended for key, ended in group.ends.items() if key[0] == each.id}
        if num_pages > limits.kv_pages or len(ends) < each.params.n:  # refused, or cancelled before it came: one word for all
            ended = list(ends.values())[-1]
            assert (ended.reason == "abort" and each.id in cancelled) or each.id in failed or num_pages > limits.kv_pages
            continue
        for choice in range(each.params.n):
            key = (each.id, 0, choice)[: 3 if choice else 2]
            tokens = group.tokens.get(key, [])
            expected = expected_output(each, EOS, choice)
            reason = ends[key].reason
            if reason in ("abort", "error"):
                assert each.id in (cancelled if reason == "abort" else failed)
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
                assert ends[key].num_tokens == len(tokens)
                assert reason == ("stop" if expected[-1] in EOS and not each.params.ignore_eos else "length")


@settings(max_examples=40, deadline=None)
@given(limits=drawn_limits(), num_micro_batches=st.integers(1, 3), data=st.data())
def test_an_old_request_ends_while_new_ones_keep_coming(limits: GraphLimits, num_micro_batches: int, data: st.DataObject) -> None:
    """No starvation: with one new request per step, the first one still ends within a bound that only its elders set."""
    room = limits.kv_pages * limits.page_size
    first = request("first", [3] * data.draw(st.integers(1, max(1, min(room - 4, 30)))), max_tokens=min(5, room), ignore_eos=True)
    group = ToyGroup(limits, num_micro_batches)
    for number in range(data.draw(st.integers(0, 6))):
        group.submit(request(f"elder{number}", [number], max_tokens=min(8, room), seed=number))
    group.submit(first)
    for number in range(600):
        group.submit(request(f"r{number}", [number % 97], max_tokens=min(24, room), seed=number))
        group.start()
        group.finish(
            data.draw(st.sampled_from(sorted(group.running))) if number < 30 else sorted(group.running)[number % len(group.running)]
        )
        if ("first", 0) in group.ends:
            break
    assert ("first", 0) in group.ends
