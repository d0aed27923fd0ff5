"""Chooses the OS process of each worker, its number of compute threads, and the transport of each edge. Starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flowrt.graph.model import GATEWAY, Edge, Graph
from flowrt.graph.notation import parse_ids
from flowrt.graph.settings import HostSettings
from flowrt.transports.errors import AddressError
from flowrt.transports.registry import base_scheme, module_of, transport_class

LOCAL = "local"  # an edge inside one worker: it never leaves the runner
AUTO = "auto"
WITHIN = "inproc"  # between workers of one OS process
BETWEEN = ("shm", "zmq")  # between OS processes: what `auto` tries, best first
BETWEEN_HOSTS = ("zmq",)  # the same between hosts; each encrypts
BETWEEN_TRUSTED_HOSTS = ("ucx", "zmq")  # the same between hosts in networks that are named as trusted
NUM_NAMES_SHOWN = 3

# Of a scheme: None when it works here, else a sentence with the reason why not. Raises AddressError for an unknown scheme.
UnavailableReason = Callable[[str], str | None]


def pack(graph: Graph) -> list[list[str]]:
    """The workers of each OS process to start, in order; [] when all live in the launching process (`processes: one`).

    `many`: one worker each. N: workers dealt round-robin to min(N, number of workers) processes.
    """
    names = graph.process_names()
    if graph.processes == "one":
        return []
    if graph.processes == "many":
        return [[name] for name in names]
    count = min(graph.processes, len(names))
    return [names[start::count] for start in range(count)]


def process_name(workers: Sequence[str]) -> str:
    """Name of an OS process in logs: its workers joined by "+", or "first+N others" when they are more than NUM_NAMES_SHOWN."""
    if len(workers) <= NUM_NAMES_SHOWN:
        return "+".join(workers)
    return f"{workers[0]}+{len(workers) - 1} others"


def num_threads(graph: Graph, workers: Sequence[str], processes: Sequence[Sequence[str]], num_cores: int) -> int:
    """Compute threads of one of the OS `processes` of a host: the largest number that any of its workers wants; `auto` is a fair share of
    the cores, at least 1.

    A single tag in flight is in one place at a time. Then a process shares the cores only with processes that run the same operators.
    A process with cores of its own has a thread for each.
    """
    sharing = len(processes)
    if graph.tags_in_flight() == 1:
        operators = _operators(graph, workers)
        sharing = sum(1 for others in processes if operators & _operators(graph, others))
    own_cores = max((len(parse_ids(graph.cores[name])) for name in workers if name in graph.cores), default=0)
    share = own_cores or max(1, num_cores // max(1, sharing))
    wishes = [graph.threads.get(name, AUTO) for name in workers]
    return max((share if wish == AUTO else int(wish) for wish in wishes), default=share)


def _operators(graph: Graph, workers: Sequence[str]) -> set[str]:
    return {node.operator for name in workers for node in graph.nodes_of(name)}


def choose_transports(graph: Graph, unavailable_reason: UnavailableReason) -> Graph:
    """`graph` with every edge's transport resolved.

    An edge inside one worker gets `local`. Any other edge gets the transport of the graph file; `auto` is inproc inside one OS process,
    and the first working one of BETWEEN otherwise. A transport is checked only when an edge may use it, because the check loads its
    library. Raises GraphError when an edge has no transport that works.
    """
    os_process_of = {name: index for index, workers in enumerate(pack(graph)) for name in workers}
    edges = {}
    for edge in graph.edges.values():
        is_auto = base_scheme(edge.transport) == AUTO  # `faulty+auto?drop@100` is auto too
        chosen = _choose(
            graph, replace(edge, transport=AUTO) if is_auto and edge.transport != AUTO else edge, os_process_of, unavailable_reason
        )
        if is_auto and chosen not in (LOCAL, WITHIN):
            hosts = _hosts_of(graph, edge)
            edge = replace(edge, why=_explain_choice(chosen, _tried(graph, hosts), hosts, unavailable_reason))
        transport = edge.transport.replace(AUTO, chosen, 1) if is_auto and chosen != LOCAL else chosen
        edges[edge.name] = edge if transport == edge.transport else replace(edge, transport=transport)
    return graph.replace(edges=edges)


def _hosts_of(graph: Graph, edge: Edge) -> tuple[str, ...]:
    """The hosts of an edge's ends: one or two."""
    return tuple(sorted({graph.host_of(_process_of(graph, end)) for end in (edge.source, edge.target)}))


def tried_between(hosts: HostSettings | None) -> tuple[str, ...]:
    """What `auto` tries between two hosts, best first."""
    return BETWEEN_TRUSTED_HOSTS if hosts is not None and hosts.trusted else BETWEEN_HOSTS


def _tried(graph: Graph, hosts: Sequence[str]) -> tuple[str, ...]:
    return BETWEEN if len(hosts) == 1 else tried_between(graph.hosts)


def _explain_choice(chosen: str, tried: Sequence[str], hosts: Sequence[str], unavailable_reason: UnavailableReason) -> str:
    """One line on why `auto` chooses this transport between two OS processes."""
    how = "encrypted" if chosen in BETWEEN_HOSTS else "in a network named as trusted"
    clauses = [f"{chosen}, the fastest that both ends have" if len(hosts) == 1 else f"{chosen}, {how}, between {' and '.join(hosts)}"]
    clauses += [f"not {scheme}: {unavailable_reason(scheme)}" for scheme in tried[: tried.index(chosen)]]
    return "; ".join(clauses)


def transport_modules(graph: Graph) -> tuple[str, ...]:
    """The modules of the transports of `graph` that can be imported before a fork."""
    schemes = {base_scheme(edge.transport) for edge in graph.edges.values()}
    return tuple(module_of(scheme) for scheme in BETWEEN if scheme in schemes)


def _choose(graph: Graph, edge: Edge, os_process_of: Mapping[str, int], unavailable_reason: UnavailableReason) -> str:
    source, target = _process_of(graph, edge.source), _process_of(graph, edge.target)
    if source == target:
        return LOCAL
    same_process = os_process_of.get(source) == os_process_of.get(target)  # neither has one: both live in the launching process
    if same_process and edge.transport in (AUTO, WITHIN):
        return WITHIN
    key, hosts = f"edges.{edge}.transport", _hosts_of(graph, edge)
    if edge.transport == AUTO:
        tried = _tried(graph, hosts)
        for scheme in tried:
            if unavailable_reason(scheme) is None:
                return scheme
        reasons = "; ".join(f"{scheme}: {unavailable_reason(scheme)}" for scheme in tried)
        raise graph.error(key, f"no transport between processes works here ({reasons}); `processes: one` needs none")
    if edge.transport == WITHIN:
        text = f"{WITHIN} reaches only inside one OS process, and {source} and {target} are two; use auto, or `processes: one`"
        raise graph.error(key, text)
    try:
        reason = unavailable_reason(edge.transport)
    except AddressError as error:  # unknown, or with a fault plan that cannot be parsed
        raise graph.error(key, str(error)) from None
    if reason is not None:
        raise graph.error(key, f"transport {edge.transport} cannot be used here: {reason}")
    if len(hosts) == 2 and (problem := _problem_between_hosts(graph, edge.transport)) is not None:
        text = f"{edge.transport} {problem[0]}: {source} is on {graph.host_of(source)}, {target} on {graph.host_of(target)}"
        raise graph.error(key, f"{text}; {problem[1]}")
    return edge.transport


def _problem_between_hosts(graph: Graph, transport: str) -> tuple[str, str] | None:
    """Why a transport cannot be used between two hosts, and what to do."""
    reach = transport_class(base_scheme(transport)).capabilities.between_hosts
    if reach == "no":
        return "does not reach other hosts", "use auto"
    if reach == "trusted" and not (graph.hosts is not None and graph.hosts.trusted):
        return "does not encrypt", "use auto, or name the network between the hosts in hosts.trusted if only they reach it"
    return None


def _process_of(graph: Graph, node: str) -> str:
    """The process of a node; the pseudo-nodes of a user's graph belong to the gateway."""
    return graph.nodes[node].process if node in graph.nodes else GATEWAY
