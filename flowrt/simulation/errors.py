"""How a simulated run can fail beyond what its own code raises. Raised by the loop, read by tests and by the command line."""

from __future__ import annotations


class SimulationError(Exception):
    """Root of what the virtual loop raises."""


class DeadlockError(SimulationError):
    """Nothing is ready, no timer is set, and the main task is not done. The text lists who waits where."""


class LivelockError(SimulationError):
    """Too many steps at one instant, too many in all, or no end within the virtual seconds allowed."""


class UnhandledError(SimulationError):
    """A callback raised, or a task's exception was never looked at: on a real loop a line in a log, here the end of the run."""


class ForeignThreadError(SimulationError):
    """Another thread tried to reach the loop: its timing is not the seed's."""


class InvariantError(SimulationError):
    """Something does not hold that must, whatever happened. `invariant` is its number, I1 to I8 (docs/simulation.md)."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
