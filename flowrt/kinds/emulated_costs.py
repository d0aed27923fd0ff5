"""What calls and messages of an emulated graph cost: the one place that workers and the simulation ask.

A call of an operator with a cost in `emulate.compute` is charged that. All others are charged the time of their work on the device of
their process, for the model that is emulated; its layers are those of the checkpoint, which may stand for several (StandIn).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from flowrt.costs.work import FiringLoad
from flowrt.graph.emulated import StandIn, device_of, emulated_config
from flowrt.graph.kinds import Kind, kind_of
from flowrt.graph.model import Edge, Graph
from flowrt.graph.placement import has_servers, servers_of
from flowrt.kinds.device_times import device_seconds, exchange_seconds
from flowrt.operators.model_config import ModelConfig
from flowrt.transports.wire.message import DTYPE_BYTES, Message


class CallCosts:
    """Of one process of an emulated graph; `checkpoint`: the config of its model, if it has one."""

    def __init__(self, graph: Graph, process: str, checkpoint: ModelConfig | None) -> None:
        assert graph.emulation is not None
        self._costs, device = graph.emulation.compute, device_of(graph, process)
        card: ModelConfig | None = emulated_config(graph)
        config = card or checkpoint
        self._on_device: Callable[[Kind, FiringLoad], float] | None = None
        if device is not None and config is not None:
            self._on_device = lambda kind, load: device_seconds(device, kind, config, load)
        self._device = device if device is not None and has_servers(graph) and exchange_seconds(device, 1) else None
        dispatches = [node.name for node in graph.nodes_of(process) if node.kind.dispatches]
        self._num_sent = len(servers_of(graph, dispatches[0])) if dispatches else 0  # requests of a layer; a server may get none
        self._stand_in = StandIn() if card is None or checkpoint is None else StandIn.of(card, checkpoint)
        self._moe_layers = frozenset(() if checkpoint is None else checkpoint.moe_layers)

    def charges(self, operator: str) -> bool:
        """Whether calls of an operator take modelled time."""
        kind = kind_of(operator)
        is_exchange = self._device is not None and (kind.dispatches or kind.serves)
        return operator in self._costs or is_exchange or (self._on_device is not None and kind.work is not None)

    def seconds(self, operator: str, layer: int, load: FiringLoad, num_firings: int = 1) -> float:
        """The undilated time of one call in a layer of the checkpoint, for so many firings."""
        kind, on_device = kind_of(operator), self._on_device
        if (cost := self._costs.get(operator)) is not None or on_device is None:
            return cost.seconds(*load) if cost is not None else 0.0
        if kind.per_step:
            return on_device(kind, load)
        stand_in, is_moe = self._stand_in, layer in self._moe_layers
        seconds = (stand_in.moe if is_moe else stand_in.dense) * (on_device(kind, load) + self._exchange_seconds(kind, num_firings))
        if stand_in.first and layer == 0 and kind.stateful:
            seconds += stand_in.first * (on_device(kind, load) + on_device(kind_of("mlp"), load))
        return seconds

    def _exchange_seconds(self, kind: Kind, num_firings: int) -> float:
        """Of the messages of a layer: at a group, requests and responses count with dispatch."""
        if self._device is None or not (kind.dispatches or kind.serves):
            return 0.0
        return exchange_seconds(self._device, 2 * (self._num_sent if kind.dispatches else num_firings))


class MessageBytes:
    """The payload bytes of messages in the model that is emulated: rows have its width and its dtype, KV that of a token in all its layers.

    Rows that travel as INT8 do so in the emulated model, too. Row numbers, experts and scales have the bytes that they have here.
    """

    def __init__(self, graph: Graph, checkpoint: ModelConfig | None) -> None:
        card: ModelConfig | None = emulated_config(graph)
        self._is_same = card is None or checkpoint is None
        if card is None or checkpoint is None:
            return
        self._width, self._card_width = checkpoint.hidden_size, card.hidden_size
        self._dtype, self._item_bytes = checkpoint.dtype, card.item_bytes
        self._kv_share = card.kv_bytes / checkpoint.kv_bytes
        self._with_kv = {edge.id for edge in graph.edges.values() if carries_kv(graph, edge)}

    def __call__(self, message: Message) -> float:
        if self._is_same:
            return message.payload_bytes
        if message.edge in self._with_kv:
            return float(message.payload_bytes * self._kv_share)
        return sum(self._tensor_bytes(tensor.spec.dtype, tensor.spec.shape) for tensor in message.tensors)

    def _tensor_bytes(self, dtype: str, shape: tuple[int, ...]) -> float:
        item_bytes = self._item_bytes if dtype == self._dtype else DTYPE_BYTES[dtype]
        is_rows = len(shape) > 1 and shape[-1] == self._width
        return item_bytes * (prod(shape[:-1]) * self._card_width if is_rows else prod(shape))


def carries_kv(graph: Graph, edge: Edge) -> bool:
    return graph.nodes[edge.target].kind.kv == "pulls"


def link_share(graph: Graph, checkpoint: ModelConfig | None) -> int:
    """For how many messages one of the exchange between groups and servers stands: those of as many layers, one after another."""
    card: ModelConfig | None = emulated_config(graph)
    return 1 if card is None or checkpoint is None else StandIn.of(card, checkpoint).moe
