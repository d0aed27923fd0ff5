"""Each backend of worker processes passes the checks of the contract."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from processes.backend_checks import CHECKS, Check, Owner, close, run_check, spec, talk

from flowrt.errors import UserError, WorkerDiedError
from flowrt.processes import fork_server_client
from flowrt.processes.adopted_processes import CAN_ADOPT
from flowrt.processes.fork_server_client import MAX_WORKERS, LocalBackend
from flowrt.processes.leftover import processes_marked
from flowrt.seams import Seams
from flowrt.simulation.processes import ProcessConditions, SimulatedBackend
from flowrt.simulation.world import World, run
from flowrt.system.process_backend import ProcessSpec
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.wire.message import Message

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
async def test_a_process_of_more_workers_than_a_message_has_descriptors_is_refused() -> None:
    backend = await LocalBackend.open(f"many of {os.getpid()}", Owner(), (), 1, 60.0)
    try:
        many = tuple(Identity(f"w.{number}", "0") for number in range(MAX_WORKERS + 1))
        with pytest.raises(UserError, match=f"w.0 would have {MAX_WORKERS + 1} workers in one process, at most {MAX_WORKERS} are possible"):
            await backend.start(replace(spec("w.0"), workers=many))
        process = await backend.start(replace(spec("w.0"), workers=many[:-1]))
        process.kill()
        await close(process)
    finally:
        await backend.aclose()


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


async def run_parent(control: Channel, seams: Seams) -> None:
    """A worker that starts a process, and sends its pid."""
    if (pid := os.fork()) == 0:
        signal.pause()
    await control.send(Message(str(pid)))
    await control.recv()


@pytest.mark.skipif(not CAN_ADOPT, reason="this system has no subreapers")
async def test_what_an_ended_worker_leaves_behind_is_reaped_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server_client, "ORPHAN_SECONDS", 0.01)
    owner = Owner()
    backend = await LocalBackend.open(f"orphans of {os.getpid()}", owner, ("processes.test_backends",), 2, 60.0)
    try:
        async with asyncio.timeout(60):
            other = await backend.start(spec("other"))
            parent = await backend.start(ProcessSpec("parent", (Identity("parent"),), "processes.test_backends:run_parent"))
            orphan = int((await parent.controls[0].recv()).kind)
            parent.kill()
            assert await owner.wait_exit(parent) == "was killed by SIGKILL"
            os.kill(orphan, signal.SIGKILL)
            while os.path.exists(f"/proc/{orphan}"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await talk(other)
        await close(parent, other)
    finally:
        await backend.aclose()


@checks
@pytest.mark.parametrize("seed", range(8))
def test_simulated(check: Check, seed: int) -> None:
    async def main(world: World) -> None:
        async def open_backend(owner: Owner) -> SimulatedBackend:
            return await SimulatedBackend.open(world, owner, ProcessConditions(unseen_one_in=seed % 3))

        await run_check(check, open_backend)
        assert world.leftovers() == []

    run(seed, main)
