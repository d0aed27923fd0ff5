"""The actions of the run state (run_state.py): what the launcher carries out after an event."""

from __future__ import annotations

from dataclasses import dataclass

from flowrt.actors.control import Control
from flowrt.launcher.events import Event
from flowrt.transports.contract import Identity


@dataclass(frozen=True)
class StartProcess:
    """Start the process with these workers; `on_forked` or `on_fork_failed` follows. `standby`: the process that becomes this one."""

    process: str
    workers: tuple[Identity, ...]
    standby: str = ""


@dataclass(frozen=True)
class EndProcess:
    """Send SIGKILL to the process, or SIGTERM if it is to `end_gently`."""

    process: str
    end_gently: bool = False


@dataclass(frozen=True)
class ReleaseProcess:
    """Release what is kept of a process that has ended and left the graph."""

    process: str


@dataclass(frozen=True)
class StartForkServer:
    """Start a new fork server; `Starts.on_fork_server_ready` or `on_fork_server_failed` follows."""


@dataclass(frozen=True)
class KillForkServer:
    """Kill the fork server; `Deaths.on_fork_server_lost` follows."""


@dataclass(frozen=True)
class SendStart:
    """Send Start to this incarnation of a worker. `loads`: what a standby process loads. `loaded_as`: what one that becomes this worker has
    loaded."""

    worker: str
    incarnation: str
    loads: tuple[str, ...] = ()
    loaded_as: str = ""


@dataclass(frozen=True)
class Send:
    """Send the message to the worker. A message to a worker whose connection has ended is dropped.

    With a `deadline` it is sent until then; `on_stop_sent` follows unless the worker has ended.
    """

    worker: str
    control: Control
    deadline: float | None = None


@dataclass(frozen=True)
class Announce:
    event: Event


@dataclass(frozen=True)
class End:
    """End the run: in order, or by `error`. `tail_of`: the process whose output tail belongs to the error."""

    error: Exception | None = None
    tail_of: str | None = None


Action = StartProcess | EndProcess | ReleaseProcess | StartForkServer | KillForkServer | SendStart | Send | Announce | End
