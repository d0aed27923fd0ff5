"""Measures a chaos run: alternating stretches without and with faults, then what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from flowrt.api import RunningGraph, read_graph
from flowrt.chaos.cells import FAULTS, PHASES, FaultName, Phase, Stretch, cell_stretches, chosen, processes_by_role, random_stretches
from flowrt.chaos.chaos_options import ChaosOptions
from flowrt.chaos.compare import AnswerCounts, ReceivedAnswer, StretchPair, expected_of
from flowrt.chaos.inject import Injector
from flowrt.chaos.leaks import Holding, children_of, held_bytes, holding_of, leaks_between, named_memory
from flowrt.chaos.load import Load, LoadRequest, requests_of
from flowrt.chaos.observer import InjectedFault, RunObserver
from flowrt.chaos.phases import Phases
from flowrt.chaos.plan import check_processes, load_plan
from flowrt.emulation import EmulationReport, emulation_report
from flowrt.errors import UserError, WorkerDiedError
from flowrt.graph.model import Graph
from flowrt.graph.numerics import is_exact
from flowrt.graph.recovery import neighbours, survivable_processes, survives
from flowrt.launcher.events import Event
from flowrt.operators.families.registry import read_model_config
from flowrt.reliability.scenario import Crash, Hang, Scenario, Stall
from flowrt.seams import Clock, Seams

QUIET_SECONDS = 1.0  # between the end of the last request and the first look at what is left
END_SECONDS, LOOK_SECONDS = 10.0, 0.1  # what ends within the first was not left behind; it is looked at again after the second
AFTER_SECONDS = 10.0  # of load behind the last fault of a stretch, at most as long as without any
MAX_RESTARTS = 1000  # of a graph's `reliability.restarts`
Log = Callable[[str], None]


@dataclass(frozen=True)
class PreparedRun:
    """The inputs of a chaos run, checked."""

    options: ChaosOptions
    graph: Graph
    stretches: list[Stretch]
    requests: list[LoadRequest]

    @property
    def tolerates_errors(self) -> bool:
        """Whether the plan allows requests to end with an error."""
        return self.stretches[0].scenario.expect == "tokens_or_error"


class MemorySample(NamedTuple):
    """Holds figures of the launching process: faults so far, resident bytes, and the bytes of this command's own record."""

    num_faults: int
    resident_bytes: int
    record_bytes: int


@dataclass
class ChaosResult:
    """What was measured. Times are of one clock. `reference` has an answer to each request, from before the stretches."""

    graph: Graph
    num_servers: int
    observer: RunObserver
    num_faults: int = 0  # planned
    has_spare: bool = False
    reference: list[ReceivedAnswer] = field(default_factory=list)
    faults_begun: float = math.inf  # the first of them
    stretches: list[StretchPair] = field(default_factory=list)
    answers: list[ReceivedAnswer] = field(default_factory=list)
    begun: float = 0.0
    ended: float = 0.0
    before: dict[str, Holding] = field(default_factory=dict)
    after: dict[str, Holding] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    failure: str | None = None  # why the run ended early
    not_back: bool = False
    interrupted: bool = False
    emulation: EmulationReport | None = None  # of an emulated run: whether its figures hold
    memory: list[MemorySample] = field(default_factory=list)  # after the first fifth of the stretches, and at the end

    @property
    def undisturbed(self) -> list[ReceivedAnswer]:
        """The answers that were given in stretches without faults."""
        return [answer for answer in self.answers if any(pair.has_undisturbed(answer) for pair in self.stretches)]

    @property
    def injected_faults(self) -> list[InjectedFault]:
        return self.observer.injected_faults


def expert_servers(graph: Graph) -> list[str]:
    """Processes that compute experts for others, be they trampolines or groups too, and that the run can lose."""
    ends = [(graph.nodes[edge.target], graph.ends_of(edge)) for edge in graph.edges.values()]
    processes = dict.fromkeys(node.process for node, (source, target) in ends if node.kind.holds_experts and source != target)
    return [name for name in processes if survives(graph, name)]


def clients_of(graph: Graph) -> dict[str, set[str]]:
    """Expert server -> the processes that are linked with it, and use it no more once it is lost. Group -> the expert servers that hold its
    rows."""
    linked, servers = neighbours(graph), set(expert_servers(graph))
    held = {name: servers.intersection(linked.get(name, ())) for name in processes_by_role(graph).get("attention", ())}
    return held | {name: set(linked.get(name, ())) for name in servers}


def prepare(path: Path, options: ChaosOptions) -> PreparedRun:
    """Read graph and plan, and generate the requests. Raises UserError for what cannot be measured, before anything starts."""
    if (options.plan is None) == (not options.kills):
        raise UserError("either --plan FILE or --kills N is needed, and not both")
    overrides = list(options.overrides)
    if options.kills or options.pairs > 1:  # the restart budget is for unplanned crashes
        overrides.insert(0, f"reliability.restarts={MAX_RESTARTS}")
    graph = read_graph(path, overrides, options.model)
    if graph.model is None:
        raise UserError(f"{path}: this graph serves no model, and chaos needs one to send requests to")
    check_processes(graph, f"{path}: ")
    if options.kills and not survivable_processes(graph):
        hint = "use --set deploy.experts.servers=3" if graph.reliability.recovery == "fine" else "use --set reliability.recovery=fine"
        raise UserError(f"{path}: the run survives no death of a process, so there is none to kill; {hint}")
    config, limits = read_model_config(Path(graph.model.path)), graph.group_limits()
    max_tokens = min(config.max_position_embeddings, limits.kv_pages * limits.page_size)
    if options.prompt_tokens + options.new_tokens > max_tokens:
        lengths = f"--prompt-tokens {options.prompt_tokens} and --new-tokens {options.new_tokens}"
        why = "the model's context, or limits.kv_pages x page_size"
        raise UserError(f"{lengths}: a sequence has room for {max_tokens} ({why}); use smaller numbers")
    has_text = (Path(graph.model.path) / "tokenizer.json").is_file()
    sizes = options.requests, options.prompt_tokens, options.new_tokens
    requests = requests_of(*sizes, config.vocab_size, limits, has_text, is_constrained=options.constrained, is_exact=is_exact(graph))
    if options.plan is not None:
        stretches = [Stretch(load_plan(options.plan, graph))] * options.pairs
    else:
        roles = chosen(options.roles, list(processes_by_role(graph)), "--roles")
        faults = cast("list[FaultName]", chosen(options.fault, FAULTS, "--fault"))
        if options.phase == "any":
            stretches = random_stretches(graph, options.kills, roles, faults, options.seed)
        else:
            phases = cast("list[Phase]", chosen(options.phase, PHASES, "--phase"))
            stretches = cell_stretches(graph, options.kills, roles, faults, phases, options.seed)
    return PreparedRun(options, graph, stretches, requests)


async def measure(prepared: PreparedRun, log: Log) -> ChaosResult:
    """Run all parts. The effect of a fault is recorded, not raised; UserError for what is wrong before the first fault. When cancelled,
    it ends the graph and returns the measurement so far."""
    graph, options, seams = prepared.graph, prepared.options, Seams()
    observer = RunObserver(seams.clock, clients_of(graph))

    def on_line(process: str, line: str) -> None:
        if not observer.take_line(process, line):
            log(f"[{process}] {line}")

    def on_event(event: Event) -> None:
        phases.on_event(event)
        observer.on_event(event)

    num_faults = sum(stretch.num_faults for stretch in prepared.stretches)
    found = ChaosResult(graph, len(expert_servers(graph)), observer, num_faults, options.spare)
    gc.collect()
    outside = holding_of(os.getpid()), children_of(os.getpid()), named_memory()
    try:
        running = RunningGraph(graph, seams, on_event=on_event, on_line=on_line)
        phases = Phases(running, seams.clock, lambda: found.answers)
        injector = Injector(running, observer, seams.clock, log)
        measurement = _Measurement(prepared, found, running, injector, phases, seams.clock, log)
        async with running:
            await measurement.run_reference()
            await seams.clock.sleep(QUIET_SECONDS)
            found.before = await measurement.holdings()
            await measurement.run_stretches()
            if found.failure is None:
                await seams.clock.sleep(QUIET_SECONDS)
                found.leaks += await once_settled(measurement.leaks, seams.clock)
    except WorkerDiedError as error:
        found.failure = found.failure or str(error)
    except asyncio.CancelledError:  # keep what was measured so far
        found.answers = [answer for answer in found.answers if answer.ended < math.inf or answer.error is not None]
    if found.begun:
        found.ended = found.ended or seams.clock.now()
    if graph.emulation is not None:
        each = [worker.emulation for worker in running.final_statistics.values() if worker.emulation is not None]
        found.emulation = emulation_report(graph.emulation.dilation, each)
    with contextlib.suppress(asyncio.CancelledError):  # an interrupt: it ends anyway
        found.leaks += await once_settled(lambda: _left_behind(outside), seams.clock)
    return found


@dataclass(frozen=True)
class _Measurement:
    """The parts of a run while its graph is open. They fill `found`."""

    prepared: PreparedRun
    found: ChaosResult
    running: RunningGraph
    injector: Injector
    phases: Phases
    clock: Clock
    log: Log

    async def run_reference(self) -> None:
        """Each request twice; the first round warms up. Raises UserError when one fails: then nothing can be compared."""
        for _ in range(2):
            load = Load(self.running, self.prepared.requests, self.prepared.options.concurrency, self.clock)
            load.stop()
            await load.run(len(self.prepared.requests))
            self.found.reference = load.answers
            for answer in load.answers:
                if answer.failed:
                    raise UserError(f"request {answer.number} failed before any fault: {answer.error}; nothing can be compared with it")

    async def run_stretches(self) -> None:
        found, options, stretches = self.found, self.prepared.options, self.prepared.stretches
        counts = AnswerCounts(expected_of(found.reference)[0])
        load = Load(self.running, self.prepared.requests, options.concurrency, self.clock, counts.add)
        found.answers = load.answers
        self.injector.so_far = lambda: f"so far {counts}"
        self.injector.phase_of = self.phases.phase_of
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(len(self.prepared.requests)), name="load")
            await load.begun.wait()
            found.begun = self.clock.now()
            for number, stretch in enumerate(stretches, 1):
                self.log(f"{number} of {len(stretches)}: {options.seconds:g} s without faults, then with them")
                await self._run_pair(stretch, load)
                if number == len(stretches) // 5 or number == len(stretches):
                    found.memory.append(self._memory())
                if found.observer.failed or found.not_back:
                    break
            found.ended = self.clock.now()
            load.stop()
        if load.failure is not None:
            found.failure = str(load.failure)
            self.log(f"the run has failed: {found.failure}")

    def _memory(self) -> MemorySample:
        gc.collect()
        observer = self.found.observer
        record = held_bytes(self.found.answers, observer.seen, observer.notes, observer.injected_faults)
        return MemorySample(len(observer.injected_faults), holding_of(os.getpid()).resident_bytes, record)

    async def _run_pair(self, stretch: Stretch, load: Load) -> None:
        """A stretch without faults, and one with those of the scenario, which ends when the processes are back and at work again."""
        found, now, seconds = self.found, self.clock.now, self.prepared.options.seconds
        begun = now()
        await found.observer.wait_failed(seconds)
        faults_begun = now()
        found.faults_begun = min(found.faults_begun, faults_begun)
        if stretch.phase == "drain":
            await self._drain(stretch.scenario, load)
        else:
            await self._reach(stretch, load)
            await self.injector.run(stretch.scenario, now())
            load.resume()
        found.not_back = not await self.injector.wait_back(faults_begun)
        await found.observer.wait_failed(max(faults_begun + seconds - now(), min(AFTER_SECONDS, seconds)))
        if not found.observer.failed:
            found.stretches.append(StretchPair(begun, faults_begun, now()))

    async def _reach(self, stretch: Stretch, load: Load) -> None:
        """Bring about the phase that the faults are to hit."""
        (process,) = stretch.scenario.faults[0].processes if stretch.phase is not None else ("",)
        if any(isinstance(fault, Hang | Stall) for fault in stretch.scenario.faults):
            await self.phases.wait_cleared()
        if stretch.first is not None:
            await self.injector.run(Scenario(faults=(Crash(process=stretch.first),)), self.clock.now())
            await self.found.observer.wait_until(lambda: self.found.observer.is_lost(self.found.injected_faults[-1]), QUIET_SECONDS)
        if stretch.phase == "idle":
            load.pause()
        if stretch.phase is not None:
            await self.phases.wait(process, stretch.phase)

    async def _drain(self, scenario: Scenario, load: Load) -> None:
        """Inject the faults while the run drains."""
        load.stop()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.running.drain(), name="drain")
            self.phases.is_draining = True
            await self.injector.run(scenario, self.clock.now())

    async def holdings(self) -> dict[str, Holding]:
        """What each process holds while it has no requests."""
        await self.injector.collect_held(self.found.graph.process_names())
        gc.collect()
        tasks = {name: counts["tasks"] for name, counts in self.found.observer.held.items()}
        ours = {"launcher": holding_of(os.getpid(), len(asyncio.all_tasks()))}
        return ours | {name: holding_of(pid, tasks.get(name, 0)) for name, pid in self.running.pids.items()}

    async def leaks(self) -> list[str]:
        self.found.after = await self.holdings()
        resets = [injected for injected in self.found.injected_faults if injected.kind == "reset"]
        relinked = {name for injected in resets for name in (injected.process, injected.other)}  # these use other sockets now
        before = {name: holding for name, holding in self.found.before.items() if name not in relinked}
        return leaks_between(before, self.found.after) + unreturned(self.found.observer.held)


def unreturned(held: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Rows, sequences, pages and credits that have not returned although no message is on its way."""
    lines = []
    for name, counts in held.items():
        lines += [f"{name}: {counts[what]} {what} left" for what in ("rows", "waiting", "sequences", "pages held") if counts.get(what)]
    outstanding, unsent = (sum(counts.get(what, 0) for counts in held.values()) for what in ("credits outstanding", "credits unsent"))
    if outstanding != unsent:
        lines.append(f"{outstanding} credits are outstanding, {unsent} of them wait to be returned")
    return lines


async def once_settled(look: Callable[[], Awaitable[list[str]]], clock: Clock) -> list[str]:
    """Call `look` until it finds nothing or END_SECONDS have passed; return its last result. What is about to end is not left behind."""
    deadline = clock.now() + END_SECONDS
    while (lines := await look()) and clock.now() < deadline:
        await clock.sleep(LOOK_SECONDS)
    return lines


async def _left_behind(outside: tuple[Holding, set[int], set[str]]) -> list[str]:
    """What a closed run has left behind."""
    gc.collect()
    before, children, memory = outside
    lines = [f"process {pid} is left" for pid in sorted(children_of(os.getpid()) - children)]
    lines += [f"/dev/shm/{name} is left" for name in sorted(named_memory() - memory)]
    now = holding_of(os.getpid())
    if now.memory_maps > before.memory_maps:
        lines.append(f"this process: {now.memory_maps} maps of memory, {before.memory_maps} before the run")
    return lines
