"""Decoding token by token, over tokenizers of every usual kind: the output's text behind its prompt, the bytes and offsets of tokens."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from serving.test_tokenizer import byte_fallback, byte_level, streamed
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from flowrt.actors.front_end_messages import RequestOutput
from flowrt.actors.outputs import EndEvent, Logprobs, TokenEvent
from flowrt.sampling_params import SamplingParams
from flowrt.serving import api_response
from flowrt.serving.api_request import CompletionRequest
from flowrt.serving.api_response import PromptOutput, ResponseBuilder, Usage
from flowrt.serving.choice_text import RequestText, TextPiece, merged
from flowrt.serving.output_parser import ContentDelta
from flowrt.serving.tokenizer import Tokenizer

CORPUS = ["the capital of France is Paris", "unhappy painter, isn't it?", "naïve café 你好 🙂"] * 5
KINDS = ("byte-level", "byte fallback", "unigram", "WordPiece", "words")


def unigram() -> tokenizers.Tokenizer:
    """SentencePiece unigram: the decoder drops the space at the beginning by itself."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFC(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]", "[SEP]"], show_progress=False))
    return tokenizer


def whole_words() -> tokenizers.Tokenizer:
    """Without a decoder: the library joins tokens by spaces."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False))
    return tokenizer


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found = {}
    for kind, raw in zip(KINDS, (byte_level(), byte_fallback(), unigram(), word_piece(), whole_words()), strict=True):
        directory = tmp_path_factory.mktemp("tokenizer")
        raw.save(str(directory / "tokenizer.json"))
        found[kind] = Tokenizer(directory)
    return found


TEXTS = st.text(alphabet="abcde the is,.?é你好🙂", min_size=1, max_size=30)


def whole_characters(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The text of tokens without an incomplete character at their end."""
    return utf8(tokenizer, token_ids).decode(errors="ignore")


def utf8(tokenizer: Tokenizer, token_ids: list[int]) -> bytes:
    are_special = accumulate((token_id in tokenizer.special_token_ids for token_id in token_ids), min, initial=True)
    return b"".join(tokenizer.token_bytes(token_id, is_first) for token_id, is_first in zip(token_ids, are_special, strict=False))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, data=st.data())
def test_output_is_the_text_behind_its_prompt(by_kind: dict[str, Tokenizer], kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = by_kind[kind]
    token_ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(token_ids)))
    pieces = streamed(tokenizer, token_ids[cut:], token_ids[:cut])
    whole, before = tokenizer.decode(token_ids), whole_characters(tokenizer, token_ids[:cut])
    assert "".join(pieces) == whole[len(before) :]
    if whole_characters(tokenizer, token_ids[:cut]) == tokenizer.decode(token_ids[:cut]):
        assert before + "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces), "each character is whole in the end"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_bytes_of_tokens_are_those_of_the_text(by_kind: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = by_kind[kind]
    token_ids = tokenizer.encode(text)
    assert utf8(tokenizer, token_ids) == tokenizer.decode(token_ids).encode()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_bytes_that_are_no_text_are_those_of_the_tokens(by_kind: dict[str, Tokenizer], data: st.DataObject) -> None:
    tokenizer = by_kind["byte-level"]
    token_ids = data.draw(st.lists(st.integers(0, 289), max_size=40))
    assert utf8(tokenizer, token_ids).decode(errors="replace") == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_character_that_begins_in_the_prompt_belongs_to_the_output(by_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = by_kind[kind]
    for text in ("ab 你你你你你你你你你你你你", "你", "ab🙂"):
        token_ids = tokenizer.encode(text)
        *_, last = text
        assert "".join(streamed(tokenizer, token_ids[-1:], token_ids[:-1])) == last
        assert "".join(streamed(tokenizer, [], token_ids[:-1])) == "", "what the prompt leaves open is no output"
        assert "".join(streamed(tokenizer, tokenizer.encode("b")[-1:], token_ids[:-1])).strip() == "b"


def test_first_word_of_an_answer_has_its_space(by_kind: dict[str, Tokenizer]) -> None:
    for kind in ("byte fallback", "unigram"):
        tokenizer = by_kind[kind]
        prompt, output = tokenizer.encode("a"), tokenizer.encode("a")
        assert "".join(streamed(tokenizer, output, prompt)) == " a"
        assert "".join(streamed(tokenizer, output)) == "a", "without a prompt, as the library decodes it"
        special = [min(tokenizer.special_token_ids)]
        assert "".join(streamed(tokenizer, output, special)) == "a", "special tokens are no text before it"
        assert "".join(streamed(tokenizer, output, [*prompt, *special])) == " a"


def test_tokens_outside_the_vocabulary_do_not_grow_the_window(by_kind: dict[str, Tokenizer]) -> None:
    stream = by_kind["byte-level"].stream()
    assert [stream.push(100_000) for _ in range(300)] == [""] * 300
    assert not stream._pending


# Logprobs of responses


def logprobs(tokenizer: Tokenizer, prompt: list[int], output: list[int], top: dict[int, Any] | None = None, **changes: Any) -> Any:
    """Choice 0 of a whole response, and its logprobs put together from a stream with an event per token."""
    is_chat = changes.pop("is_chat", False)
    skips = changes.pop("skip_special_tokens", True)
    params = SamplingParams(logprobs=5, prompt_logprobs=0 if changes.get("echo") else None, skip_special_tokens=skips)
    request = CompletionRequest(is_chat, (), params, **changes)
    stream, pieces = tokenizer.stream(prompt, skips), []
    for token_id in output:
        of_token = Logprobs(-1.0, tuple((top or {}).get(token_id, [(token_id, -1.0)])))
        pieces.append(TextPiece(0, [ContentDelta(stream.push(token_id))], [token_id], [of_token]))
    pieces.append(TextPiece(0, [ContentDelta(stream.flush())], finish_reason="length"))
    of_prompt = PromptOutput(prompt, tokenizer.decode(prompt, skips) if request.echo else "", [Logprobs(-2.0)] * (len(prompt) - 1))
    builder = ResponseBuilder("a", 0, "m", request, tokenizer)
    events = [builder.first_chunk(0, of_prompt), *map(builder.chunk, pieces)]
    chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0].get("logprobs") for event in events if event]
    found: dict[str, list[Any]] = {}
    for each in chunks:
        for name, values in (each or {}).items():
            found.setdefault(name, []).extend(values)
    with patch.object(api_response, "SLICE_TOKENS", 2):
        (*_, whole) = ResponseBuilder("a", 0, "m", request, tokenizer).whole([merged(pieces)[0]], [of_prompt], Usage(0, 0))
    (choice,) = json.loads(whole)["choices"]
    assert choice["logprobs"] == (found or None)
    return choice


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, data=st.data())
def test_logprobs_fit_the_text(by_kind: dict[str, Tokenizer], kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = by_kind[kind]
    token_ids = tokenizer.encode(text)
    if not token_ids:
        return
    cut = data.draw(st.integers(1, len(token_ids)))
    if whole_characters(tokenizer, token_ids[:cut]) == tokenizer.decode(token_ids[:cut]):
        chat = logprobs(tokenizer, token_ids[:cut], token_ids[cut:], is_chat=True)
        written = [each["bytes"] for each in (chat["logprobs"] or {"content": []})["content"]]
        assert b"".join(map(bytes, written)).decode() == chat["message"]["content"]
    echoed = logprobs(tokenizer, token_ids, [], echo=True)
    assert echoed["text"] == tokenizer.decode(token_ids)
    for name, offset in zip(echoed["logprobs"]["tokens"], echoed["logprobs"]["text_offset"], strict=True):
        shown = name.rstrip("\ufffd")
        if not shown.startswith("\ufffd") and not (set(token_ids) & tokenizer.special_token_ids):
            assert echoed["text"][offset:].startswith(shown)


def test_offsets_of_parts_of_characters(by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind["byte-level"]
    first, second = tokenizer.encode("Ñ")
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    echoed = logprobs(tokenizer, [first, second, a, first, second], [a, b], echo=True)
    assert (echoed["text"], echoed["logprobs"]["text_offset"]) == ("ÑaÑab", [0, 0, 1, 2, 2, 3, 4])
    assert echoed["logprobs"]["tokens"] == ["\ufffd", "\ufffd", "a", "\ufffd", "\ufffd", "a", "b"]
    named = logprobs(tokenizer, [first, second, a], [a, b], echo=True, names_token_ids=True)["logprobs"]
    assert (named["tokens"][:2], named["text_offset"]) == ([f"token_id:{first}", f"token_id:{second}"], [0, 0, 1, 2, 3])
    answer = logprobs(tokenizer, [a], [first, second], is_chat=True)
    assert [each["bytes"] for each in answer["logprobs"]["content"]] == [[0xC3], [0x91]]


def test_likely_tokens_with_equal_texts_are_all_kept(by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind["byte-level"]
    first, second = tokenizer.encode("Ñ")
    other, a = tokenizer.encode("你")[0], tokenizer.encode("a")[0]
    top = {first: [(other, -0.1), (a, -0.5), (first, -1.0)], second: [(other, -0.1), (first, -0.2), (a, -0.3)]}
    found = logprobs(tokenizer, [a], [first, second], top)["logprobs"]
    assert found["tokens"] == ["\ufffd", "\ufffd"]
    assert found["token_logprobs"] == [-1.0, -1.0]
    of_first, of_second = found["top_logprobs"]
    assert of_first == {f"token_id:{other}": -0.1, "a": -0.5, "\ufffd": -1.0}, "the token itself has its text"
    likely = {f"token_id:{other}": -0.1, f"token_id:{first}": -0.2, "a": -0.3}
    assert of_second == {"\ufffd": -1.0} | likely, "it is not among them, and is there too, as in OpenAI's API"


def test_stop_token_has_no_bytes(by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind["byte-level"]
    (a,) = tokenizer.encode("a")
    builder = ResponseBuilder("a", 0, "m", CompletionRequest(True, (), SamplingParams(logprobs=0)), tokenizer)
    piece = TextPiece(0, [ContentDelta("a")], [a, a, 0], [Logprobs(-1.0)] * 3, "stop", ends_at_stop_token=True)
    (choice,) = json.loads([*builder.whole([piece], [PromptOutput([a])], Usage(0, 0))][-1])["choices"]
    assert [each["bytes"] for each in choice["logprobs"]["content"]] == [[97], [97], []]
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["a", "a", "<|end|>"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS, data=st.data())
def test_special_tokens_are_text_if_they_are_not_skipped(by_kind: dict[str, Tokenizer], kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = by_kind[kind]
    token_ids = tokenizer.encode(text)
    special = sorted(tokenizer.special_token_ids)
    for _ in range(2):
        token_ids.insert(data.draw(st.integers(0, len(token_ids))), data.draw(st.sampled_from(special)))
    cut = data.draw(st.integers(1, len(token_ids)))
    before, whole = tokenizer.decode(token_ids[:cut], False), tokenizer.decode(token_ids, False)
    if "\ufffd" in before or "\ufffd" in whole:
        return  # a special token within a character
    stream = tokenizer.stream(token_ids[:cut], False)
    assert "".join([*map(stream.push, token_ids[cut:]), stream.flush()]) == whole[len(before) :]
    chat = logprobs(tokenizer, token_ids[:cut], token_ids[cut:], is_chat=True, skip_special_tokens=False)
    written = [each["bytes"] for each in (chat["logprobs"] or {"content": []})["content"]]
    assert b"".join(map(bytes, written)).decode() == chat["message"]["content"] == whole[len(before) :]
    echoed = logprobs(tokenizer, token_ids, [], echo=True, skip_special_tokens=False)
    for name, offset in zip(echoed["logprobs"]["tokens"], echoed["logprobs"]["text_offset"], strict=True):
        if "\ufffd" not in name:
            assert echoed["text"][offset:].lstrip(" ").startswith(name.lstrip(" "))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("changes", "text", "last_bytes"),
    [
        ({"stop_token_ids": (0,)}, "a", b""),
        ({"stop_token_ids": (0,), "skip_special_tokens": False}, "a", b""),
        ({"stop_token_ids": (0,), "include_stop_str_in_output": True}, "a", b""),
        ({"stop_token_ids": (0,), "include_stop_str_in_output": True, "skip_special_tokens": False}, "a<|end|>", b"<|end|>"),
        ({"stop": ("b",)}, "a", b"b"),
        ({"stop": ("b",), "include_stop_str_in_output": True}, "ab", b"b"),
    ],
)
def test_what_stops_an_output_is_text_if_it_is_included(
    by_kind: dict[str, Tokenizer], changes: dict[str, Any], text: str, last_bytes: bytes, is_streamed: bool
) -> None:
    tokenizer = by_kind["byte-level"]
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    params = SamplingParams(logprobs=0, **changes)
    output = [a, 0 if "stop_token_ids" in changes else b]
    of_request = RequestText(params, lambda: tokenizer.stream([a], params.skip_special_tokens), (), 0, lambda choice: None)
    tokens = TokenEvent(0, 0, tuple(output), logprobs=(Logprobs(-1.0),) * 2)
    pieces = [*of_request.add(RequestOutput(0, (tokens, EndEvent(0, "stop")) if output[-1] == 0 else (tokens,)))]
    assert [each.finish_reason for each in pieces][-1] == "stop"
    builder = ResponseBuilder("a", 0, "m", CompletionRequest(True, (), params), tokenizer)
    first = builder.first_chunk(0, PromptOutput([a]))
    if is_streamed:
        chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in [first, *map(builder.chunk, pieces)]]
        content = "".join(each["delta"].get("content", "") for each in chunks)
        written = [each["bytes"] for chunk in chunks for each in (chunk.get("logprobs") or {"content": []})["content"]]
    else:
        (choice,) = json.loads([*builder.whole([merged(pieces)[0]], [PromptOutput([a])], Usage(0, 0))][-1])["choices"]
        content, written = choice["message"]["content"], [each["bytes"] for each in choice["logprobs"]["content"]]
    assert (content, bytes(written[-1])) == (text, last_bytes)
