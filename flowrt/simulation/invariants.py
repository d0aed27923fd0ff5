"""Checks the invariants that hold after every run, whatever its faults. Raises InvariantError with the number of the violated one.

I1 Tokens have the indexes 0 to n-1, each once, and equal the reference up to the first token that is marked as degraded.
I2 No message of an old epoch or incarnation has an effect; a violation shows as I1, I3 or I4.
I3 Each page is free or held once.
I4 Free and outstanding credits add up to the window size.
I5 Every request ends, once, in time.
I6 Queues stay within their bounds; the code checks this itself.
I7 A process without a fault is not marked dead.
I8 No state is left behind.
I9 The clocks of other hosts are known as exactly as stated.
I10 On emulated hardware nothing is faster than its model; modelled_time.py checks this.
I11 Every token is one that its request's structured outputs, allowed tokens and bad words allow behind the earlier ones. An output that
has ended by a token matches its structured outputs as a whole.

The checks of internal worker state are in inside.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from flowrt.gateway.completion import Completion
from flowrt.graph.model import FORK_SERVER, FRONT_END, GATEWAY, MONITOR, Graph
from flowrt.graph.recovery import attention_groups, expert_servers, pipelines, standby_names, survivable_processes
from flowrt.launcher.transport_choice import pack, process_name
from flowrt.reliability.scenario import AnyFault, Crash, Hang, Pause, Scenario, Skew, Stall
from flowrt.simulation.case import Case, Poison
from flowrt.simulation.constrained import ends_output, first_mismatch, is_whole
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.served import CONNECTION_TEXT, UNREADABLE_TEXT, ClientRecord, Served

LOOKED_SECONDS = 0.05  # an outage may have begun this long before it was observed
KILLED_TEXT = "expert servers died or hung again and again"  # in the error of a request that is presumed to have killed servers
FATAL_LOSSES = 3  # servers lost within one step: by coincidence this looks like a request that kills servers
LOST_TEXT = "no replica is left of expert"  # in the error of a request that ends for a lost expert

NO_GROUP_TEXT = "no attention group is left to serve the request"  # in the error of a request that has waited too long for a group
ALONE_TEXT = "while it computed this request alone"  # in the error of a request that is presumed to have killed its group
FAILED_TEXT = "a step of this request failed twice"  # in the error of a request whose operators raise
NOT_FINITE_TEXT = "were not finite (NaN or infinity) twice"  # in the error of a request without finite logits
MAX_VICTIMS = 4  # processes that a request may end: at first beside others, then alone, while others do so and while none does
DRAINING_TEXT = "the graph is draining"
FULL_TEXT = "too many active requests"
LATE_TEXT, ENDED_TEXT = "the graph does not respond", "the server has ended"  # of front ends

Reference = tuple[tuple[int, ...], ...]  # the token ids of each choice of a request


def processes_hit(graph: Graph, fault: AnyFault) -> tuple[str, ...]:
    """The processes that a fault hits, with those on a host that it hits."""
    return (*fault.processes, *(name for name, host in graph.process_hosts.items() if host in fault.processes))


def mortal(graph: Graph) -> frozenset[str]:
    """The workers whose OS process may die: every worker in that process may die."""
    survivable = survivable_processes(graph)
    return frozenset(name for host in pack(graph) if survivable.issuperset(host) for name in host)


def mortal_in(case: Case) -> frozenset[str]:
    """The workers whose OS process may die, in any graph that the run may have."""
    return frozenset[str]().union(*map(mortal, case.graphs))


def may_fail(case: Case) -> frozenset[str]:
    """The processes whose failure may end the run: those hit by a fault that neither heals nor is survived, and the workers in the same
    OS process."""
    return _with_cohosted(
        case.graph, {name for fault in case.scenario.faults if _is_fatal(case, fault) for name in processes_hit(case.graph, fault)}
    )


def may_not_start(case: Case) -> set[str]:
    """The processes for which the start may fail: a process that dies while it loads may be out of its restart budget. An error of the
    system names no process."""
    graph, names = case.graph, set[str]()
    if case.faults_from_launch:
        names |= _with_cohosted(graph, {name for fault in case.scenario.faults for name in processes_hit(graph, fault)})
        names |= {""} if case.processes.no_descriptor_one_in else set()
    if case.processes.refuses_first:
        names |= {FORK_SERVER, "", *graph.process_names(), *map(process_name, pack(graph))}
    return names


def _is_held_up(case: Case, served: Served) -> bool:
    """Whether a process that waits, while it connects, for one that stands still may be named in its place: nothing watches either yet."""
    stands_still = any(isinstance(fault, Pause | Stall | Hang) for fault in case.scenario.faults)
    return case.faults_from_launch and stands_still and "while connecting, nor did" in str(served.failure)


def _with_cohosted(graph: Graph, names: set[str]) -> frozenset[str]:
    """These workers, those in the same OS processes, and these processes."""
    return frozenset(names.union(*((*host, process_name(host)) for host in pack(graph) if names & set(host))))


def _is_fatal(case: Case, fault: AnyFault) -> bool:
    """Whether the fault may end the run. A standstill never does: a group is fenced. A lost connection does if neither end may die. A host
    that stops, or is cut off, may be lost with all its processes."""
    if lost_with_host := set(processes_hit(case.graph, fault)) - set(fault.processes):
        return not mortal_in(case) >= lost_with_host
    if fault.heals or isinstance(fault, Pause | Stall | Hang):
        return False
    return (mortal_in(case) | {MONITOR, FORK_SERVER, *standby_names(case.graph), *front_ends_of(case)}).isdisjoint(
        processes_hit(case.graph, fault)
    )


def front_ends_of(case: Case) -> tuple[str, ...]:
    return tuple(f"{FRONT_END}.{number}" for number in range(case.front_ends))


def _may_lose_front_end(case: Case, client: ClientRecord) -> bool:
    """Whether a fault hit the client's front end, or all when it had none, or the way from there to the gateway."""
    names = {client.front_end} if client.front_end else {*front_ends_of(case)}
    return bool(case.front_ends) and any(not names.isdisjoint(fault.processes) for fault in case.scenario.faults)


def _may_be_late(case: Case, client: ClientRecord) -> bool:
    """Whether a fault stopped the gateway or the client's front end, or delayed the messages between them."""
    names = {client.front_end, GATEWAY}
    return any(not isinstance(fault, Crash) and not names.isdisjoint(fault.processes) for fault in case.scenario.faults)


def check(case: Case, served: Served, references: Sequence[Reference]) -> None:
    """Raise InvariantError unless `served` is a correct outcome.

    Correct are the right tokens; or, where a fault permits it, an error that names the failed process, in time, with all requests ended
    and all tokens up to then correct. A single request may end with an error, or be marked as degraded (the graph determines which),
    only if an expert had no replica for the time that the graph specifies. The start may fail for certain processes only.
    """
    graph, scenario = case.graph, case.scenario
    if served.failure is not None and not ((served.failed in may_not_start(case) or _is_held_up(case, served)) and not served.clients):
        culprits = frozenset[str]() if scenario.expect == "tokens" else may_fail(case)
        if served.failed not in culprits:
            raise InvariantError(
                "I7", f"the run failed for {served.failed}, and no fault that permits it hit that process: {served.failure}"
            )
        latest = scenario.ends_seconds + scenario.deadline_seconds
        if served.failed_seconds is not None and served.failed_seconds > latest:
            raise InvariantError("I5", f"the failure was reported after {served.failed_seconds:.3f} s, allowed were {latest:.3f} s")
    if len(served.clients) < len(case.requests) and served.failure is None:
        raise InvariantError("I5", f"{len(served.clients)} of {len(case.requests)} requests were submitted")
    allowed = max_victims(case) * _num_poisoned(case, served) + max(0, served.num_poison_parts - 1)  # a step may end a server with each
    if served.num_poisoned > allowed and not scenario.faults:
        raise InvariantError("I1", f"{served.num_poisoned} processes computed the poison, allowed are {allowed}")
    for index, (client, reference) in enumerate(zip(served.clients, references, strict=False)):
        if client.num_ends != 1 or client.has_events_after_end:
            raise InvariantError("I5", f"request {index} ended {client.num_ends} times, or had events after an end")
        reason, error = client.finish_reason, client.error or ""
        lost = _lost_long_enough(case, client)
        degrades = graph.reliability.unavailable_expert == "degrade"
        permitted = {  # text of an error -> whether it may occur
            LOST_TEXT: lost and not degrades,
            # A group to which the gateway's link is slow learns no cause in time, and counts the crashes of another request.
            KILLED_TEXT: _num_server_losses(case) + (served.num_poisoned if scenario.faults else 0) >= FATAL_LOSSES,
            NO_GROUP_TEXT: _no_group_long_enough(case, client),
            # One of two crashes may count although the group began after it: it learns of the death later than the launcher. Without an
            # expert another request may produce the poison, too: then two unrelated crashes may hit a third one.
            ALONE_TEXT: client.crashes_alone > 0
            and (_computes(case.poison, None, client, reference) or len(scenario.faults) > 1 or _num_poisoned(case, served) > 1),
            FAILED_TEXT: _computes(case.poison, "raise", client, reference) or (case.glitch is not None and _num_server_losses(case) > 0),
            NOT_FINITE_TEXT: _computes(case.poison, "nan", client, reference),
            DRAINING_TEXT: case.drain_seconds is not None,
            FULL_TEXT: len(case.requests) > case.max_requests,
            UNREADABLE_TEXT: client.request.is_unreadable,
            CONNECTION_TEXT: _may_lose_front_end(case, client),
            ENDED_TEXT: _may_lose_front_end(case, client),
            LATE_TEXT: _may_be_late(case, client),
        }
        may_fail_alone = any(text in error for text, is_permitted in permitted.items() if is_permitted)
        broken_off = (reason == "abort" and client.request.may_leave) or (
            reason == "error" and bool(error) and (served.failure is not None or may_fail_alone)
        )
        if client.end is not None and not (reason == "error" and not any(client.choices)):
            completion = Completion.of(client.request.prompt_token_ids, client.events)
            expected = 0 if client.request.params.logprobs is None else len(completion.token_ids)
            if len(completion.logprobs) != expected or len(completion.top_logprobs) != expected:
                raise InvariantError("I1", f"request {index}: {len(completion.logprobs)} logprobs of {len(completion.token_ids)} tokens")
            scores = client.request.params.prompt_logprobs is not None and completion.token_ids
            if len(completion.prompt_logprobs) != (len(completion.prompt_token_ids) - 1 if scores else 0):
                raise InvariantError("I1", f"request {index}: {len(completion.prompt_logprobs)} logprobs of its prompt")
            if client.log not in (None, (completion.token_ids, completion.choices[0].text)):
                raise InvariantError("I1", f"request {index}: its log has {client.log}, its client {completion.token_ids}")
            if completion.token_ids != client.choices[0] or completion.degraded != any(client.degraded):
                raise InvariantError("I1", f"request {index}: its completion has {completion.token_ids}, its events {client.choices[0]}")
        if any(client.degraded) and not (lost and degrades):
            raise InvariantError("I1", f"request {index} is marked as degraded, and no expert was lost for so long that it may be")
        if not broken_off and reason not in ("length", "stop"):
            raise InvariantError("I1", f"request {index} ended with {reason or 'nothing'}: {client.error}")
        _check_tokens(index, client, reference, whole=not broken_off)
        _check_constraints(case, index, client)


def _computes(poison: Poison | None, effect: str | None, client: ClientRecord, reference: Reference) -> bool:
    """Whether the request computes a poison with this effect, or (None) any. Without an expert it may compute other tokens than the
    reference."""
    tokens = {*client.request.prompt_token_ids, *(token for choice in reference for token in choice[:-1])}.union(*client.choices)
    return poison is not None and effect in (None, poison.effect) and poison.token_id in tokens


def _num_poisoned(case: Case, served: Served) -> int:
    """How many requests have the poison, at least one. Without an expert others may produce it, too; a warm-up has a prompt for each group
    that may have any token."""
    tokens = [{*client.request.prompt_token_ids}.union(*client.choices) for client in served.clients]
    num_warm_up = len(pipelines(case.graph)) if case.graph.jitter.warm_up else 0
    return max(1, num_warm_up + sum(case.poison is not None and case.poison.token_id in each for each in tokens))


def max_victims(case: Case) -> int:
    """How many processes a request may end. A server that hangs is late first, so that another one gets the part, too. One that crashes
    while it still has parts of a step that was rolled back may have crashed over these, so that its crash does not count against the one
    that runs alone. A group that leaves the graph forgets which requests it had when a server died: they run beside others once more."""
    groups = [{*attention_groups(graph)} for graph in case.graphs]
    has_group_left = any(before - after for before, after in pairwise(groups))
    return MAX_VICTIMS + (case.poison is not None and case.poison.effect in ("part", "hung_part")) + has_group_left


def _num_server_losses(case: Case) -> int:
    """The maximum number of expert server losses that the faults can cause."""
    servers = {*standby_names(case.graph)}.union(*map(expert_servers, case.graphs))
    return sum(len(servers.intersection(processes_hit(case.graph, fault))) for fault in case.scenario.faults)


def _lost_long_enough(case: Case, client: ClientRecord) -> bool:
    """Whether an expert was unavailable long enough to end the request, measured by the fastest clock of the scenario."""
    lost_seconds = fastest_clock(case.scenario) * (client.outage_seconds + LOOKED_SECONDS)
    return case.scenario.expect != "tokens" and lost_seconds >= case.graph.reliability.unavailable_expert_seconds


def _no_group_long_enough(case: Case, client: ClientRecord) -> bool:
    """Whether no group was left long enough to end the request. The gateway measures it, whose clock has the right rate."""
    return case.scenario.expect != "tokens" and client.no_group_seconds + LOOKED_SECONDS >= case.graph.reliability.lost_group_seconds


def fastest_clock(scenario: Scenario) -> float:
    """The highest rate of any clock."""
    return max([1.0, *(fault.rate for fault in scenario.faults if isinstance(fault, Skew))])


def _check_constraints(case: Case, index: int, client: ClientRecord) -> None:
    assert case.graph.model is not None
    directory, params = Path(case.graph.model.path), client.request.params
    for choice, tokens in enumerate(client.choices):
        has_ended = bool(tokens) and ends_output(directory, params, tokens[-1])
        if has_ended and not is_whole(directory, params.structured_outputs, tokens[:-1]):
            raise InvariantError("I11", f"request {index} choice {choice} ended with {tokens}, which do not match its structured outputs")
        if (wrong := first_mismatch(directory, params, tokens)) is not None:
            raise InvariantError(
                "I11", f"request {index} choice {choice} gave {tokens}, which its constraint forbids from token {wrong} on"
            )


def _check_tokens(index: int, client: ClientRecord, reference: Reference, whole: bool) -> None:
    if len(client.choices) != len(reference):
        raise InvariantError("I1", f"request {index} has {len(client.choices)} choices of {len(reference)}")
    for choice, (ours, theirs, marked) in enumerate(zip(client.choices, reference, client.degraded, strict=True)):
        indexes = [event.index for event in client.tokens(choice)]
        which = f"request {index}" + (f" choice {choice}" if choice else "")
        if indexes != list(range(len(ours))):
            raise InvariantError("I1", f"{which}: its client received the indexes {indexes}")
        if marked:  # from the first degraded token on, any token and any end is valid
            ours, theirs = ours[: marked[0]], theirs[: marked[0]]
        if ours != (theirs if whole else theirs[: len(ours)]):
            raise InvariantError("I1", f"{which} gave {ours}, the reference {theirs}")
