"""Builds the bodies of chat and completion responses, whole or in chunks, in the shape of OpenAI's API. Pure."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from flowrt.actors.outputs import Logprobs
from flowrt.serving.api_request import CompletionRequest
from flowrt.serving.choice_text import TextPiece
from flowrt.serving.output_parser import CallDelta
from flowrt.serving.text_stream import TextPosition
from flowrt.serving.tokenizer import Tokenizer

CallId = Callable[[int, int], str]  # of a choice and the index of a call
SLICE_TOKENS = 256  # of which the logprobs are written without a pause
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0  # of the prompts, from the prefix cache
    num_reasoning_tokens: int = 0  # of the completions

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        } | ({"completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens}} if self.num_reasoning_tokens else {})


@dataclass(frozen=True)
class PromptOutput:
    """What a response may have of a prompt. `text`: "" unless it is repeated. `logprobs`: those of its tokens behind the first; None: they
    have not come, or are not requested."""

    token_ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[Logprobs] | None = None


def event(fields: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


class ResponseBuilder:
    """The response to one HTTP request. `created`: Unix time. `call_id`: makes the ids of tool calls."""

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        request: CompletionRequest,
        tokenizer: Tokenizer,
        call_id: CallId = "call_{}_{}".format,
    ) -> None:
        is_chat = request.is_chat
        self._call_id = call_id
        self._have_called: set[int] = set()  # choices
        self._request, self._is_chat, self._tokenizer = request, is_chat, tokenizer
        kind = ("chat.completion" if is_chat else "text_completion") + (".chunk" if is_chat else "")
        self._chunk = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}", "object": kind, "created": created, "model": model}
        self._whole = self._chunk | {"object": kind.removesuffix(".chunk")}
        self._no_usage: dict[str, Any] = {"usage": None} if request.includes_usage else {}
        self._num_tokens: dict[int, tuple[int, int]] = {}  # by choice: of the prompt, and of the output so far
        self._positions: dict[int, TextPosition] = {}  # by choice: of its next token, if it has logprobs
        self._begin_with_text: dict[int, bool] = {}  # by prompt: whether one of its tokens has text

    def first_chunk(self, choice: int, prompt: PromptOutput) -> bytes:
        """Of each choice of a stream: its role, and what the response has of its prompt; b"" for none."""
        self._num_tokens[choice] = len(prompt.token_ids), 0
        logprobs, of_prompt = self._echoed_logprobs(choice, prompt), self._of_prompt(choice, prompt)
        if self._is_chat:
            return self._event(choice, {"delta": {"role": "assistant", "content": ""}}, None, of_prompt)
        shown = {"text": prompt.text} if logprobs is None else {"text": prompt.text, "logprobs": logprobs}
        return self._event(choice, shown, None, of_prompt) if prompt.text or logprobs or of_prompt else b""

    def chunk(self, piece: TextPiece) -> bytes:
        """b"" for a piece with nothing to show."""
        num_prompt_tokens, num_tokens = self._num_tokens[piece.choice]
        self._num_tokens[piece.choice] = num_prompt_tokens, num_tokens + len(piece.token_ids)
        text, reasoning, found = piece.parts()
        if not (text or reasoning or found or piece.logprobs or piece.finish_reason or self._request.has_token_ids):
            return b""
        if self._is_chat:
            delta: dict[str, Any] = {"content": text} if text or (piece.logprobs and not found and not reasoning) else {}
            if reasoning:
                delta |= _reasoning(reasoning)
            if found:
                delta["tool_calls"] = [{"index": each.index, **self._call(piece.choice, each)} for each in found]
            fields: dict[str, Any] = {"delta": delta}
        else:
            fields = {"text": text}
        fields["logprobs"] = self._logprobs(piece)
        return self._event(piece.choice, fields, piece)

    def usage_chunk(self, usage: Usage) -> bytes:
        return event(self._chunk | {"choices": [], "usage": usage.as_json()})

    def whole(self, pieces: Sequence[TextPiece], prompts: Sequence[PromptOutput], usage: Usage) -> Iterator[bytes]:
        """The body of a response that is not streamed: one piece per choice, with its prompt. The last value is the body; those before give
        way to others, as a body may have hundreds of thousands of logprobs."""
        choices = []
        for piece, prompt in zip(pieces, prompts, strict=True):
            logprobs = yield from self._whole_logprobs(piece, prompt)
            text = prompt.text + piece.parts()[0]
            fields: dict[str, Any] = {"message": self._message(piece)} if self._is_chat else {"text": text}
            of_prompt = {} if self._is_chat else self._of_prompt(piece.choice, prompt)
            fields |= {"logprobs": logprobs} | self._token_ids(piece) | of_prompt
            choices.append(msgspec.Raw(msgspec.json.encode(self._choice(piece.choice, fields, piece))))
            yield b""
        of_chat = self._of_prompt(0, prompts[0]) if self._is_chat else {}
        yield msgspec.json.encode(self._whole | {"choices": choices, "usage": usage.as_json()} | of_chat)

    def _whole_logprobs(self, piece: TextPiece, prompt: PromptOutput) -> Generator[bytes, None, dict[str, msgspec.Raw] | None]:
        echoed = self._echoed_logprobs(piece.choice, prompt)
        lists: dict[str, list[bytes]] = {}  # by field: the entries of each slice

        def add(fields: dict[str, Any] | None) -> None:
            for name, entries in (fields or {}).items():
                lists.setdefault(name, []).extend([msgspec.json.encode(entries)[1:-1]] if entries else [])

        add(echoed)
        for first in range(0, len(piece.logprobs), SLICE_TOKENS):
            end = first + SLICE_TOKENS
            is_last = end >= len(piece.logprobs)
            own = replace(
                piece,
                token_ids=piece.token_ids[first:end],
                logprobs=piece.logprobs[first:end],
                ends_at_stop_token=piece.ends_at_stop_token and is_last,
            )
            add(self._logprobs(own))
            yield b""
        return {name: msgspec.Raw(b"[%s]" % b",".join(each)) for name, each in lists.items()} or None

    def _event(self, choice: int, fields: dict[str, Any], piece: TextPiece | None, of_prompt: dict[str, Any] | None = None) -> bytes:
        own = self._choice(choice, fields | self._token_ids(piece), piece)
        usage = {"usage": Usage(*self._num_tokens[choice]).as_json()} if self._request.has_continuous_usage else self._no_usage
        chunk: dict[str, Any] = self._chunk | {"choices": [own]} | usage
        (chunk if self._is_chat else own).update(of_prompt or {})
        return event(chunk)

    def _message(self, piece: TextPiece) -> dict[str, Any]:
        text, reasoning, found = piece.parts()
        calls = [self._call(piece.choice, each) for each in found]
        content = text or (None if calls or reasoning else "")
        return {"role": "assistant", "content": content} | _reasoning(reasoning) | ({"tool_calls": calls} if calls else {})

    def _call(self, choice: int, call: CallDelta) -> dict[str, Any]:
        self._have_called.add(choice)
        if call.name is None:
            return {"function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id or self._call_id(choice, call.index), "type": "function", "function": function}

    def _choice(self, index: int, fields: dict[str, Any], piece: TextPiece | None) -> dict[str, Any]:
        """`degraded` is there when a token was computed without an expert (docs/reliability.md)."""
        degraded = {"degraded": True} if piece is not None and piece.is_degraded else {}
        reason: str | None = None if piece is None else piece.finish_reason
        if piece is not None and reason == "stop" and index in self._have_called and not piece.cuts_call:
            reason = "tool_calls"
        return {"index": index, **fields, "finish_reason": reason, **degraded}

    def _token_ids(self, piece: TextPiece | None) -> dict[str, Any]:
        return {"token_ids": [] if piece is None else piece.token_ids} if self._request.has_token_ids else {}

    def _of_prompt(self, choice: int, prompt: PromptOutput) -> dict[str, Any]:
        """The prompt's token ids and logprobs. Of a chat, which has one prompt, the response has them, else each choice, as in vLLM. But
        only the first choice of a prompt has the logprobs."""
        fields: dict[str, Any] = {"prompt_token_ids": prompt.token_ids} if self._request.has_token_ids else {}
        if self._request.has_prompt_logprobs and not choice % self._request.params.n:
            found = zip(prompt.token_ids[1:], prompt.logprobs or (), strict=True)
            is_first = self._is_skipped(prompt.token_ids[0])
            ranked: list[dict[str, Any] | None] = [None]
            for token_id, each in found:
                ranked.append(self._ranked(token_id, each, is_first))
                is_first = is_first and self._is_skipped(token_id)
            fields["prompt_logprobs"] = ranked
        return fields

    def _ranked(self, token_id: int, logprobs: Logprobs, is_first: bool) -> dict[str, dict[str, Any]]:
        """The logprobs of a token and of the most likely ones in its place, by token id. One that is not among these has no rank."""
        own = {token_id: {"logprob": logprobs.token, "rank": None}}
        top = {each: {"logprob": logprob, "rank": rank} for rank, (each, logprob) in enumerate(logprobs.top, 1)}
        return {str(each): value | {"decoded_token": self._name(each, is_first)} for each, value in (own | top).items()}

    def _logprobs(self, piece: TextPiece) -> dict[str, Any] | None:
        if not piece.logprobs:
            return None
        position = self._positions[piece.choice]
        if not self._is_chat:
            return self._text_logprobs(position, piece.token_ids, piece.logprobs)
        content = []
        for at, (token_id, logprobs) in enumerate(zip(piece.token_ids, piece.logprobs, strict=True), 1):
            own = self._chat_logprob(token_id, logprobs.token, position.is_first)
            if piece.ends_at_stop_token and at == len(piece.token_ids):
                own["bytes"] = []
            content.append(own | {"top_logprobs": [self._chat_logprob(*each, position.is_first) for each in logprobs.top]})
            self._advance(position, token_id)
        return {"content": content}

    def _echoed_logprobs(self, choice: int, prompt: PromptOutput) -> dict[str, Any] | None:
        """Those of a repeated prompt. The text of the output begins behind it."""
        if self._request.params.logprobs is None:
            return None
        number = choice // self._request.params.n
        if number not in self._begin_with_text:
            self._begin_with_text[number] = not all(map(self._is_skipped, prompt.token_ids))
        self._positions[choice] = TextPosition(len(prompt.text), not self._begin_with_text[number])
        if not self._request.has_echoed_logprobs:
            return None
        return self._text_logprobs(TextPosition(), prompt.token_ids, [None, *(prompt.logprobs or ())], prompt.text)

    def _text_logprobs(
        self, position: TextPosition, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None], given: str = ""
    ) -> dict[str, Any]:
        """`given`: the text of a prompt as its client wrote it, which may spell special tokens."""
        names, top, offsets = [], [], []
        for token_id, each in zip(token_ids, logprobs, strict=True):
            names.append(self._name(token_id, position.is_first))
            top.append(each and self._by_name(token_id, each, position.is_first))
            spelled = self._tokenizer.token_bytes(token_id, position.is_first, False) if given and self._is_skipped(token_id) else b""
            if spelled and given.startswith(spelled.decode(errors="replace"), position.num_characters):
                offsets.append(position.advance(spelled, False))
            else:
                offsets.append(self._advance(position, token_id))
        token_logprobs = [each and each.token for each in logprobs]
        return {"tokens": names, "token_logprobs": token_logprobs, "top_logprobs": top, "text_offset": offsets}

    def _by_name(self, token_id: int, logprobs: Logprobs, is_first: bool) -> dict[str, float]:
        """The most likely tokens in the place of this one, and behind them this one, if it is not among them. Of several with the same
        text, one has it as its name: this one."""
        own = self._name(token_id, is_first)
        owners, found = {own: token_id}, dict[str, float]()
        for each, logprob in logprobs.top:
            name = self._name(each, is_first)
            found[name if owners.setdefault(name, each) == each else f"token_id:{each}"] = logprob
        return found if own in found else found | {own: logprobs.token}

    def _chat_logprob(self, token_id: int, logprob: float, is_first: bool) -> dict[str, Any]:
        data = self._bytes(token_id, is_first)
        return {"token": self._name(token_id, is_first), "logprob": logprob, "bytes": list(data)}

    def _name(self, token_id: int, is_first: bool) -> str:
        return f"token_id:{token_id}" if self._request.names_token_ids else self._tokenizer.token_text(token_id, is_first)

    def _advance(self, position: TextPosition, token_id: int) -> int:
        return position.advance(self._bytes(token_id, position.is_first), self._is_skipped(token_id))

    def _bytes(self, token_id: int, is_first: bool) -> bytes:
        return self._tokenizer.token_bytes(token_id, is_first, self._request.params.skip_special_tokens)

    def _is_skipped(self, token_id: int) -> bool:
        return self._request.params.skip_special_tokens and token_id in self._tokenizer.special_token_ids


def _reasoning(text: str) -> dict[str, Any]:
    """Under the two names that clients read."""
    return {"reasoning_content": text, "reasoning": text} if text else {}
