"""What a worker does with the parts of a peer that leaves the graph."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

from launcher.run_driver import CLIENT, OTHER, SERVER, graph_of

from flowrt.actors.control import Listening
from flowrt.transports.contract import Identity
from flowrt.transports.wire.message import Tag
from flowrt.workers.membership import Membership, listen_more


async def test_the_loss_of_a_server_that_has_left_the_graph_does_not_count() -> None:
    """Its parts may be pending when the time for the change is over."""
    graph = graph_of()
    shrunk = graph.replace(
        nodes={name: node for name, node in graph.nodes.items() if name != SERVER},
        edges={name: edge for name, edge in graph.edges.items() if SERVER not in graph.ends_of(edge)},
    )
    path = Mock(unpack=None, group=None)
    path.name, path.failover.processes, path.failover.ways_to.return_value = CLIENT, (), {SERVER, OTHER}
    awaited = {SERVER: {Tag("group@1")}, OTHER: {Tag("group@1", step=1)}}
    path.runner.awaited.side_effect = awaited.__getitem__
    path.links.incarnations.current = lambda process: Identity(process, "1")
    path.links.close_unplanned = asyncio.Event().wait
    with_tasks = Mock(create_task=lambda task, name: task.close())
    membership = Membership(graph, path, Mock(), Mock(), with_tasks, {})
    membership.use(shrunk)
    path.failover.mark_lost.assert_called_once_with(SERVER, [], awaited[SERVER] | awaited[OTHER])
    (settled,) = path.failover.settle.call_args_list
    process, cause = settled.args
    assert (process, cause.is_on_purpose, cause.may_recur) == (SERVER, True, False)


async def test_where_a_changed_graph_needs_another_listener_is_reported_once() -> None:
    links, sent = Mock(addresses={"shm": "one"}), []

    async def listen() -> dict[str, str]:
        return {"shm": "one", **more}

    links.listen, more = listen, dict[str, str]()
    await listen_more(links, sent.append)
    assert sent == []
    more["zmq"] = "two"
    await listen_more(links, sent.append)
    assert sent == [Listening({"shm": "one", "zmq": "two"})]
