"""The data model of a graph: the result of reading, checking and expanding a graph file.

A node has one set of ports for all layers. The layer is part of the tag, so the layers of a model are a cycle of the graph whose edges
advance the tag, not copies of its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import inf
from typing import Any, Literal

import msgspec

from flowrt.errors import GraphError
from flowrt.graph.kinds import Kind, kind_of
from flowrt.graph.notation import ALL_LAYERS, SAME_TAG, LayerSet, TagStep
from flowrt.graph.settings import Batching, GraphLimits, GraphSettings

INPUT, OUTPUT = "input", "output"  # the pseudo-nodes of a user's graph; they live in the gateway's process
GATEWAY = "gateway"  # the name of the launching process as a worker
FORK_SERVER, MONITOR = "fork server", "monitor"  # the processes that fork the workers, and watch them
FRONT_END = "front_end"  # role of the processes that serve HTTP
FIRST_HOST = "host.0"  # where the launcher runs, with the monitor, front ends and standby processes


@dataclass(frozen=True)
class PortSpec:
    """One port of a node. `tensors` are spec strings such as "float32[rows,64]"; an empty tuple declares nothing.

    `takes` is "one" (a message per tag) or "gather": as many messages as given by the plan on the port named `count`, possibly
    none. Outputs are always "one": a firing sends at most one message per output port.
    """

    name: str
    tensors: tuple[str, ...] = ()
    takes: Literal["one", "gather"] = "one"
    count: str | None = None


@dataclass(frozen=True)
class Node:
    """An operator in a process. `operator` is a built-in name (without a colon) or "module:function" of the user.

    `options` are plain values for a built-in operator (for experts: {"experts": {layer: [ids]}}). A `stateful` node fires in step order
    per micro-batch. A node with `batches` may receive several tags in one call. `keeps_nothing`: a user's operator keeps no state.
    """

    name: str
    operator: str
    process: str
    inputs: Mapping[str, PortSpec] = field(default_factory=dict)
    outputs: Mapping[str, PortSpec] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    stateful: bool = False
    batches: Batching | None = None
    keeps_nothing: bool = False

    @property
    def kind(self) -> Kind:
        return kind_of(self.operator)


@dataclass(frozen=True)
class Edge:
    """A connection from an output port to an input port.

    `name` identifies the edge in graph files and errors; by default it names both ends. `id` is what messages carry: a hash of the name,
    so it is the same in every process and does not change when other edges come or go. `layers` filters by the producer's tag; `tag`
    changes it. `credits` bounds the messages that are in flight or unconsumed. `response_to` names the edge of a request: this edge
    carries only the result for the message that came along that edge, and a request's credit returns with its response. `int8`: the rows
    of its messages travel as INT8, with a scale per row.
    """

    source: str
    source_port: str
    target: str
    target_port: str
    name: str = ""
    transport: str = "auto"
    link: str | None = None
    credits: int = 0  # 0 inside a process, for a response, and until expansion fills it in
    layers: LayerSet = ALL_LAYERS
    tag: TagStep = SAME_TAG
    response_to: str | None = None
    why: str = ""  # why `auto` chose this transport, for people
    open: Literal["lazy", "start"] = "lazy"  # when its link opens
    int8: bool = False
    id: int = field(init=False, compare=False, repr=False, default=0)
    request_id: int | None = field(init=False, compare=False, repr=False, default=None)  # the id of `response_to`

    def __post_init__(self) -> None:
        name = self.name or edge_name(f"{self.source}.{self.source_port}", f"{self.target}.{self.target_port}")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "id", _edge_id(name))
        object.__setattr__(self, "request_id", None if self.response_to is None else _edge_id(self.response_to))

    def __str__(self) -> str:
        return self.name


def edge_name(source: str, target: str) -> str:
    """The default name of an edge between two ends, each written node.port."""
    return f"{source} -> {target}"


@lru_cache(maxsize=1 << 10)  # a request is often followed by its response
def _edge_id(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def front_end_names(graph: Graph) -> tuple[str, ...]:
    """The processes that serve HTTP when the graph is served."""
    return tuple(f"{FRONT_END}.{number}" for number in range(graph.serving.front_ends))


@lru_cache(maxsize=1 << 13)  # checks ask once for each edge
def role_of(process: str) -> str:
    """The role of a process: its name without the number, so that attention.0 and attention.1 have the role attention."""
    role, _, number = process.rpartition(".")
    return role if role and number.isascii() and number.isdigit() else process


KEPT_KEYS = ("weights", "expert_weights", "kv_cache", "activations")


@dataclass(frozen=True)
class ModelPart:
    """The checkpoint that the graph serves: an absolute directory, the dtype to compute in, the ids that end an answer, what computes it,
    what routed experts, the other large matrices, and keys and values are kept in, and what rows become before products in INT8.

    They are read once, where the graph is loaded: a worker on another host may have only the weights.
    """

    path: str
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    implementation: Literal["native", "transformers"] = "native"
    expert_weights: Literal["dtype", "int8", "fp8"] = "dtype"
    weights: Literal["dtype", "int8", "fp8"] = "dtype"
    kv_cache: Literal["dtype", "int8"] = "dtype"
    activations: Literal["dtype", "int8"] = "dtype"

    @property
    def kept(self) -> dict[str, Any]:
        """What is not kept in `dtype`: keys of the graph file, and fields of a ModelConfig."""
        return {key: found for key in KEPT_KEYS if (found := getattr(self, key)) != "dtype"}


class Graph(GraphSettings, frozen=True, dict=True):
    """An expanded, checked graph, from which the launcher starts workers. Nodes and edges are keyed by name."""

    nodes: dict[str, Node]
    edges: dict[str, Edge]
    model: ModelPart | None = None
    prompts: tuple[str, ...] = ()
    process_hosts: dict[str, str] = msgspec.field(default_factory=dict)  # process -> its host; empty without `hosts`
    folder: str = ""  # absolute folder of the file: on sys.path of workers for "module:function"
    # For errors that are found after reading: key of the explicit form -> its place ("FILE:LINE" or "--set ..") and key as written.
    places: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict)
    choices: dict[str, str] = msgspec.field(default_factory=dict)  # key of the short form -> what `auto` chose, and why
    version: int = 0  # how often it has changed in the run
    leaving: tuple[str, ...] = ()  # processes that are about to end: nothing new is sent there
    folded: dict[str, int] = msgspec.field(default_factory=dict)  # process -> the equal ones that it stands for (folded.py); empty: itself

    def __eq__(self, other: object) -> bool:
        """Compare the graphs, not the files that they come from."""
        if not isinstance(other, Graph):
            return NotImplemented
        return all(
            getattr(self, key) == getattr(other, key) for key in self.__struct_fields__ if key not in ("places", "choices", "version")
        )

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, nodes: Iterable[Node], edges: Iterable[Edge] = (), **rest: Any) -> Graph:
        """A graph of these nodes and edges. Raises ValueError for two edges of one name."""
        named: dict[str, Edge] = {}
        for edge in edges:
            if named.setdefault(edge.name, edge) is not edge:
                raise ValueError(f"two edges have the name {edge.name!r}; name one of them")
        return cls({node.name: node for node in nodes}, named, **rest)

    def error(self, key: str, text: str) -> GraphError:
        """The error to raise for `key` of the explicit form, such as "devices.left"."""
        return GraphError(*self.places.get(key, ("", key)), text)

    def process_names(self) -> list[str]:
        """Every process in order of first mention, without the gateway, which holds only pseudo-nodes."""
        return list(dict.fromkeys(node.process for node in self.nodes.values() if node.process != GATEWAY))

    def nodes_of(self, process: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.process == process]

    def host_of(self, process: str) -> str:
        """The host of a process, also of one that is not of the graph."""
        return self.process_hosts.get(process, FIRST_HOST)

    def shown_host(self, process: str) -> str:
        """The host of a process where there are several, else ""."""
        return self.host_of(process) if self.hosts is not None else ""

    def limits_of(self, process: str) -> GraphLimits:
        """The limits of the process's role."""
        return self.limits.of_role(role_of(process))

    def group_limits(self, widest: bool = False) -> GraphLimits:
        """What every group grants (or, `widest`, what none exceeds): of all roles the smallest (largest) limit, and number of KV tokens."""
        roles = [self.limits_of(node.process) for node in self.nodes.values() if node.kind.schedules] or [self.limits]
        pick = max if widest else min

        def picked(key: str) -> Any:
            return pick((getattr(limits, key) for limits in roles), key=lambda limit: inf if limit is None else limit)

        found = {key: picked(key) for key in GraphLimits.__struct_fields__ if key != "roles"}
        return GraphLimits(**found | {"kv_pages": pick(each.kv_pages * each.page_size for each in roles) // found["page_size"]})

    def tags_in_flight(self) -> int:
        """The maximum of tags in flight at once: each source's micro-batches in a model graph, `limits.in_flight` in a user's."""
        num_sources = sum(self.folded.get(node.process, 1) for node in self.nodes.values() if node.kind.schedules)
        return num_sources * self.micro_batches if num_sources else self.limits.in_flight

    def ends_of(self, edge: Edge) -> tuple[str, str]:
        """The processes that an edge leads from and to."""
        return self.nodes[edge.source].process, self.nodes[edge.target].process

    def crosses(self, edge: Edge) -> bool:
        """Whether an edge leads from one process to another."""
        source, target = self.ends_of(edge)
        return source != target

    @cached_property
    def _outbound(self) -> dict[str, list[Edge]]:
        outbound: dict[str, list[Edge]] = {name: [] for name in self.nodes}
        for edge in self.edges.values():
            outbound[edge.source].append(edge)
        return outbound

    @cached_property
    def responders(self) -> dict[str, str]:
        """Nodes that respond to the requests of another node of their process -> that node."""
        requests = {edge.source: self.edges[edge.response_to] for edge in self.edges.values() if edge.response_to is not None}
        return {name: request.target for name, request in requests.items() if request.target != name}

    def edges_from(self, node: str) -> list[Edge]:
        return self._outbound[node]


def to_json(graph: Graph) -> bytes:
    """The graph as it travels to workers."""
    return msgspec.json.encode(graph)


@lru_cache(maxsize=4)  # workers in one process share their graph
def from_json(data: bytes) -> Graph:
    """The inverse of `to_json`. Raises msgspec.ValidationError or DecodeError for anything else."""
    return msgspec.json.decode(data, type=Graph)
