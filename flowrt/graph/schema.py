"""What may stand in a graph file: every key, its type, its default, its bounds. The JSON Schema is made from this.

Here: the sections as pydantic models. Not here: reading the file (document.py), what sections mean together (file.py, expand.py,
explicit.py, checks.py), how a failure is worded (problems.py). Called by file.py and `flowrt graph schema`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from flowrt.graph.model import FORK_SERVER, GATEWAY, INPUT, MONITOR, OUTPUT, GraphLimits, ReliabilitySettings
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

_LIMITS = GraphLimits()
_RELIABILITY = ReliabilitySettings()
MAX_THREADS = 1024
MAX_DILATION = 1e9
MIN_MODELLED_SECONDS, MAX_MODELLED_SECONDS = 1e-9, 3600.0
MIN_SECONDS, MAX_SECONDS = 0.05, 86400.0  # of what is waited for: shorter than this is within the beat of a loaded machine


def _version(value: Any) -> Any:
    if value is True:  # which Python takes for 1
        raise ValueError("true is not possible; write 1")
    return value


def _processes(value: Any) -> Any:
    if value in ("one", "many") or (type(value) is int and 1 <= value <= 4096):
        return value
    raise ValueError(f"{shown_value(value)} is no way to make processes; write one, many, or a number from 1")


def _threads(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MAX_THREADS):
        return value
    raise ValueError(f"{shown_value(value)} is no number of threads; write auto, or a number from 1 to {MAX_THREADS}")


def _device(value: Any) -> Any:
    prefix, colon, index = value.partition(":") if isinstance(value, str) else ("", "", "")
    if value == "cpu" or (prefix == "cuda" and (not colon or (index.isascii() and index.isdigit() and len(index) <= 3))):
        return value
    raise ValueError(f"{shown_value(value)} is no device; write cpu, cuda, or cuda:N")


def _layers(value: Any) -> Any:
    if type(value) not in (int, str):
        raise ValueError(f"{shown_value(value)} names no layers; write them as '0-2,5'")
    if not parse_layers(value).layers:
        raise ValueError("names no layer; write them as '0-2,5', or leave the key out for every layer")
    return str(value)


def _ids(value: Any) -> Any:
    if type(value) not in (int, str):
        raise ValueError(f"{shown_value(value)} names no ids; write them as '0-5,7'")
    parse_ids(value)
    return str(value)


def _placement(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(_ids(layers)): _ids(ids) for layers, ids in value.items()}
    return _ids(value)


def _tag(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"{shown_value(value)} is no change of a tag; write layer+1, step+1, or layer=N")
    parse_tag(value)
    return value


def _link(value: Any) -> Any:
    if not isinstance(value, str | dict):
        names, numbers = ", ".join(LINK_PROFILES), ", ".join(LINK_NUMBERS)
        raise ValueError(f"{shown_value(value)} is no link; write one of {names}, or numbers: {{{numbers}}}")
    return parse_link(value)


def _positive(value: Any, least: float, most: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{shown_value(value)} is no {what}; write a number from {least:g} to {most:g}")
    return float(value)


def _dilation(value: Any) -> float:
    return _positive(value, 1.0, MAX_DILATION, "dilation")


def _modelled_seconds(value: Any) -> float:
    return _positive(value, MIN_MODELLED_SECONDS, MAX_MODELLED_SECONDS, "modelled time in seconds")


def _seconds(value: Any) -> float:
    return _positive(value, MIN_SECONDS, MAX_SECONDS, "time in seconds")


def _tensors(value: Any) -> Any:
    specs = [value] if isinstance(value, str) else value
    if not isinstance(specs, list) or not specs or not all(isinstance(spec, str) for spec in specs):
        raise ValueError(f"{shown_value(value)} describes no tensor; write 'float32[rows,64]', or a list of such")
    for spec in specs:
        parse_tensor_spec(spec)
    return [spec.replace(" ", "") for spec in specs]


def _prompts(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(prompt, str) for prompt in value)):
        return value
    raise ValueError("is neither a file nor a list of texts; write - 'a prompt' lines, or the path of a file")


def _input_port(value: Any) -> Any:
    return value if isinstance(value, dict) else {"tensors": value}


def _edge(value: Any) -> Any:
    return {} if value is None else value


def _name(value: str) -> str:
    if not is_name(value):
        raise ValueError(f"{value!r} is no name; use letters, digits, '_', '-', and single dots between them")
    return value


def _process(value: str) -> str:
    if value == GATEWAY:
        raise ValueError(f"{GATEWAY!r} is the launching process, which holds only {INPUT} and {OUTPUT}; choose another name")
    if value == FORK_SERVER:
        raise ValueError(f"{FORK_SERVER!r} is the process that forks all others; choose another name")
    if value == MONITOR:
        raise ValueError(f"{MONITOR!r} is the process that watches all others; choose another name")
    return _name(value)


def _port_name(value: str) -> str:
    if not is_port_name(value):
        raise ValueError(f"{value!r} is no name of a port; use letters, digits, '_' and '-'")
    return value


def _end(value: str) -> str:
    if not is_edge_end(value):
        raise ValueError(f"{value!r} is no end of an edge; write node.port")
    return value


def _either(word: str | list[str], number: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"enum": [word] if isinstance(word, str) else word}, {"type": "integer", **number}]})


_IDS_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string", "pattern": r"^[0-9, -]*$"}, {"type": "integer", "minimum": 0}]}
_TENSORS_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}

Processes = Annotated[Any, BeforeValidator(_processes), _either(["one", "many"], {"minimum": 1})]
Threads = Annotated[Any, BeforeValidator(_threads), _either("auto", {"minimum": 1, "maximum": MAX_THREADS})]
Device = Annotated[Any, BeforeValidator(_device), WithJsonSchema({"type": "string", "pattern": r"^(cpu|cuda(:[0-9]+)?)$"})]
Layers = Annotated[Any, BeforeValidator(_layers), WithJsonSchema(_IDS_SCHEMA)]
Placement = Annotated[
    Any,
    BeforeValidator(_placement),
    WithJsonSchema({"anyOf": [*_IDS_SCHEMA["anyOf"], {"type": "object", "additionalProperties": _IDS_SCHEMA}]}),
]
TagText = Annotated[Any, BeforeValidator(_tag), WithJsonSchema({"type": "string", "pattern": r"^(layer\+1|step\+1|layer=[0-9]+)$"})]
Link = Annotated[
    Any,
    BeforeValidator(_link),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(LINK_PROFILES)},
                {
                    "type": "object",
                    "properties": {name: {"type": "number", "minimum": 0} for name in LINK_NUMBERS},
                    "required": ["bandwidth_bytes_per_second"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
Prompts = Annotated[
    Any, BeforeValidator(_prompts), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
]
Tensors = Annotated[Any, BeforeValidator(_tensors), WithJsonSchema(_TENSORS_SCHEMA)]
Dilation = Annotated[Any, BeforeValidator(_dilation), WithJsonSchema({"type": "number", "minimum": 1, "maximum": MAX_DILATION})]
ModelledSeconds = Annotated[
    Any,
    BeforeValidator(_modelled_seconds),
    WithJsonSchema({"type": "number", "minimum": MIN_MODELLED_SECONDS, "maximum": MAX_MODELLED_SECONDS}),
]
Seconds = Annotated[Any, BeforeValidator(_seconds), WithJsonSchema({"type": "number", "minimum": MIN_SECONDS, "maximum": MAX_SECONDS})]
NodeName = Annotated[str, AfterValidator(_name)]
ProcessName = Annotated[str, AfterValidator(_process)]
PortName = Annotated[str, AfterValidator(_port_name)]
EdgeEnd = Annotated[str, AfterValidator(_end)]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Open = Literal["lazy", "start"]
_OPEN_TEXT = "first use: a link opens when it has something to carry; start: all before the first request."


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_by_name=False, validate_by_alias=True)


class ModelSection(Section):
    """Which checkpoint to serve."""

    path: str = Field(min_length=1, description="A Hugging Face model directory: beside this file, then in the working directory.")
    dtype: Dtype | None = Field(default=None, description="What to compute in. Default: the checkpoint's own.")


class AttentionSection(Section):
    """The attention groups: each schedules, batches and keeps the KV cache of its own requests."""

    groups: int = Field(default=1, ge=1, le=256)
    domains: int = Field(default=1, ge=1, description="Above 1: not built yet.")
    micro_batches: int = Field(default=1, ge=1, le=64, description="Lanes: how many steps a group keeps on the way at once.")
    tensor_parallel: int = Field(default=1, ge=1, description="Above 1: not built yet.")
    device: Device = Field(default="cpu", description="cpu, cuda, or cuda:N")
    threads: Threads = Field(default="auto", description="Compute threads of each process.")


class ExpertsSection(Section):
    """The expert servers."""

    servers: int = Field(default=0, ge=0, le=1024, description="0: the experts lie inside the attention processes.")
    replicas: int = Field(default=1, ge=1, le=1024, description="On how many servers each expert lies.")
    placement: dict[str, Placement] | None = Field(
        default=None, description="Uneven placement: experts.0: '0-5', or by layer. Default: even, with the given replicas."
    )
    device: Device = Field(default="cpu", description="cpu, cuda, or cuda:N")
    threads: Threads = Field(default="auto", description="Compute threads of each process.")


class LinkSection(Section):
    """How messages get from one role to another."""

    transport: str = Field(default="auto", description="auto, inproc, shm, zmq, or one that a package brings.")
    link: Link | None = Field(default=None, description="A profile's name, or numbers of one's own; a label unless emulate is there.")
    credits: int | None = Field(default=None, ge=1, le=65536, description="Messages on the way per edge. Default: micro_batches.")
    open: Open = Field(default="lazy", description=_OPEN_TEXT)


class LinksSection(Section):
    """Links between roles."""

    attention_experts: LinkSection = Field(default=LinkSection(), alias="attention-experts")


class DeploySection(Section):
    """The short form: how many of what, and the graph follows."""

    attention: AttentionSection = AttentionSection()
    experts: ExpertsSection = ExpertsSection()
    links: LinksSection = LinksSection()
    processes: Processes = Field(default="many", description="one: all in the launching process; many: one each; N: packed into N.")


class LimitsSection(Section):
    """Bounds on what a run may hold."""

    max_num_seqs: int = Field(default=_LIMITS.max_num_seqs, ge=1, le=4096, description="Sequences per group, over all its lanes.")
    kv_pages: int = Field(default=_LIMITS.kv_pages, ge=1, le=1 << 24, description="Pages of the KV cache per group.")
    page_size: int = Field(default=_LIMITS.page_size, ge=1, le=1024, description="Tokens per page.")
    max_tokens: int = Field(default=_LIMITS.max_tokens, ge=1, le=1 << 20, description="The most new tokens of a request.")
    max_num_batched_tokens: int = Field(default=_LIMITS.max_num_batched_tokens, ge=1, le=1 << 16, description="The most rows of a step.")
    chunk_tokens: int = Field(default=_LIMITS.chunk_tokens, ge=1, le=1 << 16, description="Strict: prompts are cut at its multiples.")
    in_flight: int = Field(default=_LIMITS.in_flight, ge=1, le=4096, description="The most tags on the way in a user's own graph.")
    max_message_bytes: int = Field(default=_LIMITS.max_message_bytes, ge=1024, le=1 << 34, description="The most payload of a message.")


class InputPortSection(Section):
    """An input port written out: what it takes, and how often per tag."""

    tensors: Tensors | None = None
    takes: Literal["one", "gather"] = "one"
    count: PortName | None = Field(default=None, description="For gather: the port that says how many messages to wait for.")


class NodeSection(Section):
    """A node of the explicit form."""

    operator: str = Field(min_length=1, description="A built-in name, or module:function beside the graph file.")
    process: ProcessName = Field(default="main", description="The process that holds it.")
    inputs: dict[PortName, Annotated[InputPortSection, BeforeValidator(_input_port)]] | None = None
    outputs: dict[PortName, Tensors | None] | None = None
    options: dict[str, Any] = Field(default={}, description="For built-in operators.")
    stateful: bool | None = Field(default=None, description="Fires in the order of the steps.")
    batches: bool | None = Field(default=None, description="May be given several tags in one call.")


class EdgeSection(Section):
    """An edge of the explicit form, from an output port to an input port."""

    source: EdgeEnd | None = Field(default=None, alias="from", description="node.port. Default: the first end in the edge's name.")
    target: EdgeEnd | None = Field(default=None, alias="to", description="node.port. Default: the second end in the edge's name.")
    transport: str = Field(default="auto", description="auto, inproc, shm, zmq, or one that a package brings.")
    link: Link | None = Field(default=None, description="A profile's name, or numbers of one's own; a label unless emulate is there.")
    credits: int | None = Field(default=None, ge=1, le=65536, description="Messages on the way. Default: as many as tags are in flight.")
    open: Open = Field(default="lazy", description=_OPEN_TEXT)
    layers: Layers | None = Field(default=None, description="Which layers it carries, by the sender's tag.")
    tag: TagText | None = Field(default=None, description="How the tag changes: layer+1, step+1, layer=N.")
    response_to: str | None = Field(default=None, description="The name of the edge whose requests it carries the responses to.")


class EmulatedComputeSection(Section):
    """What computing takes on the hardware that is emulated, undilated. Left out: what it takes here."""

    attention_seconds: ModelledSeconds | None = Field(default=None, description="A layer of a step in an attention group.")
    expert_seconds: ModelledSeconds | None = Field(default=None, description="A layer of a call of an expert server.")


class EmulateSection(Section):
    """Run as if on other hardware, slower by a factor: links take their profiles' times, computing its modelled ones."""

    dilation: Dilation = Field(description="All modelled times are this much longer; flowrt doctor tells the smallest possible.")
    compute: EmulatedComputeSection = EmulatedComputeSection()
    processes_per_nic: int = Field(default=1, ge=1, le=1024, description="How many processes split a NIC evenly.")


class ReliabilitySection(Section):
    """What happens when an expert server dies, hangs or is slow."""

    detector: bool = Field(default=_RELIABILITY.detector, description="Watch for processes that hang.")
    recovery: Literal["fine", "off"] = Field(
        default=_RELIABILITY.recovery, description="fine: recover each process by the state it keeps; off: any death ends the run."
    )
    unavailable_expert_seconds: Seconds = Field(
        default=_RELIABILITY.unavailable_expert_seconds, description="How long requests wait for an expert of which no replica is left."
    )
    suspect_seconds: Seconds = Field(default=_RELIABILITY.suspect_seconds, description="Without a sign of work: suspected.")
    dead_seconds: Seconds = Field(default=_RELIABILITY.dead_seconds, description="Without a sign of work: killed.")
    restarts: int = Field(default=_RELIABILITY.restarts, ge=0, le=1000, description="How often a process is started again ..")
    restart_window_seconds: Seconds = Field(default=_RELIABILITY.restart_window_seconds, description=".. in any time this long.")
    hedge: bool = Field(default=_RELIABILITY.hedge, description="Ask another server too for what a slow one holds up.")
    unavailable_expert: Literal["error", "degrade"] = Field(
        default=_RELIABILITY.unavailable_expert,
        description="degrade: after unavailable_expert_seconds go on without the expert, and mark every token.",
    )


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
    limits: LimitsSection = LimitsSection()
    numerics: Literal["fast", "strict"] = Field(default="fast", description="strict: no bit depends on batch, placement or preemption.")
    emulate: EmulateSection | None = Field(default=None, description="Emulate links and computing that this machine has not.")
    reliability: ReliabilitySection = ReliabilitySection()
    prompts: Prompts | None = Field(default=None, description="What `flowrt run` answers when given none: a list, or a file.")
    processes: Processes | None = Field(default=None, description="Explicit form only; else deploy.processes.")
    micro_batches: int | None = Field(default=None, ge=1, le=64, description="Explicit form only; else deploy.attention.micro_batches.")
    devices: dict[ProcessName, Device] | None = Field(default=None, description="Explicit form only: process -> device.")
    threads: dict[ProcessName, Threads] | None = Field(default=None, description="Explicit form only: process -> compute threads.")
    folder: str | None = Field(default=None, description="Explicit form only: where module:function is found. Default: this file's folder.")


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a graph file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **GraphFile.model_json_schema(by_alias=True)}
