"""Standby processes in the run state: when they start, which one takes the place of a dead process, and what it may stand in for."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher.test_run_state import CLIENT, KILLED, OTHER, SERVER, Driver, graph_of

from flowrt.actors.control import Listening
from flowrt.api import read_graph
from flowrt.errors import UserError
from flowrt.launcher import events
from flowrt.launcher.actions import Action, Announce, EndProcess, Send, SendStart, StartProcess
from flowrt.launcher.starts import standby_loads
from flowrt.launcher.transport_choice import pack
from flowrt.transports.contract import Identity

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
STANDBY = "standby.0"


def started(number: int = 1, **settings: object) -> Driver:
    """A running graph whose standby processes are forked and have not loaded."""
    graph = graph_of()
    graph = graph.replace(reliability=graph.reliability.replace(standby=number, **settings))  # type: ignore[arg-type]
    driver = Driver(graph, standby_loads={SERVER: SERVER, OTHER: SERVER}).connect()
    actions = [action for name in (CLIENT, SERVER, OTHER) for action in driver.do(driver.state.on_connected, name)]
    assert [action.process for action in actions if isinstance(action, StartProcess)] == [f"standby.{each}" for each in range(number)]
    for each in range(number):
        driver.do(driver.state.on_forked, f"standby.{each}", 8)
    return driver


def ready(number: int = 1, **settings: object) -> Driver:
    driver = started(number, **settings)
    for each in range(number):
        driver.do(driver.state.on_listening, f"standby.{each}", Listening({}))
    return driver


@pytest.fixture
def driver() -> Driver:
    return ready()


def starts(actions: list[Action]) -> list[tuple[str, str]]:
    return [(action.process, action.standby) for action in actions if isinstance(action, StartProcess)]


def test_standby_process_becomes_the_next_incarnation(driver: Driver) -> None:
    assert driver.state.starts.is_ready_standby(STANDBY)
    former = driver.state.incarnations[SERVER]
    actions = driver.restart(SERVER)
    (start,) = [action for action in actions if isinstance(action, StartProcess)]
    assert start == StartProcess(SERVER, (Identity(SERVER, driver.state.incarnations[SERVER]),), STANDBY)
    assert start.workers[0].incarnation != former
    assert not driver.state.accepts_messages(STANDBY, "any")
    assert not driver.state.starts.is_ready_standby(STANDBY)
    sent = [action for action in driver.do(driver.state.on_forked, SERVER, 8) if not isinstance(action, Announce)]
    assert sent == [SendStart(SERVER, driver.state.incarnations[SERVER], loaded_as=SERVER)]


def test_another_one_starts_when_all_processes_are_up(driver: Driver) -> None:
    driver.die(SERVER)
    driver.die(OTHER)
    assert starts(driver.pass_time(0.0)) == [(OTHER, STANDBY), (SERVER, "")]
    for name in (SERVER, OTHER):
        driver.do(driver.state.on_forked, name, 9)
        driver.do(driver.state.on_listening, name, Listening({"zmq": name}))
    assert starts(driver.do(driver.state.on_connected, SERVER)) == []
    assert starts(driver.do(driver.state.on_connected, OTHER)) == [(STANDBY, "")]


def test_standby_process_that_loads_is_not_used() -> None:
    driver = started()
    assert not driver.state.starts.is_ready_standby(STANDBY)
    driver.die(SERVER)
    assert starts(driver.pass_time(0.0)) == [(SERVER, "")]


def test_dead_standby_process_is_restarted_within_its_own_budget() -> None:
    driver = ready(restarts=1)
    assert Announce(events.WorkerLost(STANDBY, KILLED)) in driver.die(STANDBY)
    assert starts(driver.pass_time(0.0)) == [(STANDBY, "")]
    driver.do(driver.state.on_forked, STANDBY, 9)
    actions = driver.do(driver.state.on_listening, STANDBY, Listening({}))
    assert [type(action.event) for action in actions if isinstance(action, Announce)] == [
        events.WorkerListening,
        events.WorkerRestarted,
    ]
    given_up = [each.event for each in driver.die(STANDBY) if isinstance(each, Announce) and isinstance(each.event, events.WorkerGivenUp)]
    assert [event.name for event in given_up] == [STANDBY]
    driver.die(SERVER)
    assert starts(driver.pass_time(0.0)) == [(SERVER, "")]


def test_restart_from_a_standby_process_costs_the_budget_of_the_process() -> None:
    driver = ready(2, restarts=1)
    for _ in range(2):
        driver.restart(SERVER)
    assert driver.state.table.processes[SERVER].is_given_up
    assert driver.state.table.processes["standby.1"].names == ["standby.1"]


def test_standby_process_that_got_a_name_has_the_time_of_any_that_starts(driver: Driver) -> None:
    driver.restart(SERVER)
    driver.do(driver.state.on_forked, SERVER, 8)
    assert EndProcess(SERVER) not in driver.pass_time(driver.state.response_seconds - 0.1)
    assert EndProcess(SERVER) in driver.pass_time(0.2)


def test_overflow_of_a_standby_process_that_was_taken_has_no_effect(driver: Driver) -> None:
    incarnation = driver.state.incarnations[STANDBY]
    driver.restart(SERVER)
    assert not driver.do(driver.state.deaths.on_overflow, STANDBY, incarnation)


def test_standby_process_is_used_while_there_is_no_fork_server(driver: Driver) -> None:
    driver.do(driver.state.deaths.on_fork_server_lost, KILLED)
    driver.die(SERVER)
    assert (SERVER, STANDBY) in starts(driver.pass_time(0.0))


def test_process_that_waits_for_the_fork_server_takes_a_standby_process_that_becomes_ready() -> None:
    driver = started()
    driver.do(driver.state.deaths.on_fork_server_lost, KILLED)
    for name in (SERVER, OTHER):
        driver.die(name)
    assert starts(driver.pass_time(0.0)) == []
    assert starts(driver.do(driver.state.on_listening, STANDBY, Listening({}))) == [(OTHER, STANDBY)]
    driver.do(driver.state.starts.on_fork_server_ready, 5)
    assert starts(driver.pass_time(0.0)) == [(SERVER, "")]


def test_stop_ends_standby_processes_too(driver: Driver) -> None:
    assert {action.worker for action in driver.do(driver.state.stop) if isinstance(action, Send)} == {CLIENT, SERVER, OTHER, STANDBY}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"attention.0": "attention.0", "attention.1": "attention.0", **{f"experts.{each}": f"experts.{each}" for each in range(3)}}),
        (
            ("deploy.experts.replicas=3",),
            {"attention.0": "attention.0", "attention.1": "attention.0", **{f"experts.{each}": "experts.0" for each in range(3)}},
        ),
        (("reliability.share_weights=false",), {"attention.0": "attention.0", "attention.1": "attention.0"}),
        (("reliability.standby=0",), {}),
    ],
)
def test_operators_are_loaded_once_for_processes_with_equal_ones(overrides: tuple[str, ...], expected: dict[str, str]) -> None:
    graph = read_graph(QUICKSTART, ["reliability.standby=1", *overrides], None)
    assert standby_loads(graph, pack(graph), 2) == expected


def test_workers_that_share_processes_have_no_standby() -> None:
    with pytest.raises(UserError, match=r"a standby process replaces one worker, and processes hold several; write `processes: many`"):
        read_graph(QUICKSTART, ["reliability.standby=1", "deploy.processes=2"], None)
