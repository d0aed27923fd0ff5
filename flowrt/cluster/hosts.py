"""Where workers live: in OS processes that the starter forks, or as tasks of this loop. Both speak through the same kind of line.

Here: `Hosts`, which puts workers into their hosts and ends the hosts. Not here: the fork (starter.py), its request (forked.py), what
workers are told (launcher.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from flowrt.cluster.choose import host_name, num_threads, usable_cores
from flowrt.cluster.forked import StarterProcess, exit_text
from flowrt.cluster.starter import CONTROL_LIMITS, WorkerMain, fault_of
from flowrt.errors import WorkerDiedError
from flowrt.graph.model import GATEWAY, STARTER, Graph
from flowrt.seams import Seams
from transports.contract import Channel, Identity
from transports.inproc import InprocChannel
from transports.stream import StreamChannel


@dataclass(frozen=True)
class Placed:
    """A worker in its host: the OS process it shares, or its own name when it is a task of this loop."""

    name: str
    host: str
    pid: int
    control: Channel
    task: asyncio.Task[None] | None = None


class Hosts:
    """The hosts of one run. `exits[host]` becomes how the host ended ("was killed by SIGKILL"); STARTER is one of them."""

    def __init__(self, run_id: str, incarnations: Mapping[str, str], on_line: Callable[[str, str], None]) -> None:
        self._run_id, self._incarnations, self._on_line = run_id, incarnations, on_line
        self._starter: StarterProcess | None = None
        self.exits: dict[str, asyncio.Future[str]] = {}
        self.on_exit: Callable[[str, str], None] = lambda host, how: None

    async def start(self, preload: Sequence[str], seconds: float) -> int:
        """Start the starter; its number of threads. Raises WorkerDiedError when it fails or gives no word for `seconds`."""
        self.exits[STARTER] = asyncio.get_running_loop().create_future()
        starter = self._starter = StarterProcess(self._run_id, self._on_line, self._note_exit)
        try:
            async with asyncio.timeout(seconds):
                return await starter.start(preload)
        except TimeoutError:
            reason = f"gave no word for {seconds:g} s while importing {', '.join(preload)}"
            raise WorkerDiedError(STARTER, reason, starter.last_words(STARTER)) from None

    async def fork_all(self, graph: Graph, hosts: Sequence[Sequence[str]], worker: str, log_level: str) -> AsyncIterator[Placed]:
        """One OS process per list of workers, each worker running `worker` ("module:function")."""
        assert self._starter is not None
        cores = usable_cores()
        for workers in hosts:
            host = host_name(workers)
            self.exits[host] = asyncio.get_running_loop().create_future()
            threads = num_threads(graph, workers, hosts, cores)
            pid, lines = await self._starter.fork(host, workers, worker, threads, log_level)
            channels = [  # all at once: a line without a channel would be closed by nobody
                await StreamChannel.from_socket(line, CONTROL_LIMITS, Identity(name, self._incarnations[name]))
                for name, line in zip(workers, lines, strict=True)
            ]
            for name, channel in zip(workers, channels, strict=True):
                yield Placed(name, host, pid, channel)

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

    @property
    def any_exited(self) -> bool:
        return any(exited.done() for exited in self.exits.values())

    def last_words(self, host: str) -> tuple[str, ...]:
        """The last lines of an OS process; nothing of a worker in this loop, whose stderr is ours."""
        return self._starter.last_words(host) if self._starter is not None else ()

    async def kill(self, host: str, number: int) -> None:
        if self._starter is not None:
            await self._starter.kill(host, number)

    async def aclose(self) -> None:
        """End every OS process; see StarterProcess.aclose."""
        if self._starter is not None:
            await self._starter.aclose()

    def end_now(self) -> None:
        """As `aclose`, without a turn of the loop; see StarterProcess.end_now."""
        if self._starter is not None:
            self._starter.end_now()

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
