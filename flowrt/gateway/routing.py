"""Chooses the group of a request. It is pure: the gateway counts the loads and passes them in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The unfinished work that the gateway has sent to a group: waiting and running together."""

    num_sequences: int = 0  # choices of requests
    num_tokens: int = 0  # of the prompts, and the maximum of new tokens


def choose_group(loads: Mapping[str, GroupLoad], avoid: Collection[str] = ()) -> str | None:
    """The group with the fewest sequences, then the fewest tokens, then the first in the mapping's order. None: there is none.

    Sequences before tokens: while decoding, a sequence costs a row of every step whatever its length is.
    """
    names = [name for name in loads if name not in avoid]
    return min(names, key=lambda name: (loads[name].num_sequences, loads[name].num_tokens), default=None)
