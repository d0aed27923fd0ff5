"""gloo through torch.distributed: what a user would take on CPUs for many senders and many receivers.

A round starts after a barrier and ends, for each process, when its own part is done and what it received was read and checked. A round
takes as long as its slowest process.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

from flowrt.bench.peers.process import Peer, start_peer

Method = Literal["all_to_all", "isend", "rows", "echo"]
METHODS: tuple[Method, ...] = ("all_to_all", "isend", "rows", "echo")


class GlooGroup:
    """Processes that make rounds: senders first, or clients; then receivers, or servers."""

    def __init__(self, peer: Peer, num_senders: int) -> None:
        self._peer, self._num_senders = peer, num_senders

    async def round_seconds(self, method: Method, num_rounds: int, num_bytes: int) -> list[float]:
        """Seconds of each round: every sender sends each receiver `num_bytes`; with "rows" the receivers send them back; "echo" is one
        sender and one receiver, without a barrier. Raises UserError when a process failed."""
        by_rank = await self._seconds_by_rank(method, num_rounds, num_bytes, 1)
        return [max(each) for each in zip(*by_rank, strict=True)]

    async def receiver_seconds(self, method: Method, num_rounds: int, num_bytes: int, factor: int) -> list[list[float]]:
        """Returns by receiver the seconds of each round, in which the first one gets `factor` times as much from every sender."""
        return (await self._seconds_by_rank(method, num_rounds, num_bytes, factor))[self._num_senders :]

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        """Returns the median round trip of a group of 1 and 1, since a few round trips take a hundred times as long as the others."""
        return statistics.median(await self.round_seconds("echo", num_rounds, memoryview(payload).nbytes))

    async def _seconds_by_rank(self, method: Method, num_rounds: int, num_bytes: int, factor: int) -> list[list[float]]:
        response = await self._peer.request(method=method, num_rounds=num_rounds, num_bytes=num_bytes, factor=factor)
        return cast("list[list[float]]", response["seconds"])


@asynccontextmanager
async def gloo_group(num_senders: int, num_receivers: int) -> AsyncIterator[GlooGroup]:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        sizes = num_senders, num_receivers
        started = start_peer("gloo", "flowrt.bench.peers.gloo_rank", f"{folder}/meeting", *sizes, environment=environment)
        async with started as (peer, _):
            yield GlooGroup(peer, num_senders)
