"""A user's function behind its node: the declared dtypes and shapes are checked at every firing.

Covers outputs by name, whose accepted dtypes and shapes are cached. tests/end_to_end/test_user_graphs.py covers whole graphs of functions.
"""

from __future__ import annotations

import pytest
import torch

from flowrt.dataflow.matching import Firing
from flowrt.errors import OperatorError
from flowrt.graph.model import GATEWAY, INPUT, OUTPUT, Edge, Graph, Node, PortSpec
from flowrt.transports.wire.message import Tag
from flowrt.workers.user_nodes import build_user_nodes


def give_next() -> object:
    return ANSWERS.pop(0)


ANSWERS: list[object] = []


def test_outputs_by_name_are_checked_though_the_ones_before_fitted() -> None:
    ports = {"a": PortSpec("a", ("float32[n]",)), "b": PortSpec("b", ("float32[n]",))}
    nodes = [
        Node(INPUT, INPUT, GATEWAY),
        Node("both", f"{__name__}:give_next", "worker", outputs=ports),
        Node(OUTPUT, OUTPUT, GATEWAY, inputs=ports),
    ]
    edges = [Edge("both", port, OUTPUT, port) for port in "ab"]
    node = build_user_nodes(Graph.of(nodes, edges), "worker", torch.device("cpu"))["both"]
    three, four = torch.ones(3), torch.ones(4)
    good = {"a": three, "b": three}
    for bad in ({"a": three, "b": four}, {"a": three, "b": three.double()}, {"a": three, "b": three, "c": 1}, {"a": three, "b": None}):
        ANSWERS[:] = [good, good, bad]
        for _ in range(2):
            (outputs,) = node([Firing("both", Tag("x"), {})])
            assert [outputs[port].tensors[0] is three for port in "ab"] == [True, True]
        with pytest.raises(OperatorError, match="both"):
            node([Firing("both", Tag("x"), {})])
