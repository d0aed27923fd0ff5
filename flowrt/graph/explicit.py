"""Builds the explicit form: turns `nodes:` and `edges:` of a graph file into nodes and edges with their ports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from msgspec import UNSET

from flowrt.document import Document, Path_
from flowrt.errors import nearest
from flowrt.graph.kinds import Kind, all_kinds
from flowrt.graph.model import GATEWAY, INPUT, OUTPUT, Edge, Node, PortSpec, role_of
from flowrt.graph.notation import MAX_LAYER, is_edge_end, is_user_operator, parse_layers, parse_link, parse_tag, shown_value
from flowrt.graph.schema import EdgeSection, GraphFile, InputPortSection, LinkSection, NodeSection
from flowrt.graph.settings import Batching

Ports = dict[str, PortSpec]
Ends = tuple[str, str, str, str]  # source, source port, target, target port
Used = dict[str, dict[str, str]]  # node -> port -> the first edge there

_DEFAULT_LINK, _DEFAULT_EDGE = LinkSection(), EdgeSection()
_LINK_KEYS = LinkSection.__struct_fields__


def build_explicit(file: GraphFile, document: Document) -> tuple[dict[str, Node], dict[str, Edge]]:
    """Nodes and edges as written. Raises GraphError for ends that do not exist and for ports that a node does not have.

    An edge between processes has the link of its pair of roles; keys of its own win. By default it has a credit for each tag in flight; a
    response needs none.
    """
    nodes, edges = file.nodes or {}, {name: edge or _DEFAULT_EDGE for name, edge in (file.edges or {}).items()}
    for name in (INPUT, OUTPUT):
        if name in nodes:
            document.fail(("nodes", name), f"{name!r} is predefined; choose another name")
    ends = {name: _ends(name, edge, document) for name, edge in edges.items()}
    taken, given = Used(), Used()
    for edge, (source, source_port, target, target_port) in ends.items():
        for key, name, pseudo, wrong in (("from", source, INPUT, OUTPUT), ("to", target, OUTPUT, INPUT)):
            if name == wrong:
                document.fail(_end_path(edge, key, document), f"no edge leads {key} {wrong}; write a node, or {pseudo}")
            if name not in nodes and name != pseudo:
                document.fail(_end_path(edge, key, document), f"there is no node {name!r}; {nearest(name, [*nodes, pseudo])}")
        given.setdefault(source, {}).setdefault(source_port, edge)
        taken.setdefault(target, {}).setdefault(target_port, edge)
    built = {name: _node(name, section, taken.get(name, {}), given.get(name, {}), document) for name, section in nodes.items()}
    if INPUT in given:
        built[INPUT] = Node(INPUT, INPUT, GATEWAY, outputs={port: PortSpec(port) for port in given[INPUT]})
    if OUTPUT in taken:
        built[OUTPUT] = Node(OUTPUT, OUTPUT, GATEWAY, inputs={port: PortSpec(port) for port in taken[OUTPUT]})
    is_model = any(node.kind.schedules for node in built.values())
    num_credits = file.micro_batches if is_model else file.limits.in_flight
    requests = {section.response_to for section in edges.values()} if is_model else set()
    pairs: dict[tuple[str, str], None] = {}
    built_edges: dict[str, Edge] = {}
    for name, section in edges.items():
        pair = role_pair(built[ends[name][0]].process, built[ends[name][2]].process)
        if pair is not None:
            pairs[pair] = None
        # One more for requests: a micro-batch that goes on does not wait for the response to an abandoned request (EaaS section 3.2).
        default = 0 if section.response_to is not None else num_credits + (name in requests)
        link = {} if pair is None else _link(file.links, pair, section, default)
        built_edges[name] = _edge(name, section, ends, built, link, document)
    for key in file.links:
        if not any(key in (f"{a}-{b}", f"{b}-{a}") for a, b in pairs):
            document.fail(("links", key), f"no edge leads between these roles; {nearest(key, map('-'.join, pairs))}")
    return built, built_edges


def role_pair(source: str, target: str) -> tuple[str, str] | None:
    """The roles of the two processes that an edge connects; None for an edge within one process."""
    return None if source == target else (role_of(source), role_of(target))


def _link(links: Mapping[str, LinkSection], pair: tuple[str, str], own: EdgeSection, num_credits: int) -> dict[str, Any]:
    """The keys of an edge between processes. `num_credits`: by default; 0 for responses, which have none."""
    section = links.get("-".join(pair)) or links.get("-".join(reversed(pair))) or _DEFAULT_LINK
    given = {key: found for each in (section, own) for key in _LINK_KEYS if (found := getattr(each, key)) is not UNSET}
    if given.get("link") is not None:
        given["link"] = parse_link(given["link"])
    return given | {"credits": num_credits and (given.get("credits") or num_credits)}


def _node(name: str, section: NodeSection, taken: dict[str, str], given: dict[str, str], document: Document) -> Node:
    path = ("nodes", name)
    built = None if is_user_operator(section.operator) else all_kinds().get(section.operator)
    if built is not None:
        _check_builtin(built, section, path, document)
        try:
            inputs, outputs = ports_of(built, section.options, given)
        except ValueError as error:
            document.fail((*path, "options"), str(error))
        whose = f"{section.operator!r} has no"
    elif is_user_operator(section.operator):
        if section.options:
            document.fail((*path, "options"), "options are for built-in operators; give your function its values in its module")
        inputs, outputs = _user_ports(section, taken, given)
        whose = f"{name} declares no"
    else:
        hint = nearest(section.operator, all_kinds())
        document.fail((*path, "operator"), f"there is no operator {section.operator!r}; write module:function for your own; {hint}")
    for used, ports, key, kind in ((taken, inputs, "to", "input"), (given, outputs, "from", "output")):
        for port, edge in used.items():
            if port not in ports:
                known = [each.name for each in built.outputs] if built is not None and key == "from" else ports
                document.fail(_end_path(edge, key, document), f"{whose} {kind} {port!r}; {nearest(port, known)}")
    return Node(
        name=name,
        operator=section.operator,
        process=section.process,
        inputs=inputs,
        outputs=outputs,
        options=section.options,
        stateful=bool(section.stateful) if built is None else built.stateful,
        keeps_nothing=section.keeps == "nothing",
        batches=_batches(section) if built is None or section.batches is not None else built.batches,
    )


def ports_of(kind: Kind, options: Mapping[str, Any], given: Iterable[str]) -> tuple[Ports, Ports]:
    """The ports of a node of this kind: all fixed ones, those of its options, and those of `given` that match a "*". Raises ValueError for
    wrong options."""
    names = dict.fromkeys(port.name for port in kind.outputs if not port.name.endswith("*"))
    names |= dict.fromkeys(name for name in sorted(given) if kind.output(name) is not None)
    gathers = kind.gathers
    inputs = {name: PortSpec(name, takes="gather" if name in gathers else "one", count=gathers.get(name)) for name in kind.inputs}
    outputs = {name: PortSpec(name) for name in names}
    more = ({}, {}) if kind.option_ports is None else kind.option_ports(options)
    inputs |= {name: PortSpec(name, (tensor,)) for name, tensor in more[0].items()}
    return inputs, outputs | {name: PortSpec(name, (tensor,)) for name, tensor in more[1].items()}


def _batches(section: NodeSection) -> Batching | None:
    return (Batching() if section.batches else None) if isinstance(section.batches, bool) else section.batches


def _check_builtin(built: Kind, section: NodeSection, path: Path_, document: Document) -> None:
    for key in ("inputs", "outputs", "stateful", "keeps", *(() if built.batches is not None else ("batches",))):
        if document.has((*path, key)):
            document.fail((*path, key), f"{section.operator!r} is built in and has its own; remove the key")
    if built.batches is not None and not section.batches and document.has((*path, "batches")):
        document.fail((*path, "batches"), f"{section.operator!r} fires in batches; remove the key, or write min_tags and max_wait_seconds")
    for key in section.options:
        if key not in (known := (*built.options, *built.may_have)):
            hint = nearest(key, known) if known else "it takes none"
            document.fail((*path, "options", key), f"{section.operator!r} has no option {key!r}; {hint}")
    for key in built.options:
        if key not in section.options:
            document.fail((*path, "options"), f"{section.operator!r} needs the option {key!r}; write it")
    layers = section.options.get("num_layers", 1)
    if type(layers) is not int or not 1 <= layers <= MAX_LAYER:
        document.fail((*path, "options", "num_layers"), f"{shown_value(layers)} is not a number of layers; write 1 to {MAX_LAYER}")


def _user_ports(section: NodeSection, taken: dict[str, str], given: dict[str, str]) -> tuple[Ports, Ports]:
    """The declared ports, or, without a declaration, the ports that the edges use."""
    inputs = {port: PortSpec(port) for port in sorted(taken)}
    if section.inputs is not None:
        ports = {port: each if isinstance(each, InputPortSection) else InputPortSection(each) for port, each in section.inputs.items()}
        inputs = {port: PortSpec(port, _tensors(each.tensors), each.takes, each.count) for port, each in ports.items()}
    outputs = {port: PortSpec(port) for port in sorted(given)}
    if section.outputs is not None:
        outputs = {port: PortSpec(port, _tensors(tensors)) for port, tensors in section.outputs.items()}
    return inputs, outputs


def _tensors(written: str | list[str] | None) -> tuple[str, ...]:
    specs = [written] if isinstance(written, str) else written or ()
    return tuple(spec.replace(" ", "") for spec in specs)


def _edge(
    name: str, section: EdgeSection, ends: Mapping[str, Ends], nodes: Mapping[str, Node], link: dict[str, Any], document: Document
) -> Edge:
    """The edge `name`; `link` are the keys of its link, none within a process."""
    source, _, target, _ = ends[name]
    path = ("edges", name)
    if nodes[source].process == nodes[target].process:
        for key in _LINK_KEYS:
            if getattr(section, key) not in (UNSET, None, "auto"):
                document.fail((*path, key), f"both ends are in process {nodes[source].process}, where no link is used; remove the key")
    if section.response_to is not None and section.response_to not in ends:
        document.fail((*path, "response_to"), f"there is no edge {section.response_to!r}; {nearest(section.response_to, ends)}")
    if section.credits not in (UNSET, None) and section.response_to is not None:
        document.fail((*path, "credits"), "a response needs no credits: the request's return with it; remove the key")
    return Edge(
        *ends[name],
        name=name,
        layers=parse_layers(section.layers),
        tag=parse_tag(section.tag or ""),
        response_to=section.response_to,
        int8=bool(section.int8),
        **link,
    )


def _ends(name: str, section: EdgeSection, document: Document) -> Ends:
    """The ends of an edge: from its keys, or else from its name."""
    found: tuple[str, ...] = ()
    source, separator, target = name.partition("->")
    for key, written, named in (("from", section.source, source), ("to", section.target, target)):
        end = _end_in_name(named) if written is None and separator else _parts(written or "")
        if end is None:
            text = f"names no node.port for {key}:; name the edge 'node.port -> node.port', or write from: and to:"
            document.fail(("edges", name), text)
        found += end
    return found[0], found[1], found[2], found[3]


@lru_cache(maxsize=1 << 14)  # in a mesh each end is one of many edges
def _end_in_name(text: str) -> tuple[str, str] | None:
    """The node and the port that half of a name gives; None: none."""
    return _parts(text.strip()) if is_edge_end(text.strip()) else None


def _parts(end: str) -> tuple[str, str] | None:
    node, _, port = end.rpartition(".")
    return (node, port) if end else None


def _end_path(edge: str, key: str, document: Document) -> Path_:
    """The key that gives an end of an edge: `from` or `to` where written, else the edge itself."""
    path: Path_ = ("edges", edge)
    return (*path, key) if document.has((*path, key)) else path
