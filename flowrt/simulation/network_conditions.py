"""Defines the network conditions of a simulation: random delays of the whole network, and the effects of faults on single links."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field


def draw_below(chance: random.Random, limit: int) -> int:
    """As `chance.randrange(limit)`, in a third of its time."""
    num_bits, draw_bits = limit.bit_length(), chance.getrandbits
    while (drawn := draw_bits(num_bits)) >= limit:
        pass
    return drawn


def is_hit(chance: random.Random, one_in: int) -> bool:
    """True once in `one_in` draws; never for 0."""
    return one_in > 0 and draw_below(chance, one_in) == 0


@dataclass(frozen=True)
class NetworkConditions:
    """How the network behaves. Times in seconds; `one_in` counts frames (or channels), 0 means never."""

    min_delay_seconds: float = 20e-6
    max_delay_seconds: float = 400e-6
    slow_one_in: int = 50  # frames that take `slow_seconds` on top
    slow_seconds: float = 20e-3
    duplicate_one_in: int = 40
    bytes_per_second: float = 10e9
    tick_seconds: float = 0.0  # what happens falls on multiples of this: 0, hardly ever two things at one instant
    tiny_one_in: int = 0  # channels that hold a single message, whatever their limits allow


CALM = NetworkConditions(max_delay_seconds=50e-6, slow_one_in=0, duplicate_one_in=0)


@dataclass
class LinkState:
    """The faults on one direction between two nodes. Faults may overlap, hence counts and lists; the largest slow factor applies.

    Frames sent during a cut wait at the sender, as in a socket buffer, and leave in order when the link heals: a channel never loses
    bytes silently. Each fault must remove what it added.
    """

    num_cuts: int = 0
    slow_factors: list[float] = field(default_factory=list)
    duplicate_one_in: list[int] = field(default_factory=list)
    held: list[Callable[[], None]] = field(default_factory=list)  # sends to be made when it heals, oldest first

    @property
    def slowness(self) -> float:
        """Every delay is multiplied by this."""
        return max(self.slow_factors, default=1.0)

    def heal(self) -> None:
        """End one cut. The end of the last cut releases the held frames."""
        self.num_cuts -= 1
        if not self.num_cuts:
            held, self.held = self.held, []
            for send in held:
                send()
