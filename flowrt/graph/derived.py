"""Remembers what was computed from a graph as long as the graph exists."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from flowrt.graph.model import Graph

P = ParamSpec("P")
T = TypeVar("T")


def derived(function: Callable[Concatenate[Graph, P], T]) -> Callable[Concatenate[Graph, P], T]:
    """Decorator of a pure function of a graph and of further hashable arguments: each Graph computes it once. No caller may change the
    result."""

    @wraps(function)
    def remembered(graph: Graph, /, *args: P.args, **options: P.kwargs) -> T:
        found: dict[Any, T] = vars(graph).setdefault("_derived", {})  # to_json leaves out what begins with an underscore
        key = (function, args, *options.items())
        if key not in found:
            found[key] = function(graph, *args, **options)
        return found[key]

    return remembered
