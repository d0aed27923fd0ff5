"""Derives the recovery of each process from the state that its operators keep.

`RULES` is the only table of recoveries. The launcher, the workers, the simulation and `flowrt graph show` read it, and a test compares it
with docs/reliability.md. No rule depends on the name of a role or process, except for the processes of flowrt itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from flowrt.graph.derived import derived
from flowrt.graph.kinds import Keeps
from flowrt.graph.model import FIRST_HOST, FORK_SERVER, FRONT_END, GATEWAY, MONITOR, Graph, Node, role_of
from flowrt.graph.placement import weight_set

STANDBY = "standby process"


class Recovery(StrEnum):
    """The reaction to the death of a process."""

    REDISPATCH = "redispatch"
    REPLAY = "replay"
    RESTART = "restart"
    FATAL = "fatal"


@dataclass(frozen=True)
class Rule:
    """`keeps`: the state of the process's operators, or the name of a process of flowrt. `restart_rank`: of processes that are restarted
    together, those of a lower rank start first: decode before prefill."""

    keeps: str
    lost: str
    recovery: Recovery
    effect: str
    restart_rank: int = 0


# From the least state to the most: of two processes with a broken link, the run ends the one that keeps less.
RULES: dict[str, Rule] = {
    rule.keeps: rule
    for rule in (
        Rule(Keeps.NOTHING, "nothing", Recovery.REDISPATCH, "clients send its pending requests to replicas; it restarts and rejoins"),
        Rule(
            Keeps.PROMPTS,
            "KV that no group has pulled yet",
            Recovery.REPLAY,
            "other prefill workers, or groups if none is left, compute its prompts again; it rejoins",
            restart_rank=1,
        ),
        Rule(
            Keeps.SEQUENCES,
            "KV cache of its sequences",
            Recovery.REPLAY,
            "other groups replay its requests' prompts and tokens; it rejoins",
        ),
        Rule(Keeps.UNKNOWN, "state that only the process has", Recovery.FATAL, "the run ends"),
        Rule(MONITOR, "nothing", Recovery.RESTART, "it restarts"),
        Rule(FRONT_END, "its open connections", Recovery.RESTART, "its requests are cancelled; it restarts"),
        Rule(STANDBY, "nothing", Recovery.RESTART, "another one starts"),
        Rule(FORK_SERVER, "ability to start processes", Recovery.RESTART, "it restarts; workers keep running"),
        Rule(GATEWAY, "the run", Recovery.FATAL, "every process ends; each client gets an error"),
    )
}


def standby_names(graph: Graph) -> tuple[str, ...]:
    """The standby processes that the graph asks for (flowrt/launcher/starts.py)."""
    return tuple(f"standby.{number}" for number in range(graph.reliability.standby))


def rule_of(graph: Graph, process: str) -> Rule:
    """The rule that holds for a process: that of its operator with the most state."""
    if process in (MONITOR, FORK_SERVER, GATEWAY):
        return RULES[process]
    if process in standby_names(graph):
        return RULES[STANDBY]
    if role_of(process) == FRONT_END:
        return RULES[FRONT_END]
    kept = {keeps_of(node) for node in graph.nodes_of(process) if not node.keeps_nothing}
    return RULES[max(kept, key=list(Keeps).index, default=Keeps.UNKNOWN)]


def failure_unit(graph: Graph, workers: Collection[str]) -> str:
    """The failure unit of a process with these workers: all processes of a unit end and are restarted together. "": the process alone.

    `recovery: restart_all` makes one unit of the workers, and `restart_role` one of those that keep the same kind of state: the earlier
    stages of recovery in xDeepServe (section 6.2). A process has the role of its worker with the most state. Processes of flowrt have no
    part in it. Without restarts there are no units: a process that cannot return is no reason to end others.
    """
    kept = [rule_of(graph, name).keeps for name in graph.process_names() if name in workers]
    policy = graph.reliability.recovery if kept and graph.reliability.restarts else ""
    return {"restart_all": "all", "restart_role": max(kept, key=list(RULES).index, default="")}.get(policy, "")


def restart_rank(graph: Graph, workers: Collection[str]) -> int:
    """Of the processes of a failure unit, those of a lower rank start first."""
    return min((rule_of(graph, name).restart_rank for name in graph.process_names() if name in workers), default=0)


def keeps_less(graph: Graph, process: str, other: str) -> bool:
    """Whether the death of `process` loses less state than that of `other`."""
    kept = list(RULES)
    return kept.index(rule_of(graph, process).keeps) < kept.index(rule_of(graph, other).keeps)


def keeps_of(node: Node) -> Keeps:
    """The state that a node keeps. That of a user's operator is unknown, unless the graph file has `keeps: nothing`. Then it recovers with
    the pipeline of its process, which computes its inputs again. A process of such operators alone ends the run when it dies, as no client
    holds their inputs."""
    return Keeps.NOTHING if node.keeps_nothing else node.kind.keeps


def survives(graph: Graph, process: str) -> bool:
    """Whether the run goes on when this process dies. `recovery: off` concerns workers; processes of flowrt restart all the same.

    A group is one failure unit. One whose operators are in several processes is not replayed: part of its state would survive.
    """
    rule = rule_of(graph, process)
    if rule.recovery == Recovery.FATAL:
        return False
    if process in (MONITOR, FORK_SERVER):
        return True
    if rule.recovery == Recovery.REPLAY and not _is_whole_group(graph, process):
        return False
    return graph.reliability.recovery != "off"


def _is_whole_group(graph: Graph, process: str) -> bool:
    """Whether the process is a pipeline of its own: no edge connects two nodes that keep something of its sequences, here and in another
    process. The ends of a KV transfer are two pipelines."""
    if process not in pipelines(graph):
        return False
    stateful = {node.name for node in graph.nodes.values() if keeps_of(node) != Keeps.NOTHING}
    transfers = {node.name for node in graph.nodes.values() if node.kind.kv}
    ends = ({edge.source, edge.target} for edge in graph.edges.values() if graph.crosses(edge) and process in graph.ends_of(edge))
    return not any(pair <= stateful and not pair <= transfers for pair in ends)


def pipelines(graph: Graph) -> list[str]:
    """The processes that schedule and compute sequences: prefill workers and attention groups."""
    return list(dict.fromkeys(node.process for node in graph.nodes.values() if node.kind.schedules))


def prefill_workers(graph: Graph) -> list[str]:
    """The processes that compute prompts for the attention groups."""
    return list(dict.fromkeys(node.process for node in graph.nodes.values() if node.kind.kv == "offers"))


def expert_servers(graph: Graph) -> list[str]:
    """The processes that compute experts, groups that hold experts of their own among them."""
    return list(dict.fromkeys(node.process for node in graph.nodes.values() if node.kind.holds_experts))


@derived
def remote_servers(graph: Graph) -> frozenset[str]:
    """The processes that compute experts for other processes."""
    targets = (graph.nodes[edge.target] for edge in graph.edges.values() if graph.crosses(edge))
    return frozenset(node.process for node in targets if node.kind.holds_experts)


def attention_groups(graph: Graph) -> list[str]:
    """The processes that compute the tokens of requests."""
    prefill = prefill_workers(graph)
    return [process for process in pipelines(graph) if process not in prefill]


@derived
def survivable_processes(graph: Graph) -> frozenset[str]:
    """The workers whose death the run survives."""
    return frozenset(process for process in graph.process_names() if survives(graph, process))


def standby_candidates(graph: Graph) -> frozenset[str]:
    """The processes that a standby process may stand in for: those that the run can lose, on its host, on the CPU, whose experts are in
    memory that processes share. A standby process needs no further copy of them."""
    candidates = (process for process in survivable_processes(graph) if graph.host_of(process) == FIRST_HOST)
    return frozenset(process for process in candidates if _can_be_loaded_twice(graph, process))


def _can_be_loaded_twice(graph: Graph, process: str) -> bool:
    holds_experts = process in expert_servers(graph)
    return graph.devices.get(process, "cpu") == "cpu" and (not holds_experts or bool(weight_set(graph, process)))


def is_watched(graph: Graph) -> bool:
    """Whether a monitor watches the processes: those that can be restarted, and groups, whose requests can move without the run's end."""
    return graph.reliability.detector and bool(survivable_processes(graph) or graph.model is not None)


def neighbours(graph: Graph) -> dict[str, tuple[str, ...]]:
    """process -> the others that share an edge with it, in the graph's order; a process without any is left out."""
    found: dict[str, dict[str, None]] = {}
    for edge in graph.edges.values():
        if graph.crosses(edge):
            source, target = graph.ends_of(edge)
            found.setdefault(source, {})[target] = None
            found.setdefault(target, {})[source] = None
    return {process: tuple(others) for process, others in found.items()}
