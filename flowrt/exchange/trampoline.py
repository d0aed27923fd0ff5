"""Trampolines: expert servers that receive for others, so that a group sends fewer messages per layer (xDeepServe section 3.3).

In the expert map of a group, a trampoline is one more server, with the experts of all servers behind it. Its `forward` node splits a part
as dispatch splits a step; its `merge` node makes one response of theirs. Trampoline is its Failover: where a group would fail a step, it
responds to the request with the error, and where a group would wait for a replica, it reports the part lost, so that the group sends it
past the trampoline.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import PartHeader, PlanHeader
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.runner import Runner
from flowrt.errors import FailureCause, OperatorError
from flowrt.exchange.dispatch import Combine, Dispatch
from flowrt.exchange.expert_client import ExpertClient, Redispatch
from flowrt.exchange.failover import Failover
from flowrt.graph.model import Graph
from flowrt.operators.combine import combine
from flowrt.operators.dispatch import Part, repartition
from flowrt.operators.replica_table import UNAVAILABLE
from flowrt.transports.wire.message import Tag


class Forward(Dispatch):
    """Port in: `rows`, a part. Out: `plan` (x_RH, number_P, then as of Dispatch; header: the part ids, and the id of the part itself) and
    `server<s>`. `number_P` = row * num_active + n for the n-th pair of a row: these numbers take the place of the pairs of a step."""

    def __init__(self, client: ExpertClient, num_active: int, strict: bool = False) -> None:
        super().__init__(client, strict)
        self._num_active = num_active

    def _dispatch(self, firing: Firing) -> dict[str, Payload]:
        tag, request, client = firing.tag, firing.inputs["rows"], self.client
        x_RH, row_P, expert_P, weight_P = request.tensors
        first_R = torch.bincount(row_P, minlength=len(x_RH)).cumsum(0).roll(1)
        first_R[0] = 0
        place_P = torch.arange(len(row_P), device=row_P.device) - first_R[row_P]
        if len(first_R) > len(x_RH) or place_P.min() < 0 or place_P.max() >= self._num_active or client.parts(tag, ()) is not None:
            raise OperatorError(f"{firing.node} got a part whose pairs do not ascend by row, or a second part of a tag")
        number_P = row_P * self._num_active + place_P
        whole = Part(UNAVAILABLE, row_P, row_P, expert_P, weight_P, number_P)
        parts = repartition(whole, self._num_active, client.servers.replica_table(tag.layer), tag.step + tag.layer)
        if any(part.server == UNAVAILABLE for part in parts):
            client.servers.end_split()
            raise OperatorError(NO_REPLICA, cause=FailureCause.LOST)
        header = PlanHeader(tuple(range(len(parts))), request.header_as(PartHeader).part)
        plan = Payload((x_RH, number_P, *(part.pair_P if self._strict else part.rows_R for part in parts)), header)
        return {"plan": plan} | client.add_tag(tag, x_RH, self._num_active, parts)


class Merge(Combine):
    """Ports in: `plan`, `parts` (gather). Out: `results`, the response of a server with the experts of all (expert_service.py)."""

    def _combine(self, firing: Firing) -> dict[str, Payload]:
        plan: Payload = firing.inputs["plan"]
        x_RH, number_P, *where = plan.tensors
        found = self._located(firing, where)
        self._client.forget(firing.tag)
        if found is None:  # its client has ended
            return {}
        if self._strict:
            y_NH = x_RH.new_empty(int(number_P[-1]) + 1, x_RH.shape[1])
            for numbers, y in found:
                y_NH.index_copy_(0, numbers, y)
            y = y_NH.index_select(0, number_P)
        else:
            y = combine(torch.zeros_like(x_RH), found)
        return {"results": Payload((y,), PartHeader(plan.header_as(PlanHeader).responds_to))}


NO_REPLICA = "a trampoline reaches no replica of an expert"


class Trampoline(Failover):
    """Failover of the trampoline in this process. `forward` names its node."""

    def __init__(self, graph: Graph, forward: str, client: ExpertClient, runner: Runner) -> None:
        super().__init__(graph, forward, client, runner, self)

    def fail_steps(self, tags: Collection[Tag], error: str, *, crashed: bool = False, left: Collection[Tag] = ()) -> None:
        for tag in dict.fromkeys(tags):
            self.fail(tag, OperatorError(error, cause=FailureCause.CRASHED if crashed else FailureCause.ERROR))

    def fail(self, tag: Tag, error: OperatorError) -> None:
        """Respond to the request of this tag with an error, unless it has its response."""
        if self._runner.fail(self._combine, tag, error):
            self.client.forget(tag)

    def _send(self, tag: Tag, redispatch: Redispatch) -> None:
        if len(redispatch.outputs) < len(redispatch.by):
            self.fail(tag, OperatorError(NO_REPLICA, cause=FailureCause.LOST))
        else:
            super()._send(tag, redispatch)
