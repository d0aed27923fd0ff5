"""README is the map: what it names exists, and what exists it names."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository.source_tree import ROOT

README = ROOT / "README.md"
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"```.*?```", re.DOTALL)
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


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings_that_exist(name: str) -> None:
    text = _BLOCK.sub("", (ROOT / name).read_text(encoding="utf-8"))
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    files = [((ROOT / name).parent / path if path else ROOT / name, anchor) for path, _, anchor in links]
    wrong = [f"{file.name}#{anchor}" for file, anchor in files if not file.exists() or (anchor and anchor not in anchors_of(file))]
    assert not wrong


@functools.cache
def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(name: str) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(_TARGET.findall(code_of(name)))
    assert named
    assert named <= known, named - known


@pytest.mark.parametrize("name", PAGES)
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
