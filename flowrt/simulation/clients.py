"""The clients of a simulated graph: each sends one request, behaves as the case says, and records what it sees. Those of a dead launcher
read on at the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from flowrt.errors import NotRunningError, UserError, WorkerDiedError
from flowrt.gateway.request_log import RequestLog
from flowrt.launcher.run import Run
from flowrt.seams import Seams
from flowrt.simulation.case import Case
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.served import UNREADABLE_TEXT, ClientRecord

TOKENIZE_SECONDS = 20e-3  # of a long text
ARRIVAL_SECONDS = 20e-3  # requests arrive within this time of each other
POLL_SECONDS = 0.1  # between polls of a client that reads late


async def tokenize_slowly(seams: Seams) -> None:
    await seams.clock.sleep(seams.random.choice((0.0, 0.0, 1e-4, TOKENIZE_SECONDS)))


class SimulatedDetokenizer:
    """Emits one word per token and holds back the space after it."""

    def __init__(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._held = ""

    def push(self, token_id: int) -> str:
        text, self._held = f"{self._held}{token_id}", " "
        return text

    def flush(self) -> str:
        return ""


class DirectClients:
    """Clients that call the gateway as the Python API does. `on_open`: called with the id of each request."""

    def __init__(self, run: Run, on_open: Callable[[str], None]) -> None:
        self._launcher, self._requests, self._seams, self._on_open = run.launcher, run.require_requests(), run.launcher.seams, on_open

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
                if client.request_id:  # of an earlier launcher
                    index = int(client.request_id.removeprefix("request-"))
                else:
                    index = await self._requests.submit(request.params, tokenize)
                    client.request_id = gateway.log(index).id
                self._on_open(client.request_id)
                while request.reads_late and gateway.log(index).end is None and self._launcher.failure is None:
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


class Clients:
    """All clients of one launcher. `earlier`: those of the launcher before. `run` runs one, from its request to its end, and `note`
    completes its record then. `log_of` returns the log of a request that the gateway keeps. `resumed`: the requests that were in the
    request log."""

    def __init__(
        self,
        case: Case,
        seams: Seams,
        earlier: Sequence[ClientRecord],
        run: Callable[[ClientRecord], Awaitable[None]],
        has_failed: Callable[[], bool],
        log_of: Callable[[str], RequestLog | None],
        note: Callable[[ClientRecord], None],
    ) -> None:
        self.records: list[ClientRecord] = []
        self.resumed: set[str] = set()
        self._case, self._seams, self._earlier, self._run_client = case, seams, earlier, run
        self._has_failed, self._log_of, self._note = has_failed, log_of, note

    async def submit_all(self, tasks: asyncio.TaskGroup) -> None:
        for number, client in enumerate(self._earlier):
            self.records.append(replace(client, log=None))
            if self._comes_back(self.records[-1]):
                tasks.create_task(self._run(self.records[-1]), name=f"client of request {number}")
        for number in range(len(self._earlier), len(self._case.requests)):
            request = self._case.requests[number]
            drawn = self._seams.random.uniform(0.0, ARRIVAL_SECONDS)
            await self._seams.clock.sleep(drawn if request.after_seconds is None else request.after_seconds)
            if self._has_failed():
                return
            self.records.append(ClientRecord(request))
            tasks.create_task(self._run(self.records[-1]), name=f"client of request {number}")

    def freeze(self) -> None:
        """The launcher has died or ended: keep what its clients have got until then."""
        for client in self.records:
            self._note(client)
        self.records = [replace(client, events=[*client.events]) for client in self.records]

    def _comes_back(self, client: ClientRecord) -> bool:
        """Whether a client of an earlier launcher comes back: to read its request once more, or to send one that was not in the log. What
        it has got is in the log (I1)."""
        is_known = client.request_id in self.resumed
        if not is_known:  # another request may get its number
            client.request_id = ""
        if client.has_left or (client.end is not None and not is_known and not any(client.choices)):  # refused, with no more to come
            return False
        log = self._log_of(client.request_id) if is_known else None
        written = [choice.token_ids for choice in log.choices] if log is not None else [[] for _ in client.choices]
        if any([*got] != each[: len(got)] for got, each in zip(client.choices, written, strict=False)):
            raise InvariantError("I1", f"the request log has {written} of {client.request_id}, its client got {client.choices}")
        client.failure = None
        return True

    async def _run(self, client: ClientRecord) -> None:
        """One that has read before gets the same once more."""
        before, client.events = client.events, []
        try:
            await self._run_client(client)
        finally:
            self._note(client)
        if client.events[: len(before)] != before[: len(client.events)] or (client.end is not None and len(client.events) < len(before)):
            raise InvariantError("I1", f"{client.request_id} gave {before} before the death of the launcher, and then {client.events}")
