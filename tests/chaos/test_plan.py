"""Faults for real processes: the syntax of --chaos, plan files, the choice by roles and phases, and one-line errors for invalid input."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from flowrt.api import read_graph
from flowrt.chaos.cells import FAULTS, PHASES, cell_stretches, chosen, processes_by_role, random_stretches, role_of
from flowrt.chaos.plan import fault_text, load_plan, needs_fault_worker, parse_faults
from flowrt.errors import UserError
from flowrt.graph.kinds import kind_of
from flowrt.graph.model import Graph
from flowrt.graph.recovery import survivable_processes
from flowrt.reliability.scenario import Crash, Hang, Pause, Reset, Scenario, Slow, Stall

ROOT = Path(__file__).resolve().parents[2]
ROLES = ["attention", "experts", "monitor", "fork-server"]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return read_graph(ROOT / "examples" / "quickstart.yaml")


def test_every_fault_syntax_is_parsed(graph: Graph) -> None:
    words = (
        "kill:experts.1@2s, pause:experts.0@1s+500ms,stall:attention.0@.5+2s,hang:experts.2@0s+1s,"
        "slow:experts.0@1s+5sx4,reset:attention.0-experts.1@250ms,crash:monitor@3,kill:fork-server@4"
    )
    assert parse_faults(words, graph) == Scenario(
        faults=(
            Crash(process="experts.1", at_seconds=2.0),
            Pause(process="experts.0", at_seconds=1.0, for_seconds=0.5),
            Stall(process="attention.0", at_seconds=0.5, for_seconds=2.0),
            Hang(process="experts.2", for_seconds=1.0),
            Slow(process="experts.0", at_seconds=1.0, for_seconds=5.0, factor=4.0),
            Reset(between=("attention.0", "experts.1"), at_seconds=0.25),
            Crash(process="monitor", at_seconds=3.0),
            Crash(process="fork server", at_seconds=4.0),
        )
    )


def test_description_states_the_planned_faults(graph: Graph) -> None:
    scenario = parse_faults("kill:experts.1@2s,pause:experts.0@1s+500ms,slow:experts.0@1s+5sx4,reset:attention.0-experts.1@1s", graph)
    assert [fault_text(fault) for fault in scenario.faults] == [
        "kill experts.1",
        "pause experts.0 for 0.5 s",
        "slow experts.0 4 times for 5 s",
        "reset attention.0 - experts.1",
    ]


BAD = {
    "": "--chaos (nothing): not of the form KIND:PROCESS@TIME",
    "kill": "--chaos kill: not of the form KIND:PROCESS@TIME",
    "kill:experts.1": "--chaos kill:experts.1: not of the form",
    "kill:experts.1@2s,": "--chaos (nothing): not of the form",
    "murder:experts.1@2s": "--chaos murder:experts.1@2s: murder is unknown; one of: kill, crash, pause",
    "kill:experts.9@2s": "--chaos kill:experts.9@2s: no process is called 'experts.9'; there are attention.0",
    "kill:experts.0@1s,kill:experts.7@2s": "--chaos kill:experts.7@2s: no process is called 'experts.7'",
    "kill:experts.1@soon": "--chaos kill:experts.1@soon: 'soon' is not a time; for example 2s",
    "kill:experts.1@-2s": "'-2s' is not a time",
    "kill:experts.1@9999999s": "--chaos kill:experts.1@9999999s: expected a number <= 86400.0; such as kill:experts.1@2s",
    "kill:experts.1@2s+1s": "kill takes no +DURATION",
    "pause:experts.1@2s": "pause needs +DURATION, as +500ms",
    "pause:experts.1@2s+0s": "--chaos pause:experts.1@2s+0s: expected a number > 0.0; such as pause:experts.0@1s+500ms",
    "slow:experts.1@2s+1s": "slow needs xFACTOR, as x5",
    "slow:experts.1@2s+1sxfast": "'fast' is not a factor",
    "slow:experts.1@2s+1sx0.5": "expected a number > 1.0; such as slow:experts.0@1s+5sx4",
    "reset:experts.1@2s": "expected a list of length 2, got 1; such as reset:attention.0-experts.1@1s",
    "reset:experts.1-experts.1@2s": "between needs two different processes",
    "reset:experts.0-experts.1@2s": "experts.0 has no link to experts.1, so there is none to reset; it has links to attention.0",
    "reset:attention.0-monitor@2s": "attention.0 has no link to monitor, so there is none to reset; it has links to experts.0, experts.1",
    "kill:gateway@2s": "--chaos kill:gateway@2s: the gateway is this command itself",
    "stall:monitor@2s+1s": "the monitor takes crash and pause only",
    "stall:fork-server@2s+1s": "the fork server takes crash and pause only",
}


@pytest.mark.parametrize("words", BAD)
def test_invalid_fault_is_named_in_one_line(graph: Graph, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_faults(words, graph)
    assert BAD[words] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_faults_for_workers_that_share_one_process(graph: Graph) -> None:
    with pytest.raises(UserError, match=r"workers share processes.*deploy\.processes=many"):
        parse_faults("kill:experts.1@2s", graph.replace(processes="one"))


def test_a_monitor_that_does_not_run_cannot_be_killed(graph: Graph) -> None:
    no_detector = graph.replace(reliability=graph.reliability.replace(detector=False))
    with pytest.raises(UserError, match="no process is called 'monitor'"):
        parse_faults("kill:monitor@2s", no_detector)


def test_a_plan_file_is_that_of_the_simulation_without_what_only_it_knows(graph: Graph, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("scenario: 1\nexpect: tokens\nfaults:\n  - {fault: crash, process: experts.1, at_seconds: 2}\n")
    assert load_plan(path, graph) == Scenario(faults=(Crash(process="experts.1", at_seconds=2.0),), expect="tokens")
    path.write_text("scenario: 1\nfaults:\n  - {fault: skew, process: experts.1, rate: 2}\n")
    with pytest.raises(UserError, match=r"plan\.yaml:3: skew is for simulation only; real processes take crash, pause"):
        load_plan(path, graph)
    path.write_text("scenario: 1\nfaults:\n  - {fault: murder, process: experts.1}\n")
    kinds = "crash, pause, stall, hang, slow, reset"
    with pytest.raises(UserError, match=rf"plan\.yaml:3: faults\.0: fault 'murder' is unknown; one of: {kinds}$"):
        load_plan(path, graph)
    path.write_text("scenario: 1\nfaults:\n  - fault: reset\n    between: [experts.0, experts.2]\n")
    with pytest.raises(UserError, match=r"plan\.yaml:3: experts.0 has no link to experts.2, so there is none to reset"):
        load_plan(path, graph)
    with pytest.raises(UserError, match="no such file"):
        load_plan(tmp_path / "none.yaml", graph)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "chaos").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_fit_the_quickstart(graph: Graph, path: Path) -> None:
    assert load_plan(path, graph).faults


def test_in_the_graphs_of_capacity_time_is_modelled_and_servers_have_it_to_spare_in_one_alone() -> None:
    folder = ROOT / "examples" / "chaos" / "graphs"
    for name in ("with-spare.yaml", "without-spare.yaml"):
        graph = read_graph(folder / name)
        assert graph.emulation is not None
        seconds = {operator: cost.shortest_seconds(kind_of(operator).charges) for operator, cost in graph.emulation.compute.items()}
        assert (seconds["experts"] < seconds["attention"]) == (name == "with-spare.yaml")
        assert graph.numerics == "strict"
        assert len(survivable_processes(graph)) == 5


def test_only_self_inflicted_faults_need_fault_injecting_workers(graph: Graph) -> None:
    assert not needs_fault_worker(parse_faults("kill:experts.1@2s,pause:experts.0@1s+500ms", graph))
    assert needs_fault_worker(parse_faults("kill:experts.1@2s,hang:experts.0@1s+500ms", graph))


# --- the choice of faults: roles, kinds and phases, drawn from a seed --------------------------------------------------------------


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
    firsts = [(stretch.scenario.faults[0], stretch.phase) for stretch in stretches]
    cells = {(role_of(graph, fault.processes[0]), fault.kind, phase) for fault, phase in firsts}
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
