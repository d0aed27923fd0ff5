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
from flowrt.process_backend import CONTROL_LIMITS, OpenBackend, ProcessBackend, ProcessSpec, WorkerProcess
from flowrt.processes.fork_server import WorkerMain, fault_of
from flowrt.processes.output_tail import exit_text
from flowrt.seams import Seams
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.inproc import InprocChannel

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
        self._run_id, self._incarnations, self.on_output = run_id, incarnations, on_line
        self._backend: ProcessBackend | None = None
        self._forks: dict[str, _Fork] = {}
        self._processes: dict[str, WorkerProcess] = {}  # by host: the latest
        self.exits: dict[str, asyncio.Future[str]] = {}
        self.on_exit: Callable[[str, str], None] = lambda host, how: None
        self.on_gone: Callable[[str], None] = lambda host: None  # sooner than on_exit, and not everywhere

    async def start(self, open_backend: OpenBackend, preload: Sequence[str], num_processes: int, seconds: float) -> int:
        """Open the backend; its number of threads. Raises as OpenBackend."""
        self.exits[FORK_SERVER] = asyncio.get_running_loop().create_future()
        self._backend = await open_backend(self._run_id, self, preload, num_processes, seconds)
        return self._backend.num_threads

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
        assert self._backend is not None
        host = host_name(fork.workers)
        exited = self.exits[host] = asyncio.get_running_loop().create_future()
        workers = tuple(Identity(name, self._incarnations[name]) for name in fork.workers)
        try:
            async with asyncio.timeout(FORK_SECONDS):
                process = await self._backend.start(ProcessSpec(host, workers, fork.worker, fork.threads, fork.log_level))
        except TimeoutError:
            exited.set_result("could not be forked")
            reason = f"has given no answer for {FORK_SECONDS:g} s: is it stopped, or the machine overloaded?"
            raise WorkerDiedError(FORK_SERVER, reason, self._backend.output_tail()) from None
        except (WorkerDiedError, UserError):
            exited.set_result("could not be forked")
            raise
        self._processes[host] = process
        return [Placed(name, host, process.pid, control) for name, control in zip(fork.workers, process.controls, strict=True)]

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
                    self.on_output(name, line)
        finally:
            if not self.exits[name].done():
                self.exits[name].set_result(how)

    def has_exited(self, host: str) -> bool:
        return host in self.exits and self.exits[host].done()

    def output_tail(self, host: str) -> tuple[str, ...]:
        """The last lines of an OS process; nothing of a worker in this loop, whose stderr is ours."""
        if host == FORK_SERVER and self._backend is not None:
            return self._backend.output_tail()
        process = self._processes.get(host)
        return process.output_tail() if process is not None else ()

    async def terminate(self, host: str) -> None:
        if (process := self._processes.get(host)) is not None:
            await process.terminate()

    def kill_now(self, host: str) -> None:
        """SIGKILL to an OS process that still lives."""
        process = self._processes.get(host)
        if process is not None and not self.has_exited(host):
            process.kill()

    async def aclose(self) -> None:
        """End every OS process."""
        if self._backend is not None:
            await self._backend.aclose()

    def end_now(self) -> None:
        """As `aclose`, without a turn of the loop."""
        if self._backend is not None:
            self._backend.kill_all()

    # What the backend reports.

    def on_dying(self, process: WorkerProcess) -> None:
        if self._processes.get(process.spec.name) is process:
            self.on_gone(process.spec.name)

    def on_exited(self, process: WorkerProcess, how: str) -> None:
        if self._processes.get(process.spec.name) is process:
            self._note_exit(process.spec.name, how)

    def on_backend_lost(self, how: str) -> None:
        self._note_exit(FORK_SERVER, how)

    def _note_exit(self, host: str, how: str) -> None:
        if not self.exits[host].done():
            self.exits[host].set_result(how)
        self.on_exit(host, how)


def set_own_threads(graph: Graph) -> None:
    """In the user's own process: only what the graph asks for in numbers; `auto` leaves torch as the user set it."""
    wishes = [wish for wish in graph.threads.values() if wish != "auto"]
    if wishes and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(max(wishes))
