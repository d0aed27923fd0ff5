"""Renders chat templates in a sandbox, with the names and tags that transformers gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training; here its text is kept as it is."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)  # a scope of its own, as in transformers

    def _text(self, caller: Macro) -> str:
        return str(caller())


def render_chat_template(template: str, messages: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """The text of a conversation up to where the assistant answers. Raises whatever the template raises."""
    # A template comes with the weights and is not trusted: the sandbox only lets it compute text.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template).render(messages=list(messages), add_generation_prompt=True, **names)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(text: str) -> None:
    raise TemplateError(text)


def _strftime_now(layout: str) -> str:
    """The local date and time: templates write today's date into the system message."""
    return datetime.now().strftime(layout)
