"""A graph in the terminal: processes with their nodes, experts and fused chains, then the edges between processes.

Here: `print_graph`, with rich, and `valid_words`, a graph in one line. Not here: other drawings (diagrams.py, drawing.py). Called by
`flowrt graph show|validate`; `flowrt run` prints its own account of a run. Where the output is no terminal, or NO_COLOR is set, plain
lines come out.
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flowrt.graph.diagrams import experts_words, is_collapsed, roles
from flowrt.graph.fuse import Fusion, fuse_all
from flowrt.graph.model import Edge, Graph, Node


def print_graph(graph: Graph, title: str, console: Console) -> None:
    """Draws `graph` on `console`: boxes and tables on a terminal, else plain lines."""
    fusions = fuse_all(graph)
    if not console.is_terminal:
        _print_plain(graph, title, fusions, console)
        return
    console.print(Text(title, style="bold"), Text(_summary(graph), style="dim"))
    for name, lines in _processes(graph, fusions):
        console.print(_box(name, lines))
    crossing = [edge for edge in graph.edges.values() if graph.crosses(edge)]
    if crossing:
        console.print(_table(graph, crossing))


def valid_words(graph: Graph) -> str:
    """What a graph is made of, for one line: what serves which model, or what goes in and comes out; processes, nodes and edges."""
    words = []
    if graph.model is not None:
        groups = {node.process for node in graph.nodes.values() if node.operator == "source"}
        parts = [counted(len(groups), "attention group")]
        servers = {node.process for node in graph.nodes.values() if node.operator == "experts"} - groups
        if servers:
            parts.append(counted(len(servers), "expert server"))
        words.append(f"{' and '.join(parts)} for {graph.model.path} in {graph.model.dtype}")
    sizes = (counted(len(graph.process_names()), "process"), counted(len(graph.nodes), "node"), counted(len(graph.edges), "edge"))
    return "; ".join([*words, ", ".join(sizes)])


def _summary(graph: Graph) -> str:
    words = [f"{counted(len(graph.process_names()), 'process')} ({graph.processes})"]
    words += [counted(len(graph.nodes), "node"), counted(len(graph.edges), "edge")]
    if graph.model is not None:
        words.append(f"model {graph.model.path} in {graph.model.dtype}")
        words.append(counted(graph.micro_batches, "micro-batch"))
    if graph.emulation is not None:
        words.append(f"emulated at dilation {graph.emulation.dilation:g}")
    return ", ".join(words)


def counted(number: int, what: str) -> str:
    """ "1 node", "3 nodes", "2 processes"."""
    plural = what + ("es" if what.endswith(("s", "ch")) else "s")
    return f"{number} {what if number == 1 else plural}"


def _title(graph: Graph, process: str) -> str:
    words = [process]
    if graph.devices.get(process, "cpu") != "cpu":
        words.append(graph.devices[process])
    if graph.threads.get(process, "auto") != "auto":
        words.append(f"{graph.threads[process]} thread{'' if graph.threads[process] in (1, '1') else 's'}")
    return ", ".join(words)


def _lines(graph: Graph, process: str, fusion: Fusion) -> list[str]:
    """What a process does: one line per chain, in which "->" is one firing, then sources and experts held."""

    def short(name: str) -> str:
        return name.removeprefix(f"{process}.")

    nodes = graph.nodes_of(process)
    emitting = [short(node.name) for node in nodes if node.operator == "source"]
    lines = [f"mints tags: {name}" for name in emitting]
    for chain in fusion.chains:
        head = graph.nodes[chain[0]]
        waits = "batches" if head.batches else "waits"
        lines.append(f"{waits}: " + " -> ".join(short(name) for name in chain))
    lines += [f"holds: {words}" for node in nodes if (words := _holds(node))]
    lines += [f"calls: {short(node.name)} = {node.operator}" for node in nodes if ":" in node.operator]
    return lines


def _holds(node: Node) -> str:
    return f"experts {experts_words(node.options['experts'])}" if "experts" in node.options else ""


def _processes(graph: Graph, fusions: dict[str, Fusion]) -> list[tuple[str, list[str]]]:
    """Title and lines of each process; in a large graph, of each role, with the lines of its first process."""
    if not is_collapsed(graph):
        return [(_title(graph, process), _lines(graph, process, fusions[process])) for process in graph.process_names()]
    found: dict[str, list[str]] = {}
    for process, role in roles(graph).items():
        if process in fusions:
            found.setdefault(role, []).append(process)
    listed = []
    for role, members in found.items():
        first = members[0]
        title = role if len(members) == 1 else f"{role}, {len(members)} processes such as {first}"
        listed.append((title, _lines(graph, first, fusions[first])))
    return listed


def _box(title: str, lines: list[str]) -> RenderableType:
    rows: list[RenderableType] = []
    for line in lines:
        word, _, rest = line.partition(": ")
        rows.append(Text.from_markup(f"[dim]{word}:[/dim] {escape(rest)}"))
    return Panel(Group(*rows), title=escape(title), title_align="left", border_style="cyan", expand=False)


def _table(graph: Graph, edges: list[Edge]) -> RenderableType:
    """Columns that nothing stands in are left out: the rest has their room."""
    rows = _rows(graph, edges)
    heads = ("between processes", "transport", "link", "credits", "layers")
    used = [number for number, _ in enumerate(heads) if any(row[number] for row in rows)]
    table = Table(*(heads[number] for number in used), box=None, header_style="dim", pad_edge=False)
    for row in rows:
        table.add_row(*(row[number] for number in used))
    return table


def _rows(graph: Graph, edges: list[Edge]) -> list[tuple[str, str, str, str, str]]:
    if is_collapsed(graph):
        return _collapsed_rows(graph, edges)
    rows = []
    answered = {edge.response_to for edge in edges}
    for edge in edges:
        if edge.response_to is not None:
            continue  # shown with its request
        tag = f" ({edge.tag})" if str(edge.tag) else ""
        name, arrow = f"{edge.source}.{edge.source_port}", "<->" if edge.name in answered else "->"
        rows.append((f"{name} {arrow} {edge.target}.{edge.target_port}{tag}", *_columns(edge)))
    return rows


def _columns(edge: Edge) -> tuple[str, str, str, str]:
    return edge.transport, edge.link or "", str(edge.credits or ""), str(edge.layers)


def _collapsed_rows(graph: Graph, edges: list[Edge]) -> list[tuple[str, str, str, str, str]]:
    role = roles(graph)
    found: dict[tuple[str, str, str, str, str], int] = {}
    for edge in edges:
        source, target = role[graph.nodes[edge.source].process], role[graph.nodes[edge.target].process]
        key = (f"{source} -> {target}", *_columns(edge))
        found[key] = found.get(key, 0) + 1
    return [(f"{words[0]}: {counted(number, 'edge')}", *words[1:]) for words, number in found.items()]


def _print_plain(graph: Graph, title: str, fusions: dict[str, Fusion], console: Console) -> None:
    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    line(f"{title}: {_summary(graph)}")
    for name, lines in _processes(graph, fusions):
        line(f"process {name}")
        for text in lines:
            line(f"  {text}")
    for words in _rows(graph, [edge for edge in graph.edges.values() if graph.crosses(edge)]):
        name, transport, link, credits, layers = words
        rest = [transport, *([f"link {link}"] if link else []), *([f"credits {credits}"] if credits else [])]
        line(f"edge {name}: {', '.join(rest + ([f'layers {layers}'] if layers else []))}")
