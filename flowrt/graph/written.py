"""Writes a graph as a graph file of the explicit form, which loads back to an equal graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from msgspec import to_builtins

from flowrt.costs.links import link_numbers
from flowrt.document import plain_value
from flowrt.graph.fuse import fuse_all
from flowrt.graph.model import GATEWAY, Edge, Graph, ModelPart, Node, PortSpec, edge_name
from flowrt.graph.schema import keys_of
from flowrt.graph.settings import GraphSettings


def to_yaml(graph: Graph, origin: str = "") -> str:
    """The text of the file. Its first lines name its origin (`origin`) and the nodes that run fused."""
    top: dict[str, Any] = {
        "flowrt": 1,
        "model": None if graph.model is None else _flow(_model(graph.model)),
        "folder": _flow(graph.folder),
        **{key: _flow(_without_none(to_builtins(getattr(graph, field.name)))) for key, field in keys_of(GraphSettings).items()},
        "prompts": [_flow(prompt) for prompt in graph.prompts],
        "nodes": {_flow(node.name): _flow(_node(node)) for node in graph.nodes.values() if node.process != GATEWAY},
        "edges": {_flow(edge.name): _flow(_edge(edge)) for edge in graph.edges.values()},
    }
    given = {key: value for key, value in top.items() if value not in (None, {}, [])}
    text: str = yaml.dump(given, Dumper=_Dumper, default_flow_style=False, sort_keys=False, allow_unicode=True, width=1 << 30)
    return "".join(f"{line}\n" for line in _header(graph, origin)) + text


def _model(model: ModelPart) -> dict[str, str]:
    implementation = {} if model.implementation == "native" else {"implementation": model.implementation}
    return {"path": model.path, "dtype": model.dtype, **implementation, **model.kept}


def _header(graph: Graph, origin: str) -> Iterable[str]:
    yield f"# Expanded from {' '.join(origin.split())}" if origin else "# An expanded graph"
    yield "# Fused: each line below runs as one firing; an edge between processes or lines waits for messages."
    for process, fusion in fuse_all(graph).items():
        for chain in fusion.chains:
            yield f"#   {process}: {' -> '.join(name.removeprefix(process + '.') for name in chain)}"


def _without_none(value: Any) -> Any:
    """`value` without keys that have no value, and without mappings of none but such keys."""
    if not isinstance(value, dict):
        return value
    kept = {key: _without_none(item) for key, item in value.items()}
    return {key: item for key, item in kept.items() if item not in (None, {})}


def _node(node: Node) -> dict[str, Any]:
    written: dict[str, Any] = {"operator": node.operator, "process": node.process}
    if node.kind.is_users:
        if any(port.tensors or port.takes != "one" for port in node.inputs.values()):
            written["inputs"] = {port.name: _input(port) for port in node.inputs.values()}
        if any(port.tensors for port in node.outputs.values()):
            written["outputs"] = {port.name: list(port.tensors) or None for port in node.outputs.values()}
        written |= ({"stateful": True} if node.stateful else {}) | ({"keeps": "nothing"} if node.keeps_nothing else {})
    if node.batches not in (None, node.kind.batches):
        written["batches"] = to_builtins(node.batches)
    return written | ({"options": node.options} if node.options else {})


def _input(port: PortSpec) -> Any:
    tensors = list(port.tensors) or None
    return tensors if port.takes == "one" else {"tensors": tensors, "takes": port.takes, "count": port.count}


def _edge(edge: Edge) -> dict[str, Any]:
    source, target = f"{edge.source}.{edge.source_port}", f"{edge.target}.{edge.target_port}"
    link = link_numbers(edge.link or "") or edge.link
    written = {"from": source, "to": target} if edge.name != edge_name(source, target) else {}
    keys = {"layers": str(edge.layers), "tag": str(edge.tag), "transport": edge.transport, "link": link, "credits": edge.credits}
    keys |= {"open": edge.open, "response_to": edge.response_to, "int8": edge.int8}
    return written | {key: value for key, value in keys.items() if value and (key, value) not in (("transport", "auto"), ("open", "lazy"))}


class _Line(dict[str, Any]):
    """A mapping that is written on one line, in flow style."""


class _Quoted(str):
    """A text in double quotes, which graph files would not read back without them."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes these two; no other dumper of the process does."""


_Dumper.add_representer(_Line, lambda dumper, value: dumper.represent_mapping("tag:yaml.org,2002:map", value, flow_style=True))
_Dumper.add_representer(_Quoted, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"'))


def _flow(value: Any) -> Any:
    """`value` for one line: mappings in flow style, texts in quotes where graph files would not read them back as texts."""
    if isinstance(value, Mapping):
        return _Line({_flow(str(key)): _flow(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return [_flow(item) for item in value]
    if not isinstance(value, str):
        return value
    return value if value.isprintable() and "," not in value and _reads_back(value) else _Quoted(value)


def _reads_back(text: str) -> bool:
    """Whether `text` without quotes is this text. False for null, numbers, and numbers with too many digits."""
    try:
        return bool(plain_value(text) == text)
    except ValueError:
        return False
