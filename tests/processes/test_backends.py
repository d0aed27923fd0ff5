"""Each backend of worker processes passes the checks of the contract."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from processes.backend_checks import CHECKS, Check, Owner, close, run_check, spec, talk

from flowrt.errors import WorkerDiedError
from flowrt.processes.fork_server_client import LocalBackend
from flowrt.processes.leftover import processes_marked
from flowrt.simulation.processes import ProcessConditions, SimulatedBackend
from flowrt.simulation.world import World, run

checks = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@checks
async def test_local(check: Check) -> None:
    run_id = f"checks of {os.getpid()}"  # closing a backend kills every process that carries its run id

    async def open_backend(owner: Owner) -> LocalBackend:
        return await LocalBackend.open(run_id, owner, ("processes.backend_checks",), 3, 60.0)

    await run_check(check, open_backend)
    assert processes_marked(run_id) == []


async def test_fork_server_that_cannot_start_is_one_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerDiedError, match=r"cannot start: .*No such file or directory"):
        await LocalBackend.open("none", Owner(), (), 1, 60.0)
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
async def test_starts_that_wait_for_the_fork_server_are_forked_and_cancelled_ones_end() -> None:
    run_id = f"waiting starts of {os.getpid()}"
    backend = await LocalBackend.open(run_id, Owner(), ("processes.backend_checks",), 24, 60.0)
    try:
        backend._server._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # room for a few requests
        os.kill(backend.pid, signal.SIGSTOP)
        starts = [asyncio.ensure_future(backend.start(spec(f"worker.{number}"))) for number in range(24)]
        await asyncio.sleep(0)
        for start in starts[1::2]:
            start.cancel()
        os.kill(backend.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            started = await asyncio.gather(*starts[::2])
            for process in started:
                await talk(process)
            while set(processes_marked(run_id)) != {backend.pid, *(process.pid for process in started)}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert all(start.cancelled() for start in starts[1::2])
        await close(*started)
    finally:
        os.kill(backend.pid, signal.SIGCONT)
        await backend.aclose()
    assert processes_marked(run_id) == []


@checks
@pytest.mark.parametrize("seed", range(8))
def test_simulated(check: Check, seed: int) -> None:
    async def main(world: World) -> None:
        async def open_backend(owner: Owner) -> SimulatedBackend:
            return await SimulatedBackend.open(world, owner, ProcessConditions(unseen_one_in=seed % 3))

        await run_check(check, open_backend)
        assert world.leftovers() == []

    run(seed, main)
