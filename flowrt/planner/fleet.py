"""Level L2 over days: how many devices a curve of traffic needs, and what failures cost under each recovery policy. Pure.

Throughput comes from steps (step.py) of the deployment with fewer ranks; time is virtual, and failures come at random, by a seed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from flowrt.errors import UserError, shown
from flowrt.planner.deployment import Deployment, even_map
from flowrt.planner.step import prefill_times, step_times
from flowrt.planner.traffic import csv_rows
from flowrt.reliability.expert_map import ExpertMap, Replicas
from flowrt.text_files import TextFileError, read_text_file

Policy = Literal["fine", "restart_role", "restart_all", "off"]  # reliability.recovery of graph files
POLICIES: tuple[Policy, ...] = get_args(Policy)
WEEK = 7 * 86400.0
FAILURES_PER_DEVICE_WEEK = 8.8 / 4096  # Expert-as-a-Service, figure 3
NUM_FAILURES = 200  # that are drawn: their number, not a span of time, makes the shares sure
MAX_RANKS, MAX_LAYERS = 24, 6  # of step.py: the same for all deployments that are compared
MAX_HOURS = 24 * 366


@dataclass(frozen=True)
class Losses:
    """Which ranks of a deployment are gone, by number."""

    groups: frozenset[int] = frozenset()
    servers: frozenset[int] = frozenset()


class Capacity:
    """Tokens per second of a deployment whose groups together decode `batch` sequences each of `context` tokens, with ranks lost or added.

    The sequences of a lost group go on in others, as far as they have room.
    """

    def __init__(self, deployment: Deployment, batch: float, context: float, seed: int = 0) -> None:
        self.deployment, self.batch, self.context, self._seed = deployment, batch, context, seed
        self._found: dict[tuple[int, int], float] = {}
        self._prefill: dict[float, float] = {}

    @property
    def num_devices(self) -> int:
        return self.deployment.num_ranks

    @cached_property
    def whole(self) -> float:
        return self.tokens_per_second(Losses())

    def tokens_per_second(self, losses: Losses) -> float:
        """0.0 when no group is left, or no server holds some expert. Equally many lost ranks lose equally much, but for that."""
        deployment = self.deployment
        placement = deployment.placement.without_servers(losses.servers)
        layers = deployment.model.moe_layers if losses.servers else ()
        if len(losses.groups) == len(deployment.groups) or any(map(placement.missing, layers)):
            return 0.0
        key = len(losses.groups), len(losses.servers)
        if key not in self._found:
            groups = [group for number, group in enumerate(deployment.groups) if number not in losses.groups]
            batch = min(float(deployment.max_num_seqs), self.batch * len(deployment.groups) / len(groups))
            self._found[key] = self.of(_less_servers(replace(deployment, groups=tuple(groups)), losses.servers), batch)
        return self._found[key]

    def of(self, deployment: Deployment, batch: float | None = None) -> float:
        """Tokens per second of another deployment, with `batch` sequences in each group."""
        batch = self.batch if batch is None else batch
        return step_times(deployment, batch, self.context, seed=self._seed, max_ranks=MAX_RANKS, max_layers=MAX_LAYERS).tokens_per_second

    def prefill_tokens_per_second(self, prompt: float) -> float:
        """Tokens of prompts that all groups compute when they do nothing else, or those of prefill workers."""
        if prompt not in self._prefill:
            deployment = self.deployment
            workers = deployment.prefill or deployment.groups
            whole = replace(deployment, groups=workers, prefill=(), micro_batches=1)
            rows = min(float(deployment.max_batched_tokens), max(1.0, prompt))
            self._prefill[prompt] = (
                rows * len(workers) / prefill_times(whole, rows, rows, seed=self._seed, max_ranks=MAX_RANKS, max_layers=MAX_LAYERS).seconds
            )
        return self._prefill[prompt]

    def requests_per_second(self, num_input: float, num_output: float) -> float:
        """What the deployment carries: its prompts and its output, on the same ranks or on those of prefill workers."""
        decoding, computing = num_output / self.whole, num_input / self.prefill_tokens_per_second(num_input)
        return 1 / (max(decoding, computing) if self.deployment.prefill else decoding + computing)


def _less_servers(deployment: Deployment, lost: Collection[int]) -> Deployment:
    """The deployment without these servers; others keep what they hold."""
    numbers = {number: place for place, number in enumerate(each for each in range(len(deployment.servers)) if each not in lost)}

    def kept(table: Replicas) -> Replicas:
        return tuple(tuple(numbers[server] for server in servers if server in numbers) for servers in table)

    placement, left = deployment.placement, [deployment.servers[number] for number in numbers]
    homes = [None if group.home is None else numbers.get(group.home) for group in deployment.groups]
    return replace(
        deployment,
        groups=tuple(replace(group, home=home) for group, home in zip(deployment.groups, homes, strict=True)),
        servers=tuple(replace(server, behind=tuple(numbers[each] for each in server.behind if each in numbers)) for server in left),
        placement=ExpertMap(kept(placement.replicas), {layer: kept(table) for layer, table in placement.by_layer.items()}),
    )


def resized(deployment: Deployment, num_groups: int, num_servers: int) -> Deployment:
    """The deployment with other numbers of groups and of servers, and experts spread evenly anew. Raises UserError where they cannot."""
    one, other = deployment.groups, deployment.servers
    groups = tuple(replace(one[number % len(one)], name=f"attention.{number}") for number in range(num_groups))
    if not other:
        return replace(deployment, groups=groups)
    servers = tuple(replace(other[number % len(other)], name=f"experts.{number}") for number in range(num_servers))
    replicas = max(1, min(map(len, deployment.placement.table(deployment.model.moe_layers[0]))))
    if deployment.is_colocated:
        groups = tuple(replace(group, home=number) for number, group in enumerate(groups))
    placement = even_map(deployment.model.num_experts, num_servers, min(replicas, num_servers))
    return replace(deployment, groups=groups, servers=servers, placement=placement)


# --- scaling ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScalePoint:
    """A size of the deployment: its ranks, and its output tokens per second with equally many sequences in each group."""

    groups: int
    servers: int
    devices: int
    tokens_per_second: float


def weak_scaling(capacity: Capacity, num_points: int = 8) -> list[ScalePoint]:
    """From half of the servers to all of them, in equal steps that are odd numbers where they can be, with groups in proportion; without
    those whose devices have too little memory."""
    deployment = capacity.deployment
    num_groups, num_servers = len(deployment.groups), len(deployment.servers)
    whole = num_servers or num_groups
    found = []
    for size in _odd_sizes(whole, num_points):
        groups = size if deployment.is_colocated or not num_servers else max(1, round(num_groups * size / num_servers))
        try:
            own = resized(deployment, groups, size if num_servers else 0)
        except UserError:  # too few servers for the experts
            continue
        if size != whole and own.shortage() is not None:  # the whole is what was asked for
            continue
        found.append(ScalePoint(groups, len(own.servers), own.num_ranks, capacity.of(own)))
    return found


def _odd_sizes(whole: int, num_points: int) -> list[int]:
    sizes = {whole, max(1, whole // 2)}
    for place in range(num_points):
        size = max(1, round(whole / 2 + whole / 2 * place / max(1, num_points - 1)))
        sizes.add(size if size % 2 or size == whole else size - 1)
    return sorted(size for size in sizes if 2 * size >= whole)


# --- a day of traffic ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HourNeed:
    """What one hour needs. `fixed`: devices in whole instances; `single`: in the smallest instances that weak scaling has, added one by
    one."""

    hour: float
    rate: float
    fixed: int
    single: int


def read_daily(path: Path) -> list[tuple[float, float]]:
    """Hours and requests per second of a CSV file with the columns hour and requests_per_second. Raises UserError with the line."""
    try:
        lines = read_text_file(path).splitlines()
    except TextFileError as error:
        raise UserError(f"--daily {path}: {error.text}; give a CSV file with hour,requests_per_second") from None
    found = list[tuple[float, float]]()
    titles, rows = csv_rows(f"--daily {path}", lines)
    if not {"hour", "requests_per_second"} <= {*titles}:
        raise UserError(f"--daily {path}:1: has no columns hour,requests_per_second; write them in the first line")
    for number_of_line, row in rows:
        numbers = [_finite(row[name]) for name in ("hour", "requests_per_second")]
        if any(number is None for number in numbers):
            raise UserError(f"--daily {path}:{number_of_line}: {shown(','.join(map(str, row.values())))} are not two numbers from 0 up")
        found.append((numbers[0] or 0.0, numbers[1] or 0.0))
    if not 0 < len(found) <= MAX_HOURS:
        raise UserError(f"--daily {path}: has {len(found)} rows; give 1 to {MAX_HOURS}")
    return found


def _finite(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def daily_needs(day: Sequence[tuple[float, float]], requests_per_second: float, scaling: Sequence[ScalePoint]) -> list[HourNeed]:
    """Devices by hour. `requests_per_second`: of a whole instance; its smaller sizes carry in proportion to their tokens per second."""
    whole = max(scaling, key=lambda point: point.devices)
    found = []
    for hour, rate in day:
        full, rest = divmod(rate, requests_per_second)
        sizes = [
            point.devices for point in scaling if requests_per_second * point.tokens_per_second / whole.tokens_per_second >= rest - 1e-9
        ]
        last = min(sizes, default=whole.devices) if rest > 1e-9 else 0
        fixed = max(1, math.ceil(rate / requests_per_second - 1e-9)) * whole.devices
        smallest = min(point.devices for point in scaling)
        found.append(HourNeed(hour, rate, fixed, max(int(full) * whole.devices + last, smallest)))
    return found


# --- failures --------------------------------------------------------------------------------------------------------------------


def lost_one_by_one(capacity: Capacity, num_lost: int, seed: int = 0) -> list[tuple[str, float]]:
    """Devices drawn at random that fail one after another and do not return: the name of each, and the share of the throughput that is
    left after it."""
    ranks = _ranks(capacity.deployment)
    order = [ranks[number] for number in np.random.default_rng(seed).permutation(len(ranks))]
    losses, found = Losses(), []
    for name, own in order[:num_lost]:
        losses = Losses(losses.groups | own.groups, losses.servers | own.servers)
        found.append((name, capacity.tokens_per_second(losses) / capacity.whole))
    return found


def _ranks(deployment: Deployment) -> list[tuple[str, Losses]]:
    """Each device, and what is lost with it."""
    homes = {group.home: number for number, group in enumerate(deployment.groups) if group.home is not None}
    found = [
        (group.process, Losses(frozenset((number,)), frozenset(() if group.home is None else (group.home,))))
        for number, group in enumerate(deployment.groups)
    ]
    found += [
        (server.name, Losses(servers=frozenset((number,)))) for number, server in enumerate(deployment.servers) if number not in homes
    ]
    return found


@dataclass(frozen=True)
class RecoveryTimes:
    """How long parts of a recovery take, in seconds. `detect`: until a failure is known, while each step waits for a lost server;
    `restart`: until a process on a spare device has loaded its weights; `operator`: until a person starts a run again that has ended."""

    detect: float
    restart: float
    operator: float


@dataclass(frozen=True)
class PolicyResult:
    """What a policy makes of the same failures. `availability`: the share of time in which tokens come; `throughput`: the share of the
    throughput without failures that there is in that time; `lost_per_failure`: seconds of full throughput that a failure costs."""

    policy: Policy
    availability: float
    throughput: float
    lost_per_failure: float


def compare_policies(
    capacity: Capacity,
    recovery: RecoveryTimes,
    failures_per_device_week: float = FAILURES_PER_DEVICE_WEEK,
    seed: int = 0,
    policies: Sequence[Policy] = POLICIES,
) -> tuple[float, list[PolicyResult]]:
    """Weeks of virtual time in which NUM_FAILURES failures come as a Poisson process, and the result of each policy for them."""
    chance, ranks = np.random.default_rng(seed), _ranks(capacity.deployment)
    mean = WEEK / (failures_per_device_week * len(ranks))
    times = np.cumsum(chance.exponential(mean, NUM_FAILURES))
    failed = [ranks[number][1] for number in chance.integers(len(ranks), size=NUM_FAILURES)]
    end = float(times[-1] + mean)
    return end / WEEK, [_run_policy(policy, capacity, recovery, [*zip(times.tolist(), failed, strict=True)], end) for policy in policies]


def _run_policy(
    policy: Policy, capacity: Capacity, recovery: RecoveryTimes, failures: Sequence[tuple[float, Losses]], end: float
) -> PolicyResult:
    """Follows the share of full throughput through time; a failure while others are being repaired adds to them."""
    spans = list[_Span]()
    for at, lost in failures:
        known = at + recovery.detect
        up = known + recovery.restart + (recovery.operator if policy == "off" else 0.0)
        spans.append(_Span(at, known, None if lost.servers else lost))  # all steps wait for a server that does not answer
        spans.append(_Span(known, up, lost if policy == "fine" else None))
        spans.append(_Span(up, up + _recompute_seconds(capacity, policy, lost), None))
    spans.sort(key=lambda span: span.begin)
    edges = sorted({0.0, end, *(span.begin for span in spans), *(span.end for span in spans)})
    longest, first, available, produced = max(span.end - span.begin for span in spans), 0, 0.0, 0.0
    for begin, stop in pairwise(edges):
        while first < len(spans) and spans[first].begin + longest <= begin:
            first += 1
        share = _share_at(capacity, islice(spans, first, None), begin)
        available += (stop - begin) * (share > 0)
        produced += (stop - begin) * share
    span, while_available = edges[-1], produced / available if available else 0.0
    return PolicyResult(policy, available / span, while_available, (span - produced) / len(failures))


class _Span(NamedTuple):
    """A time in which ranks are lost; None: nothing is computed."""

    begin: float
    end: float
    lost: Losses | None


def _share_at(capacity: Capacity, spans: Iterable[_Span], at: float) -> float:
    """The share of full throughput; `spans` by their begin."""
    groups, servers = set[int](), set[int]()
    for span in spans:
        if span.begin > at:
            break
        if span.end <= at:
            continue
        if span.lost is None:
            return 0.0
        groups |= span.lost.groups
        servers |= span.lost.servers
    lost = Losses(frozenset(groups), frozenset(servers))
    return min(1.0, capacity.tokens_per_second(lost) / capacity.whole)


def _recompute_seconds(capacity: Capacity, policy: Policy, lost: Losses) -> float:
    """Seconds in which all groups compute the KV of sequences again that were lost: those of a group, or of all groups."""
    is_partial = policy == "fine" or (policy == "restart_role" and not lost.groups)
    num = len(lost.groups if is_partial else capacity.deployment.groups)
    return num * capacity.batch * capacity.context / capacity.prefill_tokens_per_second(capacity.context) if num else 0.0


def devices_by_hour(needs: Sequence[HourNeed]) -> Mapping[str, float]:
    """Device-hours of both ways, and the share that single steps save."""
    fixed, single = sum(need.fixed for need in needs), sum(need.single for need in needs)
    peak = max(need.fixed for need in needs) * len(needs)
    return {"peak": float(peak), "fixed": float(fixed), "single": float(single), "saved": 1 - single / fixed}
