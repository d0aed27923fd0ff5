"""The explicit form: `nodes:` and `edges:` of a file become Node and Edge, with ports and defaults filled in.

Here: `build_explicit`. Not here: checks that need the whole graph (checks.py), writing the form (written.py). Called by file.py.
"""

from __future__ import annotations

from typing import Any

from flowrt.graph.builtin import BUILTIN, SOURCE, BuiltinOperator
from flowrt.graph.document import Document
from flowrt.graph.model import GATEWAY, INPUT, OUTPUT, Edge, Node, PortSpec
from flowrt.graph.notation import MAX_LAYER, is_user_operator, nearest, parse_layers, parse_tag, shown_value
from flowrt.graph.schema import EdgeSection, NodeSection

_PSEUDO = (INPUT, OUTPUT)


def build_explicit(
    nodes: dict[str, NodeSection], edges: list[EdgeSection], micro_batches: int, in_flight: int, document: Document
) -> tuple[dict[str, Node], tuple[Edge, ...]]:
    """Nodes and edges as written. Raises GraphError for ends that do not exist and for ports a node does not have."""
    for name in _PSEUDO:
        if name in nodes:
            document.fail(("nodes", name), f"{name!r} is there without being written; choose another name")
    ends = [(*_end(edge.source), *_end(edge.target)) for edge in edges]
    for index, (source, _, target, _) in enumerate(ends):
        for key, name in (("from", source), ("to", target)):
            if name not in nodes and name not in _PSEUDO:
                known = [*nodes, INPUT if key == "from" else OUTPUT]
                document.fail(("edges", index, key), f"there is no node {name!r}; {nearest(name, known)}")
        if source == OUTPUT:
            document.fail(("edges", index, "from"), f"{OUTPUT} gives nothing; begin at a node, or at {INPUT}")
        if target == INPUT:
            document.fail(("edges", index, "to"), f"{INPUT} takes nothing; end at a node, or at {OUTPUT}")
    taken: dict[str, dict[str, int]] = {}
    given: dict[str, dict[str, int]] = {}
    for index, (source, source_port, target, target_port) in enumerate(ends):
        given.setdefault(source, {}).setdefault(source_port, index)
        taken.setdefault(target, {}).setdefault(target_port, index)

    built: dict[str, Node] = {}
    for name, section in nodes.items():
        built[name] = _node(name, section, taken.get(name, {}), given.get(name, {}), document)
    if INPUT in given:
        built[INPUT] = Node(INPUT, INPUT, GATEWAY, outputs={port: PortSpec(port) for port in given[INPUT]})
    if OUTPUT in taken:
        built[OUTPUT] = Node(OUTPUT, OUTPUT, GATEWAY, inputs={port: PortSpec(port) for port in taken[OUTPUT]})
    is_model = any(node.operator == SOURCE for node in built.values())
    credits = micro_batches if is_model else in_flight
    return built, tuple(_edge(index, section, ends, built, credits, document) for index, section in enumerate(edges))


def _node(name: str, section: NodeSection, taken: dict[str, int], given: dict[str, int], document: Document) -> Node:
    path = ("nodes", name)
    built = None if is_user_operator(section.operator) else BUILTIN.get(section.operator)
    if built is not None:
        inputs, outputs = _builtin_ports(built, section, path, taken, given, document)
    elif is_user_operator(section.operator):
        if section.options:
            document.fail((*path, "options"), "options are for built-in operators; give your function its values in its module")
        inputs, outputs = _user_ports(section, taken, given, document, path)
    else:
        hint = nearest(section.operator, BUILTIN)
        text = f"there is no operator {section.operator!r}; write module:function for one of your own; {hint}"
        document.fail((*path, "operator"), text)
    return Node(
        name=name,
        operator=section.operator,
        process=section.process,
        inputs=inputs,
        outputs=outputs,
        options=section.options,
        stateful=built.stateful if built is not None else bool(section.stateful),
        batches=built.batches if built is not None else bool(section.batches),
        line=document.line(path),
    )


Ports = dict[str, PortSpec]


def _builtin_ports(
    built: BuiltinOperator, section: NodeSection, path: tuple[str, ...], taken: dict[str, int], given: dict[str, int], document: Document
) -> tuple[Ports, Ports]:
    for key in ("inputs", "outputs", "stateful", "batches"):
        if document.has((*path, key)):
            document.fail((*path, key), f"{section.operator!r} is built in and brings its own; remove the key")
    for key in section.options:
        if key not in built.options:
            hint = nearest(key, built.options) if built.options else "it takes none"
            document.fail((*path, "options", key), f"{section.operator!r} has no option {key!r}; {hint}")
    for key in built.options:
        if key not in section.options:
            document.fail((*path, "options"), f"{section.operator!r} needs the option {key!r}; write it")
    layers = section.options.get("num_layers", 1)
    if type(layers) is not int or not 1 <= layers <= MAX_LAYER:
        document.fail((*path, "options", "num_layers"), f"{shown_value(layers)} is no number of layers; write 1 to {MAX_LAYER}")
    for port, index in taken.items():
        if port not in built.inputs:
            document.fail(("edges", index, "to"), f"{section.operator!r} takes nothing on {port!r}; {nearest(port, built.inputs)}")
    for port, index in given.items():
        if not built.gives(port):
            document.fail(("edges", index, "from"), f"{section.operator!r} gives nothing on {port!r}; {nearest(port, built.outputs)}")
    return built.input_ports(), built.output_ports(given)


def _user_ports(
    section: NodeSection, taken: dict[str, int], given: dict[str, int], document: Document, path: tuple[str, ...]
) -> tuple[Ports, Ports]:
    """As declared, or, where nothing is declared, as the edges use them."""
    inputs = {port: PortSpec(port) for port in sorted(taken)}
    if section.inputs is not None:
        inputs = {port: PortSpec(port, tuple(s.tensors or ()), s.takes, s.count) for port, s in section.inputs.items()}
    outputs = {port: PortSpec(port) for port in sorted(given)}
    if section.outputs is not None:
        outputs = {port: PortSpec(port, tuple(tensors or ())) for port, tensors in section.outputs.items()}
    for used, declared, key in ((taken, inputs, "to"), (given, outputs, "from")):
        for port, index in used.items():
            if port not in declared:
                what = "inputs" if key == "to" else "outputs"
                document.fail(("edges", index, key), f"{path[-1]} declares no {port!r} in its {what}; {nearest(port, declared)}")
    return inputs, outputs


def _edge(
    index: int, section: EdgeSection, ends: list[tuple[str, str, str, str]], nodes: dict[str, Node], credits: int, document: Document
) -> Edge:
    source, source_port, target, target_port = ends[index]
    crosses = nodes[source].process != nodes[target].process
    path = ("edges", index)
    for key in ("transport", "link", "credits", "open"):
        if not crosses and document.has((*path, key)) and getattr(section, key) not in (None, "auto"):
            document.fail((*path, key), f"both ends lie in process {nodes[source].process}, where nothing is sent; remove the key")
    answers = None if section.answers is None else _answered(section.answers, source, ends, path, document)
    if answers is not None and section.credits is not None:
        document.fail((*path, "credits"), "an answer needs no credits of its own: the request's come back with it; remove the key")
    return Edge(
        id=index,
        source=source,
        source_port=source_port,
        target=target,
        target_port=target_port,
        transport=section.transport,
        link=section.link,
        credits=0 if answers is not None or not crosses else section.credits or credits,
        layers=parse_layers(section.layers),
        tag=parse_tag(section.tag or ""),
        answers=answers,
        open=section.open,
        line=document.line(path),
    )


def _answered(end: str, source: str, ends: list[tuple[str, str, str, str]], path: tuple[Any, ...], document: Document) -> int:
    node, port = _end(end)
    requests = [index for index, (a, b, target, _) in enumerate(ends) if (a, b) == (node, port) and target == source]
    if len(requests) == 1:
        return requests[0]
    if not requests:
        document.fail((*path, "answers"), f"no edge leads from {end} to {source}; name the node.port that asks {source}")
    document.fail((*path, "answers"), f"{len(requests)} edges lead from {end} to {source}; an answer needs exactly one request")


def _end(text: str) -> tuple[str, str]:
    node, _, port = text.rpartition(".")
    return node, port
