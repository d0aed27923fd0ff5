"""Standby processes: what each of them loads, and which one takes the place of a process that has died. Pure.

A standby process is a worker that has loaded the operators of every process that it may stand in for, under a name of its own. It has no
incarnation of theirs and no links. On a restart it gets the name and incarnation of the process that died, and goes on as a process that
has just loaded: it listens, connects, works. Another standby process is started once all processes are up again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrt.actors.control import PeerLeft
from flowrt.graph.model import MONITOR, Graph, Node
from flowrt.graph.numerics import is_strict, strict_exchanges
from flowrt.graph.recovery import standby_candidates
from flowrt.launcher.run_table import ProcessPhase, ProcessRecord, RunTable
from flowrt.launcher.transport_choice import num_threads


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


class Standbys:
    """The standby processes of a run. `loads`: see `standby_loads`."""

    def __init__(self, table: RunTable, names: Sequence[str], loads: Mapping[str, str]) -> None:
        self._table, self._loads = table, loads
        self.names = tuple(names) if loads else ()

    def loads_of(self, name: str) -> list[str]:
        """The processes whose operators the process `name` loads, if it is a standby process."""
        return list(dict.fromkeys(self._loads.values())) if name in self.names else []

    def is_ready(self, name: str) -> bool:
        """Whether this is a standby process that has loaded, and still has its name."""
        return name in self.names and name in self._table.processes and self._table.processes[name].phase == ProcessPhase.UP

    def take(self, process: ProcessRecord) -> str:
        """The standby process that becomes the next incarnation of this one, and is no longer a process of its own; "": none is ready."""
        standby = self.ready_for(process)
        if standby is None:
            return ""
        (worker,) = standby.workers
        self._table.notify(worker, (MONITOR,), PeerLeft(worker.name, worker.incarnation, "it has become another process"))
        self._table.remove(standby)
        return worker.name

    def ready_for(self, process: ProcessRecord) -> ProcessRecord | None:
        """A standby process that can become the next incarnation of this one now."""
        standbys = (self._table.processes.get(name) for name in self.names if process.names[0] in self._loads)
        return next((each for each in standbys if each is not None and each.phase == ProcessPhase.UP and each.is_open), None)

    def names_to_start(self) -> list[str]:
        """The standby processes to start now. They start once no other process is about to: a start takes time from others."""
        if any(each.phase != ProcessPhase.UP and not each.is_given_up for each in self._table.processes.values()):
            return []
        return [name for name in self.names if name not in self._table.processes]


def _operators_of(graph: Graph, process: str) -> str:
    """Equal for two processes when the operators of one do as those of the other."""
    numerics = is_strict(graph, process), process in strict_exchanges(graph)
    return repr(([_operator_of(graph, node) for node in graph.nodes_of(process)], graph.limits_of(process), numerics))


def _operator_of(graph: Graph, node: Node) -> tuple[object, ...]:
    """A dispatch node has a client of the servers' processes, which it knows by name; a return node knows its groups."""
    servers = [edge for edge in graph.edges_from(node.name) if edge.source_port.startswith(("server", "via", "group"))]
    servers = servers if node.kind.dispatches or node.kind.relays == "responses" else []
    return node.operator, node.options, [(edge.source_port, graph.nodes[edge.target].process) for edge in servers]
