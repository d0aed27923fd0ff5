"""The fault injector with a worker that responds as the test says."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

from flowrt.chaos.inject import Injector
from flowrt.chaos.observer import RunObserver
from flowrt.chaos.orders import Note, Order
from flowrt.reliability.scenario import Reset, Scenario
from flowrt.seams import Seams


async def test_a_fault_that_the_worker_cannot_inject_is_not_logged_as_injected() -> None:
    """The worker reports it after the order was sent."""
    clock = Seams().clock
    logged: list[str] = []
    observer = RunObserver(clock)

    async def send(process: str, order: Order) -> None:
        line = Note(order.what, clock.now(), counts={"connections": 0}).as_line()
        asyncio.get_running_loop().call_soon(observer.take_line, process, line)

    pids = {"attention.0": os.getpid(), "experts.0": os.getpid()}
    graph: Any = SimpleNamespace(pids=pids, launcher=SimpleNamespace(send=send, incarnations={}, worker=""))
    scenario = Scenario(faults=(Reset(between=("attention.0", "experts.0")),))
    await Injector(graph, observer, clock, logged.append).run(scenario, clock.now())
    (injected,) = observer.injected_faults
    assert injected.missed == "no connection to experts.0 was open"
    assert logged == [f"{injected.text}, pid {os.getpid()}: no connection to experts.0 was open"]
