"""The ranks of a gloo group, all in the peer's process and forks of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from flowrt.bench.peers.checksum import check
from flowrt.bench.peers.gloo import METHODS, Method

_STOP = len(METHODS)


@contextmanager
def open_peer(meeting: str, num_senders: str, num_receivers: str) -> Iterator[tuple[dict[str, Any], Callable[..., dict[str, Any]]]]:
    """Rank 0 in this process, the others in forks of it, which never return from here."""
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
        while member.run_command([0, 0, 0, 0]) is not None:
            pass
        dist.destroy_process_group()
        os._exit(0)

    def respond(method: Method, num_rounds: int, num_bytes: int, factor: int) -> dict[str, Any]:
        return {"seconds": member.run_command([METHODS.index(method), num_rounds, num_bytes, factor])}

    yield {}, respond
    member.run_command([_STOP, 0, 0, 0])
    dist.destroy_process_group()
    for child in children:
        os.waitpid(child, 0)


class _Rank:
    """One process of the group."""

    def __init__(self, rank: int, num_senders: int, num_receivers: int) -> None:
        self._world = num_senders + num_receivers
        self._sends = rank < num_senders
        self._rank, self._first = rank, num_senders  # the latter is the first receiver
        self._peers = range(num_senders, self._world) if self._sends else range(num_senders)

    def run_command(self, command: list[int]) -> list[list[float]] | None:
        """Runs the command of rank 0: [method, rounds, bytes, factor for the first receiver]. By rank, the seconds of each round; None: the
        end."""
        shared = torch.tensor(command)
        dist.broadcast(shared, 0)
        index, num_rounds, num_bytes, factor = shared.tolist()
        if index == _STOP:
            return None
        method = METHODS[index]
        sizes = {peer: num_bytes * (factor if self._first in (self._rank, peer) else 1) for peer in self._peers}
        payload, received = (torch.ones(sum(sizes.values()), dtype=torch.uint8) for _ in range(2))
        times = []
        for number in range(num_rounds):
            if number == 0 or method != "echo":
                dist.barrier()
            start = time.perf_counter()
            if method == "all_to_all":
                self._all_to_all(payload, received, sizes)
            else:
                parts, places = (each.split([*sizes.values()]) for each in (payload, received))
                self._exchange(parts, places, returns=method != "isend")
            times.append(time.perf_counter() - start if self._sends or method != "echo" else 0.0)
        own = torch.tensor(times, dtype=torch.float64)
        by_rank = [torch.empty_like(own) for _ in range(self._world)]
        dist.all_gather(by_rank, own)
        return [each.tolist() for each in by_rank]

    def _all_to_all(self, payload: torch.Tensor, received: torch.Tensor, sizes: Mapping[int, int]) -> None:
        of_all, none = [sizes.get(rank, 0) for rank in range(self._world)], [0] * self._world
        if self._sends:
            dist.all_to_all_single(received[:0], payload, none, of_all)
        else:
            dist.all_to_all_single(received, payload[:0], of_all, none)
            for part in received.split([*sizes.values()]):
                check(part.numpy())

    def _exchange(self, payloads: tuple[torch.Tensor, ...], received: tuple[torch.Tensor, ...], returns: bool) -> None:
        """Sends all payloads, or receives and checks each; with `returns` the receivers send them back."""
        posted: list[Any] = []
        sent: list[Any] = []
        if returns or not self._sends:
            posted = [dist.irecv(part, peer) for part, peer in zip(received, self._peers, strict=True)]
        if self._sends:
            sent = [dist.isend(part, peer) for part, peer in zip(payloads, self._peers, strict=True)]
        for work, part, peer in zip(posted, received, self._peers, strict=False):
            work.wait()
            check(part.numpy())
            if not self._sends and returns:
                sent.append(dist.isend(part, peer))
        for work in sent:
            work.wait()
