"""Calls of a user's graph, at their source and sink."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from flowrt.errors import WorkerDiedError
from flowrt.graph.file import load_graph
from flowrt.workers.endpoint import Endpoint

CALLS = Path(__file__).parents[1] / "simulation/graphs/calls.yaml"


async def test_a_call_after_the_failure_of_the_graph_waits_for_no_place() -> None:
    """The place of a cancelled call becomes free when the workers confirm its end; none does any more."""
    graph = load_graph(CALLS)
    endpoint = Endpoint(graph.replace(limits=graph.limits.replace(in_flight=1)))
    endpoint._worker = Mock()
    tensors = {port: torch.tensor([1.0]) for port in endpoint.ports}
    first = asyncio.create_task(endpoint.call(tensors))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    endpoint.fail(WorkerDiedError("right", "was killed by SIGKILL"))
    with pytest.raises(WorkerDiedError, match="was killed"):
        await endpoint.call(tensors)
