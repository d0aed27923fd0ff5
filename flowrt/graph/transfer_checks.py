"""Checks the KV transfers of a graph: any group may get any prompt, so it must be able to pull from every prefill worker. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from flowrt.graph.document import Path_
from flowrt.graph.model import Graph
from flowrt.graph.recovery import attention_groups, prefill_workers


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
