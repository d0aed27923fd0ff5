"""`flowrt ps`, `logs`, `drain` and `down`: what runs of this user's graphs, and commands to them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Column
from rich.text import Text

from flowrt.cli.tables import UNKNOWN, new_console, new_table, print_table
from flowrt.cli.text import OutputStream, visible
from flowrt.errors import FAILURE, SUCCESS, NotRunningError, UserError
from flowrt.observe import duration_text, size_text
from flowrt.seams import RealClock, Seams
from flowrt.serving.graph_status import GraphStatus, ProcessStatus
from flowrt.serving.run_folder import Description, FoundGraph, begin_stop, find_graph, found_graphs, remove_dead
from flowrt.serving.socket_client import new_client

POLL_SECONDS = 0.2
STOP_SECONDS = 15.0  # for the processes to end, after the time for requests
END_SECONDS = 15.0  # for a killed process to end
_STYLES = {"ready": "green", "up": "green", "standby": "green", "dead": "red", "down": "red", "given up": "red", "not responding": "red"}
_NUMBERS = ("pid", "heartbeat", "cpu", "memory", "requests", "restarts")


@dataclass(frozen=True)
class ListedGraph:
    """A graph as `flowrt ps` shows it. `status` None: it does not say."""

    name: str
    state: str
    description: Description | None
    status: GraphStatus | None

    def as_json(self) -> dict[str, object]:
        described = {} if self.description is None else msgspec.to_builtins(self.description)
        status = {} if self.status is None else msgspec.to_builtins(self.status)
        return {"name": self.name, **described, **status, "state": self.state}


def ps(is_json: bool) -> int:
    """Show each graph of this user with its processes."""
    found = found_graphs()
    graphs = asyncio.run(_listed_all(found))
    output = OutputStream(sys.stdout)
    if is_json:
        output.write_now(msgspec.json.format(msgspec.json.encode([graph.as_json() for graph in graphs]), indent=1).decode() + "\n")
    elif graphs:
        console, now = new_console(output), Seams().wall_now()
        for graph in graphs:
            print_graph(graph, console, now)
    else:
        print("flowrt: no graph is up; flowrt up GRAPH starts one, and flowrt serve needs --name to be shown", file=sys.stderr)
    return SUCCESS


async def _listed_all(found: Sequence[FoundGraph]) -> list[ListedGraph]:
    return list(await asyncio.gather(*map(_listed, found)))


async def _listed(found: FoundGraph) -> ListedGraph:
    description = found.description
    if not found.is_alive:
        return ListedGraph(found.name, "dead", description, None)
    if description is None or not description.is_ready:
        return ListedGraph(found.name, "starting", description, None)
    try:
        status = msgspec.convert(await new_client(found).call("GET", "/admin/status"), GraphStatus)
    except NotRunningError:
        return ListedGraph(found.name, "not responding", description, None)
    return ListedGraph(found.name, status.state, description, status)


def print_graph(graph: ListedGraph, console: Console, now: float) -> None:
    heading = [(graph.name, "bold"), (graph.state, _STYLES.get(graph.state, "yellow"))]
    if (described := graph.description) is not None:
        heading.append((f"pid {described.pid}", ""))
        if graph.state != "dead":
            heading.append((f"for {duration_text(max(0.0, now - described.started))}", ""))
    if (status := graph.status) is not None:
        heading.append((f"{status.num_active} of {status.max_requests} requests", ""))
    line = Text("  ").join(Text(visible(text), style) for text, style in heading)
    console.print(line, soft_wrap=True)
    if described is not None:
        console.print(Text(visible(f"  model {described.model} at {described.url}")), soft_wrap=True)
    if graph.state == "dead":
        console.print(Text(f"  flowrt logs {graph.name} may say why; flowrt down {graph.name} removes it", "dim"), soft_wrap=True)
    if status is not None:
        for problem in status.problems:
            console.print(Text(f"  {visible(problem)}", "yellow"), soft_wrap=True)
        seen: set[int] = set()
        for host in dict.fromkeys(process.host for process in status.processes):
            if host:  # a table per host: a column of names would not fit beside the others
                console.print(Text(f"on {host}"), soft_wrap=True)
            numbers = (Column(heading, justify="right", no_wrap=True) for heading in _NUMBERS)
            table = new_table(console, *(Column(heading, no_wrap=True) for heading in ("process", "state")), *numbers)
            for process in status.processes:
                if process.host == host:
                    table.add_row(*_row(process, is_first=process.pid not in seen or not process.pid))
                    seen.add(process.pid)
            print_table(table, console)
    console.print()


def _row(process: ProcessStatus, is_first: bool) -> Iterator[str | Text]:
    """`is_first`: of the workers in one process, the one with the figures of the process."""
    yield process.name
    yield Text(process.state, _STYLES.get(process.state, "yellow"))
    yield str(process.pid) if process.pid else UNKNOWN
    age = process.heartbeat_age_seconds
    yield UNKNOWN if age is None else f"{age:.1f} s"
    yield UNKNOWN if process.cpu_percent is None or not is_first else f"{process.cpu_percent:.0f} %"
    yield UNKNOWN if not process.resident_bytes or not is_first else size_text(process.resident_bytes)
    yield UNKNOWN if process.num_running is None else f"{process.num_running} + {process.num_waiting}"
    yield str(process.num_restarts)


def logs(name: str | None, follows: bool, tail: int | None) -> int:
    """Write a graph's log to standard output."""
    found = find_graph(name)
    if found.description is not None and not found.description.has_log:
        raise UserError(f"{found.name} runs in the foreground: its log is on the standard error of process {found.description.pid}")
    lines = [line for path in (found.old_log, found.log) for line in _lines(path)]
    output = OutputStream(sys.stdout)
    output.write_now("".join(lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]))
    if follows:
        with suppress(KeyboardInterrupt):
            asyncio.run(_follow(found, output))
    return SUCCESS


def _lines(path: Path) -> list[str]:
    try:
        return [_shown(line) for line in path.read_bytes().splitlines()]
    except OSError:
        return []


def _shown(line: bytes) -> str:
    return visible(line.decode(errors="replace")) + "\n"


async def _follow(found: FoundGraph, output: OutputStream) -> None:
    """Write the lines that come, until the graph ends or the reader leaves. Lines of an earlier start may come again."""
    clock, name = RealClock(), found.name
    try:
        file = found.log.open("rb")
        file.seek(0, os.SEEK_END)
        rest = b""
        while not output.is_broken:
            data = file.read()
            *lines, rest = (rest + data).split(b"\n")
            output.write_now("".join(map(_shown, lines)))
            if not data:
                if not _is_alive(name):
                    return
                if found.log.stat().st_ino != os.fstat(file.fileno()).st_ino:  # a new log has begun
                    file.close()
                    file = found.log.open("rb")
                await clock.sleep(POLL_SECONDS)
    except FileNotFoundError:
        return


def drain(name: str | None) -> int:
    """Make a graph admit no new requests, and wait until those in progress have ended."""
    found = find_graph(name)
    try:
        asyncio.run(_drain(found))
    except NotRunningError as error:
        raise UserError(str(error)) from None
    print(f"flowrt: {found.name} is drained; flowrt down {found.name} stops it", file=sys.stderr)
    return SUCCESS


async def _drain(found: FoundGraph) -> None:
    client, clock = new_client(found), RealClock()
    await client.call("POST", "/admin/drain")
    while msgspec.convert(await client.call("GET", "/admin/status"), GraphStatus).num_active:
        await clock.sleep(POLL_SECONDS)


def down(name: str | None, at_once: bool) -> int:
    """Stop a graph, and remove what it has left. One that does not end is killed."""
    found = find_graph(name)
    code, how = SUCCESS, "is down"
    if found.is_alive:
        if (described := found.description) is None:
            raise UserError(f"{found.name} has just begun to start; try again")
        with suppress(ProcessLookupError):  # it has just ended
            process = os.pidfd_open(described.pid)
            try:
                if not _end(process, found, described, at_once):
                    code, how = FAILURE, "did not stop in time and was killed"
            finally:
                os.close(process)
    else:
        how = "was dead; its folder is removed"
    remove_dead(found)
    print(f"flowrt: {found.name} {how}", file=sys.stderr)
    return code


def _end(process: int, found: FoundGraph, described: Description, at_once: bool) -> bool:
    """Stop the process; False when it had to be killed. It is the right one while it holds the lock: its id has not been given away.
    Another `flowrt down` may have asked it to stop already."""
    if not _is_alive(found.name):
        return True
    is_first = begin_stop(found)
    if is_first or at_once:
        signal.pidfd_send_signal(process, signal.SIGTERM)
    if is_first and at_once:
        signal.pidfd_send_signal(process, signal.SIGINT)
    if _has_ended(process, STOP_SECONDS + (0.0 if at_once else described.drain_seconds)):
        return True
    signal.pidfd_send_signal(process, signal.SIGKILL)
    _has_ended(process, END_SECONDS)
    return False


def _is_alive(name: str) -> bool:
    return any(each.name == name and each.is_alive for each in found_graphs())


def _has_ended(process: int, seconds: float) -> bool:
    return bool(select.select([process], [], [], seconds)[0])
