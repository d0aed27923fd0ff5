"""Sequences that wait for pages in a circle: which are found, and which waits end."""

from __future__ import annotations

import pytest

from flowrt.simulation.page_waits import EngineSequence, circular_waits

OFFERS = {name: ("p0", "i", number) for number, name in enumerate("abcd")}


def seq(worker: str, name: str, state: str, offered: bool = True, choice: int = 0) -> EngineSequence:
    return EngineSequence(worker, (name, 0), f"{name}/0/{choice}", state, OFFERS[name] if offered else None)


def test_the_choices_of_a_prompt_that_wait_for_each_other_are_found() -> None:
    sequences = [seq("p0", "a", "held", offered=False), seq("p0", "a", "waiting", offered=False, choice=1)]
    assert circular_waits(sequences) == ["p0: a/0/0 (held)", "p0: a/0/1 (waiting)"]
    assert circular_waits([*sequences, seq("p0", "b", "running")]) == [], "the pages of b are free when it ends"


def test_prompts_that_wait_for_each_others_pages_are_found() -> None:
    sequences = [seq("p0", name, state, offered=False, choice=choice) for name in "ab" for choice, state in enumerate(("held", "waiting"))]
    assert len(circular_waits(sequences)) == 4


def test_a_circle_over_a_prefill_worker_and_a_group_is_found() -> None:
    """a is held until the group has pages, which b has there until its prompt has pages in the prefill worker, which a has."""
    circle = [seq("p0", "a", "held"), seq("g0", "a", "waiting"), seq("g0", "b", "pulling"), seq("p0", "b", "waiting")]
    assert len(circular_waits(circle)) == 4
    behind = seq("p0", "c", "waiting", offered=False)
    assert circular_waits([*circle, behind])[-1] == "p0: c/0/0 (waiting)"


@pytest.mark.parametrize(
    "last",
    [
        seq("p0", "b", "running"),  # its prompt has all pages that it needs
        seq("p0", "b", "held"),
        seq("p0", "b", "waiting", offered=False),  # its offer has ended: the pull is refused
        seq("p0", "c", "running"),
    ],
)
def test_waits_that_end_are_not_found(last: EngineSequence) -> None:
    sequences = [seq("p0", "a", "held"), seq("g0", "a", "waiting"), seq("g0", "b", "pulling"), last]
    assert circular_waits(sequences) == []


@pytest.mark.parametrize("state", ["held", "waiting", "pulling", "running"])
def test_a_sequence_alone_waits_for_messages_only(state: str) -> None:
    assert circular_waits([seq("p0", "a", state)]) == []
