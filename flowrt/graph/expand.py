"""Expands the short form: turns a `deploy:` section and the facts of a model into nodes and edges.

Per group g, in process `attention.g`:

    source -> embed -> attention -> gate -> dispatch -> experts (on servers, or here) -> combine -> attention of the next layer
                           \\-> mlp (dense layers) ----------------------------------------/    \\-> head, after the last -> source

Where the model has shared experts, the residual reaches `combine` through `shared`, which adds them. The layers of the model are one
cycle whose edges advance the tag. `combine` waits for the residual, the plan, and the number of parts in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrt.graph.builtin import BUILTIN
from flowrt.graph.document import Document
from flowrt.graph.facts import ModelFacts
from flowrt.graph.model import Edge, GraphLimits, LayerSet, Node, TagStep, edge_name
from flowrt.graph.placement import Held, check_ids, even_placement, experts_map, held_experts, held_option
from flowrt.graph.schema import DeploySection, ExpertsSection, RoleSection

_EXPERTS = ("deploy", "experts")
_LINK = ("deploy", "links", "attention-experts")


@dataclass
class _Parts:
    """Collects the nodes and edges of the expansion."""

    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[str, Edge] = field(default_factory=dict)

    def node(self, name: str, operator: str, process: str, line: int, outputs: Sequence[str] = (), **options: Any) -> None:
        built = BUILTIN[operator]
        ports = built.input_ports(), built.output_ports(outputs)
        self.nodes[name] = Node(name, operator, process, *ports, options, built.stateful, built.batches, line)

    def edge(self, source: str, target: str, **rest: Any) -> None:
        """Add an edge; `source` and `target` are node.port."""
        (from_node, _, from_port), (to_node, _, to_port) = source.rpartition("."), target.rpartition(".")
        edge = Edge(from_node, from_port, to_node, to_port, **rest)
        self.edges[edge.name] = edge


def expand_deploy(
    deploy: DeploySection, limits: GraphLimits, facts: ModelFacts, document: Document
) -> tuple[dict[str, Node], dict[str, Edge]]:
    """Expand `deploy` to nodes and edges; `limits` are those of the groups. Raises GraphError for a section that the model does not fit."""
    if not facts.moe_layers:
        document.fail(("model", "path"), "the model has no layer with experts; flowrt serves Mixture-of-Experts models")
    _check_counts(deploy, limits, facts, document)
    held = _held(deploy.experts, facts, document)
    parts = _Parts()
    for group in range(deploy.attention.groups):
        _add_group(parts, f"attention.{group}", held, bool(deploy.experts.servers), facts, document)
    if deploy.experts.servers:
        for server, by_layer in enumerate(held):
            name = f"experts.{server}"
            parts.node(name, "experts", name, document.line(_EXPERTS), experts=held_option(by_layer))
    return parts.nodes, parts.edges


def sections_by_process(deploy: DeploySection) -> dict[str, RoleSection]:
    """process -> the section of its role."""
    counts = ("attention", deploy.attention, deploy.attention.groups), ("experts", deploy.experts, deploy.experts.servers)
    return {f"{role}.{number}": section for role, section, count in counts for number in range(count)}


def _add_group(parts: _Parts, at: str, held: Sequence[Held], remote: bool, facts: ModelFacts, document: Document) -> None:
    last = facts.num_layers - 1
    moe, dense = frozenset(facts.moe_layers), frozenset(facts.dense_layers)
    on_moe = LayerSet(moe) if dense else LayerSet()  # no filter when it covers all layers
    line = document.line(("deploy", "attention"))
    servers = [f"server{server}" for server in range(len(held))]

    parts.node(f"{at}.source", "source", at, line, num_layers=facts.num_layers)
    parts.node(f"{at}.embed", "embed", at, line)
    parts.node(f"{at}.attention", "attention", at, line)
    parts.node(f"{at}.gate", "gate", at, line)
    if dense:
        parts.node(f"{at}.mlp", "mlp", at, line)
    parts.node(f"{at}.dispatch", "dispatch", at, line, servers, servers={str(s): held_option(h) for s, h in enumerate(held)})
    if facts.shared_experts:
        parts.node(f"{at}.shared", "shared", at, line)
    if not remote:
        parts.node(f"{at}.experts", "experts", at, line, experts=held_option(held[0]))
    parts.node(f"{at}.combine", "combine", at, line)
    parts.node(f"{at}.head", "head", at, line)

    parts.edge(f"{at}.source.tokens", f"{at}.embed.tokens")
    parts.edge(f"{at}.source.layout", f"{at}.attention.layout")
    parts.edge(f"{at}.source.sampling", f"{at}.head.sampling", tag=TagStep("to_layer", last) if last else TagStep())
    parts.edge(f"{at}.embed.x", f"{at}.attention.x", layers=LayerSet(frozenset({0})))
    parts.edge(f"{at}.attention.normed", f"{at}.gate.x", layers=on_moe)
    parts.edge(f"{at}.attention.normed", f"{at}.dispatch.x", layers=on_moe)
    parts.edge(f"{at}.gate.routing", f"{at}.dispatch.routing")
    if facts.shared_experts:
        parts.edge(f"{at}.attention.normed", f"{at}.shared.x", layers=on_moe)
        parts.edge(f"{at}.attention.residual", f"{at}.shared.residual", layers=on_moe)
        parts.edge(f"{at}.shared.y", f"{at}.combine.residual")
    else:
        parts.edge(f"{at}.attention.residual", f"{at}.combine.residual", layers=on_moe)
    parts.edge(f"{at}.dispatch.plan", f"{at}.combine.plan")
    for index, server in enumerate(servers):
        experts = f"experts.{index}" if remote else f"{at}.experts"
        request = f"{at}.dispatch.{server}", f"{experts}.rows"
        parts.edge(*request, line=document.line(_LINK))
        parts.edge(f"{experts}.results", f"{at}.combine.parts", line=document.line(_LINK), response_to=edge_name(*request))
    if dense:
        parts.edge(f"{at}.attention.normed", f"{at}.mlp.x", layers=LayerSet(dense))
        parts.edge(f"{at}.attention.residual", f"{at}.mlp.residual", layers=LayerSet(dense))
    for producer, layers in (("combine", moe), ("mlp", dense)):
        if onward := layers - {last}:
            parts.edge(f"{at}.{producer}.y", f"{at}.attention.x", layers=LayerSet(onward), tag=TagStep("next_layer"))
    parts.edge(f"{at}.{'combine' if last in moe else 'mlp'}.y", f"{at}.head.x", layers=LayerSet(frozenset({last})))
    parts.edge(f"{at}.head.tokens", f"{at}.source.tokens", tag=TagStep("next_step"))


def _check_counts(deploy: DeploySection, limits: GraphLimits, facts: ModelFacts, document: Document) -> None:
    attention, experts, link = deploy.attention, deploy.experts, deploy.links.attention_experts
    if attention.micro_batches > limits.max_num_seqs:
        most = limits.max_num_seqs
        text = f"{attention.micro_batches} micro-batches share {most} sequences; write at most {most}, or raise limits.max_num_seqs"
        document.fail(("deploy", "attention", "micro_batches"), text)
    if experts.replicas > max(experts.servers, 1):
        most_replicas = f"replicas: {experts.servers} or less" if experts.servers else "replicas: 1"
        text = f"{experts.replicas} replicas need as many servers, there are {experts.servers}; "
        document.fail((*_EXPERTS, "replicas"), f"{text}write {most_replicas}, or servers: {experts.replicas}")
    most = facts.num_experts * experts.replicas
    if experts.placement is None and experts.servers > most:
        text = f"{experts.servers} servers are more than {facts.num_experts} experts x {experts.replicas} replicas; write at most {most}"
        document.fail((*_EXPERTS, "servers"), text)
    if not experts.servers and link.transport != "auto":
        text = "servers: 0 leaves no link to the experts; write deploy.experts.servers: 1 or more, or remove the transport"
        document.fail((*_LINK, "transport"), text)


def _held(experts: ExpertsSection, facts: ModelFacts, document: Document) -> list[Held]:
    """The experts that each server holds, by layer. Without servers: one entry with every expert."""
    if experts.placement is None:
        servers = even_placement(facts.num_experts, max(experts.servers, 1), experts.replicas)
        return [dict.fromkeys(facts.moe_layers, ids) for ids in servers]
    path = (*_EXPERTS, "placement")
    if not experts.servers:
        document.fail(path, "servers: 0 leaves nothing to place; write deploy.experts.servers: 1 or more, or remove placement")
    names = {f"experts.{server}": server for server in range(experts.servers)}
    for name in experts.placement:
        if name not in names:
            document.fail((*path, name), f"there is no server {name!r}; write experts.0 to experts.{experts.servers - 1}")
    held: dict[int, Held] = {}
    for name, server in names.items():
        if name not in experts.placement:
            document.fail(path, f"{name} is left out; write what it holds, or lower servers")
        try:
            held[server] = held_experts(experts.placement[name], facts.moe_layers)
            check_ids(held[server], facts.num_experts)
        except ValueError as error:
            document.fail((*path, name), str(error))
    placement = experts_map(held, facts.num_experts)
    for layer in facts.moe_layers:
        expert = min(range(facts.num_experts), key=lambda expert: len(placement.servers_of(expert, layer)))
        num_replicas = len(placement.servers_of(expert, layer))
        if num_replicas < experts.replicas:
            has = f"{num_replicas} replicas" if num_replicas else "no replica"
            text = f"expert {expert} has {has} in layer {layer}, expected {experts.replicas}; place it on more servers"
            document.fail(path, text)
    return [held[server] for server in range(experts.servers)]
