"""graph: the graph on paper. Reading graph files, expanding the short form, checking, fusing. Pure: no torch, no process.

The names below load on first use, so that workers, which need only the data types, do not load the YAML and schema libraries.
`fuse` is in `flowrt.graph.fuse`: a package cannot offer a function by the name of one of its modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrt.graph.facts import ModelFacts
    from flowrt.graph.file import load_graph
    from flowrt.graph.fuse import Fusion, fuse_all
    from flowrt.graph.json_form import from_json, to_json
    from flowrt.graph.model import Edge, Graph, GraphLimits, Node
    from flowrt.graph.written import to_yaml

_HOME = {
    "ModelFacts": "facts",
    "load_graph": "file",
    "Fusion": "fuse",
    "fuse_all": "fuse",
    "from_json": "json_form",
    "to_json": "json_form",
    "Edge": "model",
    "Graph": "model",
    "GraphLimits": "model",
    "Node": "model",
    "to_yaml": "written",
}
__all__ = ["Edge", "Fusion", "Graph", "GraphLimits", "ModelFacts", "Node", "from_json", "fuse_all", "load_graph", "to_json", "to_yaml"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"flowrt.graph.{_HOME[name]}"), name)
