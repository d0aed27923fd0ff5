"""Selection policies: which firings a call takes, and when it waits for more."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.selection import BoundedWait, DomainTurns, OldestFirst, policy_of
from flowrt.graph.model import Node
from flowrt.graph.settings import Batching, Emulation
from flowrt.transports.wire.message import Tag


def firings(*layers: int) -> list[Firing]:
    return [Firing("n", Tag("s", step=step, layer=layer), {}) for step, layer in enumerate(layers)]


def test_a_node_without_batches_takes_the_oldest_alone() -> None:
    waiting = firings(3, 3, 4)
    assert OldestFirst().select(waiting, 0.0) == waiting[:1]


@pytest.mark.parametrize(
    ("batching", "layers", "selected"),
    [
        (Batching(), (3, 4, 3, 3), [0, 2, 3]),
        (Batching(same_layer=False), (3, 4, 3, 3), [0, 1, 2, 3]),
        (Batching(), (3,), [0]),
        (Batching(min_tags=2, max_wait_seconds=1.0), (3, 4, 4), [1, 2]),  # complete before the older one
        (Batching(min_tags=1, max_wait_seconds=1.0), (3, 4, 4), [0]),
    ],
)
def test_a_batch_has_one_layer_and_enough_tags(batching: Batching, layers: tuple[int, ...], selected: list[int]) -> None:
    found = BoundedWait(batching).select(firings(*layers), 7.0)
    assert not isinstance(found, float)
    assert [firing.tag.step for firing in found] == selected


def test_a_batch_waits_for_more_for_a_bounded_time() -> None:
    policy = BoundedWait(Batching(min_tags=3, max_wait_seconds=2.0))
    waiting = firings(3, 4)
    assert policy.select(waiting[:1], 10.0) == 12.0
    assert policy.select(waiting, 11.0) == 12.0  # the second layer's would wait until 13
    assert policy.select(waiting, 12.0) == waiting[:1]
    assert policy.select(waiting[1:], 12.5) == 13.0
    assert policy.select(waiting[1:], 13.0) == waiting[1:]
    assert policy.select(firings(4), 14.0) == 16.0  # a new batch begins to wait


def test_the_wait_of_a_dropped_batch_is_forgotten() -> None:
    policy = BoundedWait(Batching(min_tags=3, max_wait_seconds=2.0))
    assert policy.select(firings(3), 10.0) == 12.0
    assert policy.select(firings(4), 11.0) == 13.0
    assert policy.select([Firing("n", Tag("s", step=9, layer=3), {})], 12.5) == 14.5


def test_emulated_hardware_waits_dilated() -> None:
    node = Node("n", "m:f", "p", batches=Batching(min_tags=2, max_wait_seconds=1e-3))
    policy = policy_of(node, Emulation(100.0))
    assert policy.select(firings(0), 5.0) == pytest.approx(5.1)
    assert isinstance(policy_of(Node("n", "m:f", "p")), OldestFirst)


def test_a_wait_that_ends_a_rounding_error_early_is_over() -> None:
    """Otherwise the next wait would end at the same moment, and so on for ever."""
    policy = BoundedWait(Batching(min_tags=2, max_wait_seconds=0.002))
    waiting = firings(3)
    now = 1000.3
    end = policy.select(waiting, now)
    assert isinstance(end, float)
    assert policy.select(waiting, math.nextafter(end, 0.0)) == waiting


THREE = Batching(domains=(("a", "d"), ("b",), ("c",)), turn_calls=2)


def of(*names: str, layer: int = 3) -> list[Firing]:
    """Firings of sources, each with the incarnation in its name as tags have it."""
    return [Firing("n", Tag(f"{name}@1", step=step, layer=layer), {}) for step, name in enumerate(names)]


def sources(found: object) -> list[str]:
    assert isinstance(found, list)
    return [firing.tag.source.partition("@")[0] for firing in found]


def test_a_call_has_tags_of_one_domain_and_turns_pass_in_order() -> None:
    policy = DomainTurns(THREE)
    waiting = of("b", "a", "d", "c", "a")
    assert sources(policy.select(waiting, 0.0)) == ["a", "d", "a"]
    assert sources(policy.select(of("b", "c"), 0.0)) == ["b"]  # the first has none left
    assert sources(policy.select(of("c", "a"), 0.0)) == ["c"]  # the second is empty, and skipped


def test_a_turn_ends_after_a_bound_while_another_domain_waits() -> None:
    """With several domains waiting all the time, a batch waits for at most (domains - 1) x turn_calls calls of others."""
    policy = DomainTurns(THREE)
    served = [sources(policy.select(of("c", "b", "a"), 0.0))[0] for _ in range(12)]
    assert served == ["a", "a", "b", "b", "c", "c"] * 2


@given(st.integers(2, 4), st.integers(1, 3), st.lists(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2))), min_size=1, max_size=40))
def test_a_domain_that_waits_is_passed_over_by_a_bounded_number_of_calls(domains: int, turn_calls: int, arrivals: list[set[Any]]) -> None:
    """Whatever arrives before each call, in which layer: a domain with a batch has its next call after at most (domains - 1) x turn_calls
    calls of others."""
    names = "abcd"[:domains]
    policy = DomainTurns(Batching(domains=tuple((name,) for name in names), turn_calls=turn_calls))
    waiting: list[Firing] = []
    passed_over = dict.fromkeys(names, 0)
    for step, arrived in enumerate([*arrivals, *[set()] * 4 * domains * turn_calls]):
        waiting += [Firing("n", Tag(f"{names[domain % domains]}@1", step=step, layer=layer), {}) for domain, layer in sorted(arrived)]
        if not waiting:
            continue
        selected = policy.select(waiting, 0.0)
        (served,) = set(sources(selected))
        for name in {name for name in sources(waiting) if name != served}:
            passed_over[name] += 1
            assert passed_over[name] <= (domains - 1) * turn_calls
        passed_over[served] = 0
        waiting = [firing for firing in waiting if firing not in selected]


def test_a_turn_goes_on_while_no_other_domain_waits() -> None:
    policy = DomainTurns(THREE)
    assert [sources(policy.select(of("a"), 0.0)) for _ in range(5)] == [["a"]] * 5
    assert sources(policy.select(of("a", "b"), 0.0)) == ["b"]  # at once: the bound was reached before


def test_the_turn_passes_while_a_domain_waits_for_more_tags() -> None:
    policy = DomainTurns(Batching(min_tags=2, max_wait_seconds=1.0, domains=(("a",), ("b",))))
    assert policy.select(of("a"), 10.0) == 11.0
    assert sources(policy.select(of("a", "b", "b"), 10.5)) == ["b", "b"]
    assert sources(policy.select(of("a"), 11.0)) == ["a"]


def test_emulated_hardware_keeps_turns() -> None:
    policy = policy_of(Node("n", "m:f", "p", batches=THREE), Emulation(10.0))
    assert isinstance(policy, DomainTurns)
