"""What is done again after each fault: the table is complete, equal to the one in the docs, and looked up by the code."""

from __future__ import annotations

from pathlib import Path

import flowrt
from flowrt.reliability.fault_table import RULES, STEP_AGAIN, FaultKind, Redo, redo

PACKAGE = Path(flowrt.__file__).parent
PAGE = PACKAGE.parent / "docs" / "reliability.md"


def test_every_kind_of_fault_has_a_rule() -> None:
    assert list(RULES) == list(FaultKind)
    assert {each for rule in RULES.values() for each in rule.redone} == set(Redo)


def test_the_last_entry_of_a_rule_holds_for_all_later_times() -> None:
    assert [redo(FaultKind.NOT_FINITE, times) for times in range(4)] == [Redo.SEQUENCE, Redo.END, Redo.END, Redo.END]
    assert [redo(FaultKind.OUT_OF_PAGES, times) for times in (0, 7)] == [Redo.SEQUENCE, Redo.SEQUENCE]


def test_the_table_in_the_docs_is_the_table_in_the_code() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| fault | redone | again | then | |\n")[2].partition("\n\n")[0]
    rows = [[each.strip() for each in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    assert rows == [[rule.kind, *(*rule.redone, "", "")[:3], rule.effect] for rule in RULES.values()]
    assert max(len(rule.redone) for rule in RULES.values()) == 3


def test_the_code_looks_up_what_depends_on_history() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "fault_table.py")
    kinds = [rule.kind for rule in RULES.values() if len(rule.redone) > 1 and rule.redone != STEP_AGAIN]
    assert [kind.name for kind in kinds if f"redo(FaultKind.{kind.name}" not in code] == []
    assert "STEP_AGAIN[" in code
