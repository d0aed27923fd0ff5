"""Builds the report of a run as data: the nodes and work of each process, and the traffic between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowrt.actors.control import Statistics
from flowrt.emulation import EmulationReport, emulation_report
from flowrt.graph.model import Graph


@dataclass(frozen=True)
class ProcessReport:
    """One worker. `busy_share` is the part of the time since the start in which it computed; None without statistics of it. `pid` is 0 on
    another host; `host` is "" where there is one."""

    name: str
    pid: int
    holds: str
    transports: tuple[str, ...]
    resident_bytes: int | None
    busy_share: float | None
    num_firings: int | None
    num_steps: int | None
    host: str = ""


@dataclass(frozen=True)
class EdgeReport:
    """All edges from one process to another over the same kind of link. Bytes are those of tensors, without headers."""

    source: str
    target: str
    transport: str
    link: str | None
    num_messages: int
    payload_bytes: int


@dataclass(frozen=True)
class RunReport:
    """The processes and edges of a run. `start_seconds` is from the launch to the last connection; None when the start failed.
    `strict_blocks`: with strict numerics, the blocks in which rows are computed, by process."""

    processes: tuple[ProcessReport, ...]
    edges: tuple[EdgeReport, ...]
    start_seconds: float | None
    late_wakeups: int
    strict_blocks: Mapping[str, str] = field(default_factory=dict)
    emulation: EmulationReport | None = None
    transport_reasons: tuple[str, ...] = ()  # for the transports that `auto` chose
    num_prefix_queries: int = 0  # tokens of prompts that were looked up in prefix caches, and those that were found
    num_prefix_hits: int = 0


def report_of(
    graph: Graph,
    pids: Mapping[str, int],
    statistics: Mapping[str, Statistics],
    loaded_bytes: Mapping[str, int],
    start_seconds: float | None,
    seconds: float | None,
) -> RunReport:
    """`graph` with its transports resolved; `statistics` may lack workers; `seconds` is how long the workers have been up."""

    def process_report(name: str) -> ProcessReport:
        transports = (edge.transport for edge in graph.edges.values() if graph.crosses(edge) and name in graph.ends_of(edge))
        counters = statistics.get(name)
        return ProcessReport(
            name=name,
            pid=pids.get(name, 0),
            holds=holds(graph, name),
            transports=tuple(dict.fromkeys(transports)),
            resident_bytes=counters.resident_bytes if counters is not None else loaded_bytes.get(name),
            busy_share=min(1.0, counters.compute_seconds / seconds) if counters is not None and seconds else None,
            num_firings=counters.num_firings if counters is not None else None,
            num_steps=counters.num_steps if counters is not None else None,
            host=graph.shown_host(name),
        )

    return RunReport(
        processes=tuple(map(process_report, graph.process_names())),
        edges=_edges(graph, statistics),
        start_seconds=start_seconds,
        late_wakeups=sum(each.late_wakeups for each in statistics.values()),
        emulation=_emulation(graph, statistics),
        transport_reasons=tuple(dict.fromkeys(edge.why for edge in graph.edges.values() if edge.why)),
        num_prefix_queries=sum(each.num_prefix_queries for each in statistics.values()),
        num_prefix_hits=sum(each.num_prefix_hits for each in statistics.values()),
        strict_blocks={name: each.strict_blocks for name, each in statistics.items() if each.strict_blocks},
    )


def holds(graph: Graph, process: str) -> str:
    """What a process holds, in a few words: "embed, attention, gate, head", "experts 0-4"."""
    names, nodes = list[str](), graph.nodes_of(process)
    moving = [node for node in nodes if node.kind.schedules or node.kind.dispatches or node.kind.gathers]  # not named beside others
    for node in [node for node in nodes if node not in moving] or nodes:
        option = node.options.get("experts")
        if isinstance(option, Mapping):
            names += [f"{node.operator} {ids} (layers {layers})" for layers, ids in option.items()]
        elif option is not None:
            names.append(f"{node.operator} {option}")
        else:
            names.append(node.operator)
    return ", ".join(dict.fromkeys(names))


def _emulation(graph: Graph, statistics: Mapping[str, Statistics]) -> EmulationReport | None:
    if graph.emulation is None:
        return None
    return emulation_report(graph.emulation.dilation, [each.emulation for each in statistics.values() if each.emulation is not None])


def _edges(graph: Graph, statistics: Mapping[str, Statistics]) -> tuple[EdgeReport, ...]:
    sent = {each.edge: each for counters in statistics.values() for each in counters.edges}
    sums: dict[tuple[str, str, str, str | None], list[int]] = {}
    for edge in graph.edges.values():
        if graph.crosses(edge):
            total = sums.setdefault((*graph.ends_of(edge), edge.transport, edge.link), [0, 0])
            if (each := sent.get(edge.name)) is not None:
                total[0] += each.num_messages
                total[1] += each.payload_bytes
    return tuple(EdgeReport(*key, *total) for key, total in sums.items())
