"""Checks that no sequences wait for pages in a circle (I5), over the engines of all workers at one moment. Pure.

What a sequence waits for, by its state; docs/kv-transfer.md has the argument why these waits end:

    running     nothing: the oldest one of its worker always gets the pages that it needs
    waiting     pages: until a sequence that has pages of its worker goes on
    pulling     its prompt: until that has pages in the prefill worker
    held        in a prefill worker: until the group that pulls it has pages; before it is offered, for the other choices of its request

What waits for a message on its way, for a process that has died, or at the gateway, goes on: such a wait ends with an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSequence:
    """`attempt`: request and attempt. `state`: in lower case. `offer`: worker, incarnation and number of the offer that it pulls, or, in a
    prefill worker, under which its prompt can be pulled; None: there is none."""

    worker: str
    attempt: tuple[str, int]
    name: str
    state: str
    offer: tuple[str, str, int] | None = None


def circular_waits(sequences: Sequence[EngineSequence]) -> list[str]:
    """The sequences that wait only for each other, one line each."""
    awaited = {each: found for each in sequences if (found := _awaited(each, sequences))}
    stuck = set(awaited)
    while free := {each for each in stuck if not stuck.issuperset(awaited[each])}:
        stuck -= free
    return [f"{each.worker}: {each.name} ({each.state})" for each in sequences if each in stuck]


def _awaited(sequence: EngineSequence, sequences: Sequence[EngineSequence]) -> list[EngineSequence]:
    """The sequences of which one must go on before this one does."""
    here = [each for each in sequences if each.worker == sequence.worker and each is not sequence]
    match sequence:
        case EngineSequence(state="waiting"):
            return [each for each in here if each.state != "waiting"]
        case EngineSequence(state="held", offer=None):
            return [each for each in here if each.attempt == sequence.attempt]
        case EngineSequence(state="held" | "pulling"):
            return [each for each in sequences if each.offer == sequence.offer and each.state == "waiting"]
    return []
