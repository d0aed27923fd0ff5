"""A Graph written as a graph file of the explicit form, which loads back to an equal Graph.

Here: `to_yaml`. Not here: reading it (file.py), drawings (drawing.py, diagrams.py). Called by `flowrt graph expand`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from flowrt.graph.document import plain_value
from flowrt.graph.fuse import fuse_all
from flowrt.graph.model import GATEWAY, Edge, Emulation, Graph, GraphLimits, Node, PortSpec, ReliabilitySettings, edge_name
from flowrt.graph.notation import LINK_PROFILES

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@+=: >-]*")


def to_yaml(graph: Graph, origin: str = "") -> str:
    """The file's text. Its first lines tell where it came from (`origin`) and which nodes run fused."""
    lines = [*_header(graph, origin), "flowrt: 1"]
    if graph.model is not None:
        lines.append(f"model: {_flow({'path': graph.model.path, 'dtype': graph.model.dtype})}")
    lines.append(f"folder: {_scalar(graph.folder)}")
    lines.append(f"processes: {_scalar(graph.processes)}")
    lines.append(f"micro_batches: {graph.micro_batches}")
    lines.append(f"limits: {_flow({item.name: getattr(graph.limits, item.name) for item in fields(GraphLimits)})}")
    lines.append(f"numerics: {graph.numerics}")
    for key, values in (("devices", graph.devices), ("threads", graph.threads)):
        if values:
            lines.append(f"{key}: {_flow(values)}")
    if graph.emulation is not None:
        lines.append(f"emulate: {_flow(_emulate(graph.emulation))}")
    lines.append(f"reliability: {_flow({item.name: getattr(graph.reliability, item.name) for item in fields(ReliabilitySettings)})}")
    if graph.prompts:
        lines += ["prompts:", *(f"  - {_scalar(prompt)}" for prompt in graph.prompts)]
    lines += ["nodes:", *(f"  {_scalar(node.name)}: {_flow(_node(node))}" for node in graph.nodes.values() if node.process != GATEWAY)]
    lines += ["edges:", *(f"  {_scalar(edge.name)}:{_edge_text(edge)}" for edge in graph.edges.values())]
    return "\n".join(lines) + "\n"


def _header(graph: Graph, origin: str) -> Iterable[str]:
    yield f"# Expanded from {' '.join(origin.split())}" if origin else "# An expanded graph"
    yield "# Fused: each line below runs as one firing; an arrow between processes or lines waits for messages."
    for process, fusion in fuse_all(graph).items():
        for chain in fusion.chains:
            yield f"#   {process}: {' -> '.join(name.removeprefix(process + '.') for name in chain)}"


def _emulate(emulation: Emulation) -> dict[str, Any]:
    compute = {"attention_seconds": emulation.attention_seconds, "expert_seconds": emulation.expert_seconds}
    given = {key: seconds for key, seconds in compute.items() if seconds is not None}
    written: dict[str, Any] = {"dilation": emulation.dilation, "processes_per_nic": emulation.processes_per_nic}
    return written | ({"compute": given} if given else {})


def _node(node: Node) -> dict[str, Any]:
    written: dict[str, Any] = {"operator": node.operator, "process": node.process}
    if ":" in node.operator:
        if any(port.tensors or port.takes != "one" for port in node.inputs.values()):
            written["inputs"] = {port.name: _input(port) for port in node.inputs.values()}
        if any(port.tensors for port in node.outputs.values()):
            written["outputs"] = {port.name: _tensors(port) for port in node.outputs.values()}
        written |= {key: True for key in ("stateful", "batches") if getattr(node, key)}
    if node.options:
        written["options"] = node.options
    return written


def _input(port: PortSpec) -> Any:
    if port.takes == "one":
        return _tensors(port)
    return {"tensors": _tensors(port), "takes": port.takes, "count": port.count}


def _tensors(port: PortSpec) -> Any:
    return (list(port.tensors) if len(port.tensors) > 1 else port.tensors[0]) if port.tensors else None


def _edge_text(edge: Edge) -> str:
    written = _edge(edge)
    return f" {_flow(written)}" if written else ""


def _edge(edge: Edge) -> dict[str, Any]:
    source, target = f"{edge.source}.{edge.source_port}", f"{edge.target}.{edge.target_port}"
    written: dict[str, Any] = {} if edge.name == edge_name(source, target) else {"from": source, "to": target}
    if str(edge.layers):
        written["layers"] = str(edge.layers)
    if str(edge.tag):
        written["tag"] = str(edge.tag)
    if edge.transport != "auto":
        written["transport"] = edge.transport
    if edge.link is not None:
        pairs = (part.partition("=") for part in edge.link.split(","))
        written["link"] = edge.link if edge.link in LINK_PROFILES else {name: float(number) for name, _, number in pairs}
    if edge.credits:
        written["credits"] = edge.credits
    if edge.open != "lazy":
        written["open"] = edge.open
    if edge.response_to is not None:
        written["response_to"] = edge.response_to
    return written


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(str(key))}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """Plain where that reads back as the same value, else in double quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    if len(text) <= 200 and _PLAIN.fullmatch(text) and _reads_back(text):
        return text
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _reads_back(text: str) -> bool:
    """False for words like null, for "a: b", for a blank at the end: what YAML would not take as this text."""
    return ": " not in text and text[-1] not in ": " and plain_value(text) == text


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable() and ord(character) <= 0xFFFF:
        return character
    return json.dumps(character)[1:-1] if ord(character) < 0x80 and character != "\x7f" else f"\\U{ord(character):08x}"
