"""Rows between dispatch and experts, and KV, that travel as INT8 (xDeepServe section 3.2): which edges carry them, and where."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from flowrt.document import Path_
from flowrt.graph.kinds import kind_of
from flowrt.graph.model import Edge, Graph
from flowrt.graph.numerics import is_strict, numerics_text, strict_exchanges


@lru_cache(maxsize=1 << 12)  # asked for each edge of a mesh
def carries_rows(operator: str, port: str, choice: str) -> bool:
    """Whether an output carries rows of this choice: "dispatch", "combine" or "both"."""
    found = kind_of(operator).output(port)
    return found is not None and found.int8 in ("dispatch", "combine") and choice in (found.int8, "both")


def check_int8(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Problems of edges whose rows travel as INT8, each with its key in the explicit form."""
    for edge in graph.edges.values():
        if edge.int8 and (why := _fault(graph, edge)):
            yield ("edges", edge.name, "int8"), why


def _fault(graph: Graph, edge: Edge) -> str:
    source = graph.nodes[edge.source]
    if not ((port := source.kind.output(edge.source_port)) and port.int8):
        return "INT8 is for rows between dispatch and experts, and for KV; remove the key"
    if not graph.crosses(edge):
        return f"both ends are in process {source.process}, where messages do not travel; remove the key"
    if port.int8 == "kv" and graph.model is not None and graph.model.kv_cache == "int8":
        return "KV is kept as INT8 (model.kv_cache) and travels so; remove the key"
    ends = graph.ends_of(edge)
    needs_bits = all(is_strict(graph, end) for end in ends) if port.int8 == "kv" else not strict_exchanges(graph).isdisjoint(ends)
    return f"INT8 changes the numbers, and numerics are {numerics_text(graph)}; write fast, or no int8" if needs_bits else ""
