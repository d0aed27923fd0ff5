"""Renders a graph as text for drawing tools: Mermaid and Graphviz."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrt.graph.folded import num_edges, num_processes
from flowrt.graph.model import GATEWAY, Edge, Graph, Node, role_of
from flowrt.graph.notation import format_ids

_BREAK = r"\n"  # of lines in Graphviz labels
COLOURS = ("#b5502c", "#2d6fb3", "#2a7f62", "#7b4ea3", "#9a7400", "#b03a73")  # dark enough for text on white
MAX_DRAWN_NODES = 60  # above this, drawings show roles (attention.0-15) instead of nodes


@dataclass(frozen=True)
class DrawnEdge:
    """The edges between two nodes, or between two roles.

    `colour` is one of COLOURS for edges between processes, alike for a request and its response. `advances`: to the next layer or step.
    """

    source: str
    target: str
    label: str
    colour: str | None
    advances: bool


def is_collapsed(graph: Graph) -> bool:
    """Whether drawings of this graph show roles instead of nodes."""
    return bool(graph.folded) or len(graph.nodes) > MAX_DRAWN_NODES


def roles(graph: Graph) -> dict[str, str]:
    """process -> its name in a collapsed drawing: "attention.0-15" for each of attention.0 to attention.15."""
    numbers: dict[str, list[int]] = {}
    for process in graph.process_names():
        role, _, number = process.rpartition(".")
        if role_of(process) == role:
            own = numbers.setdefault(role, [])
            own += range(len(own), len(own) + graph.folded[process]) if graph.folded else [int(number)]
    ranges = {role: f"{role}.{format_ids(members)}" for role, members in numbers.items()}
    return {process: ranges.get(role_of(process), process) for process in [*graph.process_names(), GATEWAY]}


def clusters(graph: Graph) -> dict[str, dict[str, list[str]]]:
    """process -> node -> the lines of its label, the gateway last; where the drawing is collapsed, all roles under ""."""
    if not is_collapsed(graph):
        found = {process: graph.nodes_of(process) for process in [*graph.process_names(), GATEWAY]}
        return {process: {node.name: _node_label(node) for node in nodes} for process, nodes in found.items() if nodes}
    role, members = roles(graph), dict[str, list[Node]]()
    for node in graph.nodes.values():
        members.setdefault(role[node.process], []).append(node)
    return {"": {name: [name, _sizes(graph, nodes)] for name, nodes in members.items()}}


def drawn_edges(graph: Graph) -> Iterator[DrawnEdge]:
    """Yield the edges between nodes, or between roles; parallel edges are one."""
    collapsed, role = is_collapsed(graph), roles(graph)
    found: dict[tuple[str, str], list[Edge]] = {}
    colours: dict[str, str] = {}  # of the process whose operators serve the request, or which receives the message
    for edge in graph.edges.values():
        source, target = graph.ends_of(edge)
        ends = (role[source], role[target]) if collapsed else (edge.source, edge.target)
        if not collapsed or ends[0] != ends[1]:
            found.setdefault(ends, []).append(edge)
    for ends, edges in found.items():
        first = f"{num_edges(graph, edges)} edges" if collapsed else ", ".join(dict.fromkeys(edge.source_port for edge in edges))
        label = "; ".join(dict.fromkeys([first, *(text for edge in edges for text in edge_properties(edge, graph))]))
        source, target = graph.ends_of(edges[0])
        server = target if edges[0].response_to is None else source
        colour = colours.setdefault(server, COLOURS[len(colours) % len(COLOURS)]) if source != target else None
        yield DrawnEdge(*ends, label, colour, all(edge.tag.advances for edge in edges))


def experts_text(option: object) -> str:
    """The experts of a node: "0-5", or "by layer" where layers differ."""
    return str(option) if isinstance(option, str | int) else "by layer"


def edge_properties(edge: Edge, graph: Graph) -> Iterator[str]:
    """Yield the transport, emulated link, credits, layers and tag that the edge has."""
    if edge.response_to is not None and graph.crosses(edge):
        yield "response"  # over the link of its request
    elif graph.crosses(edge):
        yield edge.transport + (f" ({edge.link})" if edge.link and graph.emulation is not None else "")
        yield f"{edge.credits} credit{'s' * (edge.credits != 1)}" if edge.credits else "responses"
    if str(edge.layers):
        yield f"layer{'s' * (len(edge.layers.layers or ()) > 1)} {edge.layers}"
    if str(edge.tag):
        yield str(edge.tag)


def _node_label(node: Node) -> list[str]:
    lines = [node.name.removeprefix(f"{node.process}."), *([node.operator] if node.kind.is_users else [])]
    return lines + ([f"experts {experts_text(node.options['experts'])}"] if "experts" in node.options else [])


def _sizes(graph: Graph, nodes: list[Node]) -> str:
    count = num_processes(graph, {node.process for node in nodes})
    return (f"{count} processes, " if count > 1 else "") + f"{num_processes(graph, (node.process for node in nodes))} nodes"


def to_mermaid(graph: Graph) -> str:
    """A Mermaid flowchart with a subgraph per process."""
    lines, ids = ["flowchart LR"], dict[str, str]()
    for number, (process, nodes) in enumerate(clusters(graph).items()):
        lines += [f'  subgraph p{number}["{process}"]'] if process else []
        for name, label in nodes.items():
            ids[name] = f"n{len(ids)}"
            lines.append(f'    {ids[name]}["{"<br/>".join(label)}"]')
        lines += ["  end"] if process else []
    lines += [f'  {ids[edge.source]} {"==>" if edge.colour else "-->"}|"{edge.label}"| {ids[edge.target]}' for edge in drawn_edges(graph)]
    return "\n".join(lines) + "\n"


def to_dot(graph: Graph) -> str:
    """A Graphviz digraph with a cluster per process."""
    lines = [
        "digraph flowrt {",
        "  rankdir=LR; nodesep=0.4; ranksep=0.7;",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif", fontsize=11];',
        '  edge [fontname="sans-serif", fontsize=9];',
    ]
    for number, (process, nodes) in enumerate(clusters(graph).items()):
        if process:
            lines += [f"  subgraph cluster_{number} {{", f'    label="{process}"; style="rounded,filled"; fillcolor="#f4f6f8";']
        lines += [f'  "{name}" [label="{_BREAK.join(label)}"];' for name, label in nodes.items()]
        lines += ["  }"] if process else []
    for edge in drawn_edges(graph):
        style = ", style=dashed" if edge.advances else ""
        if edge.colour is not None:  # a label has the colour of its line, and a thin line to it
            style += f', color="{edge.colour}", fontcolor="{edge.colour}", penwidth=2, decorate=true'
        lines.append(f'  "{edge.source}" -> "{edge.target}" [label="{edge.label}"{style}];')
    return "\n".join([*lines, "}"]) + "\n"
