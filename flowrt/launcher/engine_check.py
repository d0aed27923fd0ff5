"""Checks that what the engine of a graph's hosts needs is installed, before anything starts."""

from __future__ import annotations

from importlib.util import find_spec

from flowrt.errors import install_command
from flowrt.graph.model import Graph


def check_engine(graph: Graph) -> None:
    """Raises GraphError for hosts of a Ray cluster without Ray."""
    if graph.hosts is not None and graph.hosts.engine == "ray" and find_spec("ray") is None:
        raise graph.error("hosts.engine", f"ray is not installed: {install_command('ray')}, or write local to try it on this machine")
