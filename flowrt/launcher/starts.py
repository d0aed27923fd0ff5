"""Starts the incarnations of processes, which come from the fork server or from standby processes. Pure.

A standby process is a worker that has loaded the operators of every process that it may stand in for, under a name of its own. It has no
incarnation of theirs and no links. On a restart it gets the name and incarnation of the process that died, and goes on as a process that
has just loaded: it listens, connects, works. Another standby process is started once all processes are up again.

When the fork server dies or does not respond, a new one starts within its restart budget. Workers run on meanwhile, since they live as long
as the launcher. A process that should be restarted waits until a fork server is back. (The loss during the start of the run: deaths.py.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrt.actors.control import DetectorReport, PeerJoined, PeerLeft
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import FORK_SERVER, Graph, Node
from flowrt.graph.numerics import is_strict, strict_exchanges
from flowrt.graph.recovery import standby_candidates, standby_names
from flowrt.launcher import events
from flowrt.launcher.actions import KillForkServer, StartForkServer
from flowrt.launcher.run_table import ProcessPhase, ProcessRecord, RunPhase, RunTable
from flowrt.launcher.transport_choice import num_threads
from flowrt.reliability.detector import ProcessState
from flowrt.reliability.restart_policy import Restart, RestartPolicy

# Time limits for a fork. It takes milliseconds, so a fork server that exceeds them is stopped. During the launch it forks all processes at
# once, while they load.
FORK_SECONDS, LAUNCH_FORK_SECONDS = 5.0, 15.0
IMPORT_SECONDS = 60.0  # time limit for a new fork server to serve
RETRY_SECONDS = 0.1  # from a fork that met the end of the fork server to the next try: the loss is about to be reported


def standby_loads(graph: Graph, packed: Sequence[Sequence[str]], num_cores: int) -> dict[str, str]:
    """The processes that a standby process can stand in for -> the process whose operators it loads for that: the first with equal ones.

    These are the candidates with one worker and equal numbers of compute threads.
    """
    if not graph.reliability.standby:
        return {}
    candidates = standby_candidates(graph)
    usable = [workers[0] for workers in packed if len(workers) == 1 and workers[0] in candidates]
    threads = {name: num_threads(graph, [name], packed, num_cores) for name in usable}
    first: dict[str, str] = {}
    return {name: first.setdefault(_operators_of(graph, name), name) for name in usable if threads[name] == threads[usable[0]]}


def _operators_of(graph: Graph, process: str) -> str:
    """Equal for two processes when the operators of one do as those of the other."""
    numerics = is_strict(graph, process), process in strict_exchanges(graph)
    return repr(([_operator_of(graph, node) for node in graph.nodes_of(process)], graph.limits_of(process), numerics))


def _operator_of(graph: Graph, node: Node) -> tuple[object, ...]:
    """A dispatch node has a client of the servers' processes, which it knows by name."""
    servers = [edge for edge in graph.edges_from(node.name) if node.kind.dispatches and edge.source_port.startswith("server")]
    return node.operator, node.options, [(edge.source_port, graph.nodes[edge.target].process) for edge in servers]


@dataclass
class ForkServerRecord:
    """`number`: of all fork servers. `pid`: 0 where it is no process of this host. `lost_seconds`: when it was lost; None: it is up.
    `why_down`: its restarts are used up."""

    is_up: bool = True  # and serves
    number: int = 0
    pid: int = 0
    lost_seconds: float | None = None
    why_killed: str = ""
    why_down: str | None = None

    @property
    def incarnation(self) -> str:
        return str(self.number)


class Starts:
    """Owns what is to be started: the fork server, the standby processes, and the processes that wait for them or for each other."""

    def __init__(self, table: RunTable, standby_loads: Mapping[str, str]) -> None:
        self._table, self._loads = table, standby_loads
        self.standby_names = standby_names(table.graph) if standby_loads else ()
        self.fork_server = ForkServerRecord()
        settings = table.graph.reliability
        # Of the fork server, without which no monitor starts.
        self._budget = RestartPolicy(max(1, settings.restarts), settings.restart_window_seconds)
        self.waiting: dict[str, None] = {}  # processes that are to be forked when the fork server is back
        self._waiting_for_unit: set[str] = set()  # dead processes that start after others of their failure units

    @property
    def fork_seconds(self) -> float:
        """Time limit for a fork."""
        return FORK_SECONDS if self._table.phase >= RunPhase.RUNNING else LAUNCH_FORK_SECONDS

    def loads_of(self, name: str) -> tuple[str, ...]:
        """The processes whose operators the process `name` loads, if it is a standby process."""
        return tuple(dict.fromkeys(self._loads.values())) if name in self.standby_names else ()

    def is_ready_standby(self, name: str) -> bool:
        """Whether this is a standby process that has loaded, and still has its name."""
        return name in self.standby_names and name in self._table.processes and self._table.processes[name].phase == ProcessPhase.UP

    # Processes.

    def start_next(self, name: str) -> None:
        """Start a new incarnation, unless the process waits for others of its failure unit, or for a fork server."""
        table, process = self._table, self._table.processes.get(name)
        if process is None or process.is_leaving:
            return
        self._waiting_for_unit.discard(name)
        self.waiting.pop(name, None)
        if self._must_wait(process):
            self._waiting_for_unit.add(name)
            return
        standby = self._ready_for(process)
        if standby is not None:
            (worker,) = standby.workers
            table.notify_monitor(PeerLeft(worker.name, worker.incarnation, "it has become another process"))
            table.remove(standby)
        elif not self.fork_server.is_up:
            self.waiting[name], process.refused_seconds = None, None
            if self.fork_server.why_down is not None:
                self.give_up(process, self.fork_server.why_down)
            return
        table.renew(process, process.names, self._loads[process.names[0]] if standby is not None else "")
        table.start(process, standby.name if standby is not None else "")
        self.wake_waiting()

    def start_standbys(self) -> None:
        """Start the standby processes that are missing, once no other process is about to start: a start takes time from others. A process
        that waits for the fork server may become one that is ready."""
        processes = self._table.processes
        if not any(each.phase != ProcessPhase.UP and not each.is_given_up for each in processes.values()):
            for missing in [name for name in self.standby_names if name not in processes]:
                self._table.add(missing, [missing]).phase = ProcessPhase.DEAD
                self.start_next(missing)
        if able := [name for name in self.waiting if self._ready_for(processes[name]) is not None]:
            self.start_next(able[0])

    def give_up(self, process: ProcessRecord, why: str, retry_seconds: float | None = None) -> None:
        """The process stays down, see events.WorkerGivenUp."""
        process.is_given_up = True
        process.down_seconds = self._table.now if process.down_seconds is None else process.down_seconds
        for worker in process.workers:
            self._table.announce(events.WorkerGivenUp(worker.name, why, retry_seconds))
            if process.is_restarting:
                self._table.notify(worker, PeerLeft(worker.name, worker.incarnation, why))
        process.is_restarting = False
        self.wake_waiting()
        if self._table.phase == RunPhase.RUNNING:
            self._table.set_timer(0.0, self.start_standbys)  # nothing else may be about to start now

    def wake_waiting(self) -> None:
        """Decide again which of the processes that wait for their failure units start."""
        for name in self._waiting_for_unit:
            self._table.set_timer(0.0, self.start_next, name)
        self._waiting_for_unit.clear()

    def _ready_for(self, process: ProcessRecord) -> ProcessRecord | None:
        """A standby process that can become the next incarnation of this one now."""
        standbys = (self._table.processes.get(name) for name in self.standby_names if process.names[0] in self._loads)
        return next((each for each in standbys if each is not None and each.phase == ProcessPhase.UP and each.is_open), None)

    def _must_wait(self, process: ProcessRecord) -> bool:
        """Whether a process of its failure unit has not ended yet, or has a lower rank and has not been started."""
        return any(other.is_ending or (other.is_next and other.rank < process.rank) for other in self._table.rest_of_unit(process))

    # The fork server.

    def on_fork_server_lost(self, how: str) -> None:
        self.fork_server.lost_seconds = self._table.now
        self._start_fork_server_again("; ".join(each for each in (self.fork_server.why_killed, how) if each))

    def on_fork_server_failed(self, error: UserError | WorkerDiedError) -> None:
        """A new fork server has failed to start."""
        self._start_fork_server_again(error.reason if isinstance(error, WorkerDiedError) else f"cannot start: {error}")

    def on_fork_server_ready(self, pid: int) -> None:
        """A new fork server serves. `pid`: 0 where it is no process of this host."""
        lost_seconds = self.fork_server.lost_seconds
        self.fork_server = ForkServerRecord(number=self.fork_server.number + 1, pid=pid)
        self.introduce_fork_server()
        if self._table.phase == RunPhase.RUNNING and lost_seconds is not None:
            self._table.announce(events.ForkServerRestarted(self._table.now - lost_seconds))
            for name in self.waiting:
                self._table.set_timer(0.0, self.start_next, name)
            self.waiting.clear()

    def introduce_fork_server(self) -> None:
        """Notify the monitor of the fork server. It sends no heartbeats: like a process that starts, it is dead when it stays stopped."""
        record = self.fork_server
        if record.is_up and record.pid and self._table.phase == RunPhase.RUNNING:
            self._table.notify_monitor(PeerJoined(FORK_SERVER, record.incarnation, {}, record.pid, is_starting=True))

    def on_fork_server_marked_dead(self, report: DetectorReport) -> None:
        record = self.fork_server
        if record.is_up and report.incarnation == record.incarnation and report.state is ProcessState.DEAD:
            record.why_killed = f"was marked dead ({report.why})"
            self.kill_fork_server()

    def kill_fork_server(self) -> None:
        """Kill it, unless it is down, so that its loss is reported."""
        if self.fork_server.is_up:
            self.fork_server.is_up = False
            self._table.act(KillForkServer())

    def may_await_fork_server(self, process: ProcessRecord) -> bool:
        """Whether a fork that has met the end of a fork server waits for the next one, which costs the process none of its restart budget.
        Another host starts its own and reports nothing about it, so each further fork costs a restart once it should be back."""
        process.refused_seconds = self._table.now if process.refused_seconds is None else process.refused_seconds
        return self._table.now - process.refused_seconds < IMPORT_SECONDS

    def await_fork_server(self, process: ProcessRecord) -> None:
        """While the run starts, it is the monitor that waits: the run may be at work before the loss of the fork server is reported, which
        would have ended it."""
        if self._table.phase < RunPhase.STOPPING:
            self._table.set_timer(RETRY_SECONDS, self.start_next, process.name)

    def start_fork_server(self) -> None:
        if self._table.phase == RunPhase.RUNNING:
            self._table.act(StartForkServer())

    def _start_fork_server_again(self, how: str) -> None:
        self.fork_server.is_up = False
        if self._table.phase != RunPhase.RUNNING:
            return
        decision = self._budget.on_death(FORK_SERVER, self._table.now)
        seconds = decision.delay_seconds if isinstance(decision, Restart) else decision.retry_seconds
        self._table.announce(events.ForkServerLost(how, seconds))
        if seconds is not None:
            self._table.set_timer(seconds, self.start_fork_server)
        if not isinstance(decision, Restart):
            self.fork_server.why_down = f"the fork server {how}, and {decision.why}"
            for name in self.waiting:
                self.give_up(self._table.processes[name], self.fork_server.why_down)
