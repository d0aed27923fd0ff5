"""Measures a chaos run: without faults first, then under faults, then what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowrt.api import RunningGraph, open_graph, read_graph
from flowrt.chaos.compare import Answer, Tally, expected_of
from flowrt.chaos.inject import Injector
from flowrt.chaos.leaks import Holding, children_of, holding_of, leaks_between, named_memory
from flowrt.chaos.load import Load, LoadRequest, requests_of
from flowrt.chaos.plan import load_plan
from flowrt.chaos.watch import InjectedFault, Watch
from flowrt.emulation import Account, judge
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import Graph
from flowrt.graph.recovery import may_die
from flowrt.operators.families.registry import read_model_config
from flowrt.reliability.scenario import Scenario
from flowrt.seams import Clock, Seams

QUIET_SECONDS = 1.0  # between the end of the last request and the first look at what is left
END_SECONDS, LOOK_SECONDS = 10.0, 0.1  # what ends within the first was not left behind; it is looked at again after the second
MAX_KILLS = 999  # one less than a graph's `reliability.restarts` may be
AFTER_SECONDS = 10.0  # of load behind the last fault, at most as long as without any
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """The command line. Either a plan, or `kills` of expert servers drawn from `seed`, each `apart_seconds` after the last one was back.

    The load takes `seconds` without faults, and at least as many with them.
    """

    graph: Path
    plan: Path | None = None
    kills: int = 0
    seed: int = 0
    apart_seconds: float = 1.0
    num_requests: int = 16
    concurrency: int = 8
    seconds: float = 10.0
    prompt_tokens: int = 16
    new_tokens: int = 32
    model: Path | None = None
    overrides: Sequence[str] = ()
    spare: bool = False  # the remaining servers have the capacity for all the work


@dataclass
class ChaosResult:
    """What was measured. Times are of one clock; the faults were injected in [begun, ended]."""

    graph: Graph
    num_servers: int
    watch: Watch
    num_faults: int = 0  # planned
    has_spare: bool = False
    undisturbed: list[Answer] = field(default_factory=list)
    undisturbed_span: tuple[float, float] = (0.0, 0.0)
    answers: list[Answer] = field(default_factory=list)
    begun: float = 0.0
    ended: float = 0.0
    injected_faults: list[InjectedFault] = field(default_factory=list)
    before: dict[str, Holding] = field(default_factory=dict)
    after: dict[str, Holding] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    failure: str | None = None  # why the run ended early
    not_back: bool = False
    interrupted: bool = False
    emulation: Account | None = None  # of an emulated run: whether its figures hold


def expert_servers(graph: Graph) -> list[str]:
    """Processes that hold experts and nothing else."""
    names = graph.process_names()
    return [name for name in names if {node.operator for node in graph.nodes_of(name)} == {"experts"}]


def clients_of(graph: Graph) -> dict[str, set[str]]:
    """Expert server -> the processes that send it requests."""
    process_of = {node.name: node.process for node in graph.nodes.values()}
    clients: dict[str, set[str]] = {name: set() for name in expert_servers(graph)}
    for edge in graph.edges.values():
        if (server := process_of[edge.target]) in clients:
            clients[server].add(process_of[edge.source])
    return clients


def prepared(options: ChaosOptions) -> tuple[Graph, Scenario | None, list[LoadRequest]]:
    """The graph, the plan, the requests. Raises UserError for what cannot be measured, before anything starts."""
    if (options.plan is None) == (not options.kills):
        raise UserError("either --plan FILE or --kills N is needed, and not both")
    for option in ("kills", "apart_seconds", "seconds"):
        if not 0 <= (value := getattr(options, option)) < math.inf:
            raise UserError(f"--{option.removesuffix('_seconds')} is {value:g}; give a number of 0 or more")
    if options.kills > MAX_KILLS:
        raise UserError(f"--kills is {options.kills}; give {MAX_KILLS} or less: no process is restarted more often in one run")
    for option in ("num_requests", "concurrency", "prompt_tokens", "new_tokens"):
        if (number := getattr(options, option)) < 1:
            raise UserError(f"--{option.removeprefix('num_').replace('_', '-')} is {number}; give a number of 1 or more")
    overrides = list(options.overrides)
    if options.kills:  # the restart budget is for unplanned crashes
        overrides.insert(0, f"reliability.restarts={options.kills + 1}")
    graph = read_graph(options.graph, overrides, options.model)
    if graph.model is None:
        raise UserError(f"{options.graph}: this graph serves no model, and chaos needs one to send requests to")
    if graph.processes != "many":
        raise UserError(
            f"{options.graph}: workers share processes, so no fault can be injected into one alone; use --set deploy.processes=many"
        )
    if options.kills and not may_die(graph):
        hint = "use --set deploy.experts.servers=3" if graph.reliability.recovery == "fine" else "use --set reliability.recovery=fine"
        raise UserError(f"{options.graph}: the run survives the death of none of its processes, so there is none to kill; {hint}")
    vocab_size = read_model_config(Path(graph.model.path)).vocab_size
    most = min(read_model_config(Path(graph.model.path)).max_position_embeddings, graph.group_limits().kv_pages * graph.limits.page_size)
    if options.new_tokens <= graph.limits.max_tokens and options.prompt_tokens + options.new_tokens > most:
        raise UserError(
            f"--prompt-tokens {options.prompt_tokens} and --new-tokens {options.new_tokens}: a sequence has room for {most} (the model's "
            "context, or limits.kv_pages x page_size); ask for fewer"
        )
    requests = requests_of(options.num_requests, options.prompt_tokens, options.new_tokens, vocab_size, graph.group_limits())
    return graph, load_plan(options.plan, graph) if options.plan is not None else None, requests


async def measure(options: ChaosOptions, say: Say) -> ChaosResult:
    """Run all parts. The effect of a fault is recorded, not raised; UserError for what is wrong before the first fault. When cancelled,
    it ends the graph and returns the measurement so far."""
    graph, scenario, requests = prepared(options)
    seams = Seams()
    watch = Watch(seams.clock, clients_of(graph))

    def on_line(process: str, line: str) -> None:
        if not watch.take_line(process, line):
            say(f"[{process}] {line}")

    num_faults = options.kills if scenario is None else len(scenario.faults)
    found = ChaosResult(graph, len(expert_servers(graph)), watch, num_faults, options.spare, injected_faults=watch.injected_faults)
    gc.collect()
    outside = holding_of(os.getpid()), children_of(os.getpid()), named_memory()
    try:
        running = open_graph(graph, seams=seams, on_event=watch.on_event, on_line=on_line)
        injector = Injector(running, watch, seams.clock, say)
        async with running:
            await _undisturbed(found, running, requests, options, seams, say)
            await seams.clock.sleep(QUIET_SECONDS)
            found.before = await _look(found, running, injector)
            await _disturbed(found, running, injector, requests, scenario, options, seams, say)
            if found.failure is None:
                relinked = {
                    name for injected in found.injected_faults if injected.kind == "reset" for name in (injected.process, injected.other)
                }
                before = {name: holding for name, holding in found.before.items() if name not in relinked}  # these use other sockets now

                async def look() -> list[str]:
                    found.after = await _look(found, running, injector)
                    return leaks_between(before, found.after) + unreturned(watch.held)

                await seams.clock.sleep(QUIET_SECONDS)
                found.leaks += await once_settled(look, seams.clock)
    except WorkerDiedError as error:
        found.failure = found.failure or str(error)
    except asyncio.CancelledError:  # keep what was measured so far
        found.answers = [answer for answer in found.answers if answer.ended < math.inf or answer.error is not None]
    if found.begun:
        found.ended = found.ended or seams.clock.now()
    if graph.emulation is not None:
        each = [worker.emulation for worker in running.final_statistics.values() if worker.emulation is not None]
        found.emulation = judge(graph.emulation.dilation, each)
    with contextlib.suppress(asyncio.CancelledError):  # an interrupt: it ends anyway
        found.leaks += await once_settled(lambda: _left(outside), seams.clock)
    return found


async def _undisturbed(
    found: ChaosResult, running: RunningGraph, requests: Sequence[LoadRequest], options: ChaosOptions, seams: Seams, say: Say
) -> None:
    """The first round only warms up. Raises UserError when a request fails: then nothing can be compared."""
    say(f"undisturbed: {options.concurrency} requests at a time, once each, and then for {options.seconds:g} s")
    for seconds in (0.0, options.seconds):
        load = Load(running, requests, options.concurrency, seams.clock)
        begun = seams.clock.now()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(len(requests)), name="load")
            await seams.clock.sleep(seconds)
            until = seams.clock.now()
            load.stop()
        found.undisturbed = load.answers
        found.undisturbed_span = (begun, max(until, begun + 0.1))
        for answer in load.answers:
            if answer.failed:
                raise UserError(f"request {answer.number} failed before any fault: {answer.error}; nothing can be compared with it")
    num_tokens = sum(len(answer.tokens) for answer in found.undisturbed)
    say(f"undisturbed: {len(found.undisturbed)} requests, {num_tokens} tokens")


async def _disturbed(
    found: ChaosResult,
    running: RunningGraph,
    injector: Injector,
    requests: Sequence[LoadRequest],
    scenario: Scenario | None,
    options: ChaosOptions,
    seams: Seams,
    say: Say,
) -> None:
    load = Load(running, requests, options.concurrency, seams.clock)
    found.answers = load.answers
    tally = Tally(expected_of(found.undisturbed)[0], load.answers)
    injector.so_far = lambda: f"so far {tally}"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run(len(requests)), name="load")
        await load.begun.wait()
        found.begun = seams.clock.now()
        if scenario is not None:
            await injector.run(scenario, found.begun)
        else:
            found.not_back = not await injector.kill_randomly(
                sorted(may_die(found.graph)), options.kills, options.seed, options.apart_seconds
            )
        rest = max(found.begun + options.seconds - seams.clock.now(), min(AFTER_SECONDS, options.seconds))
        if not found.watch.failed:
            say(f"no more faults; {rest:.0f} s of load follow; so far {tally}")
        await found.watch.wait_failed(rest)
        found.ended = seams.clock.now()
        load.stop()
    if load.failure is not None:
        found.failure = str(load.failure)
        say(f"the run has failed: {found.failure}")


async def _look(found: ChaosResult, running: RunningGraph, injector: Injector) -> dict[str, Holding]:
    """What each process holds while it has no requests."""
    await injector.collect_held(found.graph.process_names())
    gc.collect()
    return {"launcher": holding_of(os.getpid())} | {name: holding_of(pid) for name, pid in running.pids.items()}


def unreturned(held: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Rows, sequences, pages and credits that have not returned although no message is on its way."""
    lines = []
    for name, counts in held.items():
        lines += [f"{name}: {counts[what]} {what} left" for what in ("rows", "waiting", "sequences", "pages held") if counts.get(what)]
    away, kept = (sum(counts.get(what, 0) for counts in held.values()) for what in ("credits away", "credits kept back"))
    if away != kept:
        lines.append(f"{away} credits are outstanding, {kept} of them wait to be returned")
    return lines


async def once_settled(look: Callable[[], Awaitable[list[str]]], clock: Clock) -> list[str]:
    """What `look` finds, again and again until it finds nothing or END_SECONDS have passed: what is about to end is not left behind."""
    deadline = clock.now() + END_SECONDS
    while (lines := await look()) and clock.now() < deadline:
        await clock.sleep(LOOK_SECONDS)
    return lines


async def _left(outside: tuple[Holding, set[int], set[str]]) -> list[str]:
    """What a closed run has left behind."""
    gc.collect()
    before, children, memory = outside
    lines = [f"process {pid} is left" for pid in sorted(children_of(os.getpid()) - children)]
    lines += [f"/dev/shm/{name} is left" for name in sorted(named_memory() - memory)]
    now = holding_of(os.getpid())
    if now.memory_maps > before.memory_maps:
        lines.append(f"this process: {now.memory_maps} maps of memory, {before.memory_maps} before the run")
    return lines
