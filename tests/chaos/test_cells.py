"""The choice of faults: roles, kinds and phases, drawn from a seed, and one-line errors for unknown ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from flowrt.api import read_graph
from flowrt.chaos.cells import FAULTS, PHASES, cell_stretches, chosen, processes_by_role, random_stretches, role_of
from flowrt.errors import UserError
from flowrt.graph.model import Graph

ROOT = Path(__file__).resolve().parents[2]
ROLES = ["attention", "experts", "monitor", "fork-server"]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return read_graph(ROOT / "examples" / "quickstart.yaml")


def test_the_roles_are_those_of_survivable_processes(graph: Graph) -> None:
    assert processes_by_role(graph) == {
        "attention": ["attention.0", "attention.1"],
        "experts": ["experts.0", "experts.1", "experts.2"],
        "monitor": ["monitor"],
        "fork-server": ["fork server"],
    }


def test_random_faults_hit_every_process_and_depend_on_the_seed_alone(graph: Graph) -> None:
    stretches = random_stretches(graph, 200, ROLES, ["kill"], seed=1)
    assert stretches == random_stretches(graph, 200, ROLES, ["kill"], seed=1)
    assert stretches != random_stretches(graph, 200, ROLES, ["kill"], seed=2)
    hit = Counter(fault.processes[0] for stretch in stretches for fault in stretch.scenario.faults)
    assert len(hit) == 7
    assert sum(hit.values()) == 200


def test_kinds_take_turns_on_processes_that_take_them(graph: Graph) -> None:
    stretches = random_stretches(graph, 100, ROLES, list(FAULTS), seed=1)
    faults = [stretch.scenario.faults[0] for stretch in stretches]
    assert [fault.kind for fault in faults[:4]] == ["crash", "pause", "stall", "hang"]
    assert {role_of(graph, fault.processes[0]) for fault in faults if fault.kind == "hang"} == {"attention", "experts"}
    with pytest.raises(UserError, match="--fault hang: no process of monitor takes it"):
        random_stretches(graph, 1, ["monitor"], ["hang"], seed=1)


def test_cells_are_gone_through_in_turn_and_the_drain_comes_last(graph: Graph) -> None:
    stretches = cell_stretches(graph, 60, ROLES, ["kill", "hang"], list(PHASES), seed=1)
    assert sum(stretch.num_faults for stretch in stretches[:-1]) >= 60
    assert [stretch.phase for stretch in stretches].index("drain") == len(stretches) - 1
    cells = {
        (role_of(graph, stretch.scenario.faults[0].processes[0]), stretch.scenario.faults[0].kind, stretch.phase) for stretch in stretches
    }
    assert ("attention", "hang", "replay") in cells
    assert ("attention", "hang", "start") not in cells, "a worker takes orders once it has loaded"
    assert len(cells) == 28
    with pytest.raises(UserError, match="--phase start: no process of experts, monitor takes hang then; workers take stall and hang once"):
        cell_stretches(graph, 1, ["experts", "monitor"], ["hang"], ["start"], seed=1)
    for stretch in stretches:
        process = stretch.scenario.faults[0].processes[0]
        if stretch.phase == "start":
            assert stretch.first == process
        elif stretch.phase == "replay":
            assert stretch.first not in (None, process)
            assert role_of(graph, stretch.first or "") == "attention"
        else:
            assert stretch.first is None
    drained = [fault.processes[0] for fault in stretches[-1].scenario.faults]
    assert len(drained) == len(set(drained))


@pytest.mark.parametrize(
    ("text", "error"),
    [("expert", "--roles expert: unknown here; one of: all, attention, experts"), ("", r"--roles \(nothing\): unknown here")],
)
def test_unknown_names_are_reported(text: str, error: str) -> None:
    assert chosen("all", ROLES, "--roles") == ROLES
    assert chosen("experts, monitor,experts", ROLES, "--roles") == ["experts", "monitor"]
    with pytest.raises(UserError, match=error):
        chosen(text, ROLES, "--roles")
