"""Builds the bodies of chat and completion responses, whole or in chunks, in the shape of OpenAI's API. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flowrt.actors.control import Logprobs
from flowrt.serving.api_request import CompletionRequest
from flowrt.serving.choice_text import TextPiece

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0  # of the prompts, from the prefix cache

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


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
    """The response to one HTTP request. `created`: Unix time. `token_text` returns the text of one token, also of a special one."""

    def __init__(self, request_id: str, created: int, model: str, request: CompletionRequest, token_text: Callable[[int], str]) -> None:
        is_chat = request.is_chat
        self._request, self._is_chat, self._token_text = request, is_chat, token_text
        kind = ("chat.completion" if is_chat else "text_completion") + (".chunk" if is_chat else "")
        self._chunk = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}", "object": kind, "created": created, "model": model}
        self._whole = self._chunk | {"object": kind.removesuffix(".chunk")}
        self._no_usage: dict[str, Any] = {"usage": None} if request.includes_usage else {}
        self._num_characters: dict[int, int] = {}  # by choice, of the text so far: offsets of tokens

    def first_chunk(self, choice: int, prompt: PromptOutput) -> bytes:
        """Of each choice of a stream: its role, and what the response has of its prompt; b"" for none."""
        if self._is_chat:
            return self._event(choice, {"delta": {"role": "assistant", "content": ""}}, None, self._of_prompt(choice, prompt))
        logprobs, of_prompt = self._echoed_logprobs(choice, prompt), self._of_prompt(choice, prompt)
        shown = {"text": prompt.text} if logprobs is None else {"text": prompt.text, "logprobs": logprobs}
        return self._event(choice, shown, None, of_prompt) if prompt.text or logprobs or of_prompt else b""

    def chunk(self, piece: TextPiece) -> bytes:
        """b"" for a piece with nothing to show."""
        if not (piece.text or piece.logprobs or piece.finish_reason or self._request.has_token_ids):
            return b""
        if self._is_chat:
            fields: dict[str, Any] = {"delta": {"content": piece.text} if piece.text or piece.logprobs else {}}
        else:
            fields = {"text": piece.text}
        fields["logprobs"] = self._logprobs(piece)
        return self._event(piece.choice, fields, piece)

    def usage_chunk(self, usage: Usage) -> bytes:
        return event(self._chunk | {"choices": [], "usage": usage.as_json()})

    def whole(self, pieces: Sequence[TextPiece], prompts: Sequence[PromptOutput], usage: Usage) -> bytes:
        """The body of a response that is not streamed: one piece per choice, with its prompt."""
        choices = []
        for piece, prompt in zip(pieces, prompts, strict=True):
            echoed, own = self._echoed_logprobs(piece.choice, prompt), self._logprobs(piece)
            logprobs = {name: echoed[name] + own[name] for name in own} if echoed and own else own or echoed
            text = prompt.text + piece.text
            fields: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
            of_prompt = {} if self._is_chat else self._of_prompt(piece.choice, prompt)
            choices.append(_choice(piece.choice, fields | {"logprobs": logprobs} | self._token_ids(piece) | of_prompt, piece))
        of_chat = self._of_prompt(0, prompts[0]) if self._is_chat else {}
        return msgspec.json.encode(self._whole | {"choices": choices, "usage": usage.as_json()} | of_chat)

    def _event(self, choice: int, fields: dict[str, Any], piece: TextPiece | None, of_prompt: dict[str, Any] | None = None) -> bytes:
        own = _choice(choice, fields | self._token_ids(piece), piece)
        chunk: dict[str, Any] = self._chunk | {"choices": [own]} | self._no_usage
        (chunk if self._is_chat else own).update(of_prompt or {})
        return event(chunk)

    def _token_ids(self, piece: TextPiece | None) -> dict[str, Any]:
        return {"token_ids": [] if piece is None else piece.token_ids} if self._request.has_token_ids else {}

    def _of_prompt(self, choice: int, prompt: PromptOutput) -> dict[str, Any]:
        """The prompt's token ids and logprobs. Of a chat, which has one prompt, the response has them, else each choice, as in vLLM. But
        only the first choice of a prompt has the logprobs."""
        fields: dict[str, Any] = {"prompt_token_ids": prompt.token_ids} if self._request.has_token_ids else {}
        if self._request.has_prompt_logprobs and not choice % self._request.params.n:
            found = zip(prompt.token_ids[1:], prompt.logprobs or (), strict=True)
            fields["prompt_logprobs"] = [None, *(self._ranked(token_id, each) for token_id, each in found)]
        return fields

    def _ranked(self, token_id: int, logprobs: Logprobs) -> dict[str, dict[str, Any]]:
        """The logprobs of a token and of the most likely ones in its place, by token id. One that is not among these has no rank."""
        own = {token_id: {"logprob": logprobs.token, "rank": None}}
        top = {each: {"logprob": logprob, "rank": rank} for rank, (each, logprob) in enumerate(logprobs.top, 1)}
        return {str(each): value | {"decoded_token": self._token_text(each)} for each, value in (own | top).items()}

    def _logprobs(self, piece: TextPiece) -> dict[str, Any] | None:
        if not piece.logprobs:
            return None
        if not self._is_chat:
            return self._text_logprobs(piece.choice, piece.token_ids, piece.logprobs)
        texts = map(self._token_text, piece.token_ids)
        return {"content": [self._chat_logprob(text, each) for text, each in zip(texts, piece.logprobs, strict=True)]}

    def _echoed_logprobs(self, choice: int, prompt: PromptOutput) -> dict[str, Any] | None:
        """Those of a repeated prompt. The text of the output begins behind it."""
        self._num_characters[choice] = 0
        is_shown = self._request.has_echoed_logprobs
        found = self._text_logprobs(choice, prompt.token_ids, [None, *(prompt.logprobs or ())]) if is_shown else None
        self._num_characters[choice] = len(prompt.text)
        return found

    def _text_logprobs(self, choice: int, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> dict[str, Any]:
        texts, offsets = [self._token_text(token_id) for token_id in token_ids], []
        for text, _ in zip(texts, logprobs, strict=True):
            offsets.append(offset := self._num_characters.get(choice, 0))
            self._num_characters[choice] = offset + len(text)
        top = [each and {self._token_text(token_id): logprob for token_id, logprob in each.top} for each in logprobs]
        token_logprobs = [each and each.token for each in logprobs]
        return {"tokens": texts, "token_logprobs": token_logprobs, "top_logprobs": top, "text_offset": offsets}

    def _chat_logprob(self, text: str, logprobs: Logprobs) -> dict[str, Any]:
        top = [_token_logprob(self._token_text(token_id), logprob) for token_id, logprob in logprobs.top]
        return _token_logprob(text, logprobs.token) | {"top_logprobs": top}


def merged(pieces: Iterable[TextPiece]) -> dict[int, TextPiece]:
    """The pieces of each choice as one."""
    whole: dict[int, TextPiece] = {}
    for piece in pieces:
        if (into := whole.setdefault(piece.choice, piece)) is not piece:
            into.text += piece.text
            into.token_ids += piece.token_ids
            into.logprobs += piece.logprobs
            into.finish_reason = piece.finish_reason or into.finish_reason
            into.is_degraded |= piece.is_degraded
    return whole


def _choice(index: int, fields: dict[str, Any], piece: TextPiece | None) -> dict[str, Any]:
    """`degraded` is there when a token was computed without an expert (docs/reliability.md)."""
    degraded = {"degraded": True} if piece is not None and piece.is_degraded else {}
    return {"index": index, **fields, "finish_reason": piece.finish_reason if piece is not None else None, **degraded}


def _token_logprob(text: str, logprob: float) -> dict[str, Any]:
    is_whole = "\ufffd" not in text  # else the token is a part of a character, whose bytes are not known here
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}
