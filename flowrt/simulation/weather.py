"""What frames meet on their way: delays drawn from a seed, and what faults do to single links.

Here: NetworkConditions (how the whole network behaves), LinkState (what a fault did to one direction between two nodes). Not here:
channels and frames (transport.py), when a fault begins and ends (faults.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


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
    """One direction between two nodes while faults lie on it. Faults may overlap, hence counts and lists; the slowest of them counts.

    Frames sent while it is cut wait at the sender, as in a socket's buffer, and go in order when it heals: bytes of a channel are
    never silently lost. What a fault adds it must take away again.
    """

    num_cuts: int = 0
    slow_factors: list[float] = field(default_factory=list)
    duplicate_one_in: list[int] = field(default_factory=list)
    held: list[Callable[[], None]] = field(default_factory=list)  # sends to be made when it heals, oldest first

    @property
    def calm(self) -> bool:
        return not self.num_cuts and not self.slow_factors and not self.duplicate_one_in and not self.held

    @property
    def slowness(self) -> float:
        """Every delay is multiplied by this."""
        return max(self.slow_factors, default=1.0)

    def heal(self) -> None:
        """One cut less; with the last one, what was held goes."""
        self.num_cuts -= 1
        if not self.num_cuts:
            held, self.held = self.held, []
            for send in held:
                send()
