"""The short form made explicit: a `deploy:` section and the facts of a model become nodes and edges.

Here: `expand_deploy`. Not here: reading the file (file.py), writing the result as YAML (written.py), fusion (fuse.py).

Per group g, in process `attention.g`:

    source -> embed -> attention -> gate -> dispatch -> experts (on servers, or here) -> combine -> attention of the next layer
                           \\-> mlp (dense layers) ----------------------------------------/    \\-> head, after the last -> source

Where the model has shared experts, the residual goes to `combine` by way of `shared`, which adds them.

The layers of the model are one cycle whose edges advance the tag. `combine` waits for the residual, the plan, and as many parts as
the plan says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrt.graph.builtin import BUILTIN
from flowrt.graph.document import Document
from flowrt.graph.facts import ModelFacts
from flowrt.graph.model import Edge, LayerSet, Node, TagStep
from flowrt.graph.notation import parse_ids
from flowrt.graph.placement import Held, check_ids, even_placement, experts_map, held_experts, held_option
from flowrt.graph.schema import DeploySection, ExpertsSection, LimitsSection

_EXPERTS_PATH = ("deploy", "experts")


@dataclass
class _Drawing:
    """Nodes and edges as they are added."""

    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[str, Edge] = field(default_factory=dict)

    def node(self, name: str, operator: str, process: str, line: int, outputs: Sequence[str] = (), **options: Any) -> None:
        built = BUILTIN[operator]
        self.nodes[name] = Node(
            name=name,
            operator=operator,
            process=process,
            inputs=built.input_ports(),
            outputs=built.output_ports(outputs),
            options=options,
            stateful=built.stateful,
            batches=built.batches,
            line=line,
        )

    def edge(self, source: str, target: str, **rest: Any) -> Edge:
        """`source` and `target` are node.port."""
        (from_node, _, from_port), (to_node, _, to_port) = source.rpartition("."), target.rpartition(".")
        edge = Edge(from_node, from_port, to_node, to_port, **rest)
        self.edges[edge.name] = edge
        return edge


def expand_deploy(
    deploy: DeploySection, limits: LimitsSection, facts: ModelFacts, document: Document
) -> tuple[dict[str, Node], dict[str, Edge]]:
    """The nodes and edges that `deploy` stands for. Raises GraphError for what is impossible with this model."""
    if not facts.moe_layers:
        document.fail(("model", "path"), "the model has no layer with experts; flowrt serves Mixture-of-Experts models")
    _check_counts(deploy, limits, facts, document)
    held = _held(deploy.experts, facts, document)
    drawing = _Drawing()
    for group in range(deploy.attention.groups):
        _group(drawing, group, held, bool(deploy.experts.servers), deploy, facts, document)
    if deploy.experts.servers:
        line = document.line(_EXPERTS_PATH)
        for server, by_layer in enumerate(held):
            drawing.node(f"experts.{server}", "experts", f"experts.{server}", line, experts=held_option(by_layer))
    return drawing.nodes, drawing.edges


def deploy_roles(deploy: DeploySection) -> dict[str, Any]:
    """process -> its role's section (with device and threads)."""
    roles: dict[str, Any] = {f"attention.{group}": deploy.attention for group in range(deploy.attention.groups)}
    return roles | {f"experts.{server}": deploy.experts for server in range(deploy.experts.servers)}


def _group(
    drawing: _Drawing, group: int, held: Sequence[Held], remote: bool, deploy: DeploySection, facts: ModelFacts, document: Document
) -> None:
    process = at = f"attention.{group}"
    last = facts.num_layers - 1
    moe, dense = frozenset(facts.moe_layers), frozenset(facts.dense_layers)
    on_moe, on_dense = _layers(moe, facts), _layers(dense, facts)
    line = document.line(("deploy", "attention"))
    servers = [f"server{server}" for server in range(len(held))]

    drawing.node(f"{at}.source", "source", process, line, num_layers=facts.num_layers)
    drawing.node(f"{at}.embed", "embed", process, line)
    drawing.node(f"{at}.attention", "attention", process, line)
    drawing.node(f"{at}.gate", "gate", process, line)
    if dense:
        drawing.node(f"{at}.mlp", "mlp", process, line)
    drawing.node(f"{at}.dispatch", "dispatch", process, line, servers, servers={str(s): held_option(h) for s, h in enumerate(held)})
    if facts.shared_experts:
        drawing.node(f"{at}.shared", "shared", process, line)
    if not remote:
        drawing.node(f"{at}.experts", "experts", process, line, experts=held_option(held[0]))
    drawing.node(f"{at}.combine", "combine", process, line)
    drawing.node(f"{at}.head", "head", process, line)

    drawing.edge(f"{at}.source.tokens", f"{at}.embed.tokens")
    drawing.edge(f"{at}.source.layout", f"{at}.attention.layout")
    drawing.edge(f"{at}.source.sampling", f"{at}.head.sampling", tag=TagStep("to_layer", last) if last else TagStep())
    drawing.edge(f"{at}.embed.x", f"{at}.attention.x", layers=LayerSet(frozenset({0})))
    drawing.edge(f"{at}.attention.normed", f"{at}.gate.x", layers=on_moe)
    drawing.edge(f"{at}.attention.normed", f"{at}.dispatch.x", layers=on_moe)
    drawing.edge(f"{at}.gate.routing", f"{at}.dispatch.routing")
    if facts.shared_experts:
        drawing.edge(f"{at}.attention.normed", f"{at}.shared.x", layers=on_moe)
        drawing.edge(f"{at}.attention.residual", f"{at}.shared.residual", layers=on_moe)
        drawing.edge(f"{at}.shared.y", f"{at}.combine.residual")
    else:
        drawing.edge(f"{at}.attention.residual", f"{at}.combine.residual", layers=on_moe)
    drawing.edge(f"{at}.dispatch.plan", f"{at}.combine.plan")
    _experts_edges(drawing, at, servers, remote, deploy, document)
    if dense:
        drawing.edge(f"{at}.attention.normed", f"{at}.mlp.x", layers=on_dense)
        drawing.edge(f"{at}.attention.residual", f"{at}.mlp.residual", layers=on_dense)
    for producer, layers in (("combine", moe), ("mlp", dense)):
        onward = layers - {last}
        if onward:
            drawing.edge(f"{at}.{producer}.y", f"{at}.attention.x", layers=LayerSet(onward), tag=TagStep("next_layer"))
    drawing.edge(f"{at}.{'combine' if last in moe else 'mlp'}.y", f"{at}.head.x", layers=LayerSet(frozenset({last})))
    drawing.edge(f"{at}.head.tokens", f"{at}.source.tokens", tag=TagStep("next_step"))


def _experts_edges(drawing: _Drawing, at: str, servers: Sequence[str], remote: bool, deploy: DeploySection, document: Document) -> None:
    """The request to each server, and the answer that brings its credit back."""
    link = deploy.links.attention_experts
    rest: dict[str, Any] = {"line": document.line(("deploy", "links", "attention-experts"))}
    if remote:
        rest |= {
            "transport": link.transport,
            "link": link.link,
            "credits": link.credits or deploy.attention.micro_batches,
            "open": link.open,
        }
    for index, server in enumerate(servers):
        experts = f"experts.{index}" if remote else f"{at}.experts"
        request = drawing.edge(f"{at}.dispatch.{server}", f"{experts}.rows", **rest)
        drawing.edge(f"{experts}.results", f"{at}.combine.parts", **(rest | {"credits": 0}), response_to=request.name)


def _layers(layers: frozenset[int], facts: ModelFacts) -> LayerSet:
    """No filter where all layers are meant."""
    return LayerSet() if len(layers) == facts.num_layers else LayerSet(layers)


def _check_counts(deploy: DeploySection, limits: LimitsSection, facts: ModelFacts, document: Document) -> None:
    attention, experts = deploy.attention, deploy.experts
    if attention.micro_batches > limits.max_num_seqs:
        most = limits.max_num_seqs
        text = f"{attention.micro_batches} micro-batches share {most} sequences; write at most {most}, or raise limits.max_num_seqs"
        document.fail(("deploy", "attention", "micro_batches"), text)
    if experts.replicas > max(experts.servers, 1):
        document.fail(
            (*_EXPERTS_PATH, "replicas"),
            f"{experts.replicas} replicas need as many servers, there are {experts.servers}; "
            f"write {f'replicas: {experts.servers} or less' if experts.servers else 'replicas: 1'}, or servers: {experts.replicas}",
        )
    most = facts.num_experts * experts.replicas
    if experts.placement is None and experts.servers > most:
        text = f"{experts.servers} servers are more than {facts.num_experts} experts x {experts.replicas} replicas; write at most {most}"
        document.fail((*_EXPERTS_PATH, "servers"), text)
    if not experts.servers and deploy.links.attention_experts.transport != "auto":
        text = "servers: 0 leaves no link to the experts; write deploy.experts.servers: 1 or more, or remove the transport"
        document.fail(("deploy", "links", "attention-experts", "transport"), text)
    needed = attention.micro_batches
    credits = deploy.links.attention_experts.credits
    if experts.servers and credits is not None and credits < needed:
        text = f"{credits} is too few: {needed} micro-batches keep {needed} messages on the way; write at least {needed}"
        document.fail(("deploy", "links", "attention-experts", "credits"), text)


def _held(experts: ExpertsSection, facts: ModelFacts, document: Document) -> list[Held]:
    """What each server holds, by layer; one entry, everything, when there are no servers."""
    if experts.placement is None:
        servers = even_placement(facts.num_experts, max(experts.servers, 1), experts.replicas)
        return [dict.fromkeys(facts.moe_layers, ids) for ids in servers]
    path = (*_EXPERTS_PATH, "placement")
    if not experts.servers:
        document.fail(path, "servers: 0 leaves nothing to place; write deploy.experts.servers: 1 or more, or remove placement")
    held: dict[int, Held] = {}
    for key, option in experts.placement.items():
        server = _server(key, experts.servers)
        if server is None:
            document.fail((*path, key), f"there is no server {key!r}; write experts.0 to experts.{experts.servers - 1}")
        if server in held:
            document.fail((*path, key), f"server {server} is there twice; write it once")
        try:
            held[server] = held_experts(option, facts.moe_layers)
            check_ids(held[server], facts.num_experts)
        except ValueError as error:
            document.fail((*path, key), str(error))
    left_out = [server for server in range(experts.servers) if server not in held]
    if left_out:
        document.fail(path, f"experts.{left_out[0]} is left out; write what it holds, or servers: {len(held)}")
    placement = experts_map(held, facts.num_experts)
    for layer in facts.moe_layers:
        fewest = min(range(facts.num_experts), key=lambda expert: len(placement.servers_of(expert, layer)))
        num_replicas = len(placement.servers_of(fewest, layer))
        if num_replicas == 0:
            document.fail(path, f"expert {fewest} has no replica in layer {layer}; place it on at least one server")
        if num_replicas < experts.replicas:
            text = f"expert {fewest} has {num_replicas} replicas in layer {layer}, expected {experts.replicas}; place it on more servers"
            document.fail(path, text)
    return [held[server] for server in range(experts.servers)]


def _server(key: str, num_servers: int) -> int | None:
    text = key.removeprefix("experts.")
    ids = parse_ids(text) if text.isascii() and text.isdigit() and len(text) < 6 else ()
    return ids[0] if len(ids) == 1 and ids[0] < num_servers else None
