"""Defines StructuredOutputs: the grammar that the output of a request must match, as JSON schema, regex, list of choices or grammar.

flowrt/engine/grammar.py compiles it. The names are those of vLLM's StructuredOutputsParams. It does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from flowrt.errors import shown

MAX_GRAMMAR_BYTES = 128 << 10  # of all texts of one grammar
_MAX_SCHEMA_CHARACTERS = 4 * MAX_GRAMMAR_BYTES  # of a text, which may have white space
FORMS = ("json", "json_object", "regex", "choice", "grammar")
_OTHERS = ("disable_fallback", "disable_additional_properties", "whitespace_pattern", "structural_tag")  # vLLM's, for its own backends


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What every choice of a request must match as a whole; exactly one of the first five is given.

    `json`: a JSON schema, as text. `json_object`: any JSON object. `regex`: a regular expression (Rust's syntax). `choice`: one of these
    texts. `grammar`: a context-free grammar in Lark's or GBNF's notation. `disable_any_whitespace`: JSON without spaces and line breaks.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    disable_any_whitespace: bool = False


_TYPES = get_type_hints(StructuredOutputs)


def checked_outputs(value: object) -> StructuredOutputs | None:
    """The value of the parameter `structured_outputs`: None, an object with these fields, or a StructuredOutputs. A schema may be an object
    or its text. Raises ValueError of one line that does not name the parameter."""
    if value is None:
        return None
    if isinstance(value, StructuredOutputs):
        value = {name: each for name, each in msgspec.structs.asdict(value).items() if each != ()}
    if not isinstance(value, Mapping):
        raise ValueError(f"is {shown(value)}, it must be an object with one of {', '.join(FORMS)}")
    given = {name: each for name, each in value.items() if each is not None and each is not False}
    for name in given:
        if name in _OTHERS:
            raise ValueError(f"has {name}, which flowrt does not have; write the whole in json, regex, choice or grammar")
        if name not in _TYPES:
            raise ValueError(f"has {shown(name)}; it may have {', '.join(_TYPES)}")
    forms = [name for name in FORMS if name in given]
    if len(forms) != 1:
        raise ValueError(f"has {' and '.join(forms) or 'no grammar'}; give exactly one of {', '.join(FORMS)}")
    if "json" in given:
        given["json"] = _schema_text(given["json"])
    if isinstance(choices := given.get("choice"), list | tuple | set | frozenset):
        given["choice"] = tuple(choices)
    try:
        checked = msgspec.convert(given, StructuredOutputs, strict=True)
    except msgspec.ValidationError:
        wrong = forms[0] if isinstance(given.get("disable_any_whitespace", True), bool) else "disable_any_whitespace"
        kind = {"choice": "a list of texts", "json_object": "true", "disable_any_whitespace": "true or false"}.get(wrong, "a text")
        raise ValueError(f"has {wrong} {shown(given[wrong])}, it must be {kind}") from None
    _check_texts(checked, forms[0])
    return checked


def _schema_text(schema: object) -> str:
    if isinstance(schema, str) and len(schema) > _MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"has json of {len(schema)} characters; write it without white space, in at most {MAX_GRAMMAR_BYTES} bytes")
    try:
        if isinstance(schema, str):
            schema = msgspec.json.decode(schema)
        if isinstance(schema, Mapping):
            return msgspec.json.encode(dict(schema)).decode()
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError):
        pass
    raise ValueError(f"has json {shown(schema)}, it must be a JSON schema: an object, or its text")


def _check_texts(checked: StructuredOutputs, form: str) -> None:
    texts = [text for text in (checked.json, checked.regex, checked.grammar, *checked.choice) if text is not None]
    if form == "choice" and not checked.choice:
        raise ValueError("has a choice that is empty; give at least one text")
    if form == "grammar" and not (checked.grammar or "").strip():
        raise ValueError("has a grammar that is empty; give it a rule named start (Lark) or root (GBNF)")
    if form == "choice" and not all(checked.choice):
        raise ValueError("has choice with an empty text; leave it out")
    try:
        num_bytes = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise ValueError(f"has {form} with half a character (an unpaired surrogate); write whole characters") from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError(f"has {form} of {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are possible")


def outputs_of_format(form: Any) -> StructuredOutputs | None:
    """The grammar of a `response_format` of OpenAI's API; None for {"type": "text"}. Raises ValueError of one line that does not name the
    field. A schema holds whether it is strict or not."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text" and len(form) == 1:
        return None
    if kind == "json_object" and len(form) == 1:
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise ValueError(f'is {shown(form)}, it must be {{"type": "text"}}, {{"type": "json_object"}} or {{"type": "json_schema", ...}}')
    named = form.get("json_schema")
    schema = named.get("schema", named.get("json_schema")) if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise ValueError('has no schema; write {"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}')
    return checked_outputs({"json": schema})
