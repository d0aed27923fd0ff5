"""Prompt files and request parameters: the accepted input, and one-line errors for the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import flowrt_here, refusal

from flowrt.cli.options import RunOptions
from flowrt.cli.prompts import KEYS, MAX_LINE_BYTES, checked_options, checked_text, option_number, read_prompts
from flowrt.cli.run import prompt_arguments
from flowrt.errors import UserError
from flowrt.sampling_params import MAX_WHOLE, SamplingParams

DEFAULTS = SamplingParams(max_tokens=9, temperature=0.5)


def written(path: Path, *lines: str) -> str:
    (path / "p.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return str(path / "p.jsonl")


def test_lines_override_the_options(tmp_path: Path) -> None:
    line = {
        "prompt": "a",
        "max_tokens": 3,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 4,
        "seed": MAX_WHOLE,
        "stop": ["x", "é"],
        "ignore_eos": True,
        "logit_bias": {"7": -1, "5": 2.5},
    }
    name = written(tmp_path, "\ufeff" + json.dumps(line), "", '{"prompt_token_ids": [1, -2, 3], "stop": "end"}', "   ", '{"prompt": ""}')
    first, second, third = read_prompts(name, DEFAULTS)
    assert first.prompt == "a"
    assert first.params == SamplingParams(
        max_tokens=3,
        temperature=1.0,
        top_p=0.5,
        top_k=4,
        seed=MAX_WHOLE,
        stop=("x", "é"),
        ignore_eos=True,
        logit_bias=((5, 2.5), (7, -1.0)),
    )
    assert second.prompt == (1, -2, 3)
    assert second.params == SamplingParams(max_tokens=9, temperature=0.5, stop=("end",))
    assert third.prompt == "", "an empty prompt is the model's to refuse"
    assert third.params == DEFAULTS


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("nonsense", "is not JSON"),
        ('{"prompt": "a"', "is not JSON"),
        ('{"prompt": "a"} {"prompt": "b"}', "is not JSON"),
        ('["a"]', "is not a JSON object"),
        ("null", "is not a JSON object"),
        ("[" * 100_000, "is nested too deep"),
        ("{}", "no prompt; write"),
        ('{"max_tokens": 3}', "no prompt; write"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "both prompt and prompt_token_ids"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' exists twice"),
        ('{"prompt": "a", "max_token": 3}', "unknown key 'max_token'; did you mean max_tokens?"),
        ('{"prompt": "a", "zzz": 3}', "unknown key 'zzz'; known are prompt"),
        ('{"prompt": 3}', "prompt must be a text"),
        ('{"prompt": null}', "prompt must be a text"),
        ('{"prompt": "\\ud800"}', "prompt holds half a character"),
        ('{"prompt_token_ids": "1 2"}', "prompt_token_ids must be a list of whole numbers"),
        ('{"prompt_token_ids": [1, 2.0]}', "prompt_token_ids must be a list of whole numbers"),
        ('{"prompt_token_ids": [true]}', "prompt_token_ids must be a list of whole numbers"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0, it must be a whole number from 1 to 2**63 - 1"),
        ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens is 1.5, it must be"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens is '9', it must be"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens is True, it must be"),
        ('{"prompt": "a", "temperature": -1}', "temperature is -1, it must be a number from 0 to 1e+09; 0 is greedy"),
        ('{"prompt": "a", "temperature": NaN}', "NaN is not JSON"),
        ('{"prompt": "a", "temperature": 1e999}', "temperature is inf, it must be"),
        ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "temperature is 1000"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature is 'hot', it must be a number"),
        ('{"prompt": "a", "top_p": 0}', "top_p is 0, it must be a number above 0 and at most 1"),
        ('{"prompt": "a", "top_k": -1}', "top_k is -1, it must be a whole number from 0 to 2**63 - 1"),
        ('{"prompt": "a", "seed": -1}', "seed is -1, it must be a whole number from 0 to 2**63 - 1"),
        ('{"prompt": "a", "seed": 9223372036854775808}', "seed is 9223372036854775808, it must be"),
        ('{"prompt": "a", "stop": [""]}', "stop is [''], it must be a text or a list of at most 64 texts, each of 1 to 1024 characters"),
        ('{"prompt": "a", "stop": 3}', "stop is 3, it must be a text"),
        ('{"prompt": "a", "ignore_eos": 1}', "ignore_eos is 1, it must be true or false"),
    ],
)
def test_the_first_wrong_line_is_named(tmp_path: Path, line: str, text: str) -> None:
    name = written(tmp_path, '{"prompt": "fine"}', "", line, "also wrong")
    with pytest.raises(UserError) as caught:
        read_prompts(name, DEFAULTS)
    message = str(caught.value)
    assert message.startswith(f"{name}:3: {text}"), message
    assert "\n" not in message
    assert len(message.removesuffix(", ".join(KEYS))) < len(name) + 250


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'{"prompt": "caf\xe9"}')
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "wide").write_bytes(b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}')
    for name, text in (
        ("none", "none: no such file"),
        ("", "cannot be read"),
        ("latin", "latin:1: is not UTF-8 text"),
        ("empty", "empty: holds no prompt"),
        ("wide", "wide:1: is longer than 16 MiB"),
    ):
        with pytest.raises(UserError, match=text):
            read_prompts(str(tmp_path / name), DEFAULTS)


def test_options_are_held_to_the_same_rules() -> None:
    options = {"max_tokens": 3, "temperature": None, "top_p": 1.0, "top_k": 0, "seed": None}
    assert checked_options(options) == {"max_tokens": 3, "top_p": 1.0, "top_k": 0}
    for name, value in (("max_tokens", 0), ("temperature", float("nan")), ("top_p", 1.5), ("top_k", -1), ("seed", 1 << 63)):
        with pytest.raises(UserError, match=f"^--{name.replace('_', '-')} is "):
            checked_options({name: value})
    with pytest.raises(UserError, match=r"^--prompt holds half a character"):
        checked_text("a\udcff")


@pytest.mark.parametrize("word", ["1.5", "0x10", "1_0", "", " 1", "\u0661", "9" * 5000])
def test_options_take_whole_numbers_in_decimal_digits_only(word: str) -> None:
    with pytest.raises(ValueError, match="must be a whole number in decimal digits") as raised:
        option_number(int, word)
    assert len(str(raised.value)) < 160


@pytest.mark.parametrize("word", ["nan", "inf", "1_0", "0x1p3", "1e"])
def test_options_take_numbers_in_decimal_digits_only(word: str) -> None:
    with pytest.raises(ValueError, match="must be a number in decimal digits"):
        option_number(float, word)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--seed=1.5", "--seed is '1.5', must be a whole number"),
        ("--max-tokens=0x10", "--max-tokens is '0x10', must be a whole number"),
        ("--n=1_0", "--n is '1_0', must be a whole number"),
        ("--temperature=nan", "--temperature is 'nan', must be a number"),
        (f"--log-level={'x' * 500}", "xxx..."),
    ],
)
def test_the_command_refuses_other_notations_and_shortens_long_words(option: str, text: str) -> None:
    error = refusal(flowrt_here("run", "none.yaml", "--prompt", "x", option))
    assert text in error
    assert len(error) < 250


def test_options_that_are_numbers() -> None:
    assert [option_number(int, "-12"), option_number(float, ".5"), option_number(float, "1e-3")] == [-12, 0.5, 0.001]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (f'{{"prompt": "a", "max_tokens": {"9" * 5000}}}', "holds a number of 5000 digits, which is too large"),
        (f'{{"prompt": "a", "temperature": -{"9" * 300}}}', "temperature is -9999"),
        (f'{{"prompt": "a", "seed": "{"x" * 5000}"}}', "seed is 'xxxx"),
        (f'{{"prompt": "a", "{"k" * 5000}": 1}}', "unknown key 'kkkk"),
    ],
)
def test_echoed_values_are_short(tmp_path: Path, line: str, text: str) -> None:
    with pytest.raises(UserError) as raised:
        read_prompts(written(tmp_path, line), DEFAULTS)
    message = str(raised.value).removeprefix(f"{tmp_path / 'p.jsonl'}:1: ")
    assert message.startswith(text)
    assert len(message.removesuffix(", ".join(KEYS))) < 320
    assert "set_int_max" not in message


def test_prompts_become_chats_with_the_arguments_of_their_template() -> None:
    options = RunOptions(chat=True, chat_template_kwargs='{"enable_thinking": false}')
    chat = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": False}}
    assert prompt_arguments("a", options) == chat
    assert prompt_arguments((1, 2), options) == {"prompt": (1, 2)}
    assert prompt_arguments("a", RunOptions()) == {"prompt": "a"}
