"""Answers in the forms of output_formats.py: content, reasoning and tool calls, whole and cut anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.serving.argument_types import argument_types
from flowrt.serving.choice_text import TextPiece
from flowrt.serving.output_formats import REASONING_FORMATS, REQUIRED_CALLS, TOOL_FORMATS, ToolFormat, find_formats, markers
from flowrt.serving.output_parser import CallDelta, OutputParser, joined

F = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"$ref": "#/$defs/Point"},
        "l": {"anyOf": [{"type": "array"}, {"type": "null"}]},
    },
    "$defs": {"Point": {"type": "object"}},
}
SCHEMAS: dict[str, Any] = {"f": F, "g": {}, "get-weather.now": {}}
Calls = list[tuple[str, str]]  # names and arguments
Parsed = tuple[str, str, list[CallDelta]]


def piece_of(
    form: ToolFormat | str,
    pieces: Iterable[str],
    reasoning: str = "",
    is_in_reasoning: bool = False,
    max_calls: int | None = None,
    schemas: dict[str, Any] = SCHEMAS,
) -> TextPiece:
    tools = TOOL_FORMATS.get(form) if isinstance(form, str) else form
    options: dict[str, Any] = {"is_in_reasoning": is_in_reasoning, "max_calls": max_calls}
    parser = OutputParser(tools, REASONING_FORMATS.get(reasoning), schemas, **options)
    found = TextPiece(0, joined([delta for deltas in (*map(parser.push, pieces), parser.finish()) for delta in deltas]))
    assert len(found.parts()[2]) == (parser.num_calls if max_calls is None else min(parser.num_calls, max_calls))
    return found


def parse(*arguments: Any) -> Parsed:
    """Content, reasoning and calls."""
    return piece_of(*arguments).parts()


def assert_cuts_change_nothing(text: str, *arguments: Any) -> Parsed:
    form, *rest = arguments
    whole = piece_of(form, [text], *rest)
    assert piece_of(form, list(text), *rest) == whole
    for at in range(1, len(text)):
        assert piece_of(form, [text[:at], text[at:]], *rest) == whole, f"cut before {text[at:]!r}"
    return whole.parts()


CASES: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        'Hello\n<tool_call>\n{"name": "f", "arguments": {"a": "} </tool_call> \\" ü", "n": [1, {}]}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"name": 1}, "name": "g"}\n</tool_call>\n',
        "Hello",
        [("f", '{"a": "} </tool_call> \\" ü", "n": [1, {}]}'), ("g", '{"name": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call> b', "</tool_call> b", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}', "", [("f", "{}"), ("g", "{}")]),
    (
        "qwen3_coder",
        '<tool_call>\n<function=f>\n<parameter=a>\n"1"\n\\2\n\n</parameter>\n<parameter=n>\n12\n</parameter>\n'
        '<parameter=o>\n{"x": 1.50}\n</parameter>\n<parameter=l>\nNone\n</parameter>\n</function>\n</tool_call>',
        "",
        [("f", '{"a": "\\"1\\"\\n\\\\2\\n", "n": 12, "o": {"x": 1.50}, "l": null}')],
    ),
    ("qwen3_coder", "I see.\n\n<function=g>\n</function>", "I see.", [("g", "{}")]),
    (
        "qwen3_coder",
        "<function=f><parameter=n>many</parameter><parameter=z>[1]</parameter></function>",
        "",
        [("f", '{"n": "many", "z": [1]}')],
    ),
    (
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x\n</arg_value>\n<arg_key>n</arg_key><arg_value>-5</arg_value>\n</tool_call>"
        "<tool_call>g</tool_call>",
        "",
        [("f", '{"a": "x\\n", "n": -5}'), ("g", "{}")],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">5</parameter></invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        "",
        [("f", '{"a": "5"}'), ("g", "{}")],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get-weather.now:0\n<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>g:1<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>",
        "",
        [("get-weather.now", "{}"), ("g", "{}")],
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "```"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("f", '{"a": "```"}'), ("g", "{}")],
    ),
    (
        "deepseek_v31",
        'So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "b"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "So:",
        [("f", '{"a": "b"}'), ("g", "{}")],
    ),
    (
        "mistral",
        'Hi[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"arguments": {"name": 2}, "name": "g", "id": "abc"}]\nmore',
        "Hi\nmore",
        [("f", '{"a": 1}'), ("g", '{"name": 2}')],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 3.5}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', "", [("f", '{"a": 3.5}'), ("g", "{}")]),
    (
        "pythonic",
        "[f(a='(\\'', n=-1, o={'x': [True, None]}), g()]",
        "",
        [("f", '{"a": "(\'", "n": -1, "o": {"x": [true, null]}}'), ("g", "{}")],
    ),
    ("pythonic", "[f(a='\\ud83d\\ude00é')]", "", [("f", '{"a": "😀é"}')]),
    ("pythonic", "Yes <|python_start|>[g()]<|python_end|>", "Yes", [("g", "{}")]),
    ("llama3_json", ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [("f", '{"a": 1}'), ("g", "{}")]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("seed_oss", "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>", "", [("g", "{}")]),
]
# They are content as they are.
NO_CALLS = [
    ("hermes", 'the <tool_call> tag of\n<tool_call>\n{"name": "f", "arguments": oops}\n</tool_call> b\n'),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ("hermes", "a < b <tool_"),
    ("qwen3_coder", f"<tool_call><function={' ' * 20_000}x y"),
    ("glm45", f"<tool_call>{chr(10) * 20_000}<tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>junk"),
    ("qwen3_coder", "<tool_call>\nf(1)</tool_call>"),
    ("glm45", "<tool_call>two words</tool_call>"),
    ("minimax_m2", "<minimax:tool_call></minimax:tool_call>"),
    ("kimi_k2", "<|tool_call_begin|>g<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>code<｜tool▁sep｜>f"),
    ("mistral", "[TOOL_CALLS] not json at all"),
    ("pythonic", "[1] see [f(a=1)]"),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=g())]"),
    ("pythonic", "[f(**{})]"),
    ("pythonic", "[f(a='\\ud800')]"),
    ("pythonic", f"[f(a={'[' * 5000}"),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '{"name": "f", "age": 3}'),
    ("llama3_json", 'hello {"name": "f", "parameters": {}}'),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found_wherever_the_text_is_cut(form: str, text: str, content: str, calls: Calls) -> None:
    found, _, deltas = assert_cuts_change_nothing(text, form)
    assert (found, [(each.name, each.arguments) for each in deltas]) == (content, calls)
    assert [each.index for each in deltas] == list(range(len(calls)))
    assert [each.id for each in deltas if form == "kimi_k2"] == (["functions.get-weather.now:0", "g:1"] if form == "kimi_k2" else [])


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_content(form: str, text: str) -> None:
    parsed = parse(form, [text]) if len(text) > 1000 else assert_cuts_change_nothing(text, form)
    assert parsed == (text, "", [])


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_an_answer_may_end_anywhere(form: str) -> None:
    for name, text, whole_content, calls in CASES:
        for length in range(len(text) if name == form else 0):
            content, _, deltas = parse(form, [text[:length]])
            assert parse(form, list(text[:length])) == (content, "", deltas)
            assert [each.name for each in deltas] == [call for call, _ in calls[: len(deltas)]]
            for found, (_, arguments) in zip(deltas[:-1], calls, strict=False):
                assert found.arguments == arguments
            if deltas:
                assert whole_content.startswith(content), "no part of a marker or of another call"
                assert calls[len(deltas) - 1][1].startswith(deltas[-1].arguments)
            if deltas and deltas[-1].arguments != calls[len(deltas) - 1][1]:
                with pytest.raises(json.JSONDecodeError):  # nothing takes it for the whole arguments
                    json.loads(deltas[-1].arguments)
            assert deltas or content == text[:length]


def test_further_calls_are_dropped() -> None:
    text = CASES[0][1]
    assert [each.name for each in piece_of("hermes", [text], max_calls=1).parts()[2]] == ["f"]
    parser = OutputParser(TOOL_FORMATS["hermes"], None, {"f": {}, "g": {}}, max_calls=1)
    parser.push(text + '<tool_call>{"name": "f", "arguments": {"a"')
    parser.finish()
    assert not parser.has_cut_call, "what is cut is dropped"


def test_required_calls() -> None:
    text = ' [{"name": "f", "parameters": {"a": "b"}}, {"name":"g","parameters":{}}]'
    assert assert_cuts_change_nothing(text, REQUIRED_CALLS) == (
        "",
        "",
        [CallDelta(0, "f", None, '{"a": "b"}'), CallDelta(1, "g", None, "{}")],
    )


@pytest.mark.parametrize("schemas", [{"f": F}, SCHEMAS])
def test_required_calls_that_are_cut_have_no_content(schemas: dict[str, Any]) -> None:
    """A call is there from its name on; the first one of the only function is there from the beginning."""
    text = ' [{"name": "f", "parameters": {"a": "b"}}, {"name":"f","parameters":{}}]'
    names = [m for m in range(len(text)) if text[:m].endswith('"f"')]
    for length in range(len(text)):
        parsed = parse(REQUIRED_CALLS, [text[:length]], "", False, None, schemas)
        assert parse(REQUIRED_CALLS, list(text[:length]), "", False, None, schemas) == parsed
        content, _, calls = parsed
        num_calls = max(sum(length >= at for at in names), int(len(schemas) == 1))
        assert (content, [each.name for each in calls]) == ("", ["f"] * num_calls), text[:length]
        assert all(whole.startswith(each.arguments) for each, whole in zip(calls, ('{"a": "b"}', "{}"), strict=False))


@pytest.mark.parametrize(
    ("text", "is_open", "content", "reasoning", "name"),
    [
        ("<think>\nhm\n</think>\n\n4", False, "4", "hm", None),
        ("hm </think> 4", True, "4", "hm", None),
        ("<think>hm</think>4", True, "4", "hm", None),
        ("\nhm, still", True, "", "hm, still", None),
        (" 4 is <think>", False, " 4 is <think>", "", None),
        ("</think> 4", False, "</think> 4", "", None),
        ("</think>\n\n4 ", True, "4 ", "", None),
        ('hm <tool_call> </think>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', True, "", "hm <tool_call>", "g"),
        ("a </thi", True, "", "a </thi", None),
    ],
)
def test_reasoning(text: str, is_open: bool, content: str, reasoning: str, name: str | None) -> None:
    found, thoughts, calls = assert_cuts_change_nothing(text, "hermes", "qwen3", is_open)
    assert (found, thoughts, [each.name for each in calls]) == (content, reasoning, [name] if name else [])


def test_calls_may_end_the_reasoning() -> None:
    call = "<|tool_calls_section_begin|><|tool_call_begin|>g:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    assert assert_cuts_change_nothing(f"hm {call}", "kimi_k2", "kimi_k2", True) == ("", "hm", [CallDelta(0, "g", "g:0", "{}")])


# Answers as models write them.


@dataclass
class Call:
    name: str
    arguments: dict[str, Any]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def in_functions(call: Call) -> str:
    values = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>"


def in_keys(call: Call) -> str:
    values = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in call.arguments.items())
    return f"<tool_call>{call.name}\n{values}</tool_call>"


def in_invocations(call: Call) -> str:
    values = "".join(f'<parameter name="{key}">{as_text(value)}</parameter>\n' for key, value in call.arguments.items())
    return f'<minimax:tool_call>\n<invoke name="{call.name}">\n{values}</invoke>\n</minimax:tool_call>'


def an_object(call: Call, arguments: str = "arguments") -> str:
    return json.dumps({"name": call.name, arguments: call.arguments}, ensure_ascii=False)


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{an_object(call)}\n</tool_call>" for call in calls),
    "qwen3_coder": lambda calls: "\n".join(map(in_functions, calls)),
    "glm45": lambda calls: "\n".join(map(in_keys, calls)),
    "minimax_m2": lambda calls: "\n".join(map(in_invocations, calls)),
    "deepseek_v31": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "".join(f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{json.dumps(call.arguments)}<｜tool▁call▁end｜>" for call in calls)
    ),
    "mistral": lambda calls: f"[TOOL_CALLS] [{', '.join(map(an_object, calls))}]",
    "llama3_json": lambda calls: "<|python_tag|>" + "; ".join(an_object(call, "parameters") for call in calls),
    "pythonic": lambda calls: (
        "[" + ", ".join(f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in calls) + "]"
    ),
}
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 99) | TEXTS, lambda each: st.lists(each, max_size=3), max_leaves=5)
ARGUMENTS = st.fixed_dictionaries({}, optional={"a": TEXTS, "n": st.integers(), "o": st.dictionaries(TEXTS, VALUES, max_size=2)})
CALLS = st.lists(st.builds(Call, st.sampled_from(["f", "g", "get-weather.now"]), ARGUMENTS), min_size=1, max_size=3)


@given(data=st.data())
@pytest.mark.parametrize("form", WRITERS)
def test_random_calls_are_read_back_from_random_pieces(form: str, data: st.DataObject) -> None:
    calls = data.draw(CALLS)
    for call in calls:
        if form in ("qwen3_coder", "glm45", "minimax_m2", "pythonic"):
            call.name = "f"
    before = data.draw(st.sampled_from(["", "Let me see.\n\n"])) if form not in ("pythonic", "llama3_json") else ""
    text = before + WRITERS[form](calls)
    borders = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]
    content, _, found = parse(form, pieces)
    assert content == before.rstrip()
    assert [(each.name, json.loads(each.arguments)) for each in found] == [(call.name, call.arguments) for call in calls]


FRAGMENTS = [*'{}[]:,"\\()<`', '"name"', '"arguments"', '"f"', '"g"', "f", "a=1", "functions.f:0", "function", "\n", " ", "é", "1"]


@given(data=st.data())
@settings(max_examples=60)
@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_no_text_fails_or_depends_on_its_pieces(form: str, data: st.DataObject) -> None:
    of_form = sorted(markers(TOOL_FORMATS[form]) | {"<think>", "</think>"})
    pieces = data.draw(st.lists(st.sampled_from(of_form) | st.sampled_from(FRAGMENTS), max_size=30))
    whole = parse(form, ["".join(pieces)], "qwen3")
    assert parse(form, pieces, "qwen3") == parse(form, list("".join(pieces)), "qwen3") == whole


# Formats of templates.


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "", ""),
        (
            '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call> <think> </think>',
            "hermes",
            "deepseek_r1",
        ),
        ("<tool_call>\\n<function=example>\\n<parameter=p>\\nv\\n</parameter>\\n</function>\\n</tool_call>", "qwen3_coder", ""),
        ("<tool_call>{function-name}\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value> </think>", "glm45", "glm45"),
        ("{%- set begin = '<minimax:tool_call>' -%} '<think>' '</think>'", "minimax_m2", "minimax_m2"),
        ("<|im_system|>tool_declare<|im_middle|>", "kimi_k2", ""),
        ("'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '```json' </think>", "deepseek_v3", "deepseek_v3"),
        ("'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", "deepseek_v31", ""),
        ("{{ '[TOOL_CALLS] [' }} [THINK] [/THINK]", "mistral", "mistral"),
        ('<|python_tag|> {"name": function name, "parameters": dictionary}', "llama3_json", ""),
        ("<|python_start|>[func_name1(params_name1=params_value1)]", "pythonic", ""),
        ("<seed:tool_call>\\n<function=f>\\n<parameter=p> <seed:think> </seed:think>", "seed_oss", "seed_oss"),
    ],
)
def test_formats_of_templates(template: str, tools: str, reasoning: str) -> None:
    found = find_formats(template)
    assert (found.tools, found.reasoning) == (tools, reasoning)


def test_types_of_an_argument() -> None:
    """References may form circles, and thousands of them be given."""
    circle = {"anyOf": [{"$ref": "#/properties/a"}] * 9 + [{"$ref": "#/$defs/b"}]}
    named = {"b": {"enum": [1, "x", None]}, "c": {"type": ["string", "null"]}}
    chain = {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(5000)}
    schema = {"properties": {"a": circle, "c": {"allOf": [{"$ref": "#/$defs/c"}]}, "d": {"$ref": "#/$defs/0"}}, "$defs": named | chain}
    found = [argument_types(schema, key) for key in ("a", "c", "d", "e")]
    assert found == [{"integer", "number", "string", "null"}, {"string", "null"}, {"any"}, {"any"}]
