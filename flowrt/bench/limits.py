"""What this machine can do at most: bytes read per second and multiplications per second, with so many threads.

Here: `usable_cores`, `clock_of`, MachineLimits, `better_of`, `measure_limits` (in this process: needs torch), `measure_limits_apart` (in
one of its own). Not here: what is held against them (roofline.py, step_split.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from dataclasses import asdict, dataclass

from flowrt.errors import UserError

_READ_BYTES = 256 << 20  # far more than caches hold
_PRODUCTS = ((1024, 1024, 1024), (512, 1024, 3072), (256, 4096, 1024))  # rows, inputs, outputs


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class MachineLimits:
    """`flops_per_second` by dtype: a multiplication and an addition are two."""

    num_threads: int
    read_bytes_per_second: float
    flops_per_second: dict[str, float]

    def seconds(self, num_bytes: float, num_flops: float, dtype: str) -> float:
        """The least time for work that reads so many bytes and computes so much: the roofline (Williams et al., CACM 2009)."""
        return max(num_bytes / self.read_bytes_per_second, num_flops / self.flops_per_second[dtype])


def clock_of(num_threads: int) -> Callable[[], float]:
    """Of one thread its processor time, which others' turns on its core do not lengthen; of several the time that passes."""
    return time.thread_time if num_threads == 1 else time.perf_counter


def better_of(one: MachineLimits, other: MachineLimits) -> MachineLimits:
    """What the machine can do is what it did at the better moment; of the same threads and dtypes."""
    flops = {dtype: max(rate, other.flops_per_second[dtype]) for dtype, rate in one.flops_per_second.items()}
    return MachineLimits(one.num_threads, max(one.read_bytes_per_second, other.read_bytes_per_second), flops)


def measure_limits(num_threads: int, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> MachineLimits:
    """The best of several tries each: other load can only make them slower. Takes about two seconds."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            memory = torch.ones(_READ_BYTES // 4)
            matrix, vector = memory.view(-1, 4096), torch.ones(4096)
            clock = clock_of(num_threads)
            seconds = min(_min_seconds(memory.sum, 12, clock), _min_seconds(lambda: matrix @ vector, 12, clock))
            flops = {}
            for dtype in dtypes:
                ways = {dtype, "float32"}  # without units of its own a product in 16 bits is quicker in float32
                flops[dtype] = max(_flops_per_second(*shape, way, clock) for shape in _PRODUCTS for way in ways)
    finally:
        torch.set_num_threads(before)
    return MachineLimits(num_threads, _READ_BYTES / seconds, flops)


async def measure_limits_apart(num_threads: int) -> MachineLimits:
    """As `measure_limits`, in a process that ends with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = (sys.executable, "-m", "flowrt.bench.limits", str(num_threads))
    child = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env=environment)
    out, _ = await child.communicate()
    if child.returncode != 0:
        raise UserError(f"the machine's limits could not be measured: the process ended with exit code {child.returncode}")
    return MachineLimits(**json.loads(out))


def _flops_per_second(num_rows: int, num_inputs: int, num_outputs: int, dtype: str, clock: Callable[[], float]) -> float:
    """Of rows times a matrix that is stored as weights are."""
    import torch
    from torch.nn import functional as F

    rows, weights = (torch.randn(shape).to(getattr(torch, dtype)) for shape in ((num_rows, num_inputs), (num_outputs, num_inputs)))
    return 2 * num_rows * num_inputs * num_outputs / _min_seconds(lambda: F.linear(rows, weights), 8, clock)


def _min_seconds(call: Callable[[], object], num_tries: int, clock: Callable[[], float]) -> float:
    least = float("inf")
    for _ in range(num_tries):
        start = clock()
        call()
        least = min(least, clock() - start)
    return least


if __name__ == "__main__":
    print(json.dumps(asdict(measure_limits(int(sys.argv[1])))))
