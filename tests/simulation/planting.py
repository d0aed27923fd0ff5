"""Plants a bug: rewrites one function of a module while it is imported, in a process of its own. The product has no hook for it.

planted.py lists the bugs; plant.py searches for them. An edit whose text is not found in
its function exactly once is an error: a list that no longer fits the code must not pass for bugs that were not found.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any


class PlantError(Exception):
    """The edit does not fit the code."""


@dataclass(frozen=True)
class Edit:
    """In `function` ("Class.method") of `module`, `old` becomes `new`; if `old` is empty, the whole body does. Texts are as `ast.unparse`
    writes them: one kind of quotes,
    no comments, and a line of its own for each statement, so that reformatting changes nothing."""

    module: str
    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Bug:
    """`name` for the command line, `what` for the table. `graphs`: the file or folder of tests/simulation/graphs that has the code, or that
    shows the bug where few others do."""

    name: str
    what: str
    edits: tuple[Edit, ...]
    graphs: str = ""


def with_graphs(graphs: str, bugs: Sequence[Bug]) -> tuple[Bug, ...]:
    return tuple(replace(bug, graphs=graphs) for bug in bugs)


def bug(name: str, what: str, *edits: tuple[str, str, str, str], graphs: str = "") -> Bug:
    return Bug(name, what, tuple(Edit(*edit) for edit in edits), graphs)


def body(name: str, what: str, module: str, function: str, new: str) -> Bug:
    """The function does `new` instead: a bug that is bound to a name, and to nothing else of the source."""
    return Bug(name, what, (Edit(module, function, "", new),))


def rewritten(source: str, edits: Sequence[Edit]) -> ast.Module:
    """The module with `edits` made. Raises PlantError."""
    tree = ast.parse(source)
    for edit in edits:
        owner, function = _find(tree, edit)
        if not edit.old:
            function.body = ast.parse(edit.new).body  # type: ignore[attr-defined]
            continue
        text = ast.unparse(function)
        if text.count(edit.old) != 1:
            raise PlantError(f"{edit.module}:{edit.function} has {text.count(edit.old)} times {edit.old!r}; mend the planted bug:\n{text}")
        (new,) = ast.parse(text.replace(edit.old, edit.new)).body
        owner.body[owner.body.index(function)] = new
    return tree


def plant(bug: Bug) -> None:
    """From now on, modules that the bug edits are imported with it. Raises PlantError when one was imported before."""
    by_module: dict[str, list[Edit]] = {}
    for edit in bug.edits:
        if edit.module in sys.modules:
            raise PlantError(f"{edit.module} is imported already")
        by_module.setdefault(edit.module, []).append(edit)
    sys.meta_path.insert(0, _Finder(by_module))


class _Finder(MetaPathFinder):
    def __init__(self, edits: dict[str, list[Edit]]) -> None:
        self._edits = edits

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._edits:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=_Loader(fullname, spec.origin, self._edits[fullname]))


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, edits: list[Edit]) -> None:
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        return compile(ast.fix_missing_locations(rewritten(source, self._edits)), self.path, "exec")


def _find(tree: ast.Module, edit: Edit) -> tuple[Any, ast.stmt]:
    owner: Any = tree
    for name in edit.function.split("."):
        found = [
            node for node in owner.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        if len(found) != 1:
            raise PlantError(f"{edit.module} has no {edit.function}; mend the planted bug")
        last, owner = owner, found[0]
    return last, owner
