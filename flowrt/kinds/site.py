"""The place of a node while it is built: its process, the model, and what the nodes of a process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from flowrt.graph.model import Graph, Node

if TYPE_CHECKING:
    import torch

    from flowrt.operators.model_config import ModelConfig
    from flowrt.operators.row_blocks import RowBlocks

T = TypeVar("T")


@dataclass(eq=False)
class Site:
    """`strict`: rows to and from experts have the strict form. `now` returns seconds. `checkpoint`: the Checkpoint with the weights, and
    `blocks` and `expert_blocks` the row blocks of modules and of experts; `prove(module)` makes the proof of strict numerics. A simulated
    worker has the ExactModel `exact` in place of all these."""

    graph: Graph
    process: str
    config: ModelConfig
    device: torch.device | str
    now: Callable[[], float]
    strict: bool
    checkpoint: Any
    blocks: RowBlocks
    expert_blocks: RowBlocks
    prove: Callable[[Any], None]
    exact: Any = None
    _made: dict[Callable[[Site], Any], Any] = field(default_factory=dict)

    def once(self, make: Callable[[Site], Any]) -> Any:
        """`make(site)`, which the nodes of the process share."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def computation(self, node: Node) -> Any:
        """What the node computes: from tensors to tensors, or a module."""
        make = node.kind.compute if self.exact is None else node.kind.twin
        assert make is not None, f"{node.operator} computes nothing"
        return make(self, node)

    def proven(self, module: T) -> T:
        """The module, after its proof."""
        self.prove(module)
        return module


def pages_of(site: Site) -> Any:
    """The KvPages of the process."""
    from flowrt.operators.kv_pages import KvPages

    limits = site.graph.limits_of(site.process)
    return KvPages.for_model(site.config, limits.kv_pages, limits.page_size, site.device, limits.num_state_slots)


def build_call(site: Site, node: Node) -> Any:
    """The function of a node with one output port: it computes from the layer and the first tensor of each input."""
    from flowrt.dataflow.payload import Payload

    forward, names, (port,) = site.computation(node), tuple(node.inputs), node.outputs

    def fire(firing: Any) -> dict[str, Payload]:
        found = forward(firing.tag.layer, *[firing.inputs[name].tensors[0] for name in names])
        return {port: Payload(found if isinstance(found, tuple) else (found,))}

    return lambda firings: [fire(firing) for firing in firings]
