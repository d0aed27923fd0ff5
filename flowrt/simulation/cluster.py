"""A whole graph in virtual time: the real workers, each a process of its own, and a gateway that submits requests and reads tokens.

Here: `serve`, which starts the workers, introduces them to each other over simulated control connections, places the requests while the
scenario's faults happen, waits for every end, heals everything, looks for what is left and stops all. Not here: faults (faults.py),
whether what came out is right (invariants.py), its result (served.py). The launcher's own part of the protocol is short and tied to
processes, so it is said again here (lines.py, servers.py); what is decided about requests, and who is to blame for a failed run, is the
real gateway's and verdict's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from flowrt.actors.control import Control, Ended, LinkLost, Peers, Start, Submit, Tokens
from flowrt.errors import UserError, WorkerDiedError
from flowrt.gateway.gateway import EndEvent, Gateway, Placed, SendCancel, TokenEvent
from flowrt.graph.builtin import SOURCE
from flowrt.graph.model import GATEWAY, MONITOR, Graph, to_json
from flowrt.launcher.root_cause import Verdict
from flowrt.launcher.transport_choice import choose_transports
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelConfig
from flowrt.reliability.scenario import Scenario
from flowrt.simulation.errors import DeadlockError, InvariantError
from flowrt.simulation.faults import Faults
from flowrt.simulation.inside import Inside, credit_faults
from flowrt.simulation.lines import Line, WorkerMain
from flowrt.simulation.outages import Outages, holders_of
from flowrt.simulation.served import Served, SimulatedRequest
from flowrt.simulation.servers import Servers
from flowrt.simulation.weather import CALM
from flowrt.simulation.world import World
from flowrt.transports.registry import known_schemes

ARRIVAL_SECONDS = 20e-3  # requests arrive within this time of each other
MONITORS = "flowrt.workers.monitor"
QUIET_SECONDS = 2.0  # after the last end, with everything healed: all that is on its way gets there
STOP_SECONDS = 10.0  # to end in, once told
NEWS_SECONDS = 0.3  # for so long a group may not know that an expert is back
SLOWED_SECONDS = 10.0  # the same while a fault may slow it down
SETTLE_SECONDS = 30.0  # from healing everything to the last new life
STUCK_SECONDS = 20.0  # without a firing, a token or a new life while no fault lasts: beats never end, so a deadlock would not be seen


async def serve(
    world: World,
    graph: Graph,
    requests: Sequence[SimulatedRequest],
    worker: WorkerMain | None = None,
    *,
    scenario: Scenario | None = None,
    exact: bool = False,
) -> Served:
    """Run `graph` (expanded, with a model) until every request has ended. For `world.run`. `exact`: with the model of whole numbers
    (flowrt/workers/exact_nodes.py) instead of weights.

    A worker that dies or fails ends the run, as it does outside; that is told in what is returned. Raises InvariantError for what is
    wrong inside of workers (I3, I4) or left behind (I8).
    """
    async with AsyncExitStack() as lines:
        cluster = _Cluster(world, graph, scenario or Scenario(), worker, exact)
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(cluster.work(tasks, lines, requests), name="work of the launcher")
            judge = tasks.create_task(cluster.judge(), name="verdict")
            await asyncio.wait([work, judge], return_when=asyncio.FIRST_COMPLETED)
            for task in (work, judge):
                task.cancel()
            await asyncio.wait([work, judge])
            if work.cancelled() or work.exception() is None:
                await cluster.stop()
    if left := world.leftovers():
        raise InvariantError("I8", f"left behind: {', '.join(left)}")
    return cluster.served()


@lru_cache(maxsize=64)
def _config_of(path: str) -> ModelConfig:
    return read_model_config(Path(path))


@lru_cache(maxsize=1)
def _schemes() -> frozenset[str]:
    return frozenset(known_schemes())


class _Cluster:
    def __init__(self, world: World, graph: Graph, scenario: Scenario, worker: WorkerMain | None, exact: bool) -> None:
        if graph.model is None:
            raise ValueError("only a graph with a model has requests to serve")
        self._world = world
        self._graph = choose_transports(graph, dict.fromkeys(sorted(_schemes())))
        self._worker, self._exact = worker, exact
        self._scenario = scenario
        self._slow_until = max(
            (fault.ends_seconds + NEWS_SECONDS for fault in scenario.faults if fault.ends_seconds > fault.at_seconds), default=0.0
        )
        self.lines: dict[str, Line] = {}
        world.one_clock = graph.emulation is not None  # the two ends of an emulated link compare times
        self._seams = world.seams(GATEWAY)
        self._faults = Faults(world, scenario, self._inside_of)
        self._verdict = Verdict(self._seams.clock, lambda _: ())
        self._failure: UserError | WorkerDiedError | None = None
        self._first_seconds = self._failed_seconds = world.loop.time()
        self._all_ended = asyncio.Event()
        self._submitted = False
        config = _config_of(graph.model.path)
        self._gateway = Gateway(
            [node.process for node in graph.nodes.values() if node.operator == SOURCE],
            graph.limits,
            config.max_position_embeddings,
            config.vocab_size,
            draw_seed=self._seams.new_seed,
            eos_token_ids=config.eos_token_ids,
        )
        self._indices: list[int] = []
        self._outages = Outages(holders_of(self._graph, config))
        self._placed: dict[int, tuple[str, float]] = {}  # by request: its group, and since when an outage may end it
        self._outage_seconds: dict[int, float] = {}  # by request that has ended
        self._servers = Servers(world, self._graph, self, self._outages, self._seams.clock)
        self._rules: list[asyncio.Task[None]] = []
        self._progress, self._progress_seconds = 0, world.loop.time()
        world.deaths.append(self._servers.on_death)
        world.loop.accounts.append(self.account)
        world.loop.watch(self.look)

    # the run, from first to last

    async def work(self, tasks: asyncio.TaskGroup, lines: AsyncExitStack, requests: Sequence[SimulatedRequest]) -> None:
        self._tasks, self._open_lines = tasks, lines
        self._text, self._key = to_json(self._graph), self._world.new_key()
        for name in self._graph.process_names():
            self.begin(name)
        for line in self.lines.values():
            await line.tell(self.start_of(line))
        addresses = {name: (await line.listening).addresses for name, line in self.lines.items()}
        incarnations = {name: line.incarnation for name, line in self.lines.items()}
        for line in self.lines.values():
            await line.tell(Peers(addresses=addresses, incarnations=incarnations))
        for line in self.lines.values():
            await line.connected
        for name in self._servers.mortal:
            self._rules.append(tasks.create_task(self._servers.rule(name), name=f"lives of {name}"))
        if MONITOR in self._servers.mortal:
            self._rules.append(tasks.create_task(self._servers.heartbeat(), name="beats of the launcher"))
        self._first_seconds = self._world.loop.time()
        self._faults.begin()
        await self._submit(tasks, requests)
        await self._all_ended.wait()
        await self._quieten()

    async def judge(self) -> None:
        """Wait for the verdict, if there is to be one: the run is over then, and so is every request."""
        self._failure = error = await self._verdict.wait_error()
        self._failed_seconds = self._world.loop.time()
        self._gateway.end_all("error", str(error))

    async def stop(self) -> None:
        """Whatever happened: end what has not ended, heal everything, and let every worker that lives end in order."""
        for rule in self._rules:
            rule.cancel()
        self._faults.heal()
        self._world.network.conditions = CALM
        for line in self.lines.values():
            await line.stop()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                for line in self.lines.values():
                    await line.ended.wait()
        except TimeoutError:
            late = [name for name, line in self.lines.items() if not line.ended.is_set()]
            account = self._world.loop.describe_waiting()
            raise InvariantError("I8", f"{', '.join(late)} did not end within {STOP_SECONDS} s of being told to:\n{account}") from None
        for line in self.lines.values():
            await line.aclose()

    def served(self) -> Served:
        logs = [self._gateway.log(index) for index in self._indices]
        ends = [log.end for log in logs]
        failure = self._failure
        return Served(
            tuple(tuple(tuple(choice.token_ids) for choice in log.choices) for log in logs),
            tuple(end.finish_reason if end is not None else "" for end in ends),
            tuple(end.error if end is not None else None for end in ends),
            tuple(sum(isinstance(event, EndEvent) for event in log.events) for log in logs),
            tuple(
                tuple(
                    tuple(event.index for event in log.events if isinstance(event, TokenEvent) and event.choice == choice.index)
                    for choice in log.choices
                )
                for log in logs
            ),
            {name: line.statistics for name, line in self.lines.items() if name != MONITOR},
            None if failure is None else getattr(failure, "process", ""),
            None if failure is None else str(failure),
            None if failure is None else self._failed_seconds - self._first_seconds,
            tuple(self._outage_seconds.get(index, 0.0) for index in self._indices),
            tuple(
                tuple(
                    tuple(
                        event.index
                        for event in log.events
                        if isinstance(event, TokenEvent) and event.choice == choice.index and event.degraded
                    )
                    for choice in log.choices
                )
                for log in logs
            ),
        )

    # lives

    def begin(self, name: str) -> Line:
        monitor = import_module(MONITORS).run_monitor if name == MONITOR else None
        self.lines[name] = line = Line(self._world, self._verdict, name, self, monitor or self._worker, self._exact)
        self._open_lines.push_async_callback(line.aclose)
        self._tasks.create_task(line.follow(), name=f"line of {name}")
        return line

    def start_of(self, line: Line) -> Start:
        return Start(name=line.name, incarnation=line.incarnation, graph=self._text, key=self._key)

    def has_befallen(self, process: str) -> bool:
        return self._faults.silenced(process)

    # what lines tell

    def on_words(self, words: Tokens | Ended) -> list[tuple[str, Control]]:
        if isinstance(words, Tokens):
            decisions = [decision for token in words.tokens for decision in self._gateway.on_token(token)]
        else:
            decisions = self._gateway.on_ended(words)
        self._look_for_the_end()
        return [(decision.group, decision.cancel) for decision in decisions if isinstance(decision, SendCancel)]

    async def tell(self, name: str, control: Control) -> None:
        await self.lines[name].tell(control)

    def explains(self) -> bool:
        return any(line.ended.is_set() for line in self.lines.values())

    def outlives(self, line: Line) -> bool:
        return line.name in self._servers.mortal and not line.told_to_stop

    def on_word(self, line: Line, word: Control) -> None:
        self._servers.on_word(line, word)

    def on_link_lost(self, line: Line, lost: LinkLost) -> bool:
        return self._servers.on_link_lost(line, lost)

    # what is looked at

    def account(self) -> list[str]:
        """Who waits for what."""
        logs = [self._gateway.log(index) for index in self._indices]
        lines = [f"gateway: {log.id} at {log.group} has {log.token_ids} of {log.max_tokens}" for log in logs if log.end is None]
        lines += self._servers.account()
        return lines + [text for inside in self._insides() for text in inside.waiting()]

    def look(self) -> None:
        """While it runs."""
        for inside in self._insides():
            if inside.late_firings:
                raise InvariantError("I2", inside.late_firings[0])
            if faults := inside.page_faults():
                raise InvariantError("I3", "; ".join(faults))
        self._servers.look(self._insides())
        self._look_for_progress()

    def _look_for_progress(self) -> None:
        now = self._world.loop.time()
        progress = sum(inside.num_firings for inside in self._insides()) + self._servers.counts.total()
        if progress != self._progress or now < self._first_seconds + self._scenario.ends_seconds:
            self._progress, self._progress_seconds = progress, now
        elif now > self._progress_seconds + STUCK_SECONDS and self._submitted and self._gateway.num_unfinished:
            raise DeadlockError(f"nothing for {STUCK_SECONDS:g} s at {now:.6f} s but beats:\n{self._world.loop.describe_waiting()}")

    def _inside_of(self, name: str) -> Inside | None:
        line = self.lines.get(name)
        return None if line is None or line.ended.is_set() else line.inside

    def _insides(self) -> list[Inside]:
        return [line.inside for line in self.lines.values() if line.inside is not None and not line.ended.is_set()]

    # inside

    async def _submit(self, tasks: asyncio.TaskGroup, requests: Sequence[SimulatedRequest]) -> None:
        for request in requests:
            drawn = self._seams.random.uniform(0.0, ARRIVAL_SECONDS)
            await self._seams.clock.sleep(drawn if request.after_seconds is None else request.after_seconds)
            placed = self._gateway.admit(request.prompt_token_ids, request.params)
            if isinstance(placed, Placed):
                self._indices.append(placed.index)
                now = self._world.loop.time()
                late_seconds = SLOWED_SECONDS if now < self._first_seconds + self._slow_until else NEWS_SECONDS
                self._placed[placed.index] = placed.group, now - late_seconds
                await self.tell(placed.group, Submit(placed.request))
                if request.cancel_seconds is not None:
                    tasks.create_task(self._cancel_later(placed.index, request.cancel_seconds), name=f"client of request {placed.index}")
            else:
                self._indices.append(placed.request)
        self._submitted = True
        self._look_for_the_end()

    async def _cancel_later(self, index: int, seconds: float) -> None:
        await self._seams.clock.sleep(seconds)
        for decision in self._gateway.cancel(index):
            if isinstance(decision, SendCancel):
                await self.tell(decision.group, decision.cancel)
        self._look_for_the_end()

    async def _quieten(self) -> None:
        """Heal everything, let what is on its way arrive and who is to live again begin, and look at what is left."""
        self._faults.heal()
        self._world.network.conditions = CALM
        healed = self._world.loop.time()
        await self._seams.clock.sleep(QUIET_SECONDS)
        while not self._verdict.any_accused:
            if self._servers.settled and not any(inside.computes for inside in self._insides()):
                break
            if self._world.loop.time() > healed + SETTLE_SECONDS:
                busy = [f"{inside.name} computes" for inside in self._insides() if inside.computes]
                raise InvariantError("I5", f"{SETTLE_SECONDS:g} s after all had healed: {'; '.join(self._servers.account() + busy)}")
            await self._seams.clock.sleep(QUIET_SECONDS)
        if self._verdict.any_accused:
            await asyncio.get_running_loop().create_future()  # the verdict is on its way
        insides = self._insides()
        while credit_faults(insides) and self._world.loop.time() < healed + SETTLE_SECONDS:
            await self._seams.clock.sleep(QUIET_SECONDS)  # what was sent on a link 300 times as slow is still on its way
        self.look()
        self._servers.check_in_use(insides)
        self._world.num_faults.update(self._servers.counts)
        for inside in insides:
            self._world.num_faults.update(inside.branches())
        if left := [text for inside in insides for text in inside.leftovers()]:
            raise InvariantError("I8", "left when all had ended: " + "; ".join(left))
        if wrong := credit_faults(insides):
            raise InvariantError("I4", "; ".join(wrong))

    def _look_for_the_end(self) -> None:
        now = self._world.loop.time()
        for index, (group, since) in self._placed.items():
            if index not in self._outage_seconds and self._gateway.log(index).end is not None:
                self._outage_seconds[index] = self._outages.longest(group, since, now)
        if self._submitted and not self._gateway.num_unfinished:
            self._all_ended.set()
