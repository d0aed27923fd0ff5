"""A worker's first steps: load, listen, link; and what it reports when a peer has died meanwhile."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
import torch

from flowrt.actors.control import Connected, Control, Failed, Listening, Peers, Start, as_message, from_message
from flowrt.errors import UserError, leaves
from flowrt.graph.model import Edge, Graph, Node, PortSpec, to_json
from flowrt.process_backend import CONTROL_LIMITS
from flowrt.seams import Seams
from flowrt.transports.contract import Identity
from flowrt.transports.errors import EndOfChannel
from flowrt.transports.inproc import InprocChannel
from flowrt.workers.process import run_worker

PORT = {"x": PortSpec("x", ("float32[n]",))}


def same(x: torch.Tensor) -> torch.Tensor:
    return x


async def test_peer_that_died_before_it_was_linked_is_one_line_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Of two workers, one has listened and died; the other connects to its address."""
    nodes = [Node("one", f"{__name__}:same", "left", PORT, PORT), Node("two", f"{__name__}:same", "right", PORT, PORT)]
    graph = Graph.of(nodes, [Edge("one", "x", "two", "x", transport="zmq", open="start")])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"zmq://127.0.0.1:{closed.getsockname()[1]}"
    ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity("gateway"), Identity("left", "1"))

    async def receive() -> Control:
        return from_message(await ours.recv())

    with caplog.at_level(logging.ERROR):
        working = asyncio.create_task(run_worker(theirs, Seams()))
        await ours.send(as_message(Start("left", "1", to_json(graph), b"k" * 32)))
        assert isinstance(await receive(), Listening)
        await ours.send(as_message(Peers({"left": {}, "right": {"zmq": dead}}, {"left": "1", "right": "2"})))
        failed = await receive()
        assert not isinstance(failed, Connected)
        assert isinstance(failed, Failed)
        assert failed.error.startswith("lost right: ")
        assert not failed.user
        with pytest.raises(EndOfChannel):
            await ours.recv()
    with pytest.raises((UserError, ExceptionGroup)) as caught:
        await working
    assert [type(error) for error in leaves(caught.value)] == [UserError]
    assert [record.exc_info for record in caplog.records] == [None], "a traceback"
    await ours.aclose()
