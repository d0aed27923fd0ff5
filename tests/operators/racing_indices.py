"""Calls every kernel that takes indices while another process keeps writing them, as a faulty peer can in memory that it shares.

Run by test_racing_indices.py as a process of its own, because a kernel that reads an index again after its check crashes it. Prints the
name of each kernel before its calls and `done` at the end.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Callable

import torch

from flowrt.operators.attention_plan import PagedRows, StepPlan
from flowrt.operators.kernels.cpu import rows
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.replica_table import ReplicaTable

OUTCOMES = 15  # calls that are refused, and as many that are not: then the writer was at work during the calls
MAX_CALLS = 50_000
COUNT = 4096  # indices, above the 8 KiB from which shared memory is not copied
FAR = 1 << 40  # nothing is mapped so far from any tensor


class Racing:
    """`count` indices, all `value`; another process keeps writing `others` and `value` over the last one."""

    def __init__(self, count: int, value: int, *others: int) -> None:
        shared = mmap.mmap(-1, count * 8)
        self.tensor = torch.frombuffer(shared, dtype=torch.int64)
        self.tensor.fill_(value)
        parent = os.getpid()
        self._writer = os.fork()
        if not self._writer:
            words = memoryview(shared).cast("q")
            while os.getppid() == parent:
                for _ in range(1000):
                    for other in (*others, value):
                        words[count - 1] = other
            os._exit(0)

    def __enter__(self) -> torch.Tensor:
        return self.tensor

    def __exit__(self, *_: object) -> None:
        os.kill(self._writer, signal.SIGKILL)
        os.waitpid(self._writer, 0)


def zeros(count: int = COUNT) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.int64)


def rope_and_store_kv(slots_T: torch.Tensor) -> None:
    pages = KvPages(1, 4, 4, 1, 2, torch.float32)
    angles = torch.zeros(len(slots_T), 1, 2)
    rows.rope_and_store_kv(torch.ones(len(slots_T), 6), 1, StepPlan(angles, angles, (), ()), None, 0.0, slots_T, 0, pages)


def paged_attention(name: str) -> Callable[[torch.Tensor], None]:
    pages = KvPages(1, COUNT, 1, 1, 2, torch.float32)

    def call(raced: torch.Tensor) -> None:
        one_row = {"rows": zeros(1), "sequences": zeros(1), "lengths": ones(1), "pages": zeros(1)} | {name: raced}
        if name == "pages":
            one_row["lengths"] = torch.tensor([COUNT])
        if name in ("rows", "sequences"):
            one_row = {"rows": zeros(), "sequences": zeros(), "lengths": ones(1), "pages": zeros(1), name: raced}
        table = one_row["pages"].view(len(one_row["lengths"]), -1) if name != "lengths" else zeros().view(COUNT, 1)
        paged = PagedRows(one_row["rows"], one_row["sequences"], one_row["lengths"], table)
        if name == "lengths":
            paged = PagedRows(torch.arange(COUNT), torch.arange(COUNT), raced, table)
        num_rows = COUNT if name == "lengths" else 1
        rows.paged_attention(torch.ones(num_rows, 6), 1, paged, None, 0, pages, torch.empty(num_rows, 2))

    return call


def partition_by_server(name: str) -> Callable[[torch.Tensor], None]:
    def call(raced: torch.Tensor) -> None:
        tables = {"servers": zeros(2 * COUNT), "copies": 2 * ones(COUNT)}
        indices = {"experts": torch.arange(COUNT), "pairs": torch.arange(COUNT)} | tables | {name: raced}
        servers_EB = indices["servers"].view(-1, 2)
        num_experts = len(servers_EB)
        experts = indices["experts"] % num_experts if name == "servers" else indices["experts"]
        table = ReplicaTable(servers_EB, indices["copies"][:num_experts], 1)
        rows.partition_by_server(indices["pairs"], experts, torch.ones(COUNT), 1, table, 0)

    return call


def sort_by_expert(name: str) -> Callable[[torch.Tensor], None]:
    def call(raced: torch.Tensor) -> None:
        indices = {"rows": zeros(), "experts": torch.arange(COUNT), "groups": ones(COUNT)} | {name: raced}
        if rows.sort_by_expert(torch.ones(1, 64), indices["rows"], indices["experts"], indices["groups"], 1) is None:
            raise IndexError("an expert is not held")

    return call


def weighted_sum(name: str) -> Callable[[torch.Tensor], None]:
    def call(raced: torch.Tensor) -> None:
        indices = {"places": torch.arange(COUNT), "rows": zeros()} | {name: raced}
        rows.weighted_sum(torch.ones(COUNT, 16), indices["places"], indices["rows"], torch.ones(COUNT), 1)

    return call


def add_parts(rows_R: torch.Tensor) -> None:
    rows.add_parts(torch.ones(COUNT, 16), [(rows_R, torch.ones(COUNT, 16))])


KERNELS: list[tuple[str, Callable[[torch.Tensor], None], tuple[int, ...]]] = [
    ("rope_and_store_kv slots", rope_and_store_kv, (1, FAR)),
    ("paged_attention rows", paged_attention("rows"), (0, FAR)),
    ("paged_attention sequences", paged_attention("sequences"), (0, FAR)),
    ("paged_attention lengths", paged_attention("lengths"), (1, FAR)),
    ("paged_attention pages", paged_attention("pages"), (0, FAR)),
    ("partition_by_server experts", partition_by_server("experts"), (1, FAR)),
    ("partition_by_server pairs", partition_by_server("pairs"), (1, -1)),
    ("partition_by_server servers", partition_by_server("servers"), (0, FAR)),
    ("partition_by_server copies", partition_by_server("copies"), (2, 1, FAR)),
    ("sort_by_expert rows", sort_by_expert("rows"), (0, FAR)),
    ("sort_by_expert experts", sort_by_expert("experts"), (0, FAR)),
    ("sort_by_expert groups", sort_by_expert("groups"), (1, FAR)),
    ("weighted_sum places", weighted_sum("places"), (0, FAR)),
    ("weighted_sum rows", weighted_sum("rows"), (0, FAR)),
    ("add_parts rows", add_parts, (0, FAR)),
]


def main() -> None:
    torch.set_num_threads(1)
    for name, kernel, values in KERNELS:
        print(name, flush=True)
        outcomes = [0, 0]
        with Racing(COUNT, *values) as raced:
            for _ in range(MAX_CALLS):
                try:
                    kernel(raced)
                except (IndexError, ValueError):
                    outcomes[0] += 1
                else:
                    outcomes[1] += 1
                if min(outcomes) >= OUTCOMES:
                    break
            else:
                sys.exit(f"{outcomes} calls of {name} were refused and not refused")
    print("done", flush=True)


if __name__ == "__main__":
    main()
