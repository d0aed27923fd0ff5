"""What the engine of a prefill worker lets its KV transfers know of a prompt.

The engine imports no transfer, and a transfer nothing else of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_STEP = (-1, -1, -1)
NO_STATE = -1  # in place of a slot


@dataclass(frozen=True, slots=True)
class OfferedPrompt:
    """A prompt whose KV groups may pull from `pages`, and how much of it is computed.

    No roll back computes the first `num_committed` tokens again. Those up to `num_in_step` are computed by the running step (epoch,
    micro_batch, step), if there is one. `is_complete`: all are committed, and each choice has its first token. `slot`: then, the slot with
    the state of recurrent layers behind them, if the model has such layers.
    """

    request_id: str
    attempt: int
    pages: tuple[int, ...]
    num_tokens: int
    epoch: int
    num_committed: int
    num_in_step: int
    step: tuple[int, int, int] = NO_STEP
    is_complete: bool = False
    slot: int = NO_STATE
