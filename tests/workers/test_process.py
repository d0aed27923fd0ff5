"""A worker's first steps: load, listen, link; and what it reports when a peer has died meanwhile."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import socket
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from flowrt.actors.control import (
    Connected,
    Control,
    Failed,
    LinkLost,
    Listening,
    LoadProgress,
    Peers,
    Start,
    Stop,
    as_message,
    from_message,
)
from flowrt.actors.link import LinkLostError
from flowrt.api import read_graph
from flowrt.errors import UserError, leaves
from flowrt.graph.model import Edge, Graph, Node, PortSpec, to_json
from flowrt.graph.placement import weight_set
from flowrt.launcher.start_checks import memory_needs
from flowrt.launcher.transport_choice import choose_transports
from flowrt.operators.weight_memory import WeightMemory
from flowrt.seams import RealClock, Seams
from flowrt.system.process_backend import CONTROL_LIMITS
from flowrt.transports.contract import Identity
from flowrt.transports.errors import EndOfChannel
from flowrt.transports.inproc import InprocChannel
from flowrt.transports.registry import unavailable_reason
from flowrt.workers import model_nodes, process, start_check
from flowrt.workers.process import PROGRESS_SECONDS, run_worker

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"

PORT = {"x": PortSpec("x", ("float32[n]",))}


def same(x: torch.Tensor) -> torch.Tensor:
    return x


async def receive(channel: InprocChannel) -> Control:
    return from_message(await channel.recv())


async def test_peer_that_died_before_it_was_linked_is_one_line_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Of two workers, one has listened and died; the other connects to its address."""
    nodes = [Node("one", f"{__name__}:same", "left", PORT, PORT), Node("two", f"{__name__}:same", "right", PORT, PORT)]
    graph = Graph.of(nodes, [Edge("one", "x", "two", "x", transport="zmq", open="start")])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"zmq://127.0.0.1:{closed.getsockname()[1]}"
    ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity("gateway"), Identity("left", "1"))

    with caplog.at_level(logging.ERROR):
        working = asyncio.create_task(run_worker(theirs, Seams()))
        await ours.send(as_message(Start("left", "1", to_json(graph), b"k" * 32)))
        assert isinstance(await receive(ours), Listening)
        await ours.send(as_message(Peers({"left": {}, "right": {"zmq": dead}}, {"left": "1", "right": "2"})))
        failed = await receive(ours)
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


class HurriedClock(RealClock):
    """Each look at it finds it PROGRESS_SECONDS later."""

    def __init__(self) -> None:
        self._times = itertools.count()

    def now(self) -> float:  # type: ignore[override]
        return next(self._times) * PROGRESS_SECONDS

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


@pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")
async def test_a_worker_reports_progress_while_it_reads_weights_and_while_it_waits_for_them() -> None:
    """Its operator may be large, and another process may load its weights: the launcher ends a worker that is silent for long."""
    graph = choose_transports(read_graph(QUICKSTART, ["numerics=strict"]), unavailable_reason)
    weights = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity("gateway"), Identity("experts.0", "1"))

    try:
        seams = Seams(clock=HurriedClock(), descriptors={weight_set(graph, "experts.0"): weights})
        with open(f"/proc/self/fd/{weights}", "rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)  # as another process that loads
            working = asyncio.create_task(run_worker(theirs, seams))
            await ours.send(as_message(Start("experts.0", "1", to_json(graph), b"k" * 32)))
            waiting = await receive(ours)
            assert waiting == LoadProgress("weights, which another process loads", 0, 1)
        reports: list[LoadProgress] = []
        while isinstance(control := await receive(ours), LoadProgress):
            reports.append(control)
        assert isinstance(control, Listening)
        sizes = [report.num_bytes for report in reports if report.text == "experts.0"]
        assert len(set(sizes)) > 1, "of one operator"
        assert sizes == sorted(sizes)
        assert reports[-1] == LoadProgress("", 1, 1, memory_needs(graph)["experts.0"].weight_bytes)
        await ours.send(as_message(Stop()))
        await working
    finally:
        await ours.aclose()
        os.close(weights)


async def test_each_role_computes_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker checks the device of its role, and builds its operators there."""
    graph = read_graph(QUICKSTART, ["deploy.prefill.workers=1", "deploy.prefill.device=cuda:1", "deploy.experts.device=cuda:0"])
    found: dict[str, set[str]] = {}

    def build(graph: Graph, name: str, device: torch.device, *rest: object) -> dict[str, object]:
        found.setdefault(name, set()).add(str(device))
        return {}

    def check(graph: Graph, process: str, device: torch.device) -> dict[str, object]:
        found.setdefault(process, set()).add(str(device))
        return {}

    monkeypatch.setattr(start_check, "_cuda_problem", lambda device: None)
    monkeypatch.setattr(start_check, "build_user_nodes", check)
    monkeypatch.setattr(process, "build_model_nodes", build)
    for name in ("prefill.0", "attention.0", "experts.0"):
        ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity("gateway"), Identity(name, "1"))
        worker = process.Worker(Start(name, "1", to_json(graph), b"k" * 32), theirs, Seams())
        worker.load(name)
        await ours.aclose()
        await theirs.aclose()
    assert found == {"prefill.0": {"cuda:1"}, "attention.0": {"cpu"}, "experts.0": {"cuda:0"}}


@pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")
def test_a_group_uses_the_proof_of_an_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = read_graph(QUICKSTART, ["numerics=strict"])
    assert weight_set(graph, "attention.0") == weight_set(graph, "attention.1") != weight_set(graph, "experts.0")
    proofs: list[str] = []
    monkeypatch.setattr(model_nodes, "prove", lambda module, *rest: proofs.append(type(module).__name__))
    file = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for group in ("attention.0", "attention.1"):
            memory = WeightMemory(os.dup(file), "content")
            model_nodes.site_of(graph, group, "cpu", time.monotonic, memory).computation(graph.nodes[f"{group}.gate"])
            memory.seal()
    finally:
        os.close(file)
    assert proofs == ["Gate"]


async def test_a_worker_that_is_cancelled_as_it_loses_a_link_ends() -> None:
    """A task group that ends with an error drops the cancellation that came with it; then the run would never end."""

    async def lose() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise LinkLostError("right", "it was reset") from None

    async def run_links() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lose())

    worker = Mock(_stopped=asyncio.Event())
    task = asyncio.create_task(process.Worker._run_links(worker, Mock(run=run_links)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait({task})
    worker.control.send.assert_called_once_with(LinkLost("right", "it was reset"))
