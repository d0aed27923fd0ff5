"""Constraints: which tokens may come next, and when an output may end; with the real tokenizer of the example's model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from flowrt.actors.control import Request
from flowrt.engine import grammar
from flowrt.engine.constraint import NO_TOKEN, UNFOLLOWABLE, Constraint
from flowrt.engine.constraint_builder import ConstraintBuilder
from flowrt.engine.grammar import MIN_INTEGER, GrammarError, within_int64
from flowrt.errors import ArgumentError
from flowrt.sampling_params import SamplingParams, checked_params
from flowrt.structured_outputs import StructuredOutputs

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"
VOCABULARY, EOS, STOP = 768, 0, 400
TOKENIZER = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def builder() -> ConstraintBuilder:
    return ConstraintBuilder(MODEL, VOCABULARY, [EOS])


def params(outputs: dict[str, Any] | None = None, **keywords: Any) -> SamplingParams:
    return checked_params(None, {"structured_outputs": outputs, **keywords})


def allowed(constraint: Constraint) -> set[int]:
    return {*np.flatnonzero(np.unpackbits(constraint.mask(), bitorder="little")).tolist()}


def write(constraint: Constraint, text: str) -> None:
    for token_id in TOKENIZER.encode(text, add_special_tokens=False).ids:
        assert token_id in allowed(constraint)
        constraint.accept(token_id)


def random_output(constraint: Constraint, seed: int, most: int) -> tuple[list[int], bool]:
    """Tokens drawn from the masks until one ends the output, which is not among them; and whether one did."""
    chance, output = random.Random(seed), list[int]()
    while len(output) < most:
        token_id = chance.choice(sorted(allowed(constraint)))
        if token_id == EOS:
            return output, True
        constraint.accept(token_id)
        output.append(token_id)
    return output, False


def test_end_is_allowed_only_where_the_output_matches(builder: ConstraintBuilder) -> None:
    constraint = builder.constraint(params({"regex": "([a-f][0-9])+"}, stop_token_ids=[STOP]))
    assert not {EOS, STOP} & allowed(constraint)
    write(constraint, "a")
    assert not {EOS, STOP} & allowed(constraint)
    write(constraint, "7")
    assert {EOS, STOP} < allowed(constraint)
    write(constraint, "a")
    assert not {EOS, STOP} & allowed(constraint)


@pytest.mark.parametrize("late", [{"min_tokens": 50}, {"ignore_eos": True}])
def test_end_that_should_come_later_comes_when_nothing_else_is_left(builder: ConstraintBuilder, late: dict[str, Any]) -> None:
    open_ended = builder.constraint(params({"regex": "[ab]+"}, max_tokens=60, **late))
    write(open_ended, "aba")
    assert EOS not in allowed(open_ended)
    finite = builder.constraint(params({"choice": ["yes", "no"]}, max_tokens=60, **late))
    write(finite, "no")
    assert allowed(finite) == {EOS}


def test_stop_token_that_the_grammar_needs_ends_the_output(builder: ConstraintBuilder) -> None:
    digit = TOKENIZER.encode("7", add_special_tokens=False).ids[-1]
    constraint = builder.constraint(params({"regex": "7"}, stop_token_ids=[digit]))
    assert allowed(constraint) == {digit}
    assert constraint.error == ""


def test_outputs_of_masks_are_json_of_the_schema(builder: ConstraintBuilder) -> None:
    whole = 0
    for seed in range(30):
        output, has_ended = random_output(builder.constraint(params({"json": PERSON})), seed, 80)
        if has_ended:
            whole += 1
            person = json.loads(TOKENIZER.decode(output))
            assert isinstance(person["name"], str)
            assert isinstance(person["age"], int)
    assert whole > 10


@pytest.mark.parametrize(
    "outputs",
    [{"json": PERSON}, {"json_object": True}, {"regex": "[a-z]{2,8}( [a-z]{2,8})*"}, {"choice": ["left", "right"]}]
    + [{"grammar": text} for text in ('start: "a" | "b" start', 'root ::= "a" | "b" root')],
)
def test_constraint_is_a_function_of_the_tokens(builder: ConstraintBuilder, outputs: dict[str, Any]) -> None:
    """One that is built behind any first part of an output has the masks of the one that saw it grow."""
    chosen = params(outputs)
    output, _ = random_output(builder.constraint(chosen), 3, 40)
    grown = builder.constraint(chosen)
    for at, token_id in enumerate(output):
        assert allowed(builder.constraint(chosen, output[:at])) == allowed(grown)
        grown.accept(token_id)
    assert ConstraintBuilder(MODEL, VOCABULARY, [EOS]).constraint(chosen, output).mask().tolist() == grown.mask().tolist()


def test_choices_of_a_request_have_constraints_of_their_own(builder: ConstraintBuilder) -> None:
    first = TOKENIZER.encode("y", add_special_tokens=False).ids
    request = Request(
        id="r",
        attempt=1,
        prompt_token_ids=(1,),
        max_tokens=9,
        params=params({"choice": ["yes", "no"]}, n=3),
        committed_token_ids=((), first, ()),
    )
    whole = builder.build(request)
    assert [len(allowed(whole[choice])) for choice in range(3)][1:] != [len(allowed(whole[0]))] * 2
    assert allowed(whole[0]) == allowed(whole[2])


def test_allowed_token_ids_and_bad_words() -> None:
    """They need no grammar: neither the library for grammars nor, for token ids, a tokenizer."""
    plain = ConstraintBuilder(Path("nowhere"), VOCABULARY, [EOS])
    assert allowed(plain.constraint(params(allowed_token_ids=[5, 700]))) == {5, 700}
    builder = ConstraintBuilder(MODEL, VOCABULARY, [EOS])
    word = TOKENIZER.encode("hedgehog", add_special_tokens=False).ids
    single = TOKENIZER.encode("e", add_special_tokens=False).ids
    assert len(word) > 1
    assert len(single) == 1
    constraint = builder.constraint(params(bad_words=["hedgehog", "e"], min_tokens=1))
    assert allowed(constraint) >= {*range(VOCABULARY)} - {EOS, *single, *TOKENIZER.encode(" e", add_special_tokens=False).ids}
    assert not {EOS, single[0]} & allowed(constraint)
    for token_id in word[:-1]:
        constraint.accept(token_id)
    assert word[-1] not in allowed(constraint)
    constraint.accept(single[0])
    assert word[-1] in allowed(constraint)


def test_bounds_of_int64_can_be_compiled(builder: ConstraintBuilder) -> None:
    schema = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
    constraint = builder.constraint(params({"json": schema}))
    (minus,), (seven,) = (TOKENIZER.encode(text, add_special_tokens=False).ids for text in "-7")
    assert {minus, seven} <= allowed(constraint)
    values = {"enum": [{"minimum": -(1 << 70)}], "properties": {"minimum": {"type": "integer", "exclusiveMinimum": -(1 << 64)}}}
    found = json.loads(within_int64(json.dumps(values)))
    assert (found["enum"], found["properties"]["minimum"]["exclusiveMinimum"]) == (values["enum"], MIN_INTEGER)
    assert within_int64('{"minimum": -5}') == '{"minimum": -5}'


@pytest.mark.parametrize("word", [" ", "\n", "\n\n", "\t"])
def test_white_space_may_be_a_bad_word(builder: ConstraintBuilder, word: str) -> None:
    *first, last = TOKENIZER.encode(word, add_special_tokens=False).ids
    constraint = builder.constraint(params(bad_words=[word]))
    for token_id in first:
        assert token_id in allowed(constraint)
        constraint.accept(token_id)
    assert last not in allowed(constraint)


def test_bad_word_gives_way_to_a_grammar_and_allowed_tokens_do_not(builder: ConstraintBuilder) -> None:
    (yes,) = allowed(builder.constraint(params({"regex": "7"})))
    needed = builder.constraint(params({"regex": "7"}, bad_words=["7"]))
    assert allowed(needed) == {yes}
    impossible = builder.constraint(params({"regex": "7"}, allowed_token_ids=[5]))
    assert allowed(impossible) == set()
    assert (impossible.error, impossible.param) == (NO_TOKEN, "allowed_token_ids")


def test_token_that_does_not_match_is_an_error(builder: ConstraintBuilder) -> None:
    constraint = builder.constraint(params({"regex": "7"}))
    constraint.accept(STOP)
    assert allowed(constraint) == set()
    assert constraint.error
    assert "\n" not in constraint.error


def test_thousands_of_choices_are_followed(builder: ConstraintBuilder) -> None:
    """Also those that begin alike, and one that another begins with."""
    texts = [*(f"item {number}" for number in range(5000)), *"ab", "ab", 'a "quoted"\n\\ é 你']
    for text in ("item 4999", "item 49", "ab", 'a "quoted"\n\\ é 你'):
        constraint = builder.constraint(params({"choice": texts}))
        write(constraint, text)
        assert EOS in allowed(constraint)
    assert not allowed(constraint) - {EOS}


@pytest.mark.parametrize(
    ("outputs", "cause"),
    [
        ({"grammar": "start: " + " | ".join(f'"item {number}"' for number in range(5000))}, "too many alternatives are open at one place"),
        (
            {"json": {"type": "object", "properties": {f"key{number}": {"type": "integer"} for number in range(2000)}}},
            "too many alternatives are open",
        ),
        ({"regex": "a{1000000}"}, "regular expressions and lengths are too large"),
    ],
    ids=["alternatives", "properties", "repetition"],
)
def test_limit_of_a_grammar_is_named_in_plain_words(builder: ConstraintBuilder, outputs: dict[str, Any], cause: str) -> None:
    constraint = builder.constraint(params(outputs))
    constraint.accept(min(allowed(constraint)))
    assert not allowed(constraint)
    assert constraint.error.startswith(f"{UNFOLLOWABLE}: ")
    assert constraint.param == "structured_outputs"
    assert cause in constraint.error


@pytest.mark.parametrize(
    ("outputs", "error"),
    [
        ({"choice": []}, "structured_outputs has a choice that is empty; give at least one text"),
        ({"choice": ()}, "structured_outputs has a choice that is empty"),
        ({"choice": [""]}, "structured_outputs has choice with an empty text"),
        ({"grammar": " \n"}, "structured_outputs has a grammar that is empty"),
        ({"json": ""}, "structured_outputs has json '', it must be a JSON schema"),
        ({}, "structured_outputs has no grammar; give exactly one of"),
        (StructuredOutputs(), "structured_outputs has no grammar; give exactly one of"),
    ],
)
def test_empty_grammar_is_named(outputs: Any, error: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(error)):
        params(outputs)


def test_empty_schema_and_regex_have_their_meaning(builder: ConstraintBuilder) -> None:
    """Any JSON, and no text."""
    write(builder.constraint(params({"json": {}})), "[1]")
    assert allowed(builder.constraint(params({"regex": ""}))) == {EOS}


@pytest.mark.parametrize(
    "outputs",
    [
        {"json": '{"type": 5}'},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "string", "pattern": "("}},
        {"json": {"not": {"type": "string"}}},
        {"json": {"enum": []}},
        {"regex": "("},
        {"regex": "(" * 5000 + ")" * 5000},
        {"regex": r"[^\x00-\u{10FFFF}]"},
        {"grammar": "# no rule"},
        {"grammar": "start: nowhere"},
        {"grammar": "start: start"},
        {"grammar": "start: " + "(" * 2000 + '"a"' + ")" * 2000},
        {"grammar": "root ::= ["},
    ],
    ids=lambda outputs: str(outputs)[:40],
)
def test_bad_grammar_is_one_line(builder: ConstraintBuilder, outputs: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as caught:
        builder.constraint(params(outputs))
    assert str(caught.value).startswith("structured_outputs ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("outputs", "cause"),
    [
        ({"json": {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ({"choice": ["<|endoftext|>"]}, "special token"),
        ({"regex": r"<\|endoftext\|>"}, "special token"),
    ],
)
def test_what_an_output_could_not_keep_is_refused(builder: ConstraintBuilder, outputs: dict[str, Any], cause: str) -> None:
    with pytest.raises(GrammarError, match=cause):
        builder.constraint(params(outputs))


def test_a_schema_chooses_no_white_space_without_a_bound(builder: ConstraintBuilder) -> None:
    options = {"whitespace_flexible": True, "whitespace_pattern": "[ ]*"}
    constraint = builder.constraint(params({"json": {"x-guidance": options, "type": "object"}}))
    write(constraint, "{ ")
    texts = {TOKENIZER.id_to_token(token_id) for token_id in allowed(constraint)}
    assert texts
    assert not any(text.startswith("\u0120") for text in texts), "no second space"


def test_compiled_grammars_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED", 2)
    grammars = grammar.Grammars(MODEL, VOCABULARY, [EOS])
    compiled = list[StructuredOutputs]()
    real = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda outputs: (compiled.append(outputs), real(outputs))[1])
    a, b, c = (StructuredOutputs(regex=text) for text in "abc")
    for outputs in (a, b, a, c, a, b):
        grammars.matcher(outputs)
    assert compiled == [a, b, c, b]


def test_model_without_a_tokenizer_or_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GrammarError, match=r"cannot be used without the tokenizer\.json of the model"):
        ConstraintBuilder(tmp_path, VOCABULARY, [EOS]).constraint(params({"regex": "a"}))
    with pytest.raises(GrammarError, match=r"^bad_words cannot be used: .* no tokenizer\.json"):
        ConstraintBuilder(tmp_path, VOCABULARY, [EOS]).constraint(params(bad_words=["a"]))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match="tokenizer of this model"):
        ConstraintBuilder(tmp_path, VOCABULARY, [EOS]).constraint(params({"regex": "a"}))
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r'pip install -e "\.\[structured\]"'):
        ConstraintBuilder(MODEL, VOCABULARY, [EOS]).constraint(params({"regex": "a"}))


def test_more_tokens_in_the_model_than_in_the_tokenizer() -> None:
    constraint = ConstraintBuilder(MODEL, 1001, [EOS]).constraint(params({"regex": ".*"}))
    assert max(allowed(constraint)) < 768
    assert len(constraint.mask()) == 126
