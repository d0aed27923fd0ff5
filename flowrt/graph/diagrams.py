"""A graph as text for other people's drawing tools: Mermaid and Graphviz. Called by `flowrt graph show --mermaid|--dot`.

Here: both texts and the words on nodes and edges that all drawings share. Not here: the SVG (drawing.py), the terminal (show.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrt.graph.model import GATEWAY, Edge, Graph, Node
from flowrt.graph.notation import format_ids

MAX_DRAWN_NODES = 60  # above this, drawings show roles (attention.0-15) instead of nodes


@dataclass(frozen=True)
class Arrow:
    """One line of a drawing, between nodes (or processes, where the drawing is collapsed); it may stand for several edges.

    `ports` are the sender's, `words` say how messages travel. `crosses`: between processes. `advances`: to the next layer or step.
    """

    source: str
    target: str
    ports: str
    words: tuple[str, ...]
    crosses: bool
    advances: bool

    @property
    def label(self) -> str:
        return "; ".join(word for word in (self.ports, *self.words) if word)


def short_name(node: Node) -> str:
    """A node's name without its process, which the box around it shows."""
    return node.name.removeprefix(f"{node.process}.")


def node_words(node: Node) -> list[str]:
    """What a drawing writes into a node: its name, a user's operator, the experts it holds."""
    words = [short_name(node)]
    if ":" in node.operator:
        words.append(node.operator)
    if "experts" in node.options:
        words.append(f"experts {experts_words(node.options['experts'])}")
    return words


def experts_words(option: object) -> str:
    """ "0-5", or "by layer" where layers differ."""
    return str(option) if isinstance(option, str | int) else "by layer"


def edge_words(edge: Edge, graph: Graph) -> list[str]:
    """What a drawing writes beside an edge, most important first: transport, link, credits, layers, tag."""
    words = []
    if graph.crosses(edge):
        words.append(edge.transport + (f" ({edge.link})" if edge.link else ""))
        if edge.response_to is None:
            words.append(f"{edge.credits} credit" + ("s" if edge.credits != 1 else ""))
        else:
            words.append("answer")
    if str(edge.layers):
        words.append(f"layers {edge.layers}" if len(edge.layers.layers or ()) > 1 else f"layer {edge.layers}")
    if str(edge.tag):
        words.append(str(edge.tag))
    return words


def is_collapsed(graph: Graph) -> bool:
    """Whether drawings of this graph show processes only, those of one role together."""
    return len(graph.nodes) > MAX_DRAWN_NODES


def roles(graph: Graph) -> dict[str, str]:
    """process -> the role it is drawn under in a collapsed drawing: "attention.0-15" for all of attention.0 to attention.15."""
    numbers: dict[str, list[int]] = {}
    for process in graph.process_names():
        name, _, number = process.rpartition(".")
        if name and number.isascii() and number.isdigit() and str(int(number)) == number:
            numbers.setdefault(name, []).append(int(number))
    found = {process: process for process in [*graph.process_names(), GATEWAY]}
    for name, members in numbers.items():
        found |= {f"{name}.{number}": f"{name}.{format_ids(members)}" for number in members}
    return found


def collapsed_words(role: str, nodes: list[Node]) -> list[str]:
    """What a collapsed drawing writes into a role."""
    num_processes = len({node.process for node in nodes})
    return [role, f"{num_processes} processes, {len(nodes)} nodes" if num_processes > 1 else f"{len(nodes)} nodes"]


def arrows(graph: Graph) -> list[Arrow]:
    """The lines between nodes, or between roles where the graph is large; parallel ones are one."""
    collapsed, role = is_collapsed(graph), roles(graph)
    found: dict[tuple[str, str], list[Edge]] = {}
    for edge in graph.edges.values():
        ends = (edge.source, edge.target)
        if collapsed:
            ends = (role[graph.nodes[edge.source].process], role[graph.nodes[edge.target].process])
        if not collapsed or ends[0] != ends[1]:
            found.setdefault(ends, []).append(edge)
    return [_arrow(ends, edges, graph, collapsed) for ends, edges in found.items()]


def _arrow(ends: tuple[str, str], edges: list[Edge], graph: Graph, collapsed: bool) -> Arrow:
    ports = "" if collapsed else ", ".join(dict.fromkeys(edge.source_port for edge in edges))
    words = tuple(dict.fromkeys(word for edge in edges for word in edge_words(edge, graph)))
    if collapsed:
        words = (f"{len(edges)} edges", *words)
    return Arrow(*ends, ports, words, graph.crosses(edges[0]), all(edge.tag.advances for edge in edges))


def boxes(graph: Graph) -> Iterator[tuple[str, list[Node]]]:
    """Every process (or role, where the graph is large) with its nodes; the gateway last, if the graph has an input or output."""
    names = roles(graph) if is_collapsed(graph) else {process: process for process in [*graph.process_names(), GATEWAY]}
    found: dict[str, list[Node]] = {name: [] for name in names.values()}
    for node in graph.nodes.values():
        found[names[node.process]].append(node)
    yield from ((name, nodes) for name, nodes in found.items() if nodes)


def to_mermaid(graph: Graph) -> str:
    """A Mermaid flowchart; one subgraph per process."""
    ids = _ids(graph)
    lines = ["flowchart LR"]
    for process, nodes in boxes(graph):
        if is_collapsed(graph):
            lines.append(f'  {ids[process]}["{"<br/>".join(collapsed_words(process, nodes))}"]')
            continue
        lines.append(f'  subgraph {ids[process]}["{process}"]')
        lines += [f'    {ids[f"node {node.name}"]}["{"<br/>".join(node_words(node))}"]' for node in nodes]
        lines.append("  end")
    prefix = "" if is_collapsed(graph) else "node "
    for arrow in arrows(graph):
        line = "==>" if arrow.crosses else "-->"
        lines.append(f'  {ids[prefix + arrow.source]} {line}|"{arrow.label}"| {ids[prefix + arrow.target]}')
    return "\n".join(lines) + "\n"


def to_dot(graph: Graph) -> str:
    """A Graphviz digraph; one cluster per process."""
    ids = _ids(graph)
    lines = ["digraph flowrt {", "  rankdir=LR;", '  node [shape=box, style=rounded, fontname="sans-serif", fontsize=11];']
    lines.append('  edge [fontname="sans-serif", fontsize=9];')
    for process, nodes in boxes(graph):
        if is_collapsed(graph):
            words = r"\n".join(collapsed_words(process, nodes))
            lines.append(f'  {ids[process]} [label="{words}"];')
            continue
        lines.append(f"  subgraph cluster_{ids[process]} {{")
        lines.append(f'    label="{process}";')
        for node in nodes:
            words = r"\n".join(node_words(node))
            lines.append(f'    {ids[f"node {node.name}"]} [label="{words}"];')
        lines.append("  }")
    prefix = "" if is_collapsed(graph) else "node "
    for arrow in arrows(graph):
        style = ", penwidth=2" if arrow.crosses else ""
        lines.append(f'  {ids[prefix + arrow.source]} -> {ids[prefix + arrow.target]} [label="{arrow.label}"{style}];')
    lines.append("}")
    return "\n".join(lines) + "\n"


def _ids(graph: Graph) -> dict[str, str]:
    """Names that both languages accept, for processes and for "node NAME"."""
    processes = [process for process, _ in boxes(graph)]
    ids = {process: f"p{index}" for index, process in enumerate(processes)}
    return ids | {f"node {name}": f"n{index}" for index, name in enumerate(graph.nodes)}
