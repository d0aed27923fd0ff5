"""Reads the chat templates and the special tokens of a model directory, with the precedence of transformers."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrt.errors import TokenizerError
from flowrt.text_files import TextFileError, read_text_file

MAX_FILE_BYTES = 256 << 20
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TemplateFiles:
    """`templates`: by name; one alone is the default. `special_tokens`: by the names that templates see."""

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]

    def template(self, has_tools: bool) -> str | None:
        return (self.templates.get("tool_use") if has_tools else None) or self.templates.get("default")


def read_template_files(directory: Path) -> TemplateFiles:
    """Raises TokenizerError."""
    config = _read_object(directory / "tokenizer_config.json")
    files = {"default": directory / "chat_template.jinja"} if is_file(directory / "chat_template.jinja") else {}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja")) if is_file(path)}
    templates = {name: read_text(path) for name, path in files.items()} or _named(config.get("chat_template"))
    if "added_tokens_decoder" not in config:  # as older versions of transformers saved it
        config |= _read_object(directory / "special_tokens_map.json")
    extra = config.get("extra_special_tokens")
    tokens = {name: config.get(name) for name in config if name in _SPECIAL_TOKENS or name.endswith("_token")}
    tokens |= extra if isinstance(extra, dict) else {}
    texts = {name: _token_text(token) for name, token in tokens.items()}
    return TemplateFiles(templates, {name: text for name, text in texts.items() if text is not None})


def _named(template: Any) -> dict[str, str]:
    """The templates of the key chat_template: a text, texts by name, or a list of {"name", "template"}."""
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
    by_name = template if isinstance(template, dict) else {"default": template}
    return {str(name): text for name, text in by_name.items() if isinstance(text, str)}


def _token_text(token: Any) -> str | None:
    """A special token is a text, an object with its "content", or absent. Switches such as add_bos_token are not tokens."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path)) if is_file(path) else {}
    except TokenizerError:
        raise
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return value


def is_file(path: Path) -> bool:
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


def read_text(path: Path) -> str:
    try:
        return read_text_file(path, MAX_FILE_BYTES)
    except TextFileError as error:
        raise TokenizerError(f"{path} {error.text}") from error
