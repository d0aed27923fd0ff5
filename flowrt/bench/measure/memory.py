"""The memory that the processes of a graph hold, beside what they must hold.

Processes forked from one share its pages until one of them writes. The kernel's proportional share (PSS) divides each page among the
processes that have it, so the sum over all of them, the fork server included, counts each page once.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from flowrt.api import RunningGraph
from flowrt.errors import UserError
from flowrt.graph.model import Graph, ModelPart
from flowrt.graph.placement import held_experts
from flowrt.graph.recovery import pipelines
from flowrt.operators.families.registry import read_model_config
from flowrt.transports.wire.message import DTYPE_BYTES

WEIGHTS_FACTOR, BYTES_PER_PROCESS = 1.15, 250 * 10**6
_EXPERT = re.compile(r"(?<!shared_)\bexperts\.")


@dataclass(frozen=True)
class GraphMemory:
    """Anonymous and shared memory of all processes, and its bound: 1.15 x weights + keys and values + 250 MB per process."""

    num_processes: int
    resident_bytes: int
    weights_bytes: int
    kv_bytes: int

    @property
    def bound_bytes(self) -> int:
        return int(WEIGHTS_FACTOR * self.weights_bytes) + self.kv_bytes + self.num_processes * BYTES_PER_PROCESS

    @property
    def met(self) -> bool:
        return self.resident_bytes <= self.bound_bytes

    def __str__(self) -> str:
        held = f"{self.resident_bytes / 1e9:.2f} GB in {self.num_processes} processes"
        parts = f"1.15 x {self.weights_bytes / 1e9:.2f} GB weights + {self.kv_bytes / 1e9:.2f} GB KV + 0.25 GB each"
        return f"{held}; bound {self.bound_bytes / 1e9:.2f} GB ({parts}): {'met' if self.met else 'not met'}"


def memory_of(running: RunningGraph) -> GraphMemory:
    """Of the workers, the monitor and the fork server, now."""
    pids = {*running.pids.values(), running.launcher.fork_server_pid()} - {0, os.getpid()}
    return GraphMemory(len(pids), sum(map(resident_bytes, pids)), weights_bytes(running.graph), kv_bytes(running.graph))


def resident_bytes(pid: int) -> int:
    """The share of a process in the anonymous and shared pages that it has in memory; 0 when it ended or the system does not report it."""
    return sum(kilobytes << 10 for kilobytes in numbers_of(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")))


def numbers_of(pid: int, file: str, names: tuple[str, ...]) -> list[int]:
    """The numbers after `names` in a file of /proc/PID; empty when the process ended or the system does not report them."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) for line in lines if line.startswith(names)]


def served_model(graph: Graph) -> ModelPart:
    """Raises UserError when the graph serves no model."""
    if graph.model is None:
        raise UserError("this graph serves no model; give a graph file with a `model:` section")
    return graph.model


def weights_bytes(graph: Graph) -> int:
    """Bytes of weights in all processes together: everything but experts once per group, and each replica of an expert."""
    model = served_model(graph)
    directory = Path(model.path)
    config = read_model_config(directory)
    num_experts, others = checkpoint_elements(directory)
    one_expert = num_experts / max(1, config.num_experts * len(config.moe_layers))
    num_groups = len(pipelines(graph))
    held = [held_experts(node.options["experts"], config.moe_layers) for node in graph.nodes.values() if node.kind.holds_experts]
    num_replicas = sum(len(ids) for each in held for ids in each.values())
    return int((others * num_groups + one_expert * num_replicas) * DTYPE_BYTES[model.dtype])


def kv_bytes(graph: Graph) -> int:
    """Bytes of all KV pages of all groups, used or not."""
    model = served_model(graph)
    config = read_model_config(Path(model.path))
    limits = [graph.limits_of(process) for process in pipelines(graph)]
    slots = sum(each.kv_pages * each.page_size for each in limits)
    return slots * config.num_layers * config.kv_width * DTYPE_BYTES[model.dtype]


def checkpoint_elements(directory: Path) -> tuple[int, int]:
    """(elements of routed experts, of everything else), from the headers of the files."""
    experts = others = 0
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            count = math.prod(tensor["shape"])
            if _EXPERT.search(name):
                experts += count
            else:
                others += count
    return experts, others
