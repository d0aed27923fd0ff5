"""The client side of the expert exchange: splits a step's rows into parts, one per server, and combines the responses.

Dispatch and Combine are the functions of the nodes of those names. Dispatch sends directly, one message per server with rows
(EaaS section 3.2: header, rows, expert ids, scores). expert_client.py chooses servers and redispatches lost parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import PartHeader, PlanHeader
from flowrt.dataflow.payload import Payload
from flowrt.exchange.expert_client import ExpertClient
from flowrt.operators.combine import combine, combine_pairs
from flowrt.operators.dispatch import partition


class Dispatch:
    """Ports in: `x` (normed_TH), `routing` (expert_ids_TA, weights_TA). Out: `plan` (rows_R of each part; header: the
    part ids) and `server<s>` (x_RH, row_P, expert_P, weight_P; header: the part id). A server without rows gets no message.

    With strict numerics the plan is (weights_TA, pair_P of each part): the client weights the responses and adds them by slot.
    """

    def __init__(self, client: ExpertClient, strict: bool = False) -> None:
        self.client = client
        self._strict = strict

    def __call__(self, firings: Sequence[Firing]) -> list[dict[str, Payload]]:
        return [self._dispatch(firing) for firing in firings]

    def _dispatch(self, firing: Firing) -> dict[str, Payload]:
        tag = firing.tag
        (x_TH,) = firing.inputs["x"].tensors
        expert_ids_TA, weights_TA = firing.inputs["routing"].tensors
        parts = self.client.parts_to_send(
            tag, partition(expert_ids_TA, weights_TA, self.client.replica_table(tag.layer), tag.step + tag.layer)
        )
        plan = (weights_TA, *(part.pair_P for part in parts)) if self._strict else tuple(part.rows_R for part in parts)
        header = PlanHeader(tuple(range(len(parts))))
        # The plan goes first: a response may arrive as soon as its part is sent.
        return {"plan": Payload(plan, header)} | self.client.add_tag(tag, x_TH, expert_ids_TA.shape[1], parts)


class Combine:
    """Ports in: `plan` (rows_R per part), `parts` (gather: y_RH each, in plan order), `residual` (x_TH). Out: `y` (x_TH).

    Parts are added in plan order, not in order of arrival, so the sum does not depend on the servers' speed. With strict numerics
    parts carry one unweighted row per pair, so the sum does not depend on the placement either. A pair of an unavailable expert that
    was left out adds nothing; the weights of the other pairs are unchanged.

    A row that is not finite goes on: the head finds its sequence, which alone is computed again (fault_table.py). When the response was
    not finite for a finite row, its server computes wrongly, or the weights or the dtype do not fit the rows. So the client avoids the
    server for a while; it is not fenced, because every replica has the same weights and would follow.
    """

    def __init__(self, client: ExpertClient, strict: bool = False) -> None:
        self._client, self._strict = client, strict

    def __call__(self, firings: Sequence[Firing]) -> list[dict[str, Payload]]:
        return [self._combine(firing) for firing in firings]

    def _combine(self, firing: Firing) -> dict[str, Payload]:
        plan: tuple[torch.Tensor, ...] = firing.inputs["plan"].tensors
        (residual_TH,) = firing.inputs["residual"].tensors
        parts_added = self._located(firing, plan[1:] if self._strict else plan)
        if parts_added is None:  # rolled back meanwhile: the runner drops this output
            return {"y": firing.inputs["residual"]}
        if self._strict and (left_out := self._client.servers.omitted.parts.get(firing.tag)) is not None:
            parts_added.append((left_out.pair_P, residual_TH.new_zeros(len(left_out.pair_P), residual_TH.shape[1])))
        y_TH = combine_pairs(residual_TH, plan[0], parts_added) if self._strict else combine(residual_TH, parts_added)
        wide = torch.float32 if y_TH.dtype is torch.float16 else None
        if not math.isfinite(y_TH.sum(dtype=wide).item()):  # NaN and infinity carry into the sum
            self._client.note_not_finite(firing.tag, _numbers(firing), [response.tensors[0] for response in firing.inputs["parts"]])
        self._client.forget(firing.tag)
        return {"y": Payload((y_TH,))}

    def _located(self, firing: Firing, where: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """The responses, each with the rows or pairs that it has. `where`: those of the plan's parts. None: the tag was rolled back."""
        numbers = _numbers(firing)
        if numbers != list(range(len(where))):  # some parts were redispatched
            parts = self._client.parts(firing.tag, numbers)
            if parts is None:
                return None
            where = [part.pair_P if self._strict else part.rows_R for part in parts]
        return [(index, response.tensors[0]) for index, response in zip(where, firing.inputs["parts"], strict=True)]


def _numbers(firing: Firing) -> list[int]:
    """The ids of the parts whose responses a combine node got."""
    return [response.header_as(PartHeader).part for response in firing.inputs["parts"]]
