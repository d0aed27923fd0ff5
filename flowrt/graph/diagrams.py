"""Renders a graph as text for drawing tools: Mermaid and Graphviz."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrt.graph.model import GATEWAY, Edge, Graph, Node, role_of
from flowrt.graph.notation import format_ids

MAX_DRAWN_NODES = 60  # above this, drawings show roles (attention.0-15) instead of nodes


@dataclass(frozen=True)
class Box:
    """A process with its nodes; where the drawing is collapsed, a role without nodes. `nodes`: name -> words."""

    name: str
    words: list[str]
    nodes: dict[str, list[str]]


@dataclass(frozen=True)
class Arrow:
    """The edges between two nodes, or between two roles. `crosses`: between processes. `advances`: to the next layer or step."""

    source: str
    target: str
    label: str
    crosses: bool
    advances: bool


def is_collapsed(graph: Graph) -> bool:
    """Whether drawings of this graph show roles instead of nodes."""
    return len(graph.nodes) > MAX_DRAWN_NODES


def roles(graph: Graph) -> dict[str, str]:
    """process -> its name in a collapsed drawing: "attention.0-15" for each of attention.0 to attention.15."""
    numbers: dict[str, list[int]] = {}
    for process in graph.process_names():
        role, _, number = process.rpartition(".")
        if role_of(process) == role:
            numbers.setdefault(role, []).append(int(number))
    ranges = {role: f"{role}.{format_ids(members)}" for role, members in numbers.items()}
    return {process: ranges.get(role_of(process), process) for process in [*graph.process_names(), GATEWAY]}


def boxes(graph: Graph) -> Iterator[Box]:
    """Yield every process or role; the gateway last, if the graph has an input or output."""
    names = roles(graph) if is_collapsed(graph) else {process: process for process in [*graph.process_names(), GATEWAY]}
    found: dict[str, list[Node]] = {name: [] for name in names.values()}
    for node in graph.nodes.values():
        found[names[node.process]].append(node)
    for name, nodes in found.items():
        if nodes and is_collapsed(graph):
            num_processes = len({node.process for node in nodes})
            yield Box(name, [name, (f"{num_processes} processes, " if num_processes > 1 else "") + f"{len(nodes)} nodes"], {})
        elif nodes:
            yield Box(name, [name], {node.name: _node_words(node) for node in nodes})


def arrows(graph: Graph) -> Iterator[Arrow]:
    """Yield the arrows between nodes, or between roles; parallel edges are one arrow."""
    collapsed, role = is_collapsed(graph), roles(graph)
    found: dict[tuple[str, str], list[Edge]] = {}
    for edge in graph.edges.values():
        source, target = graph.ends_of(edge)
        ends = (role[source], role[target]) if collapsed else (edge.source, edge.target)
        if not collapsed or ends[0] != ends[1]:
            found.setdefault(ends, []).append(edge)
    for ends, edges in found.items():
        first = f"{len(edges)} edges" if collapsed else ", ".join(dict.fromkeys(edge.source_port for edge in edges))
        label = "; ".join(dict.fromkeys([first, *(word for edge in edges for word in _edge_words(edge, graph))]))
        yield Arrow(*ends, label, graph.crosses(edges[0]), all(edge.tag.advances for edge in edges))


def experts_words(option: object) -> str:
    """The experts of a node: "0-5", or "by layer" where layers differ."""
    return str(option) if isinstance(option, str | int) else "by layer"


def _node_words(node: Node) -> list[str]:
    words = [node.name.removeprefix(f"{node.process}.")]
    if ":" in node.operator:
        words.append(node.operator)
    if "experts" in node.options:
        words.append(f"experts {experts_words(node.options['experts'])}")
    return words


def _edge_words(edge: Edge, graph: Graph) -> Iterator[str]:
    """Yield the transport, link, credits, layers and tag that the edge has."""
    if graph.crosses(edge):
        yield edge.transport + (f" ({edge.link})" if edge.link else "")
        yield "response" if edge.response_to is not None else f"{edge.credits} credit{'s' * (edge.credits != 1)}"
    if str(edge.layers):
        yield f"layer{'s' * (len(edge.layers.layers or ()) > 1)} {edge.layers}"
    if str(edge.tag):
        yield str(edge.tag)


def to_mermaid(graph: Graph) -> str:
    """A Mermaid flowchart with a subgraph per process."""
    lines, ids = ["flowchart LR"], dict[str, str]()
    for number, box in enumerate(boxes(graph)):
        if not box.nodes:
            ids[box.name] = f"p{number}"
            lines.append(f'  p{number}["{"<br/>".join(box.words)}"]')
            continue
        lines.append(f'  subgraph p{number}["{box.name}"]')
        for name, words in box.nodes.items():
            ids[name] = f"n{len(ids)}"
            lines.append(f'    {ids[name]}["{"<br/>".join(words)}"]')
        lines.append("  end")
    lines += [f'  {ids[arrow.source]} {"==>" if arrow.crosses else "-->"}|"{arrow.label}"| {ids[arrow.target]}' for arrow in arrows(graph)]
    return "\n".join(lines) + "\n"


def to_dot(graph: Graph) -> str:
    """A Graphviz digraph with a cluster per process."""
    lines = [
        "digraph flowrt {",
        "  rankdir=LR;",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif", fontsize=11];',
        '  edge [fontname="sans-serif", fontsize=9];',
    ]
    for number, box in enumerate(boxes(graph)):
        if not box.nodes:
            lines.append(f'  "{box.name}" [label="{_dot(box.words)}"];')
            continue
        lines += [f"  subgraph cluster_{number} {{", f'    label="{box.name}"; style="rounded,filled"; fillcolor="#f4f6f8";']
        lines += [f'    "{name}" [label="{_dot(words)}"];' for name, words in box.nodes.items()]
        lines.append("  }")
    for arrow in arrows(graph):
        style = ', color="#b5502c", penwidth=2' if arrow.crosses else ', color="#2d6fb3", style=dashed' if arrow.advances else ""
        lines.append(f'  "{arrow.source}" -> "{arrow.target}" [label="{arrow.label}"{style}];')
    return "\n".join([*lines, "}"]) + "\n"


def _dot(words: list[str]) -> str:
    return r"\n".join(words)
