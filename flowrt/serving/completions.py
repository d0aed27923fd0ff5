"""Answers one chat or completion request: admits it, tokenizes its prompts, submits them, and writes the response as it comes."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import msgspec

from flowrt.actors.control import Request
from flowrt.actors.front_end_messages import Origin
from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.engine.validation import find_problem, num_new_tokens
from flowrt.errors import TokenizerError
from flowrt.graph.settings import GraphLimits
from flowrt.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams
from flowrt.serving.api_errors import INVALID, NO_REQUEST, TOO_LONG, UNAVAILABLE, ApiError, internal_error
from flowrt.serving.api_request import CompletionRequest
from flowrt.serving.api_response import PromptOutput, ResponseBuilder, Usage
from flowrt.serving.chat import Chat
from flowrt.serving.choice_text import RequestText, TextPiece, merged
from flowrt.serving.gateway_client import GatewayClient, Inbox, OpenRequest
from flowrt.serving.http_exchange import HttpExchange
from flowrt.serving.json_body import Prompt, TokenIds, estimated_tokens, invalid
from flowrt.serving.output_formats import NO_FORMATS, OutputFormats, markers
from flowrt.serving.responses_response import ResponsesBuilder
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tokenizer_process import TokenizerProcesses, too_long
from flowrt.serving.tool_calls import call_id_of, check_tools, new_parser
from flowrt.serving.tool_choice import argument_schema
from flowrt.structured_outputs import checked_outputs

log = logging.getLogger("flowrt.front_end")

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object, in the text of an exception
MAX_POSITION_DIGITS = 18  # of each number in the id of an event
MAX_MARKER_TOKENS = 16  # of what begins the reasoning, with the white space behind it
MAX_PIECES = 4096  # of a whole response, before they become one
MAX_REPEATED_TOKENS = 1 << 20
MAX_WRITE_BYTES = 64 << 10  # of events at once: then it waits for a client that reads slowly


_NAMES = tuple(each.name for each in fields(CompletionRequest) if each.name not in ("prompts", "params"))


class RequestForm(msgspec.Struct, frozen=True):
    """`created`, `model`: of the response. `text`: of the prompt, where it is repeated. `flags`: the other fields of CompletionRequest.
    `nonce`: of the ids of calls. As JSON, since a schema may have numbers of any size."""

    created: int
    model: str
    text: str
    params: SamplingParams
    flags: dict[str, Any]
    nonce: str = ""

    @property
    def request(self) -> CompletionRequest:
        """The request without its prompts. Raises TypeError for the form of another version."""
        return CompletionRequest(prompts=(), params=self.params, **self.flags)


def form_of(request: CompletionRequest, created: int, model: str, text: str, nonce: str = "") -> bytes:
    flags = {name: getattr(request, name) for name in _NAMES}
    return msgspec.json.encode(RequestForm(created, model, text, request.params, flags, nonce))


def read_form(form: bytes) -> RequestForm:
    """Raises msgspec.MsgspecError for the form of another version."""
    return msgspec.json.decode(form, type=RequestForm)


class PromptEncoder:
    """Turns prompts into token ids within the limits of the graph."""

    def __init__(self, processes: TokenizerProcesses, limits: GraphLimits, max_model_len: int) -> None:
        self._processes, self._limits, self.max_model_len = processes, limits, max_model_len

    async def encode(self, prompt: Prompt, add_special_tokens: bool, max_tokens: int | None = None) -> tuple[int, ...]:
        """Token ids of a prompt, at most `max_tokens` (default: `max_model_len`). Raises ApiError."""
        max_tokens = max_tokens or self.max_model_len
        if isinstance(prompt, TokenIds):
            if prompt.num_tokens > max_tokens:
                raise ApiError(TOO_LONG, too_long(prompt.num_tokens, max_tokens), "prompt")
            await asyncio.sleep(0)  # other clients are served between the prompts of a request
            return prompt.read()
        try:
            return tuple(await self._processes.encode(prompt, max_tokens=max_tokens, add_special_tokens=add_special_tokens))
        except TokenizerError as error:
            _check_available("prompts cannot be tokenized", error)
            # Clients learn no path of this machine.
            text = _ADDRESS.sub("", str(error).replace(str(self._processes.directory), "the model"))
            kind = TOO_LONG if error.is_too_long else INVALID
            raise ApiError(kind, text, error.param or ("messages" if isinstance(prompt, Chat) else "prompt")) from None

    async def check_constraints(self, request: CompletionRequest) -> None:
        """Compile the grammar of a request in another process. Raises ApiError."""
        try:
            await self._processes.check(request.params)
        except TokenizerError as error:
            _check_available("grammars cannot be compiled", error)
            if request.outputs_name == "tools":
                await self._check_tools(request)
            name = request.outputs_name if error.param == "structured_outputs" else error.param
            raise invalid(name or request.outputs_name, error.text) from None

    async def _check_tools(self, request: CompletionRequest) -> None:
        """Raises ApiError for the first tool whose schema cannot be compiled."""
        (chat,) = request.prompts
        for index, tool in enumerate((chat.tools if isinstance(chat, Chat) else None) or ()):
            if tool in (request.tools or ()):
                try:
                    await self._processes.check(SamplingParams(structured_outputs=checked_outputs({"json": argument_schema(tool)})))
                except TokenizerError as error:
                    if error.is_unavailable:
                        return
                    raise invalid(f"tools[{index}].function.parameters", error.text) from None

    def check(self, token_ids: tuple[int, ...], request: CompletionRequest) -> None:
        """Check a request as the gateway does. Raises ApiError."""
        params = request.params
        max_tokens = num_new_tokens(params, len(token_ids), self._limits, self.max_model_len)
        whole = Request(id="", attempt=0, prompt_token_ids=token_ids, max_tokens=max_tokens, params=params)
        if (problem := find_problem(whole, self._limits, self.max_model_len, self._processes.vocab_size)) is not None:
            names = {"prompt": request.prompt_name, "max_tokens": request.max_tokens_name, "prompt_logprobs": request.prompt_logprobs_name}
            param = names.get(problem.param, problem.param)
            raise ApiError(TOO_LONG if problem.is_too_long else INVALID, problem.text, param)


def _check_available(what: str, error: TokenizerError) -> None:
    """Raises ApiError for an error that is no fault of the request."""
    if error.is_unavailable:
        log.warning("%s: %s", what, error)
        raise ApiError(UNAVAILABLE, f"{what} now; the log of the server has the reason") from None


class Completions:
    """Answers the requests of one front end. `stream_interval`: tokens per event of a stream. `has_log`: the graph has a request log, so
    that clients may read a response again."""

    def __init__(
        self,
        client: GatewayClient,
        encoder: PromptEncoder,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        stream_interval: int,
        has_log: bool = False,
        formats: OutputFormats = NO_FORMATS,
    ) -> None:
        self._client, self._encoder, self._tokenizer, self._has_log = client, encoder, tokenizer, has_log
        self._eos_token_ids, self._stream_interval = frozenset(eos_token_ids), stream_interval
        self._formats = formats
        self._marker_ids = tokenizer.special_tokens_of(markers(formats.tool_format) | markers(formats.reasoning_format))
        self._writing_logprobs = asyncio.Lock()

    async def respond(self, request: CompletionRequest, exchange: HttpExchange, model: str, created: int) -> None:
        """Raises ApiError. A request whose client leaves is cancelled, because this call is. The caller must not keep the request: its
        prompts are dropped, and leave the budget of bodies, once they have token ids."""
        check_tools(request, self._formats)
        with ExitStack() as stack:
            inbox = stack.enter_context(self._client.inbox())
            texts, prompts = await self._place(request, exchange, model, created, inbox, stack)
            request = replace(request, prompts=())
            exchange.release_body()
            builder = self._builder(exchange.id, created, model, request, exchange.nonce)
            response = _Response(inbox, texts, prompts, builder, exchange, request, self._writing_logprobs)
            await response.write(self._stream_interval, self._has_log)

    async def _place(
        self, request: CompletionRequest, exchange: HttpExchange, model: str, created: int, inbox: Inbox, stack: ExitStack
    ) -> tuple[list[RequestText], list[PromptOutput]]:
        """Admit a request per prompt, then tokenize and place them. `stack` closes them."""
        opened: list[OpenRequest] = []
        for index, prompt in enumerate(request.prompts):  # before the costly work
            params = msgspec.structs.replace(request.params, stop=())
            opened.append(await self._client.reserve(params, estimated_tokens(prompt), inbox, index))
            stack.push(partial(_close, opened[-1]))
        await self._encoder.check_constraints(request)
        texts, prompts, forms, count = list[RequestText](), list[PromptOutput](), list[bytes](), len(request.prompts)
        for index, prompt in enumerate(request.prompts):
            try:
                token_ids = await self._encoder.encode(prompt, request.add_special_tokens)
                self._encoder.check(token_ids, request)
            except ApiError as error:
                if count == 1 or error.param != request.prompt_name:
                    raise
                raise ApiError(error.kind, f"{error.param}[{index}]: {error.message}", f"{error.param}[{index}]") from None
            prompts.append(self._prompt(request, prompt, token_ids))
            _check_repeated_prompts(request, sum(len(each.token_ids) for each in prompts))
            request = replace(request, is_in_reasoning=self._is_in_reasoning(prompt, token_ids))
            texts.append(self._text(request, opened[index], token_ids))
            forms.append(form_of(request, created, model, prompts[-1].text, exchange.nonce) if self._has_log else b"")
        for index, form in enumerate(forms):  # nothing is computed for a request with a bad prompt
            origin = Origin(exchange.id, index, count, form, exchange.is_named) if self._has_log else None
            opened[index].place(prompts[index].token_ids, origin)
        return texts, prompts

    async def repeat_response(self, exchange: HttpExchange, position: bytes) -> None:
        """Write the response to an earlier request, whose id `exchange.id` is, as it comes. `position`: the id of the last event of its
        stream that the client has; b"": none. Raises ApiError."""
        if not self._has_log:
            raise ApiError(NO_REQUEST, "only a graph with a request log has responses that can be read again; see reliability.request_log")
        with ExitStack() as stack:
            inbox = stack.enter_context(self._client.inbox())
            texts, prompts, forms, count = [], [], list[RequestForm](), 1
            while len(forms) < count:
                opened, token_ids, origin = await self._client.attach(exchange.id, len(forms), inbox)
                stack.callback(opened.close)
                try:
                    count, form = origin.num_prompts, read_form(origin.form)
                    request = replace(form.request, is_stream=exchange.query == b"stream=true")
                except (msgspec.MsgspecError, TypeError):
                    raise ApiError(NO_REQUEST, "another version of flowrt took this request; send it again") from None
                forms.append(form)
                texts.append(self._text(request, opened, token_ids))
                prompts.append(PromptOutput(token_ids, form.text))
            builder = self._builder(exchange.id, form.created, form.model, request, form.nonce)
            response = _Response(inbox, texts, prompts, builder, exchange, request, self._writing_logprobs)
            await response.write(self._stream_interval, self._has_log, position)

    def _text(self, request: CompletionRequest, opened: OpenRequest, token_ids: Sequence[int]) -> RequestText:
        params, parse = request.params, partial(new_parser, request, self._formats)
        shown = self._marker_ids if parse() is not None else frozenset()
        new_detokenizer = partial(self._tokenizer.stream, token_ids, params.skip_special_tokens, shown)
        return RequestText(params, new_detokenizer, self._eos_token_ids, opened.prompt * params.n, opened.stop_choice, parse)

    def _is_in_reasoning(self, prompt: Prompt, token_ids: Sequence[int]) -> bool:
        """Whether the output goes on with reasoning that the prompt has begun."""
        if not isinstance(prompt, Chat) or (form := self._formats.reasoning_format) is None:
            return False
        if prompt.continue_final_message:
            text = str(prompt.messages[-1].get("content"))
            return text.rfind(form.begin) > text.rfind(form.end)
        return "".join(map(self._tokenizer.token_text, token_ids[-MAX_MARKER_TOKENS:])).rstrip().endswith(form.begin)

    def _builder(
        self, request_id: str, created: int, model: str, request: CompletionRequest, nonce: str
    ) -> ResponseBuilder | ResponsesBuilder:
        call_id = partial(call_id_of, f"{request_id} {nonce}", self._formats)
        if request.response_fields is not None:
            return ResponsesBuilder(request_id, created, model, request, call_id)
        return ResponseBuilder(request_id, created, model, request, self._tokenizer, call_id)

    def _prompt(self, request: CompletionRequest, prompt: Prompt, token_ids: tuple[int, ...]) -> PromptOutput:
        if not request.echo:
            return PromptOutput(token_ids)
        skips = request.params.skip_special_tokens
        return PromptOutput(token_ids, prompt if isinstance(prompt, str) and skips else self._tokenizer.decode(token_ids, skips))


def _check_repeated_prompts(request: CompletionRequest, num_prompt_tokens: int) -> None:
    """Bounds what a response has of prompts: each choice repeats them, and all logprobs together. Raises ApiError."""
    number = request.params.n * num_prompt_tokens
    if number > MAX_REPEATED_TOKENS and (request.echo or (request.has_token_ids and not request.is_chat)):
        text = f"would repeat {number} tokens of prompts in the choices, at most {MAX_REPEATED_TOKENS} are possible"
        raise invalid("echo" if request.echo else "return_token_ids", text)
    if (number := request.num_prompt_logprobs(num_prompt_tokens)) > MAX_PROMPT_LOGPROBS:
        text = f"of the prompts of all choices together would be {number}, at most {MAX_PROMPT_LOGPROBS} are possible"
        raise invalid(request.prompt_logprobs_name, text)


_NO_SUCH_POSITION = "the header Last-Event-ID is not the id of an event of this response"


class _Response:
    """The outputs of the prompts of one HTTP request. `writing_logprobs`: of all responses; JSON of a hundred thousand logprobs takes a
    third of a second, and heartbeats come between two."""

    def __init__(
        self,
        inbox: Inbox,
        texts: list[RequestText],
        prompts: list[PromptOutput],
        builder: ResponseBuilder | ResponsesBuilder,
        exchange: HttpExchange,
        request: CompletionRequest,
        writing_logprobs: asyncio.Lock,
    ) -> None:
        self._inbox, self._texts, self._prompts, self._builder, self._exchange = inbox, texts, prompts, builder, exchange
        self._request = request
        has_logprobs = (request.params.logprobs, request.params.prompt_logprobs) != (None, None)
        self._turn = writing_logprobs if has_logprobs else nullcontext()
        self._num_cached_tokens: dict[int, int] = {}  # by prompt

    async def write(self, interval: int, has_ids: bool, position: bytes = b"") -> None:
        """Respond in whole, or as a stream."""
        if self._request.is_stream:
            await self.stream(interval, has_ids, position)
        else:
            await self.respond()

    async def respond(self) -> None:
        pieces: list[TextPiece] = []
        while not self._have_ended:
            pieces += await self._next_pieces()
            if len(pieces) >= MAX_PIECES:
                pieces = [*merged(pieces).values()]
        choices = merged(pieces)
        async with self._turn:
            for part in self._builder.whole([choices[number] for number in sorted(choices)], self._prompt_of_choices(), self._usage):
                body = part
                await asyncio.sleep(0)
        await self._exchange.respond(200, body)

    async def stream(self, interval: int, has_ids: bool, position: bytes) -> None:
        """`has_ids`: each event has an id, the number of pieces of each choice so far. `position`: the id of the last event that the client
        has; what came before it is left out. Raises ApiError for one that this response has not."""
        exchange, builder = self._exchange, self._builder
        known = _read_position(position, self._num_choices) if position else []
        if isinstance(builder, ResponsesBuilder):
            exchange.error_events = builder.error_events
        await exchange.begin_events()
        pieces: list[TextPiece] = []
        while self._waits_for_prompt:
            pieces += await self._next_pieces()
        async with self._turn:
            events = b"".join(builder.first_chunk(choice, prompt) for choice, prompt in enumerate(self._prompt_of_choices()))
            await asyncio.sleep(0)
        if events and not known:
            await exchange.send_events(events)
        num_seen, num_sent = Counter[int](), Counter(dict(enumerate(known)))
        held: dict[int, TextPiece] = {}  # by choice: what waits for the next event
        has_sent: set[int] = set()
        ready = bytearray()
        while pieces or not self._have_ended:
            for piece in pieces or await self._next_pieces():
                choice = piece.choice
                num_seen[choice] += 1
                waiting = held.pop(choice, None)
                if waiting is not None:
                    piece = merged((waiting, piece))[choice]
                is_last_known = bool(known) and num_seen[choice] == known[choice]
                if piece.finish_reason is None and choice in has_sent and len(piece.token_ids) < interval and not is_last_known:
                    held[choice] = piece
                    continue
                has_sent.add(choice)
                chunk = builder.chunk(piece)  # also of what the client has: it counts characters and events
                if known and num_seen[choice] <= known[choice]:
                    continue
                num_sent[choice] = num_seen[choice]
                if chunk:
                    ready += _with_id(chunk, _position(num_sent, self._num_choices)) if has_ids else chunk
                if len(ready) >= MAX_WRITE_BYTES:
                    await exchange.send_events(bytes(ready))
                    ready.clear()
            pieces = []
            if ready and not self._have_ended:
                await exchange.send_events(bytes(ready))
                ready.clear()
        if any(count > num_seen[choice] for choice, count in enumerate(known)):
            raise ApiError(INVALID, _NO_SUCH_POSITION)
        has_last_event = self._request.includes_usage or isinstance(builder, ResponsesBuilder)
        await exchange.end_events(bytes(ready) + (builder.usage_chunk(self._usage) if has_last_event else b""))

    @property
    def _num_choices(self) -> int:
        return len(self._prompts) * self._request.params.n

    @property
    def _waits_for_prompt(self) -> bool:
        """Whether the logprobs of a prompt have yet to come."""
        return self._request.params.prompt_logprobs is not None and any(prompt.logprobs is None for prompt in self._prompts)

    def _prompt_of_choices(self) -> list[PromptOutput]:
        return [prompt for prompt in self._prompts for _ in range(self._request.params.n)]

    @property
    def _have_ended(self) -> bool:
        return all(text.has_ended for text in self._texts)

    @property
    def _usage(self) -> Usage:
        num_completion_tokens = 0 if self._request.omits_output else sum(text.num_tokens for text in self._texts)
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        num_reasoning_tokens = sum(text.num_reasoning_tokens for text in self._texts)
        return Usage(num_prompt_tokens, num_completion_tokens, sum(self._num_cached_tokens.values()), num_reasoning_tokens)

    async def _next_pieces(self) -> list[TextPiece]:
        """Waits for new tokens. Raises ApiError when a request has ended with an error, or was ended from the server's side."""
        pieces: list[TextPiece] = []
        for prompt, output in await self._inbox.take():
            text = self._texts[prompt]
            if output.end is not None and output.end.finish_reason in ("error", "abort") and not text.has_ended:
                raise _failure(output.end, self._exchange.id, self._request.outputs_name)
            pieces += text.add(output)
            for event in output.events:
                if isinstance(event, TokenEvent) and not event.index:
                    self._num_cached_tokens[prompt] = max(event.num_cached_tokens, self._num_cached_tokens.get(prompt, 0))
                    if self._waits_for_prompt and not event.choice:
                        self._prompts[prompt] = replace(self._prompts[prompt], logprobs=event.prompt_logprobs)
        return [_without_output(piece) for piece in pieces] if self._request.omits_output else pieces


def _close(opened: OpenRequest, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
    opened.close(isinstance(error, ApiError) and error.kind.status == INVALID.status)


def _with_id(events: bytes, position: bytes) -> bytes:
    """The id is that of the last event: a client that has some of them reads on before the first."""
    before, end, last = events.removesuffix(b"\n\n").rpartition(b"\n\n")
    return before + end + position + last + b"\n\n"


def _position(num_sent: Mapping[int, int], num_choices: int) -> bytes:
    return b"id: %s\n" % ".".join(str(num_sent.get(choice, 0)) for choice in range(num_choices)).encode()


def _read_position(position: bytes, num_choices: int) -> list[int]:
    counts = position.split(b".")
    if len(counts) != num_choices or not all(each.isdigit() and len(each) <= MAX_POSITION_DIGITS for each in counts):
        raise ApiError(INVALID, _NO_SUCH_POSITION)
    return [int(each) for each in counts]


def _without_output(piece: TextPiece) -> TextPiece:
    return TextPiece(piece.choice, finish_reason=piece.finish_reason and "length")


def _failure(end: EndEvent, request_id: str, outputs_name: str) -> ApiError:
    if end.error is None:
        text = "the server has ended before this request; when /ready answers 200, send it again"
        return ApiError(UNAVAILABLE, f"{text}, or with a request log read on at /v1/requests/{request_id}")
    if end.param:
        return ApiError(INVALID, end.error, outputs_name if end.param == "structured_outputs" else end.param)
    log.warning("request %s failed: %s", request_id, end.error)
    return internal_error(request_id)
