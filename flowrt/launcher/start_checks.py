"""Checks what a graph needs before any process of it starts: installed packages, the files of its model, memory. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from flowrt.errors import install_command
from flowrt.graph.folded import num_processes
from flowrt.graph.model import FIRST_HOST, Graph, Node, role_of
from flowrt.graph.placement import held_experts, weight_set
from flowrt.launcher.model_facts import config_of, has_weights
from flowrt.launcher.tokenizer_files import conversion, missing_tokenizer
from flowrt.observe import size_text
from flowrt.operators.checkpoint_files import check_files
from flowrt.operators.families.family import part_bytes, part_shapes, parts_to_read
from flowrt.operators.model_config import EXPERT_PARTS, KEPT_COLUMNS, KEPT_ROWS, ModelConfig, ModelError
from flowrt.system.machine_limits import memory_limit_bytes


def check_engine(graph: Graph) -> None:
    """Raises GraphError for hosts of a Ray cluster without Ray."""
    if graph.hosts is not None and graph.hosts.engine == "ray" and find_spec("ray") is None:
        raise graph.error("hosts.engine", f"ray is not installed: {install_command('ray')}, or write local to try it on this machine")


def check_model(graph: Graph, runs: bool = True) -> tuple[str, ...]:
    """Checks the files of the graph's model, without a read of any weight. Returns notes for the user, one line each. `runs`: the graph is
    to run, which needs weights.

    Raises GraphError for weight files that are missing, cut off, or do not fit config.json, and when the memory of this machine is
    too small.
    """
    if graph.model is None:
        return ()
    directory = Path(graph.model.path)
    if not has_weights(graph.model):
        if runs:
            check_has_weights(graph)
        return ()
    try:
        notes = check_files(directory, graph.model.implementation, graph.model.expert_weights)
        check_kept(graph)
        shortage = find_shortage(graph, memory_needs(graph), memory_limit_bytes())
    except (ModelError, OSError) as error:
        raise graph.error("model.path", str(error)) from error
    if shortage is not None:
        raise graph.error("model.path", shortage)
    return (*notes, missing_tokenizer(directory)) if conversion(directory) else notes


def check_has_weights(graph: Graph) -> None:
    """Raises GraphError for a model that is a card."""
    if graph.model is not None and not has_weights(graph.model):
        text = f"{Path(graph.model.path).stem} is a card without weights; to run the graph, give a checkpoint with --model DIRECTORY"
        raise graph.error("model.path", text)


_OF_KEYS = {"weights": "other weights than those of experts", "kv_cache": "keys and values"}


def check_kept(graph: Graph) -> None:
    """Raises GraphError where weights and KV cannot be kept in 8 bits as the graph asks."""
    model = graph.model
    if model is None or not model.kept:
        return
    keys, config = list(model.kept), config_of(model)
    if config.library is not None and (other := next((key for key in keys if key not in ("expert_weights", "activations")), None)):
        raise graph.error(f"model.{other}", f"a model in transformers keeps its {_OF_KEYS[other]} in the dtype; leave the key out")
    if model.activations == "int8" and "int8" not in (model.weights, model.expert_weights):
        text = "rows become INT8 where weights are INT8, and none are; set model.expert_weights or model.weights to int8, too"
        raise graph.error("model.activations", text)
    if keys == ["kv_cache"]:
        return
    key = f"model.{keys[0]}"
    if config.dtype == "float64":
        raise graph.error(key, "products with weights in 8 bits are computed in float32, not in float64; write dtype")
    nodes = [node for node in graph.nodes.values() if node.kind.parts]
    holders = [node for node in nodes if (model.expert_weights if node.kind.holds_experts else model.weights) != "dtype"]
    devices = (graph.devices.get(node.process, "cpu") for node in holders)
    if device := next((each for each in devices if each != "cpu"), None):
        raise graph.error(key, f"processes on {device} keep weights in their dtype; write dtype")
    shapes = part_shapes(config)
    odd = next((rows for part in EXPERT_PARTS if part in shapes and (rows := shapes[part][0]) % KEPT_ROWS), None)
    if odd and model.expert_weights != "dtype":
        text = f"the matrices of experts have {odd} rows, and {KEPT_ROWS} of them or a multiple are needed; write dtype"
        raise graph.error("model.expert_weights", text)
    in_int8 = {part: shape[1] for part, shape in shapes.items() if len(shape) == 2 and config.kept(part, shape) == "int8"}
    sizes = (size for part, columns in in_int8.items() for size in (columns, config.scale_group(part, columns)))
    if model.activations == "int8" and (odd := next((size for size in sizes if size % KEPT_COLUMNS), None)):
        text = f"a matrix in INT8 has {odd} columns, or so many of one scale, and a multiple of {KEPT_COLUMNS} is needed; write dtype"
        raise graph.error("model.activations", text)


def check_prompts(graph: Graph) -> None:
    """Raises GraphError for prompts in the graph file, which are texts, of a model without a tokenizer."""
    if graph.model is not None and graph.prompts and not (Path(graph.model.path) / "tokenizer.json").is_file():
        instead = "remove prompts and give token ids to flowrt run --prompts"
        raise graph.error("prompts", missing_tokenizer(Path(graph.model.path), instead))


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one process. `shared_bytes`: the part of the weights that all processes with the same `shares` hold once. `count`: processes
    of a folded graph that hold as much, each other experts."""

    weight_bytes: int
    kv_bytes: int
    shared_bytes: int = 0
    shares: str = ""
    count: int = 1

    def __str__(self) -> str:
        return f"{size_text(self.weight_bytes)} weights" + (f" + {size_text(self.kv_bytes)} KV" if self.kv_bytes else "")


def total_weight_bytes(needs: Iterable[MemoryNeed]) -> int:
    """The weights of all these processes; shared ones count once."""
    needs = tuple(needs)
    own = sum(need.count * (need.weight_bytes - need.shared_bytes) for need in needs)
    return own + sum({need.shares: need.count * need.shared_bytes for need in needs}.values())


def memory_needs(graph: Graph) -> dict[str, MemoryNeed]:
    """Returns needs by process, in the order of the graph, without processes that hold nothing of the model. Raises ModelError."""
    if graph.model is None:
        return {}
    model = graph.model
    config = config_of(model)
    found = {process: _need(graph, process, config) for process in graph.process_names()}
    return {process: need for process, need in found.items() if need.weight_bytes}


def _need(graph: Graph, process: str, config: ModelConfig) -> MemoryNeed:
    nodes, limits = graph.nodes_of(process), graph.limits_of(process)
    weight_bytes = sum(num for node in nodes for num in _weight_bytes(node, config))
    parts = {part for node in nodes for part in node.kind.parts}
    if config.tie_word_embeddings and "head" in parts and "embedding" not in parts:
        weight_bytes += config.vocab_size * config.hidden_size * config.item_bytes
    is_stateful = any(node.kind.stateful for node in nodes)
    page_bytes = limits.kv_pages * limits.page_size * config.kv_bytes if is_stateful else 0
    state_bytes = limits.num_state_slots * len(config.recurrent_layers) * config.state_bytes if is_stateful else 0
    kv_bytes = page_bytes + state_bytes
    count = num_processes(graph, (process,))
    if config.library is not None or graph.processes == "one" or not (shared := weight_set(graph, process)):
        return MemoryNeed(weight_bytes, kv_bytes, count=count)
    shared_bytes = sum(num for node in nodes if node.kind.holds_experts for num in _weight_bytes(node, config))
    return MemoryNeed(weight_bytes, kv_bytes, shared_bytes, f"{graph.host_of(process)}: {shared}", count)


def _weight_bytes(node: Node, config: ModelConfig) -> Iterator[int]:
    """The bytes of each part that the operator of a node reads."""
    shapes = part_shapes(config)
    for part, layers in parts_to_read(config).items():
        if part in node.kind.parts:
            held = held_experts(node.options["experts"], config.moe_layers) if node.kind.holds_experts else {}
            yield part_bytes(config, part, shapes[part]) * (sum(map(len, held.values())) or len(list(layers)))


def needs_text(needs: Mapping[str, MemoryNeed]) -> str:
    """ "attention 2 x (3.1 MiB weights + 4.0 MiB KV), experts 3 x (1.3 MiB weights)": the largest process of each role."""
    roles: dict[str, list[MemoryNeed]] = {}
    for process, need in needs.items():
        roles.setdefault(role_of(process), []).append(need)
    largest = {role: max(each, key=lambda need: need.weight_bytes + need.kv_bytes) for role, each in roles.items()}
    return ", ".join(f"{role} {sum(each.count for each in roles[role])} x ({need})" for role, need in largest.items())


def find_shortage(graph: Graph, needs: Mapping[str, MemoryNeed], limit_bytes: int) -> str | None:
    """Why the processes on the CPU of the first host, which is this machine, cannot fit into its memory, and what to do; None: they can."""
    here = [need for process, need in needs.items() if graph.host_of(process) == FIRST_HOST and graph.devices.get(process, "cpu") == "cpu"]
    weights = total_weight_bytes(here)
    kv = sum(need.count * need.kv_bytes for need in here)
    if weights + kv <= limit_bytes or graph.emulation is not None:
        return None
    hosts = "choose a smaller model or dtype, or place some of its processes on other hosts (docs/hosts.md)"
    remedy = hosts if weights > limit_bytes else f"write limits.kv_pages of at most {_pages_within(graph, kv, limit_bytes - weights)}"
    needed = f"weights of {size_text(weights)} and KV pages of {size_text(kv)}"
    return f"the graph needs {needed}, and this machine has {size_text(limit_bytes)}; {remedy}"


def fitting_pages(graph: Graph, needs: Mapping[str, MemoryNeed], limit_bytes: int) -> int:
    """Pages of KV cache for which a group has room, at most those of the graph. 0: the weights alone are too large."""
    room = limit_bytes - total_weight_bytes(needs.values())
    kv = sum(need.count * need.kv_bytes for need in needs.values())
    return 0 if room < 0 else min(graph.limits.kv_pages, _pages_within(graph, kv, room))


def _pages_within(graph: Graph, kv_bytes: int, room_bytes: int) -> int:
    return max(1, graph.limits.kv_pages * max(0, room_bytes) // max(1, kv_bytes))
