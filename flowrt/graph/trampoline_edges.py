"""Trampolines: expert servers that receive for others, so that a group sends fewer messages per layer (xDeepServe section 3.3).

With A groups in a domain and E > A servers, servers 0 to A-1 are trampolines; trampoline t serves those servers s with s % A == t,
itself included. A group sends one bundle to each trampoline (A2E), whose `forward` node cuts it into the parts that dispatch would have
sent directly (A2E'). The servers respond to the trampoline (E2A'), whose `return` node sends the responses of a bundle in one message
(E2A); the group's `collect` node cuts that message. The direct edges stay, for redispatched and hedged parts, and while a trampoline is
lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrt.graph.document import Path_
from flowrt.graph.model import Edge, Graph, Node

MIN_SAVED_MESSAGES = 18  # from which on `trampoline: auto` uses trampolines; measured by flowrt bench trampoline


def forwarded_servers(graph: Graph, dispatch: str) -> dict[int, dict[int, Edge]]:
    """Of a dispatch node: trampoline -> server -> the edge of requests from the trampoline to the server."""
    return {
        int(edge.source_port.removeprefix("via")): {
            int(request.source_port.removeprefix("server")): request for request in graph.edges_from(edge.target)
        }
        for edge in graph.edges_from(dispatch)
        if edge.source_port.startswith("via")
    }


def bundle_edges(graph: Graph, process: str) -> dict[int, Edge]:
    """Of the process of a group, by the edge of merged responses: the edge of the bundles to the same trampoline."""
    bundles = {
        graph.nodes[edge.target].process: edge
        for node in graph.nodes_of(process)
        for edge in graph.edges_from(node.name)
        if edge.source_port.startswith("via")
    }
    if not bundles:
        return {}
    returning = [edge for edge in graph.edges.values() if graph.nodes[edge.source].kind.relays == "responses"]
    return {edge.id: bundles[graph.nodes[edge.source].process] for edge in returning if graph.nodes[edge.target].process == process}


def window_of(graph: Graph, trampoline: str) -> int:
    """The maximum number of a group's parts that wait for a response through the trampoline in this process."""
    return graph.micro_batches * sum(
        len(graph.edges_from(node.name)) for node in graph.nodes_of(trampoline) if node.kind.relays == "requests"
    )


def group_ports(graph: Graph, returning: str) -> dict[str, str]:
    """Of a `return` node: source -> the output port that leads to the process which emits its tags."""
    return {
        node.name: edge.source_port
        for edge in graph.edges_from(returning)
        for node in graph.nodes_of(graph.nodes[edge.target].process)
        if node.kind.schedules
    }


def check_trampolines(graph: Graph, dispatch: Node) -> Iterator[tuple[Path_, str]]:
    """Problems of the trampolines of a dispatch node, each with its key in the explicit form."""
    leading = {edge.source_port: edge for edge in graph.edges_from(dispatch.name)}
    returned = {graph.nodes[edge.source].process for edge in graph.edges.values() if _is_returned(graph, edge, dispatch.process)}
    responses = {edge.response_to: edge for edge in graph.edges.values() if edge.response_to is not None}
    taken: dict[int, str] = {}
    for port, edge in leading.items():
        if not port.startswith("via"):
            continue
        path: Path_ = ("edges", edge.name)
        if not port.removeprefix("via").isdecimal() or graph.nodes[edge.target].kind.relays != "requests":
            yield path, "a bundle goes from dispatch.via<number> to a forward node; connect it to one"
            return
        trampoline = graph.nodes[edge.target].process
        if trampoline not in returned:
            yield path, f"no merged responses come back from {trampoline}; connect its return node to a collect node of {dispatch.process}"
            return
        if edge.credits < (window := window_of(graph, trampoline)):
            text = f"{edge.credits} is too few: each of {window} parts may travel in a bundle of its own; write at least {window}"
            yield (*path, "credits"), text
            return
        for request in graph.edges_from(edge.target):
            direct, response = leading.get(request.source_port), responses.get(request.name)
            if direct is None or direct.target != request.target:
                yield ("edges", request.name), f"{dispatch.name}.{request.source_port} leads to another node; number the servers alike"
            elif response is None or graph.nodes[response.target].kind.relays != "responses":
                yield ("edges", request.name), f"{request.target} sends no response to a return node of {trampoline}; connect them"
            elif (other := taken.setdefault(int(request.source_port.removeprefix("server")), edge.target)) != edge.target:
                yield path, f"both {other} and {edge.target} forward to {request.source_port}; remove one of them"
            else:
                continue
            return


def _is_returned(graph: Graph, edge: Edge, process: str) -> bool:
    target = graph.nodes[edge.target]
    return graph.nodes[edge.source].kind.relays == "responses" and target.kind.combines == "relayed" and target.process == process
