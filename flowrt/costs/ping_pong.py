"""The ping-pong pipeline: how many micro-batches hide the exchange, and how long a step takes (MegaScale-Infer section 4.1).

Symbols of the paper: T_a, T_e: seconds that attention and experts compute for one micro-batch in one layer; T_c: seconds of the exchange
in one direction; T_f = max(T_a, T_e); m: micro-batches; L: layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PingPong:
    """The times of one micro-batch in one layer, in seconds. Raises ValueError for a time that is not positive and finite, or a negative
    exchange."""

    attention_seconds: float
    experts_seconds: float
    exchange_seconds: float  # in one direction

    def __post_init__(self) -> None:
        times = self.attention_seconds, self.experts_seconds, self.exchange_seconds
        if not all(map(math.isfinite, times)) or min(times[:2]) <= 0 or times[2] < 0:
            raise ValueError(f"times must be finite and positive, the exchange at least 0; got {', '.join(map(str, times))}")

    @property
    def compute_seconds(self) -> float:
        """T_f: of the slower side."""
        return max(self.attention_seconds, self.experts_seconds)

    @property
    def round_seconds(self) -> float:
        """T_a + T_e + 2 T_c: one micro-batch through one layer."""
        return self.attention_seconds + self.experts_seconds + 2 * self.exchange_seconds

    def is_balanced(self, tolerance: float = 0.1) -> bool:
        """Equation 1: both sides compute for about the same time."""
        return abs(self.attention_seconds - self.experts_seconds) <= tolerance * self.compute_seconds

    def hides_exchange(self) -> bool:
        """Equation 2: the exchange of one micro-batch takes less time than computing."""
        return self.exchange_seconds < self.compute_seconds

    def fills_pipeline(self, micro_batches: int) -> bool:
        """Equation 3: the other micro-batches compute for as long as one takes through a layer."""
        return micro_batches * self.compute_seconds >= 2 * (self.compute_seconds + self.exchange_seconds)

    def smallest_micro_batches(self) -> int:
        """The smallest m of equation 3: 2 (1 + T_c / T_f), rounded up."""
        return math.ceil(2 * (1 + self.exchange_seconds / self.compute_seconds) - 1e-9)

    def iteration_bounds(self, micro_batches: int, num_layers: int) -> tuple[float, float]:
        """Equation 4: the least and the most seconds of one micro-batch through all layers, when the pipeline is filled."""
        work = micro_batches * self.compute_seconds
        return self.round_seconds + work * (num_layers - 1), work * num_layers

    def total_seconds(self, micro_batches: int, num_layers: int) -> float:
        """Equation 5: a step of all micro-batches that begin together, when the pipeline is filled."""
        return self.round_seconds + self.compute_seconds * (micro_batches * num_layers - 1)

    def step_seconds(self, micro_batches: int, num_layers: int) -> float:
        """The same for any number of micro-batches: (L - 1) P + (T_a + T_e + 2 T_c) + (m - 1) T_f with the period
        P = max(m T_f, T_a + T_e + 2 T_c), which equation 5 is when equation 3 holds."""
        return (num_layers - 1) * self.period_seconds(micro_batches) + self.round_seconds + (micro_batches - 1) * self.compute_seconds

    def period_seconds(self, micro_batches: int) -> float:
        """P: seconds per layer while the pipeline runs; without a barrier between steps, a step takes L of them."""
        return max(micro_batches * self.compute_seconds, self.round_seconds)
