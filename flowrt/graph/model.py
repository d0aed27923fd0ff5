"""The data model of a graph: the result of reading, checking and expanding a graph file.

A node has one set of ports for all layers. The layer is part of the tag, so the layers of a model are a cycle of the graph whose edges
advance the tag, not copies of its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from flowrt.errors import GraphError
from flowrt.transports.wire.message import Tag

INPUT, OUTPUT = "input", "output"  # the pseudo-nodes of a user's graph; they live in the gateway's process
GATEWAY = "gateway"  # the name of the launching process as a worker
FORK_SERVER, MONITOR = "fork server", "monitor"  # the processes that fork the workers, and watch them
ROUTING_POLICIES, ROUTING_ENTRY_POINTS = ("cache_aware", "round_robin"), "flowrt.routing_policies"  # gateway/routing.py
FRONT_END = "front_end"  # role of the processes that serve HTTP
Numerics = Literal["fast", "strict"]
FIRST_HOST = "host.0"  # where the launcher runs, with the monitor, front ends and standby processes


@dataclass(frozen=True)
class LayerSet:
    """The layers of a tag that an edge carries. None: every layer."""

    layers: frozenset[int] | None = None

    def __contains__(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def __str__(self) -> str:
        """As written in a graph file: "0-2,5"; "" for every layer."""
        runs: list[list[int]] = []
        for layer in sorted(self.layers or ()):
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class TagStep:
    """How a tag changes along an edge: not at all, to the next layer, to the next step, or to a given layer.

    A graph file writes `tag: layer+1`, `tag: step+1` or `tag: layer=3`. A cycle must hold an edge to the next layer or step.
    """

    kind: Literal["same", "next_layer", "next_step", "to_layer"] = "same"
    layer: int = 0

    @property
    def advances(self) -> bool:
        return self.kind in ("next_layer", "next_step")

    def apply(self, tag: Tag) -> Tag:
        if self.kind == "same":
            return tag
        if self.kind == "next_step":
            return Tag(tag.source, tag.epoch, tag.micro_batch, tag.step + 1, 0)
        layer = tag.layer + 1 if self.kind == "next_layer" else self.layer
        return Tag(tag.source, tag.epoch, tag.micro_batch, tag.step, layer)

    def __str__(self) -> str:
        return {"same": "", "next_layer": "layer+1", "next_step": "step+1", "to_layer": f"layer={self.layer}"}[self.kind]


ALL_LAYERS, SAME_TAG = LayerSet(), TagStep()  # of most edges


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


def _key(default: Any, description: str, **bounds: float) -> Any:
    """A key of a graph file with its default, description and bounds, from which schema.py makes its validation."""
    is_text = isinstance(default, str)  # one of a Literal's, which is never converted
    return field(default=default, metadata={"description": description, **bounds, **({} if is_text else {"strict": True})})


@dataclass(frozen=True)
class Batching:
    """Which waiting tags a node takes in one call. Default: all that wait in the layer of the first."""

    same_layer: bool = _key(True, "Only tags of one layer in a call.")
    min_tags: int = _key(2, "A batch of this many tags does not wait for more.", ge=1, le=4096)
    max_wait_seconds: float = _key(0.0, "Maximum wait for min_tags while the process has nothing else to compute.", ge=0, le=3600)
    domains: tuple[tuple[str, ...], ...] = field(
        default=(), metadata={"description": "Source nodes by domain: domains take turns, and a call has tags of one. Default: no turns."}
    )
    turn_calls: int = _key(4, "A turn ends after so many calls if another domain waits; before, when no tag is left.", ge=1, le=4096)


@dataclass(frozen=True)
class Node:
    """An operator in a process. `operator` is a built-in name (without a colon) or "module:function" of the user.

    `options` are plain values for a built-in operator (for experts: {"experts": {layer: [ids]}}). A `stateful` node fires in step order
    per micro-batch. A node with `batches` may receive several tags in one call. `keeps_nothing`: the user says so of an operator of theirs.
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
    fallbacks: tuple[str, ...] = ()  # the transports that take over, in this order, when an `auto` transport breaks
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


def _edge_id(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def front_end_names(graph: Graph) -> tuple[str, ...]:
    """The processes that serve HTTP when the graph is served."""
    return tuple(f"{FRONT_END}.{number}" for number in range(graph.serving.front_ends))


def role_of(process: str) -> str:
    """The role of a process: its name without the number, so that attention.0 and attention.1 have the role attention."""
    role, _, number = process.rpartition(".")
    return role if role and number.isascii() and number.isdigit() else process


@dataclass(frozen=True)
class ModelPart:
    """The checkpoint that the graph serves: an absolute directory and the dtype to compute in."""

    path: str
    dtype: str


@dataclass(frozen=True)
class GraphLimits:
    """`limits:` of a graph file, for one role."""

    max_num_seqs: int = _key(16, "Sequences per group over all micro-batches.", ge=1, le=4096)
    kv_pages: int = _key(512, "Pages of the KV cache per group.", ge=1, le=1 << 24)
    page_size: int = _key(16, "Tokens per page.", ge=1, le=1024)
    max_tokens: int = _key(256, "Maximum number of new tokens of a request.", ge=1, le=1 << 20)
    max_num_batched_tokens: int = _key(512, "Maximum number of rows of a step, and so of every message.", ge=1, le=1 << 16)
    chunk_tokens: int = _key(64, "Strict: prompts are cut at its multiples.", ge=1, le=1 << 16)
    enable_prefix_caching: bool = _key(True, "Keep the KV of prompts for later ones that begin with the same tokens.")
    max_micro_batches: int = _key(64, "Use at most so many of the deployment's micro-batches; for roles that need fewer.", ge=1, le=64)
    dynamic_micro_batches: bool = _key(False, "Use as many of the micro-batches as give the most tokens per second, by measuring.")
    target_step_seconds: float = _key(
        0.0, "A step has as many rows as it computes in this time, from the times of earlier steps. 0: no target.", ge=0, le=3600
    )
    in_flight: int = _key(8, "Maximum number of tags in flight in a graph of your own.", ge=1, le=4096)
    max_message_bytes: int = _key(1 << 26, "Maximum payload of a message.", ge=1024, le=1 << 34)


_MODELLED = {"ge": 0, "le": 3600}


@dataclass(frozen=True)
class ComputeCost:
    """Compute time of an operator on the emulated hardware, undilated: the sum of four terms for each layer of a call."""

    fixed_seconds: float = _key(0.0, "Charged once per layer of a call.", **_MODELLED)
    row_seconds: float = _key(0.0, "Charged per row; for experts per row of each expert.", **_MODELLED)
    expert_seconds: float = _key(0.0, "Charged per expert that has rows.", **_MODELLED)
    kv_token_seconds: float = _key(0.0, "Charged per token of context, over all sequences.", **_MODELLED)

    def seconds(self, num_rows: int, num_experts: int = 0, num_kv_tokens: int = 0) -> float:
        experts_and_kv = self.expert_seconds * num_experts + self.kv_token_seconds * num_kv_tokens
        return self.fixed_seconds + self.row_seconds * num_rows + experts_and_kv

    def shortest_seconds(self, operator: str) -> float:
        """The time of one row: with one expert in `experts`, with one token of context in `attention`."""
        return self.seconds(1, operator == "experts", operator == "attention")


@dataclass(frozen=True)
class Emulation:
    """Emulate other hardware, slower by a factor: links take their profiles' times, computation its modelled times."""

    dilation: float = _key(MISSING, "Factor of all modelled times; flowrt doctor prints the smallest possible one.", ge=1, le=1e9)
    compute: Mapping[str, ComputeCost] = field(
        default_factory=dict, metadata={"description": "Operator: its modelled time. Without it: the time that this machine takes."}
    )
    processes_per_nic: int = _key(1, "Processes that share a NIC evenly.", ge=1, le=1024)


_SECONDS = {"ge": 0.05, "le": 86400}


@dataclass(frozen=True)
class ReliabilitySettings:
    """What happens when a process dies, hangs or is slow."""

    detector: bool = _key(True, "Detect processes that hang.")
    recovery: Literal["fine", "restart_role", "restart_all", "off"] = _key(
        "fine", "What restarts after a death: the process, its role, or all workers; off: any death ends the run."
    )
    unavailable_expert_seconds: float = _key(5.0, "How long requests wait for an expert without any replica.", **_SECONDS)
    lost_group_seconds: float = _key(30.0, "How long requests wait for a group while none is left.", **_SECONDS)
    suspect_seconds: float = _key(0.4, "A process without a heartbeat for so long is suspected.", **_SECONDS)
    dead_seconds: float = _key(1.0, "A process with evidence of a standstill for so long is marked dead.", **_SECONDS)
    restarts: int = _key(3, "Maximum number of restarts of a process in restart_window_seconds.", ge=0, le=1000)
    restart_window_seconds: float = _key(30.0, "Window in which restarts count.", **_SECONDS)
    hedge: bool = _key(True, "Send a part that a slow server delays to another replica too.")
    unavailable_expert: Literal["error", "degrade"] = _key(
        "error", "degrade: after unavailable_expert_seconds continue without the expert and mark every token."
    )
    standby: int = _key(0, "Processes with loaded weights, each of which can replace one that dies.", ge=0, le=16)
    share_weights: bool = _key(True, "Share equal experts, and proofs of equal weights, between processes of one host and over restarts.")
    request_log: str = _key("", "A folder: what is committed is written there first, and outlives the launcher (flowrt up --resume).")
    request_log_sync: bool = _key(False, "Wait until the disk has it, so that it outlives a power loss, too.")
    kv_hold_seconds: float = _key(600.0, "How long a prefill worker keeps a computed prompt for its group.", **_SECONDS)


@dataclass(frozen=True)
class LongPrompts:
    """Workers that compute long prompts and no others, so that no short prompt waits behind a long one (xDeepServe section 6.2)."""

    min_tokens: int = _key(MISSING, "A prompt of so many tokens or more is long.", ge=2, le=1 << 24)
    workers: int = _key(1, "So many prefill workers, the last ones, compute only long prompts; groups, where there are none.", ge=1, le=255)


@dataclass(frozen=True)
class JitterSettings:
    """What keeps pauses out of the steps of running requests (xDeepServe section 4.4)."""

    garbage_collection: Literal["automatic", "idle"] = _key(
        "automatic", "idle: a process searches for garbage while it waits, not in the middle of a step."
    )
    warm_up: bool = _key(False, "Each group serves requests of its own before the first one of a client.")


@dataclass(frozen=True)
class ServingSettings:
    """How `flowrt serve` takes requests."""

    front_ends: int = _key(1, "Processes that serve HTTP, tokenize prompts and decode tokens.", ge=1, le=64)
    max_requests: int = _key(1024, "Maximum number of active requests; further ones get status 429.", ge=1, le=1 << 20)
    max_prompt_tokens: int = _key(1 << 20, "Maximum number of tokens in the prompts of all active requests.", ge=1, le=1 << 40)
    max_connections: int = _key(2048, "Maximum number of open connections of a front end.", ge=1, le=1 << 16)
    stream_interval: int = _key(1, "Tokens per event of a stream; the first is always sent at once.", ge=1, le=1024)
    vllm_metrics: bool = _key(False, "Export the metrics under vLLM's names too, for dashboards that query these.")


@dataclass(frozen=True)
class HostSettings:
    """The hosts of a run: host.0 is the launcher's, an engine starts a host server on each other one."""

    engine: Literal["ray", "local"] = _key("ray", "What provides the hosts: a Ray cluster, or this machine, which plays all of them.")
    count: int = _key(2, "Number of hosts, with the launcher's own.", ge=1, le=250)
    address: str = _key("auto", "Ray: the address of the cluster, as for ray.init.")
    insecure: bool = _key(False, "Ray: use a cluster without token authentication, in which anyone who reaches a port may run code.")
    dead_seconds: float = _key(3.0, "A host that sends nothing for so long is lost, with all its processes.", ge=1, le=3600)
    ports: str = _key("", "FROM-TO: the ports at which processes listen for other hosts. Default: any.")
    trusted: tuple[str, ...] = field(default=(), metadata={"description": "Networks that only the hosts reach; ucx may be used there."})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"host.{number}" for number in range(self.count))


@dataclass(frozen=True)
class PlaceRule:
    """On which hosts the processes of a role may be."""

    hosts: tuple[int, ...] = field(default=(), metadata={"description": "Numbers of the hosts that may hold it. Default: all."})
    near: str = _key("", "A role: each process is on the host of that role's process with the same number.")
    apart: str = _key("", "A role: no process is on a host of that role.")
    spread: bool = _key(True, "Replicas of an expert are on different hosts.")
    resources: Mapping[str, float] = field(
        default_factory=lambda: {"CPU": 1.0}, metadata={"description": "Of each process, which Ray reserves on its host."}
    )


@dataclass(frozen=True)
class Graph:
    """An expanded, checked graph, from which the launcher starts workers. Nodes and edges are keyed by name."""

    nodes: Mapping[str, Node]
    edges: Mapping[str, Edge]
    model: ModelPart | None = None
    limits: GraphLimits = GraphLimits()
    role_limits: Mapping[str, GraphLimits] = field(default_factory=dict)  # role -> its limits, where they differ from `limits`
    numerics: Numerics = "fast"
    role_numerics: Mapping[str, Numerics] = field(default_factory=dict)  # role -> its numerics, where it has its own
    processes: Literal["one", "many"] | int = "many"
    micro_batches: int = 1
    devices: Mapping[str, str] = field(default_factory=dict)  # process -> "cpu", "cuda", "cuda:1"; absent: cpu
    threads: Mapping[str, int | Literal["auto"]] = field(default_factory=dict)  # process -> compute threads
    cores: Mapping[str, str] = field(default_factory=dict)  # process -> the cores that it runs on, "0-3"; absent: any
    prompts: tuple[str, ...] = ()
    emulation: Emulation | None = None
    reliability: ReliabilitySettings = ReliabilitySettings()
    jitter: JitterSettings = JitterSettings()
    serving: ServingSettings = ServingSettings()
    routing: str = ROUTING_POLICIES[0]
    long_prompts: LongPrompts | None = None
    hosts: HostSettings | None = None
    place: Mapping[str, PlaceRule] = field(default_factory=dict)  # role -> rule
    placement: Mapping[str, str] = field(default_factory=dict)  # process -> its host; empty without `hosts`
    folder: str = ""  # absolute folder of the file: on sys.path of workers for "module:function"
    # For errors that are found after reading: key of the explicit form -> its place ("FILE:LINE" or "--set ..") and key as written.
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict, compare=False)
    choices: Mapping[str, str] = field(default_factory=dict, compare=False)  # key of the short form -> what `auto` chose, and why

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
        return self.placement.get(process, FIRST_HOST)

    def shown_host(self, process: str) -> str:
        """The host of a process where there are several, else ""."""
        return self.host_of(process) if self.hosts is not None else ""

    def limits_of(self, process: str) -> GraphLimits:
        """The limits of the process's role."""
        return self.role_limits.get(role_of(process), self.limits)

    def group_limits(self, widest: bool = False) -> GraphLimits:
        """What every group grants (or, `widest`, what none exceeds): of all roles the smallest (largest) limit, and number of KV tokens."""
        roles = [asdict(self.limits_of(node.process)) for node in self.nodes.values() if node.operator == "source"] or [asdict(self.limits)]
        pick = max if widest else min
        found = {key: pick(limits[key] for limits in roles) for key in roles[0]}
        return GraphLimits(**found | {"kv_pages": pick(each["kv_pages"] * each["page_size"] for each in roles) // found["page_size"]})

    def tags_in_flight(self) -> int:
        """The maximum of tags in flight at once: each source's micro-batches in a model graph, `limits.in_flight` in a user's."""
        num_sources = sum(node.operator == "source" for node in self.nodes.values())
        return num_sources * self.micro_batches or self.limits.in_flight

    def ends_of(self, edge: Edge) -> tuple[str, str]:
        """The processes that an edge leads from and to."""
        return self.nodes[edge.source].process, self.nodes[edge.target].process

    def crosses(self, edge: Edge) -> bool:
        """Whether an edge leads from one process to another."""
        return len({*self.ends_of(edge)}) == 2

    @cached_property
    def _outbound(self) -> dict[str, list[Edge]]:
        outbound: dict[str, list[Edge]] = {name: [] for name in self.nodes}
        for edge in self.edges.values():
            outbound[edge.source].append(edge)
        return outbound

    def edges_from(self, node: str) -> list[Edge]:
        return self._outbound[node]


def to_json(graph: Graph) -> bytes:
    """The graph as it travels to workers."""
    return msgspec.json.encode(graph)


@lru_cache(maxsize=4)  # workers in one process share their graph
def from_json(data: bytes) -> Graph:
    """The inverse of `to_json`. Raises msgspec.ValidationError or DecodeError for anything else."""
    return msgspec.json.decode(data, type=Graph)
