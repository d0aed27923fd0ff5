"""The simulation and the chaos runs observe: they read what a part shows (`snapshot`, `leftovers`, public names), and nothing private."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from repository.source_tree import sources

OBSERVERS = ("flowrt/simulation/", "flowrt/chaos/")
OF_NAMED_TUPLES = {"_asdict", "_replace"}
HERE = ("self", "cls", "super()")


def defined_in(tree: ast.AST) -> set[str]:
    """The names of attributes and methods that the classes of a file define."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_reads(tree: ast.AST) -> Iterator[str]:
    """Reads of private attributes of objects of other files."""
    own = defined_in(tree) | OF_NAMED_TUPLES
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and re.match("_[a-z]", node.attr)
            and node.attr not in own
            and ast.unparse(node.value) not in HERE
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_observers_read_nothing_private() -> None:
    wrong = [f"{source.path}:{read}" for source in sources() if source.path.startswith(OBSERVERS) for read in private_reads(source.tree)]
    assert not wrong, "read a snapshot instead:\n" + "\n".join(wrong)


def test_the_check_finds_private_reads() -> None:
    text = "class A:\n    def f(self, other): self._x = other._x + other._y._asdict() + self._z + other.links._w"
    assert sorted(private_reads(ast.parse(text))) == ["2: other._y", "2: other.links._w"]
