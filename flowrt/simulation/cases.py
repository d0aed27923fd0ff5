"""Draws a case from a seed (graph, requests, network conditions and faults), runs it, and checks its invariants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from flowrt.engine.validation import num_new_tokens
from flowrt.errors import UserError
from flowrt.gateway.decisions import SendRequest
from flowrt.gateway.gateway import Gateway, ServedModel
from flowrt.gateway.stages import Stages
from flowrt.graph.kinds import all_kinds
from flowrt.graph.model import FORK_SERVER, Graph
from flowrt.graph.numerics import numerics_text
from flowrt.graph.recovery import is_watched, pipelines
from flowrt.launcher.model_facts import facts_of
from flowrt.launcher.starts import FORK_SECONDS
from flowrt.reliability import scenario as kinds
from flowrt.reliability.scenario import Scenario
from flowrt.sampling_params import SamplingParams
from flowrt.simulation.calls import AnyServed, Result, check_calls, simulate_calls
from flowrt.simulation.case import Case, Glitch, Poison, SimulatedCall, SimulatedRequest
from flowrt.simulation.changes import draw_changes
from flowrt.simulation.cluster import config_of
from flowrt.simulation.constrained import drawn_constraints
from flowrt.simulation.drawn_graphs import draw_graph
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.fault_draws import (
    draw_broken_link,
    draw_change_faults,
    draw_early_deaths,
    draw_early_stop,
    draw_faults,
    draw_front_end_faults,
    draw_host_faults,
    draw_standby_faults,
)
from flowrt.simulation.inside import EXACT_MODEL
from flowrt.simulation.invariants import Reference, check, front_ends_of
from flowrt.simulation.invariants import mortal as mortal_workers
from flowrt.simulation.launchers import simulate
from flowrt.simulation.log_disk import DeathKind, LauncherDeath, LogConditions
from flowrt.simulation.network_conditions import CALM, NetworkConditions
from flowrt.simulation.outages import holders_of
from flowrt.simulation.processes import ProcessConditions
from flowrt.simulation.served import ClientRecord
from flowrt.simulation.simulated_seams import ComputeDelays
from flowrt.simulation.world import Outcome

USERS_SHARE = 0.16  # of the seeds, where there are model graphs too
NUM_VALUES = 24  # of the inputs of calls; few, so that each is computed alone once
DRAIN_SHARE = 0.1
POISON_SHARE = 0.18  # of the seeds with a model graph
HUNG_PART_SHARE = 0.08
GLITCH_SHARE = 0.12
FRONT_ENDS_SHARE = 0.08
GLITCHED = frozenset(kind.name for kind in all_kinds().values() if kind.parts or kind.combines)
CHANGES_SHARE = 0.8  # of the seeds; one in seven of them can change
LOG_SHARE, LOG_SHARE_OF_FRONT_ENDS = 0.2, 0.5
POOL = 18  # different requests; few, so that their references are computed once for all seeds
_COSTS = (ComputeDelays(), ComputeDelays(1e-6, 2e-5, 1), ComputeDelays(1e-4, 2e-2, 0), ComputeDelays(1e-6, 5e-3, 3))


def draw(
    seed: int,
    graphs: Sequence[Graph],
    scenario: Scenario | None = None,
    exact: bool = True,
    num_cancelled: int = 0,
    draws_graphs: bool = False,
) -> Case:
    """The case of a seed. `scenario` takes the place of drawn faults, and leaves the graph's reliability settings as they are written.
    `num_cancelled`: so many more requests, whose clients cancel them at random moments. `draws_graphs`: a drawn deployment takes the place
    of that of the graph, if it has a model."""
    chance = random.Random(f"case {seed}")
    models = [graph for graph in graphs if graph.model is not None]
    users = [graph for graph in graphs if graph.model is None]
    if users and (not models or random.Random(f"users {seed}").random() < USERS_SHARE):
        return _draw_calls(seed, users, scenario)
    graph = models[chance.randrange(len(models))]
    if draws_graphs:
        graph = draw_graph(seed, graph)
    processes, faults_from_launch = ProcessConditions(), False
    drawn = scenario is None
    if scenario is None:
        graph = _draw_reliability(random.Random(f"reliability {seed}"), graph)
        graph, processes, faults_from_launch = _draw_processes(random.Random(f"processes {seed}"), graph)
        graph = _draw_transfers(random.Random(f"transfers {seed}"), graph)
    requests = _draw_requests(random.Random(f"requests {seed}"), graph)
    conditions, cost = _draw_conditions(chance), chance.choice(_COSTS)
    if scenario is None:
        faults = draw_faults(random.Random(f"faults {seed}"), graph)
        servers = sorted(mortal_workers(graph))
        if faults_from_launch and servers:
            faults += draw_early_deaths(random.Random(f"early {seed}"), graph, servers)
        faults += draw_standby_faults(random.Random(f"standby {seed}"), graph)
        faults += draw_broken_link(random.Random(f"broken {seed}"), graph)
        faults += draw_host_faults(random.Random(f"hosts {seed}"), graph)
        if faults_from_launch and servers and graph.processes != "one" and (stop := random.Random(f"early stop {seed}")).random() < 0.4:
            graph = graph.replace(reliability=graph.reliability.replace(detector=True))
            faults = draw_early_stop(stop, servers)
        scenario = Scenario(faults=tuple(faults))
        if any(fault.processes == (FORK_SERVER,) and fault.ends_seconds > fault.at_seconds + FORK_SECONDS for fault in faults):
            requests = (*requests[:-1], _arriving_late(requests[-1], 3 * FORK_SECONDS))  # the run lasts until it is replaced
    requests += _draw_cancelled(random.Random(f"cancelled {seed}"), graph, num_cancelled)
    max_requests = chance.choice((1024, 1024, 1024, 1024, 2))
    case = Case(graph, requests, scenario, seed, conditions, cost, processes, exact, faults_from_launch, max_requests)
    if drawn and (drains := random.Random(f"drain {seed}")).random() < DRAIN_SHARE:
        case = replace(case, drain_seconds=10 ** drains.uniform(-3, 0))
    if not exact or not drawn:
        return case
    case = _draw_front_ends(random.Random(f"front ends {seed}"), case)
    case = _draw_glitch(random.Random(f"glitch {seed}"), _draw_poison(random.Random(f"poison {seed}"), case))
    case = _draw_log(random.Random(f"log {seed}"), _draw_hung_part(random.Random(f"hung {seed}"), case))
    return _draw_changes(random.Random(f"changes {seed}"), case)


def _draw_changes(chance: random.Random, case: Case) -> Case:
    """In some cases the graph changes while it runs, and processes that join or leave, and others, crash meanwhile."""
    model = case.graph.model
    if chance.random() >= CHANGES_SHARE or model is None or case.processes.refuses_first:
        return case
    graph = case.graph
    changes = draw_changes(chance, graph, lambda: facts_of(Path(model.path)))
    if not changes:
        return case
    faults = (*case.scenario.faults, *draw_change_faults(chance, (graph, *(change.graph for change in changes)), changes[0].at_seconds))
    return replace(case, changes=changes, scenario=msgspec.structs.replace(case.scenario, faults=faults))


def _draw_front_ends(chance: random.Random, case: Case) -> Case:
    """In some cases the clients come by way of front ends, which most faults hit then."""
    if chance.random() >= FRONT_ENDS_SHARE or case.faults_from_launch or case.processes.refuses_first:
        return case
    case = replace(case, front_ends=chance.choice((1, 2, 2)))
    others = case.scenario.faults if chance.random() < 0.4 else ()
    faults = draw_front_end_faults(chance, case.graph, front_ends_of(case))
    return replace(case, scenario=msgspec.structs.replace(case.scenario, faults=(*others, *faults)))


def _draw_poison(chance: random.Random, case: Case) -> Case:
    """In some cases one of the requests contains, or produces, a token that ends each process that computes it; often without any other
    fault. No other request has this token."""
    graph = case.graph
    groups = set(pipelines(graph))
    if chance.random() >= POISON_SHARE or not mortal_workers(graph) >= groups or not case.requests:
        return case
    victim = chance.randrange(len(case.requests))
    own = _own_tokens(case, victim)
    if len(references_of(case)[victim]) > 1:  # one choice alone, if possible
        own = own.difference(case.requests[victim].prompt_token_ids) or own
    if not own:
        return case
    scenario = Scenario() if chance.random() < 0.6 else case.scenario
    effects: list[Literal["crash", "hang", "part", "raise", "nan"]] = ["crash", "raise", "nan"]
    if graph.processes == "many":
        effects += ["hang", "hang"] if is_watched(graph) else []
        effects += ["part", "part", "part"] if _may_lose_servers(graph) else []
    case = replace(case, scenario=scenario, poison=Poison(chance.choice(sorted(own)), chance.choice(effects)))
    # With channels of a single message, tokens and reports wait in the process that the poison is about to end.
    return replace(case, conditions=replace(case.conditions, tiny_one_in=chance.choice((case.conditions.tiny_one_in, 1))))


def _own_tokens(case: Case, victim: int) -> set[int]:
    """The tokens that no other request computes."""
    computed = [
        {*request.prompt_token_ids, *(token for choice in reference for token in choice[:-1])}
        for request, reference in zip(case.requests, references_of(case), strict=True)
    ]
    return computed[victim].difference(*(tokens for number, tokens in enumerate(computed) if number != victim))


def _may_lose_servers(graph: Graph) -> bool:
    """Whether some group sends parts to other processes, and every process may die."""
    requests = [edge for edge in graph.edges.values() if graph.nodes[edge.target].kind.holds_experts and graph.crosses(edge)]
    return bool(requests) and mortal_workers(graph) >= set(graph.process_names())


def _draw_hung_part(chance: random.Random, case: Case) -> Case:
    """In some cases a token of one request hangs each server that gets its part, without any other fault. A hung server is late first. So
    the token is produced while others run, when response times are known. Policies other than `fine` end the server that has the hedge;
    where experts are omitted, another request may produce the token."""
    reliability = case.graph.reliability.replace(detector=True, hedge=True, recovery="fine", restarts=3, unavailable_expert="error")
    limits = case.graph.limits.replace(max_num_seqs=12, kv_pages=96)  # several requests in a batch
    graph = case.graph.replace(processes="many", reliability=reliability, limits=limits)
    if chance.random() >= HUNG_PART_SHARE or not _may_lose_servers(graph):
        return case
    assert graph.model is not None
    config, params = config_of(graph.model.path), SamplingParams(max_tokens=6, ignore_eos=True)
    if any(len(servers) < 2 for holders in holders_of(graph, config).values() for servers in holders):
        return case  # no server takes hedges
    apart = [0.0] * chance.randint(8, 12) + [10 ** chance.uniform(-2.5, -1.2)]
    prompts = chance.sample(range(config.vocab_size), len(apart))
    requests = tuple(SimulatedRequest((token,), params, after_seconds=each) for token, each in zip(prompts, apart, strict=True))
    drawn = Case(graph, requests, seed=case.seed)
    own = sorted(_own_tokens(drawn, len(requests) - 1).difference(prompts))
    return replace(drawn, poison=Poison(chance.choice(own), "hung_part")) if own else case


def _draw_glitch(chance: random.Random, case: Case) -> Case:
    """In some cases one result of one operator is wrong."""
    operators = sorted({node.operator for node in case.graph.nodes.values()} & GLITCHED)
    if chance.random() >= GLITCH_SHARE or not operators or case.poison is not None:
        return case
    glitch = Glitch(chance.choice(operators), chance.choice(("raise", "nan")), chance.randint(1, 60))
    return replace(case, scenario=Scenario() if chance.random() < 0.5 else case.scenario, glitch=glitch)


def _draw_log(chance: random.Random, case: Case) -> Case:
    """In some cases the run has a request log, and most of their launchers die, some of them twice: another one continues the requests."""
    share = LOG_SHARE_OF_FRONT_ENDS if case.front_ends else LOG_SHARE
    if chance.random() >= share or case.poison is not None or case.glitch is not None or case.processes.refuses_first:
        return case
    is_synced = chance.random() < 0.3
    kinds_of_death: list[DeathKind] = ["death", "torn write", "power loss" if is_synced else "torn write", "full disk"]
    count = 0 if case.front_ends or case.faults_from_launch else chance.choice((0, 1, 1, 1, 2))
    deaths = tuple(LauncherDeath(10 ** chance.uniform(-2.7, -0.4), chance.choice(kinds_of_death)) for _ in range(count))
    return replace(case, log=LogConditions(deaths, chance.choice((100, 1000, 1 << 20)), is_synced))


def _draw_conditions(chance: random.Random) -> NetworkConditions:
    return NetworkConditions(
        max_delay_seconds=chance.choice((50e-6, 400e-6, 5e-3)),
        slow_one_in=chance.choice((0, 50, 5)),
        duplicate_one_in=chance.choice((0, 40, 4)),
        tick_seconds=chance.choice((0.0, 50e-6, 1e-3)),
        tiny_one_in=chance.choice((0, 0, 3)),
    )


def run_case(case: Case) -> Outcome[AnyServed]:
    """Raises InvariantError, DeadlockError, LivelockError, UnhandledError, and what the code itself raises."""
    if case.graph.model is None:
        called = simulate_calls(case)
        check_calls(case, called.result, [_result_alone(case.graph, call.value) for call in case.calls])
        return called
    outcome = simulate(case)
    check(case, outcome.result, references_of(case))
    if case.exact:
        _check_prompt_logprobs(case, outcome.result.clients)
    return outcome


def _check_prompt_logprobs(case: Case, clients: Sequence[ClientRecord]) -> None:
    """Each token of a prompt has the logprob that it has alone."""
    module = import_module(EXACT_MODEL)
    for index, client in enumerate(clients):
        found = [each.token for event in client.tokens(0)[:1] for each in event.prompt_logprobs]
        if found and not any(client.degraded):
            alone = module.exact_prompt_logprobs(case.graph, client.request.prompt_token_ids)
            if len(found) != len(alone) or any(abs(ours - theirs) > 1e-9 for ours, theirs in zip(found, alone, strict=True)):
                raise InvariantError("I1", f"request {index}: its prompt has the logprobs {found}, the reference {alone}")


def _draw_processes(chance: random.Random, graph: Graph) -> tuple[Graph, ProcessConditions, bool]:
    """How workers share processes, how the system treats processes, and whether faults occur during the launch. In some cases, all
    links open at the start."""
    processes: int | Literal["one", "many"] = chance.choice(("many", "many", "many", "many", "many", "many", 2, 3, "one"))
    conditions = ProcessConditions(
        refused_one_in=chance.choice((0, 0, 3, 8)),
        no_descriptor_one_in=chance.choice((0, 0, 3, 8)),
        unseen_one_in=chance.choice((0, 1, 3)),
        refuses_first=chance.random() < 0.03,
        unserved_one_in=chance.choice((0, 0, 2)),
        segfault_one_in=chance.choice((0, 1, 2)),
    )
    if chance.random() < 0.3:
        graph = graph.replace(edges={name: replace(edge, open="start") for name, edge in graph.edges.items()})
    return graph.replace(processes=processes), conditions, chance.random() < 0.2


def _draw_reliability(chance: random.Random, graph: Graph) -> Graph:
    """Draws reliability settings: often no heartbeats, which take most of the steps; sometimes no recovery, so that no process may die."""
    return graph.replace(
        reliability=graph.reliability.replace(
            detector=chance.random() < 0.3,
            recovery=chance.choices(("fine", "restart_role", "restart_all", "off"), (58, 13, 13, 16))[0],
            unavailable_expert_seconds=chance.choice((0.1, 0.1, 1.0, 5.0)),
            lost_group_seconds=chance.choice((0.1, 0.5, 2.0, 10.0)),
            restarts=chance.choice((0, 1, 3, 3)),
            restart_window_seconds=chance.choice((0.5, 30.0)),
            hedge=chance.random() < 0.7,
            unavailable_expert=chance.choice(("error", "error", "degrade")),
            standby=chance.choice((0, 0, 1, 2)),
        ),
    )


def _draw_transfers(chance: random.Random, graph: Graph) -> Graph:
    """In some cases, groups pull the KV of prompts when it is complete, as with `stream: false`; in some, no prompt is held for long."""
    progress = {node.name for node in graph.nodes.values() if node.kind.is_early}
    is_late = bool(progress) and chance.random() >= 0.7
    if progress and chance.random() < 0.1:
        graph = graph.replace(reliability=graph.reliability.replace(kv_hold_seconds=chance.choice((0.05, 0.5))))
    if not is_late:
        return graph
    nodes = {name: node for name, node in graph.nodes.items() if name not in progress}
    return graph.replace(nodes=nodes, edges={name: edge for name, edge in graph.edges.items() if edge.target not in progress})


# Calls of graphs of user operators


def _draw_calls(seed: int, graphs: Sequence[Graph], scenario: Scenario | None) -> Case:
    """Calls of few values, some of them cancelled, close together: many are in flight when one fails."""
    chance = random.Random(f"calls {seed}")
    graph, processes, _ = _draw_processes(chance, graphs[chance.randrange(len(graphs))])
    graph = graph.replace(limits=graph.limits.replace(in_flight=chance.choice((1, 2, graph.limits.in_flight))))
    apart = chance.choice((0.0, 1e-4, 5e-3))
    calls = tuple(
        SimulatedCall(
            value=chance.randrange(NUM_VALUES),
            after_seconds=chance.uniform(0.0, apart),
            cancel_seconds=10 ** chance.uniform(-5, -1) if chance.random() < 0.1 else None,
        )
        for _ in range(chance.choice((6, 12, 24)))
    )
    conditions, cost = _draw_conditions(chance), chance.choice(_COSTS)
    if scenario is None:
        faults = draw_faults(chance, graph) if chance.random() < 0.5 else []
        scenario = Scenario(faults=tuple(fault for fault in faults if not isinstance(fault, kinds.RollBack)))
    return Case(graph, (), scenario, seed, conditions, cost, processes, calls=calls)


_known_results: dict[tuple[str, tuple[str, ...], int], Result] = {}


def _result_alone(graph: Graph, value: int) -> Result:
    """The result of a call without any other, on a calm network."""
    key = graph.folder, tuple(graph.nodes), value
    if key not in _known_results:
        (client,) = simulate_calls(Case(graph, (), conditions=CALM, calls=(SimulatedCall(value),))).result.clients
        if client.result is None:
            raise UserError(f"the call of {value} alone gave nothing")
        _known_results[key] = client.result
    return _known_results[key]


# Requests

_References = dict[tuple[str, str, bool, tuple[int, ...], SamplingParams, int], Reference]
_known: _References = {}


def references_of(case: Case) -> list[Reference]:
    """The correct tokens of each request."""
    return [_reference_of(case, request) for request in case.requests]


def _reference_of(case: Case, request: SimulatedRequest) -> Reference:
    """Computes the tokens by plain arithmetic; with weights, by a run of this request alone under calm conditions."""
    assert case.graph.model is not None
    request = SimulatedRequest(request.prompt_token_ids, msgspec.structs.replace(request.params, stop=()))  # no text has such a stop
    config, limits = config_of(case.graph.model.path), case.graph.group_limits()
    num_tokens = num_new_tokens(request.params, len(request.prompt_token_ids), limits, config.max_position_embeddings)
    key = (case.graph.model.path, numerics_text(case.graph), case.exact, request.prompt_token_ids, request.params, num_tokens)
    if key not in _known:
        if case.exact:
            stages = Stages(["any"], (), lambda group: limits, lambda: 0.0)
            gateway = Gateway(stages, ServedModel.of(config, None), limits, draw_seed=lambda: 0)
            (placed,) = gateway.place(gateway.reserve(request.params), request.prompt_token_ids)
            assert isinstance(placed, SendRequest), placed
            module = import_module(EXACT_MODEL)
            _known[key] = tuple(cast("list[tuple[int, ...]]", module.exact_tokens(case.graph, placed.request)))
        else:
            alone = simulate(Case(case.graph, (request,), conditions=CALM, exact=False))
            if alone.result.failure is not None:
                raise UserError(f"{case.graph.model.path}: the run without faults failed: {alone.result.failure}")
            _known[key] = alone.result.clients[0].choices
    return _known[key]


def _pool(graph: Graph) -> Sequence[SimulatedRequest]:
    """The requests that seeds choose from: lengths from one token to several chunks and pages, and each sampling parameter."""
    assert graph.model is not None
    config, limits = config_of(graph.model.path), graph.group_limits()
    max_positions = min(limits.kv_pages * limits.page_size, config.max_position_embeddings)
    return _pool_of(Path(graph.model.path), config.vocab_size, max_positions, min(limits.max_tokens or 12, 12))


@lru_cache(maxsize=64)
def _pool_of(directory: Path, vocabulary: int, max_positions: int, max_new: int) -> Sequence[SimulatedRequest]:
    chance, constraints = random.Random("pool"), drawn_constraints(directory, vocabulary)
    beginning = tuple(random.Random("beginning").choices(range(vocabulary), k=max_positions))
    pool = []
    for number in range(POOL):
        length = min((1, 3, 9, 17, 30, 13)[number % 6], max_positions - max_new)
        stops = tuple(chance.sample(range(vocabulary), vocabulary // 5)) if number % 4 == 2 else ()
        sampled = number % 3 == 1
        params = SamplingParams(
            max_tokens=max_new if number % 3 == 1 else chance.randint(1, min(max_new, 8)),
            min_tokens=1 if number % 8 == 2 else 0,
            n=2 if number in (1, 3, 5, 10, 15) else 1,
            temperature=0.9 if sampled else 0.0,
            top_k=5 if number == 4 else 0,
            seed=number + 1,
            frequency_penalty={7: 0.5, 12: -2.0, 13: -2.0}.get(number, 0.0),
            stop_token_ids=stops,
            ignore_eos=not stops,
            logprobs=2 if number == 8 else None,
            prompt_logprobs=1 if number in (5, 11) else None,
            stop=("1 never", "0\n") if number in (6, 9) else (),
            cache_salt="another" if number in (9, 16) else "",
            **constraints.get(number, {}),
        )
        prompt = tuple(chance.randrange(vocabulary) for _ in range(length))
        if number % 6 in (3, 4, 5):  # some begin alike
            prompt = beginning[: length * 2 // 3] + prompt[length * 2 // 3 :]
        pool.append(SimulatedRequest(prompt, params))
    return pool


# How a client behaves: a draw of the fields of its request, and the weight.
_BEHAVIOURS: dict[Callable[[random.Random], dict[str, Any]], int] = {
    lambda chance: {}: 68,
    lambda chance: {"cancel_seconds": chance.uniform(0.0, 0.1)}: 12,
    lambda chance: {"leaves_after": chance.randint(1, 4)}: 6,
    lambda chance: {"pause_seconds": 10 ** chance.uniform(-3, -0.5)}: 6,
    lambda chance: {"reads_late": True}: 6,
    lambda chance: {"is_unreadable": True}: 2,
}


def _draw_requests(chance: random.Random, graph: Graph) -> tuple[SimulatedRequest, ...]:
    pool = _pool(graph)
    apart = chance.choice((0.0, 2e-3, 30e-3, 0.5))
    drawn = []
    for _ in range(chance.choice((2, 3, 4, 5))):
        draw_behaviour = chance.choices(list(_BEHAVIOURS), list(_BEHAVIOURS.values()))[0]
        drawn.append(replace(chance.choice(pool), after_seconds=chance.uniform(0.0, apart), **draw_behaviour(chance)))
    if chance.random() < 0.25:  # one arrives after the faults, except permanent ones
        latest = 4.0 if graph.reliability.detector else 16.0
        drawn[-1] = _arriving_late(drawn[-1], chance.uniform(0.5, latest))
    return tuple(drawn)


def _arriving_late(request: SimulatedRequest, seconds: float) -> SimulatedRequest:
    return replace(request, after_seconds=seconds, cancel_seconds=None, leaves_after=None, is_unreadable=False)


def _draw_cancelled(chance: random.Random, graph: Graph, count: int) -> tuple[SimulatedRequest, ...]:
    """Requests that come shortly after each other and are cancelled at any moment, also during `submit`."""
    pool = _pool(graph)
    return tuple(
        replace(chance.choice(pool), after_seconds=chance.uniform(0.0, 4e-3), cancel_seconds=10 ** chance.uniform(-5, -0.8))
        for _ in range(count)
    )
