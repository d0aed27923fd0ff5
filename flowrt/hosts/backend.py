"""The process backend of a run on several hosts: the launcher's own, and a host server on each other one.

See flowrt.system.process_backend.ProcessBackend. The processes of the launcher's host, and what is not of the graph, are started by a local
backend; its loss is the only one that is reported as the backend's. The fork server of another host is replaced by its host server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from flowrt.errors import WorkerDiedError, named_error
from flowrt.graph.hosts import host_resources
from flowrt.graph.model import FIRST_HOST, FORK_SERVER, Graph
from flowrt.graph.recovery import is_watched
from flowrt.graph.settings import HostSettings
from flowrt.hosts.local_engine import LocalEngine
from flowrt.hosts.remote_host import HostTerms, RemoteHost, RemoteProcess, Spawn
from flowrt.processes.fork_server_client import LocalBackend
from flowrt.seams import Seams
from flowrt.system.host_engine import HostEngine
from flowrt.system.process_backend import BackendOwner, ProcessBackend, ProcessSpec, WorkerProcess
from flowrt.transports.contract import HostAddress, Identity


class HostsBackend:
    """`host_address`: of the launcher's host, as in Seams. `local`: of the launcher's host. `remote`: the other hosts, by name.
    `process_hosts`: process -> host."""

    def __init__(
        self,
        host_address: HostAddress,
        engine: HostEngine,
        local: ProcessBackend,
        remote: Mapping[str, RemoteHost],
        process_hosts: Mapping[str, str],
    ) -> None:
        self.host_address = host_address
        self._engine, self._local, self._remote, self._process_hosts = engine, local, remote, process_hosts
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        graph: Graph,
        seams: Seams,
        scheme: str,
        spawn: Spawn,
        run_id: str,
        owner: BackendOwner,
        preload: Sequence[str],
        num_processes: int,
        seconds: float,
    ) -> HostsBackend:
        """See OpenBackend. `scheme`: the transport of the control connections; it encrypts. `spawn` creates tasks of the run."""
        settings, counts = graph.hosts or HostSettings(count=1), Counter(graph.process_hosts.values())
        used = [name for name in settings.names if counts[name] or name == FIRST_HOST]
        resources = {name: host_resources(graph, name) for name in used}
        engine = await (seams.open_engine or partial(_open_engine, settings, seams))(resources, seconds)
        host_address = HostAddress(address=engine.address, ports=settings.ports, trusted=settings.trusted)
        open_local = seams.open_backend or partial(LocalBackend.open, host_address=host_address)
        model_path = graph.model.path if graph.model is not None else ""
        terms = HostTerms(
            run_id, scheme, spawn, tuple(preload), seconds, settings.dead_seconds, is_watched(graph), model_path, host_address
        )
        remote = {name: RemoteHost(name, counts[name], engine, terms, owner, seams) for name in used if name != FIRST_HOST}
        local: ProcessBackend | None = None

        async def start_local() -> None:
            nonlocal local
            local = await open_local(run_id, owner, preload, num_processes, seconds)

        try:
            async with asyncio.TaskGroup() as tasks:
                for start in (start_local(), *(host.open() for host in remote.values())):
                    tasks.create_task(start)
            assert local is not None
            return cls(host_address, engine, local, remote, graph.process_hosts)
        except BaseException as error:
            try:
                engine.kill_all()
            finally:
                if local is not None:
                    local.kill_all()
            if isinstance(error, ExceptionGroup):
                raise named_error(error) from None
            raise

    @property
    def num_threads(self) -> int:
        return max([self._local.num_threads, *(host.num_threads for host in self._remote.values())])

    @property
    def pid(self) -> int:
        return self._local.pid

    async def restart(self, seconds: float) -> None:
        await self._local.restart(seconds)

    def kill_server(self) -> None:
        self._local.kill_server()

    async def start(self, spec: ProcessSpec) -> WorkerProcess:
        host = self._remote.get(self._process_hosts.get(spec.name, ""))
        if host is None:
            return await self._local.start(spec)
        if self._is_closed:
            raise WorkerDiedError(FORK_SERVER, "has ended with the run")
        return await host.start(spec)

    def rename(self, process: WorkerProcess, name: str, workers: tuple[Identity, ...]) -> None:
        assert not isinstance(process, RemoteProcess)  # standby processes are on the launcher's host
        self._local.rename(process, name, workers)

    def release(self, name: str, weights: Collection[str]) -> None:
        self._local.release(name, weights)

    def output_tail(self) -> tuple[str, ...]:
        return self._local.output_tail()

    async def aclose(self) -> None:
        self._is_closed = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._local.aclose())
                for host in self._remote.values():
                    tasks.create_task(host.aclose())
            await self._engine.aclose()
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        self._is_closed = True
        for host in self._remote.values():
            host.end_controls()
        try:
            self._engine.kill_all()
        finally:
            self._local.kill_all()


async def _open_engine(settings: HostSettings, seams: Seams, resources: Mapping[str, Mapping[str, float]], seconds: float) -> HostEngine:
    if settings.engine == "local":
        return LocalEngine()
    from flowrt.hosts.ray_engine import RayEngine  # only with this engine

    return await RayEngine.open(settings, resources, seams, seconds)
