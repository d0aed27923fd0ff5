"""Each backend of worker processes passes the checks of the contract."""

from __future__ import annotations

import os

import pytest
from processes.backend_checks import CHECKS, Check, Owner, run_check

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


@checks
@pytest.mark.parametrize("seed", range(8))
def test_simulated(check: Check, seed: int) -> None:
    async def main(world: World) -> None:
        async def open_backend(owner: Owner) -> SimulatedBackend:
            return await SimulatedBackend.open(world, owner, ProcessConditions(unseen_one_in=seed % 3))

        await run_check(check, open_backend)
        assert world.leftovers() == []

    run(seed, main)
