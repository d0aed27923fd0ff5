"""The graph as data: what a graph file means once it is read, checked and expanded. Pure; no file, no torch, no process.

Here: Port, Node, Edge, TagStep, LayerSet, Placement-free facts every other room reads. Not here: reading YAML (file.py), the
short `deploy:` form (expand.py), the checks (checks.py), fusion (fuse.py). Called by every room that needs to know the graph.

A node has one set of ports for all layers: the layer is part of the tag, so the layers of a model are a cycle of the graph
whose edges advance the tag, not copies of its nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flowrt.transports.wire.message import Tag

INPUT, OUTPUT = "input", "output"  # the pseudo-nodes of a user's graph; they live in the gateway's process
GATEWAY = "gateway"  # the name of the launching process as a worker
FORK_SERVER = "fork server"  # the process that forks the workers
MONITOR = "monitor"  # the process that watches the workers


@dataclass(frozen=True)
class LayerSet:
    """Which layers of a tag an edge carries. `None` bounds nothing: every layer."""

    layers: frozenset[int] | None = None

    def __contains__(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers

    def __str__(self) -> str:
        """As written in a graph file: "0-2,5"; "" for every layer."""
        if self.layers is None:
            return ""
        runs: list[list[int]] = []
        for layer in sorted(self.layers):
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class TagStep:
    """How a tag changes along an edge: not at all, the next layer, the next step, or to one given layer.

    Written `tag: layer+1`, `tag: step+1`, `tag: layer=3`. A cycle must hold an edge that goes to the next layer or step.
    """

    kind: Literal["same", "next_layer", "next_step", "to_layer"] = "same"
    layer: int = 0

    @property
    def advances(self) -> bool:
        return self.kind in ("next_layer", "next_step")

    def apply(self, tag: Tag) -> Tag:
        if self.kind == "same":
            return tag
        if self.kind == "next_layer":
            return Tag(tag.source, tag.epoch, tag.micro_batch, tag.step, tag.layer + 1)
        if self.kind == "next_step":
            return Tag(tag.source, tag.epoch, tag.micro_batch, tag.step + 1, 0)
        return Tag(tag.source, tag.epoch, tag.micro_batch, tag.step, self.layer)

    def __str__(self) -> str:
        return {"same": "", "next_layer": "layer+1", "next_step": "step+1", "to_layer": f"layer={self.layer}"}[self.kind]


@dataclass(frozen=True)
class PortSpec:
    """What one port takes or gives. `tensors` are spec strings like "float32[rows,64]"; empty: not declared.

    `takes` is "one" (a message per tag) or "gather" (as many as the plan that arrives on the port named `count` says,
    possibly none). Outputs are always "one": each firing gives at most one message per output port.
    """

    name: str
    tensors: tuple[str, ...] = ()
    takes: Literal["one", "gather"] = "one"
    count: str | None = None


@dataclass(frozen=True)
class Node:
    """An operator held by a process. `operator` is a built-in name (no colon) or "module:function" of the user.

    `options` are plain values for a built-in operator (for experts: {"experts": {layer: [ids]}}). A `stateful` node fires in
    step order per lane. A `batches` node may be given several tags in one call.
    """

    name: str
    operator: str
    process: str
    inputs: Mapping[str, PortSpec] = field(default_factory=dict)
    outputs: Mapping[str, PortSpec] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    stateful: bool = False
    batches: bool = False
    line: int = field(default=0, compare=False)  # where it stands in the file, for error texts


@dataclass(frozen=True)
class Edge:
    """A connection from an output port to an input port. `id` is its place in Graph.edges and travels in messages.

    `layers` filters by the producer's tag; `tag` changes it. `credits` is how many messages may be on the way or unconsumed.
    `answers` names the edge whose messages this one answers: it carries only the result for the message that came along that
    edge, and it needs no credits of its own, because a request's credit comes back with its answer.
    """

    id: int
    source: str
    source_port: str
    target: str
    target_port: str
    transport: str = "auto"
    link: str | None = None
    credits: int = 0  # 0 only until expansion has filled it in
    layers: LayerSet = LayerSet()
    tag: TagStep = TagStep()
    answers: int | None = None
    fallbacks: tuple[str, ...] = ()  # what carries it, in this order, when its transport breaks: filled in for `auto`
    why: str = ""  # why `auto` took this transport, for people
    open: Literal["lazy", "start"] = "lazy"  # when the link opens that carries it
    line: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.source}.{self.source_port} -> {self.target}.{self.target_port}"


@dataclass(frozen=True)
class ModelPart:
    """Which checkpoint the graph serves: an absolute directory and the dtype to compute in."""

    path: str
    dtype: str


@dataclass(frozen=True)
class GraphLimits:
    """`limits:` of the file. `max_num_seqs` counts sequences per group over all lanes; `kv_pages` is per group; `max_tokens` is the
    most new tokens of a request; `max_num_batched_tokens` bounds the rows of a step; with strict numerics prompts are cut at multiples of
    `chunk_tokens`; `in_flight` bounds a user's graph's tags."""

    max_num_seqs: int = 16
    kv_pages: int = 512
    page_size: int = 16
    max_tokens: int = 256
    max_num_batched_tokens: int = 512
    chunk_tokens: int = 64
    in_flight: int = 8
    max_message_bytes: int = 1 << 26


@dataclass(frozen=True)
class Emulation:
    """`emulate:` of the file. Links take their profiles' times, computing its modelled ones, all times `dilation`.

    `attention_seconds` is charged per layer of an attention node, `expert_seconds` per layer of a call of an experts node; None: the
    node takes the time it takes. `processes_per_nic` processes split each NIC evenly.
    """

    dilation: float
    attention_seconds: float | None = None
    expert_seconds: float | None = None
    processes_per_nic: int = 1

    def charges(self) -> dict[str, float]:
        """operator -> modelled seconds, undilated."""
        given = {"attention": self.attention_seconds, "experts": self.expert_seconds}
        return {operator: seconds for operator, seconds in given.items() if seconds is not None}


@dataclass(frozen=True)
class ReliabilitySettings:
    """`reliability:` of the file. Without `failover` any death ends the run; without `detector` nobody watches for stuck processes.

    The detector suspects a process without progress for `suspect_seconds` and marks it dead after `dead_seconds`. A dead process is
    restarted, at most `restarts` times in `restart_window_seconds`. A request that needs an unavailable expert ends with an error after
    `unavailable_expert_seconds`; with `unavailable_expert: degrade` it continues without the expert, and its tokens are marked.
    `hedge`: a part that a slow server delays is sent to another replica too.
    """

    detector: bool = True
    failover: bool = True
    unavailable_expert_seconds: float = 5.0
    suspect_seconds: float = 0.4
    dead_seconds: float = 1.0
    restarts: int = 3
    restart_window_seconds: float = 30.0
    hedge: bool = True
    unavailable_expert: Literal["error", "degrade"] = "error"


@dataclass(frozen=True)
class Graph:
    """An expanded, checked graph: what workers are started from. It travels to them as JSON (file.py writes and reads it)."""

    nodes: Mapping[str, Node]
    edges: Sequence[Edge]
    model: ModelPart | None = None
    limits: GraphLimits = GraphLimits()
    numerics: Literal["fast", "strict"] = "fast"
    processes: Literal["one", "many"] | int = "many"
    micro_batches: int = 1
    devices: Mapping[str, str] = field(default_factory=dict)  # process -> "cpu", "cuda", "cuda:1"; absent: cpu
    threads: Mapping[str, int | Literal["auto"]] = field(default_factory=dict)  # process -> compute threads
    prompts: tuple[str, ...] = ()
    emulation: Emulation | None = None
    reliability: ReliabilitySettings = ReliabilitySettings()
    folder: str = ""  # absolute folder of the file: on sys.path of workers for "module:function"

    def process_names(self) -> list[str]:
        """Every process, in order of first mention; the gateway's own pseudo-nodes are left out."""
        return list(dict.fromkeys(node.process for node in self.nodes.values() if node.process != GATEWAY))

    def nodes_of(self, process: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.process == process]

    def tags_in_flight(self) -> int:
        """The most tags on the way at once: each source's lanes in a model graph, `limits.in_flight` in a user's."""
        num_sources = sum(1 for node in self.nodes.values() if node.operator == "source")
        return num_sources * self.micro_batches if num_sources else self.limits.in_flight

    def edges_from(self, node: str) -> list[Edge]:
        return [edge for edge in self.edges if edge.source == node]
