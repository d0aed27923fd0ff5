"""The HTTP API of a front end: routes, the key, and the errors of all routes. An ASGI application without a framework.

The key and the route are decided on the same raw path, so that no rewriting of a URL comes between them. A route is private unless it is
listed as public.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from flowrt.actors.front_end_messages import Topic
from flowrt.errors import shown
from flowrt.seams import Seams
from flowrt.serving.api_errors import (
    FORBIDDEN,
    INVALID,
    NO_MODEL,
    NO_REQUEST,
    NO_ROUTE,
    UNAUTHORIZED,
    UNAVAILABLE,
    WRONG_METHOD,
    ApiError,
    internal_error,
)
from flowrt.serving.api_request import CompletionRequest, read_chat_request, read_completion_request
from flowrt.serving.completions import Completions, PromptEncoder
from flowrt.serving.front_end_settings import FrontEndSettings
from flowrt.serving.gateway_client import GatewayClient
from flowrt.serving.http_exchange import (
    REQUEST_ID,
    BodyBudget,
    ClientLeftError,
    HttpExchange,
    Receive,
    Scope,
    Send,
    given_id,
    is_large,
    large_body,
    without_slash,
)
from flowrt.serving.http_server import EarlyRefusal
from flowrt.serving.json_body import Fields, Prompt, TokenIds, invalid
from flowrt.serving.page_files import HEADERS, read_page_files
from flowrt.serving.responses_request import ResponsesReader
from flowrt.serving.tokenizer import Tokenizer

log = logging.getLogger("flowrt.front_end")

REQUESTS, MODELS = b"/v1/requests/", b"/v1/models/"  # an id follows
GENERATING = CHAT, COMPLETIONS, RESPONSES = b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"
PUBLIC = frozenset({b"/health", b"/ready"})
PAGE_FILES = read_page_files()  # a browser that loads them has no key to send
Handler = Callable[[HttpExchange], Awaitable[None]]


MAX_COUNTED_TOKENS = 1 << 17  # of /tokenize and /detokenize, also where the model takes fewer: a client counts in order to cut


class HttpApp:
    def __init__(
        self,
        settings: FrontEndSettings,
        client: GatewayClient,
        completions: Completions,
        encoder: PromptEncoder,
        tokenizer: Tokenizer,
        seams: Seams,
    ) -> None:
        self._settings, self._client, self._completions = settings, client, completions
        self._encoder, self._tokenizer, self._seams = encoder, tokenizer, seams
        self._budget, self._tokenizing = BodyBudget(), asyncio.Lock()
        self._max_counted = max(MAX_COUNTED_TOKENS, settings.max_model_len)
        self._started = int(seams.wall_now())
        self._key = settings.api_key.encode()
        self._routes: dict[bytes, dict[str, Handler]] = {
            b"/health": {"GET": partial(self._respond_state, topic="health")},
            b"/ready": {"GET": partial(self._respond_state, topic="ready")},
            b"/metrics": {"GET": partial(self._report, topic="metrics", kind="text/plain; version=0.0.4; charset=utf-8")},
            b"/page/state": {"GET": partial(self._report, topic="page")},
            **{path: {"GET": self._page_file} for path in PAGE_FILES},
            b"/version": {"GET": self._version},
            b"/v1/models": {"GET": self._models},
            CHAT: {"POST": partial(self._generate, read=read_chat_request)},
            COMPLETIONS: {"POST": partial(self._generate, read=read_completion_request)},
            RESPONSES: {"POST": self._create_response},
            b"/tokenize": {"POST": self._tokenize},
            b"/detokenize": {"POST": self._detokenize},
        }
        self._admin_routes: dict[bytes, dict[str, Handler]] = {
            b"/admin/status": {"GET": partial(self._report, topic="status")},
            b"/admin/drain": {"POST": self._drain},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, self._budget, self._new_id)
        exchange.cors_headers = self._settings.cors.response_headers(exchange.headers)
        try:
            await self._dispatch(exchange)
        except ClientLeftError:
            return
        except ApiError as error:
            await self._respond_error(exchange, error)
        except Exception:
            log.exception("request %s failed", exchange.id)
            await self._respond_error(exchange, internal_error(exchange.id))
        finally:
            exchange.release_body()

    async def _respond_error(self, exchange: HttpExchange, error: ApiError) -> None:
        try:
            await exchange.respond_error(error)
        except ClientLeftError:
            return

    async def _dispatch(self, exchange: HttpExchange) -> None:
        if self._settings.cors.is_preflight(exchange.method, exchange.headers):
            self._check_host(exchange.headers)
            await exchange.respond(200, b"", "text/plain", **self._settings.cors.preflight_headers(exchange.headers))
            return
        self._check_access(exchange.path, exchange.headers, exchange.is_admin)
        methods = self._routes.get(exchange.path) or (self._admin_routes.get(exchange.path) if exchange.is_admin else None)
        if exchange.path.startswith(REQUESTS):
            methods = {"GET": self._repeat_response}
        if exchange.path.startswith(MODELS):
            methods = {"GET": self._find_model}
        if methods is None:
            known = sorted([*(path.decode() for path in self._routes if path not in PAGE_FILES), "/v1/models/NAME", "/v1/requests/ID"])
            raise ApiError(NO_ROUTE, f"there is no such path; the paths are {', '.join(known)}")
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)  # the server leaves out the body
        if handler is None:
            allow = "GET, HEAD" if "GET" in methods else ", ".join(methods)
            raise ApiError(WRONG_METHOD, f"use {' or '.join(methods)} for this path", allow=allow)
        await handler(exchange)

    def refuse_early(self, method: bytes, path: bytes, headers: Mapping[bytes, bytes], is_admin: bool) -> EarlyRefusal | None:
        """Refuse a request by its headers alone: its body is too long, or the gateway is full. None: it goes on as usual."""
        path, has_large_body = without_slash(path), is_large(headers)
        if has_large_body or (self._client.is_full and method == b"POST" and path in GENERATING):
            with suppress(ApiError):
                self._check_access(path, headers, is_admin)
                if (error := large_body() if has_large_body else self._client.refuse_now()) is not None:
                    request_id = given_id(headers) or self._new_id()
                    return EarlyRefusal(error, {"x-request-id": request_id, **self._settings.cors.response_headers(headers)})
        return None

    def _check_access(self, path: bytes, headers: Mapping[bytes, bytes], is_admin: bool) -> None:
        """Raises ApiError. Without a key, only programs that name this machine as their host are served, so that no web page of another
        host gets a response. Only their owner reaches admin sockets."""
        if path in PUBLIC or is_admin:
            return
        if self._key:
            if path not in PAGE_FILES and not self._has_key(headers):
                raise ApiError(UNAUTHORIZED, "the key is missing or wrong; send it as Authorization: Bearer KEY")
        else:
            self._check_host(headers)

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        if not self._key and self._settings.hosts and _host_of(headers) not in self._settings.hosts:
            raise ApiError(FORBIDDEN, "the Host header does not name this server; name it by its address, or start it with --api-key")

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return compare_digest(given.strip(), self._key) and scheme.lower() == b"bearer"

    # Routes.

    async def _respond_state(self, exchange: HttpExchange, topic: Topic) -> None:
        report = await self._client.query(topic)
        state: dict[str, Any] = {"status": "ok" if report.is_ok else "unavailable"}
        if self._has_key(exchange.headers) if self._key else report.text:
            state["problems"] = report.text
        await exchange.respond(200 if report.is_ok else UNAVAILABLE.status, msgspec.json.encode(state))

    async def _report(self, exchange: HttpExchange, topic: Topic, kind: str = "application/json") -> None:
        """Respond with the gateway's report. Raises ApiError."""
        report = await self._client.query(topic)
        if not report.is_ok:
            raise ApiError(UNAVAILABLE, "the state of the graph could not be read; its log has the reason")
        await exchange.respond(200, report.text.encode(), kind)

    async def _drain(self, exchange: HttpExchange) -> None:
        await self._client.query("drain")
        await _respond_json(exchange, {"status": "draining"})

    async def _page_file(self, exchange: HttpExchange) -> None:
        file = PAGE_FILES[exchange.path]
        await exchange.respond(200, file.content, file.kind, **HEADERS)

    async def _version(self, exchange: HttpExchange) -> None:
        await _respond_json(exchange, {"version": self._settings.version})

    async def _models(self, exchange: HttpExchange) -> None:
        await _respond_json(exchange, {"object": "list", "data": [self._model]})

    async def _find_model(self, exchange: HttpExchange) -> None:
        name = unquote_to_bytes(exchange.path.removeprefix(MODELS)).decode(errors="replace")
        if name != self._settings.model_name:
            raise ApiError(NO_MODEL, f"there is no model {shown(name)}; this server has {self._settings.model_name}", "model")
        await _respond_json(exchange, self._model)

    @property
    def _model(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "id": settings.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "flowrt",
            "max_model_len": settings.max_model_len,
            "default_sampling_params": settings.sampling_defaults,
        }

    async def _create_response(self, exchange: HttpExchange) -> None:
        reader = ResponsesReader()
        try:
            await self._generate(exchange, read=reader.read)
        except ApiError as error:
            raise reader.renamed(error) from None

    async def _generate(self, exchange: HttpExchange, read: Callable[[bytes, str, Mapping[str, Any]], CompletionRequest]) -> None:
        model, created = self._settings.model_name, int(self._seams.wall_now())
        # Only the coroutine may hold the request, since it drops the prompts.
        defaults = self._settings.sampling_defaults
        response = self._completions.respond(read(await exchange.read_body(), model, defaults), exchange, model, created)
        await self._respond(exchange, response)

    async def _repeat_response(self, exchange: HttpExchange) -> None:
        name = exchange.path.removeprefix(REQUESTS)
        if not REQUEST_ID.fullmatch(name):
            raise ApiError(NO_REQUEST, "this is not the id of a request")
        if exchange.query not in (b"", b"stream=true", b"stream=false"):
            raise ApiError(INVALID, "give stream=true, stream=false, or nothing behind the question mark")
        exchange.id = name.decode()
        await self._respond(exchange, self._completions.repeat_response(exchange, exchange.headers.get(b"last-event-id", b"")))

    async def _respond(self, exchange: HttpExchange, response: Coroutine[Any, Any, None]) -> None:
        """Respond until the client leaves; then its request is cancelled, or waits for it to come back."""
        error: ApiError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(exchange.wait_left(), name=f"client of {exchange.id}")
                try:
                    await response
                except ApiError as raised:
                    error = raised
                finally:
                    watch.cancel()
        except* ClientLeftError:
            pass
        if error is not None:
            if error.kind is UNAVAILABLE:
                log.warning("request %s: %s", exchange.id, error.message)
            raise error

    async def _tokenize(self, exchange: HttpExchange) -> None:
        fields = Fields(await exchange.read_body())
        fields.check_model(self._settings.model_name)
        chat = fields.take_chat()
        prompts = (*fields.take_prompts(), *([] if chat is None else [chat]))
        add_special_tokens = fields.take_bool("add_special_tokens", chat is None)
        fields.refuse_rest()
        if len(prompts) != 1 or isinstance(prompts[0], TokenIds):
            raise ApiError(INVALID, "give either prompt, which is a text, or messages", "prompt")
        await self._respond(exchange, self._respond_tokens(exchange, prompts[0], add_special_tokens))

    async def _respond_tokens(self, exchange: HttpExchange, prompt: Prompt, add_special_tokens: bool) -> None:
        async with self._tokenizing:  # these texts are not admitted: one at a time goes before the prompts of requests
            token_ids = await self._encoder.encode(prompt, add_special_tokens, self._max_counted)
        await _respond_json(exchange, {"tokens": token_ids, "count": len(token_ids), "max_model_len": self._settings.max_model_len})

    async def _detokenize(self, exchange: HttpExchange) -> None:
        fields = Fields(await exchange.read_body())
        fields.check_model(self._settings.model_name)
        tokens = fields.take_token_ids("tokens")
        fields.refuse_rest()
        token_ids = tokens.read() if tokens.num_tokens <= self._max_counted else None
        if token_ids is None or max(token_ids, default=0) >= self._settings.vocab_size:
            bounds = f"at most {self._max_counted} token ids below {self._settings.vocab_size}"
            raise invalid("tokens", f"must be {bounds}")
        await _respond_json(exchange, {"prompt": self._tokenizer.decode(token_ids, skip_special_tokens=False)})

    def _new_id(self) -> str:
        return self._seams.new_incarnation() + self._seams.new_incarnation()


async def _respond_json(exchange: HttpExchange, value: Any) -> None:
    await exchange.respond(200, msgspec.json.encode(value))


def _host_of(headers: Mapping[bytes, bytes]) -> str:
    """The Host header without its port."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host
