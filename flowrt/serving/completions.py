"""Answers one chat or completion request: admits it, tokenizes its prompts, submits them, and writes the response as it comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace

import msgspec

from flowrt.actors.control import Request
from flowrt.engine.validation import find_problem, max_new_tokens
from flowrt.errors import TokenizerError
from flowrt.graph.model import GraphLimits
from flowrt.sampling_params import MAX_PROMPT_LOGPROBS
from flowrt.serving.api_errors import INVALID, TOO_LONG, UNAVAILABLE, ApiError, internal_error
from flowrt.serving.api_request import CompletionRequest
from flowrt.serving.api_response import PromptOutput, ResponseBuilder, Usage, merged
from flowrt.serving.choice_text import RequestText, TextPiece
from flowrt.serving.exchange import Exchange
from flowrt.serving.gateway_client import GatewayClient, Inbox, OpenRequest
from flowrt.serving.json_body import Prompt, TokenIds, estimated_tokens, invalid
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tokenizer_process import TokenizerProcess, too_long

log = logging.getLogger("flowrt.front_end")

MAX_WRITE_BYTES = 64 << 10  # of events at once: then it waits for a client that reads slowly


class PromptEncoder:
    """Turns prompts into token ids within the limits of the graph."""

    def __init__(self, process: TokenizerProcess, limits: GraphLimits, max_model_len: int, vocab_size: int) -> None:
        self._process, self._limits, self.max_model_len, self._vocab_size = process, limits, max_model_len, vocab_size

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt. Raises ApiError."""
        try:
            if not isinstance(prompt, TokenIds):
                return tuple(await self._process.encode(prompt, max_tokens=self.max_model_len))
            if prompt.num_tokens > self.max_model_len:
                raise TokenizerError(too_long(prompt.num_tokens, self.max_model_len), is_too_long=True)
            await asyncio.sleep(0)  # other clients are served between the prompts of a request
            return prompt.read()
        except TokenizerError as error:
            kind = TOO_LONG if error.is_too_long else INVALID
            raise ApiError(kind, str(error), "messages" if isinstance(prompt, list) else "prompt") from None

    def check(self, token_ids: tuple[int, ...], request: CompletionRequest) -> None:
        """Check a request as the gateway does. Raises ApiError."""
        params = request.params
        room = max_new_tokens(len(token_ids), self._limits, self.max_model_len)
        max_tokens = max(room, 1) if params.max_tokens is None else params.max_tokens
        whole = Request(id="", attempt=0, prompt_token_ids=token_ids, max_tokens=max_tokens, params=params)
        if (problem := find_problem(whole, self._limits, self.max_model_len, self._vocab_size)) is not None:
            names = {"prompt": request.prompt_name, "max_tokens": request.max_tokens_name, "prompt_logprobs": request.prompt_logprobs_name}
            param = names.get(problem.param, problem.param)
            raise ApiError(TOO_LONG if problem.is_too_long else INVALID, problem.text, param)


class Completions:
    """Answers the requests of one front end. `stream_interval`: tokens per event of a stream."""

    def __init__(
        self, client: GatewayClient, encoder: PromptEncoder, tokenizer: Tokenizer, eos_token_ids: Collection[int], stream_interval: int
    ) -> None:
        self._client, self._encoder, self._tokenizer = client, encoder, tokenizer
        self._eos_token_ids, self._stream_interval = frozenset(eos_token_ids), stream_interval

    async def respond(self, request: CompletionRequest, exchange: Exchange, model: str, created: int) -> None:
        """Raises ApiError. A request whose client leaves is cancelled, because this call is."""
        with ExitStack() as stack:
            inbox = stack.enter_context(self._client.inbox())
            opened: list[OpenRequest] = []
            for index, prompt in enumerate(request.prompts):  # before the costly work
                params = msgspec.structs.replace(request.params, stop=())
                opened.append(await self._client.reserve(params, estimated_tokens(prompt), inbox, index))
                stack.callback(opened[-1].close)
            texts, encoded = [], []
            for index, prompt in enumerate(request.prompts):
                token_ids = await self._encoder.encode(prompt)
                self._encoder.check(token_ids, request)
                encoded.append(token_ids)
                _check_prompt_logprobs(request, sum(map(len, encoded)))
                stop = opened[index].stop_choice
                texts.append(RequestText(request.params, self._tokenizer.stream, self._eos_token_ids, index * request.params.n, stop))
                opened[index].place(token_ids)
            prompts = [self._prompt(request, *both) for both in zip(request.prompts, encoded, strict=True)]
            token_text = "token_id:{}".format if request.names_token_ids else self._tokenizer.token_text
            builder = ResponseBuilder(exchange.id, created, model, request, token_text)
            response = _Response(inbox, texts, prompts, builder, exchange, request)
            if request.is_stream:
                await response.stream(self._stream_interval)
            else:
                await response.respond()

    def _prompt(self, request: CompletionRequest, prompt: Prompt, token_ids: tuple[int, ...]) -> PromptOutput:
        if not request.echo:
            return PromptOutput(token_ids)
        return PromptOutput(token_ids, prompt if isinstance(prompt, str) else self._tokenizer.decode(token_ids))


def _check_prompt_logprobs(request: CompletionRequest, num_prompt_tokens: int) -> None:
    """Bounds the logprobs of all prompts and choices together. Raises ApiError."""
    if (number := request.num_prompt_logprobs(num_prompt_tokens)) > MAX_PROMPT_LOGPROBS:
        text = f"of the prompts of all choices together would be {number}, at most {MAX_PROMPT_LOGPROBS} are possible"
        raise invalid(request.prompt_logprobs_name, text)


class _Response:
    """The outputs of the prompts of one HTTP request."""

    def __init__(
        self,
        inbox: Inbox,
        texts: list[RequestText],
        prompts: list[PromptOutput],
        builder: ResponseBuilder,
        exchange: Exchange,
        request: CompletionRequest,
    ) -> None:
        self._inbox, self._texts, self._prompts, self._builder, self._exchange = inbox, texts, prompts, builder, exchange
        self._request = request
        self._num_cached_tokens: dict[int, int] = {}  # by prompt

    async def respond(self) -> None:
        pieces: list[TextPiece] = []
        while not self._have_ended:
            pieces += await self._next_pieces()
        choices = merged(pieces)
        body = self._builder.whole([choices[number] for number in sorted(choices)], self._prompt_of_choices(), self._usage)
        await self._exchange.respond(200, body)

    async def stream(self, interval: int) -> None:
        exchange, builder = self._exchange, self._builder
        await exchange.begin_events()
        pieces: list[TextPiece] = []
        while self._waits_for_prompt:
            pieces += await self._next_pieces()
        events = b"".join(builder.first_chunk(choice, prompt) for choice, prompt in enumerate(self._prompt_of_choices()))
        if events:
            await exchange.send_events(events)
        held: dict[int, TextPiece] = {}  # by choice: what waits for the next event
        has_sent: set[int] = set()
        ready = bytearray()
        while pieces or not self._have_ended:
            for piece in pieces or await self._next_pieces():
                waiting = held.pop(piece.choice, None)
                if waiting is not None:
                    piece = merged((waiting, piece))[piece.choice]
                if piece.finish_reason is None and piece.choice in has_sent and len(piece.token_ids) < interval:
                    held[piece.choice] = piece
                    continue
                has_sent.add(piece.choice)
                ready += builder.chunk(piece)
                if len(ready) >= MAX_WRITE_BYTES:
                    await exchange.send_events(bytes(ready))
                    ready.clear()
            pieces = []
            if ready and not self._have_ended:
                await exchange.send_events(bytes(ready))
                ready.clear()
        await exchange.end_events(bytes(ready) + (builder.usage_chunk(self._usage) if self._request.includes_usage else b""))

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
        return Usage(num_prompt_tokens, num_completion_tokens, sum(self._num_cached_tokens.values()))

    async def _next_pieces(self) -> list[TextPiece]:
        """Waits for new tokens. Raises ApiError when a request has ended with an error, or was ended from the server's side."""
        pieces: list[TextPiece] = []
        for prompt, output in await self._inbox.take():
            text = self._texts[prompt]
            self._num_cached_tokens[prompt] = output.num_cached_tokens
            if output.end in ("error", "abort") and not text.has_ended:
                raise _failure(output.error, self._exchange.id)
            pieces += text.add(output)
            if text.has_prompt_logprobs and self._prompts[prompt].logprobs is None:
                self._prompts[prompt] = replace(self._prompts[prompt], logprobs=output.prompt_logprobs)
        return [_without_output(piece) for piece in pieces] if self._request.omits_output else pieces


def _without_output(piece: TextPiece) -> TextPiece:
    return TextPiece(piece.choice, finish_reason=piece.finish_reason and "length")


def _failure(error: str | None, request_id: str) -> ApiError:
    if error is None:
        return ApiError(UNAVAILABLE, "the server has ended before this request; send it again when /ready answers 200")
    log.warning("request %s failed: %s", request_id, error)
    return internal_error(request_id)
