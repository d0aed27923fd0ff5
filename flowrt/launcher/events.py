"""What the launcher tells its owner about the run, for progress, for deaths and for the end. Plain data, made by launcher.py and its files.

Here: the events, and `news`, which says those in words that people should see whatever else they look at. Not here: progress in words
(the cli's views).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class ForkServerReady:
    """The fork server has imported what workers need. `num_threads` other than 1 means that an import started threads."""

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
class WorkerLost:
    """`name`, which may die, has died: `how` is said as in "experts.1 was killed by SIGKILL". The run goes on."""

    name: str
    how: str


@dataclass(frozen=True)
class WorkerDiedLoading:
    """`name`, which may die, has died while the run started: `how` is said as in WorkerLost. It is loaded again, within its budget."""

    name: str
    how: str


@dataclass(frozen=True)
class WorkerRestarted:
    """`name` lives again and is linked up, `seconds` after its death was noticed."""

    name: str
    pid: int
    seconds: float


@dataclass(frozen=True)
class WorkerGivenUp:
    """`name` stays down, until the next try or for the rest of the run: `why` is said as in "it was started again 3 times in 30 s; the
    next try is in 30 s"."""

    name: str
    why: str


@dataclass(frozen=True)
class WorkerSuspected:
    """The monitor misses signs of work from `name`. Nothing follows from it."""

    name: str
    why: str


@dataclass(frozen=True)
class WorkerCleared:
    """`name`, which was suspected or marked dead, works again."""

    name: str
    why: str


@dataclass(frozen=True)
class WorkerMarkedDead:
    """The monitor marks `name` dead. It is killed if it may die, and so lost; if not, the gateway fences it, if it is a group, until it is
    cleared."""

    name: str
    why: str
    is_killed: bool = True


@dataclass(frozen=True)
class ExpertsLost:
    """`name`, a group, can ask no copy of some experts: `text` says which, "" when it can again. `follows`: what becomes of requests that
    need them: "wait", "error", or "degrade"."""

    name: str
    text: str
    follows: str


@dataclass(frozen=True)
class Straggler:
    """A worker did not stop when told to and was killed."""

    name: str
    seconds: float


@dataclass(frozen=True)
class RunFailed:
    """The run is over: `error` is what the owner gets from every later call (WorkerDiedError, UserError)."""

    error: Exception


Event = (
    ForkServerReady
    | WorkerStarted
    | WorkerLoading
    | WorkerListening
    | WorkerConnected
    | Ready
    | WorkerLost
    | WorkerDiedLoading
    | WorkerRestarted
    | WorkerGivenUp
    | WorkerSuspected
    | WorkerCleared
    | WorkerMarkedDead
    | ExpertsLost
    | Straggler
    | RunFailed
)


def news(event: Event) -> str | None:
    """What happened to a worker of a run that goes on, in one line; None for all other events."""
    match event:
        case WorkerLost(name, how):
            return f"{name} {how}; the run goes on without it"
        case WorkerDiedLoading(name, how):
            return f"{name} {how} while it loaded; it is loaded again"
        case WorkerRestarted(name, pid, seconds):
            return f"{name} is back after {seconds:.2f} s, pid {pid}"
        case WorkerGivenUp(name, why):
            return f"{name} stays down: {why}"
        case WorkerMarkedDead(name, why, is_killed) if not is_killed:
            return f"{name} is marked dead ({why}); its requests end with an error, and it gets no new ones until it works again"
        case ExpertsLost(name, text, "degrade") if text:
            return f"{name}: {text}; it goes on without, and marks what it answers as degraded"
    return None


def tell(event: Event) -> None:
    """Write the news to stderr: what is done with events that nobody asked for."""
    text = news(event)
    if text is not None:
        print(f"flowrt: {text}", file=sys.stderr, flush=True)
