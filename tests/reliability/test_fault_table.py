"""What is done again after each fault: the table is complete, equal to the one in the docs, and looked up by the code."""

from __future__ import annotations

import ast
from pathlib import Path

import flowrt
from flowrt.reliability.fault_table import RULES, STEP_AGAIN, FaultKind, Redo, redo

PACKAGE = Path(flowrt.__file__).parent
PAGE = PACKAGE.parent / "docs" / "reliability.md"
TESTS = Path(__file__).parent.parent
REDONE = "simulation/test_redone.py::"
INJECTING: dict[FaultKind, tuple[str, ...]] = {  # the tests that inject each kind of fault into the real code
    FaultKind.OPERATOR_ERROR: (REDONE + "test_wrong_result_costs_one_step_or_one_sequence[raise-step]",),
    FaultKind.NOT_FINITE: (REDONE + "test_wrong_result_costs_one_step_or_one_sequence[nan-sequence]",),
    FaultKind.LATE_PART: (REDONE + "test_late_part_is_computed_once_more_at_a_replica",),
    FaultKind.OUT_OF_PAGES: (REDONE + "test_lack_of_pages_costs_one_sequence",),
    FaultKind.LOST_SERVER: (
        REDONE + "test_killed_process_costs_its_parts_or_its_sequences[experts.1-part]",
        "end_to_end/test_expert_failover.py::test_killed_servers_change_no_token_and_rejoin",
    ),
    FaultKind.CRASHED_SERVER: (
        REDONE + "test_poison_ends_its_request_alone[part]",
        "end_to_end/test_poisoned_requests.py::test_a_request_has_few_victims[experts-abort]",
    ),
    FaultKind.LOST_GROUP: (
        REDONE + "test_killed_process_costs_its_parts_or_its_sequences[attention.0-group]",
        "end_to_end/test_group_failover.py::test_a_stopped_group_is_replaced_and_its_requests_move",
    ),
    FaultKind.CRASHED_GROUP: ("end_to_end/test_poisoned_requests.py::test_a_request_has_few_victims[attention-abort]",),
    FaultKind.STANDSTILL: (
        REDONE + "test_hung_operation_costs_its_process_and_what_it_computed",
        "end_to_end/test_poisoned_requests.py::test_a_request_has_few_victims[experts-hang]",
    ),
    FaultKind.LOST_LINK: (
        REDONE + "test_lost_link_costs_one_process_and_its_parts",
        "end_to_end/test_bad_messages.py::test_bad_message_fences_its_sender_alone",
    ),
    FaultKind.CHANGED_WEIGHTS: ("end_to_end/test_expert_failover.py::test_server_stays_down_while_its_weights_are_others",),
}


def test_every_kind_of_fault_has_a_rule() -> None:
    assert list(RULES) == list(FaultKind)
    assert {each for redone in RULES.values() for each in redone} == set(Redo)


def test_the_last_entry_of_a_rule_holds_for_all_later_times() -> None:
    assert [redo(FaultKind.NOT_FINITE, times) for times in range(4)] == [Redo.SEQUENCE, Redo.END, Redo.END, Redo.END]
    assert [redo(FaultKind.OUT_OF_PAGES, times) for times in (0, 7)] == [Redo.SEQUENCE, Redo.SEQUENCE]


def test_the_table_in_the_docs_is_the_table_in_the_code() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| fault | redone | again | then | |\n")[2].partition("\n\n")[0]
    rows = [[each.strip() for each in line.strip("|").split("|")][:4] for line in table.splitlines()[1:]]
    assert rows == [[kind, *(*redone, "", "")[:3]] for kind, redone in RULES.items()]
    assert max(map(len, RULES.values())) == 3


def test_the_code_looks_up_what_depends_on_history() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "fault_table.py")
    kinds = [kind for kind, redone in RULES.items() if len(redone) > 1 and redone != STEP_AGAIN]
    assert [kind.name for kind in kinds if f"redo(FaultKind.{kind.name}" not in code] == []
    assert "STEP_AGAIN[" in code


def test_every_row_names_tests_that_inject_its_fault() -> None:
    assert list(INJECTING) == list(FaultKind)
    for test in (each for tests in INJECTING.values() for each in tests):
        path, _, name = test.partition("::")
        name, _, values = name.rstrip("]").partition("[")
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name]
        assert len(functions) == 1, test
        decorators = "".join(map(ast.unparse, functions[0].decorator_list))
        assert all(repr(value) in decorators for value in values.split("-") if value), test
