"""The tokenizer of a model directory: encodes text, decodes tokens, and renders the chat template.

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
from flowrt.serving.text_stream import TextStream, TokenTexts

MAX_FILE_BYTES = 256 << 20
_MAX_ERROR_CHARACTERS = 500


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
        self._texts = TokenTexts(self._tokenizer, self._special_token_ids)

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

    def token_text(self, token_id: int, is_first: bool = False) -> str:
        """The text of one token, also of a special one; U+FFFD for a part of a character. `is_first`: no text is before it."""
        return self._texts.text(token_id, is_first)

    def token_bytes(self, token_id: int, is_first: bool = False) -> bytes:
        """What the token adds to the UTF-8 of a text; b"" for a special one. `is_first`: no text is before it."""
        return self._texts.utf8(token_id, is_first)

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> TextStream:
        """A new detokenizer for one output of this prompt."""
        return TextStream(self._tokenizer, self._special_token_ids, prompt_token_ids)

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
