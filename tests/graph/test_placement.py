from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.graph.notation import format_ids, parse_ids
from flowrt.graph.placement import even_placement, held_experts, held_option

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12)).filter(lambda s: s[2] <= s[1] <= s[0] * s[2])


@given(SIZES)
def test_the_even_placement_is_even_and_complete(sizes: tuple[int, int, int]) -> None:
    num_experts, num_servers, replicas = sizes
    servers = even_placement(num_experts, num_servers, replicas)
    assert len(servers) == num_servers
    for expert in range(num_experts):
        assert sum(expert in held for held in servers) == replicas
    loads = [len(held) for held in servers]
    assert max(loads) - min(loads) <= 1
    assert all(held == tuple(sorted(set(held))) for held in servers)


def test_three_servers_with_two_replicas_hold_two_thirds_each() -> None:
    assert [len(held) for held in even_placement(24, 3, 2)] == [16, 16, 16]


@pytest.mark.parametrize("sizes", [(8, 2, 3), (8, 0, 1), (2, 5, 2), (8, 3, 0)])
def test_impossible_numbers(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        even_placement(*sizes)


@given(st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 20)).map(lambda ids: tuple(sorted(ids))), min_size=1))
def test_held_experts_survive_being_written(held: dict[int, tuple[int, ...]]) -> None:
    layers = sorted(held)
    assert held_experts(held_option(held), layers) == held


@given(st.sets(st.integers(0, 60)))
def test_ids_survive_being_written(ids: set[int]) -> None:
    assert parse_ids(format_ids(ids)) == tuple(sorted(ids))


@pytest.mark.parametrize("text", ["1-", "-1", "a", "1;2", "1-2-3", "3-1", "1,1", "0-99999999", "0-9999999999999", "1,,2"])
def test_invalid_ids_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_ids(text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"0-1": "0", "1": "0"}, "layer 1 is given twice"),
        ({"7": "0"}, "layer 7 has no experts"),
        ({"0": ["0"]}, "names no experts"),
        ([1], "names no experts"),
        (True, "names no experts"),
    ],
)
def test_invalid_options_are_refused(option: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        held_experts(option, (0, 1))
