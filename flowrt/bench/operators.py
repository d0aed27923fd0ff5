"""What the nodes of a benchmark's graph compute: as little as possible, so that what is measured is the way between them.

Here: `echo`, which does not look at what it passes on; the ends of a stream, of a round of M to N and of an echo of rows, whose
receivers read and check every byte. Not here: the graphs (hop.py, transports.py, m2n.py). Imported by workers, by name.

A sender writes the time into the first eight bytes of what it sends; the rest is ones, whose digest the receiver knows. The clock is
the system's monotonic one, the same in all processes of a machine.
"""

from __future__ import annotations

import struct
import time
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

STAMP_BYTES = 8
NUM_STREAMED = 8  # payloads that a stream's sender goes round, as many as it has in flight


def echo(x: T) -> T:
    """Its input, unread."""
    return x


def read_and_echo(x: torch.Tensor) -> torch.Tensor:
    """Its input, of which every byte was read and found to be one."""
    check(bytes_of(x))
    return x


def give(go: torch.Tensor) -> torch.Tensor:
    """A payload of go[0] bytes, one of NUM_STREAMED."""
    given = _streamed(int(go[0]))
    given.append(given.pop(0))
    return given[-1]


def take(x: torch.Tensor) -> torch.Tensor:
    """Reads and checks `x`; what it gives asks for another one like it."""
    check(bytes_of(x))
    return torch.tensor([x.numel()])


def send(go: torch.Tensor) -> dict[str, torch.Tensor]:
    """A round's payloads: `go` is (receivers, bytes, the receiver that gets more or -1, how many times as much)."""
    num_receivers, num_bytes, favoured, factor = go.tolist()
    sizes = [num_bytes * factor if receiver == favoured else num_bytes for receiver in range(num_receivers)]
    payloads, stamps = _stampable(tuple(sizes))
    now = np.float64(time.monotonic())
    for stamp in stamps:
        stamp[0] = now
    return payloads


def receive(**parts: torch.Tensor) -> torch.Tensor:
    """When the first sender of a round began, and when everything was here and checked, in seconds."""
    starts = [check_stamped(bytes_of(part)) for part in parts.values()]
    return torch.tensor([min(starts), time.monotonic()], dtype=torch.float64)


def send_rows(go: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same rows for each server, in bfloat16: `go` is (servers, rows, columns)."""
    num_servers, rows, columns = go.tolist()
    parts = stamped(_parts((2 * rows * columns,) * num_servers))
    return {f"to{server}": part.view(torch.bfloat16).reshape(rows, columns) for server, part in enumerate(parts)}


def echo_rows(x: torch.Tensor) -> torch.Tensor:
    """Its input, of which every byte was read and checked."""
    check_stamped(bytes_of(x))
    return x


def stamped(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """`parts`, with the time in the first bytes of each."""
    now = np.frombuffer(np.float64(time.monotonic()).tobytes(), np.uint8)
    for part in parts:
        part.numpy()[:STAMP_BYTES] = now
    return parts


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's own bytes; it must be dense."""
    if tensor.dtype is torch.uint8 and tensor.ndim == 1:
        return tensor.numpy()
    return tensor.reshape(-1).view(torch.uint8).numpy()


def check_stamped(data: np.ndarray[Any, Any]) -> float:
    """The time in front. Raises ValueError when what follows is not all ones."""
    check(data[STAMP_BYTES:])
    stamp: tuple[float] = struct.unpack_from("d", data.data)
    return stamp[0]


def check(data: np.ndarray[Any, Any]) -> None:
    """Read every byte. Raises ValueError when one is not 1."""
    import xxhash

    if xxhash.xxh3_64_intdigest(data.data) != digest_of_ones(data.nbytes):
        raise ValueError(f"{data.nbytes} bytes came with another checksum than they were sent with")


@lru_cache(maxsize=256)
def digest_of_ones(num_bytes: int) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(np.ones(num_bytes, np.uint8).data)


@lru_cache(maxsize=4)
def _parts(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.ones(size, dtype=torch.uint8) for size in sizes]


@lru_cache(maxsize=4)
def _stampable(sizes: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], list[np.ndarray[Any, Any]]]:
    """A round's payloads by port, and where the time goes in each."""
    parts = _parts(sizes)
    return {f"to{index}": part for index, part in enumerate(parts)}, [part.numpy()[:STAMP_BYTES].view(np.float64) for part in parts]


@lru_cache(maxsize=8)
def _streamed(num_bytes: int) -> list[torch.Tensor]:
    return [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(NUM_STREAMED)]
