"""Unavailable experts that are left out (degraded mode): which ones, and which pairs were left out of each tag. Pure but for tensors.

Each client of the expert servers has one OmittedExperts. `reliability.unavailable_expert: degrade` enables it, and
flowrt/workers/membership.py decides when.

A pair (row, slot) of such an expert is left out of its layer's sum. The other pairs of the row keep the weights of the gate: they are
not renormalised, so that a row without lost experts is bit-identical. Experts are given up layer by layer, and return with their first
replica.

The compute thread calls `leave_out` and `forget`; the loop makes all other calls. Each is one step on a dict or a set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from flowrt.operators.dispatch import Part
from flowrt.operators.replica_table import UNAVAILABLE
from flowrt.transports.wire.message import Tag

Layer = int | None  # None: all of them are alike


class OmittedExperts:
    """Unavailable experts of one client. `now` returns the time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since: dict[tuple[Layer, int], float] = {}  # (layer, expert) -> since when it has had no replica
        self._omitted: dict[Layer, list[int]] = {}
        self.parts: dict[Tag, Part] = {}  # what was left out of tags that are not whole yet
        self._steps: set[Tag] = set()  # that are not over, of layer 0: something was left out of them

    def update(self, lost: Mapping[Layer, frozenset[int]]) -> None:
        """Set the experts without a replica, by layer."""
        now = self._now()
        self._since = {(layer, expert): self._since.get((layer, expert), now) for layer, experts in lost.items() for expert in experts}
        kept = {layer: [expert for expert in experts if (layer, expert) in self._since] for layer, experts in self._omitted.items()}
        self._omitted = {layer: experts for layer, experts in kept.items() if experts}

    @property
    def unavailable_seconds(self) -> float:
        """For how long some expert has had no replica."""
        return self._now() - min(self._since.values(), default=self._now())

    def omit_unavailable(self, after_seconds: float) -> bool:
        """Leave out experts that have had no replica for `after_seconds`. True when there are new ones."""
        if not self._since:
            return False
        latest = self._now() - after_seconds
        omitted: dict[Layer, list[int]] = {}
        for (layer, expert), since in sorted(self._since.items(), key=lambda item: item[0][1]):
            if since <= latest:
                omitted.setdefault(layer, []).append(expert)
        is_new = omitted != self._omitted
        self._omitted = omitted
        return is_new

    def postpone(self) -> None:
        """Count the time without a replica from now on, except of experts that are left out already."""
        now = self._now()
        self._since = {
            (layer, expert): since if expert in self._omitted.get(layer, ()) else now for (layer, expert), since in self._since.items()
        }

    @property
    def has_omitted(self) -> bool:
        return bool(self._omitted)

    def leave_out(self, tag: Tag, parts: Sequence[Part]) -> list[Part]:
        """Remove the pairs of given-up experts from the parts of a tag, and record them in `self.parts`."""
        omitted = self._omitted
        experts = omitted.get(tag.layer) or omitted.get(None)
        if not experts:
            return list(parts)
        kept: list[Part] = []
        for part in parts:
            if part.server != UNAVAILABLE:
                kept.append(part)
                continue
            is_given_up_P = torch.isin(part.expert_P, torch.tensor(experts, device=part.expert_P.device))
            if is_given_up_P.any():
                self.parts[tag] = _select(part, is_given_up_P)
                self._steps.add(_step_of(tag))
            if not is_given_up_P.all():
                kept.append(_select(part, ~is_given_up_P))
        return kept

    def take_degraded(self, step: Tag) -> bool:
        """Whether something was left out of this step, which has ended."""
        if step not in self._steps:
            return False
        self._steps.discard(step)
        return True

    def forget(self, tag: Tag) -> None:
        """Delete the record of a finished tag."""
        self.parts.pop(tag, None)

    def roll_back(self, source: str, epoch: int) -> None:
        """Delete the records of tags older than `epoch`."""
        for tag in list(self.parts):
            if tag.source == source and tag.epoch < epoch:
                self.parts.pop(tag, None)
        for step in list(self._steps):
            if step.source == source and step.epoch < epoch:
                self._steps.discard(step)


def _step_of(tag: Tag) -> Tag:
    return Tag(tag.source, tag.epoch, tag.micro_batch, tag.step)


def _select(part: Part, chosen_P: torch.Tensor) -> Part:
    """Selects those pairs of a part."""
    rows_R, row_P = torch.unique(part.rows_R[part.row_P[chosen_P]], return_inverse=True)
    return Part(part.server, rows_R, row_P, part.expert_P[chosen_P], part.weight_P[chosen_P], part.pair_P[chosen_P])
