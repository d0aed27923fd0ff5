"""Steps computed without an expert: which tokens are marked, and until when."""

from __future__ import annotations

from engine.toy_group import request
from group_tokens import request_named

from flowrt.actors.control import Request
from flowrt.actors.outputs import TokenEvent
from flowrt.engine.engine import Engine
from flowrt.graph.settings import GraphLimits

LIMITS = GraphLimits(max_num_seqs=4, kv_pages=16, page_size=2, max_tokens=8, max_num_batched_tokens=4)


def engine_of(*requests: Request, limits: GraphLimits = LIMITS) -> Engine:
    engine = Engine(limits, 1, 64, 100, ())
    for each in requests:
        engine.submit(each)
    return engine


def step(engine: Engine, degraded: bool = False) -> list[tuple[str, int, bool]]:
    """One step to its end: (request, choice, marked) of each token that it gave."""
    start = engine.next_step(0)
    assert start is not None
    decisions = engine.step_done(0, start.step, [7] * len(start.batch.samples), degraded=degraded)
    return [(request_named(each.request), each.choice, each.degraded) for each in decisions if isinstance(each, TokenEvent)]


def test_from_a_degraded_step_on_the_rest_of_the_request_is_marked_and_no_other() -> None:
    engine = engine_of(request("a", (1, 2), max_tokens=4))
    assert step(engine) == [("a", 0, False)]
    assert step(engine, degraded=True) == [("a", 0, True)]
    engine.submit(request("b", (3, 4), max_tokens=4))
    assert step(engine) == [("a", 0, True), ("b", 0, False)], "a reads keys and values of the degraded step"


def test_a_prompt_whose_first_chunk_was_degraded_gives_marked_tokens() -> None:
    engine = engine_of(request("a", range(1, 7), max_tokens=2))
    assert step(engine, degraded=True) == []
    assert step(engine) == [("a", 0, True)]


def test_choices_that_share_pages_of_a_degraded_step_are_marked() -> None:
    engine = engine_of(request("a", (1, 2, 3), max_tokens=2, n=2))
    assert step(engine, degraded=True) == [("a", 0, True)]
    assert sorted(step(engine)) == [("a", 0, True), ("a", 1, True)]


def test_a_step_that_is_rolled_back_marks_nothing() -> None:
    engine = engine_of(request("a", (1, 2), max_tokens=4))
    assert engine.next_step(0) is not None
    engine.roll_back()
    assert step(engine) == [("a", 0, False)]


def test_sequence_recomputed_from_the_first_token_is_not_marked() -> None:
    """Four pages of two tokens: b gives its pages to a, and comes back when a has ended."""
    limits = GraphLimits(max_num_seqs=4, kv_pages=4, page_size=2, max_tokens=8, max_num_batched_tokens=16)
    engine = engine_of(request("a", (1, 2), max_tokens=7), request("b", (3, 4), max_tokens=7), limits=limits)
    output = step(engine, degraded=True)
    assert ("b", 0, True) in output
    while any(name == "a" for name, _, _ in output):
        output = step(engine)
    assert engine.statistics().num_preemptions > 0
    assert output == [("b", 0, False)]
