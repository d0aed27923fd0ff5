"""What a death costs under each recovery policy: the tokens that a steady load loses when an expert server or an attention group is killed.

The policies' graphs differ in `reliability.recovery` alone and are open at once; in turns each of them serves the load and loses a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flowrt.api import RunningGraph, read_graph
from flowrt.bench.cases.restart import BUDGET
from flowrt.bench.measure.benchmark import Results, Trial, open_all
from flowrt.bench.report.figures import Figure, Spread, Target
from flowrt.bench.report.plots import new_picture, save_report_picture
from flowrt.bench.report.report import BenchmarkReport, ReportSection, print_progress
from flowrt.chaos.chaos_options import RecoveryOptions
from flowrt.chaos.compare import curve, throughput, token_times
from flowrt.chaos.inject import BACK_SECONDS, Injector
from flowrt.chaos.load import Load, LoadRequest, requests_of
from flowrt.chaos.measure import expert_servers
from flowrt.chaos.observer import RunObserver
from flowrt.chaos.plan import check_processes
from flowrt.emulation import emulation_report
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.graph.recovery import attention_groups, survives
from flowrt.launcher import events
from flowrt.operators.families.registry import read_model_config
from flowrt.reliability.scenario import Crash, Scenario
from flowrt.seams import Clock, Seams

POLICIES = "restart_all", "restart_role", "fine"
EXPERT_TARGET = Target(0.05)  # lost tokens of `fine`, of those of `restart_all`
GROUP_TARGET = Target(1.1)  # lost tokens of `fine`, of the group's share of the tokens in the time of its restart
WARM_SECONDS = 1.0  # from the first token until the rate counts
BACK_SHARE, LOOK_SECONDS = 0.95, 0.1  # the rate is back when a second has this share of the usual tokens
BEFORE_SECONDS = 1.0  # of the curve, before the kill
BIN_SECONDS = 0.1


@dataclass(frozen=True)
class LostTokens:
    """One kill. `usual`: tokens per second before it. `window_seconds`: from the kill until the rate is back; in this time `lost` tokens
    fewer came than usual. `back_seconds`: from the kill until the process is back. `curve`: tokens per second, from BEFORE_SECONDS on."""

    usual: float
    lost: float
    window_seconds: float
    back_seconds: float
    curve: list[float]
    num_failed: int


class RecoverySide:
    """The graph of one policy."""

    def __init__(self, graph: Graph, requests: Sequence[LoadRequest], options: RecoveryOptions) -> None:
        seams = Seams()
        self.policy = graph.reliability.recovery
        self._clock: Clock = seams.clock
        self._observer = RunObserver(self._clock)
        self.running = RunningGraph(graph, seams, on_event=self._observer.on_event, on_line=lambda process, line: None)
        self._injector = Injector(self.running, self._observer, self._clock, takes_orders=False)
        self._requests, self._options = requests, options

    async def lose(self, victim: str) -> LostTokens:
        """Serve the load, kill the process, and go on until the rate is back. Raises UserError when a killed process stays down."""
        load = Load(self.running, self._requests, self._options.concurrency, self._clock)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(), name="load")
            try:
                await load.begun.wait()
                return await self._lose(victim, load)
            finally:
                load.stop()

    async def _lose(self, victim: str, load: Load) -> LostTokens:
        now, observer, seconds = self._clock.now, self._observer, self._options.seconds
        await self._clock.sleep(WARM_SECONDS)
        begun = now()
        await self._clock.sleep(seconds)
        await self._injector.run(Scenario(faults=(Crash(process=victim),)), now())
        fault = observer.injected_faults[-1]
        if fault.missed:
            raise UserError(f"recovery: {self.policy}: {fault.missed}")
        usual = throughput(token_times(load.answers), begun, fault.at)

        def is_back() -> bool:
            """Whether all processes that were killed are back."""
            since = [event for at, event in observer.seen if at >= fault.at]
            lost = {event.name for event in since if isinstance(event, events.WorkerLost)}
            return victim in lost and lost <= {event.name for event in since if isinstance(event, events.WorkerRestarted)}

        if not await observer.wait_until(is_back, BACK_SECONDS):
            raise UserError(f"recovery: {self.policy}: the processes are not back {BACK_SECONDS:g} s after the death of {victim}")
        ended = await self._wait_for_rate(load, usual, fault.at)
        await self._clock.sleep(max(0.0, fault.at + seconds - ended))
        received = throughput(token_times(load.answers), fault.at, ended) * (ended - fault.at)
        return LostTokens(
            usual,
            usual * (ended - fault.at) - received,
            ended - fault.at,
            observer.back_seconds(fault),
            curve(load.answers, fault.at - BEFORE_SECONDS, fault.at + seconds, BIN_SECONDS),
            sum(answer.failed for answer in load.answers if answer.finish_reason is not None),
        )

    async def _wait_for_rate(self, load: Load, usual: float, since: float) -> float:
        """Returns when the last second had the usual rate, at the latest BACK_SECONDS after the kill, and at which time that was."""
        while (at := self._clock.now()) < since + BACK_SECONDS and load.failure is None:
            if at >= since + 1.0 and throughput(token_times(load.answers), at - 1.0, at) >= BACK_SHARE * usual:
                break
            await self._clock.sleep(LOOK_SECONDS)
        return at


@dataclass(frozen=True)
class RecoveryGraphs:
    """What `measure` needs, checked. `victims`: a process of each role, with what it is called."""

    graphs: list[Graph]
    victims: dict[str, str]
    requests: list[LoadRequest]
    options: RecoveryOptions


def read_graphs(graph_file: Path, model: Path | None, options: RecoveryOptions) -> RecoveryGraphs:
    """Raises UserError for a graph whose expert servers or groups cannot be lost one at a time."""
    graphs = [read_graph(graph_file, [*BUDGET, *options.overrides, f"reliability.recovery={policy}"], model) for policy in POLICIES]
    graph = graphs[0]
    check_processes(graph, f"{graph_file}: ")
    groups = attention_groups(graph)
    if graph.model is None or not expert_servers(graph) or len(groups) < 2 or not all(survives(graph, name) for name in groups):
        raise UserError(f"{graph_file}: the benchmark kills an expert server and one of several groups of a model, which this graph lacks")
    config = read_model_config(Path(graph.model.path))
    sizes = options.requests, options.prompt_tokens, options.new_tokens
    requests = requests_of(*sizes, config.vocab_size, graph.group_limits(), has_text=False, ways=({},))
    return RecoveryGraphs(graphs, {"expert server": expert_servers(graph)[0], "group": groups[0]}, requests, options)


async def measure(prepared: RecoveryGraphs) -> Results:
    num_groups = len(attention_groups(prepared.graphs[0]))
    print_progress(f"loading {len(prepared.graphs)} graphs")
    sides = [RecoverySide(graph, prepared.requests, prepared.options) for graph in prepared.graphs]
    async with open_all(side.running for side in sides):
        cells = [(side, role) for role in prepared.victims for side in sides]
        names = [(side.policy, role) for side, role in cells]
        kills: list[Callable[[], Awaitable[LostTokens]]] = [partial(side.lose, prepared.victims[role]) for side, role in cells]
        trial = Trial(kills, lambda values: figures_of(dict(zip(names, values, strict=True)), num_groups))
        yield trial
        found = dict(zip(names, trial.values, strict=True))
        yield ReportSection("kills", [{"policy": policy, "victim": role, "runs": runs} for (policy, role), runs in found.items()])
        num_failed = sum(run.num_failed for runs in trial.values for run in runs)
        yield f"{num_failed} requests failed"
    for side in sides:
        if (emulation := side.running.graph.emulation) is not None:
            workers = [each.emulation for each in side.running.final_statistics.values() if each.emulation is not None]
            sentences = emulation_report(emulation.dilation, workers).sentences
            yield f"{side.policy}: {'; '.join(sentences) or 'all computations and messages came as modelled'}"


def figures_of(found: dict[tuple[str, str], list[LostTokens]], num_groups: int) -> list[Figure]:
    """`found`: the runs of each policy and role of the killed process."""
    figures: list[Figure] = []
    for (policy, role), runs in found.items():
        lost, all_lost = ([run.lost for run in each] for each in (runs, found[POLICIES[0], role]))
        if policy == POLICIES[0]:
            figures.append(Figure.alone(f"{role} killed, {policy}: lost tokens", "tokens", lost))
        else:
            target = EXPERT_TARGET if (policy, role) == ("fine", "expert server") else None
            figures.append(_compared(f"{role} killed, {policy}: lost tokens", lost, POLICIES[0], all_lost, target))
        figures.append(Figure.alone("  until the process is back", "s", [run.back_seconds for run in runs]))
        figures.append(Figure.alone("  until the rate is back", "s", [run.window_seconds for run in runs]))
    runs = found["fine", "group"]
    share = [run.usual / num_groups * run.back_seconds for run in runs]
    name = "group killed, fine: lost tokens"
    figures.append(_compared(name, [run.lost for run in runs], "its share of the rate x the time until it is back", share, GROUP_TARGET))
    usual = [run.usual for runs in found.values() for run in runs]
    return [*figures, Figure.alone("without faults", "tokens/s", usual)]


def _compared(name: str, ours: Sequence[float], peer: str, theirs: Sequence[float], target: Target | None) -> Figure:
    """Builds a `Figure.paired`. A kill that loses nothing may count less than zero; a pair in which the peer lost nothing has no ratio."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True) if other > 0]
    if num_left_out := len(ours) - len(ratios):
        name += f" (ratio without {num_left_out} of {len(ours)} pairs, in which the peer lost none)"
    if not ratios:
        return Figure.alone(name, "tokens", ours)
    return Figure(name, "tokens", Spread.of(ours), peer, Spread.of(theirs), Spread.of(ratios), target)


def plot_recovery(report: BenchmarkReport, path: str) -> None:
    """Tokens per second around the kill, the mean of all pairs. Raises UserError when the file cannot be written."""
    kills: list[dict[str, Any]] = report.details["kills"]
    roles = list(dict.fromkeys(each["victim"] for each in kills))
    picture, diagrams = new_picture((11, 4), len(roles))
    for role, axes in zip(roles, diagrams, strict=True):
        for each in kills:
            if each["victim"] == role:
                means = [sum(rates) / len(rates) for rates in zip(*(run.curve for run in each["runs"]), strict=False)]
                times = [(place + 0.5) * BIN_SECONDS - BEFORE_SECONDS for place in range(len(means))]
                axes.plot(times, means, label=each["policy"], linewidth=1.3)
        axes.axvline(0.0, color="#b5443a", linewidth=1.0)
        axes.set(title=f"{role} killed", xlabel="seconds from the kill", ylabel="tokens per second", ylim=(0, None))
        axes.legend(fontsize="small", frameon=False)
    save_report_picture(picture, report, path)
