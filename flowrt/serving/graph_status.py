"""The state of a graph that is up and of its processes, as its socket reports it and `flowrt ps` shows it."""

from __future__ import annotations

from typing import Literal

import msgspec

GraphState = Literal["ready", "draining", "unhealthy"]
ProcessState = Literal["starting", "standby", "up", "suspect", "down", "given up"]


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`heartbeat_age_seconds`: since its latest heartbeat; None for a process that sends none. `cpu_percent`: of one core, in the last
    moments. `resident_bytes`: of the whole process, which may hold several workers. `num_running`, `num_waiting`: sequences of a group.
    `num_restarts`: of this process, since the graph is up. `host`: where it runs, "" where the graph has one host; on another host than
    the launcher's, `pid` is 0."""

    name: str
    role: str
    pid: int
    state: ProcessState
    host: str = ""
    heartbeat_age_seconds: float | None = None
    cpu_percent: float | None = None
    resident_bytes: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    num_restarts: int = 0


class GraphStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`problems`: why it is not healthy. `num_active`: requests that have not ended; `num_waiting`: of these, without a group."""

    state: GraphState
    problems: tuple[str, ...]
    num_active: int
    num_waiting: int
    max_requests: int
    processes: tuple[ProcessStatus, ...]
