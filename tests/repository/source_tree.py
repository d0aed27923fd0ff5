"""The project's own sources, parsed once, for the tests that walk them. Not a test itself."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("flowrt", "transports", "operators")  # flowrt/transports and flowrt/operators are links to the other two


@dataclass(frozen=True)
class Import:
    """One imported module or name, as an absolute dotted path. `at_load`: it runs when the importing module is loaded."""

    target: str
    line: int
    at_load: bool


@dataclass(frozen=True)
class Source:
    path: str  # from the repository's root, with slashes
    module: str  # dotted; a package's own name for its __init__.py
    text: str
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def package(self) -> str:
        return package_of(self.module)

    def nodes(self) -> Sequence[ast.AST]:
        return self._nodes

    @functools.cached_property
    def _nodes(self) -> Sequence[ast.AST]:
        """Walked once: many tests look at all."""
        return tuple(ast.walk(self.tree))


def package_of(target: str) -> str:
    """First-level part: "flowrt.graph", "flowrt.api"; "flowrt" for its __init__.py; "flowrt.cli" for __main__.py too."""
    parts = target.split(".")
    return "flowrt.cli" if parts[1:2] == ["__main__"] else ".".join(parts[:2])


def is_ours(target: str) -> bool:
    return target.split(".")[0] == "flowrt"


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING")


def _collect(node: ast.AST, module: str, is_package: bool, at_load: bool, found: list[Import]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found.extend(Import(alias.name, child.lineno, at_load) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            prefix = child.module or ""
            if child.level:
                parts = module.split(".")
                parts = parts[: len(parts) - child.level + (1 if is_package else 0)]
                prefix = ".".join([*parts, prefix] if prefix else parts)
            found.extend(Import(f"{prefix}.{alias.name}", child.lineno, at_load) for alias in child.names)
        else:
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            later = later or (isinstance(child, ast.If) and _is_type_checking(child.test))
            _collect(child, module, is_package, at_load and not later, found)


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the package, once."""
    found = []
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT)
            is_package = path.name == "__init__.py"
            parts = path.parent.parts if is_package else path.with_suffix("").parts
            module = ".".join(parts if folder == "flowrt" else ("flowrt", *parts))
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text, filename=str(path))
            imports: list[Import] = []
            _collect(tree, module, is_package, True, imports)
            found.append(Source(path.as_posix(), module, text, tree, tuple(imports)))
    return tuple(found)


@functools.cache
def modules() -> frozenset[str]:
    return frozenset(source.module for source in sources())


def module_of(target: str) -> str | None:
    """Our module that an import's target names: the target itself, or the module that holds the imported name."""
    while target:
        if target in modules():
            return target
        target = target.rpartition(".")[0]
    return None
