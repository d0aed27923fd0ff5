"""Writes a plan as a graph file, with where it comes from. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flowrt.operators.model_config import ModelConfig
from flowrt.planner.instances import STEP_TOKENS, Instance, SplitInstance, UniformInstance
from flowrt.planner.search import DeploymentPlan

PAGE_TOKENS = 16
_MAX_SEQS, _MAX_PAGES, _MAX_MESSAGE = 4096, 1 << 24, 1 << 34  # bounds of graph files (graph/settings.py)


def is_expressible(plan: DeploymentPlan) -> bool:
    """Whether a graph file can say it: flowrt cuts layers by expert and sequence, not along tensors, and has one graph per instance."""
    return len(plan.instances) == 1 and _is_expressible(plan.instances[0])


def _is_expressible(instance: Instance) -> bool:
    if isinstance(instance, SplitInstance):
        return instance.attention_tp == instance.expert_tp == 1
    return (
        isinstance(instance, UniformInstance)
        and instance.strategy.attention_tp * instance.strategy.expert_tp * instance.strategy.pipeline == 1
    )


def graph_of(plan: DeploymentPlan, model_path: str) -> dict[str, Any]:
    """The keys of a graph file for one instance of an expressible plan. `model_path`: a checkpoint, or the name of a card."""
    instance, task = plan.instances[0], plan.task
    assert isinstance(instance, UniformInstance | SplitInstance)
    num_sequences = min(_MAX_SEQS, _sequences(plan))
    room = instance.max_sequences * task.workload.tokens  # in memory; twice what so many sequences of mean length need is enough
    needed = 2 * num_sequences * (task.workload.num_input + task.workload.num_output)
    row_bytes = task.model.hidden_size * task.model.item_bytes + 32  # of a message, with its number, expert and weight
    limits = {
        "max_num_seqs": num_sequences,
        "page_size": PAGE_TOKENS,
        "kv_pages": min(_MAX_PAGES, max(1, math.floor(min(room, needed) / PAGE_TOKENS))),
        "max_num_batched_tokens": STEP_TOKENS,
        "max_message_bytes": min(_MAX_MESSAGE, STEP_TOKENS * task.model.num_experts_per_token * row_bytes),
    }
    model: dict[str, Any] = {"path": model_path}
    if task.model.weights != "dtype":
        model |= {"weights": task.model.weights, "expert_weights": task.model.expert_weights}
    if task.model.activations != "dtype":
        model["activations"] = task.model.activations
    deploy, devices = _split(instance) if isinstance(instance, SplitInstance) else _uniform(instance, task.model)
    return {"flowrt": 1, "model": model, "deploy": deploy, "limits": limits, "emulate": {"dilation": 1, "devices": devices}}


def _sequences(plan: DeploymentPlan) -> int:
    """Of a group at the most requests that keep the limits, so that the graph keeps them, too."""
    instance, rate = plan.instances[0], plan.rates[0]
    operation = instance.operate(rate) if rate > 0 else None
    return 1 if operation is None else max(1, math.ceil(operation.batch))


def _split(instance: SplitInstance) -> tuple[dict[str, Any], dict[str, str]]:
    link = _link(instance)
    attention: dict[str, Any] = {"groups": instance.groups, "micro_batches": instance.micro_batches}
    if instance.domains > 1:
        attention["domains"] = instance.domains
    deploy: dict[str, Any] = {
        "attention": attention,
        "experts": {"servers": instance.servers, "replicas": instance.replicas},
        "links": {"attention-experts": {"link": link}},
    }
    devices = {"attention": instance.attention_nodes.device.card, "experts": instance.expert_nodes.device.card}
    if instance.workers:
        deploy["prefill"] = {"workers": instance.workers}
        deploy["links"]["prefill-attention"] = {"link": link}
        devices["prefill"] = devices["attention"]
    return deploy, devices


def _uniform(instance: UniformInstance, model: ModelConfig) -> tuple[dict[str, Any], dict[str, str]]:
    groups, nodes = instance.strategy.data, instance.nodes
    attention = {"groups": groups, "micro_batches": instance.batches}
    devices = {"attention": nodes.device.card}
    if groups == 1:
        return {"attention": {"groups": 1}, "experts": {"servers": 0}}, devices
    replicas = max(1, math.ceil(groups / model.num_experts))
    experts = {"servers": "colocated", "replicas": replicas}
    link = nodes.within if instance.strategy.num_devices <= nodes.devices_per_node else nodes.between
    return {"attention": attention, "experts": experts, "links": {"attention-experts": {"link": link}}}, devices


def _link(instance: SplitInstance) -> str:
    """The slower of both sides: the link of a graph is one kind."""
    one, other = instance.attention_nodes, instance.expert_nodes
    if instance.attention_group == instance.expert_group and sum(instance.devices.values()) <= one.devices_per_node:
        return one.within
    from flowrt.costs.links import profile_of

    return min(one.between, other.between, key=lambda name: profile_of(name).bandwidth_bytes_per_second)


def graph_text(graph: Mapping[str, Any], provenance: Sequence[str]) -> str:
    """The graph as YAML: one key in a line, what is below it in JSON, which is YAML; `provenance` as comments before."""
    lines = [f"# {line}" for line in provenance]
    for key, value in graph.items():
        if key == "deploy":
            lines += [f"{key}:", *(f"  {name}: {_flow(section)}" for name, section in value.items())]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A value in YAML's flow style, with plain words where they are safe."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(each)}" for name, each in value.items()) + "}"
    if isinstance(value, str) and value.replace("-", "").replace("_", "").isalnum() and not value[0].isdigit():
        return value
    return json.dumps(value)
