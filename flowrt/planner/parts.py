"""Draws how the rows of a step split into parts: which servers get how many rows, pairs and experts. Pure.

ExactDraws chooses the experts of each row and applies the rule by which the runtime chooses replicas. FoldedDraws draws for many groups and
servers at once: it counts pairs per expert, and orders the servers by their load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flowrt.costs.experts import Floats
from flowrt.operators.replica_choice import choose_servers
from flowrt.planner.deployment import Deployment
from flowrt.reliability.expert_map import Replicas

BLOCK_ROWS, ROWS_OF_ORDER = 512, 16  # rows whose experts are drawn at once, and in one random order of the experts


class PartLoad(NamedTuple):
    """A part for one server, or for each of several equal ones. `experts`: those that have rows, as bits of an integer, or how many where a
    part stands for those of many groups. `messages`: of each group to each server. `behind`: of a part for a trampoline, the parts of the
    servers behind it."""

    server: int
    rows: float
    pairs: float
    experts: int | float
    messages: float = 1.0
    behind: tuple[PartLoad, ...] = ()


class Draws(Protocol):
    """Draws the parts of a step. Equal seeds, equal draws."""

    def draw(self, group: int, micro_batch: int, layer: int, turn: int) -> list[PartLoad]:
        """The parts of a group's micro-batch in a layer. `turn`: a number that grows from step to step."""


def num_experts_of(parts: Sequence[PartLoad], num_held: float) -> float:
    """The experts that have rows when a server with `num_held` experts computes these parts in one call."""
    found = parts[0].experts
    if len(parts) == 1:
        return found.bit_count() if isinstance(found, int) else found
    if isinstance(found, int):
        for part in parts[1:]:
            found |= int(part.experts)
        return found.bit_count()
    left = 1.0
    for part in parts:  # independent draws: an expert is left out by all of them
        left *= max(0.0, 1 - part.experts / num_held)
    return num_held * (1 - left)


class ExactDraws:
    """Draws row by row. `rows`: of each micro-batch of each group."""

    def __init__(self, deployment: Deployment, rows: Sequence[Sequence[float]], seed: int = 0) -> None:
        self._deployment, self._rows = deployment, rows
        self._chance = np.random.default_rng(seed)
        self._num_active = deployment.model.num_experts_per_token
        self._blocks: dict[int, NDArray[np.int64]] = {}
        self._chances: dict[int, Floats] = {}
        self._only: dict[int, NDArray[np.int64]] = {}  # by layer, the servers of experts with one replica
        self._trampolines = [number for number, server in enumerate(deployment.servers) if server.behind]
        self._replicas: dict[int, list[tuple[int, ...]]] = {}  # by layer, of what a group sends to

    def draw(self, group: int, micro_batch: int, layer: int, turn: int) -> list[PartLoad]:
        expert_P = self._experts(layer, max(1, round(self._rows[group][micro_batch]))).ravel()
        deployment, num_servers = self._deployment, len(self._deployment.servers)
        sent_to = self._choose(layer, expert_P, turn)
        row_P = np.arange(len(expert_P)) // self._num_active
        found = []
        for part in _parts(sent_to, expert_P, row_P):
            if part.server < num_servers:
                found.append(part)
                continue
            trampoline = self._trampolines[part.server - num_servers]
            behind, chosen = deployment.servers[trampoline].behind, (sent_to == part.server).nonzero()[0]
            table = deployment.placement.table(layer)
            local = [[place for place, server in enumerate(behind) if server in servers] for servers in table]
            places = choose_servers(expert_P[chosen], self._num_active, local, len(behind), turn)
            inner = _parts(np.asarray(behind)[places], expert_P[chosen], row_P[chosen])
            found.append(part._replace(server=trampoline, behind=tuple(inner)))
        return found

    def _choose(self, layer: int, expert_P: NDArray[np.int64], turn: int) -> NDArray[np.int64]:
        """The server or trampoline that each pair is sent to."""
        reached = self._reached(layer)
        only_E = self._only.get(layer)
        if only_E is None:
            only_E = self._only[layer] = np.array([each[0] for each in reached if len(each) == 1])
        if len(only_E) == len(reached):
            return only_E[expert_P]
        return choose_servers(expert_P, self._num_active, reached, len(self._deployment.servers) + len(self._trampolines), turn)

    def _experts(self, layer: int, num_rows: int) -> NDArray[np.int64]:
        """The experts of the next rows [T, A], each with its chance: systematic sampling of the experts in random orders (Madow 1949)."""
        block = self._blocks.get(layer)
        if block is None or len(block) < num_rows:
            if (chances_E := self._chances.get(layer)) is None:
                chances_E = self._chances[layer] = self._deployment.chances(layer)
            num_orders = -(-max(BLOCK_ROWS, num_rows) // ROWS_OF_ORDER)
            order_OE = self._chance.random((num_orders, len(chances_E))).argsort(axis=1)
            sums = chances_E[order_OE].ravel().cumsum()  # each order adds up to the active experts
            marks = self._chance.random((num_orders, ROWS_OF_ORDER, 1)) + np.arange(self._num_active)
            marks += (self._num_active * np.arange(num_orders))[:, None, None]
            places = np.minimum(np.searchsorted(sums, marks.ravel(), side="right"), len(sums) - 1)
            block = order_OE.ravel()[places].reshape(-1, self._num_active)
        self._blocks[layer] = block[num_rows:]
        return block[:num_rows]

    def _reached(self, layer: int) -> list[tuple[int, ...]]:
        """For each expert the servers and trampolines to which a group sends its rows: trampolines in place of what is behind them."""
        found = self._replicas.get(layer)
        if found is None:
            servers = self._deployment.servers
            numbers = range(len(servers), len(servers) + len(self._trampolines))
            behind = {each: {*servers[at].behind} for each, at in zip(numbers, self._trampolines, strict=True)}
            hidden = set().union(*behind.values())
            found = [
                (*(each for each in holders if each not in hidden), *(each for each, own in behind.items() if not own.isdisjoint(holders)))
                for holders in self._deployment.placement.table(layer)
            ]
            self._replicas[layer] = found
        return found


class GroupFold(NamedTuple):
    """Equal groups that act together: their numbers, and the rows of each micro-batch of one of them."""

    groups: tuple[int, ...]
    domain: int
    rows: tuple[float, ...]


class ServerFold(NamedTuple):
    """Servers of one kind in places by their load, and how many share a place; the heaviest have the first one. A unit is a server, or a
    trampoline and the servers behind it. `first`: the number of the first place; each has as many numbers as a unit has servers."""

    units: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    first: int


class FoldedDraws:
    """Draws the pairs of each expert for many groups at once. Replicas of an expert share its pairs evenly."""

    def __init__(self, deployment: Deployment, groups: Sequence[GroupFold], servers: Sequence[ServerFold], seed: int = 0) -> None:
        self._deployment, self._groups, self._servers = deployment, groups, servers
        self._chance = np.random.default_rng(seed)
        self._holds: dict[Replicas, tuple[Floats, Floats]] = {}
        self._drawn: dict[tuple[int, int, int, int], dict[int, list[PartLoad]]] = {}
        self._by_domain: dict[int, list[int]] = {}
        for number, fold in enumerate(groups):
            self._by_domain.setdefault(fold.domain, []).append(number)

    def draw(self, group: int, micro_batch: int, layer: int, turn: int) -> list[PartLoad]:
        key = self._groups[group].domain, micro_batch, layer, turn
        drawn = self._drawn.get(key)
        if drawn is None or group not in drawn:
            drawn = self._drawn[key] = self._draw_domain(*key[:3])
        parts = drawn.pop(group)
        if not drawn:
            del self._drawn[key]
        return parts

    def _draw_domain(self, domain: int, micro_batch: int, layer: int) -> dict[int, list[PartLoad]]:
        """The parts of all groups of a domain, so that a server is heavy for all of them at once."""
        members = [each for each in self._by_domain[domain] if micro_batch < len(self._groups[each].rows)]
        num_active = self._deployment.model.num_experts_per_token
        holds_SE, num_replicas_E = self._holding(layer)
        own_C = np.array([self._groups[each].rows[micro_batch] for each in members])
        num_C = np.array([len(self._groups[each].groups) for each in members])
        shares_E = self._deployment.chances(layer) / num_active
        shares_E /= shares_E.sum()
        counts_CE = self._chance.multinomial(np.round(own_C * num_C * num_active).astype(np.int64), shares_E)
        each_CE = counts_CE / num_replicas_E
        pairs_CS, experts_CS = each_CE @ holds_SE.T, np.minimum(each_CE, 1) @ holds_SE.T
        found: dict[int, list[PartLoad]] = {each: [] for each in members}
        rows_C1 = (own_C * num_C)[:, None]
        for fold in self._servers:
            units = np.array(fold.units)
            pairs_CUB, experts_CUB = pairs_CS[:, units], experts_CS[:, units]
            order_U = np.argsort(-pairs_CUB.sum(axis=(0, 2)), kind="stable")
            starts = np.cumsum((0, *fold.sizes[:-1]))
            pairs_CPB, experts_CPB = (
                np.add.reduceat(each[:, order_U], starts, axis=1) / np.array(fold.sizes)[:, None] for each in (pairs_CUB, experts_CUB)
            )
            unit_CP = pairs_CPB.sum(axis=2)
            rows_CPB, rows_CP = _distinct_rows(pairs_CPB, rows_C1[:, :, None], num_active), _distinct_rows(unit_CP, rows_C1, num_active)
            messages_CPB = _chance_of_any(pairs_CPB / num_C[:, None, None])
            messages_CP = _chance_of_any(unit_CP / num_C[:, None])
            width = units.shape[1]
            for number, member in enumerate(members):
                for place in range(len(fold.sizes)):
                    inner = tuple(
                        PartLoad(
                            fold.first + place * width + at,
                            float(rows_CPB[number, place, at]),
                            float(pairs_CPB[number, place, at]),
                            float(experts_CPB[number, place, at]),
                            float(messages_CPB[number, place, at]),
                        )
                        for at in range(width)
                    )
                    if width == 1:
                        found[member].append(inner[0])
                        continue
                    rows, pairs, messages = rows_CP[number, place], unit_CP[number, place], messages_CP[number, place]
                    found[member].append(PartLoad(fold.first + place * width, float(rows), float(pairs), 0.0, float(messages), inner))
        return found

    def _holding(self, layer: int) -> tuple[Floats, Floats]:
        """1.0 where a server holds an expert [S, E], and the number of replicas of each expert."""
        table = self._deployment.placement.table(layer)
        found = self._holds.get(table)
        if found is None:
            holds_SE = np.zeros((len(self._deployment.servers), len(table)))
            for expert, servers in enumerate(table):
                holds_SE[list(servers), expert] = 1
            found = self._holds[table] = holds_SE, holds_SE.sum(axis=0)
        return found


def _distinct_rows(pairs: Floats, num_rows: Floats, num_active: int) -> Floats:
    """The rows among `num_rows` that have at least one of these pairs."""
    share = np.minimum(1.0, pairs / (num_rows * num_active))
    found: Floats = num_rows * (1 - (1 - share) ** num_active)
    return found


def _chance_of_any(pairs: Floats) -> Floats:
    """The chance that a group sends any pair to a server, which gets so many of its pairs on average."""
    found: Floats = np.maximum(1e-9, 1 - np.exp(-pairs))
    return found


def _parts(server_P: NDArray[np.int64], expert_P: NDArray[np.int64], row_P: NDArray[np.int64]) -> list[PartLoad]:
    """The parts of these pairs, by ascending server."""
    num_rows, num_experts = int(row_P.max()) + 1, int(expert_P.max()) + 1
    pairs_S = np.bincount(server_P)
    rows_S = np.bincount(np.unique(server_P * num_rows + row_P) // num_rows)
    masks: dict[int, int] = {}
    for server, expert in zip(*(each.tolist() for each in divmod(np.unique(server_P * num_experts + expert_P), num_experts)), strict=True):
        masks[server] = masks.get(server, 0) | 1 << expert
    return [PartLoad(server, int(rows_S[server]), int(pairs_S[server]), masks[server]) for server in masks]
