"""The keys of a graph file: type, default and bounds of each. The JSON Schema is made from these models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, core_schema

from flowrt.graph.model import FORK_SERVER, FRONT_END, GATEWAY, INPUT, MONITOR, OUTPUT, ROUTING_POLICIES, Numerics, role_of
from flowrt.graph.notation import (
    LINK_NUMBERS,
    LINK_PROFILES,
    is_edge_end,
    is_name,
    is_port_name,
    parse_ids,
    parse_layers,
    parse_link,
    parse_tag,
    parse_tensor_spec,
    shown_value,
)
from flowrt.graph.settings import (
    Batching,
    ComputeCost,
    Emulation,
    GraphLimits,
    HostSettings,
    JitterSettings,
    LongPrompts,
    PlaceRule,
    ReliabilitySettings,
    ServingSettings,
)

MAX_THREADS = 1024
COLOCATED = "colocated"  # expert servers in the processes of the groups
_RESERVED = {
    GATEWAY: f"the launching process, which holds only {INPUT} and {OUTPUT}",
    FORK_SERVER: "the process that forks all others",
    MONITOR: "the process that watches all others",
    FRONT_END: "a process that serves HTTP",
}


@dataclass(frozen=True, eq=False)
class Parsed:
    """Validates a value with `parse`, which returns the value to keep or raises ValueError, and describes it by a JSON Schema.

    `types` are the types that `parse` takes; for any other the error is "VALUE is not WHAT".
    """

    parse: Callable[[Any], Any]
    what: str
    types: tuple[type, ...]
    schema: dict[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return self.schema

    def _validate(self, value: Any) -> Any:
        if type(value) not in self.types:
            raise ValueError(f"{shown_value(value)} is not {self.what}")
        return self.parse(value)


def _choice_or_number(choices: tuple[str, ...], maximum: int, minimum: int = 1) -> Parsed:
    """One of `choices`, or a whole number from `minimum` to `maximum`."""
    what = f"possible; write {', '.join(choices)}, or a number from {minimum} to {maximum}"

    def parse(value: str | int) -> str | int:
        if value in choices if isinstance(value, str) else minimum <= value <= maximum:
            return value
        raise ValueError(f"{shown_value(value)} is not {what}")

    schema = {"anyOf": [{"enum": list(choices)}, {"type": "integer", "minimum": minimum, "maximum": maximum}]}
    return Parsed(parse, what, (str, int), schema)


def _layers(value: str | int) -> str:
    if not parse_layers(value).layers:
        raise ValueError("names no layer; write layers as '0-2,5', or leave the key out for every layer")
    return str(value)


def _ids(value: str | int) -> str:
    parse_ids(value)
    return str(value)


def _cores(value: str | int) -> str:
    if not parse_ids(value):
        raise ValueError("names no core; write cores as '0-3,7', or leave the key out for any core")
    return str(value)


def _placement(value: Any) -> Any:
    return {layers: _IDS._validate(ids) for layers, ids in value.items() if _ids(layers)} if isinstance(value, dict) else _ids(value)


def _tag(value: str) -> str:
    parse_tag(value)
    return value


def _tensors(value: str | list[Any]) -> list[str]:
    specs = [value] if isinstance(value, str) else value
    if not specs or not all(isinstance(spec, str) for spec in specs):
        raise ValueError(f"{shown_value(value)} describes no tensor; write 'float32[rows,64]', or a list of such")
    for spec in specs:
        parse_tensor_spec(spec)
    return [spec.replace(" ", "") for spec in specs]


def _prompts(value: str | list[Any]) -> Any:
    if isinstance(value, list) and not all(isinstance(prompt, str) for prompt in value):
        raise ValueError("is neither a file nor a list of texts; write - 'a prompt' lines, or the path of a file")
    return value


def _version(value: Any) -> Any:
    if value is True:  # which Python takes for 1
        raise ValueError("true is not possible; write 1")
    return value


def _matching(test: Callable[[str], bool], text: str) -> AfterValidator:
    def check(value: str) -> str:
        if not test(value):
            raise ValueError(f"{value!r} is not {text}")
        return value

    return AfterValidator(check)


def _process(value: str) -> str:
    if (reserved := value if value in _RESERVED else role_of(value)) in _RESERVED:
        raise ValueError(f"{value!r} is {_RESERVED[reserved]}; choose another name")
    return value


_IDS_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string", "pattern": r"^[0-9, -]*$"}, {"type": "integer", "minimum": 0}]}
_LINK_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "number", "minimum": 0} for name in LINK_NUMBERS},
    "required": ["bandwidth_bytes_per_second"],
    "additionalProperties": False,
}
_TEXTS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = Parsed(_ids, "a set of ids; write ids as '0-5,7'", (str, int), _IDS_SCHEMA)
_NAMED = _matching(is_name, "a name; use letters, digits, '_', '-', and single dots between them")

Processes = Annotated[Any, _choice_or_number(("one", "many"), 4096)]
Threads = Annotated[Any, _choice_or_number(("auto",), MAX_THREADS)]
Servers = Annotated[Any, _choice_or_number((COLOCATED,), 1024, minimum=0)]
Cores = Annotated[Any, Parsed(_cores, "a set of cores; write cores as '0-3,7'", (str, int), _IDS_SCHEMA)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
Layers = Annotated[Any, Parsed(_layers, "a set of layers; write layers as '0-2,5'", (str, int), _IDS_SCHEMA)]
Placement = Annotated[
    Any,
    Parsed(
        _placement,
        "a set of experts; write '0-5', or by layer {0-2: 0-5, 3: 1-7}",
        (str, int, dict),
        {"anyOf": [*_IDS_SCHEMA["anyOf"], {"type": "object", "additionalProperties": _IDS_SCHEMA}]},
    ),
]
TagText = Annotated[
    Any,
    Parsed(
        _tag,
        "a change of a tag; write layer+1, step+1, or layer=N",
        (str,),
        {"type": "string", "pattern": r"^(layer\+1|step\+1|layer=[0-9]+)$"},
    ),
]
Link = Annotated[
    Any,
    Parsed(
        parse_link,
        f"a link; write one of {', '.join(LINK_PROFILES)}, or numbers: {{{', '.join(LINK_NUMBERS)}}}",
        (str, dict),
        {"anyOf": [{"enum": list(LINK_PROFILES)}, _LINK_SCHEMA]},
    ),
]
Prompts = Annotated[
    Any, Parsed(_prompts, "a file or a list of texts; write - 'a prompt' lines, or the path of a file", (str, list), _TEXTS)
]
Tensors = Annotated[Any, Parsed(_tensors, "a tensor; write 'float32[rows,64]', or a list of such", (str, list), _TEXTS)]
NodeName = Annotated[str, _NAMED]
ProcessName = Annotated[str, AfterValidator(_process), _NAMED]
PortName = Annotated[str, _matching(is_port_name, "a name of a port; use letters, digits, '_' and '-'")]
EdgeEnd = Annotated[str, _matching(is_edge_end, "an end of an edge; write node.port")]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_by_name=False, validate_by_alias=True, allow_inf_nan=False)


class ModelSection(Section):
    """The checkpoint to serve."""

    path: str = Field(min_length=1, description="A Hugging Face model directory: beside this file, then in the working directory.")
    dtype: Dtype | None = Field(default=None, description="The dtype to compute in. Default: the checkpoint's own.")


class RoleSection(Section):
    """How the processes of a role compute."""

    device: Device = Field(default="cpu", description="cpu, cuda, or cuda:N")
    threads: Threads = Field(default="auto", description="Compute threads of each process.")
    cores: Cores | None = Field(default=None, description="Cores of the role, divided evenly between its processes. Default: any core.")


class PipelineSection(RoleSection):
    """A role that computes sequences."""

    numerics: Numerics | None = Field(default=None, description="Numerics of the role. Default: those of the graph.")


class PrefillSection(PipelineSection):
    """Prefill workers, which compute prompts and first tokens for the attention groups."""

    workers: int = Field(default=0, ge=0, le=256, description="Processes that compute prompts. 0: each group computes its own.")
    stream: bool = Field(default=True, description="true: groups pull the KV of a prompt while it is computed; false: when it is complete.")
    int8: bool = Field(default=False, description="Send the part of KV that does not depend on positions as INT8 with a scale per row.")


class AttentionSection(PipelineSection):
    """The attention groups: each schedules, batches and keeps the KV cache of its own requests."""

    groups: int = Field(default=1, ge=1, le=256)
    domains: int = Field(
        default=1, ge=1, le=256, description="Domains take turns at each expert server; neighbouring groups are one domain."
    )
    micro_batches: int = Field(default=1, ge=1, le=64, description="Interleaved batches: how many steps of a group are in flight at once.")
    tensor_parallel: int = Field(default=1, ge=1, description="Only 1 is supported.")


# Before the sections that have them.
for _shared in (
    GraphLimits,
    Batching,
    ComputeCost,
    Emulation,
    HostSettings,
    JitterSettings,
    LongPrompts,
    PlaceRule,
    ReliabilitySettings,
    ServingSettings,
):
    _shared.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[union-attr]


def _batches(value: Any) -> Any:
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class ExpertsSection(RoleSection):
    """The expert servers."""

    servers: Servers = Field(
        default=0, description="0: each group holds all experts. colocated: each group's process is also a server, with a share of them."
    )
    replicas: int = Field(default=1, ge=1, le=1024, description="Servers that hold each expert.")
    trampoline: Literal["auto", "always", "never"] = Field(
        default="never", description="Whether some servers forward to the others; auto: where a group of a domain has many servers."
    )
    int8: Literal["none", "dispatch", "combine", "both"] = Field(
        default="none", description="Rows that travel as INT8 with a scale per row: to the servers, back from them, or both."
    )
    batches: Batching | None = Field(
        default=None, description="How requests of a layer are batched: min_tags, max_wait_seconds. Default: a call takes those that wait."
    )
    placement: dict[str, Placement] | None = Field(
        default=None,
        description="Uneven placement: by server, experts.0 or attention.0: '0-5', or by layer. Default: even, with the given replicas.",
    )


class LinkSection(Section):
    """How messages travel between two processes."""

    transport: str = Field(default="auto", description="auto, inproc, shm, zmq, or one that a package provides.")
    link: Link | None = Field(default=None, description="A profile's name, or your own numbers; a label unless emulate is given.")
    credits: int | None = Field(
        default=None, ge=1, le=65536, description="Messages in flight per edge. Default: as many as tags; of requests of a model one more."
    )
    open: Literal["lazy", "start"] = Field(
        default="lazy", description="lazy: a link opens with its first message; start: every link opens before the first request."
    )


class LinksSection(Section):
    """Links between pairs of roles."""

    attention_experts: LinkSection = Field(
        default=LinkSection(), alias="attention-experts", description="Also between prefill workers and expert servers."
    )
    prefill_attention: LinkSection = Field(default=LinkSection(), alias="prefill-attention", description="For KV transfers.")


class DeploySection(Section):
    """The short form: how many processes of each role."""

    prefill: PrefillSection = PrefillSection()
    attention: AttentionSection = AttentionSection()
    experts: ExpertsSection = ExpertsSection()
    links: LinksSection = LinksSection()
    processes: Processes = Field(default="many", description="one: all in the launching process; many: one each; N: packed into N.")


class RoleLimitsSection(Section):
    """Limits of one role, where they differ from those of the graph."""

    max_num_seqs: int | None = Field(default=None, ge=1, le=4096)
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=1 << 16)
    kv_pages: int | None = Field(default=None, ge=1, le=1 << 24)
    page_size: int | None = Field(default=None, ge=1, le=1024)
    max_micro_batches: int | None = Field(default=None, ge=1, le=64)
    target_step_seconds: float | None = Field(default=None, ge=0, le=3600)
    max_message_bytes: int | None = Field(default=None, ge=1024, le=1 << 34)


@dataclass(frozen=True)
class LimitsSection(GraphLimits):
    """Bounds of a run."""

    roles: dict[str, RoleLimitsSection] = field(
        default_factory=dict, metadata={"description": "Other limits for a role, such as attention: {kv_pages: 1024}."}
    )


def _port(value: Any) -> Any:
    return value if isinstance(value, dict) else {"tensors": value}


def _edge(value: Any) -> Any:
    return {} if value is None else value


class InputPortSection(Section):
    """An input port: its tensors, and how many messages per tag."""

    tensors: Tensors | None = None
    takes: Literal["one", "gather"] = "one"
    count: PortName | None = Field(default=None, description="With takes: gather, the port that gives the number of messages to wait for.")


class NodeSection(Section):
    """A node of the explicit form."""

    operator: str = Field(min_length=1, description="A built-in name, or module:function beside the graph file.")
    process: ProcessName = Field(default="main", description="The process that holds it.")
    inputs: dict[PortName, Annotated[InputPortSection, BeforeValidator(_port)]] | None = None
    outputs: dict[PortName, Tensors | None] | None = None
    options: dict[str, Any] = Field(default_factory=dict, description="Options of built-in operators.")
    stateful: bool | None = Field(default=None, description="Fires in the order of the steps.")
    keeps: Literal["nothing"] | None = Field(default=None, description="nothing: it keeps no state between two firings. Default: unknown.")
    batches: Annotated[Batching | None, BeforeValidator(_batches)] = Field(
        default=None, description="May receive several tags in one call: true, or same_layer, min_tags and max_wait_seconds."
    )


class EdgeSection(LinkSection):
    """An edge of the explicit form, from an output port to an input port."""

    source: EdgeEnd | None = Field(default=None, alias="from", description="node.port. Default: the first end in the edge's name.")
    target: EdgeEnd | None = Field(default=None, alias="to", description="node.port. Default: the second end in the edge's name.")
    layers: Layers | None = Field(default=None, description="The layers whose messages it carries, by the sender's tag.")
    tag: TagText | None = Field(default=None, description="How the tag changes: layer+1, step+1, layer=N.")
    int8: bool | None = Field(default=None, description="Send rows to or from experts, or KV, as INT8 with a scale per row.")
    response_to: str | None = Field(default=None, description="The edge of the requests to which this edge carries the responses.")


class GraphFile(Section):
    """A graph file, in the short form (deploy) or the explicit form (nodes and edges)."""

    model_config = ConfigDict(title="flowrt graph file")

    flowrt: Annotated[Literal[1], BeforeValidator(_version)] = Field(description="The version of this format.")
    model: ModelSection | None = None
    deploy: DeploySection | None = Field(default=None, description="The short form.")
    nodes: dict[NodeName, NodeSection] | None = Field(default=None, description="The explicit form.")
    edges: dict[str, Annotated[EdgeSection, BeforeValidator(_edge)]] | None = Field(
        default=None, description="The explicit form: 'node.port -> node.port', or any name with from: and to:."
    )
    links: dict[str, LinkSection] = Field(default={}, description="Explicit form only: links between two roles, such as left-right.")
    limits: LimitsSection = LimitsSection()
    numerics: Numerics = Field(default="fast", description="strict: no bit depends on batch, placement or preemption.")
    emulate: Emulation | None = Field(default=None, description="Emulate links and computation that this machine does not have.")
    reliability: ReliabilitySettings = ReliabilitySettings()
    jitter: JitterSettings = JitterSettings()
    serving: ServingSettings = ServingSettings()
    hosts: HostSettings | None = Field(default=None, description="Run on several hosts. Default: all processes on this one.")
    place: dict[str, PlaceRule] = Field(default={}, description="With hosts: role -> where its processes may be.")
    routing: str = Field(
        default=ROUTING_POLICIES[0],
        min_length=1,
        description=f"Policy that selects the worker of a request: {', '.join(ROUTING_POLICIES)}, or one of a package.",
    )
    long_prompts: LongPrompts | None = Field(default=None, description="Keep long prompts apart from short ones.")
    prompts: Prompts | None = Field(default=None, description="The prompts that flowrt run answers when given none: a list, or a file.")
    processes: Processes | None = Field(default=None, description="Explicit form only; else deploy.processes.")
    micro_batches: int | None = Field(default=None, ge=1, le=64, description="Explicit form only; else deploy.attention.micro_batches.")
    devices: dict[ProcessName, Device] = Field(default={}, description="Explicit form only: process -> device.")
    threads: dict[ProcessName, Threads] = Field(default={}, description="Explicit form only: process -> compute threads.")
    cores: dict[ProcessName, Cores] = Field(default={}, description="Explicit form only: process -> the cores that it runs on.")
    role_numerics: dict[str, Numerics] = Field(default={}, description="Explicit form only: role -> its numerics.")
    folder: str | None = Field(default=None, description="Explicit form only: folder of operators' modules. Default: this file's folder.")


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a graph file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **GraphFile.model_json_schema(by_alias=True)}
