"""Reads the state of a graph that is up, and of each of its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from flowrt.actors.control import Statistics
from flowrt.graph.model import FORK_SERVER, role_of
from flowrt.launcher.launcher import Launcher
from flowrt.serving.graph_status import ProcessState, ProcessStatus

CPU_SECONDS = 0.5  # over which processor time is measured; the system counts it in steps of 10 ms
LAUNCHER = "launcher"


async def read_processes(launcher: Launcher, statistics: dict[str, Statistics]) -> tuple[ProcessStatus, ...]:
    """All processes, the launcher first. It takes CPU_SECONDS."""
    clock, pids = launcher.seams.clock, dict(_pids(launcher))
    before, began = {pid: _cpu_seconds(launcher, pid) for pid in set(pids.values())}, clock.now()
    await clock.sleep(CPU_SECONDS)
    passed = max(clock.now() - began, CPU_SECONDS)
    measured: dict[int, tuple[float | None, int]] = {}
    for pid in before:
        now, then = _cpu_seconds(launcher, pid), before[pid]
        measured[pid] = (None if now is None or then is None else (now - then) / passed * 100), launcher.seams.resident_bytes(pid)
    return tuple(_status(launcher, name, pid, *measured[pid], statistics.get(name)) for name, pid in pids.items())


def _pids(launcher: Launcher) -> Iterator[tuple[str, int]]:
    yield LAUNCHER, os.getpid()
    if (fork_server := launcher.fork_server_pid()) > 0:
        yield FORK_SERVER, fork_server
    yield from launcher.pids.items()


def _cpu_seconds(launcher: Launcher, pid: int) -> float | None:
    times = launcher.seams.process_times(pid)
    return None if times is None else times.cpu_seconds


def _status(
    launcher: Launcher, name: str, pid: int, cpu_percent: float | None, resident_bytes: int, statistics: Statistics | None
) -> ProcessStatus:
    is_group = statistics is not None and statistics.num_pages > 0
    return ProcessStatus(
        name=name,
        role=role_of(name),
        pid=pid,
        host=launcher.graph.shown_host(name),
        state="up" if name in (LAUNCHER, FORK_SERVER) else process_state(launcher, name),
        heartbeat_age_seconds=launcher.health_record.heartbeat_age(name),
        cpu_percent=cpu_percent,
        resident_bytes=resident_bytes if pid or statistics is None else statistics.resident_bytes,
        num_running=statistics.num_running if statistics is not None and is_group else None,
        num_waiting=statistics.num_waiting if statistics is not None and is_group else None,
        num_restarts=0 if name in (LAUNCHER, FORK_SERVER) else launcher.state.num_restarts(name),
    )


def process_state(launcher: Launcher, name: str) -> ProcessState:
    condition = launcher.health_record.condition(name)
    if condition != "up" or launcher.state.is_usable(name):
        return condition
    return "standby" if launcher.state.starts.is_ready_standby(name) else "starting"
