"""What the engine decides: tell a token, tell an end, start a step. Frozen data; no behaviour.

Not here: how it decides (engine.py), who carries it out (flowrt/workers: sends Token and Ended, runs the batch).
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrt.actors.control import Ended, Token
from flowrt.engine.batch import Batch


@dataclass(frozen=True, slots=True)
class Emit:
    """Send this token to the gateway."""

    token: Token


@dataclass(frozen=True, slots=True)
class End:
    """Send this end to the gateway: the one of its (request, attempt)."""

    ended: Ended


@dataclass(frozen=True, slots=True)
class StartStep:
    """Run this batch in this lane, then call `step_done` or `roll_back`.

    A lane's steps are numbered 0, 1, 2 ...; the numbers go on through a roll-back, so a late answer to a step of an older epoch
    is never taken for a newer one's. (epoch, lane, step) is the epoch, micro_batch and step of the step's tags.
    """

    epoch: int
    lane: int
    step: int
    batch: Batch


Decision = Emit | End
