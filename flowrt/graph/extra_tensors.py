"""Named tensors that a KV transfer carries besides KV: the ports that they give to nodes, and checks of both ends. Pure.

A `kv_extra` node of a prefill worker takes a tensor with a row per row of the step, of which the row of a prompt's last token travels.
`kv_unpack` of a group has an output of the tensor's name, for operators of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from flowrt.document import Path_
from flowrt.graph.facts import ModelFacts
from flowrt.graph.kinds import all_kinds
from flowrt.graph.model import Edge, Graph, Node
from flowrt.graph.notation import is_port_name, parse_tensor_spec, shown_value, specs_disagree
from flowrt.graph.reach import follow
from flowrt.transports.wire.message import DTYPE_BYTES


def rows_of_extra(options: Mapping[str, Any]) -> dict[str, str]:
    """The input port of a `kv_extra`, with its spec. Raises ValueError for wrong options."""
    dtype, shape = _shape_of(options["name"], options["tensor"])
    return {"rows": f"{dtype}[{','.join(('rows', *map(str, shape)))}]"}


def ports_of_extras(options: Mapping[str, Any]) -> dict[str, str]:
    """The output ports of a `kv_unpack` for its extra tensors, with their specs. Raises ValueError for wrong options."""
    extras = options.get("extras", {})
    if not isinstance(extras, Mapping):
        raise ValueError(f"extras {shown_value(extras)} is not a mapping; write a tensor per name, such as hidden: 'float32[64]'")
    for name, tensor in extras.items():
        _shape_of(name, tensor)
    return dict(extras)


def _shape_of(name: Any, tensor: Any) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of a tensor of one prompt. Raises ValueError for a wrong name or tensor."""
    if not isinstance(name, str) or not is_port_name(name) or name.startswith("pull"):
        raise ValueError(f"{shown_value(name)} is not a name of an extra tensor; use letters, digits, '_' and '-', not pull...")
    if not isinstance(tensor, str):
        raise ValueError(f"{shown_value(tensor)} is not a tensor; write the tensor of one prompt, such as 'float32[64]'")
    dtype, dimensions = parse_tensor_spec(tensor)
    shape = tuple(size for size in dimensions if isinstance(size, int))
    if len(shape) != len(dimensions) or 0 in shape:
        raise ValueError(f"{tensor} has a dimension that is free or 0; write the tensor of one prompt, with numbers from 1 on")
    return dtype, shape


def sent_extras(graph: Graph, worker: str) -> dict[str, str]:
    """Name -> tensor of one prompt that the transfers of a prefill worker carry, in the order of their names."""
    nodes = [node for node in graph.nodes_of(worker) if node.kind.sends_extra]
    return dict(sorted((node.options["name"], node.options["tensor"]) for node in nodes))


def received_extras(unpack: Node) -> dict[str, str]:
    """As `sent_extras`, of a `kv_unpack`."""
    return dict(sorted(unpack.options.get("extras", {}).items()))


def num_bytes(extras: Mapping[str, str]) -> int:
    """The bytes of all extra tensors of a prompt."""
    shapes = [_shape_of(name, tensor) for name, tensor in extras.items()]
    return sum(DTYPE_BYTES[dtype] * prod(shape) for dtype, shape in shapes)


def check_extras(graph: Graph, facts: ModelFacts | None) -> Iterator[tuple[Path_, str]]:
    """Path of a key in the explicit form, and what is wrong with it."""
    for node in (each for each in graph.nodes.values() if each.kind.sends_extra):
        yield from _check_sender(graph, node, facts)
    for node in (each for each in graph.nodes.values() if each.kind.kv == "pulls"):
        yield from _check_receiver(graph, node)


def _check_sender(graph: Graph, node: Node, facts: ModelFacts | None) -> Iterator[tuple[Path_, str]]:
    path: Path_ = ("nodes", node.name)
    nodes, limits = graph.nodes_of(node.process), graph.limits_of(node.process)
    if not any(other.kind.kv == "offers" for other in nodes):
        yield path, f"process {node.process} has no kv_pack, whose transfers would carry it; put it into a prefill worker"
    if sum(other.kind.sends_extra and other.options["name"] == node.options["name"] for other in nodes) > 1:
        yield (*path, "options", "name"), f"{node.process} has two extra tensors {node.options['name']!r}; choose another name"
    if (total := num_bytes(sent_extras(graph, node.process))) > limits.max_message_bytes // 2:
        text = f"the extra tensors of {node.process} have {total} bytes, and travel with KV in one message"
        yield ("limits", "max_message_bytes"), f"{text}; write at least {2 * total}"
    flow = follow(graph)
    layers = {layer for _, layer in flow.fires[node.name]} or {0}
    if len(layers) > 1 or flow.after(min(layers)) != (min(layers) + 1,):
        yield path, "it gets rows of several layers; give the edges that lead here one layer, such as layers: '3'"
    for edge in graph.edges.values():
        if edge.target == node.name:
            yield from _check_rows(graph, edge, node, facts)


def _check_rows(graph: Graph, edge: Edge, node: Node, facts: ModelFacts | None) -> Iterator[tuple[Path_, str]]:
    path: Path_ = ("edges", edge.name)
    source = graph.nodes[edge.source]
    own = {each.name for each in graph.nodes_of(node.process) if each.kind.schedules}
    if graph.crosses(edge) or edge.tag.kind != "same" or not follow(graph).edge_origins.get(edge.name, own) <= own:
        yield path, f"expected rows of a step of {node.process}, with the tag of this step; compute them in this process"
    elif not source.kind.is_users and not ((port := source.kind.output(edge.source_port)) and port.is_residual):
        ports = ", ".join(sorted(f"{kind.name}.{port.name}" for kind in all_kinds().values() for port in kind.outputs if port.is_residual))
        yield path, f"{source.operator}.{edge.source_port} does not have a row per row of the step; connect one of {ports}"
    elif not source.kind.is_users and facts is not None and graph.model is not None:
        given, taken = f"{graph.model.dtype}[rows,{facts.hidden_size}]", node.inputs["rows"].tensors[0]
        if (why := specs_disagree(given, taken)) is not None:
            yield path, f"{why} ({given} to {taken}); make both ends agree"


def _check_receiver(graph: Graph, unpack: Node) -> Iterator[tuple[Path_, str]]:
    path: Path_ = ("nodes", unpack.name, "options", "extras")
    received = received_extras(unpack)
    for edge in graph.edges_from(unpack.name):
        target = graph.nodes[edge.target]
        if target.kind.kv == "offers" and (sent := sent_extras(graph, target.process)) != received:
            texts = [", ".join(f"{name}: {tensor}" for name, tensor in each.items()) or "none" for each in (received, sent)]
            yield path, f"expected the extra tensors of {target.process} ({texts[1]}), got {texts[0]}; write the same"
        elif edge.source_port in received and graph.crosses(edge):
            yield ("edges", edge.name), f"an extra tensor is for operators of its group; put {edge.target} into process {unpack.process}"
    for edge in graph.edges.values():
        if edge.target == unpack.name and edge.int8 and received:
            yield ("edges", edge.name, "int8"), "a transfer with extra tensors carries no INT8; remove the key, or the extra tensors"
