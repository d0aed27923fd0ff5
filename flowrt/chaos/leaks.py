"""Reads from /proc what processes hold: descriptors, shared memory, children. The difference shows what deaths leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrt.bench.measure.memory import numbers_of
from flowrt.seams import resident_bytes

_PREFIXES = ("flowrt", "torch_", "psm_", "sem.")  # of the names of shared memory that flowrt and its libraries create


@dataclass(frozen=True)
class Holding:
    """Open descriptors, anonymous memory maps, threads, resident bytes and tasks of one process. `tasks` 0: not known."""

    descriptors: int = 0
    memory_maps: int = 0
    threads: int = 0
    resident_bytes: int = 0
    tasks: int = 0


def holding_of(pid: int, tasks: int = 0) -> Holding:
    """Counts what a process holds; all zero for one that has ended. `tasks`: of its event loop, where they are known."""
    folder = Path("/proc") / str(pid)
    descriptors = maps = 0
    with contextlib.suppress(OSError):
        descriptors = len(os.listdir(folder / "fd")) - (pid == os.getpid())  # the listing's own
        lines = (folder / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        maps = sum("/memfd:" in line and "/memfd:flowrt-weights" not in line for line in lines)  # the kernel may join those of weights
    return Holding(descriptors, maps, sum(numbers_of(pid, "status", ("Threads:",))), resident_bytes(pid), tasks)


def held_bytes(*data: object) -> int:
    """The memory of data, and of all data that it refers to."""
    seen: set[int] = set()
    todo, total = [*data], 0
    while todo:
        each = todo.pop()
        if id(each) not in seen and not isinstance(each, type):
            seen.add(id(each))
            total += sys.getsizeof(each)
            todo += gc.get_referents(each)
    return total


def children_of(pid: int) -> set[int]:
    """The living descendants of a process."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        folder = Path("/proc") / str(todo.pop()) / "task"
        with contextlib.suppress(OSError):
            for thread in os.listdir(folder):
                for child in (folder / thread / "children").read_text(encoding="utf-8").split():
                    if int(child) not in found and is_alive(int(child)):
                        found.add(int(child))
                        todo.append(int(child))
    return found


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie; a stopped process is alive."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def named_memory() -> set[str]:
    """Names of shared memory that flowrt may have created."""
    return {path.name for path in Path("/dev/shm").glob("*") if path.name.startswith(_PREFIXES)}


def leaks_between(before: Mapping[str, Holding], after: Mapping[str, Holding]) -> list[str]:
    """A line for each thing that a process holds more of than before. New processes are not compared."""
    lines = []
    for name, now in after.items():
        then = before.get(name, now)
        for what, num_then, num_now in (
            ("descriptors", then.descriptors, now.descriptors),
            ("maps of memory", then.memory_maps, now.memory_maps),
            ("tasks", then.tasks or now.tasks, now.tasks),
        ):
            if num_now > num_then:
                lines.append(f"{name}: {num_now} {what}, {num_then} before")
    return lines
