"""gloo through torch.distributed: what a user would take on CPUs for many senders and many receivers.

A round starts after a barrier and ends, for each process, when its own part is done and what it received was read and checked. A round
takes as long as its slowest process.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

from flowrt.bench.peers.checksum import check
from flowrt.bench.peers.process import Peer, start_peer

Method = Literal["all_to_all", "isend", "rows", "echo"]
METHODS: tuple[Method, ...] = ("all_to_all", "isend", "rows", "echo")
_STOP = len(METHODS)


class GlooGroup:
    """Processes that make rounds: senders first, or clients; then receivers, or servers."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def round_seconds(self, method: Method, num_rounds: int, num_bytes: int) -> list[float]:
        """Seconds of each round: every sender sends each receiver `num_bytes`; with "rows" the receivers send them back; "echo" is one
        sender and one receiver, without a barrier. Raises UserError when a process failed."""
        response = await self._peer.ask(method=method, num_rounds=num_rounds, num_bytes=num_bytes)
        seconds: list[float] = response["seconds"]
        return seconds

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        """For a group of 1 and 1. The median, since a few round trips take a hundred times as long as the others."""
        return statistics.median(await self.round_seconds("echo", num_rounds, memoryview(payload).nbytes))


@asynccontextmanager
async def gloo_group(num_senders: int, num_receivers: int) -> AsyncIterator[GlooGroup]:
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        meeting = f"{folder}/meeting"
        async with start_peer("gloo", __name__, meeting, num_senders, num_receivers, environment=environment) as (peer, _):
            yield GlooGroup(peer)


@contextmanager
def open_peer(meeting: str, num_senders: str, num_receivers: str) -> Iterator[tuple[dict[str, Any], Callable[..., dict[str, Any]]]]:
    """Rank 0 in this process, the others in forks of it, which never return from here."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = int(num_senders) + int(num_receivers)
    children: list[int] = []
    rank = 0
    for other in range(1, world):
        if (child := os.fork()) == 0:
            rank, children = other, []
            break
        children.append(child)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    member = _Rank(rank, int(num_senders), int(num_receivers))
    dist.barrier()
    if rank:
        while member.run_command([0, 0, 0]) is not None:
            pass
        dist.destroy_process_group()
        os._exit(0)

    def respond(method: Method, num_rounds: int, num_bytes: int) -> dict[str, Any]:
        return {"seconds": member.run_command([METHODS.index(method), num_rounds, num_bytes])}

    yield {}, respond
    member.run_command([_STOP, 0, 0])
    dist.destroy_process_group()
    for child in children:
        os.waitpid(child, 0)


class _Rank:
    """One process of the group."""

    def __init__(self, rank: int, num_senders: int, num_receivers: int) -> None:
        self._world = num_senders + num_receivers
        self._sends = rank < num_senders
        self._peers = range(num_senders, self._world) if self._sends else range(num_senders)

    def run_command(self, command: list[int]) -> list[float] | None:
        """Runs the command of rank 0: [method, rounds, bytes]. The seconds of each round in the slowest process; None: the end."""
        import torch
        import torch.distributed as dist

        shared = torch.tensor(command)
        dist.broadcast(shared, 0)
        method, num_rounds, num_bytes = shared.tolist()
        if method == _STOP:
            return None
        payloads = [torch.ones(num_bytes, dtype=torch.uint8) for _ in self._peers]
        received = torch.empty(num_bytes * len(self._peers), dtype=torch.uint8)
        once = getattr(self, f"_{METHODS[method]}")(payloads, list(received.split(num_bytes)))
        is_echo = METHODS[method] == "echo"
        times = []
        for number in range(num_rounds):
            if number == 0 or not is_echo:
                dist.barrier()
            start = time.perf_counter()
            once()
            times.append(time.perf_counter() - start if self._sends or not is_echo else 0.0)
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()

    def _all_to_all(self, payloads: list[Any], received: list[Any]) -> Callable[[], None]:
        import torch
        import torch.distributed as dist

        num_bytes = received[0].numel()
        sizes = [num_bytes if peer in self._peers else 0 for peer in range(self._world)]
        none = [0] * self._world
        out, into = torch.cat(payloads), torch.empty(num_bytes * len(received), dtype=torch.uint8)

        def once() -> None:
            if self._sends:
                dist.all_to_all_single(into[:0], out, none, sizes)
            else:
                dist.all_to_all_single(into, out[:0], sizes, none)
                for part in into.split(num_bytes):
                    check(part.numpy())

        return once

    def _isend(self, payloads: list[Any], received: list[Any]) -> Callable[[], None]:
        def once() -> None:
            if self._sends:
                self._send_all(payloads)
            else:
                self._receive_each(received, lambda part, peer: None)

        return once

    def _rows(self, payloads: list[Any], received: list[Any]) -> Callable[[], None]:
        import torch.distributed as dist

        def once() -> None:
            if self._sends:
                self._receive_each(received, lambda part, peer: None, lambda: self._send_all(payloads))
                return
            sent: list[Any] = []
            self._receive_each(received, lambda part, peer: sent.append(dist.isend(part, peer)))
            for each in sent:
                _wait(each)

        return once

    def _echo(self, payloads: list[Any], received: list[Any]) -> Callable[[], None]:
        import torch.distributed as dist

        payload, into, peer = payloads[0], received[0], self._peers[0]

        def once() -> None:
            if self._sends:
                dist.send(payload, peer)
            dist.recv(into, peer)
            check(into.numpy())
            if not self._sends:
                dist.send(into, peer)

        return once

    def _send_all(self, payloads: list[Any]) -> None:
        import torch.distributed as dist

        for each in [dist.isend(part, peer) for part, peer in zip(payloads, self._peers, strict=True)]:
            _wait(each)

    def _receive_each(self, received: list[Any], on_part: Callable[[Any, int], None], on_posted: Callable[[], None] = lambda: None) -> None:
        """Posts all receives, calls `on_posted`, then checks each part and calls `on_part` with it."""
        import torch.distributed as dist

        posted = [dist.irecv(part, peer) for part, peer in zip(received, self._peers, strict=True)]
        on_posted()
        for work, part, peer in zip(posted, received, self._peers, strict=True):
            _wait(work)
            check(part.numpy())
            on_part(part, peer)


def _wait(work: Any) -> None:
    work.wait()
