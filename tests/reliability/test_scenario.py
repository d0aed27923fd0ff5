"""Scenario files: the accepted content, and one-line errors for the rest."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.document import parse_document
from flowrt.errors import UserError
from flowrt.reliability.scenario import KINDS, Crash, Cut, Fault, Pause, Scenario, scenario_of, written

NAMES = ["attention.0", "experts.0", "experts.1", "gateway"]


def read(text: str, processes: list[str] | None = None) -> Scenario:
    document = parse_document(text, "file.yaml")
    return scenario_of(document.value, document.where, NAMES if processes is None else processes)


def test_a_scenario_is_read() -> None:
    scenario = read(
        """
scenario: 1
expect: tokens
deadline_seconds: 5
faults:
  - {fault: crash, process: experts.1, at_seconds: 0.5}
  - fault: cut
    between: [attention.0, experts.0]
    direction: there
    at_seconds: 0.25
    for_seconds: 2
"""
    )
    crash = Crash(process="experts.1", at_seconds=0.5)
    cut = Cut(between=("attention.0", "experts.0"), direction="there", at_seconds=0.25, for_seconds=2.0)
    assert scenario == Scenario(faults=(crash, cut), expect="tokens", deadline_seconds=5.0)
    assert scenario.ends_seconds == 2.25
    assert (crash.kind, crash.heals, cut.kind, cut.heals) == ("crash", False, "cut", True)
    assert read("scenario: 1\n") == Scenario()


BAD = {
    "faults: []": "file.yaml:1: no scenario file; begin it with the line scenario: 1",
    "[1, 2]": "file.yaml:1: no scenario file; begin it with the line scenario: 1",
    "scenario: 2": "file.yaml:1: scenario: ",
    "scenario: 1\nfautls: []": "file.yaml:1: unknown key `fautls`; a file holds scenario: 1, faults: [...]",
    "scenario: 1\nfaults: 3": "file.yaml:2: faults: expected a list, got a whole number; a file holds scenario: 1",
    "scenario: 1\nfaults: [3]": "file.yaml:2: faults.0: names no fault",
    "scenario: 1\nfaults:\n  - {process: experts.0}": "file.yaml:3: faults.0: names no fault",
    "scenario: 1\nfaults:\n  - {fault: crsh, process: experts.0}": "file.yaml:3: faults.0: fault 'crsh' is unknown; one of: crash, pause",
    "scenario: 1\nfaults:\n  - {fault: crash, process: experts.0, at: 3}": (
        "file.yaml:3: faults.0: unknown key `at`; such as {fault: crash, process: experts.1, at_seconds: 2.5}"
    ),
    "scenario: 1\nfaults:\n  - {fault: crash}": "file.yaml:3: faults.0: `process` is missing; such as {fault: crash, process: ",
    "scenario: 1\nfaults:\n  - {fault: crash, process: experts.0}\n  - {fault: crash, process: experts.9}": (
        "file.yaml:4: faults.1: no process is called 'experts.9'; there are attention.0, experts.0"
    ),
    "scenario: 1\nfaults:\n  - fault: pause\n    process: gateway\n    for_seconds: 0": "for_seconds: expected a number > 0.0",
    "scenario: 1\nfaults:\n  - fault: pause\n    process: gateway\n    for_seconds: soon": "for_seconds: expected a number, got a text",
    "scenario: 1\nfaults:\n  - {fault: reset, between: [experts.0, experts.0]}": "faults.0: between needs two different processes",
    "scenario: 1\nfaults:\n  - {fault: reset, between: [experts.0]}": "faults.0.between: expected a list of length 2, got 1",
    "scenario: 1\nfaults:\n  - {fault: slow, process: experts.0, for_seconds: 1, factor: 0.5}": "faults.0.factor: expected a number > 1",
    "scenario: 1\nexpect: luck": "file.yaml:2: expect: invalid enum value 'luck'; a file holds scenario: 1",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_wrong_is_one_line_with_its_place(text: str) -> None:
    with pytest.raises(UserError) as caught:
        read(text)
    assert BAD[text] in str(caught.value)
    assert "\n" not in str(caught.value)


seconds = st.floats(0, 1000, allow_nan=False)
durations = st.floats(1e-6, 1000, allow_nan=False)
faults = st.one_of(
    st.builds(Crash, at_seconds=seconds, process=st.sampled_from(NAMES)),
    st.builds(Pause, at_seconds=seconds, process=st.sampled_from(NAMES), for_seconds=durations),
    st.builds(
        Cut,
        at_seconds=seconds,
        between=st.permutations(NAMES).map(lambda names: (names[0], names[1])),
        for_seconds=durations,
        direction=st.sampled_from(["both", "there", "back"]),
    ),
)


@given(st.lists(faults, max_size=5), st.sampled_from([None, "tokens", "tokens_or_error"]))
def test_plain_values_are_read_back(made: list[Fault], expect: str | None) -> None:
    scenario = Scenario(faults=tuple(made), expect=expect)
    assert scenario_of({"scenario": 1, **msgspec.to_builtins(scenario)}, lambda path: "here", NAMES) == scenario


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_error_shows_is_right(kind: str) -> None:
    shown = written(kind).removeprefix("such as ")
    (fault,) = read(f"scenario: 1\nfaults:\n  - {shown}\n").faults
    assert fault.kind == kind


def test_every_kind_is_described() -> None:
    assert len(KINDS) == len(set(KINDS)) >= 10
