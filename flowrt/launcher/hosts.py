"""Where workers live: in OS processes that the fork server forks, or as tasks of this loop. Both speak through the same kind of line.

Here: `Hosts`, which puts workers into their hosts and ends the hosts. Not here: the fork (fork_server.py), its request
(fork_server_client.py), what
workers are told (launcher.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, GATEWAY, Graph
from flowrt.launcher.transport_choice import host_name, num_threads, usable_cores
from flowrt.processes.fork_server import CONTROL_LIMITS, WorkerMain, fault_of
from flowrt.processes.fork_server_client import ForkServerProcess
from flowrt.processes.output_tail import exit_text
from flowrt.seams import Seams
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.inproc import InprocChannel
from flowrt.transports.stream import StreamChannel

FORK_SECONDS = 15.0  # for the fork server to fork in, which takes it milliseconds: beyond that it is stopped


@dataclass(frozen=True)
class Placed:
    """A worker in its host: the OS process it shares, or its own name when it is a task of this loop."""

    name: str
    host: str
    pid: int
    control: Channel
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class _Fork:
    """What an OS process was made of, to make it again."""

    workers: tuple[str, ...]
    worker: str
    threads: int
    log_level: str


class Hosts:
    """The hosts of one run. `exits[host]` becomes how the host ended ("was killed by SIGKILL"); FORK_SERVER is one of them."""

    def __init__(self, run_id: str, incarnations: Mapping[str, str], on_line: Callable[[str, str], None]) -> None:
        self._run_id, self._incarnations, self._on_line = run_id, incarnations, on_line
        self._fork_server: ForkServerProcess | None = None
        self._forks: dict[str, _Fork] = {}
        self.exits: dict[str, asyncio.Future[str]] = {}
        self.on_exit: Callable[[str, str], None] = lambda host, how: None
        self.on_gone: Callable[[str], None] = lambda host: None  # sooner than on_exit, and not everywhere

    async def start(self, preload: Sequence[str], seconds: float) -> int:
        """Start the fork server; its number of threads. Raises WorkerDiedError when it fails or gives no word for `seconds`."""
        self.exits[FORK_SERVER] = asyncio.get_running_loop().create_future()
        fork_server = self._fork_server = ForkServerProcess(self._run_id, self._on_line, self._note_exit, self._note_gone)
        try:
            async with asyncio.timeout(seconds):
                return await fork_server.start(preload)
        except TimeoutError:
            reason = f"gave no word for {seconds:g} s while importing {', '.join(preload)}"
            raise WorkerDiedError(FORK_SERVER, reason, fork_server.output_tail(FORK_SERVER)) from None

    async def fork_all(self, graph: Graph, hosts: Sequence[Sequence[str]], worker: str, log_level: str) -> AsyncIterator[Placed]:
        """One OS process per list of workers, each worker running `worker` ("module:function")."""
        cores = usable_cores()
        for workers in hosts:
            fork = self._forks[host_name(workers)] = _Fork(tuple(workers), worker, num_threads(graph, workers, hosts, cores), log_level)
            for placed in await self._fork(fork):
                yield placed

    async def fork_again(self, host: str) -> list[Placed]:
        """A new life for a host that has ended, or is planned: its workers, under the incarnations that they have now."""
        return await self._fork(self._forks[host])

    def plan_beside(self, name: str, worker: str, log_level: str) -> None:
        """A worker that is none of the graph's, for a process of its own: `fork_again` makes it."""
        self._forks[name] = _Fork((name,), worker, 1, log_level)

    def workers_of(self, host: str) -> tuple[str, ...]:
        """The workers in an OS process of ours; () for a worker in this loop."""
        fork = self._forks.get(host)
        return fork.workers if fork is not None else ()

    async def _fork(self, fork: _Fork) -> list[Placed]:
        assert self._fork_server is not None
        host = host_name(fork.workers)
        exited = self.exits[host] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(FORK_SECONDS):
                pid, lines = await self._fork_server.fork(host, fork.workers, fork.worker, fork.threads, fork.log_level)
        except TimeoutError:
            exited.set_result("could not be forked")
            reason = f"has given no answer for {FORK_SECONDS:g} s: is it stopped, or the machine overloaded?"
            raise WorkerDiedError(FORK_SERVER, reason, self.output_tail(FORK_SERVER)) from None
        except (WorkerDiedError, UserError):
            exited.set_result("could not be forked")
            raise
        channels = [  # all at once: a line without a channel would be closed by nobody
            await StreamChannel.from_socket(line, CONTROL_LIMITS, Identity(name, self._incarnations[name]))
            for name, line in zip(fork.workers, lines, strict=True)
        ]
        return [Placed(name, host, pid, channel) for name, channel in zip(fork.workers, channels, strict=True)]

    def place_here(self, tasks: asyncio.TaskGroup, name: str, worker: WorkerMain, seams: Seams) -> Placed:
        """Run a worker as a task of this loop."""
        ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity(GATEWAY), Identity(name, self._incarnations[name]))
        self.exits[name] = asyncio.get_running_loop().create_future()
        task = tasks.create_task(self._run_here(name, worker, theirs, seams), name=f"worker {name}")
        return Placed(name, name, os.getpid(), ours, task)

    async def _run_here(self, name: str, worker: WorkerMain, control: Channel, seams: Seams) -> None:
        how = exit_text(0)
        try:
            async with control:
                await worker(control, seams)
        except Exception as error:
            how = f"failed: {type(error).__name__}: {error}"
            if (fault := fault_of(error)) is not None:
                for line in "".join(traceback.format_exception(fault)).splitlines():
                    self._on_line(name, line)
        finally:
            if not self.exits[name].done():
                self.exits[name].set_result(how)

    def has_exited(self, host: str) -> bool:
        return host in self.exits and self.exits[host].done()

    def output_tail(self, host: str) -> tuple[str, ...]:
        """The last lines of an OS process; nothing of a worker in this loop, whose stderr is ours."""
        return self._fork_server.output_tail(host) if self._fork_server is not None else ()

    async def kill(self, host: str, number: int) -> None:
        if self._fork_server is not None:
            await self._fork_server.kill(host, number)

    def kill_now(self, host: str) -> None:
        """SIGKILL to an OS process that still lives; see ForkServerProcess.kill_now."""
        if self._fork_server is not None and not self.has_exited(host):
            self._fork_server.kill_now(host)

    async def aclose(self) -> None:
        """End every OS process; see ForkServerProcess.aclose."""
        if self._fork_server is not None:
            await self._fork_server.aclose()

    def end_now(self) -> None:
        """As `aclose`, without a turn of the loop; see ForkServerProcess.end_now."""
        if self._fork_server is not None:
            self._fork_server.end_now()

    def _note_gone(self, host: str) -> None:
        self.on_gone(host)

    def _note_exit(self, host: str, status: int) -> None:
        how = exit_text(status)
        if not self.exits[host].done():
            self.exits[host].set_result(how)
        self.on_exit(host, how)


def set_own_threads(graph: Graph) -> None:
    """In the user's own process: only what the graph asks for in numbers; `auto` leaves torch as the user set it."""
    wishes = [wish for wish in graph.threads.values() if wish != "auto"]
    if wishes and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(max(wishes))
