"""README is the map: what it names exists, and what exists it names."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from repository.source_tree import ROOT

README = ROOT / "README.md"
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_COMMAND = re.compile(r"(?:^|[\s`$;])flowrt +([a-z][a-z-]*)(?: +(validate|show|expand|schema))?")
_TARGET = re.compile(r"(?:^|[\s`$;])make +([a-z]+)")
_PATH = re.compile(r"(?<![@\w])(?:docs|examples|tests|tools|flowrt|transports|operators)/[\w./-]+\w")


def packages() -> list[str]:
    """Folders that hold code: the three top ones and each under flowrt/."""
    inner = sorted(file.parent.name for file in (ROOT / "flowrt").glob("*/__init__.py"))
    return ["transports", "operators", *inner]


def code_of(name: str) -> str:
    return "\n".join(_CODE.findall((ROOT / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("package", packages())
def test_readme_names_each_package(package: str) -> None:
    assert re.search(rf"\b{package}/", README.read_text(encoding="utf-8")), f"README.md has no line for {package}/"


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"))
def test_each_page_is_named_in_the_index(page: str) -> None:
    assert f"({page})" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8"), f"docs/README.md does not link {page}"


def test_index_links_only_pages_that_exist() -> None:
    linked = re.findall(r"\]\(([\w./-]+\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert linked
    assert [page for page in linked if not (ROOT / "docs" / page).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(name: str) -> None:
    known = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(_TARGET.findall(code_of(name)))
    assert named
    assert named <= known, named - known


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))])
def test_paths_exist(name: str) -> None:
    missing = sorted({path for path in _PATH.findall(code_of(name)) if not (ROOT / path).exists()})
    assert not missing, f"{name} names what is not in the tree: {missing}"


def test_commands_exist() -> None:
    """Each `flowrt ...` in README answers to --help."""
    commands = sorted({tuple(part for part in match if part) for match in _COMMAND.findall(code_of("README.md"))})
    assert commands
    script = """
import sys
from flowrt.cli.app import main
for words in sys.argv[1:]:
    sys.argv = ["flowrt", *words.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
"""
    lines = [" ".join(command) for command in commands]
    outcome = subprocess.run([sys.executable, "-c", script, *lines], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr
