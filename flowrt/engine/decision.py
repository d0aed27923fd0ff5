"""The decisions of the engine as frozen data: emit a token, end a choice, start a step. Workers carry them out."""

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
    """Send this end of a choice to the gateway."""

    ended: Ended


@dataclass(frozen=True, slots=True)
class StartStep:
    """Run this batch, then call `step_done`, `fail_step` or `roll_back`.

    The steps of a micro-batch are numbered 0, 1, 2 ...; a rollback does not reset the numbers, so a late response to a step of an older
    epoch is never taken for one to a newer step. The step's tags carry (epoch, micro_batch, step).
    """

    epoch: int
    micro_batch: int
    step: int
    batch: Batch


Decision = Emit | End
