"""The memory that the processes of a graph hold, beside what they must hold.

Processes forked from one share its pages until one of them writes. The kernel's proportional share (PSS) divides each page among the
processes that have it, so the sum over all of them, the fork server included, counts each page once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flowrt.api import RunningGraph
from flowrt.errors import UserError
from flowrt.graph.model import Graph, ModelPart
from flowrt.graph.recovery import pipelines
from flowrt.launcher.start_checks import memory_needs
from flowrt.operators.families.registry import read_model_config

WEIGHTS_FACTOR, BYTES_PER_PROCESS = 1.15, 250 * 10**6


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
    """Measures the workers, the monitor and the fork server now."""
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


def vocab_size(graph: Graph) -> int:
    """The size of the vocabulary of the served model. Raises UserError as `served_model`."""
    return read_model_config(Path(served_model(graph).path)).vocab_size


def weights_bytes(graph: Graph) -> int:
    """Bytes of weights in all processes together: everything but experts once per group, and each replica of an expert."""
    return sum(need.weight_bytes for need in memory_needs(graph).values())


def kv_bytes(graph: Graph) -> int:
    """Bytes of all KV pages of all groups, used or not."""
    needs = memory_needs(graph)
    return sum(needs[process].kv_bytes for process in pipelines(graph))
