"""Names follow one vocabulary: no retired identifier or key, one meaning per class name, objects complete at construction."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
from repository.source_tree import FOLDERS, ROOT, sources

from flowrt.graph.schema import json_schema

# Names that are still in use, by the beginning of the path. Remove an entry with its last use.
REMAINING = {
    "flowrt/launcher/": "the launcher and its tests are renamed together",
    "tests/launcher/": "the launcher and its tests are renamed together",
    "flowrt/actors/heartbeats.py": "it follows the names of the monitor's connection",
    "flowrt/processes/exit_lock.py": "it follows the names of the launcher",
    "flowrt/graph/explicit.py": "the text between the two ends of an edge in a graph file is an arrow",
    "flowrt/gateway/gateway.py": "the sign of a number",
    "transports/channel/bulk_copy.py": "it follows the names of the copy threads",
    "transports/shared_memory/": "the ledger of a ring is not a resend buffer",
    "tests/transports/": "the ledger of a ring is not a resend buffer",
    "operators/row_blocks.py": "copies of a tensor",
    "tests/exchange/test_omitted_experts.py": "it follows the names of the expert client",
}
REPEATED_CLASSES = {"Child", "ExpertsUnavailable", "Fork", "Kill", "Placed", "Worker"}  # to be renamed in launcher and processes
INCOMPLETE = (
    "flowrt/actors/fallback.py",
    "flowrt/actors/lazy_channel.py",
    "flowrt/actors/links.py",
    "flowrt/launcher/",
    "flowrt/processes/exit_lock.py",
)  # objects whose resources exist only while they are open
RETIRED = frozenset(
    line.split("#")[0].strip()
    for line in (ROOT / "tests/repository/retired_names.txt").read_text().splitlines()
    if line.split("#")[0].strip()
)


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
    wrong = [f"{source.path}:{line}: {name}" for source in sources() for name, line in names_in(source.tree) if name in RETIRED]
    for file in (ROOT / "tests").rglob("*.py"):
        wrong += [f"{file.relative_to(ROOT)}:{line}: {name}" for name, line in names_in(ast.parse(file.read_text())) if name in RETIRED]
    wrong = [each for each in wrong if not each.startswith(tuple(REMAINING))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.yaml")))
def test_no_key_of_an_example_is_retired(path: str) -> None:
    keys = re.findall(r"(?:^|[{,\s])([a-z_]+):(?=\s|$)", (ROOT / path).read_text(), re.MULTILINE)
    assert keys
    assert not RETIRED & set(keys)


def test_no_key_of_the_graph_schema_is_retired() -> None:
    keys = set(re.findall(r'"([a-z_]+)":', json.dumps(json_schema())))
    assert "micro_batches" in keys
    assert not RETIRED & keys


def test_the_check_of_names_finds_every_kind() -> None:
    tree = ast.parse("class mint: ...\ndef lane(beat): f(starter=1); self._owed = homeless = 2")
    assert {name for name, _ in names_in(tree)} == {"mint", "lane", "beat", "starter", "owed", "homeless"}
    assert {name for name, _ in names_in(tree)} <= RETIRED


def test_a_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for source in sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{source.path}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1 and name not in REPEATED_CLASSES}
    assert not twice, "\n".join(f"{name}: {', '.join(found)}" for name, found in sorted(twice.items()))


def test_objects_are_complete_after_construction() -> None:
    """`assert self.x is not None` says that an attribute is missing for part of the object's time."""
    wrong = []
    for source in sources():
        for node in source.nodes():
            if isinstance(node, ast.Assert) and re.fullmatch(r"self\.\w+ is not None", ast.unparse(node.test)):
                wrong.append(f"{source.path}:{node.lineno}: {ast.unparse(node)}")
    wrong = [each for each in wrong if not each.startswith(INCOMPLETE)]
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_sources_is_read() -> None:
    assert {source.path.split("/")[0] for source in sources()} == set(FOLDERS)
