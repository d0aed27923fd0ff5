"""Renders chat templates in a sandbox, with the names and tags that transformers gives them.

A template is not trusted, and it may leave out what it does not know. So each conversation is rendered a second time with a mark in each
message: a message whose mark is missing, and without which the text is the same, is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateAssertionError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from flowrt.serving.chat import TEXT_PARTS, Chat, ChatError

Message = dict[str, Any]
_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool", "function"})
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; templates read the first, those of gpt-oss the second
_CALLS = ("tool_calls", "function_call")
_MAX_SUSPECTS = 4
_MARK = re.compile(r"qzx\d+p\d+xzq")  # of a message and one of its texts
_PART_MARK = "qzxpartxzq"  # a key of each part: it is in the text if a template writes a list as it is
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def _new_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _Dict(), "namespace": _Namespace}
    return environment


def check_template(source: str) -> None:
    """Raises what jinja2 raises for a template that is wrong. Runs nothing of it, as compiling does: "a" * 10**10 is computed there."""
    environment = _new_environment()
    left: list[nodes.Node] = [environment.parse(source)]
    while left:
        node = left.pop()
        if isinstance(node, nodes.If | nodes.CondExpr):  # what a condition leaves out may be unknown
            continue
        if isinstance(node, nodes.Filter | nodes.Test):
            known = environment.filters if isinstance(node, nodes.Filter) else environment.tests
            if node.name not in known:
                raise TemplateAssertionError(f"No {type(node).__name__.lower()} named {node.name!r}.", node.lineno)
        left += node.iter_child_nodes()


class ChatTemplate:
    """A compiled template. Raises what jinja2 raises for one that is wrong."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _new_environment()
        self._template, self._special_tokens = environment.from_string(source), special_tokens
        constants = {each.value for each in environment.parse(source).find_all(nodes.Const) if isinstance(each.value, str)}
        self._knows_developer = "developer" in constants

    def render(self, chat: Chat) -> str:
        """The text of a conversation. Raises ChatError for a message that the template leaves out, and whatever the template raises."""
        if chat.continue_final_message and not chat.messages[-1].get("content"):
            raise ChatError(f"messages[{len(chat.messages) - 1}].content", "is missing, so that it cannot be continued")
        messages, lost = self._choose_form(chat, [self._prepared(message) for message in chat.messages])
        if chat.continue_final_message:
            return _cut_tag(self._render(chat, [*messages[:-1], _with_tag(messages[-1])]), messages[-1])
        text = self._render(chat, messages)
        for index in lost:
            self._check_lost(chat, messages, index, text)
        return text

    def _choose_form(self, chat: Chat, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The messages with contents of the kind that the template takes, as they are or else as texts or as lists of parts; and the
        positions of those that it seems to leave out."""
        best: tuple[list[Message], list[int]] | None = None
        for form in _forms(messages):
            marked = [_marked(message, index) for index, message in enumerate(form)]
            try:
                text = self._render(chat, [message for message, _ in marked])
            except Exception:  # the template fails in any way that a program can
                continue
            if _PART_MARK in text:
                continue
            found = set(_MARK.findall(text))
            lost = [index for index, (_, marks) in enumerate(marked) if not found.issuperset(marks)]
            if not lost:
                return form, []
            if best is None or len(lost) < len(best[1]):
                best = form, lost
        if best is None:
            return next(form for form in _forms(messages) if not _has_list(form)), []
        roles = {best[0][index]["role"]: index for index in reversed(best[1])}  # the first of each role
        suspects = sorted(index for role, index in roles.items() if not (role in _KNOWN_ROLES and self._drops_earlier_messages))
        return best[0], suspects[:_MAX_SUSPECTS]

    def _check_lost(self, chat: Chat, messages: list[Message], index: int, text: str) -> None:
        """Raise ChatError if `text` does not depend on this message."""
        message = messages[index]
        calls = next((name for name in _CALLS if message.get(name)), None)
        changed = _marked(message, index)[0] if calls is None else {name: value for name, value in message.items() if name not in _CALLS}
        try:
            is_same = self._render(chat, [*messages[:index], changed, *messages[index + 1 :]]) == text
        except Exception:
            return
        if is_same:
            where = f"messages[{index}]" if calls is None else f"messages[{index}].{calls}"
            role = message["role"][:40]
            raise ChatError(where, f"of role {role!r} leaves no trace in the text: the chat template of the model does not take it there")

    @cached_property
    def _drops_earlier_messages(self) -> bool:
        """Whether the template drops all messages but the last, whatever their role."""
        messages = [{"role": role, "content": f"qzx{at}p0xzq"} for at, role in enumerate(("user", "assistant", "user"))]
        try:
            return _MARK.findall(self._render(Chat([]), messages)) in ([], ["qzx2p0xzq"])
        except Exception:
            return False

    def _render(self, chat: Chat, messages: list[Message]) -> str:
        names = {"tools": chat.tools or None, "documents": chat.documents or None, "add_generation_prompt": chat.add_generation_prompt}
        return self._template.render(dict(self._special_tokens) | chat.kwargs | names | {"messages": messages})

    def _prepared(self, message: Mapping[str, Any]) -> Message:
        """A message as transformers passes it, with what OpenAI's API alone has in the words of templates."""
        new = {name: value for name, value in message.items() if value is not None}
        if new["role"] == "developer" and not self._knows_developer:
            new["role"] = "system"
        if isinstance(content := new.get("content"), list):
            new["content"] = [_text_part(part) for part in content] or ""
        elif content is None and isinstance(refusal := new.get("refusal"), str):
            new["content"] = refusal
        if (reasoning := next((new[name] for name in _REASONING if name in new), None)) is not None:
            new = {"thinking": reasoning, **new, "reasoning_content": reasoning}
        if calls := new.get("tool_calls"):
            new["tool_calls"] = [call | {"function": _with_arguments(call["function"])} for call in calls]
        return new


def _text_part(part: Any) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {**part, "type": "text", "text": part[TEXT_PARTS[part["type"]]]}


def _with_arguments(function: Message) -> Message:
    """Makes arguments an object, as templates expect them. A text that is not JSON, or half a character of which it escapes, such as one
    that a model wrote, stays as it is."""
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
            json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError):  # of the second, a UnicodeEncodeError
            return function
    return function | {"arguments": arguments}


def _has_list(messages: list[Message]) -> bool:
    return any(isinstance(message.get("content"), list) for message in messages)


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    if _has_list(messages):
        yield messages
    texts = [message | {"content": _joined(message["content"])} if "content" in message else message for message in messages]
    yield texts
    if not all("content" in message for message in texts):  # beside calls; some templates need one
        yield [{"content": ""} | message for message in texts]
    yield [message | {"content": [_text_part(message["content"])]} if message.get("content") else message for message in texts]


def _joined(content: str | list[Message]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _with_tag(message: Message) -> Message:
    """Adds the tag at the end of its text, or of the last of its parts."""
    if isinstance(content := message["content"], str):
        return message | {"content": content + _TAG}
    return message | {"content": [*content[:-1], content[-1] | {"text": content[-1]["text"] + _TAG}]}


def _marked(message: Message, index: int) -> tuple[Message, list[str]]:
    """With a mark at the end of each of its texts, or else of the names of the functions that it calls, beside which many templates leave
    out the text; and these marks."""
    marks: list[str] = []

    def mark(text: str) -> str:
        if text.strip():
            marks.append(f"qzx{index}p{len(marks)}xzq")
        return text + marks[-1] if text.strip() else text

    content, calls, call = (message.get(name) for name in ("content", "tool_calls", "function_call"))
    if calls:
        message = message | {"tool_calls": [each | {"function": _renamed(each["function"], mark)} for each in calls]}
    elif call:
        message = message | {"function_call": _renamed(call, mark)}
    elif isinstance(content, str):
        message = message | {"content": mark(content)}
    if isinstance(content, list):
        texts = [part["text"] if calls or call else mark(part["text"]) for part in content]
        message = message | {"content": [part | {"text": text, _PART_MARK: ""} for part, text in zip(content, texts, strict=True)]}
    return message, marks


def _renamed(function: Message, change: Callable[[str], str]) -> Message:
    return function | {"name": change(function["name"])}


def _cut_tag(text: str, message: Message) -> str:
    """The text up to the tag at the end of the message that is continued, as transformers cuts it."""
    content = message["content"] if isinstance(message["content"], str) else message["content"][-1]["text"]
    at = text.rfind(_TAG.strip())
    if at < 0 or content.strip() not in text:
        raise ChatError("continue_final_message", "is not possible: the chat template of the model changes the last message")
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's tokens for training; here its text is kept as it is."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)  # a scope of its own, as in transformers

    def _text(self, caller: Macro) -> str:
        return str(caller())


class _Dict:
    """`dict` of templates, without what else a class has."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` of templates, without names that Python gives a meaning."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as jinja2's, so that `self` may be a name
        self, *values = args
        names = dict(*values, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the name {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(text: str) -> None:
    raise TemplateError(text)


def _strftime_now(layout: str) -> str:
    """The local date and time: templates write today's date into the system message."""
    return datetime.now().strftime(layout)
