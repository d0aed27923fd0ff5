"""Level L3: finds the deployments of a model on a cluster that serve traffic within limits, and ranks them. Pure.

Uniform instances follow MixServe's grammar (strategies.py), with prompts computed by the same devices or by instances of their own. Split
ones follow MegaScale-Infer's algorithm 1: for each degree of tensor parallelism of attention and experts, as many groups as balance both
sides, then the best number of micro-batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

from flowrt.costs.devices import Cluster, NodeGroup
from flowrt.errors import UserError
from flowrt.operators.model_config import ModelConfig
from flowrt.planner import memory
from flowrt.planner.instances import (
    Instance,
    OneStage,
    OperatingPoint,
    Slo,
    SplitInstance,
    UniformInstance,
    Workload,
    fabric_of_nodes,
    kv_transfer_seconds,
    largest_rate,
)
from flowrt.planner.strategies import Strategy, shards, strategies

Objective = Literal["throughput", "cost", "latency", "energy"]
MAX_MICRO_BATCHES = 4  # MegaScale-Infer, section 4.2: more make products of experts too small
MAX_DOMAINS = 3  # xDeepServe's deployment has as many
MAX_SERVER_DEGREE = 8  # devices that share a server or a group; inside a node
BEST_STAGES = 6  # instances of one stage, of each group of nodes, that are combined with those of the other
OVERLAPPED = 0.25  # of the uniform instances, the best of which are tried with two batches, too
REFINED = 8  # split instances whose variants are tried
MIN_DOMAIN = 2  # groups of a domain
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Task:
    """What is planned. `only`: this strategy, None: all."""

    model: ModelConfig
    cluster: Cluster
    workload: Workload
    slo: Slo
    objective: Objective = "throughput"
    skew: float = 0.0
    only: Strategy | None = None

    @property
    def dispatch_dtype(self) -> str:
        """8-bit weights are multiplied with 8-bit rows, which are dispatched as such."""
        return self.model.dtype if self.model.expert_weights == "dtype" else self.model.expert_weights


@dataclass(frozen=True)
class DeploymentPlan:
    """Instances and how many of each: of the first kind those that decode, of the second, if any, those that compute prompts. `rates`:
    requests per second within the limits, of one instance of each.
    `operation`: of the plan at the traffic's rate; None: it cannot carry it."""

    task: Task
    instances: tuple[Instance, ...]
    counts: tuple[int, ...]
    rates: tuple[float, ...]
    operation: OperatingPoint | None

    @property
    def max_rate(self) -> float:
        """Requests per second within the limits."""
        return min((count * rate for count, rate in zip(self.counts, self.rates, strict=True)), default=0.0)

    @cached_property
    def devices(self) -> Mapping[int, int]:
        """Devices by the number of their group of nodes."""
        found: Counter[int] = Counter()
        for instance, count in zip(self.instances, self.counts, strict=True):
            found.update({group: num * count for group, num in instance.devices.items()})
        return found

    @property
    def num_devices(self) -> int:
        return sum(self.devices.values())

    @property
    def is_feasible(self) -> bool:
        is_carried = self.max_rate >= self.task.workload.rate * (1 - _ROUNDING)
        return self.operation is not None and self.operation.meets(self.task.slo) and is_carried

    @cached_property
    def rate_bound(self) -> float:
        """Requests per second without limits."""
        return min(count * instance.rate_bound for count, instance in zip(self.counts, self.instances, strict=True))

    @cached_property
    def light_operation(self) -> OperatingPoint | None:
        """Under a twentieth of what it carries at most: latencies about as low as they get."""
        return operation_of(self.task, self.instances, self.counts, min(self.task.workload.rate, self.rate_bound / 20))

    @cached_property
    def shortfall(self) -> float:
        """The factor by which it misses the limit that it misses most."""
        slo, rate, light = self.task.slo, self.task.workload.rate, self.light_operation
        if self.max_rate > 0:
            return rate / self.max_rate
        return math.inf if light is None else max(rate / self.rate_bound, light.ttft / slo.ttft, light.itl / slo.itl)

    @property
    def max_tokens_per_second(self) -> float:
        """Output tokens."""
        return self.max_rate * self.task.workload.num_output

    @property
    def price(self) -> float | None:
        """In units of an L20; None: a card has no price."""
        return self._sum(lambda nodes: nodes.device.price)

    @property
    def watts(self) -> float | None:
        return self._sum(lambda nodes: nodes.device.watts)

    @property
    def joules_per_token(self) -> float | None:
        """At the traffic's rate, with all devices at their maximum power."""
        rate = self.task.workload.rate * self.task.workload.num_output
        return None if self.watts is None else self.watts / rate

    def _sum(self, number: Callable[[NodeGroup], float | None]) -> float | None:
        found = [(number(self.task.cluster.groups[group]), count) for group, count in self.devices.items()]
        return None if any(each is None for each, _ in found) else sum((each or 0.0) * count for each, count in found)

    def value(self) -> tuple[float, ...]:
        """Smaller is better. Of equal plans, the one of fewer devices and of lower latency."""
        operation, objective = self.operation, self.task.objective
        latency = (operation.itl, operation.ttft) if operation is not None else (math.inf, math.inf)
        rest = (float(self.num_devices), *latency)
        if objective == "throughput":
            return (-self.max_rate, *rest)
        if objective == "latency":
            return (*latency, float(self.num_devices))
        number = self.price if objective == "cost" else self.joules_per_token
        return (math.inf if number is None else number, *rest)


@dataclass(frozen=True)
class Relaxation:
    """One limit, and what it must become for a plan to fit."""

    limit: str  # "itl", "ttft", "rate", "devices", "memory"
    now: float
    needed: float
    plan: DeploymentPlan | None = None


@dataclass(frozen=True)
class Search:
    """`plans`: those that fit, best first. `others`: those that do not, the closest first where nothing fits. `num_tried`: instances that
    were looked at."""

    task: Task
    plans: tuple[DeploymentPlan, ...]
    others: tuple[DeploymentPlan, ...]
    num_tried: int
    relaxations: tuple[Relaxation, ...] = ()


def search(task: Task) -> Search:
    """Raises UserError for an objective that the cards of the cluster cannot answer."""
    _check_objective(task)
    uniform = [instance for instance in _uniform(task) if instance.fits]
    if task.only is not None and not uniform:
        need = f"{task.only.num_devices} devices of one kind, in whole nodes or a power of two of them, whose memory holds the model"
        raise UserError(f"--strategy {str(task.only)!r} does not fit {task.cluster.name}: it needs {need}")
    by_rate = sorted(uniform, key=lambda each: -largest_rate(each, task.slo) / each.strategy.num_devices)
    overlapped = [replace(each, batches=2) for each in by_rate[: math.ceil(OVERLAPPED * len(by_rate))] if _has_exchange(each.strategy)]
    uniform += overlapped
    split = [instance for instance in _split(task) if instance.fits] if task.only is None else []
    split += _refined(task, split)
    single: list[Instance] = [*uniform, *split]
    plans = [_plan(task, (instance,), task.slo) for instance in single]
    plans += [_plan(task, pair, task.slo) for pair in _pairs(task, uniform)]
    num_tried = len(plans)
    plans = _without_twins(sorted((plan for plan in plans if all(plan.counts)), key=DeploymentPlan.value))
    fitting = tuple(plan for plan in plans if plan.is_feasible)
    others = tuple(plan for plan in plans if not plan.is_feasible)
    if fitting:
        return Search(task, fitting, others, num_tried)
    return Search(task, (), tuple(sorted(others, key=lambda plan: plan.shortfall)), num_tried, _relaxations(task, others))


def _check_objective(task: Task) -> None:
    devices = [group.device for group in task.cluster.groups]
    key = {"cost": "price", "energy": "watts"}.get(task.objective)
    if key and not any(getattr(device, key) for device in devices):
        names = ", ".join(device.name for device in devices)
        key = "power" if key == "watts" else key
        raise UserError(f"--objective {task.objective}: no {key} is known of {names}; add it to a card of your own")


# --- instances -----------------------------------------------------------------------------------------------------------------


def _uniform(task: Task) -> Iterator[UniformInstance]:
    for number, nodes in enumerate(task.cluster.groups):
        for size in _sizes(nodes):
            if size * memory.usable_bytes(nodes.device) < memory.model_bytes(task.model):
                continue
            for strategy in strategies(task.model, size, nodes.devices_per_node):
                if task.only is not None and strategy != task.only:
                    continue
                yield UniformInstance(
                    model=task.model,
                    nodes=nodes,
                    group=number,
                    strategy=strategy,
                    workload=task.workload,
                    skew=task.skew,
                    dispatch_dtype=task.dispatch_dtype,
                )


def _has_exchange(strategy: Strategy) -> bool:
    return strategy.expert * strategy.expert_tp > 1 and strategy.pipeline == 1


def _sizes(nodes: NodeGroup) -> list[int]:
    """Devices of an instance: a power of two inside a node, then whole nodes."""
    inside = [1 << power for power in range(nodes.devices_per_node.bit_length()) if 1 << power < nodes.devices_per_node]
    few = {count for count in (1, 2, 3, 4, 5, 6, 8) if count <= nodes.nodes}
    many = {1 << power for power in range(4, nodes.nodes.bit_length())}
    return inside + [count * nodes.devices_per_node for count in sorted(few | many | {nodes.nodes})]


def _split(task: Task) -> Iterator[SplitInstance]:
    """MegaScale-Infer's algorithm 1, for each pair of groups of nodes."""
    model = task.model
    for (one, attention), (other, experts) in product(enumerate(task.cluster.groups), repeat=2):
        for tp_a, tp_e in product(_degrees(attention), _degrees(experts)):
            if not shards(model, tp_a) or model.expert_width % tp_e:
                continue
            for servers in _server_counts(task, experts, tp_e):
                room_a, room_e = attention.num_devices, experts.num_devices - servers * tp_e
                room = min(room_a, room_e) if one == other else room_a
                if room_e < 0 or room < tp_a:
                    continue
                base = SplitInstance(
                    model=model,
                    attention_nodes=attention,
                    expert_nodes=experts,
                    attention_group=one,
                    expert_group=other,
                    workload=task.workload,
                    attention_tp=tp_a,
                    servers=servers,
                    expert_tp=tp_e,
                    replicas=_replicas(task, experts, servers, tp_e),
                    dispatch_dtype=task.dispatch_dtype,
                )
                if base.fits:
                    yield from _balanced(replace(base, known=base.curves), room // tp_a)


def _degrees(nodes: NodeGroup) -> list[int]:
    most = min(MAX_SERVER_DEGREE, nodes.devices_per_node)
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _server_counts(task: Task, nodes: NodeGroup, degree: int) -> list[int]:
    """Servers that hold all experts: the fewest for their memory, then about twice as many each time, up to a server for each expert."""
    model, most = task.model, nodes.num_devices // degree
    held = math.floor(memory.usable_bytes(nodes.device) * degree / memory.expert_bytes(model)) if model.moe_layers else 0
    if not held:
        return []
    found, count = [], math.ceil(model.num_experts / held)
    while count <= min(most, model.num_experts):
        found.append(math.ceil(model.num_experts / math.ceil(model.num_experts / count)))  # no server without need
        count = max(count + 1, 2 * count)
    if found and model.num_experts <= most:
        found.append(model.num_experts)
    return sorted(set(found))


def _replicas(task: Task, nodes: NodeGroup, servers: int, degree: int) -> int:
    """Two where the memory of the servers has room, so that the death of one fails no request; else one."""
    held = math.ceil(2 * task.model.num_experts / servers)
    return 2 if servers > 1 and held * memory.expert_bytes(task.model) / degree <= memory.usable_bytes(nodes.device) else 1


def _balanced(base: SplitInstance, room: int) -> Iterator[SplitInstance]:
    """With the number of groups at which both sides compute for equally long (BALANCE), and fewer where the devices are too few; each with
    workers for prompts and without."""
    size = max(1.0, min(256.0, base.max_sequences / 3))
    ideal, ratio = _balance(base, size, room), _worker_ratio(base, size)
    for groups, with_workers in product({ideal, room}, (False, True)):
        workers = max(1, math.ceil(groups * ratio)) if with_workers else 0
        if groups + workers > room:
            groups = math.floor(room / (1 + ratio))
            workers = room - groups
        if groups < 1:
            continue
        instance = replace(base, groups=groups, workers=workers)
        filled = min(MAX_MICRO_BATCHES, instance.layer(size).smallest_micro_batches())  # equation 3
        for micro_batches in {max(1, filled - 1), filled}:
            yield replace(instance, micro_batches=micro_batches)


def _refined(task: Task, split: Sequence[SplitInstance]) -> list[SplitInstance]:
    """Variants of the best split instances: other numbers of micro-batches, of domains, of groups and workers."""
    rated = sorted(split, key=lambda each: -largest_rate(each, task.slo) / sum(each.devices.values()))[:REFINED]
    found = []
    for each, share, domains in product(rated, (0.5, 0.75, 1.0), range(1, MAX_DOMAINS + 1)):
        groups = max(1, round(each.groups * share))
        if groups % domains or (domains > 1 and groups < MIN_DOMAIN * domains):
            continue
        workers = max(1, round(each.workers * groups / each.groups)) if each.workers else 0
        for count in range(1, min(MAX_MICRO_BATCHES, math.floor(each.max_sequences)) + 1):
            found.append(replace(each, groups=groups, workers=workers, domains=domains, micro_batches=count))
    return found


def _balance(base: SplitInstance, size: float, room: int) -> int:
    """The largest number of groups for which experts compute no longer than attention."""
    low, high = 1, max(1, room)
    while low < high:
        middle = (low + high + 1) // 2
        times = replace(base, groups=middle).layer(size)
        low, high = (middle, high) if times.experts_seconds <= times.attention_seconds else (low, middle - 1)
    return low


def _worker_ratio(base: SplitInstance, size: float) -> float:
    """Workers per group at which both keep up: seconds of attention for the prompt of a request, against those for its output."""
    workload = base.workload
    prompt = base.curves.prompt.attention_seconds
    return 1.25 * prompt / (base.layer(size).attention_seconds / size * workload.num_output)


# --- plans ---------------------------------------------------------------------------------------------------------------------


def _pairs(task: Task, uniform: Sequence[UniformInstance]) -> Iterator[tuple[Instance, ...]]:
    """The best instances of both stages, by what they carry per device."""

    def best(stage: Literal["prefill", "decode"], slo: Slo) -> list[OneStage]:
        rated = [(largest_rate(each, slo) / each.whole.strategy.num_devices, each) for each in (OneStage(own, stage) for own in uniform)]
        found: list[OneStage] = []
        for group in range(len(task.cluster.groups)):
            own = sorted((each for each in rated if each[1].whole.group == group and each[0] > 0), key=lambda each: -each[0])
            found += [each for _, each in own[:BEST_STAGES]]
        return found

    yield from product(best("decode", Slo(itl=task.slo.itl)), best("prefill", Slo(ttft=task.slo.ttft)))


def _plan(task: Task, instances: tuple[Instance, ...], slo: Slo) -> DeploymentPlan:
    rates = [largest_rate(instance, slo) for instance in instances]
    room = [group.num_devices for group in task.cluster.groups]
    plan = DeploymentPlan(task, instances, _most(instances, rates, room), tuple(rates), None)
    if task.objective in ("cost", "energy") and plan.max_rate >= task.workload.rate:  # no more devices than the traffic needs
        plan = replace(plan, counts=tuple(max(1, math.ceil(task.workload.rate / rate - _ROUNDING)) for rate in rates))
    return replace(plan, operation=operation_of(task, instances, plan.counts, task.workload.rate))


def _most(instances: tuple[Instance, ...], rates: Sequence[float], room: Sequence[int]) -> tuple[int, ...]:
    """How many of each the cluster has room for; of two kinds, the numbers that carry most together."""

    def fitting(instance: Instance, left: Sequence[int]) -> int:
        return min(left[group] // num for group, num in instance.devices.items())

    if len(instances) == 1:
        return (fitting(instances[0], room),)
    first, second = instances
    best = (0.0, 0, 0)
    for num in range(1, fitting(second, room) + 1):
        left = [each - num * second.devices.get(group, 0) for group, each in enumerate(room)]
        others = fitting(first, left)
        best = max(best, (min(others * rates[0], num * rates[1]), others, num))
        if others * rates[0] < num * rates[1]:
            break
    return best[1], best[2]


def operation_of(task: Task, instances: tuple[Instance, ...], counts: tuple[int, ...], rate: float) -> OperatingPoint | None:
    """What a plan does at a rate that its instances share evenly."""
    if not all(counts):
        return None
    found = [instance.operate(rate / count) for instance, count in zip(instances, counts, strict=True)]
    if any(each is None for each in found):
        return None
    first = found[0]
    assert first is not None
    if len(found) == 1:
        return first
    second, nodes = found[1], task.cluster.groups[next(iter(instances[1].devices))]
    assert second is not None
    moved = kv_transfer_seconds(task.model, fabric_of_nodes(nodes), task.workload.num_input)
    return replace(first, ttft=second.ttft, itl=first.itl + moved / task.workload.num_output, prompt_share=second.prompt_share)


def _without_twins(plans: Sequence[DeploymentPlan]) -> list[DeploymentPlan]:
    """Without plans that differ from a better one in a detail only: the same strategy, or the same split, in another number of batches."""
    seen, kept = set[object](), list[DeploymentPlan]()
    for plan in plans:
        key = tuple(_kind_of(instance) for instance in plan.instances)
        if key not in seen:
            seen.add(key)
            kept.append(plan)
    return kept


def _kind_of(instance: Instance) -> tuple[object, ...]:
    if isinstance(instance, OneStage):
        instance = instance.whole
    if isinstance(instance, UniformInstance):
        return instance.group, instance.strategy
    assert isinstance(instance, SplitInstance)
    return (
        instance.attention_group,
        instance.expert_group,
        instance.attention_tp,
        instance.expert_tp,
        instance.servers,
        bool(instance.workers),
    )


# --- when nothing fits ---------------------------------------------------------------------------------------------------------


def _relaxations(task: Task, plans: Sequence[DeploymentPlan]) -> tuple[Relaxation, ...]:
    """What one limit must become, the others kept; smallest steps only."""
    workload, slo, devices = task.workload, task.slo, task.cluster.num_devices
    found: list[Relaxation] = []
    if not plans:
        most = max(task.cluster.groups, key=lambda group: memory.usable_bytes(group.device))
        return (Relaxation("memory", float(devices), float(_devices_for(task, most))),)
    free = [(plan, _at_most(task, plan)) for plan in plans]
    for limit in ("itl", "ttft"):
        other = "ttft" if limit == "itl" else "itl"
        usable = [(getattr(at, limit), plan) for plan, at in free if at is not None and getattr(at, other) <= getattr(slo, other)]
        if usable and math.isfinite(getattr(slo, limit)):
            needed, plan = min(usable, key=lambda each: each[0])
            found.append(Relaxation(limit, getattr(slo, limit), needed, plan))
    carrying = max(plans, key=lambda plan: plan.max_rate)
    if 0 < carrying.max_rate < workload.rate:
        found.append(Relaxation("rate", workload.rate, carrying.max_rate, carrying))
        per_device = max(plans, key=lambda plan: plan.max_rate / max(1, plan.num_devices))
        found.append(
            Relaxation("devices", float(devices), math.ceil(workload.rate / per_device.max_rate * per_device.num_devices), per_device)
        )
    return tuple(found)


def _at_most(task: Task, plan: DeploymentPlan) -> OperatingPoint | None:
    """The plan at the traffic's rate, with as many instances as there is room for when no limit holds."""
    counts = plan.counts
    if len(plan.instances) == 1:
        rates = [instance.rate_bound for instance in plan.instances]
        counts = _most(plan.instances, rates, [group.num_devices for group in task.cluster.groups])
    return operation_of(task, plan.instances, counts, task.workload.rate)


def _devices_for(task: Task, nodes: NodeGroup) -> int:
    """Devices of a kind that hold the weights and the KV of one sequence."""
    needed = memory.model_bytes(task.model) + task.workload.tokens * memory.kv_bytes(task.model)
    return math.ceil(needed / memory.usable_bytes(nodes.device))


def frontier(task: Task, plans: Sequence[DeploymentPlan], num_points: int = 10) -> list[tuple[float, float, DeploymentPlan]]:
    """Pareto-best points: seconds between tokens, output tokens per second of the whole cluster within that, and the plan that gives it."""
    operations = [plan.operation for plan in plans if plan.operation is not None]
    if not operations:
        return []
    low = min(each.itl for each in operations)
    high = task.slo.itl * 2 if math.isfinite(task.slo.itl) else 10 * low
    room = [group.num_devices for group in task.cluster.groups]
    found: list[tuple[float, float, DeploymentPlan]] = []
    for place in range(num_points):
        itl = low * max(1.0, high / low) ** (place / (num_points - 1))
        best = (0.0, plans[0])
        for plan in plans:
            rates = [largest_rate(instance, replace(task.slo, itl=itl)) for instance in plan.instances]
            counts = _most(plan.instances, rates, room)
            carried = min(count * rate for count, rate in zip(counts, rates, strict=True))
            if carried > best[0]:
                best = (carried, plan)
        if best[0] and (not found or best[0] * task.workload.num_output > found[-1][1] * 1.005):
            found.append((itl, best[0] * task.workload.num_output, best[1]))
    return found
