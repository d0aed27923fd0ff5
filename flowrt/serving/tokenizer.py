"""The tokenizer of a model directory: encodes text, decodes tokens one by one as a stream, and renders the chat template.

It needs neither torch nor transformers: the `tokenizers` library reads tokenizer.json, and jinja2 (only for a chat) renders the template.
The launching process uses it for output only; a separate process tokenizes prompts (tokenizer_process.py).
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from flowrt.errors import TokenizerError, shortened
from flowrt.sampling_params import check_text

MAX_FILE_BYTES = 256 << 20
_MAX_ERROR_CHARACTERS = 500
_BROKEN = "\ufffd"  # the library's text for bytes that are not a whole character (yet)
_MAX_OPEN = 6  # maximum of U+FFFD for one incomplete character: its 3 bytes, and those of a character before it
_CUT_TOKENS = 8
_LONGEST_WINDOW_TOKENS = 64  # no real text is this long without a boundary


class TextStream:
    """Decodes one output token by token. It never returns part of a character: it holds the bytes until the character is complete.

    Each token decodes only a window: the tokens since the last clean boundary, and the tokens before it that the decoder needs
    (word-initial spaces depend on the previous token). Special tokens give no text. All returned texts, with that of `flush`, together
    equal the text of decoding all tokens at once.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_token_ids = special_token_ids
        self._context: list[int] = []  # tokens whose text was returned
        self._pending: list[int] = []
        self._given = ""  # the part of the pending tokens' text that was returned already

    def push(self, token_id: int) -> str:
        """Add a token. Returns the text that is certain now; it may be empty."""
        if token_id in self._special_token_ids:
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
        new, self._given = certain[len(self._given) :], certain
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

    def _pending_text(self) -> str:
        context = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(context) :]

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        if text:  # tokens without text stay pending: later tokens are decoded together with them
            self._context, self._pending, self._given = self._pending, [], ""
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if token_ids else ""


class Tokenizer:
    """The tokenizer of one model directory."""

    def __init__(self, directory: str | Path) -> None:
        """Reads tokenizer.json. Raises TokenizerError when it is missing or cannot be read."""
        self._directory = Path(directory)
        path = self._directory / "tokenizer.json"
        if not _is_there(path):
            raise TokenizerError(f"{self._directory} has no tokenizer.json: text needs one, prompt_token_ids do not")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} is not a readable tokenizer: {error}; copy the file again") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def open(cls, directory: str | Path) -> Tokenizer | None:
        """The directory's tokenizer, or None when there is none: then requests use token ids."""
        return cls(directory) if _is_there(Path(directory) / "tokenizer.json") else None

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_token_ids

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. TokenizerError for text with half a character, which has no bytes."""
        try:
            check_text(text)
        except ValueError as error:
            raise TokenizerError(f"the text {error}") from None
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens at once, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """The text of one token, also of a special one; U+FFFD for a part of a character."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def stream(self) -> TextStream:
        """A new detokenizer for one output."""
        return TextStream(self._tokenizer, self._special_token_ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation ({"role", "content"} each) up to where the assistant answers, by the model's chat template.

        TokenizerError when the model has no template, or the template refuses the conversation.
        """
        # The template writes the special tokens itself.
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def check_chat_template(self) -> None:
        """Raises TokenizerError when the model has no chat template."""
        self._chat_template(self._config())

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that `encode_chat` encodes."""
        config = self._config()
        source = self._chat_template(config)
        from flowrt.serving.chat_template import render_chat_template  # loads jinja2, which only chats need

        names = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        try:
            return render_chat_template(source, messages, names)
        except Exception as error:  # a template can fail in any way a program can
            text = shortened(" ".join(str(error).split()) or type(error).__name__, _MAX_ERROR_CHARACTERS)
            raise TokenizerError(f"the chat template of {self._directory} failed: {text}") from error

    def _config(self) -> dict[str, Any]:
        path = self._directory / "tokenizer_config.json"
        try:
            config = json.loads(_read(path)) if _is_there(path) else {}
        except TokenizerError:
            raise
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"{path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise TokenizerError(f"{path} does not hold a JSON object")
        return config

    def _chat_template(self, config: Mapping[str, Any]) -> str:
        path = self._directory / "chat_template.jinja"
        if _is_there(path):
            return _read(path)
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((each.get("template") for each in template if isinstance(each, dict) and each.get("name") == "default"), None)
        if not isinstance(template, str):
            raise TokenizerError(
                f"{self._directory} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
                "give a plain prompt instead"
            )
        return template


def _is_there(path: Path) -> bool:
    """Whether there is such a file. TokenizerError for one that must not be read: a pipe would never end, nor a file beyond bounds."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise TokenizerError(f"{path} is not a regular file")
    if status.st_size > MAX_FILE_BYTES:
        raise TokenizerError(f"{path} is {status.st_size >> 20} MiB long, it must be at most {MAX_FILE_BYTES >> 20} MiB")
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _token_text(token: Any) -> str:
    """A special token in tokenizer_config.json is a string, or an object with its "content", or absent."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
