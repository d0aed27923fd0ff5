"""Events of a run that the launcher reports to its owner, and `news`, which describes the important ones in one line."""

from __future__ import annotations

from dataclasses import dataclass

from flowrt.actors.control import ExpertsUnavailable
from flowrt.graph.model import Graph
from flowrt.observe import print_line


class Event:
    """What the launcher reports; each kind is a subclass."""


@dataclass(frozen=True)
class ModelNotice(Event):
    """A line on the files of the model at the start. `is_warning`: they contradict each other, or cannot be used as they are."""

    text: str
    is_warning: bool = True


@dataclass(frozen=True)
class ForkServerReady(Event):
    """The fork server has imported what workers need. `num_threads` other than 1 means that an import started threads."""

    num_threads: int


@dataclass(frozen=True)
class ForkServerLost(Event):
    """The fork server has ended, or a new one could not start. Workers run on; restarts wait for the next one, which starts in
    `retry_seconds`. None: the run has no fork server any more. `how` continues a sentence: "was killed by SIGKILL"."""

    how: str
    retry_seconds: float | None = 0.0


@dataclass(frozen=True)
class ForkServerRestarted(Event):
    """A new fork server serves, `seconds` after the loss of the former one."""

    seconds: float


@dataclass(frozen=True)
class WorkerStarted(Event):
    """Worker `name` was started in process `pid`, which it may share with others; 0 on another host."""

    name: str
    pid: int


@dataclass(frozen=True)
class WorkerLoading(Event):
    """`done` of the worker's `total` operators have loaded their weights; `text` names the one that is loading. `num_bytes`: of the weights
    that the worker has read."""

    name: str
    text: str
    done: int
    total: int
    num_bytes: int = 0


@dataclass(frozen=True)
class WeightsLoading(Event):
    """All processes together have loaded `num_bytes` of their `total_bytes` of weights, in the `seconds` since the first one began.
    load_record.py makes it, when a start takes seconds."""

    num_bytes: int
    total_bytes: int
    seconds: float


@dataclass(frozen=True)
class WorkerListening(Event):
    """The worker has loaded everything. `resident_bytes`: its memory now; `imported_bytes`: its memory before it loaded anything."""

    name: str
    resident_bytes: int
    imported_bytes: int = 0


@dataclass(frozen=True)
class WorkerConnected(Event):
    """All links of the worker are up."""

    name: str


@dataclass(frozen=True)
class Ready(Event):
    """All workers are connected, `seconds` after the launch began."""

    seconds: float


@dataclass(frozen=True)
class GraphVersion(Event):
    """The graph of the run has another version. `joining` are new workers, which are not up yet; `leaving` get nothing new; those that are
    in neither graph nor `leaving` any more are gone."""

    graph: Graph
    joining: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerJoined(Event):
    """Worker `name`, which the graph has got while it runs, is connected."""

    name: str
    pid: int


@dataclass(frozen=True)
class ChangeEnded(Event):
    """A change of the graph has ended, or (`error`) was undone."""

    error: Exception | None = None


@dataclass(frozen=True)
class WorkerLost(Event):
    """Worker `name` has died and the run goes on; no more of its messages are accepted. `how` continues a sentence: "was killed by
    SIGKILL". `while_loading`: the run has not loaded yet. `may_recur`: it crashed or hung, and what it computed may be the reason.
    `is_restarting`: `recovery: restart_role` or `restart_all` restarts it, and requests wait for it until it is given up. `ends_groups`: it
    is an expert server, or was in a process with one, and the policy restarts groups with it. `process`: the workers of its process, if it
    had several, in the order in which their losses are announced."""

    name: str
    how: str
    while_loading: bool = False
    may_recur: bool = False
    is_restarting: bool = False
    ends_groups: bool = False
    process: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerRestarted(Event):
    """A new incarnation of `name` is connected, `seconds` after the death was detected."""

    name: str
    pid: int
    seconds: float


@dataclass(frozen=True)
class WorkerGivenUp(Event):
    """Worker `name` stays down for `retry_seconds`, or, if that is None, until the fork server responds or for the rest of the run. `why`
    is a clause such as "it was started again 3 times in 30 s; the next try is in 30 s"."""

    name: str
    why: str
    retry_seconds: float | None = None


@dataclass(frozen=True)
class WorkerSuspected(Event):
    """The monitor suspects `name`, because it misses heartbeats or progress. The launcher takes no action."""

    name: str
    why: str


@dataclass(frozen=True)
class WorkerCleared(Event):
    """The monitor clears `name`, which was suspected or marked dead."""

    name: str
    why: str


@dataclass(frozen=True)
class WorkerMarkedDead(Event):
    """The monitor marks `name` dead. A worker that the run can lose is killed (`is_killed`). Otherwise, if it is a group, its requests move
    to other groups until it is cleared. `may_recur`: it hangs, and what it computes may be the reason."""

    name: str
    why: str
    is_killed: bool = True
    may_recur: bool = False


@dataclass(frozen=True)
class ExpertsReported(Event):
    """Group `name` reports which experts it reaches no replica of."""

    name: str
    report: ExpertsUnavailable


@dataclass(frozen=True)
class Straggler(Event):
    """Worker `name` did not end within `seconds` after Stop and is killed."""

    name: str
    seconds: float


@dataclass(frozen=True)
class RunFailed(Event):
    """The run has failed. Every later call of the launcher raises `error`, usually a WorkerDiedError or UserError."""

    error: Exception


def news(event: Event) -> str | None:
    """One line about the files of the model, or about an event that changes which workers or experts of a continuing run are usable; None
    for all other events."""
    match event:
        case ModelNotice(text, is_warning=True):
            return f"warning: {text}"
        case ForkServerLost(how, None):
            return f"the fork server {how}; workers run on, and no process is started again"
        case ForkServerLost(how, retry_seconds):
            when = f"; the next try is in {retry_seconds:g} s" if retry_seconds else ""
            return f"the fork server {how}; workers run on, and restarts wait for a new one{when}"
        case ForkServerRestarted(seconds):
            return f"the fork server is back after {seconds:.2f} s"
        case WorkerLost(name, how, while_loading):
            return f"{name} {how} while it loaded; it is loaded again" if while_loading else f"{name} {how}; the run goes on without it"
        case WorkerRestarted(name, pid, seconds):
            return f"{name} is back after {seconds:.2f} s" + (f", pid {pid}" if pid else "")
        case WorkerGivenUp(name, why):
            return f"{name} stays down: {why}"
        case WorkerMarkedDead(name, why, is_killed) if not is_killed:
            return f"{name} is marked dead ({why}); its requests move, and it gets no new ones until it works again"
        case ExpertsReported(name, ExpertsUnavailable(text, "degrade")) if text:
            return f"{name}: {text}; it goes on without, and marks what it answers as degraded"
    return None


def print_news(event: Event) -> None:
    """Write the news of an event to stderr: the default event handler."""
    text = news(event)
    if text is not None:
        print_line(f"flowrt: {text}")
