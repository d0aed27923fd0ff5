"""Implements the simulated engine: hosts in virtual time, on which the real host server runs (flowrt/hosts/server.py).

A host server is a process under the name of its host, so that faults can name it: a crash is the end of the host, a cut between it and the
gateway a partition. When it dies, its workers do. While a cut keeps it from the launcher, a kill does not reach it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowrt.hosts.messages import HostStart
from flowrt.hosts.server import serve
from flowrt.launcher.control_connection import ControlConnection
from flowrt.seams import Seams
from flowrt.simulation.processes import KILLED, ProcessConditions, SimulatedBackend
from flowrt.simulation.waitables import OUTSIDE, set_result
from flowrt.simulation.world import MachineClock, SimulatedProcess, World
from flowrt.system.clock_offset import MAX_DRIFT
from flowrt.system.process_backend import BackendOwner, ProcessBackend

EXACT_SECONDS = 0.05
DRIFT = 0.9 * MAX_DRIFT  # of the machine clock of each host, fast and slow in turn; their offsets are hours


class SimulatedHostProcess:
    """See flowrt.system.host_engine.HostProcess."""

    def __init__(self, world: World, name: str, conditions: ProcessConditions) -> None:
        self.address = name
        self._world, self._conditions = world, conditions
        self._replied: asyncio.Future[bytes] = world.loop.create_future()
        self._process: SimulatedProcess | None = None

    async def start(self, line: bytes) -> bytes:
        start = msgspec.json.decode(line, type=HostStart)
        number = int(self.address.rpartition(".")[2])
        clock = MachineClock(5000.0 * number, DRIFT if number % 2 else -DRIFT)
        self._process = process = self._world.start(self.address, lambda seams: self._serve(start, seams), machine_clock=clock)
        awaited: list[asyncio.Future[Any]] = [self._replied, process.exit]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        return self._replied.result() if self._replied.done() else b""

    async def wait(self) -> str:
        if self._process is None:
            return "was not started"
        await asyncio.wait([self._process.exit])
        return self._process.exit.result()

    def kill(self) -> None:
        if self._process is not None and not self._is_cut_off(self._process.node):
            self._world.kill(self._process, KILLED)

    def kill_surely(self) -> None:
        if self._process is not None:
            self._world.kill(self._process, KILLED)

    # Inside.

    def _is_cut_off(self, node: str) -> bool:
        return any(link.num_cuts for link in self._world.network.links(OUTSIDE, node))

    async def _serve(self, start: HostStart, seams: Seams) -> None:
        """The task of the host server, on its node."""

        async def open_backend(
            run_id: str, owner: BackendOwner, preload: Sequence[str], num_processes: int, seconds: float
        ) -> ProcessBackend:
            return await SimulatedBackend.open(self._world, owner, self._conditions)

        def reply(line: bytes) -> None:
            self._world.loop.call_at_node(self._world.loop.time(), OUTSIDE, set_result, self._replied, line)

        await serve(start, seams, open_backend, reply)


def clock_faults(world: World, connections: Iterable[ControlConnection]) -> list[str]:
    """What is wrong with the offsets that the launcher knows of the machine clocks of its workers (I9), after heartbeats in a calm
    network."""
    faults, now = [], world.loop.time()
    for connection in connections:
        process, found = world.processes.get(connection.name), connection.clock_offset()
        if process is None or not world.is_alive(process):
            continue
        wrong_by = abs(found.seconds - (world.machine_clock(process.node).at(now) - now))
        if not wrong_by <= (stated := found.error_at(now)) <= EXACT_SECONDS:
            faults.append(f"the clock of {connection.name} is wrong by {wrong_by:g} s, stated are {stated:g} s")
    return faults


class SimulatedEngine:
    """See flowrt.system.host_engine.HostEngine."""

    address = "host.0"

    def __init__(self, world: World, conditions: ProcessConditions) -> None:
        self._world, self._conditions = world, conditions
        self._hosts: list[SimulatedHostProcess] = []

    @classmethod
    async def open(
        cls, world: World, conditions: ProcessConditions, resources: Mapping[str, Mapping[str, float]], seconds: float
    ) -> SimulatedEngine:
        return cls(world, conditions)

    async def open_host(self, name: str) -> SimulatedHostProcess:
        host = SimulatedHostProcess(self._world, name, self._conditions)
        self._hosts.append(host)
        return host

    async def aclose(self) -> None:
        self.kill_all()

    def kill_all(self) -> None:
        while self._hosts:
            self._hosts.pop().kill_surely()
