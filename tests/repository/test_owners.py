"""Each fact of the table "Who owns which fact" in docs/design.md that has often had a second owner has one, by the names of attributes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import flowrt

PACKAGE = Path(flowrt.__file__).parent
CLIENT_SIDE = ("exchange", "dataflow", "workers", "reliability", "actors", "engine")

MESSAGES = {"actors/control.py", "dataflow/parts.py"}  # they carry facts, and own none

# fact -> (packages, names of attributes that would hold it, where they are)
FACTS: dict[str, tuple[tuple[str, ...], str, dict[str, set[str]]]] = {
    "may this server be used": (
        ("exchange", "dataflow", "workers", "engine"),
        r"_?(lost|late|dead|avoided|suspected|unsettled|unavailable|usable|omitted)(_servers|_experts|_until|_since)|_(lost|late|avoided|omitted)|omitted|_settle_at|_until",
        {
            "exchange/servers.py": {"_lost", "_late", "_avoided_until", "unavailable_experts", "omitted"},
            "exchange/omitted_experts.py": {"_omitted"},  # of Servers: which experts steps do without
        },
    ),
    "which parts are outstanding": (
        ("exchange", "workers"),
        r"_?(outstanding|unanswered|in_flight|unsent|after_hedges|pending_parts)",
        {
            "exchange/expert_client.py": {"_outstanding", "in_flight", "unsent"},
            "exchange/kv_transfer.py": {"outstanding"},  # chunks of a pull, which are no parts
        },
    ),
    "which incarnation is current": (
        CLIENT_SIDE,
        r"_?(incarnations|current_incarnations|ended_incarnations)",
        {"actors/links.py": {"incarnations"}},
    ),
    "how many processes crashed while a request ran alone": (
        ("gateway", "engine", "exchange", "workers", "launcher"),
        r"_?(num_crashes|crashes|crashed|blamed|interrupted|trial|on_probation)",
        {"gateway/request_log.py": {"num_crashes"}},
    ),
}


def attributes(path: Path) -> set[str]:
    """The attributes of objects that a module assigns, and the fields of its classes."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            found.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            found |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
    return found


@pytest.mark.parametrize("fact", FACTS)
def test_fact_has_one_owner(fact: str) -> None:
    packages, pattern, owners = FACTS[fact]
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for package in packages
        for path in sorted((PACKAGE / package).glob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in MESSAGES
        and (names := {name for name in attributes(path) if re.fullmatch(pattern, name)})
    }
    assert found == owners, "ask the owner, or move the fact"
