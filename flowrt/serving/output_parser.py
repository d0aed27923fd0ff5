"""Splits the text of an answer into content, reasoning and tool calls as it comes, by the forms in output_formats.py. Pure.

However the text is cut into pieces, the deltas add up to the same. A call is shown from its name and the beginning of its arguments on;
text that does not become a call is content, so that nothing is lost, but for an output of calls alone (ToolFormat.is_whole), and behind a
call for what an answer ends in: the beginning of a marker, or of another call. An answer that ends inside a call leaves its arguments
incomplete: a prefix of what they would have been.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from flowrt.sampling_params import check_text
from flowrt.serving.argument_types import argument_json, argument_types
from flowrt.serving.output_formats import Either, Element, Many, ReasoningFormat, Slot, ToolFormat, beginnings
from flowrt.serving.text_reader import CutTextError, NotReadError, Steps, TextReader

MAX_NAME_CHARACTERS = 256
_NAME = re.compile(rf"""\s{{0,64}}[^\s<>{{}}\[\]()"'=,;]{{0,{MAX_NAME_CHARACTERS}}}\s{{0,64}}""")
_KEY = re.compile(r"[^\n<>]{0,256}")
_CALL_ID = re.compile(r"(?:functions\.)?(.+):\d+")
_CALLS = (Slot.NAME, Slot.ID, Slot.OBJECT, Slot.PYTHON)  # each call has one of these
_OBJECT_KEYS = ("id", "type")  # of an object without a marker, beside the name and the arguments


@dataclass(slots=True)
class ContentDelta:
    text: str


@dataclass(slots=True)
class ReasoningDelta:
    text: str


@dataclass(slots=True)
class CallDelta:
    """A part of a tool call. The first part of a call has its `name`, and its `id` where the model gives one."""

    index: int
    name: str | None = None
    id: str | None = None
    arguments: str = ""


OutputDelta = ContentDelta | ReasoningDelta | CallDelta  # what a piece of text adds to an answer


def joined(deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
    """Neighbours of one kind, or of one call, as one. In linear time: an answer may have a million."""
    return [_joined(list(each)) for _, each in groupby(deltas, key=lambda delta: (type(delta), getattr(delta, "index", 0)))]


def _joined(deltas: list[OutputDelta]) -> OutputDelta:
    first = deltas[0]
    if isinstance(first, CallDelta):
        return CallDelta(first.index, first.name, first.id, "".join(each.arguments for each in deltas if isinstance(each, CallDelta)))
    return type(first)("".join(each.text for each in deltas if not isinstance(each, CallDelta)))


def can_be_named(name: str) -> bool:
    """Whether calls of a function of this name are found in each form."""
    return bool(name) and name == name.strip() and _NAME.fullmatch(name) is not None


class _BorderedText:
    """Text beside markers: white space between a marker and the beginning or the end of the text is dropped. `is_after_marker`: nothing but
    white space has come since the last marker."""

    def __init__(self, is_after_marker: bool = False) -> None:
        self._held, self.is_after_marker, self._has_shown = "", is_after_marker, False

    def add(self, text: str) -> str:
        text = self._held + text
        if self.is_after_marker and not self._has_shown:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            self.is_after_marker, self._has_shown = False, True
        return shown

    def end(self) -> str:
        held, self._held = self._held, ""
        return "" if self.is_after_marker else held


class OutputParser:
    """One answer. `schemas`: of the arguments, by the name of the function. `is_in_reasoning`: the prompt has opened the reasoning.
    `max_calls`: further ones are dropped."""

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        schemas: Mapping[str, Any],
        *,
        is_in_reasoning: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._tools, self._reasoning, self._schemas, self._max_calls = tools or ToolFormat(), reasoning, schemas, max_calls
        self.is_in_reasoning = is_in_reasoning and reasoning is not None
        self.num_calls = self._num_whole_calls = 0
        self._text = TextReader()  # marked where what is read is not yet a call for certain
        self._is_bare = False
        self._name = ""  # of the call
        self._id: str | None = None
        self._key, self._num_values = "", 0
        self._content, self._deltas = _BorderedText(), list[OutputDelta]()
        self._steps = self._read_answer()

    @property
    def has_cut_call(self) -> bool:
        """Whether the arguments of a call are incomplete."""
        num_shown = self.num_calls if self._max_calls is None else min(self.num_calls, self._max_calls)
        return num_shown > self._num_whole_calls

    def push(self, text: str) -> list[OutputDelta]:
        """Add text. Returns what is certain now, in order."""
        self._text.push(text)
        return self._step()

    def finish(self) -> list[OutputDelta]:
        """The answer has ended."""
        self._text.has_ended = True
        deltas, end = self._step(), self._content.end()
        return joined([*deltas, ContentDelta(end)]) if end else deltas

    def _step(self) -> list[OutputDelta]:
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return joined(deltas)

    # The answer.

    def _read_answer(self) -> Steps:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._tools.bare:
            self._show(self._text.take((yield from self._text.find_text())))
            self._is_bare = True
            is_read = yield from self._try_calls(self._tools.bare)
            self._is_bare = False
            if self._tools.is_whole:
                yield from self._end_whole("" if is_read else self._name)
        begins = beginnings(self._tools.calls)

        def show(text: str) -> None:
            is_cut = self._text.has_ended and self.num_calls and self._content.is_after_marker
            if not is_cut or not any(begin.startswith(text.strip()) for begin in begins):
                self._show(text)

        while (yield from self._text.scan(begins, show)) is not None:
            if not (yield from self._try_calls(self._tools.calls)):
                self._show(self._text.take(self._text.at + len(self._text.begins_with(begins))))

    def _end_whole(self, name: str) -> Steps:
        """Ends an output of calls alone, which has no content wherever it is cut. `name`: of the call that has no arguments yet, or ""; the
        first call of the only function has its name from the start."""
        self._content.is_after_marker = True
        yield from self._text.scan((), lambda _: None)
        self._name = name or (next(iter(self._schemas)) if len(self._schemas) == 1 and not self.num_calls else "")
        if self._name in self._schemas:
            self._begin_call("")

    def _read_reasoning(self, form: ReasoningFormat) -> Steps:
        self._show(self._text.take((yield from self._text.find_text())))
        if (yield from self._text.peek((form.begin,))) is not None:
            self.is_in_reasoning = True
            self._text.at += len(form.begin)
        if not self.is_in_reasoning:
            return
        text = _BorderedText(is_after_marker=True)

        def show(piece: str) -> None:
            self._add_reasoning(text.add(piece))

        end = yield from self._text.scan((form.end, *form.ends), show)
        if end is None:
            self._add_reasoning(text.end())
        elif end == form.end:
            self._text.at += len(end)
        self._content.is_after_marker = True
        self.is_in_reasoning = False

    def _try_calls(self, form: tuple[Element, ...]) -> Generator[None, None, bool]:
        """Reads calls. Where the text is not as the form says, what comes after the last call is left to be read. Returns whether all
        that was looked at is read."""
        self._text.mark, is_cut = self._text.at, False
        try:
            yield from self._read(form, ())
        except NotReadError as error:
            is_cut = isinstance(error, CutTextError)
        mark = self._text.mark
        if is_cut and self.num_calls:
            self._text.drop_rest()
        elif mark is not None:
            self._text.at, self._text.mark = mark, None
        return mark is None

    # Elements of a form.

    def _read(self, elements: tuple[Element, ...], follow: tuple[str, ...]) -> Steps:
        """`follow`: the beginnings of what comes after the elements."""
        for index, element in enumerate(elements):
            rest = elements[index + 1 :]
            ends = beginnings(rest) + (follow if all(isinstance(each, Many) for each in rest) else ())
            match element:
                case str():
                    yield from self._text.expect(element)
                case Slot():
                    yield from self._read_slot(element, ends)
                case Many():
                    yield from self._read_many(element, ends)
                case Either():
                    yield from self._text.skip_space()
                    is_first = (yield from self._text.peek(beginnings(element.first))) is not None
                    yield from self._read(element.first if is_first else element.second, ends)

    def _read_many(self, many: Many, ends: tuple[str, ...]) -> Steps:
        starts = beginnings(many.elements)
        has_values, has_calls = Slot.KEY in many.elements, any(slot in many.elements for slot in _CALLS)
        if has_values:
            yield from self._text.skip_space()
            if (yield from self._text.peek(starts + ends)) is None:
                raise self._text.fault(starts + ends)
            self._begin_call("{")
        while True:
            yield from self._text.skip_space()
            found = yield from self._text.peek(starts or ends)
            if found is None and self._text.is_cut_in(starts):
                raise CutTextError
            if (found is None) == bool(starts):
                break
            if (has_calls or has_values) and self._text.mark is None:
                self._text.mark = self._text.at
            yield from self._read(many.elements, (starts if many.is_repeated else ()) + ends)
            if not many.is_repeated:
                break
        if has_values:
            if (yield from self._text.peek(ends)) is None:
                raise self._text.fault(ends)
            self._add("}")
            self._num_whole_calls += 1

    def _read_slot(self, slot: Slot, ends: tuple[str, ...]) -> Steps:
        match slot:
            case Slot.NAME:
                self._name = (yield from self._text.field(ends, _NAME)).strip()
            case Slot.ID | Slot.CALL_ID:
                text = (yield from self._text.field(ends, _NAME)).strip()
                if slot is Slot.ID:
                    if (named := _CALL_ID.fullmatch(text)) is None:
                        raise NotReadError
                    self._name, self._id = named[1], text
            case Slot.KEY:
                self._key = yield from self._text.field(ends, _KEY)
            case Slot.VALUE | Slot.LINES:
                yield from self._read_value(ends, slot is Slot.LINES)
            case Slot.JSON:
                yield from self._text.skip_space()
                if (yield from self._text.peek(("{",))) is None:
                    if (yield from self._text.peek(ends)) is None:
                        raise self._text.fault(("{", *ends))
                    self._begin_call("{}")
                else:
                    self._begin_call("")
                    yield from self._text.copy_json(self._add)
                self._num_whole_calls += 1
            case Slot.OBJECT:
                yield from self._read_object()
            case Slot.PYTHON:
                yield from self._read_python_call()

    def _begin_call(self, arguments: str) -> None:
        """From here on the text is a call."""
        if not self._name or (self._is_bare and self._name not in self._schemas):
            raise NotReadError
        self._text.mark = None
        self._content.is_after_marker = True
        self.num_calls += 1
        self._num_values = 0
        self._emit(CallDelta(self.num_calls - 1, self._name, self._id, arguments))
        self._id = None

    def _add(self, arguments: str) -> None:
        """Adds to the arguments of the call."""
        if arguments:
            self._emit(CallDelta(self.num_calls - 1, arguments=arguments))

    def _emit(self, delta: CallDelta) -> None:
        if self._max_calls is None or delta.index < self._max_calls:
            self._deltas.append(delta)

    def _read_value(self, ends: tuple[str, ...], is_lines: bool) -> Steps:
        """Text is shown as it comes; other values when they are whole."""
        types = argument_types(self._schemas.get(self._name), self._key)
        self._text.mark = None
        self._add(("" if not self._num_values else ", ") + json.dumps(self._key, ensure_ascii=False) + ": ")
        self._num_values += 1
        if is_lines and (yield from self._text.peek(("\n",))) is not None:
            self._text.at += 1
        is_text = types == {"string"}
        if is_text:
            self._add('"')
        held = ""  # a line end that may be the last one, or a whole value that is not text

        def take(piece: str) -> None:
            nonlocal held
            held += piece
            if is_text:
                num_held = int(is_lines and held.endswith("\n"))
                self._add(json.dumps(held[: len(held) - num_held], ensure_ascii=False)[1:-1])
                held = held[len(held) - num_held :]

        if (yield from self._text.scan(ends, take, takes_cut_end=False)) is None:
            raise CutTextError
        self._add('"' if is_text else argument_json(held[:-1] if is_lines and held.endswith("\n") else held, types))

    def _read_object(self) -> Steps:
        """An object with the name of a function and its arguments, in either order."""
        yield from self._text.expect("{")
        self._name, arguments, is_shown = "", "", False
        while True:
            yield from self._text.skip_space()
            key = _json_text((yield from self._text.json_value()))
            yield from self._text.expect(":")
            yield from self._text.skip_space()
            if key in ("arguments", "parameters") and not is_shown and not arguments:
                if self._name and (yield from self._text.peek(("{",))) is not None:
                    self._begin_call("")
                    is_shown = True
                    yield from self._text.copy_json(self._add)
                else:
                    arguments = _as_object((yield from self._text.json_value()))
            elif key == "name" and not is_shown:
                self._name = _json_text((yield from self._text.json_value()))
                if _NAME.fullmatch(self._name) is None:
                    raise NotReadError
            elif self._is_bare and key not in _OBJECT_KEYS:
                raise NotReadError
            else:
                yield from self._text.json_value()
            yield from self._text.skip_space()
            if (yield from self._text.peek(("}", ","))) == "}":
                break
            yield from self._text.expect(",")
        if not is_shown:
            if not arguments:
                raise NotReadError
            self._begin_call(arguments)
        self._num_whole_calls += 1
        self._name = ""
        self._text.at += 1

    def _read_python_call(self) -> Steps:
        self._name = (yield from self._text.field(("(",), _NAME)).strip()
        self._begin_call(_python_arguments((yield from self._text.python_value())))
        self._num_whole_calls += 1

    def _show(self, text: str) -> None:
        if text := self._content.add(text):
            self._deltas.append(ContentDelta(text))

    def _add_reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(ReasoningDelta(text))


def _json_text(json_value: str) -> str:
    """A string. Raises NotReadError for other values, and for half a character."""
    try:
        value = json.loads(json_value, strict=False)
        if isinstance(value, str):
            check_text(value)
            return value
    except (ValueError, RecursionError):
        pass
    raise NotReadError


def _as_object(json_value: str) -> str:
    """Arguments as an object; some models write its text as a string, or null for none."""
    if json_value.startswith("{"):
        return json_value
    return "{}" if json_value.strip() == "null" else _as_object(_json_text(json_value).strip())


def _python_arguments(text: str) -> str:
    """The arguments in "(a=1, b='x')" as a JSON object. A character may be written as two escapes, as in JSON."""
    try:
        call = ast.parse(f"call{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise NotReadError
        values = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if None in values:
            raise NotReadError
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode("utf-16", "surrogatepass").decode("utf-16")
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise NotReadError from None
