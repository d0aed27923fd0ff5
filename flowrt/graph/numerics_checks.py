"""Checks the numerics of a graph's roles, and what strict ones need. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from flowrt.graph.document import Path_
from flowrt.graph.kinds import Keeps
from flowrt.graph.model import Graph, role_of
from flowrt.graph.notation import nearest
from flowrt.graph.numerics import is_strict, processes_of_one_thread_count, strict_processes
from flowrt.graph.recovery import attention_groups, keeps_of, pipelines, prefill_workers


def check_numerics(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Path of a key in the explicit form, and what is wrong with it."""
    yield from _check_roles(graph)
    strict = strict_processes(graph)
    if not strict:
        return
    numbers: dict[int, str] = {}
    bound = processes_of_one_thread_count(graph)
    for process, number in graph.threads.items():
        if number != "auto" and process in bound:
            numbers.setdefault(number, process)
    if len(numbers) > 1:
        found = " and ".join(str(number) for number in sorted(numbers))
        text = f"strict numerics need the same number of threads everywhere, got {found}; write one number"
        yield ("threads", list(numbers.values())[1]), text
    for process, device in graph.devices.items():
        if device != "cpu" and process in strict:
            text = f"strict numerics need CPUs, process {process} computes on {device}; write cpu, or numerics: fast"
            yield ("devices", process), text
    yield from _check_limits(graph)


def _check_roles(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Only processes of sequences have numerics of their own, and those among which a request may choose have the same."""
    roles = set(map(role_of, pipelines(graph)))
    for role in graph.role_numerics:
        if role not in roles:
            text = f"no process with the role {role!r} computes sequences, and expert servers follow their clients"
            yield ("role_numerics", role), f"{text}; {nearest(role, roles)}"
    for what, processes in (("prefill workers", prefill_workers(graph)), ("attention groups", attention_groups(graph))):
        differing = next((each for each in processes if is_strict(graph, each) != is_strict(graph, processes[0])), None)
        if differing is not None:
            text = f"any of the {what} {processes[0]} and {differing} may get a request, and one is strict, the other fast"
            yield ("role_numerics",), f"{text}; write the same for both roles"
    for edge in graph.edges.values() if graph.role_numerics else ():
        source, target = graph.nodes[edge.source], graph.nodes[edge.target]
        is_transfer = source.kind.kv and target.kind.kv
        is_one = all(keeps_of(node) not in (Keeps.NOTHING, Keeps.UNKNOWN) for node in (source, target)) and not is_transfer
        if is_one and is_strict(graph, source.process) != is_strict(graph, target.process):
            text = f"{source.process} and {target.process} compute the same sequences, and one is strict, the other fast"
            yield ("role_numerics",), f"{text}; write the same for both roles"
            return


def _check_limits(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Strict roles need pages of one size, and chunks that fit into a step."""
    processes = [process for process in pipelines(graph) if is_strict(graph, process)]
    roles = list(dict.fromkeys(map(role_of, processes)))
    sizes = {role: graph.limits.of_role(role).page_size for role in roles}
    for role in roles:
        other = next((each for each in roles if sizes[each] != sizes[role]), None)
        if other is not None and role in graph.limits.roles:
            text = f"strict numerics need pages of one size, got {sizes[role]} here and {sizes[other]} for {other}; write one"
            yield ("limits", "roles", role, "page_size"), text
    for limits in (graph.limits.of_role(role) for role in roles):
        if limits.chunk_tokens > limits.max_num_batched_tokens:
            text = f"a chunk of {limits.chunk_tokens} tokens exceeds limits.max_num_batched_tokens {limits.max_num_batched_tokens}"
            yield ("limits", "chunk_tokens"), f"{text}; write {limits.max_num_batched_tokens} or less"
