"""The expert service: which requests it computes in one call, and that memory is bounded before it is taken."""

import pytest
import torch

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload
from flowrt.errors import OperatorError
from flowrt.exchange.expert_service import ExpertService
from flowrt.transports.wire.message import Tag


class Doubling:
    """Experts that note how many pairs each call has."""

    def __init__(self):
        self.calls = []

    def forward(self, layer, x_RH, row_P, expert_P, weight_P):
        self.calls.append((layer, len(row_P)))
        return 2 * x_RH

    def forward_pairs(self, layer, x_RH, row_P, expert_P):
        self.calls.append((layer, len(row_P)))
        return 2 * x_RH[row_P]


def request(number, num_pairs):
    x_RH = torch.full((num_pairs, 2), float(number))
    pairs = torch.arange(num_pairs)
    rows = Payload((x_RH, pairs, torch.zeros_like(pairs), torch.ones(num_pairs)), PartHeader(number))
    return Firing("experts.0", Tag("s@1"), {"rows": rows})


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_takes_as_many_pairs_as_its_memory_allows(strict):
    experts = Doubling()
    firings = [request(number, num_pairs) for number, num_pairs in enumerate((4, 4, 3, 9, 1))]
    responses = ExpertService(experts, strict, max_pairs=8, max_part_pairs=9)(firings)
    assert experts.calls == [(0, 8), (0, 3), (0, 9), (0, 1)]
    for number, (firing, response) in enumerate(zip(firings, responses, strict=True)):
        assert response["results"].header == PartHeader(number)
        assert torch.equal(response["results"].tensors[0], 2 * firing.inputs["rows"].tensors[0])


def test_a_part_larger_than_a_step_is_refused_before_anything_is_computed():
    experts = Doubling()
    with pytest.raises(ValueError, match="a part has 10 pairs; a step of this graph has at most 9"):
        ExpertService(experts, max_part_pairs=9)([request(0, 10)])
    assert experts.calls == []


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("wrong", [lambda y: y[1:], lambda y: y[:, 1:], lambda y: y.double()], ids=["rows", "width", "dtype"])
def test_a_result_of_a_wrong_shape_fails_its_part_and_not_the_link(strict, wrong):
    experts = Doubling()
    name = "forward_pairs" if strict else "forward"
    right = getattr(experts, name)
    setattr(experts, name, lambda *arguments: wrong(right(*arguments)))
    with pytest.raises(OperatorError, match=r"the experts gave torch.float\d\d\[\d, \d\], expected torch.float32\[3, 2\]"):
        ExpertService(experts, strict)([request(0, 3)])
