"""What this machine can do at most: bytes read and multiplications computed per second, with so many threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from flowrt.bench.peers.process import start_peer
from flowrt.costs.work import MachineLimits

_READ_BYTES = 256 << 20  # far more than caches hold
_PRODUCTS = ((1024, 1024, 1024), (512, 1024, 3072), (256, 4096, 1024))  # rows, inputs, outputs


def clock_for(num_threads: int) -> Callable[[], float]:
    """Processor time of a single thread, which other programs on its core do not lengthen; wall time of several threads."""
    return time.thread_time if num_threads == 1 else time.perf_counter


def better_of(one: MachineLimits, other: MachineLimits) -> MachineLimits:
    """The higher rates of two measurements with the same threads and dtypes: other load only lowers them."""
    flops = {dtype: max(rate, other.flops_per_second[dtype]) for dtype, rate in one.flops_per_second.items()}
    return MachineLimits(one.num_threads, max(one.read_bytes_per_second, other.read_bytes_per_second), flops)


def measure_limits(num_threads: int, dtypes: tuple[str, ...]) -> MachineLimits:
    """The best of several tries each, in about two seconds: other load only makes them slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            memory = torch.ones(_READ_BYTES // 4)
            matrix, vector = memory.view(-1, 4096), torch.ones(4096)
            clock = clock_for(num_threads)
            seconds = min(_min_seconds(memory.sum, 12, clock), _min_seconds(lambda: matrix @ vector, 12, clock))
            flops = {}
            for dtype in dtypes:
                ways = {dtype, "float32"}  # without 16-bit units a product is faster in float32
                flops[dtype] = max(_flops_per_second(*shape, way, clock) for shape in _PRODUCTS for way in ways)
    finally:
        torch.set_num_threads(before)
    return MachineLimits(num_threads, _READ_BYTES / seconds, flops)


async def measure_limits_apart(num_threads: int, dtypes: tuple[str, ...]) -> MachineLimits:
    """Calls `measure_limits` in a process of its own."""
    async with start_peer("the measurement of the machine's limits", __name__, num_threads, *dtypes) as (_, facts):
        return MachineLimits(**facts)


@contextmanager
def open_peer(num_threads: str, *dtypes: str) -> Iterator[tuple[dict[str, Any], None]]:
    yield asdict(measure_limits(int(num_threads), dtypes)), None


def _flops_per_second(num_rows: int, num_inputs: int, num_outputs: int, dtype: str, clock: Callable[[], float]) -> float:
    """The rate of rows times a matrix in the layout of weights."""
    import torch
    from torch.nn import functional as F

    rows, weights = (torch.randn(shape).to(getattr(torch, dtype)) for shape in ((num_rows, num_inputs), (num_outputs, num_inputs)))
    return 2 * num_rows * num_inputs * num_outputs / _min_seconds(lambda: F.linear(rows, weights), 8, clock)


def _min_seconds(call: Callable[[], object], num_tries: int, clock: Callable[[], float]) -> float:
    def seconds() -> float:
        start = clock()
        call()
        return clock() - start

    return min(seconds() for _ in range(num_tries))
