"""The interface to what provides hosts: an engine starts one host server per host, and reports its end.

Engines: `local` (flowrt/hosts/local_engine.py: this machine plays every host), `ray` (flowrt/hosts/ray_engine.py) and `simulated`
(flowrt/simulation/hosts.py). Another cluster engine needs no more than these methods: it runs `python -m flowrt.hosts.server` on a host,
writes one line to its stdin, and returns the first line of its stdout. The host server ends when its stdin does, so an engine that is gone
leaves nothing behind. Each engine passes the checks of process backends (tests/processes/backend_checks.py) through the host server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class HostProcess(Protocol):
    """One start of a host server. `address`: by which other hosts reach its host."""

    @property
    def address(self) -> str: ...

    async def start(self, line: bytes) -> bytes:
        """Start the host server with this line. Returns the line that it replies; empty when it ended before. Raises WorkerDiedError."""
        ...

    async def wait(self) -> str:
        """Wait for its end, or for the end of its host. Returns how it ended, such as "exited with status 1"."""
        ...

    def kill(self) -> None:
        """End it, with all its processes. Does not wait. No-op after its end, and before its start."""
        ...


class HostEngine(Protocol):
    """Open once per run. `address`: by which other hosts reach the launcher's host."""

    @property
    def address(self) -> str: ...

    async def open_host(self, name: str) -> HostProcess:
        """Prepare a start on the host of this name, which may be another machine than at its last start. Raises UserError or
        WorkerDiedError. A cancelled call leaves nothing behind."""
        ...

    async def aclose(self) -> None:
        """End what is left, and wait for its end. Idempotent."""
        ...

    def kill_all(self) -> None:
        """Ends all without a turn of the loop. Idempotent."""
        ...


class OpenEngine(Protocol):
    async def __call__(self, resources: Mapping[str, Mapping[str, float]], seconds: float) -> HostEngine:
        """Reserve these `resources` of each host, by its name. Raises UserError when there are no such hosts within `seconds`."""
        ...
