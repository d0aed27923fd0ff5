"""Requests of a running graph: what is left when a client goes while its request is being sent."""

from __future__ import annotations

import asyncio

import pytest

from flowrt.actors.control import Cancel, Control, Submit
from flowrt.gateway.gateway import Gateway, Parameters
from flowrt.gateway.requests import Requests
from flowrt.graph.model import GraphLimits
from flowrt.reliability.health import Progress
from flowrt.seams import RealClock


def test_a_client_that_goes_while_the_line_is_full_leaves_nothing_open() -> None:
    async def main() -> None:
        sent: list[Control] = []
        room = asyncio.Event()

        async def send(group: str, control: Control) -> None:
            await room.wait()
            sent.append(control)

        gateway, progress = Gateway(["g"], GraphLimits(), 64, draw_seed=lambda: 1), Progress()
        requests = Requests(gateway, send, progress, RealClock())
        requests.begin()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await requests.submit([1, 2, 3], Parameters(max_tokens=4))
        assert progress.num_open == 0
        assert not gateway.num_unfinished
        room.set()
        index = await requests.submit([1, 2, 3], Parameters(max_tokens=4))
        assert progress.num_open == 1
        assert gateway.num_unfinished == 1
        requests.end_all()
        assert [event.finish_reason async for event in requests.follow(index)] == ["cancelled"]
        assert [type(each) for each in sent if not isinstance(each, Cancel)] == [Submit]
        await requests.aclose()

    asyncio.run(main())
