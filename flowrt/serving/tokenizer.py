"""The tokenizer of a model directory: encodes text, decodes tokens, and renders the chat template.

It needs neither torch nor transformers: the `tokenizers` library reads tokenizer.json, and jinja2 (only for a chat) renders the template.
The launching process uses it for output only; a separate process tokenizes prompts (tokenizer_process.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from flowrt.errors import TokenizerError, shortened
from flowrt.launcher.tokenizer_files import missing_tokenizer
from flowrt.sampling_params import check_text
from flowrt.serving.chat import Chat, ChatError
from flowrt.serving.template_files import TemplateFiles, is_file, read_template_files
from flowrt.serving.text_stream import TextStream, TokenTexts

if TYPE_CHECKING:
    from flowrt.serving.chat_template import ChatTemplate

_MAX_ERROR_CHARACTERS = 500


class Tokenizer:
    """The tokenizer of one model directory."""

    def __init__(self, directory: str | Path) -> None:
        """Reads tokenizer.json. Raises TokenizerError when it is missing or cannot be read."""
        self._directory = Path(directory)
        path = self._directory / "tokenizer.json"
        if not is_file(path):
            raise TokenizerError(missing_tokenizer(self._directory))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} is not a readable tokenizer: {error}; copy the file again") from error
        self._chat_templates: dict[str, ChatTemplate] = {}
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._texts = TokenTexts(self._tokenizer, self.special_token_ids)

    @classmethod
    def open(cls, directory: str | Path) -> Tokenizer | None:
        """The directory's tokenizer, or None when there is none: then requests use token ids."""
        return cls(directory) if is_file(Path(directory) / "tokenizer.json") else None

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

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens at once, by default without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int, is_first: bool = False) -> str:
        """The text of one token, also of a special one; U+FFFD for a part of a character. `is_first`: no text is before it."""
        return self._texts.text(token_id, is_first)

    def token_bytes(self, token_id: int, is_first: bool = False, skip_special_tokens: bool = True) -> bytes:
        """What the token adds to the UTF-8 of a text; b"" for a special one that is skipped. `is_first`: no text is before it."""
        return self._texts.utf8(token_id, is_first, skip_special_tokens)

    def stream(
        self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True, shown_token_ids: frozenset[int] = frozenset()
    ) -> TextStream:
        """A new detokenizer for one output of this prompt. `shown_token_ids`: special tokens that give text in any case."""
        return TextStream(self._tokenizer, self.special_token_ids, prompt_token_ids, skip_special_tokens, shown_token_ids)

    def special_tokens_of(self, texts: Collection[str]) -> frozenset[int]:
        """The special tokens that are one of these texts."""
        return frozenset(each for each in self.special_token_ids if self._tokenizer.id_to_token(each) in texts)

    def encode_chat(self, chat: Chat | Sequence[Mapping[str, Any]], add_special_tokens: bool = False) -> list[int]:
        """Token ids of a conversation up to where the assistant answers, by the model's chat template, which writes special tokens itself.

        `chat`: messages may stand for a Chat of them. TokenizerError when the model has no template, or the template refuses the
        conversation or leaves out a message.
        """
        return self.encode(self.render_chat(chat), add_special_tokens)

    def check_chat_template(self) -> None:
        """Raises TokenizerError when the model has no chat template."""
        self._template_source(has_tools=False)

    def chat_problem(self) -> str:
        """Why no chat can be rendered, one line; "": nothing is wrong with the template as it is written, or the model has none."""
        from flowrt.serving.chat_template import check_template

        try:
            if (source := self._template_files.template(has_tools=False)) is not None:
                check_template(source)
        except TokenizerError as error:
            return str(error)
        except Exception as error:  # a template can fail in any way a program can
            return self._template_error(error)
        return ""

    def _template_error(self, error: Exception) -> str:
        text = shortened(" ".join(str(error).split()) or type(error).__name__, _MAX_ERROR_CHARACTERS)
        return f"the chat template of {self._directory} failed: {text}"

    def render_chat(self, chat: Chat | Sequence[Mapping[str, Any]]) -> str:
        """The text that `encode_chat` encodes."""
        if not isinstance(chat, Chat):
            chat = Chat([dict(message) for message in chat])
        try:
            return self._chat_template(self._template_source(bool(chat.tools))).render(chat)
        except ChatError as error:
            raise TokenizerError(error.text, param=error.path) from None
        except TokenizerError:
            raise
        except Exception as error:  # a template can fail in any way a program can
            raise TokenizerError(self._template_error(error)) from error

    @cached_property
    def _template_files(self) -> TemplateFiles:
        return read_template_files(self._directory)

    def _template_source(self, has_tools: bool) -> str:
        if (source := self._template_files.template(has_tools)) is None:
            raise TokenizerError(
                f"{self._directory} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
                "give a plain prompt instead"
            )
        return source

    def _chat_template(self, source: str) -> ChatTemplate:
        from flowrt.serving.chat_template import ChatTemplate  # loads jinja2, which only chats need

        if source not in self._chat_templates:
            self._chat_templates[source] = ChatTemplate(source, self._template_files.special_tokens)
        return self._chat_templates[source]
