"""What the launcher tells its owner about the run, for progress and for the end. Plain data; called by launcher.py, read by api and cli."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StarterReady:
    """The starter has imported what workers need. `num_threads` other than 1 means that an import started threads."""

    num_threads: int


@dataclass(frozen=True)
class WorkerStarted:
    """`name` has a process of its own, or shares `pid` with others."""

    name: str
    pid: int


@dataclass(frozen=True)
class WorkerLoading:
    """`done` of the worker's `total` operators have their weights; `text` names the one at work."""

    name: str
    text: str
    done: int
    total: int


@dataclass(frozen=True)
class WorkerListening:
    """Everything is loaded; `resident_bytes` is the worker's memory at this moment, `imported_bytes` before it loaded anything."""

    name: str
    resident_bytes: int
    imported_bytes: int = 0


@dataclass(frozen=True)
class WorkerConnected:
    """All links of the worker are up."""

    name: str


@dataclass(frozen=True)
class Ready:
    """All workers are connected; `seconds` since the launch began."""

    seconds: float


@dataclass(frozen=True)
class Straggler:
    """A worker did not stop when told to and was killed."""

    name: str
    seconds: float


@dataclass(frozen=True)
class RunFailed:
    """The run is over: `error` is what the owner gets from every later call (WorkerDiedError, UserError)."""

    error: Exception


Event = StarterReady | WorkerStarted | WorkerLoading | WorkerListening | WorkerConnected | Ready | Straggler | RunFailed
