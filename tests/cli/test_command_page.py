"""docs/command-line.md, and the pages that it links for some commands, name each command and each option."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cli.conftest import ROOT
from cyclopts import App

from flowrt.cli.app import app

PAGES = ("command-line.md", "serve.md", "http-api.md", "simulation.md", "planning.md")


def commands(parent: App, words: tuple[str, ...] = ("flowrt",)) -> Iterator[tuple[tuple[str, ...], App]]:
    """Each command that does something, with its words."""
    names = [name for name in parent if not name.startswith("-")]
    if parent.default_command is not None:
        yield words, parent
    for name in names:
        yield from commands(parent[name], (*words, name))


def test_each_command_and_option_is_on_the_page() -> None:
    text = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES)
    found = list(commands(app))
    assert len(found) > 15
    for words, command in found:
        assert re.search(rf"`(?:{re.escape(' '.join(words))}|{words[-1]})\b", text), " ".join(words)
        for argument in command.assemble_argument_collection():
            for name in [name for name in argument.names if name.startswith("--")]:
                assert re.search(rf"{re.escape(name)}\b", text), f"{' '.join(words)} {name}"
