"""Serves an ASGI application on the shared socket, with bounds on connections, headers and waiting that uvicorn does not have by itself.

Each connection that is accepted gets a response to what it sends, if only 503. So a refused one is closed in two steps: a socket that is
closed while its client still sends is reset, and the client may lose the response.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from itertools import islice
from typing import Any, NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from flowrt.processes.descriptors import MAX_LEAVING
from flowrt.serving.accepting import accept_connections
from flowrt.serving.api_errors import INVALID, LARGE_BODY, LARGE_HEADERS, SLOW_REQUEST, UNAVAILABLE, ApiError
from flowrt.serving.connection_table import ConnectionTable
from flowrt.serving.http_exchange import is_large

log = logging.getLogger("flowrt.front_end")

MAX_HEADER_BYTES = 32 << 10
MAX_AHEAD = 16  # requests that wait for the responses to earlier ones, and requests of one read of the socket
MAX_PIECES = 4096  # of a chunked body, in one read of the socket
MAX_HEADERS = 256  # each takes some hundred bytes of memory, however short it is
HEADER_SECONDS = 10.0  # from the connection, or from the first byte of a later request, to the end of its headers
IDLE_SECONDS = 75  # between two requests of a connection
LEAVE_SECONDS = 1.0  # for the client of a refused connection to read the response
MAX_LOOKS = 64  # at connections that may give way to a new one
MAX_SKIPPED_BYTES = 64 << 10  # of a body that is received but not kept, so that its connection can go on after an early refusal
_LARGE_HEADERS = ApiError(LARGE_HEADERS, f"the headers are longer than {MAX_HEADER_BYTES >> 10} KiB, or more than {MAX_HEADERS}")
_CHUNKS = ApiError(INVALID, "a chunked body may have no trailers, no long extensions, and no thousands of tiny chunks")
_TOO_FAR_AHEAD = ApiError(INVALID, f"more than {MAX_AHEAD} requests were sent ahead of their responses; wait for these")
_TOO_MANY = ApiError(UNAVAILABLE, "too many connections; close idle ones, or raise serving.max_connections")


class EarlyRefusal(NamedTuple):
    """The response to a request by its headers alone, with further headers."""

    error: ApiError
    headers: Mapping[str, str]


RefuseEarly = Callable[[bytes, bytes, Mapping[bytes, bytes], bool], EarlyRefusal | None]  # of method, path, headers, is_admin


class _AnyLength(int):
    """The length of a body that nothing announces, for the server, which counts down from it to 0."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _AnyLength:
        return self


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Headers have a length and a time limit, and so has what is between the pieces of a body. With TLS a connection
    counts, and waits, from its acceptance on (`begin_handshake`)."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        table: ConnectionTable,
        is_admin: bool,
        refuse_early: RefuseEarly,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={}, _loop=loop)
        self._table, self._is_admin, self._refuse_early = table, is_admin, refuse_early
        self._waiting: dict[BoundedProtocol, None] = table.waiting
        self._early: EarlyRefusal | None = None  # of a request whose body is still to come
        self._num_header_bytes = 0
        self._num_in_read = self._num_pieces = 0  # requests, and pieces of bodies, of one read of the socket
        self._num_bytes_between = 0  # since the latest piece of the body: sizes of chunks, their extensions, trailers
        self._unfinished: list[RequestResponseCycle] = []  # several when the client sends requests before it gets responses
        self._header_timer: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._is_counted = self._is_refused = False
        self._refusal: tuple[ApiError, Mapping[str, str]] | None = None  # follows the responses to earlier requests
        self._cancel_handshake: Callable[[], object] | None = None

    def make_room(self) -> bool:
        """Whether there may be one connection more; if necessary, another one gives way."""
        if len(self.connections) < self._table.max_connections or self._is_admin:
            return True
        idle = [each for each in islice(self._waiting, MAX_LOOKS) if not each._has_input()]
        if idle:  # one whose client still reads a response is the last choice
            min(idle, key=BoundedProtocol._has_output)._give_way()
        return bool(idle)

    def _has_output(self) -> bool:
        return self._cancel_handshake is None and self.transport.get_write_buffer_size() > 0

    def _has_input(self) -> bool:
        """Whether something has arrived that is not read yet: a request, perhaps, which must not end without a response."""
        if self._cancel_handshake is not None:
            return False
        number, poll = self.transport.get_extra_info("socket").fileno(), select.poll()
        if number < 0:  # it is closed
            return False
        poll.register(number, select.POLLIN)
        return bool(poll.poll(0))

    def begin_handshake(self, cancel: Callable[[], object]) -> None:
        """`connection_made` follows when the handshake succeeds, then `end_handshake`. A connection for which there is no room gets its
        response then."""
        self._cancel_handshake = cancel
        self._is_counted = self.make_room()
        if self._is_counted:
            self.connections.add(self)
            self._waiting[self] = None
        else:
            self._table.begin_leaving(self, self.loop.time(), cancel)

    def end_handshake(self) -> None:
        if self._cancel_handshake is not None:  # it has failed
            self._waiting.pop(self, None)
            self._table.end_leaving(self)
            self.connections.discard(self)

    def connection_made(self, transport: Any) -> None:
        self._table.end_leaving(self)
        if not (self._is_counted or self.make_room()):
            self._cancel_handshake = None
            self._refuse_for_room(transport)
            return
        self._is_counted, self._cancel_handshake = True, None
        super().connection_made(transport)
        self._note_wait()
        state = {"abort": transport.abort, "flow": self.flow, "is_admin": self._is_admin, "leave_out_chunks": self._leave_out_chunks}
        self.app_state = state  # in the scope of each request
        self._await_headers()

    def _leave_out_chunks(self) -> None:
        """The body of the present response has any length, and ends with the connection."""
        self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._waiting.pop(self, None)
        self._table.end_leaving(self)
        for cycle in self._unfinished:
            cycle.disconnected = True
            cycle.message_event.set()
        if self._is_counted:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._in_headers:
            self._num_header_bytes += len(data)
            self._await_headers()
        else:
            self._num_bytes_between += len(data)
        self._unset_keepalive_if_required()
        self._num_in_read = self._num_pieces = 0
        self._parse(data)
        if self._in_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(self.transport, _LARGE_HEADERS)
        if not self._in_headers and self._num_bytes_between > MAX_HEADER_BYTES:
            self._refuse(self.transport, _CHUNKS)

    def _parse(self, data: bytes) -> None:
        """HTTP/1.1 is not left for another protocol. The parser stops behind the headers of a request that offers one, as those of Java's
        client do; a new parser gets them without the offer, and what follows."""
        try:
            while data:
                data = self._parse_until_offer(data)
        except HttpParserError:
            self.send_400_response("")

    def _parse_until_offer(self, data: bytes) -> bytes:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:
            (num_parsed,) = offer.args
        else:
            return b""
        if self.parser.get_method() == b"CONNECT":
            raise HttpParserError
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self._num_in_read -= 1  # it begins once more
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the first one of uvicorn
        return b"\r\n".join([*lines, b"", data[num_parsed:]])

    def on_message_begin(self) -> None:
        """A read may bring thousands of requests, each of which costs more than its bytes."""
        self._num_in_read += 1
        if self._num_in_read > MAX_AHEAD or len(self.pipeline) >= MAX_AHEAD:
            self._refuse(self.transport, _TOO_FAR_AHEAD)
        if self._is_refused:
            raise HttpParserError  # nothing more is parsed
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_refused:
            return
        if not self._in_headers:  # the application would see it among the headers
            self._refuse(self.transport, _CHUNKS)
        elif len(self.headers) == MAX_HEADERS:
            self._refuse(self.transport, _LARGE_HEADERS)
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_refused or self.parser.should_upgrade():
            return
        self._in_headers = False
        if self._num_header_bytes > MAX_HEADER_BYTES:  # perhaps with a part of the body
            length = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if length > MAX_HEADER_BYTES:
                self._refuse(self.transport, _LARGE_HEADERS)
                return
        if (refusal := self._early_refusal()) is not None:
            if refusal.error.kind is LARGE_BODY:
                self._refuse(self.transport, refusal.error, refusal.headers)
            else:
                self._early = refusal  # the timer of the headers goes on until its body is here
            return
        self._cancel_timer()
        self._unset_keepalive_if_required()  # an early refusal may have set it in the same call of data_received
        super().on_headers_complete()
        self.flow.resume_reading()  # else the end of a client that has sent another request ahead is not noticed; MAX_AHEAD bounds these
        self._unfinished = [cycle for cycle in (*self._unfinished, self.cycle) if not cycle.response_complete]

    def _early_refusal(self) -> EarlyRefusal | None:
        """A refusal for which the request needs no task, and its body no memory. None where the body is long, but not too long; where an
        earlier request waits for its response, or the client does not read: uvicorn bounds the requests of such a client."""
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"")
        is_short = length.isdigit() and int(length) <= MAX_SKIPPED_BYTES and not self.expect_100_continue
        if not (is_short or is_large(headers)) or self.flow.write_paused or any(not cycle.response_complete for cycle in self._unfinished):
            return None
        path = self.url.partition(b"?")[0]
        return self._refuse_early(self.parser.get_method(), path, headers, self._is_admin)

    def on_body(self, body: bytes) -> None:
        self._num_bytes_between = 0
        self._num_pieces += 1
        if self._num_pieces > MAX_PIECES:
            self._refuse(self.transport, _CHUNKS)
            raise HttpParserError  # nothing more is parsed
        if not self._is_refused and self._early is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self._early is not None:
            self._respond_early(self._early)
        elif not self._is_refused:
            super().on_message_complete()
            self._note_wait()
        self._in_headers, self._num_header_bytes, self._num_bytes_between = True, 0, 0

    def _respond_early(self, refusal: EarlyRefusal) -> None:
        self._early = None
        self._cancel_timer()
        self._is_refused = not (self.parser.should_keep_alive() and self.parser.get_http_version() != "1.0")
        self.transport.write(_response(refusal.error, refusal.headers, closes=self._is_refused))
        if self._is_refused:
            self.transport.close()
        else:
            self.on_response_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_wait()
        if self._refusal is not None and not self._has_request and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._end_refused(self.transport, *self._refusal)

    def _note_wait(self) -> None:
        """Put the connection at the end of those that wait, or take it from there when a whole request has arrived."""
        self._waiting.pop(self, None)
        if not (self._has_request or self._is_admin or self.transport.is_closing()):
            self._waiting[self] = None

    def _give_way(self) -> None:
        """Close the connection, with output that its client does not read. There is no response between two requests."""
        del self._waiting[self]
        self.connections.discard(self)
        if self._cancel_handshake is not None:
            self._cancel_handshake()
        elif self._num_header_bytes or self.cycle is None:
            self._refuse_for_room(self.transport)
        else:
            self.transport.abort()

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._on_slow_headers)

    def _on_slow_headers(self) -> None:
        self._header_timer = None
        if self._early is not None:
            self._refuse(self.transport, self._early.error)
            return
        if any(not cycle.response_complete for cycle in self._unfinished):  # the rest of the next request may follow its response
            self._await_headers()
            return
        self._refuse(self.transport, ApiError(SLOW_REQUEST, f"the headers did not arrive within {HEADER_SECONDS:g} s"))

    def _cancel_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.transport, ApiError(INVALID, "the request is not HTTP/1.1"))

    @property
    def _has_request(self) -> bool:
        """Whether a whole request waits for its response."""
        return any(not (cycle.response_complete or cycle.more_body) for cycle in self._unfinished)

    @property
    def _is_responding(self) -> bool:
        return any(cycle.response_started and not cycle.response_complete for cycle in self._unfinished)

    def _refuse_for_room(self, transport: asyncio.Transport) -> None:
        self._table.note_refusal(self.loop.time())
        self._refuse(transport, _TOO_MANY)

    def _refuse(self, transport: asyncio.Transport, error: ApiError, headers: Mapping[str, str] = {}) -> None:
        if self._is_refused or transport.is_closing():
            self._is_refused = True
            return
        self._is_refused = True
        self._cancel_timer()
        if self.pipeline and self.cycle.more_body:  # the one that is refused has no task yet
            self.pipeline.popleft()
        if self._has_request:
            self._refusal = error, headers
        else:
            self._end_refused(transport, error, headers)

    def _end_refused(self, transport: asyncio.Transport, error: ApiError, headers: Mapping[str, str]) -> None:
        if not self._is_responding:
            transport.write(_response(error, headers))
        if any(not cycle.response_complete for cycle in self._unfinished) or not transport.can_write_eof():
            transport.close()  # the rest of a response may follow; TLS says goodbye by itself
            return
        transport.write_eof()
        self.connections.discard(self)
        self._header_timer = self.loop.call_later(LEAVE_SECONDS, transport.close)
        self._table.begin_leaving(self, self.loop.time(), transport.close)


def _response(error: ApiError, headers: Mapping[str, str] = {}, *, closes: bool = True) -> bytes:
    """The whole response to what never reaches the application. `closes`: its connection."""
    kind, body = error.kind, error.body
    fields = {"content-type": "application/json", "x-content-type-options": "nosniff", "content-length": str(len(body))}
    fields |= headers
    fields |= {"connection": "close"} if closes else {}
    fields |= {} if kind.retry_seconds is None else {"retry-after": str(kind.retry_seconds)}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {kind.status} {HTTPStatus(kind.status).phrase}\r\n{lines}\r\n".encode() + body


class HttpServer:
    """`certificate` and `private_key`: files for TLS; "" without it. `refuse_early` may refuse a request by its headers. `max_leaving`:
    refused connections beside `max_connections`. Raises OSError for files that are not usable."""

    def __init__(
        self,
        application: Callable[..., Any],
        max_connections: int,
        certificate: str,
        private_key: str,
        refuse_early: RefuseEarly,
        max_leaving: int = MAX_LEAVING,
    ) -> None:
        self._config = Config(
            application,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            ssl_certfile=certificate or None,
            ssl_keyfile=private_key or None,
        )
        self._config.load()
        self._state = ServerState()
        self._table, self._refuse_early = ConnectionTable(max_connections, max_leaving), refuse_early
        self._accepting: list[asyncio.Task[None]] = []

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    async def start(self, listener: socket.socket, is_admin: bool = False) -> None:
        """Serve on a socket. `is_admin`: only its owner reaches it, who may call all routes."""
        loop = asyncio.get_running_loop()

        def new_protocol() -> BoundedProtocol:
            return BoundedProtocol(self._config, self._state, self._table, is_admin, self._refuse_early, loop)

        context = None if is_admin else self._config.ssl
        self._accepting.append(
            loop.create_task(
                accept_connections(listener, context, new_protocol, self._table.wait_for_room), name="accepting of connections"
            )
        )

    async def close(self, seconds: float) -> None:
        """Accept no more connections, let the responses in progress end within `seconds`, then close what is left."""
        for accepting in self._accepting:
            accepting.cancel()
        if self._accepting:
            await asyncio.wait(self._accepting)
        for connection in list(self._state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(seconds):
                while tasks := list(self._state.tasks):
                    await asyncio.wait(tasks)
        except TimeoutError:
            for task in self._state.tasks:
                task.cancel()
        await asyncio.sleep(0)
        for connection in list(self._state.connections):
            connection.transport.close()
        self._table.close_leaving()
