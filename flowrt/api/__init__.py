"""The Python API: opens a graph, sends it requests, and closes it; `start` and `generate` block, `open_graph` is for coroutines."""

from flowrt.api.attached_graph import AttachedGraph, attach
from flowrt.api.blocking import BlockingGraph, generate, start
from flowrt.api.opening import open_graph, read_graph
from flowrt.api.running_graph import RunningGraph
from flowrt.gateway.completion import Choice, Completion

__all__ = [
    "AttachedGraph",
    "BlockingGraph",
    "Choice",
    "Completion",
    "RunningGraph",
    "attach",
    "generate",
    "open_graph",
    "read_graph",
    "start",
]
