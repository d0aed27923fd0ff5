"""The run state: what follows from each event in each state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from launcher.run_driver import CLIENT, KILLED, OTHER, SERVER, Driver, announced, end_of, graph_of

from flowrt.actors.control import (
    DeathCause,
    DetectorReport,
    Failed,
    LinkLost,
    Listening,
    PeerJoined,
    PeerLeft,
    Peers,
    StatisticsRequest,
    Stop,
)
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, MONITOR, Edge, Graph, Node
from flowrt.graph.settings import ReliabilitySettings
from flowrt.launcher import events
from flowrt.launcher.actions import Action, Announce, End, EndProcess, Send, SendStart, StartProcess
from flowrt.launcher.deaths import EXPLAINED_SECONDS, FENCE_SECONDS, LAST_MESSAGES_SECONDS, REAP_SECONDS, SETTLE_SECONDS, STATUS_SECONDS
from flowrt.launcher.run_state import MONITOR_SECONDS, POLL_SECONDS, RunState
from flowrt.launcher.run_table import NEXT_STATES, ProcessRecord, WorkerRecord, WorkerState
from flowrt.reliability.detector import ProcessState
from flowrt.transports.contract import Identity


def test_death_of_a_process_with_several_workers_names_all_of_them() -> None:
    """Its first worker need not be the one whose operator ended the process."""
    packed = f"{OTHER}+{CLIENT}"
    driver = Driver(packed={packed: [OTHER, CLIENT], SERVER: [SERVER]}).begin()
    driver.do(driver.state.deaths.on_exited, packed, KILLED)
    for name in (OTHER, CLIENT):
        driver.do(driver.state.deaths.on_connection_closed, name)
    assert end_of(driver.pass_time(SETTLE_SECONDS)) == f"{packed} {KILLED}"


def test_start() -> None:
    driver = Driver()
    assert driver.do(driver.state.start, driver.now) == [
        StartProcess(name, (Identity(name, str(number)),)) for number, name in enumerate((CLIENT, SERVER, OTHER))
    ]
    assert driver.do(driver.state.on_forked, CLIENT, 7) == [Announce(events.WorkerStarted(CLIENT, 7)), SendStart(CLIENT, "0")]
    for name in (SERVER, OTHER):
        driver.do(driver.state.on_forked, name, 7)
    for name in (CLIENT, SERVER):
        assert driver.do(driver.state.on_listening, name, Listening({})) == [Announce(events.WorkerListening(name, 0))]
    sent = [action.worker for action in driver.do(driver.state.on_listening, OTHER, Listening({})) if isinstance(action, Send)]
    assert sent == [CLIENT, SERVER, OTHER]
    for name in (CLIENT, SERVER):
        assert driver.do(driver.state.on_connected, name) == [Announce(events.WorkerConnected(name))]
    assert announced(driver.do(driver.state.on_connected, OTHER)) == [events.WorkerConnected(OTHER), events.Ready(0.0)]


def test_seconds_until_ready_include_the_start_of_the_process_backend() -> None:
    driver = Driver()
    driver.do(driver.state.start, driver.now - 8.0)
    for name in (CLIENT, SERVER, OTHER):
        driver.do(driver.state.on_forked, name, 7)
        driver.do(driver.state.on_listening, name, Listening({}))
    (*_, ready) = [event for name in (CLIENT, SERVER, OTHER) for event in announced(driver.do(driver.state.on_connected, name))]
    assert ready == events.Ready(8.0)


@pytest.mark.parametrize("phase", ["load", "connect", "begin"])
@pytest.mark.parametrize(
    ("victim", "announces", "forks", "ends"), [(SERVER, [events.WorkerLost], [SERVER], []), (CLIENT, [], [], [f"{CLIENT} {KILLED}"])]
)
def test_death_in_each_phase(phase: str, victim: str, announces: list[type], forks: list[str], ends: list[str]) -> None:
    driver = Driver()
    getattr(driver, phase)()
    actions = [*driver.die(victim), *driver.pass_time(1.0)]
    assert [type(each) for each in announced(actions)] == announces
    assert [action.process for action in actions if isinstance(action, StartProcess)] == forks
    assert [str(action.error) for action in actions if isinstance(action, End)] == ends


def test_peers_are_notified_of_a_death_and_of_the_next_incarnation(driver: Driver) -> None:
    former = driver.state.incarnations[SERVER]
    assert driver.do(driver.state.deaths.on_dying, SERVER, "") == [Send(CLIENT, PeerLeft(SERVER, former, "its process has ended"))]
    driver.restart(SERVER)
    driver.do(driver.state.on_forked, SERVER, 8)
    present = driver.state.incarnations[SERVER]
    assert present != former
    actions = driver.do(driver.state.on_listening, SERVER, Listening({"zmq": "new"}))
    assert Send(CLIENT, PeerJoined(SERVER, present, {"zmq": "new"})) in actions
    assert [action.worker for action in actions if isinstance(action, Send) and isinstance(action.control, Peers)] == [SERVER]
    driver.now += 1.5
    assert announced(driver.do(driver.state.on_connected, SERVER)) == [
        events.WorkerConnected(SERVER),
        events.WorkerRestarted(SERVER, 8, 1.5),
    ]


def test_a_worker_that_links_is_notified_of_a_death_at_once() -> None:
    """It would wait for the dead incarnation otherwise."""
    driver = Driver().connect()
    driver.do(driver.state.on_connected, SERVER)
    notices = [action.control for action in driver.die(SERVER) if isinstance(action, Send)]
    assert PeerLeft in map(type, notices)
    assert not [action for action in driver.do(driver.state.on_connected, CLIENT) if isinstance(action, Send)]


def test_run_is_ready_after_the_restart_of_a_server_that_exits_before_the_last_worker_connects() -> None:
    """The exit is reported before the last worker connects, and the end of the control connection after that."""
    driver = Driver().connect()
    driver.do(driver.state.on_connected, SERVER)
    assert announced(driver.do(driver.state.deaths.on_exited, SERVER, KILLED)) == []
    assert not driver.state.is_usable(SERVER)
    actions = [action for name in (CLIENT, OTHER) for action in driver.do(driver.state.on_connected, name)]
    assert announced(actions) == [events.WorkerConnected(CLIENT), events.WorkerConnected(OTHER)]
    actions = [*driver.do(driver.state.deaths.on_connection_closed, SERVER), *driver.pass_time(0.0)]
    cause = Send(CLIENT, DeathCause(SERVER, "1", KILLED))
    assert actions == [Announce(events.WorkerLost(SERVER, KILLED)), cause, driver.start_of(SERVER)]
    driver.do(driver.state.on_forked, SERVER, 8)
    driver.do(driver.state.on_listening, SERVER, Listening({"zmq": SERVER}))
    assert announced(driver.do(driver.state.on_connected, SERVER)) == [
        events.WorkerConnected(SERVER),
        events.WorkerRestarted(SERVER, 8, 0.0),
        events.Ready(0.0),
    ]


def test_death_while_workers_connect_ends_the_run_where_links_open_at_the_start() -> None:
    driver = Driver(graph_of(opens="start")).connect()
    assert end_of([*driver.die(SERVER), *driver.pass_time(1.0)]) == f"{SERVER} {KILLED}"


def test_cause_of_a_death_is_reported(driver: Driver) -> None:
    driver.do(driver.state.deaths.on_failed, SERVER, Failed("broken"))
    assert announced(driver.die(SERVER)) == [events.WorkerLost(SERVER, f"failed: broken; {KILLED}", may_recur=True)]


def test_last_messages_are_read_before_a_death_is_explained(driver: Driver) -> None:
    assert announced(driver.do(driver.state.deaths.on_exited, SERVER, KILLED)) == []
    assert announced(driver.do(driver.state.deaths.on_connection_closed, SERVER)) == [events.WorkerLost(SERVER, KILLED)]
    assert announced(driver.do(driver.state.deaths.on_exited, CLIENT, KILLED)) == []
    driver.do(driver.state.deaths.on_connection_closed, CLIENT)
    assert end_of(driver.pass_time(SETTLE_SECONDS)) == f"{CLIENT} {KILLED}"


@pytest.mark.parametrize("how", [KILLED, "was killed by SIGSEGV"])
def test_a_loss_is_announced_before_the_reap_once_all_is_read_and_the_exit_status_is_known(how: str, driver: Driver) -> None:
    former, may_recur = driver.state.incarnations[SERVER], how != KILLED
    left = PeerLeft(SERVER, former, how)
    assert driver.do(driver.state.deaths.on_dying, SERVER, how) == [Send(CLIENT, left)]
    assert driver.state.accepts_messages(SERVER, former), "its last messages count"
    assert announced(driver.do(driver.state.deaths.on_connection_closed, SERVER)) == [events.WorkerLost(SERVER, how, may_recur=may_recur)]
    assert not driver.state.accepts_messages(SERVER, former)
    actions = [*driver.do(driver.state.deaths.on_exited, SERVER, how), *driver.pass_time(0.0)]
    assert driver.start_of(SERVER) in actions


def test_a_loss_is_announced_before_the_reap_when_the_connection_closed_first(driver: Driver) -> None:
    assert announced(driver.do(driver.state.deaths.on_connection_closed, SERVER)) == []
    assert announced(driver.do(driver.state.deaths.on_dying, SERVER, KILLED)) == [events.WorkerLost(SERVER, KILLED)]
    actions = [*driver.do(driver.state.deaths.on_exited, SERVER, KILLED), *driver.pass_time(0.0)]
    assert driver.start_of(SERVER) in actions


@pytest.mark.parametrize("closes_first", [False, True])
def test_a_loss_waits_for_an_exit_status_that_is_not_known(closes_first: bool, driver: Driver) -> None:
    notices = [(driver.state.deaths.on_dying, SERVER, ""), (driver.state.deaths.on_connection_closed, SERVER)]
    for event, *arguments in notices[::-1] if closes_first else notices:
        assert announced(driver.do(event, *arguments)) == []
    assert announced(driver.do(driver.state.deaths.on_exited, SERVER, "was killed by SIGSEGV"))[0] == events.WorkerLost(
        SERVER, "was killed by SIGSEGV", may_recur=True
    )


def test_a_report_explains_an_exit_status_that_comes_before_it(driver: Driver) -> None:
    driver.do(driver.state.deaths.on_dying, SERVER, "exited with status 1")
    driver.do(driver.state.deaths.on_failed, SERVER, Failed("no such file", user=True))
    (lost,) = announced(driver.do(driver.state.deaths.on_connection_closed, SERVER))
    assert lost == events.WorkerLost(SERVER, "failed: no such file; exited with status 1")


def test_closed_connections(driver: Driver) -> None:
    driver.do(driver.state.deaths.on_connection_closed, SERVER)
    assert driver.pass_time(LAST_MESSAGES_SECONDS) == [EndProcess(SERVER)]
    driver.do(driver.state.deaths.on_connection_closed, CLIENT)
    assert end_of(driver.pass_time(STATUS_SECONDS + SETTLE_SECONDS)) == f"{CLIENT} closed its control connection unexpectedly"


def test_process_that_is_not_reaped_is_given_up_until_it_is(driver: Driver) -> None:
    driver.do(driver.state.deaths.on_dying, SERVER, "")
    assert announced(driver.pass_time(FENCE_SECONDS)) == [events.WorkerLost(SERVER, "has ended")]
    assert not driver.state.accepts_messages(SERVER, driver.state.incarnations[SERVER])
    (given_up,) = announced(driver.pass_time(REAP_SECONDS))
    assert isinstance(given_up, events.WorkerGivenUp)
    assert driver.state.restarting() == []
    actions = driver.restart(SERVER)
    assert driver.start_of(SERVER) in actions
    assert driver.state.restarting() == [SERVER]


def test_process_that_does_not_end_ends_a_start() -> None:
    driver = Driver().load()
    driver.do(driver.state.deaths.on_connection_closed, SERVER)
    assert end_of(driver.pass_time(REAP_SECONDS)) == f"{SERVER} has been ending for 15 s: is the machine overloaded?"


def test_link_lost_kills_the_end_that_the_run_can_lose_unless_a_death_explains_it(driver: Driver) -> None:
    driver.do(driver.state.deaths.on_link_lost, CLIENT, LinkLost(SERVER, "it broke"))
    assert EndProcess(SERVER) in driver.pass_time(EXPLAINED_SECONDS)
    driver.do(driver.state.deaths.on_link_lost, OTHER, LinkLost(SERVER, "it broke"))  # its death is known
    assert not [action for action in driver.pass_time(EXPLAINED_SECONDS) if isinstance(action, EndProcess)]


def test_link_lost_kills_the_end_that_keeps_less_state() -> None:
    nodes = [Node(CLIENT, "source", CLIENT), Node(SERVER, "experts", SERVER), Node(OTHER, "experts", OTHER)]
    edges = [Edge(CLIENT, "y", server, "x", transport="zmq") for server in (SERVER, OTHER)]
    driver = Driver(Graph.of(nodes, edges, reliability=ReliabilitySettings(detector=False))).begin()
    driver.do(driver.state.deaths.on_link_lost, SERVER, LinkLost(CLIENT, "it broke"))
    assert [each for each in driver.pass_time(EXPLAINED_SECONDS) if isinstance(each, EndProcess)] == [EndProcess(SERVER)]


@pytest.mark.parametrize("both", [False, True])
def test_link_lost_while_workers_connect_is_decided_when_nothing_explains_it(both: bool) -> None:
    """At the report the run could lose neither end, as others waited for both."""
    driver = Driver().connect()
    for process in driver.state.table.processes.values():
        process.links_are_lazy = False
    driver.do(driver.state.deaths.on_link_lost, CLIENT, LinkLost(SERVER, "it broke"))
    for name in (CLIENT, SERVER, OTHER):
        driver.do(driver.state.on_connected, name)
    if both:
        driver.do(driver.state.deaths.on_link_lost, SERVER, LinkLost(CLIENT, "it broke"))
    killed = [each for each in driver.pass_time(0.0 if both else EXPLAINED_SECONDS) if isinstance(each, EndProcess)]
    assert killed == [EndProcess(SERVER)]


def test_link_that_both_ends_have_lost_is_explained_by_no_death(driver: Driver) -> None:
    for worker, peer in ((CLIENT, SERVER), (CLIENT, SERVER), (OTHER, CLIENT)):
        driver.do(driver.state.deaths.on_link_lost, worker, LinkLost(peer, "it broke"))
    assert driver.pass_time(0.0) == []
    driver.do(driver.state.deaths.on_link_lost, SERVER, LinkLost(CLIENT, "it broke"))
    killed = [action for action in driver.pass_time(0.0) if isinstance(action, EndProcess)]
    assert killed == [EndProcess(SERVER)]


@pytest.mark.parametrize(
    ("how", "may_recur"),
    [
        (KILLED, False),
        ("was killed by SIGTERM", False),
        ("exited with status 0", False),
        ("was killed by SIGSEGV", True),
        ("exited with status 1", True),
    ],
)
def test_a_crash_may_recur_and_a_kill_from_outside_does_not(how: str, may_recur: bool, driver: Driver) -> None:
    driver.do(driver.state.deaths.on_exited, SERVER, how)
    (lost,) = announced(driver.do(driver.state.deaths.on_connection_closed, SERVER))
    assert lost == events.WorkerLost(SERVER, how, may_recur=may_recur)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_hang_may_recur_and_a_stop_does_not(is_stopped: bool, driver: Driver) -> None:
    report = DetectorReport(SERVER, driver.state.incarnations[SERVER], ProcessState.DEAD, "why", is_stopped)
    driver.do(driver.state.on_detector_report, report)
    assert [each.may_recur for each in announced(driver.die(SERVER)) if isinstance(each, events.WorkerLost)] == [not is_stopped]


def test_workers_that_start_link_only_with_those_that_are_up(driver: Driver) -> None:
    for name in (SERVER, OTHER):
        driver.die(name)
        driver.pass_time(1.0)
    driver.do(driver.state.on_forked, OTHER, 1)
    driver.do(driver.state.on_forked, SERVER, 2)
    actions = driver.do(driver.state.on_listening, SERVER, Listening({"zmq": "new"}))
    (peers,) = [each.control for each in actions if isinstance(each, Send) and isinstance(each.control, Peers)]
    assert peers.incarnations == {name: driver.state.incarnations[name] for name in (CLIENT, SERVER)}
    assert peers.addresses.keys() == {CLIENT, SERVER}


def test_link_lost_between_workers_that_the_run_needs_ends_it() -> None:
    driver = Driver(graph_of(recovery="off")).begin()
    driver.do(driver.state.deaths.on_link_lost, CLIENT, LinkLost(SERVER, "it broke"))
    assert end_of(driver.pass_time(EXPLAINED_SECONDS + SETTLE_SECONDS)) == "client failed: lost its link to server: it broke"


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ("complains", "dies", f"{SERVER} {KILLED}"),
        ("complains", "is misused", "bad input"),
        ("dies", "is misused", "bad input"),
        ("dies", "complains", f"{SERVER} {KILLED}"),
    ],
)
def test_most_fundamental_of_the_first_reports_is_the_root_cause(first: str, second: str, named: str) -> None:
    driver = Driver(graph_of(recovery="off")).begin()
    happen = {
        "complains": lambda: driver.do(driver.state.deaths.on_failed, CLIENT, Failed("no answer")),
        "is misused": lambda: driver.do(driver.state.deaths.on_failed, OTHER, Failed("bad input", user=True)),
        "dies": lambda: driver.die(SERVER),
    }
    happen[first]()
    driver.pass_time(SETTLE_SECONDS / 2)
    happen[second]()
    assert end_of(driver.pass_time(SETTLE_SECONDS)) == named


def test_lost_fork_server_is_the_root_cause_of_a_failed_start() -> None:
    driver = Driver().connect()
    driver.do(driver.state.deaths.on_fork_server_lost, KILLED)
    driver.do(driver.state.deaths.on_connection_closed, CLIENT)
    assert end_of(driver.pass_time(60.0)) == f"{FORK_SERVER} {KILLED}"


def test_a_start_that_has_failed_does_not_become_ready() -> None:
    """All processes connect while the cause of the failure settles."""
    driver = Driver().connect()
    driver.do(driver.state.deaths.on_fork_server_lost, KILLED)
    connected = [event for name in (CLIENT, SERVER, OTHER) for event in announced(driver.do(driver.state.on_connected, name))]
    assert {type(event) for event in connected} == {events.WorkerConnected}
    assert end_of(driver.pass_time(60.0)) == f"{FORK_SERVER} {KILLED}"


def test_stop_in_order_and_stragglers(driver: Driver) -> None:
    deadline = driver.now + 5.0
    assert driver.do(driver.state.stop) == [Send(name, Stop(), deadline) for name in (CLIENT, SERVER, OTHER)]
    for name in (CLIENT, SERVER, OTHER):
        driver.do(driver.state.on_stop_sent, name)
    for name in (CLIENT, SERVER):
        assert driver.die(name) == []
    assert driver.pass_time(5.0) == [Announce(events.Straggler(OTHER, 5.0)), EndProcess(OTHER, end_gently=True)]
    assert driver.pass_time(0.5) == [EndProcess(OTHER)]
    assert driver.die(OTHER) == [End()]


@pytest.mark.parametrize("phase", ["load", "connect"])
def test_stop_before_the_run_is_ready_ends_it_at_once(phase: str) -> None:
    driver = Driver()
    getattr(driver, phase)()
    assert driver.do(driver.state.stop) == [End()]
    assert driver.state.deadline is None


def test_stop_signals_no_process_that_is_being_forked(driver: Driver) -> None:
    driver.die(SERVER)
    actions = driver.pass_time(1.0)
    assert driver.start_of(SERVER) in actions
    driver.do(driver.state.stop)
    actions = driver.pass_time(20.0)
    assert not [action for action in actions if isinstance(action, EndProcess) and action.process == SERVER]
    assert actions[-1] == End()


def test_failure_that_a_connecting_server_reports_is_the_root_cause() -> None:
    driver = Driver().connect()
    driver.do(driver.state.deaths.on_failed, SERVER, Failed("bad checkpoint", user=True))
    driver.die(SERVER)
    actions = driver.pass_time(SETTLE_SECONDS)
    assert not [action for action in actions if isinstance(action, StartProcess)]
    assert end_of(actions) == "bad checkpoint"


def test_silence_does_not_overrule_a_report() -> None:
    driver = Driver().load()
    driver.pass_time(60.0 - SETTLE_SECONDS / 2)
    driver.do(driver.state.deaths.on_failed, SERVER, Failed("bad checkpoint", user=True))
    assert end_of(driver.pass_time(SETTLE_SECONDS)) == "bad checkpoint"


def test_incarnation_that_dies_is_introduced_to_no_peer(driver: Driver) -> None:
    driver.die(SERVER)
    driver.pass_time(1.0)
    driver.do(driver.state.on_forked, SERVER, 8)
    driver.do(driver.state.deaths.on_dying, SERVER, "")
    actions = driver.do(driver.state.on_listening, SERVER, Listening({}))
    assert not [action for action in actions if isinstance(action, Send)]


def test_a_start_that_takes_too_long_names_the_worker_that_was_marked_dead() -> None:
    """SERVER is silent too, because it waits for CLIENT."""
    driver = Driver(packed={name: [name] for name in (SERVER, CLIENT, OTHER)}).connect()
    driver.do(driver.state.on_detector_report, DetectorReport(CLIENT, driver.state.incarnations[CLIENT], ProcessState.DEAD, "stopped"))
    end = end_of(driver.pass_time(driver.state.response_seconds + 2 * SETTLE_SECONDS))
    assert end == f"{CLIENT} sent nothing for 60 s while connecting"


def test_a_start_that_takes_too_long_names_all_that_may_hold_it_up() -> None:
    """While they connect nothing watches them: each may wait for any other."""
    driver = Driver(packed={name: [name] for name in (SERVER, CLIENT, OTHER)}).connect()
    end = end_of(driver.pass_time(driver.state.response_seconds + 2 * SETTLE_SECONDS))
    assert end == f"{SERVER} sent nothing for 60 s while connecting, nor did {CLIENT}, {OTHER}: one of them may hold up the rest"


def test_dead_worker_that_is_not_killed_is_announced_as_such(driver: Driver) -> None:
    driver.do(driver.state.stop)
    incarnation = driver.state.incarnations[SERVER]
    actions = driver.do(driver.state.on_detector_report, DetectorReport(SERVER, incarnation, ProcessState.DEAD, "stopped"))
    assert announced(actions) == [events.WorkerMarkedDead(SERVER, "stopped", False, may_recur=True)]
    assert not [action for action in actions if isinstance(action, EndProcess)]


def test_link_lost_between_needed_workers_ends_the_run_while_another_server_is_down() -> None:
    nodes = [Node(CLIENT, "nothing", CLIENT), Node(OTHER, "nothing", OTHER), Node(SERVER, "experts", SERVER)]
    edges = [Edge(CLIENT, "y", OTHER, "x", transport="zmq"), Edge(CLIENT, "z", SERVER, "x", transport="zmq")]
    driver = Driver(Graph.of(nodes, edges, reliability=ReliabilitySettings(detector=False, restarts=0))).begin()
    driver.die(SERVER)
    driver.pass_time(1.0)
    driver.do(driver.state.deaths.on_link_lost, CLIENT, LinkLost(OTHER, "reset"))
    assert "lost its link to other" in end_of(driver.pass_time(EXPLAINED_SECONDS + SETTLE_SECONDS))


@pytest.mark.parametrize("victim", [SERVER, CLIENT])
def test_worker_that_reads_no_messages_is_ended_by_name(victim: str, driver: Driver) -> None:
    incarnation = driver.state.incarnations[victim]
    assert not driver.do(driver.state.deaths.on_overflow, victim, "an earlier one")
    actions = [
        *(action for _ in range(2) for action in driver.do(driver.state.deaths.on_overflow, victim, incarnation)),
        *driver.pass_time(1.0),
    ]
    if victim == SERVER:
        assert EndProcess(SERVER) in actions
        assert [event.how for event in announced(actions) if isinstance(event, events.WorkerLost)] == [
            "does not read its control connection: is it stopped, or the machine overloaded?"
        ]
    else:
        assert end_of(actions) == "client does not read its control connection: is it stopped, or the machine overloaded?"


def test_restarted_server_that_loads_changed_weights_is_refused() -> None:
    driver = Driver().load()
    for name in (CLIENT, SERVER, OTHER):
        driver.do(driver.state.on_listening, name, Listening({"zmq": name}, files={"/model/a": "1", "/model/b": "2"}))
    for name in (CLIENT, SERVER, OTHER):
        driver.do(driver.state.on_connected, name)
    driver.restart(SERVER)
    driver.do(driver.state.on_forked, SERVER, 8)
    actions = driver.do(driver.state.on_listening, SERVER, Listening({"zmq": "new"}, files={"/model/a": "1", "/model/b": "3"}))
    assert EndProcess(SERVER) in actions
    assert not [each for each in actions if isinstance(each, Send) and isinstance(each.control, PeerJoined)], "a process learns its address"
    reason = "/model/b has changed since the run began; restore the file, or start the run again"
    assert announced(driver.die(SERVER)) == [events.WorkerLost(SERVER, f"failed: {reason}; {KILLED}")]


def test_weights_that_change_between_the_loads_of_two_workers_end_the_start() -> None:
    driver = Driver().load()
    driver.do(driver.state.on_listening, CLIENT, Listening({}, files={"/model/b": "2"}))
    driver.do(driver.state.on_listening, SERVER, Listening({}, files={"/model/b": "3"}))
    assert end_of(driver.pass_time(SETTLE_SECONDS)).startswith("/model/b has changed since the run began")


def test_failed_fork_ends_a_start_and_is_retried_in_a_run() -> None:
    driver = Driver()
    driver.do(driver.state.start, driver.now)
    error = UserError("no descriptor")
    assert driver.do(driver.state.deaths.on_fork_failed, SERVER, error) == [End(error)]
    driver = Driver().begin()
    driver.restart(SERVER)
    error = WorkerDiedError(SERVER, "could not be forked")
    for _ in range(2):
        driver.do(driver.state.deaths.on_fork_failed, SERVER, error)
        assert driver.pass_time(1.0) == [driver.start_of(SERVER)]
    why = "it could not be forked, and it was started again 3 times in 30 s; the next try is in 30 s"
    assert driver.do(driver.state.deaths.on_fork_failed, SERVER, error) == [Announce(events.WorkerGivenUp(SERVER, why, 30.0))]


@pytest.mark.parametrize("first", list(WorkerState))
@pytest.mark.parametrize("second", list(WorkerState))
def test_worker_enters_only_states_that_may_follow(first: WorkerState, second: WorkerState) -> None:
    worker = WorkerRecord("w", ProcessRecord("p", True, True, False), "1", state=first, is_open=True)
    assert worker.advance(second) == (second in NEXT_STATES[first])
    assert worker.state is (second if second in NEXT_STATES[first] else first)
    assert not (worker.is_usable and worker.state in (WorkerState.LEFT, WorkerState.LOADING))
    assert worker.has_ended == (worker.state in (WorkerState.STOPPING, WorkerState.LEFT))


def test_every_state_of_a_worker_can_be_reached() -> None:
    reached = {WorkerState.FORKING}
    while more := {after for state in reached for after in NEXT_STATES[state]} - reached:
        reached |= more
    assert reached == set(NEXT_STATES) == set(WorkerState)


class MonitoredDriver(Driver):
    """A run whose monitor is connected."""

    def __init__(self, settings: ReliabilitySettings = ReliabilitySettings()) -> None:
        super().__init__(graph_of().replace(reliability=settings))
        self.begin()
        self.start_monitor()

    def start_monitor(self) -> None:
        self.do(self.state.on_forked, MONITOR, 9)
        self.do(self.state.on_listening, MONITOR, Listening({}))
        self.do(self.state.on_connected, MONITOR)

    def polls(self, number: int) -> list[Action]:
        return [action for _ in range(number) for action in self.pass_time(POLL_SECONDS)]


NUM_POLLS = int(MONITOR_SECONDS / POLL_SECONDS)


@pytest.fixture
def monitored() -> MonitoredDriver:
    return MonitoredDriver()


def test_monitor_that_does_not_respond_is_ended(monitored: MonitoredDriver) -> None:
    assert monitored.polls(NUM_POLLS - 1) == [Send(MONITOR, StatisticsRequest())] * (NUM_POLLS - 1)
    assert EndProcess(MONITOR) in monitored.polls(1)
    assert announced(monitored.die(MONITOR)) == [events.WorkerLost(MONITOR, f"sent nothing for {MONITOR_SECONDS:g} s; {KILLED}")]


def test_monitor_returns_also_where_no_process_is_restarted() -> None:
    """Without it no process that hangs is found."""
    driver = MonitoredDriver(ReliabilitySettings(restarts=0))
    driver.die(MONITOR)
    assert [each.process for each in driver.pass_time(0.0) if isinstance(each, StartProcess)] == [MONITOR]


def test_monitor_that_is_stopped_while_it_starts_is_ended(monitored: MonitoredDriver) -> None:
    monitored.restart(MONITOR)
    assert monitored.polls(NUM_POLLS) == [], "it is forked later"
    monitored.do(monitored.state.on_forked, MONITOR, 9)
    assert monitored.polls(NUM_POLLS - 1) == []
    assert EndProcess(MONITOR) in monitored.polls(1)


def test_any_message_and_a_new_incarnation_restart_the_silence_of_the_monitor(monitored: MonitoredDriver) -> None:
    monitored.polls(NUM_POLLS - 1)
    monitored.do(monitored.state.on_message, MONITOR)
    assert EndProcess(MONITOR) not in monitored.polls(NUM_POLLS - 1)
    monitored.restart(MONITOR)
    monitored.start_monitor()
    assert EndProcess(MONITOR) not in monitored.polls(NUM_POLLS - 1)


def test_monitor_learns_of_a_process_when_it_is_forked_and_when_it_is_connected(monitored: MonitoredDriver) -> None:
    monitored.restart(SERVER)
    incarnation = monitored.state.incarnations[SERVER]
    starting = Send(MONITOR, PeerJoined(SERVER, incarnation, {}, 8, is_starting=True))
    assert starting in monitored.do(monitored.state.on_forked, SERVER, 8)
    monitored.restart(MONITOR)
    monitored.do(monitored.state.on_forked, MONITOR, 9)
    monitored.do(monitored.state.on_listening, MONITOR, Listening({}))
    assert starting in monitored.do(monitored.state.on_connected, MONITOR), "the next monitor"
    monitored.do(monitored.state.on_listening, SERVER, Listening({}))
    assert Send(MONITOR, PeerJoined(SERVER, incarnation, {}, 8)) in monitored.do(monitored.state.on_connected, SERVER)


def test_process_that_is_marked_dead_while_it_starts_is_restarted(monitored: MonitoredDriver) -> None:
    monitored.restart(SERVER)
    monitored.do(monitored.state.on_forked, SERVER, 8)
    incarnation = monitored.state.incarnations[SERVER]
    why = "stopped, no heartbeat for 1.02 s"
    report = DetectorReport(SERVER, incarnation, ProcessState.DEAD, why, is_stopped=True)
    actions = monitored.do(monitored.state.on_detector_report, report)
    assert EndProcess(SERVER) in actions
    assert announced(actions) == [events.WorkerMarkedDead(SERVER, why, is_killed=True)]
    monitored.die(SERVER)
    monitored.pass_time(10.0)
    assert monitored.state.incarnations[SERVER] != incarnation


@pytest.mark.parametrize("is_cleared", [False, True])
def test_process_that_is_marked_dead_while_others_connect_is_restarted_once_the_run_is_up(is_cleared: bool) -> None:
    """Others wait for its very incarnation until then, and the monitor reports it once."""
    driver = Driver(graph_of(opens="start")).connect()
    driver.do(driver.state.on_connected, SERVER)
    incarnation = driver.state.incarnations[SERVER]
    actions = driver.do(driver.state.on_detector_report, DetectorReport(SERVER, incarnation, ProcessState.DEAD, "it hangs"))
    assert EndProcess(SERVER) not in actions
    assert announced(actions) == [events.WorkerMarkedDead(SERVER, "it hangs", is_killed=False, may_recur=True)]
    if is_cleared:
        driver.do(driver.state.on_detector_report, DetectorReport(SERVER, incarnation, ProcessState.ALIVE, "it goes on"))
    driver.do(driver.state.on_connected, OTHER)
    assert (EndProcess(SERVER) in driver.do(driver.state.on_connected, CLIENT)) != is_cleared
    lost = [event for event in announced(driver.die(SERVER)) if isinstance(event, events.WorkerLost)]
    assert [event.may_recur for event in lost] == [not is_cleared], "a kill from outside blames no request"


def test_a_process_is_down_until_an_incarnation_is_up(driver: Driver) -> None:
    for _ in range(2):
        driver.die(SERVER)
        driver.pass_time(8.0)
        driver.do(driver.state.on_forked, SERVER, 8)
    driver.do(driver.state.on_listening, SERVER, Listening({}))
    (event,) = [each for each in announced(driver.do(driver.state.on_connected, SERVER)) if isinstance(each, events.WorkerRestarted)]
    assert event.seconds == pytest.approx(16.0)


def test_launcher_that_was_stopped_does_not_blame_the_monitor(monitored: MonitoredDriver) -> None:
    monitored.now += 60.0
    assert monitored.do(monitored.state.on_time) == [Send(MONITOR, StatisticsRequest())]
    assert EndProcess(MONITOR) not in monitored.polls(NUM_POLLS - 2)
    assert EndProcess(MONITOR) in monitored.polls(1)


def test_known_death_without_an_exit_status_is_reported_as_one(driver: Driver) -> None:
    driver.do(driver.state.deaths.on_dying, CLIENT, "")
    driver.do(driver.state.deaths.on_connection_closed, CLIENT)
    reason = "client has ended, and its exit status is not known"
    assert end_of(driver.pass_time(STATUS_SECONDS + SETTLE_SECONDS)) == reason


def test_run_ends_in_order_before_the_exits_are_reaped(driver: Driver) -> None:
    driver.do(driver.state.stop)
    actions: list[Action] = []
    for name in (CLIENT, SERVER, OTHER):
        driver.do(driver.state.on_stop_sent, name)
        actions += [*driver.do(driver.state.deaths.on_dying, name, ""), *driver.do(driver.state.deaths.on_connection_closed, name)]
    assert actions == [End()]


def test_monitor_watches_services_of_a_graph_without_processes() -> None:
    """A front end of a graph whose workers are tasks may hang, too."""
    graph = graph_of().replace(reliability=ReliabilitySettings())

    def wants_monitor(services: Sequence[str]) -> bool:
        state = RunState(
            graph,
            {name: [name] for name in services},
            [CLIENT, SERVER, OTHER],
            new_incarnation=str,
            response_seconds=60.0,
            stop_seconds=5.0,
        )
        return state.wants_monitor

    assert not wants_monitor([])
    assert wants_monitor(["front_end.0"])
