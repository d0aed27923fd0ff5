"""The operators that flowrt brings, as the graph sees them: names, ports, traits. What they compute lies in `operators/`.

Here: a table. Not here: their code, nor a user's operators ("module:function"). Called by expand.py, explicit.py, checks.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flowrt.graph.model import PortSpec

SOURCE = "source"


@dataclass(frozen=True)
class BuiltinOperator:
    """`inputs` and `outputs` are port names; an output ending in "*" stands for any number of ports with that beginning.

    `gathers` maps a gather port to its count port. `options` are the keys a node of this operator must have.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gathers: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    stateful: bool = False
    batches: bool = False

    def input_ports(self) -> dict[str, PortSpec]:
        counts = dict(self.gathers)
        return {name: PortSpec(name, takes="gather" if name in counts else "one", count=counts.get(name)) for name in self.inputs}

    def output_ports(self, used: Iterable[str]) -> dict[str, PortSpec]:
        """All fixed ports, and those of `used` that a "*" stands for."""
        names = [name for name in self.outputs if not name.endswith("*")]
        names += [name for name in sorted(set(used)) if name not in names and self.gives(name)]
        return {name: PortSpec(name) for name in names}

    def gives(self, port: str) -> bool:
        return port in self.outputs or any(name.endswith("*") and port.startswith(name[:-1]) for name in self.outputs)


BUILTIN: dict[str, BuiltinOperator] = {
    # Mints the tags of one group. `layout` is minted once for every layer of a step, `tokens` and `sampling` for layer 0.
    SOURCE: BuiltinOperator(("tokens",), ("tokens", "layout", "sampling"), options=("num_layers",)),
    "embed": BuiltinOperator(("tokens",), ("x",)),
    "attention": BuiltinOperator(("x", "layout"), ("normed", "residual"), stateful=True),
    "gate": BuiltinOperator(("x",), ("routing",)),
    "mlp": BuiltinOperator(("x", "residual"), ("y",)),
    # The experts of an MoE layer that every row goes through; what it gives is the residual that `combine` adds to.
    "shared": BuiltinOperator(("x", "residual"), ("y",)),
    "dispatch": BuiltinOperator(("x", "routing"), ("plan", "server*"), options=("servers",)),
    "experts": BuiltinOperator(("rows",), ("results",), options=("experts",), batches=True),
    "combine": BuiltinOperator(("residual", "plan", "parts"), ("y",), gathers=(("parts", "plan"),)),
    "head": BuiltinOperator(("x", "sampling"), ("tokens",)),
}
