"""Names follow one vocabulary: no retired identifier or key, one meaning per class name, objects complete at construction."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from repository.source_tree import FOLDERS, ROOT, sources

from flowrt.graph.schema import json_schema

# Names that are still in use, by the beginning of "path: name". Remove an entry with its last use.
REMAINING: dict[str, str] = {}
INCOMPLETE: tuple[str, ...] = ()  # objects whose resources exist only while they are open
_LISTED = {line.split("#")[0].strip() for line in (ROOT / "tests/repository/retired_names.txt").read_text().splitlines()} - {""}
RETIRED = {name.lstrip("*") for name in _LISTED}
RETIRED_PARTS = {name.lstrip("*") for name in _LISTED if name.startswith("*")}
RETIRED_PREFIXES = tuple(name for name in _LISTED if name.endswith("_"))


@functools.cache
def is_retired(name: str) -> bool:
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return name in RETIRED or name.startswith(RETIRED_PREFIXES) or not RETIRED_PARTS.isdisjoint(parts)


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a file defines or assigns, with its line. Leading underscores are left out."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name.strip("_"), node.lineno
            case ast.arg():
                yield node.arg.strip("_"), node.lineno
            case ast.keyword(arg=str(name)):
                yield name.strip("_"), node.value.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id.strip("_"), node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr.strip("_"), node.lineno


def test_no_name_is_retired() -> None:
    trees = [(source.path, source.tree) for source in sources()]
    trees += [(str(file.relative_to(ROOT)), ast.parse(file.read_text())) for file in (ROOT / "tests").rglob("*.py")]
    used = [(f"{path}: {name}", line) for path, tree in trees for name, line in names_in(tree) if is_retired(name)]
    wrong = [f"{use} (line {line})" for use, line in used if not use.startswith(tuple(REMAINING))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.yaml")))
def test_no_key_of_an_example_is_retired(path: str) -> None:
    keys = re.findall(r"(?:^|[{,\s])([a-z_]+):(?=\s|$)", (ROOT / path).read_text(), re.MULTILINE)
    assert keys
    assert not [key for key in keys if is_retired(key)]


def test_no_key_of_the_graph_schema_is_retired() -> None:
    keys = set(re.findall(r'"([a-z_]+)":', json.dumps(json_schema())))
    assert "micro_batches" in keys
    assert not [key for key in keys if is_retired(key)]


def test_the_check_of_names_finds_every_kind() -> None:
    tree = ast.parse("class mint: ...\ndef lane(beat): f(starter=1); self._owed = homeless = MOST_ROWS = test_what_is_told = LastBeat = 2")
    names = {name for name, _ in names_in(tree)}
    assert names == {"mint", "lane", "beat", "starter", "owed", "homeless", "MOST_ROWS", "test_what_is_told", "LastBeat"}
    assert all(map(is_retired, names))
    assert not any(map(is_retired, ("fulfilled", "beaten", "mosaic", "heartbeat", "heartbeats_of")))


def test_a_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for source in sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{source.path}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(found)}" for name, found in sorted(twice.items()))


def test_objects_are_complete_after_construction() -> None:
    """`assert self.x is not None` shows that an attribute is missing for part of the object's time."""
    wrong = []
    for source in sources():
        for node in source.nodes():
            if isinstance(node, ast.Assert) and re.fullmatch(r"self\.\w+ is not None", ast.unparse(node.test)):
                wrong.append(f"{source.path}:{node.lineno}: {ast.unparse(node)}")
    wrong = [each for each in wrong if not each.startswith(INCOMPLETE)]
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_sources_is_read() -> None:
    assert {source.path.split("/")[0] for source in sources()} == set(FOLDERS)
