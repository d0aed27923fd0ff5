"""Each code block of README, CONTRIBUTING and the pages of docs/ runs as it is written, or a comment above it says why not."""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import closing
from pathlib import Path

import pytest
from docs.blocks import LANGUAGES, ROOT, Block, Folder, blocks_of, check_output, pages

from flowrt.cli.app import app

_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
_ALWAYS = ("README.md", "docs/first-graph.md")  # what new users read; the rest: `make docs`
_LONG = re.compile(r"^flowrt (chaos|bench) ", re.MULTILINE)  # parsed in the suite, run by `make docs`; tests/chaos and tests/bench run them
_REASON = re.compile(r"not run: .{10,}")


def is_run(block: Block) -> bool:
    return block.is_run and (block.language in ("sh", "console", "python") or block.text.startswith("flowrt: 1"))


@pytest.mark.parametrize("page", pages())
def test_each_block_has_a_language_and_a_known_mark(page: str) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{page}:{block.line}: {block.language!r}; write one of {LANGUAGES} after the backticks"
        known = (
            not block.mark
            or block.mark == "output"
            or block.mark.startswith(("file: ", "setup: ", "background: "))
            or _REASON.match(block.mark)
        )
        assert known, f"{page}:{block.line}: {block.mark}"


@pytest.mark.parametrize("page", pages())
def test_each_command_that_is_not_run_can_be_parsed(page: str) -> None:
    for block in blocks_of(page):
        if block.language not in ("sh", "console") or (block.is_run and not _LONG.search(block.text)):
            continue
        for command in block.commands():
            words = shlex.split(command, comments=True)
            if words[0] == "make":
                assert words[1] in _TARGETS, f"{page}:{block.line}: {command}"
            elif words[0] == "flowrt":
                app.parse_args(words[1:], exit_on_error=False, print_error=False)


def test_commands_of_services_can_be_parsed() -> None:
    texts = [block.text for block in blocks_of("docs/operate.md")]
    commands = [line.partition("/bin/flowrt ")[2].split() for text in texts for line in text.split("\n") if "ExecStart=" in line]
    commands += [json.loads(line.partition("ENTRYPOINT ")[2])[1:] for text in texts for line in text.split("\n") if "ENTRYPOINT" in line]
    assert len(commands) == 2
    for words in commands:
        app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages() if any(is_run(block) for block in blocks_of(page))])
@pytest.mark.timeout(600)
def test_the_blocks_of_a_page_run_as_written(page: str, tmp_path: Path) -> None:
    runs_all = "FLOWRT_ALL_PAGES" in os.environ
    if page not in _ALWAYS and not runs_all:
        pytest.skip("runs with make docs")
    folder, printed = Folder(tmp_path), ""
    with closing(folder):
        for block in blocks_of(page):
            if block.mark == "output":
                check_output(block, block.text, printed)
            elif block.is_run and (runs_all or not _LONG.search(block.text)):
                printed = folder.run(block)


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith("docs/") and page != "docs/README.md"])
def test_a_page_opens_with_what_the_reader_can_do_and_a_working_command(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    first = next(iter(blocks_of(page)))
    assert is_run(first), f"{page} opens with a block that is not run"
    assert len(text.split("```")[0].split("\n")) < 12


def task_pages() -> list[str]:
    """The pages of the first table of docs/README.md."""
    table = (ROOT / "docs" / "README.md").read_text(encoding="utf-8").partition("| to do | page |")[2].partition("\n\n")[0]
    return re.findall(r"\((\S+\.md)\)", table)


@pytest.mark.parametrize("page", task_pages())
def test_a_page_of_a_task_is_short_and_names_three_mistakes(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert sum(any(map(str.isalnum, word)) for word in text.split()) <= 1500
    assert "Three mistakes" in text
