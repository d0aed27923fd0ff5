"""Completions built from events: which tokens are reported as degraded."""

from __future__ import annotations

from gateway.gateways import gateway_of
from group_tokens import group_tokens

from flowrt.actors.control import Ended
from flowrt.actors.outputs import TokenEvent
from flowrt.gateway.completion import Completion
from flowrt.gateway.decisions import SendRequest
from flowrt.sampling_params import SamplingParams


def answer(*degraded: bool) -> Completion:
    """To a request whose tokens are marked so."""
    gateway = gateway_of()
    (placed,) = gateway.place(gateway.reserve(SamplingParams(max_tokens=len(degraded))), (1, 2))
    assert isinstance(placed, SendRequest)
    request = placed.request
    for index, marked in enumerate(degraded):
        gateway.on_token("g", group_tokens(request.id, 0, index, (5,), degraded=marked))
    gateway.on_ended("g", Ended(request.id, 0, "length", num_tokens=len(degraded)))
    events = gateway.events(request.index)
    assert [event.degraded for event in events if isinstance(event, TokenEvent)] == list(degraded)
    return Completion.of((1, 2), events)


def test_a_completion_lists_its_degraded_tokens() -> None:
    completion = answer(False, True, True)
    assert completion.degraded
    assert completion.choices[0].degraded
    assert completion.choices[0].degraded_tokens == (1, 2)


def test_a_whole_completion_lists_none() -> None:
    completion = answer(False, False)
    assert not completion.degraded
    assert completion.choices[0].degraded_tokens == ()
