"""Starts and ends the hosts of workers: OS processes of a process backend, or tasks of this loop.

Workers of both kinds have the same kind of control connection.
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

FORK_SECONDS = 15.0  # time limit for a fork; a fork takes milliseconds, so a fork server that exceeds this is stopped


@dataclass(frozen=True)
class Placed:
    """A started worker. `host`: the name of its OS process, which it may share; its own name when it is a task of this loop."""

    name: str
    host: str
    pid: int
    control: Channel
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class _Fork:
    """Parameters of an OS process, kept to start it again."""

    workers: tuple[str, ...]
    worker: str
    threads: int
    log_level: str


class Hosts:
    """The hosts of one run. `exits[host]` is a future of how the host ended ("was killed by SIGKILL"); FORK_SERVER is one of the hosts."""

    def __init__(self, run_id: str, incarnations: Mapping[str, str], on_line: Callable[[str, str], None]) -> None:
        self._run_id, self._incarnations, self.on_output = run_id, incarnations, on_line
        self._backend: ProcessBackend | None = None
        self._forks: dict[str, _Fork] = {}
        self._processes: dict[str, WorkerProcess] = {}  # by host: the latest
        self.exits: dict[str, asyncio.Future[str]] = {}
        self.on_exit: Callable[[str, str], None] = lambda host, how: None
        self.on_gone: Callable[[str], None] = lambda host: None  # comes before on_exit, on systems that report it

    async def start(self, open_backend: OpenBackend, preload: Sequence[str], num_processes: int, seconds: float) -> int:
        """Open the backend and return its number of threads. Raises as OpenBackend."""
        self.exits[FORK_SERVER] = asyncio.get_running_loop().create_future()
        self._backend = await open_backend(self._run_id, self, preload, num_processes, seconds)
        return self._backend.num_threads

    async def fork_all(self, graph: Graph, hosts: Sequence[Sequence[str]], worker: str, log_level: str) -> AsyncIterator[Placed]:
        """Start one OS process per list of workers. Each worker runs `worker` ("module:function")."""
        cores = usable_cores()
        for workers in hosts:
            fork = self._forks[host_name(workers)] = _Fork(tuple(workers), worker, num_threads(graph, workers, hosts, cores), log_level)
            for placed in await self._fork(fork):
                yield placed

    async def fork_again(self, host: str) -> list[Placed]:
        """Start a host that has ended, or is planned, and return its workers. They get their current incarnations.

        Raises WorkerDiedError when the fork fails or takes longer than FORK_SECONDS, UserError when descriptors run out.
        """
        return await self._fork(self._forks[host])

    def plan_beside(self, name: str, worker: str, log_level: str) -> None:
        """Register a worker outside the graph for a process of its own; `fork_again` starts it."""
        self._forks[name] = _Fork((name,), worker, 1, log_level)

    def workers_of(self, host: str) -> tuple[str, ...]:
        """The workers of an OS process of this run; () for a worker in this loop."""
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
        """The last output lines of an OS process; () for a worker in this loop, which writes to this process's stderr."""
        if host == FORK_SERVER and self._backend is not None:
            return self._backend.output_tail()
        process = self._processes.get(host)
        return process.output_tail() if process is not None else ()

    async def terminate(self, host: str) -> None:
        if (process := self._processes.get(host)) is not None:
            await process.terminate()

    def kill_now(self, host: str) -> None:
        """Send SIGKILL to an OS process that has not exited."""
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

    # Notices of the backend (see BackendOwner).

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
    """Set torch's threads in the user's own process to the largest number in the graph; `auto` keeps the user's setting."""
    wishes = [wish for wish in graph.threads.values() if wish != "auto"]
    if wishes and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(max(wishes))
