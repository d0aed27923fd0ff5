"""Says in words what a plan is, what limits it, and why it lost against another. Pure."""

from __future__ import annotations

from collections.abc import Callable

from flowrt.costs.devices import CONSTANTS, FIELDS, MEASURED, Device
from flowrt.observe import duration_text
from flowrt.planner.closed_form import decode_step
from flowrt.planner.instances import MAX_LOAD, Instance, OneStage, OperatingPoint, SplitInstance, UniformInstance
from flowrt.planner.search import DeploymentPlan, Task

_AT_LIMIT = 0.97
_OBJECTIVES: dict[str, tuple[str, Callable[[DeploymentPlan], float | None]]] = {
    "throughput": ("tokens/s", lambda plan: plan.max_tokens_per_second),
    "cost": ("price", lambda plan: plan.price),
    "latency": ("between tokens", lambda plan: plan.operation.itl if plan.operation is not None else None),
    "energy": ("J/token", lambda plan: plan.joules_per_token),
}


def plan_text(plan: DeploymentPlan) -> str:
    """The instances of a plan: "2 x DP=16, EP=16 on h800"."""
    parts = [
        f"{count} x {instance_text(each)}" if count != 1 else instance_text(each)
        for each, count in zip(plan.instances, plan.counts, strict=True)
    ]
    return "; ".join(parts)


def instance_text(instance: Instance) -> str:
    if isinstance(instance, OneStage):
        return f"{'prompts' if instance.stage == 'prefill' else 'decoding'}: {instance_text(instance.whole)}"
    if isinstance(instance, UniformInstance):
        return f"{instance.strategy} on {instance.nodes.device.name}" + (", 2 batches overlap" if instance.batches > 1 else "")
    assert isinstance(instance, SplitInstance)
    more = [f"{instance.micro_batches} micro-batches"] if instance.micro_batches > 1 else []
    more += [f"{instance.domains} domains"] if instance.domains > 1 else []
    more += [f"{instance.replicas} replicas"] if instance.replicas > 1 else []
    groups = f"{_cut(instance.groups, instance.attention_tp, 'group')} on {instance.attention_nodes.device.name}"
    workers = f" + {_cut(instance.workers, instance.attention_tp, 'prefill worker')}" if instance.workers else ""
    servers = f"{_cut(instance.servers, instance.expert_tp, 'server')} on {instance.expert_nodes.device.name}"
    return f"split: {groups}{workers}, {servers}" + "".join(f", {each}" for each in more)


def _cut(num: int, degree: int, name: str) -> str:
    return f"{num} {name}{'s' if num != 1 else ''}" + (f" of TP={degree}" if degree > 1 else "")


def ratio_text(plan: DeploymentPlan) -> str:
    """Devices for prompts : decoding, and for attention : experts, where they are apart; "" for neither."""
    found = []
    for instance, count in zip(plan.instances, plan.counts, strict=True):
        if isinstance(instance, OneStage) and instance.stage == "prefill":
            decoding = sum(plan.instances[0].devices.values()) * plan.counts[0]
            found.append(f"prefill:decode {sum(instance.devices.values()) * count}:{decoding} devices")
        if isinstance(instance, SplitInstance):
            tp = instance.attention_tp
            if instance.workers:
                found.append(f"prefill:decode {instance.workers * tp}:{instance.groups * tp} devices of attention")
            found.append(f"attention:expert {(instance.groups + instance.workers) * tp}:{instance.servers * instance.expert_tp} devices")
    return ", ".join(found)


def bound_text(plan: DeploymentPlan) -> str:
    """What keeps a plan from more requests."""
    found = [_bound(plan.task, instance, rate) for instance, rate in zip(plan.instances, plan.rates, strict=True)]
    if len(found) == 2:
        weaker = min(range(2), key=lambda each: plan.counts[each] * plan.rates[each])
        return found[weaker]
    return found[0]


def _bound(task: Task, instance: Instance, rate: float) -> str:
    operation = instance.operate(rate) if rate > 0 else None
    if operation is None:
        return "no request within the limits"
    slo = task.slo
    if operation.ttft >= _AT_LIMIT * slo.ttft:
        return "ttft: prompts wait and compute"
    where = _where(instance, operation)
    if operation.itl >= _AT_LIMIT * slo.itl:
        return f"itl: {operation.batch:.0f} sequences per group{where}"
    if operation.prompt_share >= _AT_LIMIT * MAX_LOAD:
        return "computing of prompts"
    whole = instance.whole if isinstance(instance, OneStage) else instance
    if isinstance(whole, UniformInstance | SplitInstance) and operation.batch >= _AT_LIMIT * whole.max_sequences:
        return f"KV memory: {whole.max_sequences:.0f} sequences per group{where}"
    return f"experts: computing of prompts and tokens{where}"


def _where(instance: Instance, operation: OperatingPoint) -> str:
    """Where the time of a step goes."""
    whole = instance.whole if isinstance(instance, OneStage) else instance
    if not operation.batch:
        return ""
    if isinstance(whole, UniformInstance):
        share = decode_step(whole.deployment, whole.stage_batch(operation.batch), whole.workload.context).share(
            "dispatch", "combine", "reduce"
        )
        return f", exchange {100 * share:.0f} % of a step"
    assert isinstance(whole, SplitInstance)
    times = whole.layer(operation.batch / whole.micro_batches)
    period = times.period_seconds(whole.micro_batches)
    shares = whole.micro_batches * times.attention_seconds / period, whole.micro_batches * whole.domains * times.experts_seconds / period
    groups, servers = (min(1.0, share / max(1.0, *shares)) for share in shares)
    return f", groups busy {100 * groups:.0f} %, servers {100 * servers:.0f} %"


def loss_text(plan: DeploymentPlan, best: DeploymentPlan) -> str:
    """Why a plan lost against the best one."""
    unit, number = _OBJECTIVES[plan.task.objective]
    own, other = number(plan), number(best)
    if own is None or not other:
        return f"no {plan.task.objective} known: a card lacks it"
    if plan.task.objective in ("throughput", "cost") and abs(own / other - 1) < 5e-3:
        text = "equal, " + ("more devices" if plan.num_devices > best.num_devices else "higher latency")
    else:
        text = f"{100 * (own / other - 1):+.0f} % {unit}"
    return f"{text}; limited by {bound_text(plan)}"


def failure_text(plan: DeploymentPlan) -> str:
    """Why a plan does not fit."""
    slo, light, workload = plan.task.slo, plan.light_operation, plan.task.workload
    if plan.max_rate > 0 or light is None:
        return f"carries {plan.max_rate:.3g} of {workload.rate:.3g} requests/s; limited by {bound_text(plan)}"
    limits = ("ttft", light.ttft, slo.ttft), ("itl", light.itl, slo.itl)
    reasons = [f"{name} {duration_text(at)} > {duration_text(limit)}" for name, at, limit in limits if at > limit]
    if plan.rate_bound < workload.rate:
        reasons.append(f"carries {plan.rate_bound:.3g} of {workload.rate:.3g} requests/s without limits")
    return ", ".join(reasons) or f"limited by {bound_text(plan)}"


def constants_of(device: Device) -> dict[str, str]:
    """The constants that a plan used of a device, with units, by their meaning's name."""
    found = {}
    for name, (unit, _) in (*CONSTANTS.items(), *MEASURED.items()):
        value = getattr(device, FIELDS[name])
        if not value and name in MEASURED:
            continue
        plain = f"{value:g} rows" if name == "half_rows" else f"{100 * value:g} %"
        found[name] = duration_text(value) if unit == "s" else f"{value / 1e12:.0f} T{unit}" if unit == "flop/s" else plain
    return found
