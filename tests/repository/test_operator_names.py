"""Which code knows a kind of operator by its name: the files of kinds, and few others."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from repository.source_tree import Source, sources

from flowrt.graph.kinds import all_kinds

MAX_NAMES = 12
# These write whole graphs, so they name operators; they test none.
WRITERS = ("flowrt/graph/expand.py", "flowrt/bench/cases/")


def names_compared(source: Source) -> Iterator[str]:
    """Places that compare something with the name of a kind, or list several kinds."""
    known = all_kinds().keys()
    for node in source.nodes():
        match node:
            case ast.Compare():
                constants = [each for each in ast.walk(node) if isinstance(each, ast.Constant)]
            case ast.MatchValue(value=ast.Constant() as constant):
                constants = [constant]
            case ast.Set() | ast.Tuple() | ast.List():
                constants = [each for each in node.elts if isinstance(each, ast.Constant)]
                constants = constants if len(constants) > 1 and {each.value for each in constants} <= known else []
            case _:
                continue
        yield from (f"{source.path}:{each.lineno}: {each.value!r}" for each in constants if each.value in known)


def test_few_places_know_an_operator_by_name() -> None:
    own = ("flowrt/kinds/", "flowrt/graph/kinds.py", *WRITERS)
    found = sorted({place for source in sources() if not source.path.startswith(own) for place in names_compared(source)})
    assert len(found) <= MAX_NAMES, "ask for a property of the kind instead (flowrt/graph/kinds.py):\n" + "\n".join(found)
    assert found, "the traces know nodes by name"
