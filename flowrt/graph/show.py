"""Prints a graph as lines of text: processes with their nodes, experts, fused chains and recovery, then the edges between processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.text import Text

from flowrt.graph.diagrams import drawn_edges, edge_properties, experts_text, is_collapsed, roles
from flowrt.graph.facts import ModelFacts
from flowrt.graph.folded import num_clients, num_edges, num_nodes, num_processes
from flowrt.graph.fuse import Fusion, fuse_all
from flowrt.graph.model import Graph
from flowrt.graph.numerics import numerics_text, strict_processes
from flowrt.graph.recovery import expert_servers, pipelines, rule_of, standby_names, survives
from flowrt.observe import size_text
from flowrt.transports.wire.message import DTYPE_BYTES

_INDENT = 6  # of the rest of a broken line


def print_graph(
    graph: Graph, title: str, console: Console, facts: ModelFacts | None = None, memory: Mapping[str, str] | None = None
) -> None:
    """Prints `graph`; on a terminal with the names of processes and edges in bold, and with long lines broken at spaces.

    `facts` of its model: expert servers have a line on the memory of the requests that they must be able to hold. `memory`: what processes
    need for weights and KV pages.
    """
    _print_line(Text(f"{title}: {_summary(graph)}"), console)
    for key, choice in graph.choices.items():
        _print_line(Text(f"{key}: {choice}"), console)
    for head, rest in _lines(graph, facts, memory or {}):
        _print_line(Text.assemble((head, "bold" if not head.startswith(" ") else "dim"), rest), console)


def _print_line(line: Text, console: Console) -> None:
    """Breaks a line at spaces on a terminal, and indents what follows. Elsewhere, where programs read it, it stays whole."""
    if not console.is_terminal or line.cell_len <= console.width:
        console.print(line, soft_wrap=True)
        return
    first, *others = line.wrap(console, console.width - _INDENT)
    console.print(first)
    for other in others:
        other.pad_left(_INDENT)
        console.print(other)


def summary_of_valid(graph: Graph) -> str:
    """The contents of a graph in one line: its groups, servers and model, and the numbers of processes, nodes and edges."""
    parts = []
    if graph.model is not None:
        groups = set(pipelines(graph))
        servers = {*expert_servers(graph)} - groups
        counts = ((num_processes(graph, groups), "attention group"), (num_processes(graph, servers), "expert server"))
        roles_text = [counted(number, what) for number, what in counts if number]
        parts.append(f"{' and '.join(roles_text)} for {graph.model.path} in {graph.model.dtype}")
    return "; ".join([*parts, ", ".join(_sizes(graph))])


def counted(number: int, what: str) -> str:
    """ "1 node", "3 nodes", "2 processes"."""
    plural = what + ("es" if what.endswith(("s", "ch")) else "s")
    return f"{number} {what if number == 1 else plural}"


def _sizes(graph: Graph) -> list[str]:
    numbers = num_processes(graph, graph.process_names()), num_nodes(graph), num_edges(graph, graph.edges.values())
    return [counted(number, what) for number, what in zip(numbers, ("process", "node", "edge"), strict=True)]


def _summary(graph: Graph) -> str:
    processes, *rest = _sizes(graph)
    parts = [f"{processes} ({graph.processes})", *rest]
    if graph.model is not None:
        bound = "at most " if graph.limits.dynamic_micro_batches and graph.micro_batches > 1 else ""
        parts += [f"model {graph.model.path} in {graph.model.dtype}", bound + counted(graph.micro_batches, "micro-batch")]
    if graph.model is not None and (numerics := numerics_text(graph)) != "fast":
        parts.append(f"numerics {numerics}")
    if graph.emulation is not None:
        parts.append(f"emulated at dilation {graph.emulation.dilation:g}")
    return ", ".join(parts)


def _lines(graph: Graph, facts: ModelFacts | None, memory: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(name, rest) of each line. A large graph has a line per role and pair of roles, with the nodes of the role's first process."""
    fusions, crossing = fuse_all(graph), [edge for edge in graph.edges.values() if graph.crosses(edge)]
    role = roles(graph)
    if is_collapsed(graph):
        counts = Counter[str]()
        for process in fusions:
            counts[role[process]] += num_processes(graph, (process,))
        shown = {role[process]: process for process in reversed(fusions)}
        for name in counts:
            first = shown[name]
            yield f"process {name if counts[name] == 1 else f'{name}, {counts[name]} processes such as {first}'}", ""
            yield from _process_lines(graph, first, fusions[first], facts, memory)
        yield from ((f"edge {edge.source} -> {edge.target}", f": {edge.label}") for edge in drawn_edges(graph))
        return
    for process, fusion in fusions.items():
        yield f"process {process}", _process_properties(graph, process)
        yield from _process_lines(graph, process, fusion, facts, memory)
    for process in standby_names(graph):
        yield f"process {process}", ", takes the place of one that dies"
        yield "  on death:", f" {rule_of(graph, process).recovery}"
    with_response = {edge.response_to for edge in crossing}
    for edge in crossing:
        if edge.response_to is None:  # a response is shown with its request
            name = str(edge).replace(" -> ", " <-> ") if edge.name in with_response else str(edge)
            yield f"edge {name}", f": {', '.join(edge_properties(edge, graph))}"


def _process_properties(graph: Graph, process: str) -> str:
    device, threads = graph.devices.get(process, "cpu"), graph.threads.get(process, "auto")
    host = f", on {graph.host_of(process)}" if graph.hosts is not None else ""
    cores = f", cores {graph.cores[process]}" if process in graph.cores else ""
    computes = (f", {device}" if device != "cpu" else "") + (f", {counted(int(threads), 'thread')}" if threads != "auto" else "")
    numerics = f", {'strict' if process in strict_processes(graph) else 'fast'}" if graph.role_numerics else ""
    return host + computes + cores + numerics


def _process_lines(
    graph: Graph, process: str, fusion: Fusion, facts: ModelFacts | None, memory: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """The work of a process: a line per chain, in which "->" stays within one firing; then its experts, operators and recovery."""

    def short(name: str) -> str:
        return name.removeprefix(f"{process}.")

    nodes = graph.nodes_of(process)
    yield from (("  emits tags:", f" {short(node.name)}") for node in nodes if node.kind.emits)
    for chain in fusion.chains:
        kind = "fires in batches" if graph.nodes[chain[0]].batches else "fires"
        yield f"  {kind}:", f" {' -> '.join(short(name) for name in chain)}"
    yield from (("  holds:", f" experts {experts_text(node.options['experts'])}") for node in nodes if "experts" in node.options)
    yield from (("  memory:", f" {memory[name]}") for name in (process,) if name in memory)
    yield from (("  slots:", f" {text}") for text in _slots_texts(graph, process, facts))
    yield from (("  calls:", f" {short(node.name)} = {node.operator}") for node in nodes if node.kind.is_users)
    rule = rule_of(graph, process)
    yield "  on death:", f" {rule.recovery if survives(graph, process) else 'ends the run'} (state: {rule.keeps})"


def _slots_texts(graph: Graph, process: str, facts: ModelFacts | None) -> Iterator[str]:
    """The requests of other processes that an expert server must be able to hold at once: clients x credits x the largest part."""
    if facts is None or graph.model is None:
        return
    clients = Counter[tuple[int, int]]()  # by credits and bytes of the largest part
    for edge in graph.edges.values():
        target = graph.nodes[edge.target]
        if graph.crosses(edge) and target.process == process and target.kind.serves:
            rows, item_bytes = graph.limits_of(graph.nodes[edge.source].process).max_num_batched_tokens, DTYPE_BYTES[graph.model.dtype]
            # A part has each row of a step once, and for each pair of a row and an expert their numbers and the weight.
            clients[edge.credits, rows * (facts.hidden_size * item_bytes + facts.num_experts_per_token * (16 + item_bytes))] += num_clients(
                graph, edge
            )
    for (credits, part_bytes), count in clients.items():
        total = size_text(count * credits * part_bytes)
        yield f"{counted(count, 'client')} x {counted(credits, 'credit')} x {size_text(part_bytes)} = {total}"
