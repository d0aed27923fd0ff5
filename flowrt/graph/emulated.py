"""Which device each process of an emulated graph is, and how a checkpoint's layers stand for those of the model that is emulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrt.costs.devices import Device, device_names, read_device
from flowrt.document import Path_
from flowrt.errors import UserError, nearest
from flowrt.graph.derived import derived
from flowrt.graph.facts import ModelFacts
from flowrt.graph.model import Graph, role_of
from flowrt.graph.settings import Emulation


def device_name(emulation: Emulation, process: str) -> str | None:
    """The card of a process's device: that of its name, else that of its role. Of a list, the process n of the role has entry n, and the
    list begins anew where it ends."""
    named = emulation.devices.get(process, emulation.devices.get(role_of(process)))
    if named is None or isinstance(named, str):
        return named
    number = process.removeprefix(f"{role_of(process)}.")
    return named[int(number) % len(named) if number.isdigit() else 0]


@derived
def device_of(graph: Graph, process: str) -> Device | None:
    """The device that computes the operators of a process; None: their time is not that of a device. Raises UserError for a bad card."""
    name = None if graph.emulation is None else device_name(graph.emulation, process)
    return None if name is None else read_device(name)


@derived
def emulated_config(graph: Graph) -> Any:
    """The ModelConfig whose times and bytes count, with weights held as the graph says; None: the checkpoint itself. Raises UserError for a
    bad card."""
    if graph.emulation is None or not graph.emulation.model or graph.model is None:
        return None
    from flowrt.costs.models import read_model_card  # most graphs name no card

    return replace(read_model_card(graph.emulation.model), **graph.model.kept)


@dataclass(frozen=True)
class StandIn:
    """How layers of a checkpoint stand for those of another model: each with experts for `moe` such layers, each dense one for `dense`, and
    the first one for `first` dense layers besides, where the checkpoint has none."""

    moe: int = 1
    dense: float = 1.0
    first: int = 0

    @classmethod
    def of(cls, card: Any, checkpoint: Any) -> StandIn:
        """`card`: a ModelConfig; `checkpoint`: another one, or ModelFacts. Raises ValueError where rows would be split among other experts
        than those of the card, or its layers are not a multiple."""
        own = checkpoint.num_experts, checkpoint.num_experts_per_token, len(checkpoint.moe_layers)
        others = card.num_experts, card.num_experts_per_token, len(card.moe_layers)
        if own[:2] != others[:2] or others[2] % own[2]:
            text = "needs a checkpoint with as many experts and experts per token, whose number of layers with experts divides the model's"
            raise ValueError(f"{text}: it has {_counts(others)}, the checkpoint {_counts(own)}")
        num_dense = len(checkpoint.dense_layers)
        first = 0 if num_dense else len(card.dense_layers)
        return cls(others[2] // own[2], len(card.dense_layers) / num_dense if num_dense else 0.0, first)


def _counts(numbers: tuple[int, int, int]) -> str:
    return "{} experts, {} per token, in {} layers".format(*numbers)


def emulation_note(graph: Graph, checkpoint: Any) -> str:
    """What is emulated of devices and another model, in a line for the user; "" for neither."""
    emulation, card = graph.emulation, emulated_config(graph)
    if emulation is None or not emulation.devices:
        return ""
    cards = {role: (named,) if isinstance(named, str) else named for role, named in emulation.devices.items()}
    devices = ", ".join(f"{role} on {' and '.join(Path(card).stem for card in named)}" for role, named in cards.items())
    if card is None:
        return f"times are those of {devices}"
    stand_in, name = StandIn.of(card, checkpoint), Path(emulation.model).stem
    layers = [f"each layer with experts counts as {stand_in.moe}"] if stand_in.moe > 1 else []
    if checkpoint.dense_layers and stand_in.dense != 1:
        layers.append(f"each dense layer as {stand_in.dense:.3g}")
    if stand_in.first:
        layers.append(f"the first one also as {stand_in.first} dense layers")
    return f"times and bytes are those of {name}, {devices}" + (f"; {', '.join(layers)}" if layers else "")


def check_devices(graph: Graph, facts: ModelFacts | None) -> Iterator[tuple[Path_, str]]:
    """Path of a key and what is wrong with its value."""
    emulation = graph.emulation
    if emulation is None:
        return
    processes = [*graph.process_names()]
    roles = {role_of(process) for process in processes}
    for name, named in emulation.devices.items():
        path = ("emulate", "devices", name)
        if name not in roles and not _is_process(graph, name):
            yield path, f"no process has the role or name {name!r}; {nearest(name, [*roles, *processes])}"
        if not named:
            yield path, f"names no device; write one of {', '.join(device_names())}, or the path of a card"
        for card in (named,) if isinstance(named, str) else named:
            try:
                read_device(card)
            except UserError as error:
                yield path, str(error)
    if emulation.devices and graph.model is None:
        yield ("emulate", "devices"), "only the operators of a model have work that a device does; write emulate.compute"
    if not emulation.model:
        return
    where, model = ("emulate", "model"), graph.model
    if model is None or facts is None or facts.in_library:
        yield where, "only a model that flowrt's own operators compute can stand for another one; remove the key"
        return
    try:
        if (card := emulated_config(graph)) is not None:
            StandIn.of(card, facts)
            if facts.shared_experts != bool(card.shared_expert_width):
                has = "has" if facts.shared_experts else "has no"
                yield where, f"the checkpoint {has} shared experts, the model differs; give a checkpoint like it"
    except UserError as error:
        yield where, str(error)
    except ValueError as error:
        yield where, f"{emulation.model} {error}"


def _is_process(graph: Graph, name: str) -> bool:
    """Whether the graph, or one that it stands for, has this process."""
    if not graph.folded:
        return name in graph.process_names()
    role, _, number = name.rpartition(".")
    count = sum(count for process, count in graph.folded.items() if role_of(process) == role)
    return number.isascii() and number.isdigit() and str(int(number)) == number and int(number) < count
