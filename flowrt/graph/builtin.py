"""The built-in operators as the graph knows them: ports, options and kept state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from flowrt.graph.model import PortSpec
from flowrt.graph.settings import Batching

SOURCE = "source"
FORWARD, RETURN, COLLECT = "forward", "return", "collect"
KV_PACK, KV_UNPACK, KV_PROGRESS, KV_EXTRA = "kv_pack", "kv_unpack", "kv_progress", "kv_extra"


class Keeps(StrEnum):
    """The state that an operator keeps between two firings, from the least to the most."""

    NOTHING = "nothing between two requests"  # its clients keep each request until the response
    SEQUENCES = "sequences"  # rebuilt from the request log
    PROMPTS = "prompts"  # until a group has pulled their KV; rebuilt from the request log
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class BuiltinOperator:
    """`inputs` and `outputs` are port names; an output that ends in "*" stands for any number of ports with that beginning.

    `gathers` maps a gather port to its count port. `options` are the keys that a node of this operator must have, `may_have` those that it
    may have. Experts and forwarders serve requests; all other operators work on the sequences of their group, and their state counts as the
    group's.

    `takes_each`: it fires for each message, also for several of one tag. `forwards`: it fires without a credit on every edge that it may
    send on; each output waits for its own.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gathers: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    may_have: tuple[str, ...] = ()
    stateful: bool = False
    batches: Batching | None = None
    keeps: Keeps = Keeps.SEQUENCES
    takes_each: bool = False
    forwards: bool = False

    def input_ports(self) -> dict[str, PortSpec]:
        counts = dict(self.gathers)
        return {name: PortSpec(name, takes="gather" if name in counts else "one", count=counts.get(name)) for name in self.inputs}

    def output_ports(self, used: Iterable[str]) -> dict[str, PortSpec]:
        """All fixed ports, and the ports of `used` that match a "*"."""
        names = [name for name in self.outputs if not name.endswith("*")]
        names += [name for name in sorted(set(used)) if name not in names and self.has_output(name)]
        return {name: PortSpec(name) for name in names}

    def has_output(self, port: str) -> bool:
        return port in self.outputs or any(name.endswith("*") and port.startswith(name[:-1]) for name in self.outputs)


BUILTIN: dict[str, BuiltinOperator] = {
    # Emits the tags of one group: `layout` once for every layer of a step, `tokens` and `sampling` for layer 0.
    SOURCE: BuiltinOperator(("tokens",), ("tokens", "layout", "sampling"), options=("num_layers",)),
    "embed": BuiltinOperator(("tokens",), ("x",)),
    "attention": BuiltinOperator(("x", "layout"), ("normed", "residual"), stateful=True),
    "gate": BuiltinOperator(("x",), ("routing",)),
    "mlp": BuiltinOperator(("x", "residual"), ("y",)),
    # The experts of an MoE layer that every row passes through; the output is the residual that `combine` adds to.
    "shared": BuiltinOperator(("x", "residual"), ("y",)),
    "dispatch": BuiltinOperator(("x", "routing"), ("plan", "server*", "via*"), options=("servers",)),
    "experts": BuiltinOperator(("rows",), ("results",), options=("experts",), batches=Batching(), keeps=Keeps.NOTHING, takes_each=True),
    # Trampolines (trampoline.py): cut a bundle into parts, merge the responses to a bundle, and cut what is merged.
    FORWARD: BuiltinOperator(("bundle",), ("server*",), keeps=Keeps.NOTHING, takes_each=True, forwards=True),
    RETURN: BuiltinOperator(
        ("results",),
        ("group*",),
        batches=Batching(min_tags=1, max_wait_seconds=200e-6),
        keeps=Keeps.NOTHING,
        takes_each=True,
        forwards=True,
    ),
    COLLECT: BuiltinOperator(("bundle",), ("part*",), takes_each=True),
    # KV transfer (flowrt/exchange/kv_transfer.py): a group requests the KV of a prompt, chunk by chunk, from the worker that computed it.
    KV_PACK: BuiltinOperator(("pull",), ("chunk",), keeps=Keeps.PROMPTS, takes_each=True),
    # In the same process: which layers of a running step have their KV, so that it can be pulled before the step ends.
    KV_PROGRESS: BuiltinOperator(("rows",), (), keeps=Keeps.PROMPTS, takes_each=True),
    # There too: the rows of a step, of which those of the last tokens of prompts travel with their KV (extra_tensors.py).
    KV_EXTRA: BuiltinOperator(("rows",), (), options=("name", "tensor"), keeps=Keeps.PROMPTS, takes_each=True),
    KV_UNPACK: BuiltinOperator(("chunk",), ("pull*",), options=("num_layers",), may_have=("extras",)),
    "combine": BuiltinOperator(("residual", "plan", "parts"), ("y",), gathers=(("parts", "plan"),)),
    "head": BuiltinOperator(("x", "sampling"), ("tokens",)),
}
WITH_WEIGHTS = frozenset({"embed", "attention", "gate", "mlp", "shared", "head"})  # and "experts", of which a process holds some


def forwards(operator: str) -> bool:
    """Whether a node of this operator sends each output as soon as the output's own edge has a credit."""
    return operator in BUILTIN and BUILTIN[operator].forwards
