"""The explicit form: `nodes:` and `edges:` of a file become Node and Edge, with ports and defaults filled in.

Here: `build_explicit`. Not here: checks that need the whole graph (checks.py), writing the form (written.py). Called by file.py.
"""

from __future__ import annotations

from flowrt.graph.builtin import BUILTIN, SOURCE, BuiltinOperator
from flowrt.graph.document import Document, Path_
from flowrt.graph.model import GATEWAY, INPUT, OUTPUT, Edge, Node, PortSpec
from flowrt.graph.notation import MAX_LAYER, is_edge_end, is_user_operator, nearest, parse_layers, parse_tag, shown_value
from flowrt.graph.schema import EdgeSection, NodeSection

_PSEUDO = (INPUT, OUTPUT)


def build_explicit(
    nodes: dict[str, NodeSection], edges: dict[str, EdgeSection], micro_batches: int, in_flight: int, document: Document
) -> tuple[dict[str, Node], dict[str, Edge]]:
    """Nodes and edges as written. Raises GraphError for ends that do not exist and for ports a node does not have."""
    for name in _PSEUDO:
        if name in nodes:
            document.fail(("nodes", name), f"{name!r} is there without being written; choose another name")
    ends = {name: _ends(name, edge, document) for name, edge in edges.items()}
    for edge, (source, _, target, _) in ends.items():
        for key, name in (("from", source), ("to", target)):
            if name not in nodes and name not in _PSEUDO:
                known = [*nodes, INPUT if key == "from" else OUTPUT]
                document.fail(_end_path(edge, key, document), f"there is no node {name!r}; {nearest(name, known)}")
        if source == OUTPUT:
            document.fail(_end_path(edge, "from", document), f"{OUTPUT} gives nothing; begin at a node, or at {INPUT}")
        if target == INPUT:
            document.fail(_end_path(edge, "to", document), f"{INPUT} takes nothing; end at a node, or at {OUTPUT}")
    taken: dict[str, dict[str, str]] = {}
    given: dict[str, dict[str, str]] = {}
    for edge, (source, source_port, target, target_port) in ends.items():
        given.setdefault(source, {}).setdefault(source_port, edge)
        taken.setdefault(target, {}).setdefault(target_port, edge)

    built: dict[str, Node] = {}
    for name, section in nodes.items():
        built[name] = _node(name, section, taken.get(name, {}), given.get(name, {}), document)
    if INPUT in given:
        built[INPUT] = Node(INPUT, INPUT, GATEWAY, outputs={port: PortSpec(port) for port in given[INPUT]})
    if OUTPUT in taken:
        built[OUTPUT] = Node(OUTPUT, OUTPUT, GATEWAY, inputs={port: PortSpec(port) for port in taken[OUTPUT]})
    is_model = any(node.operator == SOURCE for node in built.values())
    credits = micro_batches if is_model else in_flight
    return built, {name: _edge(name, section, ends, built, credits, document) for name, section in edges.items()}


def _node(name: str, section: NodeSection, taken: dict[str, str], given: dict[str, str], document: Document) -> Node:
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
Ends = tuple[str, str, str, str]


def _builtin_ports(
    built: BuiltinOperator, section: NodeSection, path: tuple[str, ...], taken: dict[str, str], given: dict[str, str], document: Document
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
    for port, edge in taken.items():
        if port not in built.inputs:
            document.fail(_end_path(edge, "to", document), f"{section.operator!r} takes nothing on {port!r}; {nearest(port, built.inputs)}")
    for port, edge in given.items():
        if not built.has_output(port):
            document.fail(
                _end_path(edge, "from", document), f"{section.operator!r} gives nothing on {port!r}; {nearest(port, built.outputs)}"
            )
    return built.input_ports(), built.output_ports(given)


def _user_ports(
    section: NodeSection, taken: dict[str, str], given: dict[str, str], document: Document, path: tuple[str, ...]
) -> tuple[Ports, Ports]:
    """As declared, or, where nothing is declared, as the edges use them."""
    inputs = {port: PortSpec(port) for port in sorted(taken)}
    if section.inputs is not None:
        inputs = {port: PortSpec(port, tuple(s.tensors or ()), s.takes, s.count) for port, s in section.inputs.items()}
    outputs = {port: PortSpec(port) for port in sorted(given)}
    if section.outputs is not None:
        outputs = {port: PortSpec(port, tuple(tensors or ())) for port, tensors in section.outputs.items()}
    for used, declared, key in ((taken, inputs, "to"), (given, outputs, "from")):
        for port, edge in used.items():
            if port not in declared:
                what = "inputs" if key == "to" else "outputs"
                document.fail(_end_path(edge, key, document), f"{path[-1]} declares no {port!r} in its {what}; {nearest(port, declared)}")
    return inputs, outputs


def _edge(name: str, section: EdgeSection, ends: dict[str, Ends], nodes: dict[str, Node], credits: int, document: Document) -> Edge:
    source, source_port, target, target_port = ends[name]
    crosses = nodes[source].process != nodes[target].process
    path = ("edges", name)
    for key in ("transport", "link", "credits", "open"):
        if not crosses and document.has((*path, key)) and getattr(section, key) not in (None, "auto"):
            document.fail((*path, key), f"both ends lie in process {nodes[source].process}, where nothing is sent; remove the key")
    if section.response_to is not None and section.response_to not in ends:
        document.fail((*path, "response_to"), f"there is no edge {section.response_to!r}; {nearest(section.response_to, ends)}")
    if section.response_to is not None and section.credits is not None:
        document.fail((*path, "credits"), "a response needs no credits: the request's return with it; remove the key")
    return Edge(
        source=source,
        source_port=source_port,
        target=target,
        target_port=target_port,
        name=name,
        transport=section.transport,
        link=section.link,
        credits=0 if section.response_to is not None or not crosses else section.credits or credits,
        layers=parse_layers(section.layers),
        tag=parse_tag(section.tag or ""),
        response_to=section.response_to,
        open=section.open,
        line=document.line(path),
    )


def _end_path(edge: str, key: str, document: Document) -> Path_:
    """The key that gives an end of an edge: `from` or `to` where written, else the edge itself."""
    path: Path_ = ("edges", edge)
    return (*path, key) if document.has((*path, key)) else path


def _ends(name: str, section: EdgeSection, document: Document) -> Ends:
    """source, source port, target, target port: as written, or as the edge's name says."""
    found: list[str] = []
    source, arrow, target = (part.strip() for part in name.partition("->"))
    for key, written, named in (("from", section.source, source), ("to", section.target, target)):
        end = written or named
        if written is None and not (arrow and is_edge_end(named)):
            path = ("edges", name)
            document.fail(path, f"names no node.port for {key}:; name the edge 'node.port -> node.port', or write from: and to:")
        found += end.rpartition(".")[::2]
    return found[0], found[1], found[2], found[3]
