"""Each option is also an environment variable."""

from __future__ import annotations

from typing import Any

import pytest
from cli.test_command_page import commands

from flowrt.cli.app import app
from flowrt.errors import UserError

_VALUES = ("3", "debug", "x")  # for a number, one of a fixed list, a text


def parsed(*words: str) -> dict[str, Any]:
    _, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    return dict(bound.arguments)


def value_for(words: tuple[str, ...], option: str, is_flag: bool) -> tuple[str, dict[str, Any]]:
    """A value that the option takes, and what the command line with it is parsed to."""
    if is_flag:
        return "true", parsed(*words, option)
    for value in _VALUES:
        try:
            return value, parsed(*words, f"{option}={value}")
        except Exception:  # the parser's or a converter's
            continue
    raise AssertionError(f"{option} takes none of {_VALUES}")


@pytest.mark.parametrize("command", ["run", "serve", "up"])
def test_a_variable_does_what_its_option_does(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = [found for words, found in commands(app) if words == ("flowrt", command)]
    words = command, "graph.yaml"
    options = [
        (next(name for name in argument.names if name.startswith("--")), argument.hint is bool)
        for argument in found.assemble_argument_collection()
        if argument.parse and any(name.startswith("--") for name in argument.names)
    ]
    assert len(options) > 12
    plain = parsed(*words)
    for option, is_flag in options:
        value, expected = value_for(words, option, is_flag)
        with monkeypatch.context() as patch:
            patch.setenv(f"FLOWRT_{command.upper()}_{option[2:].upper().replace('-', '_')}", value)
            assert parsed(*words) == expected != plain, option


def test_the_command_line_overrides_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRT_SERVE_PORT", "1")
    monkeypatch.setenv("FLOWRT_SERVE_API_KEY", "from the variable of the option")
    options = parsed("serve", "g", "--port", "2", "--api-key", "k")["options"]
    assert (options.port, options.api_key) == (2, "k")


def test_a_repeatable_option_takes_a_line_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRT_RUN_SET", "hosts={engine: local, count: 3}\nnumerics=strict")
    monkeypatch.setenv("FLOWRT_RUN_PROMPT", "What is 1 + 2?")
    options = parsed("run", "g")["options"]
    assert options.overrides == ("hosts={engine: local, count: 3}", "numerics=strict")
    assert options.prompt == ("What is 1 + 2?",)


def test_lines_are_the_value_of_an_option_that_is_not_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NAME": "a\nb", "API_KEY": "from a file\n", "SERVED_MODEL_NAME": ""}.items():
        monkeypatch.setenv(f"FLOWRT_SERVE_{name}", value)
    options = parsed("serve", "g")["options"]
    assert (options.name, options.api_key, options.served_model_name) == ("a\nb", "from a file", None)
    monkeypatch.setenv("FLOWRT_SERVE_PORT", "80\n81")
    with pytest.raises(UserError, match="FLOWRT_SERVE_PORT is "):
        parsed("serve", "g")


def test_an_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets this one for a service named flowrt-serve."""
    monkeypatch.setenv("FLOWRT_SERVE_PORT", "tcp://10.0.0.1:80")
    with pytest.raises(UserError, match=r"FLOWRT_SERVE_PORT is 'tcp://10\.0\.0\.1:80', must be a whole number"):
        parsed("serve", "g")


def test_other_variables_and_those_of_other_commands_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = parsed("serve", "g")
    for name in ("FLOWRT_SERVE_PORT_80_TCP", "FLOWRT_SERVE_UNKNOWN", "FLOWRT_RUN_MODEL", "FLOWRT_UP_PORT", "FLOWRT_PORT", "FLOWRT_RUN"):
        monkeypatch.setenv(name, "7")
    assert parsed("serve", "g") == before
