"""Incremental decoding: the text of an output token by token, and the bytes that each token adds to a text.

Both need the tokens before: decoders of SentencePiece models drop the space before the first word of what they decode, so the output of
a prompt is decoded with the prompt's last tokens in front of it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

import tokenizers

_BROKEN = "\ufffd"  # the library's text for bytes that are not a whole character (yet)
_MAX_OPEN = 6  # maximum of U+FFFD for one incomplete character: its 3 bytes, and those of a character before it
_CUT_TOKENS = 8
_LONGEST_WINDOW_TOKENS = 64  # no real text is this long without a boundary
_MAX_CHARACTER_TOKENS = 4
_MIN_PROMPT_TOKENS, _MAX_PROMPT_TOKENS = 4, 24  # of the prompt, in front of an output
_MAX_SEEN_TOKENS = 256  # for these, as many may have no text
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_MAX_SEARCHED_TOKENS = 4096


class TextStream:
    """Decodes the output of a prompt token by token. It never returns part of a character: it holds the bytes until the character is
    complete.

    Each token decodes only a window: the tokens since the last clean boundary, and the tokens before it that the decoder needs
    (word-initial spaces depend on the previous token). With `skip_special_tokens`, special tokens give no text, except `shown_token_ids`.
    All returned texts, with that of `flush`, together equal the text of decoding prompt and output at once, without the prompt's text. A
    character that begins in the prompt and ends in the output belongs to the output.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_token_ids: frozenset[int],
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._special_token_ids, self._shown_token_ids = special_token_ids, shown_token_ids
        self._context: list[int] = []  # tokens whose text was returned
        self._pending: list[int] = []
        self._given = ""  # the part of the pending tokens' text that was returned already
        self._num_broken = 0  # U+FFFD of an incomplete character at the end of the prompt: not returned
        for token_id in self._tail(prompt_token_ids):
            self.push(token_id)
        if self._pending:
            self._num_broken = len(self._pending_text()) - len(self._given)

    def push(self, token_id: int) -> str:
        """Add a token. Returns the text that is certain now; it may be empty."""
        if self._skip_special_tokens and token_id in self._shown_token_ids:
            return self.flush() + (self._tokenizer.id_to_token(token_id) or "")
        if self._has_no_text(token_id):
            return ""
        self._pending.append(token_id)
        text = self._pending_text()
        num_open = len(text) - len(text.rstrip(_BROKEN))
        if not num_open or len(self._pending) >= _LONGEST_WINDOW_TOKENS:
            return self._give(text)
        # An open character is one U+FFFD at the end with byte-level tokens; with byte tokens it is a few, and takes characters
        # before it along. More than that are bytes that will never be text, of which only the last may still become some.
        num_held = num_open if num_open <= _MAX_OPEN else 1
        certain = text[: len(text) - num_held]
        if not certain.startswith(self._given):
            return ""
        new, self._given = self._new(certain), certain
        if len(self._pending) >= 2 * _CUT_TOKENS:
            # Tokens that begin in one character and end in the next never leave a clean boundary, so the window is cut in the
            # middle of a character. That one counts as one U+FFFD on both sides of the cut.
            self._context, self._pending = self._pending[:-_CUT_TOKENS], self._pending[-_CUT_TOKENS:]
            text = self._pending_text()
            self._given = text[: len(text) - num_held]
        return new

    def flush(self) -> str:
        """Return the text still held back. An incomplete character becomes U+FFFD."""
        return self._give(self._pending_text()) if self._pending else ""

    def _tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt that have text, from the beginning of a character on."""
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids[-_MAX_SEEN_TOKENS:]):
            if self._has_no_text(token_id):
                continue
            tail.insert(0, token_id)
            if len(tail) == _MAX_PROMPT_TOKENS or (len(tail) >= _MIN_PROMPT_TOKENS and self._begins_character(tail)):
                break
        return tail

    def _begins_character(self, token_ids: list[int]) -> bool:
        return any(_BROKEN not in self._decode(token_ids[:end]) for end in range(1, _MAX_CHARACTER_TOKENS + 1))

    def _has_no_text(self, token_id: int) -> bool:
        is_skipped = self._skip_special_tokens and token_id in self._special_token_ids
        return is_skipped or self._tokenizer.id_to_token(token_id) is None

    def _pending_text(self) -> str:
        context = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(context) :]

    def _give(self, text: str) -> str:
        new = self._new(text)
        if text:  # tokens without text stay pending: later tokens are decoded together with them
            self._context, self._pending, self._given = self._pending, [], ""
        return new

    def _new(self, text: str) -> str:
        """What of the pending tokens' text was not returned yet."""
        new = text[len(self._given) :]
        if new and self._num_broken:
            num_equal = min(len(new) - len(new.lstrip(_BROKEN)), self._num_broken)
            self._num_broken -= num_equal if num_equal == len(new) else self._num_broken
            new = new[num_equal:]
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens) if token_ids else ""


class TokenTexts:
    """The text and the bytes of single tokens of one tokenizer, as they are within a text or at its beginning."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._special_token_ids = tokenizer, special_token_ids
        self._before = self._find_before()
        self._known: dict[tuple[int, bool], bytes] = {}

    def text(self, token_id: int, is_first: bool) -> str:
        if token_id in self._special_token_ids:
            return self._token(token_id)
        return self.utf8(token_id, is_first).decode(errors="replace")

    def utf8(self, token_id: int, is_first: bool, skip_special_tokens: bool = True) -> bytes:
        if skip_special_tokens and token_id in self._special_token_ids:
            return b""
        key = token_id, is_first
        if (found := self._known.get(key)) is None:
            found = self._known[key] = self._utf8(token_id, [] if is_first else self._before)
        return found

    def _utf8(self, token_id: int, before: list[int]) -> bytes:
        text = self._tokenizer.decode([*before, token_id], skip_special_tokens=False)[len(self._tokenizer.decode(before)) :]
        if _BROKEN not in text:
            return text.encode()
        token = self._token(token_id)
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        if all(character in _BYTE_OF for character in token):  # a byte-level token with a part of a character
            return bytes(_BYTE_OF[character] for character in token)
        return text.encode()

    def _token(self, token_id: int) -> str:
        """Returns the token as it is in the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _find_before(self) -> list[int]:
        """A token that is one letter or digit: the text that another token adds behind it does not depend on it."""
        for token_id in range(min(self._tokenizer.get_vocab_size(), _MAX_SEARCHED_TOKENS)):
            text = self._tokenizer.decode([token_id])
            if len(text) == 1 and text.isascii() and text.isalnum() and not _BYTE_TOKEN.fullmatch(self._token(token_id)):
                return [token_id]
        return []


class TextPosition:
    """Where the next token of a text begins: `num_characters` of the text are before it. `is_first`: only skipped special tokens are."""

    def __init__(self, num_characters: int = 0, is_first: bool = True) -> None:
        self.num_characters, self.is_first = num_characters, is_first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, data: bytes, is_skipped: bool) -> int:
        """Pass a token that adds these bytes. Returns where it begins: of a token within a character, where that character does."""
        offset = self.num_characters
        self.num_characters += len(self._decoder.decode(data))
        self.is_first = self.is_first and is_skipped
        return offset


def _byte_of_characters() -> dict[str, int]:
    """The alphabet of byte-level tokens: a printable character for each byte, as GPT-2 chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_of_characters()
