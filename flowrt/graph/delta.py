"""What leads from one graph of a run to another: processes that join and leave, with their nodes and edges. Pure.

A run changes in up to three versions of its graph, so that no process sends to one that is not there: `joined` has all processes,
`leaving` says which of them get nothing new, and the last one is without these. Each process applies the same deltas in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

import msgspec

from flowrt.document import Path_, dotted
from flowrt.graph.checks import check
from flowrt.graph.facts import ModelFacts
from flowrt.graph.fuse import fuse
from flowrt.graph.model import Edge, Graph, Node
from flowrt.graph.recovery import survivable_processes

_OF_PROCESSES = ("devices", "threads", "cores")  # settings by process
_FREE = ("nodes", "edges", "process_hosts", "places", "choices", "prompts", "version", "leaving", *_OF_PROCESSES)
RESTART = "stop the graph and start it again to change it"


class GraphDelta(msgspec.Struct, frozen=True):
    """`nodes` are new, or have other ports than before; `edges` are new. `leaving` and `settings` hold from now on."""

    version: int
    nodes: dict[str, Node]
    edges: dict[str, Edge]
    removed_nodes: tuple[str, ...]
    removed_edges: tuple[str, ...]
    leaving: tuple[str, ...]
    settings: dict[str, dict[str, str | int]]


def delta_of(old: Graph, new: Graph) -> GraphDelta:
    """The delta from a graph to its next version."""
    return GraphDelta(
        new.version,
        {name: node for name, node in new.nodes.items() if old.nodes.get(name) != node},
        {name: edge for name, edge in new.edges.items() if name not in old.edges},
        tuple(name for name in old.nodes if name not in new.nodes),
        tuple(name for name in old.edges if name not in new.edges),
        new.leaving,
        {key: getattr(new, key) for key in _OF_PROCESSES if getattr(new, key) != getattr(old, key)},
    )


def apply(graph: Graph, delta: GraphDelta) -> Graph:
    """The next version of a graph. Those that it has, it keeps in their order."""
    nodes = {name: node for name, node in graph.nodes.items() if name not in delta.removed_nodes} | delta.nodes
    edges = {name: edge for name, edge in graph.edges.items() if name not in delta.removed_edges} | delta.edges
    settings: dict[str, Any] = delta.settings
    return graph.replace(nodes=nodes, edges=edges, version=delta.version, leaving=delta.leaving, **settings)


def to_json(delta: GraphDelta) -> bytes:
    """The delta as it travels to workers."""
    return msgspec.json.encode(delta)


def from_json(data: bytes) -> GraphDelta:
    """The inverse of `to_json`. Raises msgspec.ValidationError or DecodeError for anything else."""
    return msgspec.json.decode(data, type=GraphDelta)


def joined(old: Graph, new: Graph) -> Graph:
    """The version with all processes of both graphs."""
    settings = {key: getattr(old, key) | getattr(new, key) for key in _OF_PROCESSES}
    nodes = old.nodes | {name: _for_both(old.nodes.get(name), node) for name, node in new.nodes.items()}
    return old.replace(nodes=nodes, edges=old.edges | new.edges, version=old.version + 1, **settings)


def _for_both(old: Node | None, new: Node) -> Node:
    """A node with the ports, servers and domains of both."""
    if old is None:
        return new
    if new.batches is not None and old.batches is not None:
        domains = zip_longest(old.batches.domains, new.batches.domains, fillvalue=())
        new = replace(new, batches=new.batches.replace(domains=tuple(tuple(dict.fromkeys(chain(*each))) for each in domains)))
    servers = {"servers": old.options["servers"] | new.options["servers"]} if new.kind.dispatches else {}
    return replace(new, outputs={**old.outputs, **new.outputs}, options={**new.options, **servers})


def require_valid(graph: Graph, facts: ModelFacts | None) -> None:
    """Raise GraphError for the first problem that a graph file with this graph would have. `facts` are those of the model."""
    for problem in check(graph, facts):
        raise graph.error(dotted(problem.path), problem.text)


def check_change(old: Graph, new: Graph) -> None:
    """Raise GraphError, one line with the key, where the run of `old` cannot become one of `new`, which is valid. Both have resolved
    transports."""
    for path, text in _refusals(old, new):
        raise new.error(dotted(path), text)


def _refusals(old: Graph, new: Graph) -> Iterator[tuple[Path_, str]]:
    for key in sorted(set(Graph.__struct_fields__) - {*_FREE}):
        if key == "folder" and not any(node.kind.is_users for node in old.nodes.values()):
            continue
        yield from _differences((key,), getattr(old, key), getattr(new, key))
    before, after = {*old.process_names()}, {*new.process_names()}
    changed, both = before ^ after, joined(old, new)
    for path, is_so, text in (
        (("processes",), new.processes != "many", f"with processes: {new.processes}"),
        (("hosts",), new.hosts is not None, "of several hosts"),
        (("reliability", "standby"), new.reliability.standby > 0, "with standby processes"),
        (("emulate",), new.emulation is not None, "on emulated hardware"),
    ):
        if changed and is_so:
            yield path, f"no process can join or leave a graph {text}; {RESTART}"
    for process in sorted(changed - survivable_processes(both)):
        why = "recovery is off" if new.reliability.recovery == "off" else "no other process knows its state"
        yield ("reliability", "recovery"), f"{process} can neither join nor leave: {why}; {RESTART}"
    if changed and old.group_limits() != new.group_limits():
        yield ("limits",), f"requests that run may not fit the limits of the new groups; {RESTART}"
    for node in both.nodes.values():
        yield from _refusals_of_node(old, new, node, changed)
    yield from _refusals_of_edges(old, new, changed)
    for process in sorted(before & after):
        if fuse(old, process).fused != fuse(new, process).fused:
            yield ("nodes", old.nodes_of(process)[0].name), f"the nodes of {process} would fire in another order; {RESTART}"


def _differences(path: Path_, old: Any, new: Any) -> Iterator[tuple[Path_, str]]:
    """The keys below `path` that differ."""
    keys = getattr(old, "__struct_fields__", ()) or getattr(old, "__dataclass_fields__", ())
    if keys and type(old) is type(new):
        for key in keys:
            yield from _differences((*path, key), getattr(old, key), getattr(new, key))
    elif old != new:
        yield path, f"cannot change from {old} to {new} while the graph runs; {RESTART}"


def _refusals_of_node(old: Graph, new: Graph, node: Node, changed: set[str]) -> Iterator[tuple[Path_, str]]:
    path: Path_ = ("nodes", node.name)
    before, after = old.nodes.get(node.name), new.nodes.get(node.name)
    if changed and (node.kind.forwards or (node.kind.kv and node.process in changed)):
        which = "in a graph with trampolines" if node.kind.forwards else "that transfers KV"
        yield path, f"no process {which} can join or leave; {RESTART}"
    elif node.process in changed:
        return
    elif before is None or after is None:
        yield path, f"{node.process} stays, and its nodes cannot change; {RESTART}"
    elif _fixed(before) != _fixed(after):
        yield path, f"cannot change while {node.process} runs; {RESTART}"


def _fixed(node: Node) -> Node:
    """A node without what may change: its ports, the servers that it dispatches to, and the domains that take turns at it."""
    options = {key: value for key, value in node.options.items() if not (node.kind.dispatches and key == "servers")}
    batches = None if node.batches is None else node.batches.replace(domains=())
    return replace(node, outputs={}, options=options, batches=batches)


def _refusals_of_edges(old: Graph, new: Graph, changed: set[str]) -> Iterator[tuple[Path_, str]]:
    led = {(edge.source, edge.source_port): edge for edge in old.edges.values()}
    for graph, other in ((old, new), (new, old)):
        schemes = {(process, edge.transport) for edge in other.edges.values() for process in other.ends_of(edge)}
        for edge in graph.edges.values():
            ends, path = graph.ends_of(edge), ("edges", edge.name)
            if other.edges.get(edge.name) == edge:
                continue
            if changed.isdisjoint(ends) or edge.name in other.edges:
                yield path, f"cannot change while {' and '.join(dict.fromkeys(ends))} run; {RESTART}"
            if graph is old:
                continue
            before = led.get((edge.source, edge.source_port))
            if before is not None and before.name not in new.edges and edge.response_to is None:
                text = f"{edge.source}.{edge.source_port} leads to {before.target}; use another port for {edge.target}"
                yield path, f"{text}, as both are there for a while"
            for process in set(ends) - changed:
                if (process, edge.transport) not in schemes:
                    yield (*path, "transport"), f"{process} does not listen on {edge.transport}; use the transport of its other edges"
