"""Expands the short form: turns a `deploy:` section and the facts of a model into the explicit form.

Per group g, in process `attention.g`, and alike per prefill worker p, in process `prefill.p`:

    source -> embed -> attention -> gate -> dispatch -> experts (on servers, or here) -> combine -> attention of the next layer
                           \\-> mlp (dense layers) ----------------------------------------/    \\-> head, after the last -> source

With `servers: colocated`, process `attention.g` also holds the `experts` node of server g, to which every group dispatches.

A prefill worker has `kv_pack` and `kv_progress` besides, and then each group has `kv_unpack`, which pulls the KV of prompts. Trampolines
(exchange/trampoline.py) are further servers of dispatch, with `forward` and `merge` in processes of servers: with A groups in a domain and
E > A servers, trampoline t serves those servers s with s % A == t, itself included.

Where the model has shared experts, the residual reaches `combine` through `shared`, which adds them. The layers of the model are one cycle
whose edges advance the tag. `combine` waits for the residual, the plan, and the number of parts in the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec import UNSET

from flowrt.document import Document
from flowrt.graph.facts import ModelFacts
from flowrt.graph.int8 import carries_rows
from flowrt.graph.model import edge_name, role_of
from flowrt.graph.notation import format_ids, parse_ids
from flowrt.graph.placement import Held, even_placement, experts_map, held_experts, held_option
from flowrt.graph.schema import (
    COLOCATED,
    AttentionSection,
    DeploySection,
    EdgeSection,
    GraphFile,
    NodeSection,
    PipelineSection,
    RoleSection,
)
from flowrt.graph.settings import Batching, GraphLimits, Numerics

MIN_SAVED_MESSAGES = 18  # from which on `trampoline: auto` uses trampolines; measured by examples/sweeps/trampoline.yaml
PULLS_IN_FLIGHT = 8  # chunks that a group requests ahead from each prefill worker
_EXPERTS = ("deploy", "experts")
# The operators of a model in transformers, by the nodes whose place they take. `attention` has the work of `gate` and `mlp` there.
_IN_LIBRARY = {name: f"transformers_{name}" for name in ("embed", "end", "head", "experts")} | {"attention": "transformers_layer"}
_LINK = ("deploy", "links", "attention-experts")


def equal_ranks(deploy: DeploySection) -> dict[str, int]:
    """One process of each kind of equal ones, with the number of processes that it stands for: those of a kind have the same nodes and
    edges, and differ in the experts that they hold. With co-located experts two, so that a group has another one to exchange with."""
    servers, trampolines = _servers(deploy), _servers_of_trampolines(deploy)
    behind = {*chain(*trampolines.values())} - trampolines.keys()
    others = set(range(len(servers))) - trampolines.keys() - behind
    groups = _groups(deploy)
    kinds = [_prefill(deploy), *((groups[:1], groups[1:]) if _is_colocated(deploy) else (groups,))]
    if not _is_colocated(deploy):
        kinds += [[servers[number] for number in sorted(kind)] for kind in (trampolines.keys(), behind, others)]
    return {kind[0]: len(kind) for kind in kinds if kind}


def expand_deploy(file: GraphFile, limits: GraphLimits, facts: ModelFacts, document: Document, folded: Collection[str] = ()) -> GraphFile:
    """The file with `deploy` expanded; `limits` are those of the groups. `folded`: the only processes to expand, those of `equal_ranks`;
    default: all. Raises GraphError for a section that the model does not fit."""
    if not facts.moe_layers:
        document.fail(("model", "path"), "the model has no layer with experts; flowrt serves Mixture-of-Experts models")
    deploy = file.deploy or DeploySection()
    _check_counts(deploy, limits, facts, document)
    held, is_colocated = _held(deploy, facts, document), _is_colocated(deploy)

    def kept(processes: list[str]) -> list[str]:
        return [process for process in processes if process in folded] if folded else processes

    prefill, groups, servers = (kept(names(deploy)) for names in (_prefill, _groups, _servers))
    number_of = {name: number for number, name in enumerate(_servers(deploy))}
    options = {str(number): held_option(experts) for number, experts in enumerate(held)}
    trampolines = {number: behind for number, behind in _servers_of_trampolines(deploy).items() if f"experts.{number}" in servers}
    nodes: dict[str, NodeSection] = {}
    edges: dict[str, EdgeSection] = {}
    batches = _batches(deploy, {*prefill, *groups})
    for process in (*prefill, *groups):
        at = {f"{name}.experts" if is_colocated else name: str(number_of[name]) for name in servers} or {f"{process}.experts": "0"}
        _add_group(nodes, edges, process, at, options, batches if is_colocated else None, facts)
    _add_transfers(nodes, edges, deploy, prefill, groups, facts)
    only_servers = [] if is_colocated else servers
    for name in only_servers:
        operator, held_here = _IN_LIBRARY["experts"] if facts.in_library else "experts", options[str(number_of[name])]
        nodes[name] = NodeSection(operator=operator, process=name, options={"experts": held_here}, batches=batches)
    for place, (number, behind) in enumerate(trampolines.items()):
        _add_trampoline(
            nodes,
            edges,
            number,
            len(held) + place,
            [each for each in behind if f"experts.{each}" in servers],
            held,
            groups,
            deploy.attention,
        )
    if deploy.experts.int8 != "none":
        _choose_int8(nodes, edges, deploy.experts.int8)
    links = deploy.links
    pairs = {
        "attention-experts": (links.attention_experts, only_servers),
        "attention-attention": (links.attention_experts, is_colocated and len(servers) > 1),
        "experts-experts": (links.attention_experts, trampolines),
        "prefill-experts": (links.attention_experts, only_servers and prefill),
        "prefill-attention": (links.prefill_attention, prefill),
    }
    by_process: dict[str, RoleSection] = dict.fromkeys(_prefill(deploy), deploy.prefill)
    by_process |= dict.fromkeys(_groups(deploy), deploy.attention)
    by_process |= {} if is_colocated else dict.fromkeys(_servers(deploy), deploy.experts)
    cores = _cores(by_process)
    by_process = {process: by_process[process] for process in (*prefill, *groups, *only_servers)}
    return file.replace(
        nodes=nodes,
        edges=edges,
        links={pair: link for pair, (link, is_used) in pairs.items() if is_used},
        processes=deploy.processes,
        micro_batches=deploy.attention.micro_batches,
        devices={process: section.device for process, section in by_process.items()},
        threads={process: section.threads for process, section in by_process.items()},
        cores={process: cores[process] for process in by_process if process in cores},
        role_numerics={role_of(process): each for process, section in by_process.items() if (each := _numerics(section))},
    )


def _numerics(section: RoleSection) -> Numerics | None:
    return section.numerics if isinstance(section, PipelineSection) else None


def _cores(by_process: Mapping[str, RoleSection]) -> dict[str, str]:
    """The cores of each process: the processes of a role share out those of the role evenly, and one by one where there are fewer cores."""
    found: dict[str, str] = {}
    for section in {id(section): section for section in by_process.values() if section.cores is not None}.values():
        processes, cores = [name for name, of in by_process.items() if of is section], parse_ids(str(section.cores))
        for number, name in enumerate(processes):
            start, end = (at * len(cores) // len(processes) for at in (number, number + 1))
            found[name] = format_ids(cores[start : max(end, start + 1)])
    return found


def _prefill(deploy: DeploySection) -> list[str]:
    return [f"prefill.{worker}" for worker in range(deploy.prefill.workers)]


def _groups(deploy: DeploySection) -> list[str]:
    return [f"attention.{group}" for group in range(deploy.attention.groups)]


def _is_colocated(deploy: DeploySection) -> bool:
    return deploy.experts.servers == COLOCATED


def _servers(deploy: DeploySection) -> list[str]:
    """The processes that are expert servers, in the order of their numbers. None where each group holds all experts."""
    servers = deploy.experts.servers
    return _groups(deploy) if isinstance(servers, str) else [f"experts.{server}" for server in range(servers)]


def _add_transfers(
    nodes: dict[str, NodeSection],
    edges: dict[str, EdgeSection],
    deploy: DeploySection,
    prefill: Sequence[str],
    groups: Sequence[str],
    facts: ModelFacts,
) -> None:
    """Let each group pull the KV of prompts from each prefill worker (xDeepServe section 5.1, figure 17: a full mesh)."""
    for worker in prefill:
        nodes[f"{worker}.kv_pack"] = NodeSection(operator="kv_pack", process=worker)
        if deploy.prefill.stream:
            progress = f"{worker}.kv_progress"
            nodes[progress] = NodeSection(operator="kv_progress", process=worker)
            edges[edge_name(f"{worker}.attention.normed", f"{progress}.rows")] = EdgeSection()
    for group in groups if prefill else ():
        unpack = f"{group}.kv_unpack"
        nodes[unpack] = NodeSection(operator="kv_unpack", process=group, options={"num_layers": facts.num_layers})
        for number, worker in enumerate(prefill):
            pull = edge_name(f"{unpack}.pull{number}", f"{worker}.kv_pack.pull")
            edges[pull] = EdgeSection(credits=max(PULLS_IN_FLIGHT, deploy.attention.micro_batches))
            edges[edge_name(f"{worker}.kv_pack.chunk", f"{unpack}.chunk")] = EdgeSection(response_to=pull, int8=deploy.prefill.int8 or None)


def _add_group(
    nodes: dict[str, NodeSection],
    edges: dict[str, EdgeSection],
    at: str,
    servers: Mapping[str, str],
    held: Mapping[str, Any],
    batches: Batching | None,
    facts: ModelFacts,
) -> None:
    """Add the pipeline of the process `at`. `servers`: the nodes with experts, of which one may be here, and the number of each; `held`:
    the experts of each server by its number, for those that are not in the graph, too."""
    last = facts.num_layers - 1
    moe, dense = set(facts.moe_layers), set(facts.dense_layers)
    on_moe = format_ids(moe) if dense else None  # no filter when it covers all layers

    def node(name: str, batches: Batching | None = None, **options: Any) -> None:
        operator = _IN_LIBRARY.get(name, name) if facts.in_library else name
        nodes[f"{at}.{name}"] = NodeSection(operator=operator, process=at, options=options, batches=batches)

    def edge(source: str, target: str, **keys: Any) -> str:
        name = edge_name(*(end if end.rpartition(".")[0] in servers else f"{at}.{end}" for end in (source, target)))
        edges[name] = EdgeSection(**keys)
        return name

    node("source", num_layers=facts.num_layers)
    node("embed")
    node("attention")
    if facts.in_library:
        node("end")
    else:
        node("gate")
        if dense:
            node("mlp")
    node("dispatch", servers={number: held[number] for number in servers.values()})
    if facts.shared_experts:
        node("shared")
    if (own := f"{at}.experts") in servers:
        node("experts", batches, experts=held[servers[own]])
    node("combine")
    node("head")

    edge("source.tokens", "embed.tokens")
    edge("source.layout", "attention.layout")
    edge("source.sampling", "head.sampling", tag=f"layer={last}" if last else None)
    edge("embed.x", "attention.x", layers="0")
    if not facts.in_library:
        edge("attention.normed", "gate.x", layers=on_moe)
    edge("attention.normed", "dispatch.x", layers=on_moe)
    edge("attention.routing" if facts.in_library else "gate.routing", "dispatch.routing", layers=on_moe if facts.in_library else None)
    if facts.shared_experts:
        edge("attention.normed", "shared.x", layers=on_moe)
        edge("attention.residual", "shared.residual", layers=on_moe)
        edge("shared.y", "combine.residual")
    else:
        edge("attention.residual", "combine.residual", layers=on_moe)
    edge("dispatch.plan", "combine.plan")
    for experts, number in servers.items():
        request = edge(f"dispatch.server{number}", f"{experts}.rows")
        edge(f"{experts}.results", "combine.parts", response_to=request)
    if dense and not facts.in_library:
        edge("attention.normed", "mlp.x", layers=format_ids(dense))
        edge("attention.residual", "mlp.residual", layers=format_ids(dense))
    ends = (("combine.y", moe), ("attention.residual" if facts.in_library else "mlp.y", dense))
    for end, layers in ends:
        if onward := layers - {last}:
            edge(end, "attention.x", layers=format_ids(onward), tag="layer+1")
    edge(next(end for end, layers in ends if last in layers), "end.x" if facts.in_library else "head.x", layers=str(last))
    if facts.in_library:
        edge("end.y", "head.x")
    edge("head.tokens", "source.tokens", tag="step+1")


def _servers_of_trampolines(deploy: DeploySection) -> dict[int, list[int]]:
    """Trampoline -> the servers that it forwards to. A server that would forward only to itself is not a trampoline."""
    if not _choose_trampolines(deploy)[0]:
        return {}
    servers, count = len(_servers(deploy)), _groups_of_domain(deploy)
    found = {first: list(range(first, servers, count)) for first in range(count)}
    return {first: forwarded for first, forwarded in found.items() if len(forwarded) > 1}


def _choose_trampolines(deploy: DeploySection) -> tuple[bool, str]:
    """Whether there are trampolines, and why."""
    key, servers = deploy.experts.trampoline, len(_servers(deploy))
    if key != "auto":
        return key == "always", ""
    if _is_colocated(deploy):
        return False, "colocated servers do not forward"
    groups = _groups_of_domain(deploy)
    in_turn = groups + -(-servers // groups) - 1  # of a group to its trampolines, then of a trampoline
    is_enough = servers - in_turn >= MIN_SAVED_MESSAGES
    saves = f"saves {'at least' if is_enough else 'fewer than'} {MIN_SAVED_MESSAGES}"
    text = f"{in_turn} messages one after another in place of {servers} {saves}; {_groups_text(deploy)}"
    return is_enough, text


def _groups_of_domain(deploy: DeploySection) -> int:
    """The groups of the largest domain: those that exchange with the servers at a time."""
    return -(-deploy.attention.groups // deploy.attention.domains)


def _groups_text(deploy: DeploySection) -> str:
    groups = _groups_of_domain(deploy)
    count = f"{groups} group{'s' if groups > 1 else ''}"
    return f"a domain has {count}" if deploy.attention.domains > 1 else f"there {'are' if groups > 1 else 'is'} {count}"


def trampoline_choice(deploy: DeploySection) -> str:
    """What `trampoline: auto` chose, and why; "" for another value."""
    chosen, why = _choose_trampolines(deploy)
    return f"auto chose {'always' if chosen else 'never'}: {why}" if why else ""


def _add_trampoline(
    nodes: dict[str, NodeSection],
    edges: dict[str, EdgeSection],
    trampoline: int,
    number: int,
    servers: Sequence[int],
    held: Sequence[Held],
    groups: Sequence[str],
    attention: AttentionSection,
) -> None:
    """Add the nodes and edges of a trampoline, which is server `number` of the `groups`, to the expanded groups and servers. `servers`:
    those behind it; `held`: the experts of each server."""
    at = f"experts.{trampoline}"
    behind = {str(port): held_option(held[server]) for port, server in enumerate(servers)}
    nodes[f"{at}.forward"] = NodeSection(operator="forward", process=at, options={"servers": behind})
    nodes[f"{at}.merge"] = NodeSection(operator="merge", process=at)
    edges[edge_name(f"{at}.forward.plan", f"{at}.merge.plan")] = EdgeSection()
    for port, server in enumerate(servers):
        # As many as parts that the groups may send here: a server that stands still holds up no part of another server.
        credits = attention.groups * (attention.micro_batches + 1) if server != trampoline else None
        request = edge_name(f"{at}.forward.server{port}", f"experts.{server}.rows")
        edges[request] = EdgeSection(credits=credits)
        edges[edge_name(f"experts.{server}.results", f"{at}.merge.parts")] = EdgeSection(response_to=request)
    experts = held_option({layer: tuple(sorted({*chain(*(held[server][layer] for server in servers))})) for layer in held[trampoline]})
    for group in groups:
        request = edge_name(f"{group}.dispatch.server{number}", f"{at}.forward.rows")
        nodes[f"{group}.dispatch"].options["servers"][str(number)] = experts
        edges[request] = EdgeSection()
        edges[edge_name(f"{at}.merge.results", f"{group}.combine.parts")] = EdgeSection(response_to=request)


def _choose_int8(nodes: dict[str, NodeSection], edges: dict[str, EdgeSection], choice: str) -> None:
    for name, section in edges.items():
        (source, port), (target, _) = (end.rpartition(".")[::2] for end in name.split(" -> "))
        if nodes[source].process != nodes[target].process and carries_rows(nodes[source].operator, port, choice):
            edges[name] = section.replace(int8=True)


def _check_counts(deploy: DeploySection, limits: GraphLimits, facts: ModelFacts, document: Document) -> None:
    attention, experts, link, servers = deploy.attention, deploy.experts, deploy.links.attention_experts, len(_servers(deploy))
    if attention.micro_batches > limits.max_num_seqs:
        maximum = limits.max_num_seqs
        text = f"{attention.micro_batches} micro-batches share {maximum} sequences; write at most {maximum}, or raise limits.max_num_seqs"
        document.fail(("deploy", "attention", "micro_batches"), text)
    if attention.domains > attention.groups:
        text = f"{attention.domains} domains need as many groups, there are {attention.groups}; write at most {attention.groups}"
        document.fail(("deploy", "attention", "domains"), text)
    if attention.domains > 1 and not servers:
        text = "domains take turns at expert servers, and there are none; write domains: 1, or deploy.experts.servers"
        document.fail(("deploy", "attention", "domains"), text)
    if experts.replicas > max(servers, 1):
        possible = f"replicas: {servers} or less" if servers else "replicas: 1"
        text = f"{experts.replicas} replicas need as many servers, there are {servers}; "
        document.fail((*_EXPERTS, "replicas"), f"{text}write {possible}, or servers: {experts.replicas}")
    maximum = facts.num_experts * experts.replicas
    if experts.placement is None and servers > maximum:
        text = f"{servers} servers are more than {facts.num_experts} experts x {experts.replicas} replicas; write at most {maximum}"
        document.fail((*_EXPERTS, "servers"), text)
    if experts.trampoline == "always" and _is_colocated(deploy):
        document.fail((*_EXPERTS, "trampoline"), "colocated servers do not forward; write trampoline: never, or a number of servers")
    if experts.trampoline == "always" and servers <= _groups_of_domain(deploy):
        text = f"no server of {servers} forwards to others, as {_groups_text(deploy)}; write more servers, or trampoline: auto"
        document.fail((*_EXPERTS, "trampoline"), text)
    if _is_colocated(deploy):
        for key in ("device", "threads", "cores"):
            if document.has((*_EXPERTS, key)):
                document.fail((*_EXPERTS, key), f"colocated servers compute in the processes of groups; write deploy.attention.{key}")
    if not servers and experts.int8 != "none":
        document.fail((*_EXPERTS, "int8"), "with servers: 0 no rows travel; write int8: none, or deploy.experts.servers: 1 or more")
    if servers <= _is_colocated(deploy) and link.transport not in (UNSET, "auto"):
        text = f"servers: {experts.servers} leaves no link to the experts; write deploy.experts.servers: 1 or more, or remove the transport"
        document.fail((*_LINK, "transport"), text)


def _batches(deploy: DeploySection, processes: Collection[str]) -> Batching | None:
    """How the servers batch: with several domains, these take turns. Neighbouring groups are of one domain. `processes`: those of the
    graph."""
    groups, domains = deploy.attention.groups, deploy.attention.domains
    if domains == 1:
        return deploy.experts.batches
    sources: list[list[str]] = [[] for _ in range(domains)]
    for group in range(groups):
        if f"attention.{group}" in processes:
            sources[group * domains // groups].append(f"attention.{group}.source")
    sources.append([f"{worker}.source" for worker in _prefill(deploy) if worker in processes])  # a domain of their own
    sources = [domain for domain in sources if domain]
    return (deploy.experts.batches or Batching()).replace(domains=tuple(map(tuple, sources)))


def _held(deploy: DeploySection, facts: ModelFacts, document: Document) -> list[Held]:
    """The experts that each server holds, by layer. Without servers: one entry with every expert."""
    experts, names = deploy.experts, _servers(deploy)
    if experts.placement is None:
        even = even_placement(facts.num_experts, max(len(names), 1), experts.replicas)
        return [dict.fromkeys(facts.moe_layers, ids) for ids in even]
    path = (*_EXPERTS, "placement")
    if not names:
        document.fail(path, "servers: 0 leaves nothing to place; write deploy.experts.servers: 1 or more, or remove placement")
    for name in experts.placement:
        if name not in names:
            document.fail((*path, name), f"there is no server {name!r}; write {names[0]} to {names[-1]}")
    held: dict[int, Held] = {}
    for server, name in enumerate(names):
        if name not in experts.placement:
            document.fail(path, f"{name} is left out; write what it holds, or lower servers")
        try:
            held[server] = held_experts(experts.placement[name], facts.moe_layers, facts.num_experts)
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
    return [held[server] for server in range(len(names))]
