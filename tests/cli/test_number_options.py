"""Numbers on the command line are read as in JSON lines, and errors shorten long values."""

from __future__ import annotations

import sys

import pytest

from flowrt.cli.app import app, main
from flowrt.errors import UserError


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--seed=1.5", "--seed is '1.5', must be a whole number"),
        ("--max-tokens=0x10", "--max-tokens is '0x10', must be a whole number"),
        ("--n=1_0", "--n is '1_0', must be a whole number"),
        ("--temperature=nan", "--temperature is 'nan', must be a number"),
    ],
)
def test_other_notations_are_refused(option: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        app(["run", "none.yaml", "--prompt", "x", option], exit_on_error=False, print_error=False)


def test_long_words_are_shortened(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["flowrt", "run", "none.yaml", f"--log-level={'x' * 500}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capfd.readouterr().err
    assert "xxx..." in error
    assert len(error) < 250
