"""How evenly the pairs and rows of steps are divided between the replicas of experts: counts, not times."""

from __future__ import annotations

import random
from statistics import mean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.graph.placement import even_placement, experts_map
from flowrt.operators.dispatch import Part, partition, repartition
from flowrt.operators.replica_choice import MAX_PIECE_PAIRS
from flowrt.operators.replica_table import ReplicaTable

TOLERANCE = 1.05  # of the ratio that independent random choices give


def max_to_mean(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts)


def draw_ids(chance: random.Random, num_rows: int, num_experts: int, num_active: int, skew: float) -> list[list[int]]:
    """Expert ids of each row. `skew` 0: all experts are alike; 1: the weights are 1, 1/2, 1/3, ..."""
    weights = [(expert + 1) ** -skew for expert in range(num_experts)]
    keys = [[chance.random() ** (1 / weight) for weight in weights] for _ in range(num_rows)]
    return [sorted(range(num_experts), key=lambda expert: -row[expert])[:num_active] for row in keys]


def shares(parts: list[Part], alive: list[int]) -> tuple[list[int], list[int]]:
    """Pairs and rows of each server that is alive."""
    by_server = {part.server: part for part in parts}
    assert by_server.keys() <= set(alive)
    found = [by_server.get(server) for server in alive]
    return [len(part.pair_P) if part else 0 for part in found], [len(part.rows_R) if part else 0 for part in found]


def by_chance(
    chance: random.Random, ids: list[list[int]], replicas: list[tuple[int, ...]], alive: list[int]
) -> tuple[list[int], list[int]]:
    """Pairs and rows of each server if every pair takes a random replica."""
    pairs: list[list[int]] = [[] for _ in range(max(alive) + 1)]
    for row, experts in enumerate(ids):
        for expert in experts:
            pairs[chance.choice(replicas[expert])].append(row)
    return [len(pairs[server]) for server in alive], [len(set(pairs[server])) for server in alive]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_shares_of_servers_are_at_least_as_even_as_by_chance(data: st.DataObject) -> None:
    num_servers = data.draw(st.integers(2, 6), label="servers")
    num_replicas = data.draw(st.integers(2, min(3, num_servers)), label="replicas")
    num_experts, num_active = data.draw(st.sampled_from([(8, 2), (32, 4), (64, 8)]), label="experts, top")
    num_rows, skew = data.draw(st.sampled_from([8, 16, 64]), label="rows"), data.draw(st.sampled_from([0.0, 0.7]), label="skew")
    dead = data.draw(st.none() | st.integers(0, num_servers - 1), label="dead server") if num_servers > num_replicas else None
    held = dict(enumerate(even_placement(num_experts, num_servers, num_replicas)))
    if data.draw(st.booleans(), label="uneven placement"):
        held[0] = tuple(sorted({*held[0], *held[1]}))
    table = experts_map({server: {0: experts} for server, experts in held.items()}, num_experts)
    alive = [server for server in range(num_servers) if server != dead]
    replicas = [*(table if dead is None else table.without_servers([dead])).table(0)]
    chance = random.Random(data.draw(st.integers(0, 10_000), label="seed"))
    order = chance.sample(range(num_experts), num_experts)  # the popular experts are anywhere
    own, drawn = [], []
    for step in range(25):
        ids = [[order[expert] for expert in row] for row in draw_ids(chance, num_rows, num_experts, num_active, skew)]
        own.append(
            shares(
                partition(torch.tensor(ids), torch.ones(num_rows, num_active), ReplicaTable.from_lists(replicas, num_servers), step), alive
            )
        )
        drawn.append(by_chance(chance, ids, replicas, alive))
    for kind in range(2):
        assert mean(max_to_mean(step[kind]) for step in own) <= TOLERANCE * mean(max_to_mean(step[kind]) for step in drawn)


@pytest.mark.parametrize(("num_servers", "num_replicas"), [(2, 2), (3, 2), (4, 2), (4, 3), (5, 2), (6, 3)])
def test_no_server_has_more_than_a_piece_above_another_replica_of_what_it_got_last(num_servers: int, num_replicas: int) -> None:
    """Of each server some piece could not have gone to a less loaded one. A lone expert is cut into pieces, so this bounds the shares."""
    chance = random.Random(num_servers)
    held = {server: {0: experts} for server, experts in enumerate(even_placement(16, num_servers, num_replicas))}
    replicas = experts_map(held, 16).table(0)
    for num_rows in (1, 2, 5, 16, 100):
        ids = torch.tensor(draw_ids(chance, num_rows, 16, 4, 1.0))
        parts = partition(ids, torch.ones(num_rows, 4), ReplicaTable.from_lists(replicas, num_servers))
        load = dict.fromkeys(range(num_servers), 0) | {part.server: len(part.pair_P) for part in parts}
        for part in parts:
            others = [min(load[server] for server in replicas[expert]) for expert in set(part.expert_P.tolist())]
            assert load[part.server] <= MAX_PIECE_PAIRS + max(others)


def test_few_pairs_of_an_expert_have_one_server_and_many_are_divided() -> None:
    table = ReplicaTable.from_lists([[0, 1], [0, 1], [1, 0]], 2)
    few = torch.tensor([[0, 1]] * MAX_PIECE_PAIRS)
    assert [part.expert_P.unique().numel() for part in partition(few, torch.ones(few.shape), table)] == [1, 1]
    lone = torch.zeros(10 * MAX_PIECE_PAIRS, 1, dtype=torch.int64)
    assert [len(part.pair_P) for part in partition(lone, torch.ones(lone.shape), table)] == [5 * MAX_PIECE_PAIRS] * 2


@pytest.mark.parametrize("num_servers", [2, 3, 4, 5, 6])
def test_steps_of_one_row_take_few_messages_and_reach_all_servers_in_turn(num_servers: int) -> None:
    held = {server: {0: experts} for server, experts in enumerate(even_placement(60, num_servers, 2))}
    replicas = experts_map(held, 60).table(0)
    table, chance, load, num_parts, by_position = ReplicaTable.from_lists(replicas, num_servers), random.Random(3), [0] * num_servers, 0, 0
    for step in range(600):
        ids = draw_ids(chance, 1, 60, 4, 0.0)
        parts = partition(torch.tensor(ids), torch.ones(1, 4), table, step)
        num_parts += len(parts)
        by_position += len({replicas[expert][step % 2] for expert in ids[0]})
        for part in parts:
            load[part.server] += len(part.pair_P)
    assert num_parts <= by_position, "a fixed replica of all experts at a time takes so many messages"
    assert max_to_mean(load) < 1.1


def test_the_pairs_of_a_lost_server_are_divided_between_the_others() -> None:
    chance, replicas = random.Random(5), [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    ids = torch.tensor(draw_ids(chance, 64, 4, 2, 0.0))
    lost, *others = partition(ids, torch.ones(64, 2), ReplicaTable.from_lists(replicas, 3))
    redispatched = repartition(lost, 2, ReplicaTable.from_lists([servers[1:] for servers in replicas], 3))
    assert [part.server for part in redispatched] == [part.server for part in others] == [1, 2]
    assert max_to_mean([len(part.pair_P) for part in redispatched]) < 1.5
