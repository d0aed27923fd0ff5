"""The clients of a simulated graph: each sends one request to the gateway, behaves as the case says, and records what it sees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from flowrt.errors import NotRunningError, UserError, WorkerDiedError
from flowrt.gateway.requests import Requests
from flowrt.seams import Seams
from flowrt.simulation.served import UNREADABLE_TEXT, ClientRecord

TOKENIZE_SECONDS = 20e-3  # of a long text
POLL_SECONDS = 0.1  # between polls of a client that reads late


async def tokenize_slowly(seams: Seams) -> None:
    await seams.clock.sleep(seams.random.choice((0.0, 0.0, 1e-4, TOKENIZE_SECONDS)))


class DirectClients:
    """Clients that call the gateway as the Python API does. `has_failed`: the run has."""

    def __init__(self, seams: Seams, requests: Requests, has_failed: Callable[[], bool], on_open: Callable[[str], None]) -> None:
        self._requests, self._seams, self._has_failed, self._on_open = requests, seams, has_failed, on_open

    async def run(self, client: ClientRecord) -> None:
        """Run one client, from its request to its end."""
        request, gateway = client.request, self._requests.gateway

        async def tokenize() -> Sequence[int]:
            await tokenize_slowly(self._seams)
            if request.is_unreadable:
                raise UserError(UNREADABLE_TEXT)
            return request.prompt_token_ids

        try:
            async with asyncio.timeout(request.cancel_seconds):
                index = await self._requests.submit(request.params, tokenize)
                client.request_id = gateway.log(index).id
                self._on_open(client.request_id)
                while request.reads_late and gateway.log(index).end is None and not self._has_failed():
                    await self._seams.clock.sleep(POLL_SECONDS)
                log = gateway.log(index)
                if log.end is not None:
                    client.log = tuple(log.token_ids), log.text
                async with aclosing(self._requests.follow(index)) as events_of_request:
                    async for event in events_of_request:
                        client.events.append(event)
                        if client.end is None and len(client.events) == request.leaves_after:
                            client.has_left = True
                            return
                        if request.pause_seconds:
                            await self._seams.clock.sleep(request.pause_seconds)
        except TimeoutError:
            client.has_left = True
        except (UserError, WorkerDiedError, NotRunningError) as error:
            client.failure = str(error)
