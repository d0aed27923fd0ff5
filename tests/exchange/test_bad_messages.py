"""Bad messages of an expert server at the runner of its client: each kind is refused and changes no sum."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from exchange.failover_client import WIDTH, Client, expected
from exchange.message_fuzz import Fuzz, schemas_of

from flowrt.actors.link import BadMessageError
from flowrt.dataflow.outbound_edges import CreditHeader
from flowrt.dataflow.parts import PartHeader
from flowrt.dataflow.payload import Payload, to_message
from flowrt.transports.wire.message import Message, Tag


def with_tag(**fields: object) -> Callable[[Message], Message]:
    return lambda message: msgspec.structs.replace(message, tag=msgspec.structs.replace(message.tag, **fields))


def with_fields(**fields: object) -> Callable[[Message], Message]:
    return lambda message: msgspec.structs.replace(message, **fields)


def with_tensors(*tensors: torch.Tensor) -> Callable[[Message], Message]:
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    return lambda message: to_message(Payload(tensors, message.header), message.edge, message.tag)


BAD: dict[str, tuple[Callable[[Message], Message], str]] = {
    "unknown edge": (with_fields(edge=1), "does not lead here"),
    "unknown kind": (with_fields(kind="advice"), "kind 'advice'"),
    "no tag": (with_fields(tag=None), "without a tag"),
    "older step": (with_tag(step=6), "no outstanding request"),
    "other layer": (with_tag(layer=5), "no outstanding request"),
    "unknown source": (with_tag(source="unknown@1"), "no outstanding request"),
    "other part": (with_fields(header=PartHeader(77)), "no outstanding request"),
    "no header": (with_fields(header=None), "cannot be read"),
    "other header": (with_fields(header=b"\x93\x01\x02\x03\xff"), "cannot be read"),
    "header of another type, not UTF-8": (with_fields(kind="failed", header=b"\x92\xa1\xff\x00"), "cannot be read"),
    "no tensor": (with_fields(tensors=()), "0 tensors, expected 1"),
    "too many rows": (with_tensors(torch.zeros(9, WIDTH)), "where rows is"),
    "wrong width": (with_tensors(torch.zeros(4, WIDTH + 1)), "expected float32"),
    "wrong dtype": (with_tensors(torch.zeros(4, WIDTH, dtype=torch.int64)), "expected float32"),
    "too many credits": (with_fields(kind="credit", header=CreditHeader(100)), "more than were outstanding"),
}


@pytest.mark.parametrize("kind", [*BAD, "double response", "another's edge"])
def test_bad_message_is_refused_and_the_sum_stays_exact(kind: str) -> None:
    client = Client(schemas=schemas_of)
    client.begin(7)
    response = client.response(1, client.requested[1][0])
    peer, bad, text = "experts.1", response, "no outstanding request"
    if kind == "double response":
        client.runner.accept("experts.1", response)
    elif kind == "another's edge":
        peer, text = "experts.2", "which leads here from experts.1"
    else:
        change, text = BAD[kind]
        bad = change(response)
        if kind == "too many credits":
            bad = msgspec.structs.replace(bad, edge=client.request_edge(1))
    with pytest.raises(BadMessageError, match=text):
        client.runner.accept(peer, bad)
    client.die(1)  # as when its link has ended
    client.finish((7,))


def test_response_to_a_left_epoch_is_accepted_after_the_death_of_another_server() -> None:
    client = Client(schemas=schemas_of)
    client.begin(7)
    response = client.response(1, client.requested[1].popleft())
    client.runner.roll_back("s@1", 1)
    client.client.roll_back("s@1", 1)
    client.die(2)
    client.runner.accept("experts.1", response)
    client.begin(7, epoch=1)
    client.finish((7,))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
def test_row_of_a_response_that_is_not_finite_goes_on_and_its_server_is_avoided(strict: bool, value: float) -> None:
    def spoil(y: torch.Tensor) -> torch.Tensor:
        y[-1, 2] = value
        return y

    client = Client(strict, schemas=schemas_of)
    client.begin(3)
    client.runner.accept("experts.1", client.response(1, client.requested[1].popleft(), spoil))
    client.serve_all()
    ((tag, sums),) = client.ends
    assert not client.failures
    assert sums.isfinite().all(dim=1).tolist().count(False) == 1
    step = Tag(tag.source, tag.epoch, tag.micro_batch, tag.step)
    assert client.client.take_not_finite(step) == "experts.1 returned NaN or infinity in layer 0"
    assert not client.client.take_not_finite(step)
    client.ends.clear()
    client.begin(4)
    assert not client.requested[1]
    client.finish((4,))


def test_server_whose_responses_are_not_finite_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(False, schemas=schemas_of)
    client.begin(3)
    client.begin(4)
    for request in (client.requested[1].popleft(), client.requested[1].popleft()):
        client.runner.accept("experts.1", client.response(1, request, lambda y: torch.full_like(y, torch.nan)))
    client.serve_all()
    assert len(client.ends) == 2
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["experts.1 returned NaN or infinity in layer 0"]


@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
def test_row_that_was_not_finite_before_goes_on_to_the_head(strict: bool) -> None:
    client = Client(strict, schemas=schemas_of)
    client.begin(3, value=torch.nan)
    client.serve_all()
    ((_, y),) = client.ends
    assert not client.failures
    assert torch.equal(y[:-1], expected()[:-1])
    assert y[-1, 0].isnan()


def test_more_requests_than_credits_are_refused() -> None:
    """At the server: a client sends more messages than its edge has credits."""
    client = Client(schemas=schemas_of)
    client.begin()
    request = client.requested[0][0]
    server = client.server(0)
    for step in range(2):
        server.accept("a", with_tag(step=step)(request))
    with pytest.raises(BadMessageError, match="more messages on"):
        server.accept("a", with_tag(step=2)(request))


@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
def test_mutated_messages_are_accepted_or_refused(strict: bool) -> None:
    fuzz = Fuzz(seed=1, strict=strict)
    while fuzz.num_executions < 2000:
        fuzz.step()
    assert 0 < fuzz.num_refused < fuzz.num_executions
