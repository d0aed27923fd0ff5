from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.reliability.expert_map import ExpertMap, servers_by_expert

MAPS = st.builds(
    lambda held, num: ExpertMap(servers_by_expert({server: [e for e in experts if e < num] for server, experts in held.items()}, num)),
    st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 7)), max_size=6),
    st.integers(1, 8),
)


def test_both_directions() -> None:
    experts = ExpertMap(servers_by_expert({0: [0, 1], 1: [1, 2]}, 4))
    assert experts.replicas == ((0,), (0, 1), (1,), ())
    assert experts.servers_of(1) == (0, 1)
    assert experts.missing() == (3,)
    assert experts.servers == (0, 1)
    assert experts.num_experts == 4


def test_a_server_leaves() -> None:
    experts = ExpertMap(servers_by_expert({0: [0, 1], 1: [1]}, 2))
    fewer = experts.without_servers([0])
    assert (fewer.replicas, fewer.missing()) == (((), (1,)), (0,))
    assert experts.replicas == ((0,), (0, 1)), "the first map has not changed"


def test_nothing_changes_nothing() -> None:
    experts = ExpertMap(servers_by_expert({0: [0, 1]}, 2))
    assert experts.without_servers([7]) is experts


def test_layers_may_differ() -> None:
    experts = ExpertMap(((0,), (0,)), by_layer={3: ((0,), (1,))})
    assert experts.servers_of(1) == experts.servers_of(1, layer=0) == (0,)
    assert experts.servers_of(1, layer=3) == (1,)
    assert experts.servers == (0, 1)
    fewer = experts.without_servers([1])
    assert fewer.missing(layer=3) == (1,)
    assert fewer.missing() == ()


def test_impossible_maps() -> None:
    with pytest.raises(ValueError, match="server 1 cannot hold expert 2; this model has experts 0 to 1"):
        servers_by_expert({1: [0, 2]}, 2)
    with pytest.raises(ValueError, match="once, ascending"):
        ExpertMap(((1, 0),))
    with pytest.raises(ValueError, match="the same number"):
        ExpertMap(((0,),), by_layer={1: ((0,), (0,))})


@given(MAPS, st.integers(0, 6))
def test_without_server_touches_only_that_server(experts: ExpertMap, server: int) -> None:
    fewer = experts.without_servers([server])
    assert server not in fewer.servers
    for expert in range(experts.num_experts):
        assert fewer.servers_of(expert) == tuple(other for other in experts.servers_of(expert) if other != server)
