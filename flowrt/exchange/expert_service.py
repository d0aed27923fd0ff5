"""The expert service: a pure function of layer and rows, for any client.

ExpertService is the function of an `experts` node. The products are in operators/experts.py; the runner routes each response to its
client.

The service keeps no state between calls (EaaS section 3.1). Which waiting requests it receives together is the node's selection
policy (flowrt/dataflow/selection.py): from any client (section 3.3: "a sufficient number", not all). A call has those of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.errors import OperatorError
from flowrt.operators.experts import Experts


class ExpertService:
    """Port in: `rows` (x_RH, row_P, expert_P, weight_P; header: part id). Out: `results` (y_RH, the weighted sums; same header).

    With strict numerics the results are y_PH, one row per pair without its weight, so that they do not depend on the sums taken here.

    Memory is bounded before it is allocated: a call computes at most `max_pairs` pairs, unless one request alone has more. A request
    of more than `max_part_pairs` raises ValueError.
    """

    def __init__(self, experts: Experts, strict: bool = False, max_pairs: int = 1 << 20, max_part_pairs: int = 1 << 20) -> None:
        self._experts, self._strict = experts, strict
        self._max_pairs, self._max_part_pairs = max_pairs, max_part_pairs

    def __call__(self, firings: Sequence[Firing]) -> list[dict[str, Payload]]:
        layer, responses = firings[0].tag.layer, list[dict[str, Payload]]()
        for requests in self._batches([firing.inputs["rows"] for firing in firings]):
            for request, y_RH in zip(requests, self._compute(layer, requests), strict=True):
                responses.append({"results": Payload((y_RH,), request.header_as(PartHeader))})
        return responses

    def num_pairs(self) -> dict[int, dict[int, int]]:
        """layer -> expert -> the pairs that were computed since the start."""
        return self._experts.num_pairs()

    def _batches(self, requests: Sequence[Payload]) -> Iterator[list[Payload]]:
        """`requests`, in order, cut so that those of each batch have at most `max_pairs` pairs together."""
        batch: list[Payload] = []
        batch_pairs = 0
        for request in requests:
            num_pairs = len(request.tensors[1])
            if num_pairs > self._max_part_pairs:
                raise ValueError(f"a part has {num_pairs} pairs; a step of this graph has at most {self._max_part_pairs}")
            if batch and batch_pairs + num_pairs > self._max_pairs:
                yield batch
                batch, batch_pairs = [], 0
            batch.append(request)
            batch_pairs += num_pairs
        yield batch

    def _compute(self, layer: int, requests: Sequence[Payload]) -> Sequence[torch.Tensor]:
        if len(requests) == 1:
            return [self._run(layer, *requests[0].tensors)]
        sizes = [request.tensors[0].shape[0] for request in requests]
        offset, row_parts = 0, []
        for request, size in zip(requests, sizes, strict=True):
            row_parts.append(request.tensors[1] + offset)
            offset += size
        x_RH, expert_P, weight_P = (torch.cat([request.tensors[place] for request in requests]) for place in (0, 2, 3))
        y = self._run(layer, x_RH, torch.cat(row_parts), expert_P, weight_P)
        return list(torch.split(y, [len(rows) for rows in row_parts] if self._strict else sizes))

    def _run(self, layer: int, x_RH: torch.Tensor, row_P: torch.Tensor, expert_P: torch.Tensor, weight_P: torch.Tensor) -> torch.Tensor:
        if self._strict:
            y = self._experts.forward_pairs(layer, x_RH, row_P, expert_P)
        else:
            y = self._experts.forward(layer, x_RH, row_P, expert_P, weight_P)
        expected = len(row_P if self._strict else x_RH), x_RH.shape[1]
        if y.shape != expected or y.dtype != x_RH.dtype:  # the client would close the link
            raise OperatorError(f"the experts gave {y.dtype}{[*y.shape]}, expected {x_RH.dtype}{[*expected]}")
        return y
