"""A front end's side of its requests at the gateway: reserves, places and cancels them, and hands on their outputs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from flowrt.actors.control import Control
from flowrt.actors.front_end_messages import (
    Attach,
    Attached,
    CancelRequest,
    Origin,
    Outputs,
    Place,
    RequestOutput,
    Reserve,
    Reserved,
    StateQuery,
    StateReport,
    StopChoice,
    Topic,
)
from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.sampling_params import SamplingParams
from flowrt.serving.api_errors import INVALID, NO_REQUEST, OVERLOADED, SLOW_REQUEST, UNAVAILABLE, ApiError

MAX_UNREAD = 1 << 20  # size of all inboxes together
FULL_SECONDS = 0.05  # since the gateway was full: then the next request goes there, as one of another front end may have ended
RESPONSE_SECONDS = 5.0  # the gateway's loop is not this late; then it is stopped or hangs
_KINDS = {"overloaded": OVERLOADED, "unavailable": UNAVAILABLE, "invalid": INVALID}
_GONE = "the graph does not respond"


class Inbox:
    """The outputs of the requests of one HTTP request, in order. `size`: about the number of tokens and logprobs in it."""

    def __init__(self) -> None:
        self._outputs: deque[tuple[int, RequestOutput]] = deque()
        self._has_outputs = asyncio.Event()
        self.size = 0
        self._has_overflowed = False

    def put(self, prompt: int, output: RequestOutput) -> None:
        if not self._has_overflowed:
            self._outputs.append((prompt, output))
            self.size += size_of(output)
            self._has_outputs.set()

    def overflow(self) -> None:
        """Drop all outputs: the client reads too slowly. An error is all that it gets."""
        self._outputs.clear()
        self.size = 0
        self._has_overflowed = True
        self._has_outputs.set()

    async def take(self) -> list[tuple[int, RequestOutput]]:
        """All outputs since the last call, each with the number of its prompt; waits for one. Raises ApiError after `overflow`."""
        await self._has_outputs.wait()
        if self._has_overflowed:
            raise ApiError(SLOW_REQUEST, "the response was read too slowly, so its rest was dropped")
        self._has_outputs.clear()
        taken = list(self._outputs)
        self._outputs.clear()
        self.size = 0
        return taken


def size_of(output: RequestOutput) -> int:
    tokens = [event for event in output.events if isinstance(event, TokenEvent)]
    logprobs = (each for event in tokens for each in event.logprobs + event.prompt_logprobs)
    return sum(len(event.token_ids) for event in tokens) + sum(1 + len(each.top) for each in logprobs)


class OpenRequest:
    """A request that the gateway has admitted. `close` must follow."""

    def __init__(self, client: GatewayClient, number: int, inbox: Inbox, prompt: int) -> None:
        self._client, self.number, self.inbox, self.prompt = client, number, inbox, prompt

    def place(self, token_ids: Sequence[int], origin: Origin | None = None) -> None:
        self._client.send(Place(self.number, tuple(token_ids), origin))

    def stop_choice(self, choice: int) -> None:
        self._client.send(StopChoice(self.number, choice))

    def close(self, is_invalid: bool = False) -> None:
        """Cancel the request unless it has ended. `is_invalid`: what the client sent cannot be served."""
        if self._client.forget(self.number):
            self._client.send(CancelRequest(self.number, is_invalid))
            self._client.note_room()


class GatewayClient:
    """`send` queues a message to the gateway and must not wait. `now`: in seconds."""

    def __init__(self, send: Callable[[Control], None], now: Callable[[], float]) -> None:
        self.send, self._now = send, now
        self._overload, self._full_until = "", 0.0
        self._num_refused = 0  # of `refuse_now`, not reported yet
        self._numbers = count()
        self._requests: dict[int, OpenRequest] = {}
        self._inboxes: set[Inbox] = set()
        self._responses: dict[int, asyncio.Future[Any]] = {}  # to Reserve and Attach
        self._queries: dict[Topic, tuple[int, asyncio.Future[StateReport]]] = {}  # one at a time per topic: probes do not pile up
        self._error: str | None = None  # why no request is taken any more

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @contextmanager
    def inbox(self) -> Iterator[Inbox]:
        """An inbox for the requests of one HTTP request."""
        inbox = Inbox()
        self._inboxes.add(inbox)
        try:
            yield inbox
        finally:
            self._inboxes.discard(inbox)

    @property
    def is_full(self) -> bool:
        """Whether the gateway was full a moment ago, and no request of this front end has ended since."""
        return bool(self._overload) and self._now() < self._full_until

    def refuse_now(self) -> ApiError | None:
        """Refuse a request without a message to the gateway, while it is full. None: it may be admitted."""
        if not self.is_full:
            return None
        self._num_refused += 1
        return ApiError(OVERLOADED, self._overload)

    def note_room(self) -> None:
        """A request has ended: the gateway may admit the next one."""
        self._overload = ""

    def _take_refused(self) -> int:
        number, self._num_refused = self._num_refused, 0
        return number

    async def reserve(self, params: SamplingParams, num_tokens: int, inbox: Inbox, prompt: int) -> OpenRequest:
        """Admit a request; its outputs come to `inbox`, with the number `prompt`. Raises ApiError."""
        if (error := self.refuse_now()) is not None:
            raise error
        number = next(self._numbers)
        request = self._requests[number] = OpenRequest(self, number, inbox, prompt)
        refusal = (await self._request(request, Reserve(number, params, num_tokens, self._take_refused()))).refusal
        if refusal is not None:
            self.forget(number)
            raise ApiError(_KINDS[refusal.kind], refusal.text)
        return request

    async def attach(self, request_id: str, prompt: int, inbox: Inbox) -> tuple[OpenRequest, Sequence[int], Origin]:
        """Get the outputs of a request once more; as `reserve`. Returns its prompt's token ids and origin, too. Raises ApiError."""
        number = next(self._numbers)
        request = self._requests[number] = OpenRequest(self, number, inbox, prompt)
        attached = await self._request(request, Attach(number, request_id, prompt))
        if attached.origin is None:
            self.forget(number)
            raise ApiError(NO_REQUEST, "there is no request with this id; it may have ended long ago, or been cancelled")
        return request, attached.prompt_token_ids, attached.origin

    async def _request(self, request: OpenRequest, control: Control) -> Any:
        """Send, and wait for the response. Closes the request if none comes."""
        response = self._responses[request.number] = asyncio.get_running_loop().create_future()
        try:
            self._check()
            self.send(control)
            async with asyncio.timeout(RESPONSE_SECONDS):
                return await response
        except BaseException as error:
            request.close()
            if isinstance(error, TimeoutError):
                raise ApiError(UNAVAILABLE, _GONE) from None
            raise
        finally:
            del self._responses[request.number]

    async def query(self, topic: Topic) -> StateReport:
        """The gateway's report. Raises ApiError when none comes."""
        self._check()
        if topic not in self._queries:
            report: asyncio.Future[StateReport] = asyncio.get_running_loop().create_future()
            self._queries[topic] = next(self._numbers), report
            self.send(StateQuery(self._queries[topic][0], topic, self._take_refused()))
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                return await asyncio.shield(self._queries[topic][1])
        except TimeoutError:
            raise ApiError(UNAVAILABLE, _GONE) from None

    def forget(self, number: int) -> bool:
        """Drop a request. False: it has ended already."""
        return self._requests.pop(number, None) is not None

    def on_control(self, control: Control) -> None:
        match control:
            case Reserved(number) | Attached(number):
                if isinstance(control, Reserved):
                    self._overload, self._full_until = control.overload, self._now() + FULL_SECONDS
                if (response := self._responses.get(number)) is not None and not response.done():
                    response.set_result(control)
            case Outputs(outputs):
                for output in outputs:
                    if (request := self._requests.get(output.number)) is not None:
                        if output.end is not None:
                            self.forget(output.number)
                            self.note_room()
                        request.inbox.put(request.prompt, output)
                self._bound_inboxes()
            case StateReport(number):
                for topic, (expected, report) in list(self._queries.items()):
                    if expected == number:
                        del self._queries[topic]
                        if not report.done():
                            report.set_result(control)

    def end(self, error: str) -> None:
        """The gateway is gone: end all requests and queries with this error, and take no more."""
        self._error = self._error or error
        for response in (*self._responses.values(), *(report for _, report in self._queries.values())):
            if not response.done():
                response.set_exception(ApiError(UNAVAILABLE, error))
                response.exception()  # a query may have no caller any more
        for number, request in list(self._requests.items()):
            self.forget(number)
            request.inbox.put(request.prompt, RequestOutput(number, (EndEvent(number, "abort"),)))

    def _bound_inboxes(self) -> None:
        """Drop what the slowest clients have not read, while all inboxes together are too large."""
        while sum(inbox.size for inbox in self._inboxes) > MAX_UNREAD:
            max(self._inboxes, key=lambda inbox: inbox.size).overflow()

    def _check(self) -> None:
        if self._error is not None:
            raise ApiError(UNAVAILABLE, self._error)
