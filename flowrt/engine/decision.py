"""The decisions of the engine as frozen data: messages for the gateway, and the start of a step. Workers carry them out."""

from __future__ import annotations

from dataclasses import dataclass

from flowrt.actors.control import Ended, Token
from flowrt.engine.batch import Batch

Decision = Token | Ended  # to send to the gateway


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
