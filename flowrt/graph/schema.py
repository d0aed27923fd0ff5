"""The keys of a graph file: type, default, bounds and sentence of each. settings.py has the sections that a Graph holds as well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from msgspec import UNSET, Meta, UnsetType, field, json, structs

from flowrt.costs.links import LINK_NUMBERS, LINK_QUANTITIES, PROFILES
from flowrt.graph.model import FORK_SERVER, FRONT_END, GATEWAY, INPUT, MONITOR, OUTPUT, role_of
from flowrt.graph.notation import (
    NAME,
    PORT_NAME,
    is_name,
    parse_ids,
    parse_layers,
    parse_link,
    parse_tag,
    parse_tensor_spec,
)
from flowrt.graph.settings import Batching, Cores, Device, GraphSettings, IdsText, Numerics, Processes, Section, Threads, key

_SENTENCE = re.compile(r"^    (\S+): (.+(?:\n {8}.+)*)", re.MULTILINE)
_LINK_TARGET = re.compile(r"\[([^]]+)\]\([^)]+\)")
MAX_RANKS = 1024  # processes of a role
COLOCATED = "colocated"  # expert servers in the processes of the groups
_NAME = "a name; use letters, digits, '_', '-', and single dots between them"
_RESERVED = {
    GATEWAY: f"the launching process, which holds only {INPUT} and {OUTPUT}",
    FORK_SERVER: "the process that forks all others",
    MONITOR: "the process that watches all others",
    FRONT_END: "a process that serves HTTP",
}


def _check_process(value: str) -> None:
    if (reserved := value if value in _RESERVED else role_of(value)) in _RESERVED:
        raise ValueError(f"{value!r} is {_RESERVED[reserved]}; choose another name")
    if not is_name(value):
        raise ValueError(f"{value!r} is not {_NAME}")


def _check_layers(value: str | int) -> None:
    if not parse_layers(value).layers:
        raise ValueError("names no layer; write layers as '0-2,5', or leave the key out for every layer")


def _check_tensors(value: str | list[str]) -> None:
    if not value:
        raise ValueError("describes no tensor; write 'float32[rows,64]', or a list of such")
    for spec in [value] if isinstance(value, str) else value:
        parse_tensor_spec(spec)


_LINK_SCHEMA = {
    "anyOf": [
        {"enum": list(PROFILES)},
        {
            "type": "object",
            "properties": {
                **{name: {"type": "number", "minimum": 0} for name in LINK_NUMBERS},
                **{name: {"type": "string"} for name in LINK_QUANTITIES},
            },
            "anyOf": [{"required": [name]} for name in ("bandwidth_bytes_per_second", "bandwidth")],
            "additionalProperties": False,
        },
    ]
}
_LINK = f"a link; write one of {', '.join(PROFILES)}, or numbers: {{{', '.join(LINK_NUMBERS)}}}"

Link: TypeAlias = Annotated[str | dict[str, float | str], key(wrong=_LINK, check=parse_link, extra_json_schema=_LINK_SCHEMA)]
Ids: TypeAlias = Annotated[IdsText, key(wrong="a set of experts; write '0-5', or by layer {0-2: 0-5, 3: 1-7}", check=parse_ids)]
Layers: TypeAlias = Annotated[IdsText, key(wrong="a set of layers; write layers as '0-2,5'", check=_check_layers)]
Tensors: TypeAlias = Annotated[str | list[str], key(wrong="a tensor; write 'float32[rows,64]', or a list of such", check=_check_tensors)]
NodeName: TypeAlias = Annotated[str, key(wrong=_NAME, form=NAME, max_length=200)]
PortName: TypeAlias = Annotated[str, key(wrong="a name of a port; use letters, digits, '_' and '-'", form=PORT_NAME, max_length=100)]
EdgeEnd: TypeAlias = Annotated[str, key(wrong="an end of an edge; write node.port", form=rf"{NAME}\.{PORT_NAME}", max_length=300)]


class ModelSection(Section, frozen=True):
    """The checkpoint to serve.

    path: A Hugging Face MoE directory: beside the file, then in the working directory. Or a [model card](emulation.md#devices),
        which has no weights and cannot run.
    implementation: What computes it: flowrt's operators (`native`), or the module of transformers (`transformers`), for any architecture
        whose experts it can cut off ([models](models.md)). `auto` is `native` where flowrt knows the family.
    dtype: The dtype to compute in. Default: the checkpoint's.
    weights: What the large matrices, but for those of routed experts, are [kept in](operators.md#weights-in-8-bits): the `dtype`, `int8`
        or `fp8`.
    expert_weights: What the weights of routed experts are [kept in](operators.md#weights-in-8-bits): the `dtype`, `int8`, `fp8`, or
        `as_stored`, which is one of these.
    kv_cache: What keys and values are [kept in](operators.md#kv-in-8-bits), in the pages and on their way: the `dtype`, or `int8`.
    activations: What rows become before [products with weights in INT8](operators.md#weights-in-8-bits): the `dtype`, or `int8` with a
        scale per row.
    """

    path: Annotated[str, Meta(min_length=1)]
    implementation: Literal["auto", "native", "transformers"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    weights: Literal["dtype", "int8", "fp8"] = "dtype"
    expert_weights: Literal["dtype", "int8", "fp8", "as_stored"] = "dtype"
    kv_cache: Literal["dtype", "int8"] = "dtype"
    activations: Literal["dtype", "int8"] = "dtype"


class RoleSection(Section, frozen=True):
    """How the processes of a role compute.

    device: `cpu`, `cuda`, `cuda:N`.
    threads: Compute threads of each process. `auto` is an equal share of the cores; with one tag in flight, the processes of one
        role share them. Strict numerics need one number for all processes; there `auto` is 1.
    cores: The cores of the role, such as `'0-3,7'`, divided evenly between its processes; with fewer cores than processes, one each
        in turn. `threads: auto` is then a thread per core. Only with `processes: many` ([jitter](slow.md#jitter)). Default: any.
    """

    device: Device = "cpu"
    threads: Threads = "auto"
    cores: Cores | None = None


class PipelineSection(RoleSection, frozen=True):
    """A role that computes sequences.

    numerics: [Numerics of the role](numerics.md#numerics-per-role). Default: `numerics`.
    """

    numerics: Numerics | None = None


class PrefillSection(PipelineSection, frozen=True):
    """Prefill workers, which compute prompts and first tokens for the attention groups.

    workers: Processes that [compute prompts](kv-transfer.md) for the groups; 0: each group computes its own.
    stream: Groups pull the KV of a prompt [while it is computed](kv-transfer.md#the-steps); `false`: when it is complete.
    int8: The part of KV that does not depend on positions [travels as INT8](kv-transfer.md#kv-as-int8) with a scale per row.
    """

    workers: Annotated[int, Meta(ge=0, le=MAX_RANKS)] = 0
    stream: bool = True
    int8: bool = False


class AttentionSection(PipelineSection, frozen=True):
    """The attention groups: each schedules, batches and keeps the KV cache of its own requests.

    groups: Attention groups; each schedules, batches and keeps the KV cache of its own requests.
    domains: [Domains](exchange.md#domains) of neighbouring groups, which take turns at each expert server.
    micro_batches: Interleaved batches: how many steps of a group are in flight at once.
    tensor_parallel: Only 1 is supported.
    """

    groups: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    domains: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    micro_batches: Annotated[int, Meta(ge=1, le=64)] = 1
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1


class ExpertsSection(RoleSection, frozen=True):
    """The expert servers.

    servers: Expert servers; 0: each group holds all experts; `colocated`: each group's process is also a server, [with a share of
        them](exchange.md#co-located-experts).
    replicas: Servers that hold each expert, spread evenly.
    trampoline: `always`: some servers [forward to the others](exchange.md#trampolines), so that a group sends fewer messages;
        `auto`: where that pays.
    int8: Rows that [travel as INT8](exchange.md#rows-as-int8) with a scale per row: to the servers, back from them, or both.
    placement: The experts of each server, see [placement](graph-files.md#placement). Default: even.
    """

    servers: Literal["colocated"] | Annotated[int, Meta(ge=0, le=MAX_RANKS)] = 0
    replicas: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    trampoline: Literal["auto", "always", "never"] = "never"
    int8: Literal["none", "dispatch", "combine", "both"] = "none"
    batches: Batching | None = None
    placement: dict[str, Ids | dict[str, Ids]] | None = None


class LinkSection(Section, frozen=True):
    """How messages travel between two processes.

    transport: `auto`, `inproc`, `shm`, `zmq`, or one that an installed package provides. Default: `auto`.
    link: A label, or with `emulate` [the emulated link](emulation.md#links): a profile such as `ub`, or numbers:
        `{latency: 2 us, bandwidth: 25 GB/s, message: 1 us}`.
    credits: Messages in flight per edge, at least as many as tags. Default: tags in flight; of a model's requests one more.
    open: `lazy`: a link opens [with its first message](transports.md#at-first-use); `start`: before the first request. Default:
        `lazy`.
    """

    transport: str | UnsetType = UNSET
    link: Annotated[str | dict[str, float | str], key(wrong=_LINK, check=parse_link, extra_json_schema=_LINK_SCHEMA)] | UnsetType | None = (
        UNSET
    )
    credits: Annotated[int, Meta(ge=1, le=65536)] | UnsetType | None = UNSET
    open: Literal["lazy", "start"] | UnsetType = UNSET


class LinksSection(Section, frozen=True):
    """Links between pairs of roles: attention-experts, also between prefill workers and expert servers; prefill-attention."""

    attention_experts: LinkSection = field(default=LinkSection(), name="attention-experts")
    prefill_attention: LinkSection = field(default=LinkSection(), name="prefill-attention")


class DeploySection(Section, frozen=True):
    """The short form: how many processes of each role.

    processes: `many`: one process each; `one`: all in the launching process; a number: packed into so many.
    """

    attention: AttentionSection = AttentionSection()
    experts: ExpertsSection = ExpertsSection()
    prefill: PrefillSection = PrefillSection()
    links: LinksSection = LinksSection()
    processes: Processes = "many"


class InputPortSection(Section, frozen=True):
    """An input port: its tensors, and how many messages per tag.

    tensors: The tensors of a message.
    takes: `gather`: as many messages as the port `count` gives, possibly none.
    count: With `takes: gather`: the port that gives the number of messages to wait for.
    """

    tensors: Tensors | None = None
    takes: Literal["one", "gather"] = "one"
    count: PortName | None = None


class NodeSection(Section, frozen=True):
    """A node of the explicit form.

    operator: A built-in name, or `module:function` beside the graph file.
    process: The process that holds it.
    inputs: The input ports, each with its tensors, or with `tensors`, `takes` and `count`. Default: those that edges use.
    outputs: The output ports, each with its tensors. Default: those that edges use.
    options: Options of built-in operators.
    stateful: Fires in the order of the steps, except for [failed calls](dataflow.md#failed-calls). Default: `false`.
    keeps: `nothing`: it keeps no state between two firings, so that its process recovers as its other operators do. Default:
        unknown.
    batches: May receive several tags in one call: `true`, or as `deploy.experts.batches`.
    """

    operator: Annotated[str, Meta(min_length=1)]
    process: Annotated[str, key(wrong=_NAME, check=_check_process)] = "main"
    inputs: dict[PortName, InputPortSection | Tensors | None] | None = None
    outputs: dict[PortName, Tensors | None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    stateful: bool | None = None
    keeps: Literal["nothing"] | None = None
    batches: Batching | bool | None = None


class EdgeSection(LinkSection, frozen=True):
    """An edge of the explicit form. Its name is 'node.port -> node.port', an output and an input; or any, with from: and to:.

    from: The end `node.port`. Default: the first in its name.
    to: The end `node.port`. Default: the second in its name.
    layers: Carries only messages whose tag has one of these layers when sent: `"0-2,5"`. Default: every layer.
    tag: How the tag changes: `layer+1`, `step+1`, `layer=3`.
    int8: Rows between dispatch and experts, or KV from `kv_pack` to `kv_unpack`, travel as INT8 with a scale per row. Default:
        `false`.
    response_to: Carries only the responses to the messages of the edge of this name, and returns their credits.
    """

    source: EdgeEnd | None = field(default=None, name="from")
    target: EdgeEnd | None = field(default=None, name="to")
    layers: Layers | None = None
    tag: (
        Annotated[
            str, key(wrong="a change of a tag; write layer+1, step+1, or layer=N", check=parse_tag, form="layer\\+1|step\\+1|layer=[0-9]+")
        ]
        | None
    ) = None
    int8: bool | None = None
    response_to: str | None = None


class GraphFile(GraphSettings, frozen=True, kw_only=True):
    """A graph file, in the short form (deploy) or the explicit form (nodes and edges).

    flowrt: The version of this format.
    links: Explicit form only: links between two roles, such as left-right.
    prompts: The prompts that `flowrt run` serves when given none: a list of texts, or a file (`.jsonl` with `{"prompt": text}`
        lines, else a text per line).
    folder: Explicit form only: the folder of operators' modules. Default: the file's.
    """

    flowrt: Literal[1]
    model: ModelSection | None = None
    deploy: DeploySection | None = None
    nodes: dict[NodeName, NodeSection] | None = None
    edges: dict[str, EdgeSection | None] | None = None
    links: dict[str, LinkSection] = field(default_factory=dict)
    prompts: Annotated[str | list[str], key(wrong="a file or a list of texts; write - 'a prompt' lines, or the path of a file")] | None = (
        None
    )
    folder: str | None = None


def sentences_of(section: type[Section]) -> dict[str, str]:
    """What each key of a section means, in Markdown."""
    texts = "".join(kind.__doc__ or "" for kind in section.__mro__ if issubclass(kind, Section))
    return {name: " ".join(text.split()) for name, text in _SENTENCE.findall(texts) if name in keys_of(section)}


def kind_of(annotation: Any) -> tuple[Any, dict[str, Any]]:
    """The type in an annotation, without Annotated, and what `key` was given about it."""
    if get_origin(annotation) is not Annotated:
        return annotation, {}
    kind, *metas = get_args(annotation)
    return kind, {name: value for meta in metas for name, value in (meta.extra or {}).items()}


def members_of(kind: Any) -> tuple[Any, ...]:
    """The annotations in a union, without those of None and of absent keys; of another type, itself."""
    is_union = get_origin(kind) in (Union, UnionType)
    return tuple(each for each in get_args(kind) if each not in (NoneType, UnsetType)) if is_union else (kind,)


@cache
def keys_of(section: type[Section]) -> dict[str, structs.FieldInfo]:
    """The keys of a section as files write them."""
    return {field.encode_name: field for field in structs.fields(section)}


def sections(annotation: Any = GraphFile, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    """Yield each section of a graph file with its path; "*" stands for any key of a mapping of sections."""
    kind, _ = kind_of(annotation)
    if isinstance(kind, type) and issubclass(kind, Section):
        yield path, kind
        for name, field in keys_of(kind).items():
            yield from sections(field.type, (*path, name))
    elif get_origin(kind) is dict:
        yield from sections(get_args(kind)[1], (*path, "*"))
    elif members_of(kind) != (kind,):
        for member in members_of(kind):
            yield from sections(member, path)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a graph file, for editors."""
    (_,), definitions = json.schema_components([GraphFile], ref_template="#/$defs/{name}")
    for section in {section for _, section in sections()}:
        shown = definitions[section.__name__]
        shown["description"] = " ".join((section.__doc__ or "").partition("\n\n")[0].split())
        for name, sentence in sentences_of(section).items():
            shown["properties"][name]["description"] = _LINK_TARGET.sub(r"\1", sentence).replace("`", "")
    top = definitions.pop("GraphFile") | {"title": "flowrt graph file"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": definitions}
