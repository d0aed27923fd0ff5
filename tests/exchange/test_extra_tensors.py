"""Extra tensors of a KV transfer: they arrive with the KV, all of them checked, or the transfer fails."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from exchange.test_kv_transfer import LAYERS, TOKENS, Pair

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.schemas import parse_spec
from flowrt.exchange.kv_headers import ChunkHeader
from flowrt.transports.wire.message import Tag

EXTRAS = {"hidden": parse_spec("float32[3]"), "number": parse_spec("int64[]")}
STEP = (0, 0, 5)
HIDDEN = torch.arange(12.0).view(4, 3)
NUMBERS = torch.tensor([4, 5, 6, 7])


def rows(pair: Pair, name: str, tensor: torch.Tensor, step: tuple[int, int, int] = STEP) -> None:
    """The rows of a step arrive."""
    firing = Firing("p.extra", Tag("p.source@1", step[0], step[1], step[2], LAYERS - 1), {"rows": Payload((tensor,))})
    pair.pack.on_extra(name, firing)


def begun() -> Pair:
    """A transfer of a prompt whose last token is in row 2 of a step that has begun."""
    pair = Pair(extras=EXTRAS)
    pair.pack.extras.begin_step(STEP, {("other", 0): 1, ("a", 0): 2})
    pair.begin()
    return pair


def is_last(chunk: Payload) -> bool:
    return chunk.header_as(ChunkHeader).is_last


def test_the_rows_of_the_last_token_arrive_with_the_kv() -> None:
    pair = begun()
    for name, tensor in (("hidden", HIDDEN), ("number", NUMBERS)):
        rows(pair, name, tensor, step=(0, 0, 4))  # of another step
        rows(pair, name, tensor)
    while not pair.ends:
        assert pair.emitted == []
        pair.respond()
    assert pair.ends == [("a", 0, "")]
    assert pair.is_equal()
    (found,) = pair.emitted
    assert torch.equal(found["hidden"], HIDDEN[2])
    assert torch.equal(found["number"], NUMBERS[2])


def test_the_last_chunk_waits_for_them() -> None:
    """An operator beside the head may end after the step."""
    pair = begun()
    rows(pair, "number", NUMBERS)
    pair.run()
    assert pair.unpack._transfers["a", 0].received.count(TOKENS) == LAYERS - 1
    assert (pair.ends, pair.emitted) == ([], [])
    rows(pair, "hidden", HIDDEN)
    pair.finish()
    assert len(pair.emitted) == 1


def test_a_step_that_is_computed_again_makes_them_void() -> None:
    pair = Pair(extras=EXTRAS)
    pair.pack.extras.begin_step(STEP, {("a", 0): 2})
    rows(pair, "hidden", -HIDDEN)
    rows(pair, "number", -NUMBERS)
    newer = (1, 0, 6)
    pair.pack.extras.begin_step(newer, {("a", 0): 0})
    pair.begin()
    pair.run()
    assert pair.ends == []
    rows(pair, "hidden", -HIDDEN)  # late
    rows(pair, "hidden", HIDDEN, newer)
    rows(pair, "number", NUMBERS, newer)
    pair.run()
    assert [(found["hidden"].tolist(), found["number"].item()) for found in pair.emitted] == [(HIDDEN[0].tolist(), 4)]


def _changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Payload], Payload]:
    return lambda chunk: Payload((*chunk.tensors[:2], change(chunk.tensors[2]), *chunk.tensors[3:]), chunk.header)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_changed(lambda hidden: hidden + 1), "the bytes of its extra tensors do not match their hash"),
        (_changed(lambda hidden: hidden.double()), "its extra tensor hidden is float64[3], expected float32[3]"),
        (_changed(lambda hidden: hidden[:2]), "its extra tensor hidden is float32[2], expected float32[3]"),
        (lambda chunk: Payload(chunk.tensors[:3], chunk.header), "it has 1 extra tensors, expected 2"),
        (lambda chunk: Payload(chunk.tensors[:2], chunk.header), "it has 0 extra tensors, expected 2"),
        (
            lambda chunk: Payload(chunk.tensors, msgspec.structs.replace(chunk.header_as(ChunkHeader), is_last=False)),
            "it has 2 extra tensors, expected 0",
        ),
    ],
)
def test_wrong_ones_end_the_transfer(change: Callable[[Payload], Payload], why: str) -> None:
    pair = begun()
    rows(pair, "hidden", HIDDEN)
    rows(pair, "number", NUMBERS)
    while not pair.ends:
        pair.respond(lambda chunk: change(chunk) if is_last(chunk) else chunk)
    assert pair.ends == [("a", 0, f"p sent a chunk of layer {LAYERS - 1} that does not fit: {why}")]
    assert pair.emitted == []


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (HIDDEN.double(), "the row of hidden is float64[3], float32[3] is declared"),
        (HIDDEN[:2], "the row of hidden is float32[2,3], float32[3] is declared"),
        (HIDDEN[0, 0], "the row of hidden is float32[], float32[3] is declared"),
    ],
)
def test_rows_that_do_not_fit_end_the_transfer(tensor: torch.Tensor, why: str) -> None:
    pair = begun()
    rows(pair, "number", NUMBERS)
    rows(pair, "hidden", tensor)
    pair.run()
    assert pair.ends == [("a", 0, f"p sent no chunk: {why}")]


def test_rows_that_do_not_come_end_the_transfer_of_a_committed_step() -> None:
    pair = Pair(extras=EXTRAS)
    pair.pack.extras.begin_step(STEP, {("a", 0): 2})
    pair.compute(4, TOKENS)
    pair.begin()
    pair.pack.on_failed(Tag("p.source@1", *STEP, 0), "no rows")
    pair.run()
    assert pair.ends == [], "the step may be computed again"
    pair.complete()
    pair.run()
    assert pair.ends == [("a", 0, "p sent no chunk: no rows")]


def test_rows_that_a_rollback_drops_end_the_transfer_of_a_committed_step() -> None:
    """An operator beside the head computes them when a step of another micro-batch fails."""
    for arrive in ({"number": NUMBERS}, {"number": NUMBERS, "hidden": HIDDEN}):
        pair = begun()
        for name, tensor in arrive.items():
            rows(pair, name, tensor)
        pair.complete(epoch=1)
        pair.run()
        fault = "" if "hidden" in arrive else "p sent no chunk: a rollback has dropped the rows of its extra tensors"
        assert pair.ends == [("a", 0, fault)]


def test_they_are_free_when_the_attempt_has_ended() -> None:
    pair = begun()
    rows(pair, "hidden", HIDDEN)
    pair.pack.extras.forget_ended(lambda request_id, attempt: request_id == "other")
    assert list(pair.pack.extras._prompts) == [("other", 0)]
