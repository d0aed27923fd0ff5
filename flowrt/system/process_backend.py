"""The interface between the launcher and process backends, which start and end worker processes.

Backends: `local` (flowrt/processes/fork_server_client.py, processes of this host), `simulated` (flowrt/simulation/processes.py), and
several hosts (flowrt/hosts/backend.py), which are provided by an engine such as Ray (flowrt/system/host_engine.py). The checks in
tests/processes/backend_checks.py run against every backend.

A backend is opened once per run, then starts any number of processes, concurrently too, until `aclose` or `kill_all`. It reports deaths,
its own included; it neither restarts a process or itself, nor decides what a death means. Its processes live as long as the launcher does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flowrt.system.clock_offset import ClockOffset
from flowrt.transports.contract import Channel, Identity, Limits

# A Submit of the longest prompt that the gateway accepts (2^20 ids of up to 9 bytes) fits into a header of 16 MiB. The window counts
# messages, not bytes: 32 messages bound the data queued on one connection to 512 MiB; with prompts of 1000 ids it is about 160 KiB.
CONTROL_LIMITS = Limits(max_header_bytes=1 << 24, max_tensors=0, max_message_bytes=0, capacity_messages=32)


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start. It calls `entry` ("module:function", a WorkerMain) once per worker, all in one event loop.

    The first worker that fails ends the process with all others. `threads`: compute threads that the workers share. `weights`: the weight
    sets that the workers use. A backend may pass all processes of one set the same memory file. `descriptors` of the calling process: the
    new one gets copies of them, by name, as of the memory files (Seams.descriptors).
    """

    name: str
    workers: tuple[Identity, ...]
    entry: str
    threads: int = 1
    log_level: str = "warning"
    weights: tuple[str, ...] = ()
    descriptors: Mapping[str, int] = field(default_factory=dict)


class WorkerProcess(Protocol):
    """One incarnation of a process. `pid` is 0 when the process is not on this host.

    `controls`: the launcher's end of each worker's control connection, in the order of `spec.workers`, within CONTROL_LIMITS. The caller
    owns and closes them. A connection ends when the process dies, at the latest with the first notice of it; what the process had sent can
    still be received.
    """

    @property
    def spec(self) -> ProcessSpec: ...
    @property
    def pid(self) -> int: ...
    @property
    def controls(self) -> tuple[Channel, ...]: ...
    @property
    def model_path(self) -> str:
        """Where its host has the files of the graph's model; "": where the graph says."""
        ...

    @property
    def clock_offset(self) -> ClockOffset:
        """Of the machine clock of its host (Seams.machine_now), compared with the caller's."""
        ...

    def kill(self) -> None:
        """End the process as SIGKILL does. Does not wait, and works even when the backend does not respond. No-op after its end."""
        ...

    async def terminate(self) -> None:
        """Ask the process to end as SIGTERM does. No-op after its end, and when the backend is lost."""
        ...

    def output_tail(self) -> tuple[str, ...]:
        """The last lines that the process wrote, oldest first, including what it wrote just before its end."""
        ...


class BackendOwner(Protocol):
    """Receives the notices of a backend, in the loop that opened it. The methods must not wait.

    A notice names its process by the object that `start` returned. Notices of one process come in this order, on_dying perhaps never or
    more than once; no notice comes before `start` has returned the process.
    """

    def on_dying(self, process: WorkerProcess, how: str) -> None:
        """The process has begun to die. Comes within milliseconds where the system reports it. `how`: as in `on_exited`; "" where the
        system does not report it yet."""

    def on_exited(self, process: WorkerProcess, how: str) -> None:
        """The process has ended and was reaped, or its host is lost, which ends it as soon as it notices. `how`: "was killed by SIGKILL",
        "exited with status 3". Comes once per process."""

    def on_backend_lost(self, how: str) -> None:
        """The backend can start no process until `restart` has returned. Its processes live on, and their ends are still reported. Starts
        that wait raise first. Comes once per loss."""

    def on_output(self, name: str, line: str) -> None:
        """A line on stdout or stderr of process `name`."""


class ProcessBackend(Protocol):
    """Starts and ends the processes of one run. `num_threads`: threads left running by the imports; a fork copies only one of them. `pid`:
    the backend's own process, 0 where it has none now."""

    @property
    def num_threads(self) -> int: ...
    @property
    def pid(self) -> int: ...

    async def restart(self, seconds: float) -> None:
        """Make a lost backend serve again. Raises WorkerDiedError or UserError when that fails, or takes longer than `seconds`; it may be
        called again."""
        ...

    def kill_server(self) -> None:
        """Kill the backend's own process, which does not respond: a loss, which is reported. No-op after a loss."""
        ...

    async def start(self, spec: ProcessSpec) -> WorkerProcess:
        """Start a process and return it once it exists. Two processes of one name may exist for a moment, while the first is dying.

        Raises WorkerDiedError when the system refuses (it names the process) or the backend is lost (it names the backend), UserError when
        descriptors run out. All but the loss may pass; the caller may retry. Has no time limit: cancel it. The process of a cancelled
        call is never returned; if it comes to exist, the backend ends it and reports nothing about it.
        """
        ...

    def rename(self, process: WorkerProcess, name: str, workers: tuple[Identity, ...]) -> None:
        """Give a process another name, and its workers other identities: those of one that has died."""
        ...

    def release(self, name: str, weights: Collection[str]) -> None:
        """Release what is kept of a process that has ended and does not start again, and the memory of other weights than these."""
        ...

    def output_tail(self) -> tuple[str, ...]:
        """The last lines of the backend's own process; empty where it has none."""
        ...

    async def aclose(self) -> None:
        """End every process and reap it; no notice comes any more. Idempotent. When cancelled, it does the rest as `kill_all`."""
        ...

    def kill_all(self) -> None:
        """Ends all without a turn of the loop; blocks while the processes die. Nothing of the run is left afterwards. Idempotent."""
        ...


class OpenBackend(Protocol):
    def __call__(
        self, run_id: str, owner: BackendOwner, preload: Sequence[str], num_processes: int, seconds: float
    ) -> Awaitable[ProcessBackend]:
        """Return a backend that is ready to start about `num_processes`, with modules `preload` imported in each.

        Raises WorkerDiedError when it fails or is not ready within `seconds`, UserError when the system allows too few resources. A
        call that fails or is cancelled leaves nothing behind.
        """
        ...
