"""Remembers the servers that returned NaN or infinity for finite rows, so that a client avoids them for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from flowrt.operators.dispatch import Part
from flowrt.transports.wire.message import Tag

AVOIDED_SECONDS = 2.0  # the sequence is computed again on other servers
log = logging.getLogger("flowrt.worker")


class NotFiniteParts:
    """`processes`: the names of the servers, by number. `now` returns the time in seconds.

    The compute thread calls `note`, the loop all other methods. Each call is one step on a dict, or works on entries that it has taken out.
    """

    def __init__(self, processes: Sequence[str], now: Callable[[], float]) -> None:
        self._processes, self._now = processes, now
        self._until: dict[int, float] = {}  # server -> until when others are preferred
        self._texts: dict[tuple[str, int, int, int], str] = {}  # by step

    @property
    def servers(self) -> frozenset[int]:
        """The servers to avoid now."""
        if not self._until:
            return frozenset()
        now = self._now()
        return frozenset(server for server, until in list(self._until.items()) if until > now)

    def note(self, tag: Tag, x_TH: Tensor, parts: Sequence[Part], responses: Sequence[Tensor]) -> None:
        """Avoid the servers of responses to these parts of `x_TH` that are not finite although their rows are. A strict response has a row
        per pair."""
        is_finite_T = x_TH.isfinite().all(dim=1)
        for part, y in zip(parts, responses, strict=True):
            rows = part.rows_R if len(y) == len(part.rows_R) else part.rows_R[part.row_P]
            if not y[is_finite_T[rows]].isfinite().all():
                text = f"{self._processes[part.server]} returned NaN or infinity in layer {tag.layer}"
                if self._now() >= self._until.get(part.server, 0.0):  # once, while it is avoided
                    log.error("%s, step %d; check the weights, or run in a wider dtype", text, tag.step)
                self._until[part.server] = self._now() + AVOIDED_SECONDS
                self._texts.setdefault((tag.source, tag.epoch, tag.micro_batch, tag.step), text)

    def take(self, step: Tag) -> str:
        """The first part of this step, which has ended, that was not finite, as text; "" for none."""
        return self._texts.pop((step.source, step.epoch, step.micro_batch, step.step), "")

    def forget(self, server: int) -> None:
        """Forget a server that is lost: its next incarnation is not avoided."""
        self._until.pop(server, None)

    def roll_back(self) -> None:
        """Forget the texts of all steps."""
        self._texts.clear()
