"""The counts of a process that is killed are known up to its latest statistics, which the launcher keeps requesting."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from flowrt.actors.control import StatisticsRequest
from flowrt.api.served import StateReports
from flowrt.graph.model import Graph, Node
from flowrt.launcher import served_requests
from flowrt.launcher.served_requests import ServedRequests


async def test_statistics_of_usable_processes_are_requested_again_and_again() -> None:
    requested: list[str] = []
    waits: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) > 3:
            enough.set()
            await asyncio.Event().wait()

    def worker(name: str) -> Any:
        def request(control: object) -> None:
            assert control == StatisticsRequest()
            requested.append(name)

        return SimpleNamespace(request=request)

    graph = Graph({each: Node(each, "nothing", each) for each in ("a.0", "b.0")}, {})
    launcher = SimpleNamespace(
        graph=graph,
        seams=SimpleNamespace(clock=SimpleNamespace(sleep=sleep)),
        state=SimpleNamespace(is_usable=lambda name: name != "b.0"),
        workers={name: worker(name) for name in graph.process_names()},
    )
    reports = StateReports({}, "tiny")
    served = ServedRequests(cast("Any", launcher), cast("Any", None), reports)
    served.begin()
    await enough.wait()
    await served.aclose()
    assert requested == ["a.0"] * 3
    assert waits == [served_requests.REFRESH_SECONDS] * 4
