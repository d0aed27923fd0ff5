"""Conversations as chat templates see them: nothing is left out without a word, whatever clients send and templates take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from serving.test_tokenizer import byte_level
from transformers import AutoTokenizer

from flowrt.errors import TokenizerError
from flowrt.serving.chat import Chat, ChatError, check_chat
from flowrt.serving.chat_template import ChatTemplate
from flowrt.serving.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bonn"}'}}
CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
STRICT = (
    "{% for m in messages %}{% if m.role not in ['system', 'user'] %}{{ raise_exception('bad role') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
KNOWN = "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
CALLS = (
    KNOWN + "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
ONLY_PARTS = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}"
LAST = "{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content }}"


def render(template: str, *messages: dict[str, Any], **names: Any) -> str:
    return ChatTemplate(template, {}).render(Chat(list(messages), **names))


def assistant(content: str | None = None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


@pytest.mark.parametrize("template", [KNOWN, STRICT, CHATML, LAST, PARTS, "{% set a = 'a developer' %}" + KNOWN])
def test_developer_is_system_where_the_template_has_no_developer(template: str) -> None:
    texts = {render(template, {"role": role, "content": "Be terse."}, USER) for role in ("system", "developer")}
    assert len(texts) == 1


def test_developer_is_developer_where_the_template_has_it() -> None:
    template = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.content }}{% endfor %}"
    assert render(template, {"role": "developer", "content": "Be terse."}, USER) == "DBe terse.Hi"


@pytest.mark.parametrize(
    ("template", "messages", "path", "text"),
    [
        (KNOWN, [USER, {"role": "critic", "content": "No"}], "messages[1]", "of role 'critic' leaves no trace"),
        (LAST, [{"role": "critic", "content": "No"}, USER], "messages[0]", "of role 'critic' leaves no trace"),
        (KNOWN, [USER, assistant("x"), {"role": "tool", "content": "4"}], "messages[2]", "of role 'tool' leaves no trace"),
        (KNOWN, [USER, assistant(tool_calls=[CALL])], "messages[1].tool_calls", "of role 'assistant' leaves no trace"),
        (KNOWN, [USER, assistant("x", function_call={"name": "f"})], "messages[1].function_call", "leaves no trace"),
        (
            "{{ messages[0].content }}{% for m in messages[1:] %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
            [USER, {"role": "system", "content": "Be terse."}],
            "messages[1]",
            "of role 'system' leaves no trace",
        ),
    ],
)
def test_message_that_leaves_no_trace_is_named(template: str, messages: list[dict[str, Any]], path: str, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        render(template, *messages)
    assert getattr(caught.value, "path", None) == path


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (CHATML, [USER, assistant(""), {"role": "system", "content": " "}], "[user]Hi[assistant][system] [assistant]"),
        ("{% for m in messages %}{{ m.content | upper | replace('ZX', '-') }}{% endfor %}", [USER, USER], "HIHI"),
        ("{% for m in messages %}{{ m.content.split('</think>') | last }}{% endfor %}", [assistant("<think>a</think>b"), USER], "bHi"),
        (CHATML, [assistant("b", reasoning_content="hm"), USER], "[assistant]b[user]Hi[assistant]"),
        (CALLS, [USER, assistant(tool_calls=[CALL])], "[user]Hi[assistant]f(Bonn)"),
        (EITHER, [USER, assistant("dropped", tool_calls=[CALL])], "Hi{'city': 'Bonn'}"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", [USER, assistant("a")], "aHi"),
        (LAST, [USER, assistant("a"), {"role": "tool", "content": "4"}, USER | {"content": "Bye"}], "Bye"),
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", [USER | {"content": "long text"}, USER], "lonHi"),
    ],
)
def test_what_templates_change_or_leave_out_by_design_is_no_error(template: str, messages: list[dict[str, Any]], text: str) -> None:
    assert render(template, *messages) == text


def test_parts_reach_templates_that_take_them_and_are_joined_for_others() -> None:
    parts = USER | {"content": [{"type": "text", "text": "What is"}, {"type": "input_text", "text": "1 + 2?", "cache_control": {}}, "x"]}
    assert render(PARTS, parts) == "[user]<What is><1 + 2?><x>"
    assert render(CHATML, parts) == "[user]What is\n1 + 2?\nx[assistant]"
    assert render("{{ messages[0].content | trim }}", parts) == "What is\n1 + 2?\nx"
    assert render("{{ messages | tojson }}", parts) == '[{"role": "user", "content": "What is\\n1 + 2?\\nx"}]'
    assert render(ONLY_PARTS, USER, assistant("a")) == "[user]Hi[assistant]a", "texts become parts for a template that takes only these"
    assert render(PARTS, USER, assistant("a")) == "[user]Hi[assistant]a"
    assert render(CHATML, USER | {"content": []}) == "[user][assistant]"
    assert render("{{ messages[0].content[0].text or messages[0].content }}", parts) == "What is\n1 + 2?\nx", "no part is left out"


def test_content_beside_calls_may_be_missing() -> None:
    template = "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}%s{% endfor %}"
    messages = [USER, assistant(tool_calls=[CALL])]
    assert render(template.replace("%s", "{{ m.content is defined }}{{ m.content }}"), *messages) == "TrueHifFalse", "as in transformers"
    assert render(template.replace("%s", "{{ m.content + '' }}"), *messages) == "Hif", "a text for a template that needs one"


def test_arguments_of_calls_are_objects() -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    texts = ["", None, "{}", '{"a": 1}', {"a": 1}, "not JSON", '{"a": "\\ud83d"}', "[" * 100_000]
    calls = [{"function": {"name": "f", "arguments": text}} for text in texts]
    found = render(template, USER, assistant(tool_calls=[*calls, {"function": {"name": "g"}}]))
    assert found.startswith('{"name": "f", "arguments": {}}' * 3 + '{"name": "f", "arguments": {"a": 1}}' * 2)
    assert found.endswith('[[[["}{"name": "g", "arguments": {}}')
    assert '{"name": "f", "arguments": "not JSON"}' in found
    assert r'"{\"a\": \"\\ud83d\"}"' in found, "as the model wrote it"


def test_final_message_is_continued() -> None:
    assert (
        render(CHATML, USER, assistant("It is "), continue_final_message=True, add_generation_prompt=False) == "[user]Hi[assistant]It is "
    )
    parts = assistant() | {"content": [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]}
    assert render(PARTS, USER, parts, continue_final_message=True) == "[user]Hi[assistant]<It><is"
    with pytest.raises(ValueError, match=r"messages\[0\].content is missing"):
        render(CHATML, assistant(), continue_final_message=True)
    with pytest.raises(ValueError, match="changes the last message"):
        render("{{ messages[0].content | upper }}", USER, continue_final_message=True)


NAMES = {"extra_special_tokens": {"image_token": "<img>"}, "sep_token": "<sep>", "own_token": {"content": "<own>", "__type": "AddedToken"}}


@pytest.mark.parametrize(
    ("template", "config", "files"),
    [
        ("{{ tools is none }} {{ documents is none }} {{ tools == none }} {{ tools }} {{ tools | tojson }} {{ tools is defined }}", {}, {}),
        ("{{ bos_token is defined }}", {"bos_token": None}, {}),
        ("{{ sep_token }}|{{ cls_token }}|{{ image_token }}|{{ own_token }}|{{ add_bos_token }}", NAMES | {"add_bos_token": True}, {}),
        ("{{ bos_token }}{{ audio_token }}", {}, {"special_tokens_map.json": {"bos_token": "<s>", "audio_token": "<a>"}}),
        ("{{ bos_token }}", {"bos_token": "<b>"}, {"special_tokens_map.json": {"bos_token": {"content": "<s>"}}}),
        ("{{ bos_token }}", {"bos_token": "<b>", "added_tokens_decoder": {}}, {"special_tokens_map.json": {"bos_token": "<s>"}}),
        ({"default": "D", "tool_use": "T"}, {}, {}),
        ([{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}], {}, {}),
        ({"default": "no"}, {}, {"chat_template.jinja": "F"}),
        ("no", {}, {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "T"}),
        ("{{ thinking }}{{ messages[0].thinking }}{{ messages[0].reasoning_content }}{{ messages[0].x is defined }}", {}, {}),
    ],
)
@pytest.mark.parametrize("names", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"documents": [{"title": "a"}]}])
def test_templates_see_the_names_that_transformers_gives(
    tmp_path: Path, template: Any, config: dict[str, Any], files: dict[str, Any], names: dict[str, Any]
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "additional_chat_templates").mkdir()
    for name, value in {"tokenizer_config.json": {"chat_template": template} | config, **files}.items():
        (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    messages = [USER | {"reasoning": "hm", "x": None}]
    truth = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, thinking="t", **names
    )
    assert Tokenizer(tmp_path).render_chat(Chat(messages, kwargs={"thinking": "t"}, **names)) == truth


def test_an_error_names_what_is_wrong(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": KNOWN}))
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(tmp_path).encode_chat([USER, {"role": "critic", "content": "No"}])
    assert caught.value.param == "messages[1]"


TEXTS = st.text(max_size=4) | st.sampled_from(["{}", '{"a": 1}', "</think>", " "])
SOME_PARTS = st.lists(TEXTS | st.builds(lambda text: {"type": "text", "text": text, "x": None}, TEXTS), max_size=3)
VALUES = st.none() | st.booleans() | st.integers() | TEXTS | st.lists(TEXTS, max_size=2)
CALLS_MADE = st.lists(st.builds(lambda name, text: {"function": {"name": name, "arguments": text}}, TEXTS, st.none() | TEXTS), max_size=2)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "critic"]),
            "content": st.none() | TEXTS | SOME_PARTS,
        },
        optional={"tool_calls": st.none() | CALLS_MADE, "reasoning": VALUES, "refusal": VALUES, "name": st.none() | TEXTS},
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(MESSAGES, st.sampled_from([CHATML, STRICT, KNOWN, CALLS, EITHER, PARTS, ONLY_PARTS, LAST]), st.booleans())
def test_any_chat_is_rendered_without_a_mark_or_refused(messages: list[dict[str, Any]], template: str, continues: bool) -> None:
    chat = Chat(messages, None, None, not continues, continues)
    try:
        check_chat(chat)
        text = ChatTemplate(template, {}).render(chat)
    except (ChatError, TemplateError):
        return
    assert not re.search("qzx|xzq|CONTINUE_FINAL", text)
