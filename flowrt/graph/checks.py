"""Checks a graph before any process starts, and yields its problems."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise

from flowrt.costs.links import profile_of
from flowrt.document import Path_
from flowrt.errors import nearest
from flowrt.graph.emulated import check_devices
from flowrt.graph.extra_tensors import check_extras
from flowrt.graph.facts import ModelFacts
from flowrt.graph.int8 import check_int8
from flowrt.graph.kinds import Keeps, all_kinds, kind_of
from flowrt.graph.model import INPUT, OUTPUT, Edge, Graph, Node, role_of
from flowrt.graph.notation import specs_disagree
from flowrt.graph.numerics import is_strict, processes_of_one_thread_count, strict_processes
from flowrt.graph.placement import Held, experts_map, held_experts, server_nodes
from flowrt.graph.reach import Flow, Point, follow
from flowrt.graph.recovery import (
    attention_groups,
    keeps_of,
    pipelines,
    prefill_workers,
    standby_candidates,
    standby_names,
    survivable_processes,
)
from flowrt.graph.settings import ReliabilitySettings
from flowrt.transports.wire.message import DTYPE_BYTES

_FAULT_PLAN = re.compile(r"^faulty\+|(?<=[\w.+-])\?.*$")  # faulty+shm?drop@100 is shm with injected faults


@dataclass(frozen=True)
class Problem:
    """`path` is the key in the explicit form; `text` is the error and its remedy."""

    path: Path_
    text: str


def check(graph: Graph, facts: ModelFacts | None = None, schemes: Collection[str] | None = None) -> Iterator[Problem]:
    """Yield all problems, the most basic first. An earlier problem may cause a later one. `schemes`: the transports that edges may name."""
    yield from _check_sections(graph)
    yield from (Problem(path, text) for path, text in check_numerics(graph))
    yield from _check_schemes(graph, schemes)
    yield from _check_message_size(graph, facts)
    for check_part in (_check_ports, _check_responses, _check_transports):
        yield from check_part(graph)
    yield from (Problem(path, text) for path, text in (*check_int8(graph), *check_transfers(graph), *check_extras(graph, facts)))
    flow = follow(graph)
    yield from _check_cycles(graph, flow)
    yield from _check_feeding(graph, flow)
    yield from _check_credits(graph)
    yield from _check_batches(graph)
    yield from _check_domains(graph)
    yield from _check_model(graph, facts)
    yield from (Problem(path, text) for path, text in check_devices(graph, facts))
    yield from _check_emulation(graph)


def _check_sections(graph: Graph) -> Iterator[Problem]:
    """The sections that name processes or roles."""
    processes = graph.process_names()
    roles = {role_of(process) for process in processes}
    for key, named in (("devices", graph.devices), ("threads", graph.threads), ("cores", graph.cores)):
        for process in named:
            if process not in processes:
                yield Problem((key, process), f"no node is in a process {process!r}; {nearest(process, processes)}")
    for role in graph.limits.roles:
        if role not in roles:
            yield Problem(("limits", "roles", role), f"no process has the role {role!r}; {nearest(role, roles)}")
    yield from (Problem(path, text) for path, text in check_reliability(graph))


def _check_schemes(graph: Graph, schemes: Collection[str] | None) -> Iterator[Problem]:
    for edge in graph.edges.values() if schemes is not None else ():
        if _FAULT_PLAN.sub("", edge.transport) not in (known := ("auto", *(schemes or ()))):
            text = f"there is no transport {edge.transport!r}; {nearest(edge.transport, known)}"
            yield Problem(("edges", edge.name, "transport"), text)


def _check_message_size(graph: Graph, facts: ModelFacts | None) -> Iterator[Problem]:
    """A part carries at most one row per (row, slot) pair of a step; a response carries no more."""
    if facts is None or graph.model is None:
        return
    pair_bytes = facts.hidden_size * DTYPE_BYTES[graph.model.dtype] + 32  # and its indices and weight
    for node in graph.nodes.values():
        limits = graph.limits_of(node.process)
        needed = limits.max_num_batched_tokens * facts.num_experts_per_token * pair_bytes
        if node.kind.dispatches and needed > limits.max_message_bytes:
            text = f"a step of {limits.max_num_batched_tokens} tokens can need {needed} bytes; write at least {needed}"
            yield Problem(("limits", "max_message_bytes"), f"{text}, or lower limits.max_num_batched_tokens")


def _check_ports(graph: Graph) -> Iterator[Problem]:
    fed = {(edge.target, edge.target_port) for edge in graph.edges.values()}
    led = {(edge.source, edge.source_port) for edge in graph.edges.values()}
    for node in graph.nodes.values():
        path = ("nodes", node.name)
        if not node.inputs and not node.kind.emits:
            yield Problem(path, "no edge leads here; connect an input")
        for port in node.inputs.values():
            here = (*path, "inputs", port.name)
            if (node.name, port.name) not in fed:
                yield Problem(here, f"no edge leads to {node.name}.{port.name}; connect it")
            if port.takes == "gather":
                count = None if port.count is None else node.inputs.get(port.count)
                if count is None or count.takes != "one" or count is port:
                    yield Problem(here, "gather needs the port that gives the number of messages; write count: PORT, another input")
            elif port.count is not None:
                yield Problem(here, "count belongs to takes: gather; remove it, or write takes: gather")
        for port in node.outputs.values():
            if (node.name, port.name) not in led and node.operator != INPUT:
                yield Problem((*path, "outputs", port.name), f"no edge leads from {node.name}.{port.name}; connect it, or remove the port")
    for edge in graph.edges.values():
        given = graph.nodes[edge.source].outputs[edge.source_port].tensors
        taken = graph.nodes[edge.target].inputs[edge.target_port].tensors
        if given and taken:
            why = f"expected {len(taken)} tensors, got {len(given)}" if len(given) != len(taken) else None
            why = why or next((text for a, b in zip(given, taken, strict=True) if (text := specs_disagree(a, b))), None)
            if why is not None:
                text = f"{why} ({', '.join(given)} to {', '.join(taken)}); make both ends agree"
                yield Problem(("edges", edge.name), text)
    if not any(node.kind.emits for node in graph.nodes.values()):
        yield Problem(("edges",), f"no node emits tags; connect {INPUT}.NAME to a node")
    if INPUT in graph.nodes and OUTPUT not in graph.nodes:
        yield Problem(("edges",), f"no edge leads to {OUTPUT}; connect a result to {OUTPUT}.NAME")


def _check_responses(graph: Graph) -> Iterator[Problem]:
    responses: dict[str, Edge] = {}
    for edge in graph.edges.values():
        if edge.response_to is None:
            continue
        path: Path_ = ("edges", edge.name, "response_to")
        request = graph.edges[edge.response_to]
        client, receiver = graph.nodes[request.source].process, graph.nodes[edge.target].process
        through = graph.nodes[request.target].kind.forwards and graph.nodes[request.target].process == graph.nodes[edge.source].process
        if (request.target != edge.source and not through) or request.response_to is not None:
            yield Problem(path, f"{request} does not lead to {edge.source}; name an edge that leads to {edge.source}")
        elif client != receiver:
            text = f"the request comes from process {client}, its response goes to {receiver} and its credit is lost; respond to {client}"
            yield Problem(path, text)
        elif request.name in responses:
            yield Problem(path, f"{responses[request.name]} responds to {request} already; a request has one response: remove this edge")
        elif edge.tag.kind != "same" or edge.layers.layers is not None:
            yield Problem(path, "a response has the tag of its request; remove tag and layers")
        responses[request.name] = edge


def _check_transports(graph: Graph) -> Iterator[Problem]:
    if graph.processes in ("one", 1):
        return
    for edge in graph.edges.values():
        ends = graph.nodes[edge.source].process, graph.nodes[edge.target].process
        if edge.transport == "inproc" and ends[0] != ends[1]:
            text = f"inproc stays inside one process, {edge} leads from process {ends[0]} to {ends[1]}; write auto, or processes: one"
            yield Problem(("edges", edge.name, "transport"), text)


def _check_feeding(graph: Graph, flow: Flow) -> Iterator[Problem]:
    places = {name: place for place, name in enumerate(graph.edges)}
    for node in graph.nodes.values():
        if node.kind.emits:
            continue
        for port in node.inputs.values():
            if port.takes == "one" and not node.kind.takes_each:
                yield from _fed_twice(graph, flow, node, port.name, places)
        if node.inputs and not flow.fires[node.name]:
            yield Problem(("nodes", node.name), f"the node never fires: {_never(flow, node)}")
            continue
        yield from _left_waiting(flow, node)


def _fed_twice(graph: Graph, flow: Flow, node: Node, port: str, places: Mapping[str, int]) -> Iterator[Problem]:
    for (later, layer), ids in sorted((point, ids) for point, ids in flow.at(node.name, port).items() if len(ids) > 1):
        edge_of_origin: dict[str, Edge] = {}  # whose tags an earlier edge carries here
        for edge in (graph.edges[name] for name in sorted(ids, key=places.__getitem__)):
            for origin in sorted(flow.edge_origins.get(edge.name, ())):
                if origin in edge_of_origin:
                    text = f"{edge_of_origin[origin]} and {edge} both carry a message {_at(later, layer)}; "
                    text += "a port takes one per tag: give them layers that do not meet"
                    yield Problem(("edges", edge.name), text)
                    return
                edge_of_origin[origin] = edge


def _never(flow: Flow, node: Node) -> str:
    for port in node.inputs.values():
        if port.takes == "one" and not flow.at(node.name, port.name):
            return f"no message can reach its port {port.name}; feed it from {INPUT} or from a node that fires"
    ports = ", ".join(port.name for port in node.inputs.values() if port.takes == "one")
    return f"its ports {ports} get no messages of the same step and layer; make the tag and layers of their edges agree"


def _left_waiting(flow: Flow, node: Node) -> Iterator[Problem]:
    fires: set[Point] = flow.fires[node.name]
    for port in node.inputs.values():
        for later, layer in sorted(flow.at(node.name, port.name)):
            if (later, layer) in fires:
                continue
            empty = [p.name for p in node.inputs.values() if p.takes == "one" and (later, layer) not in flow.at(node.name, p.name)]
            text = (
                f"messages for port {port.name} {_at(later, layer)} wait forever, because none arrive at {', '.join(empty)}; "
                "make the tag and layers of the edges agree"
            )
            yield Problem(("nodes", node.name), text)
            return


def _at(later: bool, layer: int) -> str:
    return f"at layer {layer}" + (" of later steps" if later else "")


def _check_cycles(graph: Graph, flow: Flow) -> Iterator[Problem]:
    """Without the edges that advance the tag, no (node, layer) may reach itself."""
    into: dict[tuple[str, int], dict[tuple[str, int], Edge]] = {}  # (node, layer) -> the (node, layer) that feeds it -> the edge
    for edge in graph.edges.values():
        if edge.tag.advances or graph.nodes[edge.target].kind.emits:
            continue
        for layer in {layer for _, layer in flow.fires[edge.source]} or flow.layers:
            if layer in edge.layers:
                target = edge.tag.layer if edge.tag.kind == "to_layer" else layer
                into.setdefault((edge.target, target), {})[edge.source, layer] = edge
    try:
        TopologicalSorter(into).prepare()
    except CycleError as error:
        cycle = error.args[1]
        edges = [into[target][source] for source, target in pairwise(cycle)]
        edge = max(edges, key=lambda edge: list(graph.edges).index(edge.name))
        names = " -> ".join(name for name, _ in cycle)
        text = f"the cycle {names} does not advance the tag: it waits for itself; write tag: layer+1 or step+1 on one of its edges"
        yield Problem(("edges", edge.name), text)


def _check_credits(graph: Graph) -> Iterator[Problem]:
    """On a cycle, an edge between processes needs a credit for each message in flight: one per tag."""
    is_model = any(node.kind.schedules for node in graph.nodes.values())
    tags, what = (graph.micro_batches, "micro-batches") if is_model else (graph.limits.in_flight, "tags in flight")
    for edge in graph.edges.values():
        if edge.response_to is not None or not graph.crosses(edge):
            continue
        path: Path_ = ("edges", edge.name, "credits")
        if edge.credits < 1:
            yield Problem(path, "an edge between processes needs credits; write at least 1")
        elif edge.credits < tags and edge.source in _reachable(graph, edge.target):
            yield Problem(path, f"{edge.credits} is too few: {tags} {what} keep {tags} messages in flight; write at least {tags}")


def _check_batches(graph: Graph) -> Iterator[Problem]:
    """A node must not wait for more tags than can be in flight: each batch would wait as long as it may."""
    tags = graph.tags_in_flight()
    for node in graph.nodes.values():
        if node.batches is not None and node.batches.max_wait_seconds and node.batches.min_tags > tags:
            text = f"{node.name} would wait for {node.batches.min_tags} tags, and at most {tags} can be in flight; write at most {tags}"
            yield Problem(("nodes", node.name, "batches", "min_tags"), text)


def _check_domains(graph: Graph) -> Iterator[Problem]:
    """Each source whose tags reach a node with domains is in one of them."""
    sources = {node.name for node in graph.nodes.values() if node.kind.schedules}
    for node in graph.nodes.values():
        if node.batches is None or not node.batches.domains:
            continue
        path: Path_ = ("nodes", node.name, "batches", "domains")
        named = [source for domain in node.batches.domains for source in domain]
        for source in named:
            if source not in sources:
                yield Problem(path, f"there is no source {source!r}; {nearest(source, sources)}")
            elif named.count(source) > 1:
                yield Problem(path, f"{source} is named twice; keep one")
        for source in sorted(sources - {*named}):
            if node.name in _reachable(graph, source):
                yield Problem(path, f"{source} is in no domain, and its rows arrive here; add it to one")


def _reachable(graph: Graph, start: str) -> set[str]:
    """The nodes to which a path leads from `start`."""
    found, waiting = {start}, [start]
    while waiting:
        fresh = {edge.target for edge in graph.edges_from(waiting.pop())} - found
        found |= fresh
        waiting += fresh
    return found


def _check_model(graph: Graph, facts: ModelFacts | None) -> Iterator[Problem]:
    """The options of built-in nodes against the model: layers, held experts, and the servers of each dispatch."""
    built_in = [node for node in graph.nodes.values() if node.operator in all_kinds()]
    if built_in and facts is None:
        yield Problem(("nodes", built_in[0].name, "operator"), "a built-in operator needs a model; write model: {path: DIRECTORY}")
        return
    if facts is None:
        return
    held: dict[str, Held] = {}
    for node in built_in:
        path: Path_ = ("nodes", node.name, "options")
        layers = node.options.get("num_layers", facts.num_layers)
        if layers != facts.num_layers:
            text = f"expected {facts.num_layers} layers, got {layers}; expand the graph again for this model"
            yield Problem((*path, "num_layers"), text)
        if node.kind.combines and facts.shared_experts != _adds_shared_experts(graph, node):
            has, lacks = ("model", "graph has no node for them") if facts.shared_experts else ("graph", "model has none")
            yield Problem(("nodes", node.name), f"the {has} has shared experts, the {lacks}; expand it again for this model")
        if node.kind.holds_experts:
            try:
                held[node.name] = held_experts(node.options["experts"], facts.moe_layers, facts.num_experts)
            except ValueError as error:
                yield Problem((*path, "experts"), str(error))
                return
    for node in sorted(built_in, key=lambda node: not node.kind.forwards):  # first, what trampolines have behind them
        if node.kind.dispatches:
            yield from _check_dispatch(graph, node, held, facts)


def _adds_shared_experts(graph: Graph, combine: Node) -> bool:
    """Whether the residual of `combine` comes from a node of shared experts."""
    into = [edge for edge in graph.edges.values() if edge.target == combine.name and edge.target_port == "residual"]
    return any("shared_down" in graph.nodes[edge.source].kind.parts for edge in into)


def _check_dispatch(graph: Graph, node: Node, held: dict[str, Held], facts: ModelFacts) -> Iterator[Problem]:
    path: Path_ = ("nodes", node.name, "options", "servers")
    servers = node.options["servers"]
    if not isinstance(servers, dict) or not servers or not all(key.isascii() and key.isdigit() and str(int(key)) == key for key in servers):
        yield Problem(path, "names no servers; write {'0': '0-5', '1': ...}: the experts behind each port server0, server1")
        return
    wanted: dict[int, Held] = {}
    leading = graph.edges_from(node.name)
    for key, option in servers.items():
        here = (*path, key)
        try:
            wanted[int(key)] = held_experts(option, facts.moe_layers, facts.num_experts)
        except ValueError as error:
            yield Problem(here, str(error))
            return
        edges = [edge for edge in leading if edge.source_port == f"server{key}"]
        if len(edges) != 1:
            yield Problem(here, f"{len(edges)} edges lead from {node.name}.server{key}; connect one to the node that holds these experts")
            return
        there = held.get(edges[0].target)
        for layer, experts in wanted[int(key)].items():
            absent = [] if there is None else sorted(set(experts) - set(there[layer]))
            if absent:
                text = f"{edges[0].target} does not hold expert {absent[0]} in layer {layer}; place it there, or leave it out here"
                yield Problem(here, text)
                return
    yield from _check_servers(graph, node)
    for edge in leading:
        if edge.source_port.startswith("server") and edge.source_port.removeprefix("server") not in servers:
            server = edge.source_port.removeprefix("server")
            yield Problem(path, f"{node.name}.{edge.source_port} leads to a server without experts here; add {server!r}: its experts")
            return
    placement = experts_map(wanted, facts.num_experts)
    if node.kind.forwards:
        held[node.name] = {layer: tuple(sorted({*chain(*(each[layer] for each in wanted.values()))})) for layer in facts.moe_layers}
        return
    for layer in () if graph.folded else facts.moe_layers:  # else expansion has checked this, and not all servers are here
        missing = placement.missing(layer)
        if missing:
            yield Problem(path, f"expert {missing[0]} has no replica in layer {layer}; place it on at least one server")
            return


def _check_servers(graph: Graph, node: Node) -> Iterator[Problem]:
    """Each server responds, and each server behind a trampoline is a server of the node too: parts go past a trampoline that is lost."""
    responded = {edge.response_to for edge in graph.edges.values()}
    trampoline_of: dict[str, str] = {}
    nodes = server_nodes(graph, node.name)
    for edge in graph.edges_from(node.name):
        path: Path_ = ("edges", edge.name)
        if not edge.source_port.startswith("server"):
            continue
        if edge.name not in responded:
            yield Problem(path, f"no response to {edge} leads back; connect its results to {node.process}, with response_to: {edge.name}")
            return
        for server in server_nodes(graph, edge.target).values() if graph.nodes[edge.target].kind.forwards else ():
            if server not in nodes.values():
                yield Problem(path, f"{node.name} has no port that leads to {server}, behind {edge.target}; connect one")
                return
            if (other := trampoline_of.setdefault(server, edge.target)) != edge.target:
                yield Problem(path, f"both {other} and {edge.target} forward to {server}; remove one of them")
                return


def _check_emulation(graph: Graph) -> Iterator[Problem]:
    emulation = graph.emulation
    if emulation is None:
        return
    operators = {node.operator for node in graph.nodes.values() if node.kind.is_users or node.kind.build}
    for operator, cost in emulation.compute.items():
        path = ("emulate", "compute", operator)
        if operator not in operators:
            yield Problem(path, f"no node of this graph has the operator {operator!r}; {nearest(operator, operators)}")
        charges = kind_of(operator).charges
        for key, only in ((kind.charges, kind.name) for kind in all_kinds().values() if kind.charges):
            if getattr(cost, key) and charges != key:
                yield Problem((*path, key), f"only {only!r} is charged for this; remove the key")
        if operator in operators and not cost.shortest_seconds(charges):
            yield Problem(path, "a row takes no time; give one of fixed_seconds, row_seconds, expert_seconds, kv_token_seconds above 0")
    crossing = [edge for edge in graph.edges.values() if graph.crosses(edge)]
    linked = [edge for edge in crossing if edge.link is not None]
    if not linked and not emulation.compute and not emulation.devices:
        text = "there is nothing to emulate; name the link of an edge between processes (link: ub), write devices:, or remove emulate"
        yield Problem(("emulate",), text)
    for edge in linked:
        if not profile_of(edge.link or "").seconds(0):
            text = f"the link of {edge} takes no time for an empty message; give it latency_seconds or message_seconds above 0"
            yield Problem(("edges", edge.name, "link"), text)
    yield from _check_links_of_pairs(graph, crossing)


def _check_links_of_pairs(graph: Graph, crossing: list[Edge]) -> Iterator[Problem]:
    """Messages between two processes keep their order, so all edges between them have one link."""
    first: dict[frozenset[str], Edge] = {}
    for edge in crossing:
        ends = frozenset((graph.nodes[edge.source].process, graph.nodes[edge.target].process))
        other = first.setdefault(ends, edge)
        if other.link != edge.link:
            one, two = (f"{each} has {f'link {each.link}' if each.link else 'no link'}" for each in (other, edge))
            text = f"{one}, {two}, between the same two processes; emulated edges between two processes need one link"
            yield Problem(("edges", edge.name, "link"), f"{text}: write the same on both")


def check_transfers(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Path of a key in the explicit form, and what is wrong with it."""
    workers = prefill_workers(graph)
    for group in attention_groups(graph) if workers else ():
        unpack = next((node.name for node in graph.nodes_of(group) if node.kind.kv == "pulls"), None)
        if unpack is None:
            yield ("nodes",), f"group {group} has no kv_unpack, so it cannot pull the prompts of {workers[0]}; add one"
            continue
        pulled = {graph.nodes[edge.target].process for edge in graph.edges_from(unpack) if graph.nodes[edge.target].kind.kv == "offers"}
        for worker in workers:
            if worker not in pulled:
                text = f"group {group} does not pull from prefill worker {worker}, whose prompts it may get; connect a port of {unpack}"
                yield ("nodes", unpack), f"{text} to its kv_pack"


MIN_SUSPECT_SECONDS = 0.2  # two heartbeats


def check_reliability(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Path of a key and what is wrong with its value."""
    settings = graph.reliability
    suspect, dead = settings.suspect_seconds, settings.dead_seconds
    if suspect < MIN_SUSPECT_SECONDS:
        text = f"{suspect:g} s is less than two heartbeats of 0.1 s; write at least {MIN_SUSPECT_SECONDS:g}"
        yield ("reliability", "suspect_seconds"), text
    if dead <= suspect:
        key = "suspect_seconds" if dead == ReliabilitySettings().dead_seconds else "dead_seconds"
        text = f"dead_seconds {dead:g} is not longer than suspect_seconds {suspect:g}; raise dead_seconds"
        yield ("reliability", key), text
    if settings.unavailable_expert == "degrade" and settings.recovery == "off":
        text = "degrade needs a run that continues when a server dies; write recovery: fine"
        yield ("reliability", "unavailable_expert"), text
    if settings.standby:
        yield from _check_standby(graph)
    if settings.request_log and graph.model is None:
        yield ("reliability", "request_log"), "only requests of a model are logged, and this graph serves none; remove the key"
    if not settings.request_log.isprintable():
        yield ("reliability", "request_log"), f"{settings.request_log!r} does not name a folder; write its path"
    if settings.request_log_sync and not settings.request_log:
        yield ("reliability", "request_log_sync"), "there is no request log to sync; write request_log: FOLDER, too"


def _check_standby(graph: Graph) -> Iterator[tuple[Path_, str]]:
    names = standby_names(graph)
    for node in graph.nodes.values():
        if node.process in names:
            yield ("nodes", node.name, "process"), f"{node.process!r} is a standby process; choose another name"
    key = ("reliability", "standby")
    if graph.processes != "many":
        yield key, "a standby process replaces one worker, and processes hold several; write `processes: many`, or standby: 0"
    elif not survivable_processes(graph):
        yield key, "there is no process that the run can lose and a standby process can replace; write standby: 0"
    elif not standby_candidates(graph):
        text = "a standby process replaces only processes on the CPU that share their weights, and there is none"
        yield key, f"{text}; write standby: 0"


def check_numerics(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Path of a key in the explicit form, and what is wrong with it."""
    yield from _check_roles(graph)
    strict = strict_processes(graph)
    if not strict:
        return
    if graph.model is not None and graph.model.implementation == "transformers":
        role = next((role for role, each in graph.role_numerics.items() if each == "strict"), "")
        text = "the modules of transformers compute rows of a batch together; write fast, or a model whose family flowrt knows"
        yield ("role_numerics", role) if role else ("numerics",), text
    numbers: dict[int, str] = {}
    bound = processes_of_one_thread_count(graph)
    for process, number in graph.threads.items():
        if number != "auto" and process in bound:
            numbers.setdefault(number, process)
    if len(numbers) > 1:
        found = " and ".join(str(number) for number in sorted(numbers))
        text = f"strict numerics need the same number of threads everywhere, got {found}; write one number"
        yield ("threads", list(numbers.values())[1]), text
    for process, device in graph.devices.items():
        if device != "cpu" and process in strict:
            text = f"strict numerics need CPUs, process {process} computes on {device}; write cpu, or numerics: fast"
            yield ("devices", process), text
    yield from _check_limits(graph)


def _check_roles(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Only processes of sequences have numerics of their own, and those among which a request may choose have the same."""
    roles = set(map(role_of, pipelines(graph)))
    for role in graph.role_numerics:
        if role not in roles:
            text = f"no process with the role {role!r} computes sequences, and expert servers follow their clients"
            yield ("role_numerics", role), f"{text}; {nearest(role, roles)}"
    for what, processes in (("prefill workers", prefill_workers(graph)), ("attention groups", attention_groups(graph))):
        differing = next((each for each in processes if is_strict(graph, each) != is_strict(graph, processes[0])), None)
        if differing is not None:
            text = f"any of the {what} {processes[0]} and {differing} may get a request, and one is strict, the other fast"
            yield ("role_numerics",), f"{text}; write the same for both roles"
    for edge in graph.edges.values() if graph.role_numerics else ():
        source, target = graph.nodes[edge.source], graph.nodes[edge.target]
        is_transfer = source.kind.kv and target.kind.kv
        is_one = all(keeps_of(node) not in (Keeps.NOTHING, Keeps.UNKNOWN) for node in (source, target)) and not is_transfer
        if is_one and is_strict(graph, source.process) != is_strict(graph, target.process):
            text = f"{source.process} and {target.process} compute the same sequences, and one is strict, the other fast"
            yield ("role_numerics",), f"{text}; write the same for both roles"
            return


def _check_limits(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Strict roles need pages of one size, and chunks that fit into a step."""
    processes = [process for process in pipelines(graph) if is_strict(graph, process)]
    roles = list(dict.fromkeys(map(role_of, processes)))
    sizes = {role: graph.limits.of_role(role).page_size for role in roles}
    for role in roles:
        other = next((each for each in roles if sizes[each] != sizes[role]), None)
        if other is not None and role in graph.limits.roles:
            text = f"strict numerics need pages of one size, got {sizes[role]} here and {sizes[other]} for {other}; write one"
            yield ("limits", "roles", role, "page_size"), text
    for limits in (graph.limits.of_role(role) for role in roles):
        if limits.chunk_tokens > limits.max_num_batched_tokens:
            text = f"a chunk of {limits.chunk_tokens} tokens exceeds limits.max_num_batched_tokens {limits.max_num_batched_tokens}"
            yield ("limits", "chunk_tokens"), f"{text}; write {limits.max_num_batched_tokens} or less"
