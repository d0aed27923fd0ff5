"""Level L2: the time of a step of a deployment, and where it goes. Pure.

The exchange is run part by part (events.py) for a few steps. Up to `max_ranks` ranks each have their own events. In larger deployments
equal groups act together, and servers take places by their load in each layer, the heaviest one alone. Deep models are run with fewer
layers, and the others take the mean time of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from flowrt.costs.experts import Floats, touched
from flowrt.costs.work import FiringLoad
from flowrt.dataflow.selection import BoundedWait, DomainTurns, SelectionPolicy
from flowrt.errors import UserError
from flowrt.graph.kinds import kind_of
from flowrt.planner.deployment import Deployment, RankTimes
from flowrt.planner.events import Counts, Events, Exchange, GroupCall, GroupNodes, ModelledRank, Observed, ServerNodes, SharedDevices, Turn
from flowrt.planner.parts import Draws, ExactDraws, FoldedDraws, GroupFold, ServerFold

LEVEL = "L2"
MAX_RANKS = 64  # that each have their own events
MAX_LAYERS, FOLDED_LAYERS = 16, 8  # with experts, that are run; the latter where ranks act together
MIN_STEPS = 2  # that are measured
# Layers of the steps before the measured ones, in which groups come to take turns at servers, and of the measured ones; fewer in brief
# runs, and where ranks act together.
WARM_LAYERS, MEASURED_LAYERS = 24, 48
BRIEF_WARM_LAYERS, BRIEF_MEASURED_LAYERS = 1, 16


@dataclass(frozen=True)
class StepLoad:
    """The rows of a step of one micro-batch, the tokens of context of all its sequences, the scores (FiringLoad), and the rows that are
    sampled; 0: all."""

    rows: float
    kv_tokens: float
    scores: float = 0.0
    sampled: float = 0.0

    def share(self, part: float) -> StepLoad:
        """That of a micro-batch with this part of the rows."""
        return StepLoad(*(part * getattr(self, each.name) for each in fields(self)))


@dataclass(frozen=True)
class PredictedStep:
    """A steady state in which every group computes steps of its batch, one after another. All times are seconds.

    `seconds`: of a step, the mean over groups and their micro-batches. `by_group`: of each group. `operators`: what one rank with the
    operator computes of it in that time, over all micro-batches. `group_busy`, `server_busy`: the share of the time in which each rank
    computes. `slowest_rank`: the busiest one, and its share. `slowest_edge`: the ranks between which messages take longest, and how long.
    """

    seconds: float
    by_group: Floats
    operators: Mapping[str, float]
    group_busy: Floats
    server_busy: Floats
    dispatch: Counts
    combine: Counts
    slowest_rank: tuple[str, float]
    slowest_edge: tuple[str, str, float]
    num_sequences: float
    tokens_per_step: float
    level: str = LEVEL

    @property
    def bubble_share(self) -> float:
        """The share of the time in which a group waits for experts or messages, on average."""
        return float(max(0.0, 1 - self.group_busy.mean()))

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all groups."""
        return float(self.num_sequences * self.tokens_per_step / self.seconds)


def step_times(
    deployment: Deployment,
    batch: float | Sequence[float],
    context: float,
    *,
    seed: int = 0,
    max_ranks: int = MAX_RANKS,
    max_layers: int = MAX_LAYERS,
    apart: bool = False,
) -> PredictedStep:
    """Steps in which each group decodes `batch` sequences (one number, or one per group) of `context` tokens each, new ones included.

    `apart`: groups begin at random layers, as when requests come one by one. Otherwise all begin at once or, where there are prefill
    workers, one after another, as these compute the prompts. How groups meet at servers may depend on that for good.
    `max_ranks`, `max_layers`: how many are run on their own; fewer take less time. Raises UserError for numbers that are not positive.
    """
    batches = np.broadcast_to(np.asarray(batch, dtype=np.float64), (len(deployment.groups),))
    if not np.isfinite(batches).all() or (batches <= 0).any() or not (math.isfinite(context) and context > 0):
        raise UserError("a step needs a sequence in each group, and a token of context; give positive numbers")
    split = {float(own): split_batch(float(own), deployment.micro_batches) for own in np.unique(batches)}
    per_sequence = deployment.rows_per_sequence
    loads = {own: tuple(StepLoad(size * per_sequence, size * context) for size in sizes) for own, sizes in split.items()}
    run = _StepRun(deployment, [loads[float(own)] for own in batches], seed, max_ranks, max_layers, apart)
    return run.times(float(batches.sum()))


def prefill_times(
    deployment: Deployment, rows: float, context: float, *, seed: int = 0, max_ranks: int = MAX_RANKS, max_layers: int = MAX_LAYERS
) -> PredictedStep:
    """Steps in which each group computes so many rows of one prompt, of which each attends to `context` tokens on average."""
    if not (math.isfinite(rows) and rows > 0 and math.isfinite(context) and context > 0):
        raise UserError("a step of a prompt needs rows and context; give positive numbers")
    load = StepLoad(rows, context, rows * context / 2, max(1.0, rows / context))
    return times_of_loads(deployment, [[load]] * len(deployment.groups), seed=seed, max_ranks=max_ranks, max_layers=max_layers)


def times_of_loads(
    deployment: Deployment,
    loads: Sequence[Sequence[StepLoad]],
    *,
    seed: int = 0,
    max_ranks: int = MAX_RANKS,
    max_layers: int = MAX_LAYERS,
    apart: bool = False,
    brief: bool = False,
) -> PredictedStep:
    """Steps of these loads: of each group, by micro-batch. Each group counts as one sequence. `brief`: less exact, in a quarter of the
    time."""
    return _StepRun(deployment, loads, seed, max_ranks, max_layers, apart, brief).times(float(len(deployment.groups)))


def split_batch(batch: float, micro_batches: int) -> list[float]:
    """The sequences of each micro-batch; no more micro-batches are used than there are sequences."""
    used = max(1, min(micro_batches, int(batch)))
    if batch != int(batch):
        return [batch / used] * used
    return [batch // used + (number < batch % used) for number in range(used)]


class _StepRun:
    """One run of events. `loads`: of each group, by micro-batch."""

    def __init__(
        self,
        deployment: Deployment,
        loads: Sequence[Sequence[StepLoad]],
        seed: int,
        max_ranks: int,
        max_layers: int,
        apart: bool = False,
        brief: bool = False,
    ) -> None:
        model = deployment.model
        self._is_apart, self._chance = apart, np.random.default_rng((1, seed))
        self._deployment, self._loads = deployment, loads
        moe_layers = (*model.moe_layers, *model.moe_layers[-1:] * deployment.draft_tokens)
        self._layers = moe_layers[: max_layers if deployment.num_ranks <= max_ranks else min(max_layers, FOLDED_LAYERS)]
        self._num_left = len(moe_layers) - len(self._layers)
        is_long = deployment.num_ranks <= max_ranks and not brief
        warm, measured = (WARM_LAYERS, MEASURED_LAYERS) if is_long else (BRIEF_WARM_LAYERS, BRIEF_MEASURED_LAYERS)
        self._num_warm_steps = math.ceil(warm / len(self._layers))
        self._num_steps = max(MIN_STEPS, math.ceil(measured / len(self._layers)))
        self._events, self._observed = Events(), Observed()
        shared = deployment.shared_devices
        self._devices = None if shared is None else SharedDevices(self._events, shared)
        self._turns: list[Turn] = []
        self._num_warm = self._num_done = 0
        self._window = math.nan
        if not deployment.is_local:
            self._build(seed, max_ranks)

    # --- what is run -------------------------------------------------------------------------------------------------------

    def _build(self, seed: int, max_ranks: int) -> None:
        deployment, events = self._deployment, self._events
        is_exact = deployment.num_ranks <= max_ranks
        max_places, max_folds = (len(deployment.servers), len(deployment.groups)) if is_exact else (max_ranks // 7, max_ranks // 6)
        self._server_folds = fold_servers(deployment, max(1, max_places))
        self._group_folds = fold_groups(deployment, self._loads, self._server_folds, max(1, max_folds))
        rows = [fold.rows for fold in self._group_folds]
        draws: Draws = (
            ExactDraws(deployment, rows, seed) if is_exact else FoldedDraws(deployment, self._group_folds, self._server_folds, seed)
        )
        self._ranks = [
            ModelledRank(events, self._observed, deployment.groups[fold.groups[0]].process, len(fold.groups), self._devices)
            for fold in self._group_folds
        ]
        self._servers: list[ModelledRank] = []
        self._members: list[list[int]] = []  # the servers of each place
        self._place_servers(is_exact)
        exchange, sizes = Exchange(events, deployment.link), (deployment.dispatch_bytes, deployment.combine_bytes)
        held = deployment.experts_held
        for rank, own in zip(self._servers, self._members, strict=True):
            num_held = float(held[own].mean())
            ServerNodes(rank, deployment.servers[own[0]].times, _policy(deployment), num_held, exchange, self._servers, sizes)
        self._nodes = []
        for number, (rank, fold) in enumerate(zip(self._ranks, self._group_folds, strict=True)):
            group = deployment.groups[fold.groups[0]]
            segments = [self._segments(group.times, load) for load in _mean_loads([self._loads[each] for each in fold.groups])]
            combine = _combine_seconds(group.times)
            node = GroupNodes(rank, group.name, number, segments, combine, draws, exchange, self._servers, sizes, deployment, self._on_step)
            self._nodes.append(node)
            self._turns += node.turns

    def _place_servers(self, is_exact: bool) -> None:
        homes = {group.home: number for number, group in enumerate(self._deployment.groups) if group.home is not None}
        rank_of = {each: rank for rank, fold in zip(self._ranks, self._group_folds, strict=True) for each in fold.groups}
        for fold in self._server_folds:
            first = 0
            for size in fold.sizes:
                units = fold.units[first : first + size]
                first += size
                for own in zip(*units, strict=True):
                    home = homes.get(own[0])
                    name = self._deployment.servers[own[0]].name
                    rank = ModelledRank(self._events, self._observed, name, size, self._devices) if home is None else rank_of[home]
                    self._servers.append(rank)
                    self._members.append([*own])
        if is_exact:  # by number, as ExactDraws counts them
            placed = sorted(zip(self._members, self._servers, strict=True), key=lambda each: each[0])
            self._members, self._servers = [own for own, _ in placed], [rank for _, rank in placed]

    def _segments(self, times: RankTimes, load: StepLoad) -> list[GroupCall]:
        model, left, found = self._deployment.model, list(self._layers), []
        seconds = _operator_seconds(times, load)
        before = seconds("embed")
        for layer in range(model.num_layers):
            if layer not in model.moe_layers:
                before += seconds("attention") + seconds("mlp")
            elif layer in left:
                left.remove(layer)
                found.append(self._segment(layer, before, seconds))
                before = 0.0
        found += [self._segment(layer, 0.0, seconds) for layer in left]  # of drafts
        return [*found, GroupCall(None, before + seconds("head") * (1 + self._deployment.draft_tokens))]

    def _segment(self, layer: int, before: float, seconds: Callable[[str], float]) -> GroupCall:
        after = seconds("shared") if self._deployment.model.shared_expert_width else 0.0
        return GroupCall(layer, before + seconds("attention") + seconds("gate") + seconds("dispatch"), after)

    def _on_step(self, turn: Turn) -> None:
        if len(turn.ends) == self._num_warm_steps:
            self._num_warm += 1
            if self._num_warm == len(self._turns):
                self._observed.is_on, self._window = True, self._events.now
                for each in self._turns:  # what ran before does not count: with unequal loads, others were not warm then
                    each.num_warm = len(each.ends)
        elif self._observed.is_on and len(turn.ends) == turn.num_warm + self._num_steps:
            self._num_done += 1

    # --- what comes out ----------------------------------------------------------------------------------------------------

    def times(self, num_sequences: float) -> PredictedStep:
        deployment = self._deployment
        if deployment.is_local:
            return self._local(num_sequences)
        for number, node in enumerate(self._nodes):
            if self._is_apart:
                node.start_at([float(each) for each in self._chance.random(len(node.turns))])
            else:
                node.start_after(self._start_delays(number, len(node.turns)))
        self._events.run(lambda: self._num_done == len(self._turns))
        observed, window = self._observed, self._events.now - self._window
        by_fold = [
            sum(_mean_step(turn, self._num_steps) for turn in node.turns) / len(node.turns) + self._num_left * node.layer_seconds.mean
            for node in self._nodes
        ]
        by_group, group_busy = np.empty(len(deployment.groups)), np.empty(len(deployment.groups))
        for fold, rank, own in zip(self._group_folds, self._ranks, by_fold, strict=True):
            by_group[[*fold.groups]], group_busy[[*fold.groups]] = own, min(1.0, observed.busy[rank.name] / window)
        server_busy = np.empty(len(deployment.servers))
        for rank, members in zip(self._servers, self._members, strict=True):
            server_busy[members] = min(1.0, observed.busy[rank.name] / window)
        seconds = float(by_group.mean())
        operators = self._operators()
        operators["experts"] = observed.operators["experts"] / window / len(deployment.servers) * seconds
        busiest = max(observed.busy, key=observed.busy.__getitem__)
        edge = max(observed.edges, key=lambda each: observed.edges[each].mean, default=("", ""))
        return PredictedStep(
            seconds,
            by_group,
            operators,
            group_busy,
            server_busy,
            observed.dispatch,
            observed.combine,
            (busiest, min(1.0, observed.busy[busiest] / window)),
            (*edge, observed.edges[edge].mean if edge[0] else 0.0),
            num_sequences,
            deployment.tokens_per_step,
        )

    def _start_delays(self, number: int, micro_batches: int) -> list[float]:
        """Seconds until each micro-batch of a group has its first sequence: prefill workers compute prompts for all groups in turn."""
        prefill, load = self._deployment.prefill, self._loads[self._group_folds[number].groups[0]][0]
        if not prefill:
            return [0.0] * micro_batches
        context = max(1.0, load.kv_tokens / load.rows)
        of_prompt = call_seconds(self._deployment, prefill[0].times, StepLoad(context, context, context**2 / 2, 1))
        seconds = min(of_prompt, call_seconds(self._deployment, self._deployment.groups[0].times, load))  # long prompts show nothing else
        return [seconds * (1 + (number + turn * len(self._nodes)) // len(prefill)) for turn in range(micro_batches)]

    def _operators(self) -> dict[str, float]:
        """Seconds of a step of a group in each of its operators, the mean over groups."""
        found, calls = dict[str, float](), _num_calls(self._deployment)
        cached: dict[tuple[int, tuple[StepLoad, ...]], dict[str, float]] = {}
        for group, loads in zip(self._deployment.groups, self._loads, strict=True):
            key = id(group.times), tuple(loads)
            if key not in cached:
                cached[key] = {
                    name: num * sum(_operator_seconds(group.times, load)(name) for load in loads) for name, num in calls.items() if num
                }
            for name, seconds in cached[key].items():
                found[name] = found.get(name, 0.0) + seconds / len(self._deployment.groups)
        return {name: seconds for name, seconds in found.items() if seconds}

    def _local(self, num_sequences: float) -> PredictedStep:
        """Steps without an exchange: each micro-batch is one call, and they take turns."""
        deployment, operators = self._deployment, self._operators()
        loads = [[_expected_load(deployment, load.rows) for load in own] for own in self._loads]
        num_layers = len(self._layers) + self._num_left
        experts = [
            num_layers * sum(group.times.seconds("experts", load) for load in own)
            for group, own in zip(deployment.groups, loads, strict=True)
        ]
        by_group = np.array(
            [
                sum(call_seconds(deployment, group.times, load) for load in own)
                for group, own in zip(deployment.groups, self._loads, strict=True)
            ]
        )
        by_group += np.array(experts)
        if deployment.shared_devices is not None:  # all compute at once
            by_group *= max(1.0, len(by_group) / deployment.shared_devices)
        by_group += deployment.gap_seconds
        operators["experts"] = sum(experts) / len(experts)
        busy, none = 1 - deployment.gap_seconds / by_group, Counts()
        slowest = int(by_group.argmax())
        return PredictedStep(
            float(by_group.mean()),
            by_group,
            operators,
            busy,
            np.empty(0),
            none,
            none,
            (deployment.groups[slowest].name, float(busy[slowest])),
            ("", "", 0.0),
            num_sequences,
            deployment.tokens_per_step,
        )


def call_seconds(deployment: Deployment, times: RankTimes, load: StepLoad) -> float:
    """What a group computes in a step of this load beside routed experts."""
    seconds = _operator_seconds(times, load)
    return sum(num * seconds(name) for name, num in _num_calls(deployment).items())


def _num_calls(deployment: Deployment) -> dict[str, int]:
    """How often each operator of a group is called in a step of a micro-batch."""
    model = deployment.model
    num_moe, num_dense = len(model.moe_layers) + deployment.draft_tokens, model.num_layers - len(model.moe_layers)
    of_moe = {"gate": num_moe, "dispatch": num_moe, "shared": num_moe if model.shared_expert_width else 0}
    return {"embed": 1, "attention": num_moe + num_dense, "mlp": num_dense, "head": 1 + deployment.draft_tokens} | of_moe


def fold_servers(deployment: Deployment, max_places: int) -> tuple[ServerFold, ...]:
    """The places of all servers: those of one kind (times, number of servers in a unit) share a fold."""
    inside = {each for server in deployment.servers if server.behind for each in server.behind}
    units = [
        (number, *(each for each in server.behind if each != number))
        for number, server in enumerate(deployment.servers)
        if server.behind or number not in inside
    ]
    kinds: dict[Any, list[tuple[int, ...]]] = {}
    for unit in units:
        kinds.setdefault((len(unit), *(id(deployment.servers[each].times) for each in unit)), []).append(unit)
    found, first = [], 0
    for key, own in kinds.items():
        places = max(1, min(len(own), round(max_places * len(own) / len(units)) if len(own) < len(units) else max_places))
        sizes = [1] * len(own) if places == len(own) else _growing(len(own), places)
        found.append(ServerFold(tuple(own), tuple(sizes), first))
        first += len(sizes) * key[0]
    return tuple(found)


def _growing(total: int, places: int) -> list[int]:
    """Sizes of places that add up to `total`: the first is 1, each later one larger by about the same factor."""
    edges = [0, *np.unique(np.round(total ** (np.arange(places) / max(1, places - 1)))).astype(int).tolist()]
    edges[-1] = total
    return [after - before for before, after in pairwise(edges) if after > before]


def fold_groups(
    deployment: Deployment, loads: Sequence[Sequence[StepLoad]], servers: Sequence[ServerFold], max_folds: int
) -> tuple[GroupFold, ...]:
    """Groups that act together: of one domain, with equal times and similar loads. Where groups hold experts, those of a place."""
    groups = deployment.groups
    if max_folds >= len(groups):
        chosen: list[tuple[int, ...]] = [(number,) for number in range(len(groups))]
    elif deployment.is_colocated:
        at = {group.home: number for number, group in enumerate(groups)}
        chosen = []
        for fold in servers:
            first = 0
            for size in fold.sizes:
                chosen.append(tuple(at[unit[0]] for unit in fold.units[first : first + size]))
                first += size
    else:
        kinds: dict[Any, list[int]] = {}
        for number, group in enumerate(groups):
            kinds.setdefault((group.domain, id(group.times), len(loads[number])), []).append(number)
        chosen = []
        for own in kinds.values():
            own.sort(key=lambda number: -sum(load.rows for load in loads[number]))
            num = max(1, min(len(own), round(max_folds * len(own) / len(groups))))
            chosen += [tuple(each.tolist()) for each in np.array_split(np.array(own), num)]
    return tuple(
        GroupFold(own, groups[own[0]].domain, tuple(load.rows for load in _mean_loads([loads[each] for each in own]))) for own in chosen
    )


def _mean_loads(loads: Sequence[Sequence[StepLoad]]) -> list[StepLoad]:
    """By micro-batch, the mean over groups with equally many of them."""
    num = max(map(len, loads))
    alike = [each for each in loads if len(each) == num]
    return [
        StepLoad(*(sum(getattr(each[at], name) for each in alike) / len(alike) for name in ("rows", "kv_tokens", "scores", "sampled")))
        for at in range(num)
    ]


def _operator_seconds(times: RankTimes, load: StepLoad) -> Callable[[str], float]:
    def seconds(operator: str) -> float:
        if kind_of(operator).ends_step:
            return times.seconds(operator, FiringLoad(load.sampled or load.rows))
        return times.seconds(operator, FiringLoad(load.rows, 0, load.kv_tokens, load.scores))

    return seconds


def _combine_seconds(times: RankTimes) -> Callable[[float, int], float]:
    """Of the responses of a layer; their messages, and those of the requests, count here."""
    return lambda num_rows, num_parts: times.seconds("combine", FiringLoad(num_rows)) + times.exchange_seconds(2 * num_parts)


def _expected_load(deployment: Deployment, rows: float) -> FiringLoad:
    """Of experts that are all in one place: pairs, and the expected number of experts with rows."""
    chances = deployment.chances(deployment.model.moe_layers[0])
    return FiringLoad(rows * deployment.model.num_experts_per_token, touched(chances, rows))


def _policy(deployment: Deployment) -> SelectionPolicy:
    return DomainTurns(deployment.batching) if deployment.batching.domains else BoundedWait(deployment.batching)


def _mean_step(turn: Turn, num_steps: int) -> float:
    return (turn.ends[turn.num_warm + num_steps - 1] - turn.ends[turn.num_warm - 1]) / num_steps
