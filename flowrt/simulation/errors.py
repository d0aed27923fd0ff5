"""Errors of a simulated run beyond those that its own code raises: deadlock, livelock, unhandled errors, violated invariants."""

from __future__ import annotations


class SimulationError(Exception):
    """Base of all errors of a simulated run. `kind` names the error in reports."""

    kind = "simulation"


class DeadlockError(SimulationError):
    """No handle is ready, no timer is set, and the main task is not done. The text lists where each task waits."""

    kind = "deadlock"


class LivelockError(SimulationError):
    """Too many steps at one instant, or no end within the allowed virtual seconds."""

    kind = "livelock"


class UnhandledError(SimulationError):
    """A callback raised, or the exception of a task was never retrieved. A real loop logs this; here it ends the run."""

    kind = "unhandled"


class ForeignThreadError(SimulationError):
    """Another thread called into the loop. The seed does not determine the timing of threads."""

    kind = "foreign thread"


class InvariantError(SimulationError):
    """An invariant is violated. `kind` is its number, I1 to I10 (docs/simulation.md)."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.kind = invariant
