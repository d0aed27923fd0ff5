"""Request routing: which group receives a request."""

from __future__ import annotations

from flowrt.gateway.routing import GroupLoad, choose_group


def test_fewest_sequences_then_fewest_tokens_then_the_first_named() -> None:
    assert choose_group({"b": GroupLoad(), "a": GroupLoad()}) == "b"
    assert choose_group({"a": GroupLoad(2, 10), "b": GroupLoad(1, 900)}) == "b"
    assert choose_group({"a": GroupLoad(1, 30), "b": GroupLoad(1, 20), "c": GroupLoad(1, 20)}) == "b"
    assert choose_group({"a": GroupLoad(9, 9), "b": GroupLoad(0, 0)}, avoid={"b"}) == "a"
    assert choose_group({"a": GroupLoad()}, avoid={"a"}) is None
    assert choose_group({}) is None
