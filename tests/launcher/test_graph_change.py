"""A change of the running graph: who starts, who is notified of what, and who ends, in which order and until when."""

from __future__ import annotations

from launcher.run_driver import CLIENT, KILLED, OTHER, SERVER, Driver, announced, graph_of

from flowrt.actors.control import ChangeGraph, DeathCause, PeerLeft, Stop
from flowrt.graph.model import Edge, Graph, Node
from flowrt.launcher import events
from flowrt.launcher.actions import EndProcess, ReleaseProcess, Send, StartProcess
from flowrt.launcher.graph_change import DRAIN_SECONDS
from flowrt.launcher.run_table import ProcessPhase

NEW = "new"


def shrunk() -> Graph:
    graph = graph_of()
    return graph.replace(
        nodes={name: node for name, node in graph.nodes.items() if name != SERVER},
        edges={name: edge for name, edge in graph.edges.items() if edge.target != SERVER},
    )


def grown() -> Graph:
    graph = graph_of()
    edge = Edge(CLIENT, "y", NEW, "x", transport="zmq")
    return graph.replace(nodes=graph.nodes | {NEW: Node(NEW, "experts", NEW)}, edges=graph.edges | {edge.name: edge})


def leaving() -> Driver:
    """SERVER is about to leave."""
    driver = Driver().begin()
    sent = [each for each in driver.do(driver.state.change.begin, shrunk()) if isinstance(each, Send)]
    assert [(each.worker, type(each.control)) for each in sent] == [(name, ChangeGraph) for name in (CLIENT, SERVER, OTHER)]
    assert driver.state.table.graph.leaving == (SERVER,)
    return driver


def stops(actions: list[object]) -> list[str]:
    return [each.worker for each in actions if isinstance(each, Send) and isinstance(each.control, Stop)]


def test_process_that_leaves_ends_when_all_workers_have_confirmed() -> None:
    driver = leaving()
    for name in (SERVER, OTHER):
        assert not driver.do(driver.state.change.on_changed, name, 1)
    assert not driver.do(driver.state.change.on_changed, CLIENT, 0), "a former version"
    ending = driver.do(driver.state.change.on_changed, CLIENT, 1)
    assert isinstance(ending[0], Send)
    assert isinstance(ending[0].control, PeerLeft)
    assert stops([*ending]) == [SERVER]
    assert SERVER not in driver.state.table.graph.process_names()
    driver.do(driver.state.on_stop_sent, SERVER)
    driver.do(driver.state.deaths.on_exited, SERVER, "exited with status 0")
    actions = driver.do(driver.state.deaths.on_connection_closed, SERVER)
    assert actions == [ReleaseProcess(SERVER), *(each for each in actions if not isinstance(each, ReleaseProcess))]
    assert announced(actions) == [events.ChangeEnded()]
    assert SERVER not in driver.state.table.processes


def test_workers_that_do_not_confirm_delay_the_end_for_a_while_only() -> None:
    driver = leaving()
    assert not stops([*driver.pass_time(DRAIN_SECONDS - 0.1)])
    assert stops([*driver.pass_time(0.2)]) == [SERVER]


def test_process_that_is_about_to_be_started_again_does_not_when_it_leaves(driver: Driver) -> None:
    driver.die(SERVER)
    driver.do(driver.state.starts.start_next, SERVER)
    assert driver.state.table.processes[SERVER].phase == ProcessPhase.FORKING
    driver.do(driver.state.change.begin, shrunk())
    assert EndProcess(SERVER) in driver.do(driver.state.on_forked, SERVER, 8)
    for name in (CLIENT, OTHER):
        driver.do(driver.state.change.on_changed, name, 1)
    actions = driver.die(SERVER)
    assert events.ChangeEnded() in announced(actions)
    assert not [each for each in (*actions, *driver.pass_time(60.0)) if isinstance(each, StartProcess)]


def test_a_process_that_leaves_before_it_is_up_is_ended_on_purpose(driver: Driver) -> None:
    """Its neighbours may have sent it parts already, when it listened."""
    driver.die(SERVER)
    driver.do(driver.state.starts.start_next, SERVER)
    driver.do(driver.state.on_forked, SERVER, 8)
    driver.do(driver.state.change.begin, shrunk())
    causes = [each.control for each in driver.die(SERVER) if isinstance(each, Send) and isinstance(each.control, DeathCause)]
    assert [(cause.process, cause.is_on_purpose) for cause in causes] == [(SERVER, True)]


def test_change_is_undone_when_a_new_process_is_given_up() -> None:
    driver = Driver(graph_of(restarts=0)).begin()
    before = driver.state.table.graph
    begun = driver.do(driver.state.change.begin, grown().replace(reliability=before.reliability))
    assert [each.process for each in begun if isinstance(each, StartProcess)] == [NEW]
    driver.do(driver.state.on_forked, NEW, 8)
    actions = driver.die(NEW)
    for name in (CLIENT, SERVER, OTHER):
        actions += driver.do(driver.state.change.on_changed, name, driver.state.table.graph.version)
    (error,) = [each.error for each in announced(actions) if isinstance(each, events.ChangeEnded)]
    assert str(error).startswith(f"{NEW} {KILLED} before it had joined, and was given up; the graph is as before")
    assert driver.state.table.graph == before
    assert NEW not in driver.state.table.processes
