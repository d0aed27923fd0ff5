"""Operators of the benchmarks' graphs, which compute as little as possible. Workers import them by name.

A sender writes the time into the first eight bytes of a payload; the rest is ones, whose checksum the receiver knows. The clock is the
system's monotonic one, the same in all processes of a machine.
"""

from __future__ import annotations

import struct
import time
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from flowrt.bench.peers.checksum import check

T = TypeVar("T")

STAMP_BYTES = 8
NUM_STREAMED = 8  # payloads that the sender of a stream uses in turn, as many as are in flight


def echo(x: T) -> T:
    """Returns its input, unread."""
    return x


def read_and_echo(x: torch.Tensor) -> torch.Tensor:
    """Returns its input, after every byte was read and found to be one."""
    check(bytes_of(x))
    return x


def give(go: torch.Tensor) -> torch.Tensor:
    """A payload of go[0] bytes in bfloat16, one of NUM_STREAMED."""
    given = _streamed(int(go[0]))
    given.append(given.pop(0))
    return given[-1]


def take(x: torch.Tensor) -> torch.Tensor:
    """Reads and checks `x`. Its output requests another payload of that size."""
    check(bytes_of(x))
    return torch.tensor([x.nbytes])


def send(go: torch.Tensor) -> dict[str, torch.Tensor]:
    """A round's payloads: `go` is (receivers, bytes, the receiver that gets more or -1, its factor)."""
    num_receivers, num_bytes, uneven, factor = go.tolist()
    sizes = [num_bytes * factor if receiver == uneven else num_bytes for receiver in range(num_receivers)]
    return _stamped(tuple(sizes))


def receive(**parts: torch.Tensor) -> torch.Tensor:
    """Returns when the first sender of a round began, and when everything had arrived and was checked, in seconds."""
    starts = [check_stamped(bytes_of(part)) for part in parts.values()]
    return torch.tensor([min(starts), time.monotonic()], dtype=torch.float64)


def send_rows(go: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sends the same rows to each server, in bfloat16: `go` is (servers, rows, columns)."""
    num_servers, rows, columns = go.tolist()
    payloads = _stamped((2 * rows * columns,) * num_servers)
    return {port: payload.view(torch.bfloat16).reshape(rows, columns) for port, payload in payloads.items()}


def echo_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns its input, after every byte was read and checked."""
    check_stamped(bytes_of(x))
    return x


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a dense tensor."""
    if tensor.dtype is torch.uint8 and tensor.ndim == 1:
        return tensor.numpy()
    return tensor.reshape(-1).view(torch.uint8).numpy()


def check_stamped(data: np.ndarray[Any, Any]) -> float:
    """The time in the first bytes. Raises ValueError when the rest is not all ones."""
    check(data[STAMP_BYTES:])
    stamp: tuple[float] = struct.unpack_from("d", data.data)
    return stamp[0]


def _stamped(sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Payloads by port, with the time in the first bytes of each."""
    payloads, stamps = _payloads(sizes)
    now = np.float64(time.monotonic())
    for stamp in stamps:
        stamp[0] = now
    return payloads


@lru_cache(maxsize=4)
def _payloads(sizes: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], list[np.ndarray[Any, Any]]]:
    """The payloads of a round by port, and the place of the time in each."""
    parts = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    return {f"to{index}": part for index, part in enumerate(parts)}, [part.numpy()[:STAMP_BYTES].view(np.float64) for part in parts]


@lru_cache(maxsize=8)
def _streamed(num_bytes: int) -> list[torch.Tensor]:
    return [torch.ones(num_bytes, dtype=torch.uint8).view(torch.bfloat16) for _ in range(NUM_STREAMED)]
