"""Request routing: which group receives a request."""

from __future__ import annotations

from flowrt.gateway.routing import GroupLoad, choose_group


def test_group_with_min_sequences_then_min_tokens_then_first_name() -> None:
    assert choose_group({"b": GroupLoad(), "a": GroupLoad()}) == "b"
    assert choose_group({"a": GroupLoad(2, 10), "b": GroupLoad(1, 900)}) == "b"
    assert choose_group({"a": GroupLoad(1, 30), "b": GroupLoad(1, 20), "c": GroupLoad(1, 20)}) == "b"
    assert choose_group({"a": GroupLoad(9, 9), "b": GroupLoad(0, 0)}, avoid={"b"}) == "a"
    assert choose_group({"a": GroupLoad()}, avoid={"a"}) is None
    assert choose_group({}) is None
