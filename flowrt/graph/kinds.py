"""The contract of a kind of operator, and `kind_of`, which finds a kind by its name.

Each module of flowrt/kinds declares kinds as `KINDS`: their ports, options, state, weights and cost, and the functions that bind a node to
weights or to exact arithmetic. A declaration is data: loading it imports no torch, so graph files are checked without it. docs/extend.md
shows how to add one. All other code asks for a property of a kind, never for its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, lru_cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

import msgspec

from flowrt.costs.work import FiringLoad, KernelWork, Work
from flowrt.graph.settings import Batching

PACKAGE = "flowrt.kinds"  # loaded by name: its functions use packages that import this one


class Keeps(StrEnum):
    """The state that an operator keeps between two firings, from the least to the most."""

    NOTHING = "nothing between two requests"  # its clients keep each request until the response
    SEQUENCES = "sequences"  # rebuilt from the request log
    PROMPTS = "prompts"  # until a group has pulled their KV; rebuilt from the request log
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Port:
    """One output port. A name that ends in "*" stands for any number of ports with that beginning.

    `tensors`, `optional`, `repeated` and `header` of its messages are those of a MessageSchema (dataflow/schemas.py), with a space between
    two specs. A spec is "int64[rows]"; without a dtype it has the model's, "wide" is float32, or float64 in a float64 model, and "pages"
    is that of KV pages. The dimensions `hidden`, `active`, `kv_heads`, `first_columns` and `second_columns` are the model's sizes, other
    words are free.

    `strict_tensors`: those with strict numerics, where they differ. `int8`: the choice with which its rows may travel as INT8.
    `is_residual`: it is the residual stream, a row per row of the step.
    """

    name: str
    tensors: str = ""
    strict_tensors: str | None = None
    optional: str = ""
    repeated: str = ""
    header: type[msgspec.Struct] | None = None
    int8: Literal["", "dispatch", "combine", "kv"] = ""
    is_residual: bool = False

    def matches(self, name: str) -> bool:
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of operator.

    `inputs` are port names; `gathers` maps a gather port to the port with its plan. `options` are the keys that a node must have,
    `may_have` those that it may have. `option_ports` gives the inputs and outputs that options add, with their specs; it raises
    ValueError for wrong options.

    What a graph is checked and run by:
    `stateful`: it fires in step order. `batches`: how it batches, unless the node says so. `keeps`: its state. Experts and trampolines
    serve requests and keep nothing; all others work on the sequences of their group, and their state counts as the group's.
    `in_one_thread`: all that its process computes runs in the compute thread, however short it is.
    `takes_each`: it fires for each message, also for several of one tag.
    `per_step`: it fires once in a step, all others once in each of their layers.
    `emits`: it makes tags instead of waiting for them, at layer 0, or at every layer for the output ports of `every_layer` ("*": all).
    `schedules`: it emits the steps of a group, so its process is a pipeline.
    `forwards`: it sends the rows of a request on, and another node of its process responds to the request.
    `combines`: it adds the responses of servers to the residual stream.
    `kv`: it is an end of KV transfers. `is_early`: what it takes leaves a firing before the firing's end.

    What it costs: `parts` are the parts of the checkpoint that it reads (operators/families/family.py). `load` says what firings of
    one layer compute together, from the inputs of each; without it their rows count. `work`: the bytes and flops of a load, for a
    ModelConfig; `pieces`: the same in parts that run one after another, where they differ in efficiency. `charges`: the key of a modelled
    cost that only this kind has.

    What runs it, all for a flowrt.kinds.site.Site and a node: `build` makes its node function, or an end of KV transfers. A build that
    computes calls `site.computation(node)`: what `compute` made of the checkpoint's weights, or `twin` of exact integer arithmetic with the
    same inputs and outputs, for the simulation. None: the worker runs the node itself. `sink(pack, unpack, node)`: the method of an end of
    KV transfers that takes the firings of this node.
    """

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[Port, ...] = ()
    gathers: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    may_have: tuple[str, ...] = ()
    option_ports: Callable[[Mapping[str, Any]], tuple[Mapping[str, str], Mapping[str, str]]] | None = None
    stateful: bool = False
    batches: Batching | None = None
    keeps: Keeps = Keeps.SEQUENCES
    takes_each: bool = False
    per_step: bool = False
    in_one_thread: bool = False
    emits: bool = False
    every_layer: tuple[str, ...] = ()
    schedules: bool = False
    forwards: bool = False
    combines: bool = False
    kv: Literal["", "offers", "pulls"] = ""
    is_early: bool = False
    parts: tuple[str, ...] = ()
    load: Callable[[Sequence[Mapping[str, Any]]], FiringLoad] | None = None
    work: Callable[[Any, FiringLoad], Work] | None = None
    pieces: Callable[[Any, FiringLoad], tuple[KernelWork, ...]] | None = None
    charges: Literal["", "expert_seconds", "kv_token_seconds"] = ""
    build: Callable[[Any, Any], Any] | None = None
    compute: Callable[[Any, Any], Any] | None = None
    twin: Callable[[Any, Any], Any] | None = None
    sink: Callable[[Any, Any, Any], Callable[[Any], None] | None] | None = None

    @property
    def is_users(self) -> bool:
        return self is USERS

    @property
    def holds_experts(self) -> bool:
        """It computes experts for its clients."""
        return "experts" in self.options

    @property
    def ends_step(self) -> bool:
        """It computes what a step ends with: logits, and the tokens that are drawn from them."""
        return self.per_step and self.work is not None and not any(port.is_residual for port in self.outputs)

    @property
    def dispatches(self) -> bool:
        """It sends rows to the servers of its option."""
        return "servers" in self.options

    @property
    def serves(self) -> bool:
        """It takes requests with rows for experts."""
        return self.holds_experts or self.forwards

    @property
    def sends_extra(self) -> bool:
        """It gives a KV transfer a named tensor."""
        return "tensor" in self.options

    def output(self, port: str) -> Port | None:
        return next((each for each in self.outputs if each.matches(port)), None)

    def emits_at(self, port: str, layer: int) -> bool:
        """Whether it emits on this port at this layer of a step."""
        return layer == 0 or port in self.every_layer or "*" in self.every_layer


USERS = Kind("module:function", keeps=Keeps.UNKNOWN)
_PSEUDO = {name: Kind(name, keeps=Keeps.UNKNOWN, emits=name == "input") for name in ("input", "output")}


@cache
def all_kinds() -> dict[str, Kind]:
    """Every kind of flowrt by its name, which graph files write as `operator`."""
    modules = [import_module(f"{PACKAGE}.{found.name}") for found in iter_modules(import_module(PACKAGE).__path__)]
    return {kind.name: kind for module in modules for kind in getattr(module, "KINDS", ())}


@lru_cache(maxsize=1024)
def kind_of(operator: str) -> Kind:
    """The kind of a node's operator; that of a user's function, "module:function", is USERS."""
    return all_kinds().get(operator) or _PSEUDO.get(operator, USERS)
