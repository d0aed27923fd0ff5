"""gloo, through torch.distributed: what a user would take on CPUs for many senders and many receivers.

Here: GlooGroup, a group of processes that makes rounds of a method when asked, and times each. Not here: our own side (m2n.py,
transports.py), the turns (pairs.py). The processes are this file, run as a module: one that imports torch, and forks of it.

A round starts after a barrier and ends, for each process, when its own part is done and what it received was read and checked. A
round takes as long as its slowest process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

from flowrt.bench.peer_process import PeerProcess
from flowrt.errors import UserError

Method = Literal["all_to_all", "isend", "rows", "echo"]
METHODS: tuple[Method, ...] = ("all_to_all", "isend", "rows", "echo")
_STOP = len(METHODS)


class GlooGroup:
    """`num_senders` and `num_receivers` processes: senders first, or clients; then receivers, or servers."""

    def __init__(self, num_senders: int, num_receivers: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flowrt-bench-")
        command = [sys.executable, "-m", "flowrt.bench.gloo", f"{self._folder.name}/meeting", str(num_senders), str(num_receivers)]
        self._process = PeerProcess("gloo", command, {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})

    async def __aenter__(self) -> Self:
        await self._process.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(UserError):
            await self._process.ask(method="stop", rounds=0, bytes=0)
        await self._process.__aexit__(kind, error, trace)
        self._folder.cleanup()

    async def round_seconds(self, method: Method, num_rounds: int, num_bytes: int) -> list[float]:
        """Seconds of each of `num_rounds` rounds: every sender gives each receiver `num_bytes`; with "rows" the receivers give them
        back; "echo" is one sender and one receiver, without a barrier. Raises UserError when a process failed."""
        answer = await self._process.ask(method=method, rounds=num_rounds, bytes=num_bytes)
        seconds: list[float] = answer["seconds"]
        return seconds

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        """Of a group of 1 and 1: until a payload as large as this one is back; of `num_rounds` one after the other the median, since
        now and then one takes a hundred times as long."""
        return statistics.median(await self.round_seconds("echo", num_rounds, memoryview(payload).nbytes))


class _Rank:
    """One process of the group."""

    def __init__(self, rank: int, num_senders: int, num_receivers: int) -> None:
        self._rank, self._num_senders, self._num_receivers = rank, num_senders, num_receivers
        self._sending = rank < num_senders
        self._peers = range(num_senders, num_senders + num_receivers) if self._sending else range(num_senders)

    def serve(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        while True:
            command = torch.tensor(_command() if self._rank == 0 else [0, 0, 0])
            dist.broadcast(command, 0)
            method, num_rounds, num_bytes = command.tolist()
            if method == _STOP:
                return
            times = self._rounds(METHODS[method], num_rounds, num_bytes)
            slowest = torch.tensor(times, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if self._rank == 0:
                _say(seconds=slowest.tolist())

    def _rounds(self, method: Method, num_rounds: int, num_bytes: int) -> list[float]:
        import torch
        import torch.distributed as dist

        out = torch.ones(num_bytes * len(self._peers), dtype=torch.uint8)
        into = torch.empty(num_bytes * len(self._peers), dtype=torch.uint8)
        outs, ins = list(out.split(num_bytes)), list(into.split(num_bytes))
        if method == "echo":
            return self._echo(num_rounds, outs[0], ins[0])
        once = {"all_to_all": self._all_to_all, "isend": self._isend, "rows": self._rows}[method](outs, ins)
        times = []
        for _ in range(num_rounds):
            dist.barrier()
            start = time.perf_counter()
            once()
            times.append(time.perf_counter() - start)
        return times

    def _all_to_all(self, outs: list[Any], ins: list[Any]) -> Callable[[], None]:
        import torch
        import torch.distributed as dist

        world, num_bytes = range(self._num_senders + self._num_receivers), outs[0].numel()
        sizes = [num_bytes if peer in self._peers else 0 for peer in world]
        none = [0] * len(world)
        out, into = torch.cat(outs), torch.empty(num_bytes * len(ins), dtype=torch.uint8)

        def once() -> None:
            if self._sending:
                dist.all_to_all_single(into[:0], out, none, sizes)
            else:
                dist.all_to_all_single(into, out[:0], sizes, none)
                for part in into.split(num_bytes):
                    _check(part)

        return once

    def _isend(self, outs: list[Any], ins: list[Any]) -> Callable[[], None]:
        def once() -> None:
            if self._sending:
                self._send_all(outs)
            else:
                self._receive_all(ins)

        return once

    def _rows(self, outs: list[Any], ins: list[Any]) -> Callable[[], None]:
        import torch.distributed as dist

        def once() -> None:
            if self._sending:
                answers = [dist.irecv(part, peer) for part, peer in zip(ins, self._peers, strict=True)]
                self._send_all(outs)
                for answer, part in zip(answers, ins, strict=True):
                    _wait(answer)
                    _check(part)
                return
            questions = [dist.irecv(part, peer) for part, peer in zip(ins, self._peers, strict=True)]
            sent = []
            for question, part, peer in zip(questions, ins, self._peers, strict=True):
                _wait(question)
                _check(part)
                sent.append(dist.isend(part, peer))
            for each in sent:
                _wait(each)

        return once

    def _echo(self, num_rounds: int, out: Any, into: Any) -> list[float]:
        import torch.distributed as dist

        dist.barrier()
        times = []
        for _ in range(num_rounds):
            start = time.perf_counter()
            if self._sending:
                dist.send(out, 1)
                dist.recv(into, 1)
                _check(into)
            else:
                dist.recv(into, 0)
                _check(into)
                dist.send(into, 0)
            times.append(time.perf_counter() - start if self._sending else 0.0)
        return times

    def _send_all(self, outs: list[Any]) -> None:
        import torch.distributed as dist

        for each in [dist.isend(part, peer) for part, peer in zip(outs, self._peers, strict=True)]:
            _wait(each)

    def _receive_all(self, ins: list[Any]) -> None:
        import torch.distributed as dist

        for each, part in [(dist.irecv(part, peer), part) for part, peer in zip(ins, self._peers, strict=True)]:
            _wait(each)
            _check(part)


def _wait(work: Any) -> None:
    assert work is not None
    work.wait()


def _check(part: Any) -> None:
    from flowrt.bench.operators import check

    check(part.numpy())


def _command() -> list[int]:
    line = sys.stdin.readline()
    request: dict[str, Any] = json.loads(line) if line else {"method": "stop", "rounds": 0, "bytes": 0}
    return [[*METHODS, "stop"].index(request["method"]), request["rounds"], request["bytes"]]


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _main(meeting: str, num_senders: int, num_receivers: int) -> None:
    import torch.distributed as dist

    world = num_senders + num_receivers
    children: list[int] = []
    rank = 0
    for other in range(1, world):
        child = os.fork()
        if child == 0:
            rank, children = other, []
            sys.stdin.close()
            break
        children.append(child)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    dist.barrier()
    if rank == 0:
        _say(processes=world)
    _Rank(rank, num_senders, num_receivers).serve()
    dist.destroy_process_group()
    for child in children:
        os.waitpid(child, 0)
    if rank == 0:
        _say()
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
