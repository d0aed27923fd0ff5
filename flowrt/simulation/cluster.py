"""Runs a whole graph in virtual time: the real launcher, gateway, monitor and workers on simulated processes and a simulated network.

`serve` starts the launcher, sends the requests while the scenario injects its faults, waits for the end of every request, heals all
faults, checks for leftovers, and stops. invariants.py checks the results of the clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from flowrt.actors.control import Control, KvCompleted, Submit
from flowrt.actors.outputs import TokenEvent
from flowrt.errors import GraphError, NotRunningError, UserError, WorkerDiedError
from flowrt.gateway.gateway import ServedModel
from flowrt.gateway.log_contents import LogContents
from flowrt.gateway.log_writer import LogWriter
from flowrt.gateway.request_log import RequestLog
from flowrt.graph.model import GATEWAY, Graph
from flowrt.launcher import events
from flowrt.launcher.graph_change import DRAIN_SECONDS
from flowrt.launcher.launcher import RESPONSE_SECONDS, STATISTICS_SECONDS
from flowrt.launcher.starts import IMPORT_SECONDS
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelConfig
from flowrt.reliability.scenario import PERMANENT_SECONDS, Crash, Cut, Hang, Stall
from flowrt.seams import Seams
from flowrt.simulation.case import Case
from flowrt.simulation.clients import Clients, DirectClients, SimulatedDetokenizer
from flowrt.simulation.errors import DeadlockError, InvariantError
from flowrt.simulation.front_ends import FrontEndClients
from flowrt.simulation.group_checks import GroupChecks
from flowrt.simulation.hosts import SimulatedEngine, clock_faults
from flowrt.simulation.inside import WorkerInternals
from flowrt.simulation.invariants import fastest_clock
from flowrt.simulation.log_disk import LauncherLog
from flowrt.simulation.modelled_time import ModelledTimeChecks
from flowrt.simulation.network_conditions import CALM
from flowrt.simulation.observed_run import ObservedRun
from flowrt.simulation.outages import Outages, holders_of
from flowrt.simulation.page_waits import EngineSequence, circular_waits
from flowrt.simulation.served import ClientRecord, Served
from flowrt.simulation.server_checks import ServerChecks
from flowrt.simulation.world import World
from flowrt.simulation.wrong_results import WrongResults

QUIET_SECONDS = 2.0  # after the last end, with everything healed: all messages in flight arrive
NEWS_SECONDS, SLOWED_SECONDS = 0.3, 10.0  # a group may learn of a restarted server this late; while a fault may slow it down
RETRY_SECONDS = 5.0  # from healing everything: a process out of its restart budget must be started again if that is due by then
SETTLE_SECONDS = 30.0  # from healing everything to the last restart
STUCK_SECONDS = 20.0  # and `lost_group_seconds`, without a firing, a token or a restart while no fault lasts: heartbeats never end
STATISTICS_READS = 4
PROMPT_SECONDS = 1.0  # for statistics, under faults of PROMPT_KINDS
PROMPT_KINDS = frozenset({"crash", "duplicate", "roll_back", "tiny_queues"})  # under these each worker responds, or its end is noticed


async def serve(world: World, case: Case) -> Served:
    """Run the case's graph until every request has ended, for `world.run`. Raises InvariantError for wrong internal state of workers (I3,
    I4) and for leftovers (I8)."""
    simulated = SimulatedRun(world, case)
    await simulated.serve()
    if left := world.leftovers():
        raise InvariantError("I8", f"left behind: {', '.join(left)}")
    return simulated.outcome()


@lru_cache(maxsize=64)
def config_of(path: str) -> ModelConfig:
    return read_model_config(Path(path))


class SimulatedRun(ObservedRun):
    """`log`: None for a run without a request log. `earlier`: the clients of the launcher that had the log before."""

    def __init__(self, world: World, case: Case, log: LauncherLog | None = None, earlier: Sequence[ClientRecord] = ()) -> None:
        graph = case.graph
        if (model := graph.model) is None:
            raise ValueError("only a graph with a model has requests to serve")
        graph = self._adapted(case, graph)
        self._log_on_disk = log
        ends = [fault.ends_seconds for fault in case.scenario.faults if fault.ends_seconds > fault.at_seconds]
        self._slow_until = max(ends) + NEWS_SECONDS if ends else 0.0
        world.one_clock = graph.emulation is not None  # the two ends of an emulated link compare times
        self._modelled_time = ModelledTimeChecks(world, graph)
        self._seams = replace(world.seams(GATEWAY), open_engine=partial(SimulatedEngine.open, world, case.processes))
        if log is not None:
            self._seams = replace(self._seams, open_log_folder=log.open_folder)
        self._logged: list[str] = []  # requests that were in the log
        config = config_of(model.path)
        self._front_ends = FrontEndClients(world, graph, log is not None) if case.front_ends else None
        served = replace(ServedModel.of(config, SimulatedDetokenizer), max_requests=case.max_requests)
        super().__init__(world, case, graph, self._seams, model=served, reports=self._front_ends, open_log=self._open_kept_log)
        self._requests = self.require_requests()
        self._gateway = self._requests.gateway
        if case.trace is not None:
            case.trace.begin(world.loop.time)
        self._wrong_results = WrongResults(case.poison, case.glitch, lambda: world.num_faults.update(["glitch"]))
        self._lost_group_seconds = graph.reliability.lost_group_seconds
        self._group_checks = GroupChecks(world, graph, self.living_inside, self._log_of, self.faults)
        self._config = config
        self._outages = Outages(holders_of(self.graph, config))
        self._drains_until = math.inf
        fastest, refuses = fastest_clock(case.scenario), case.processes.refuses_first
        self._checks = ServerChecks(world, self.graph, self.launcher, self._outages, self.faults, fastest, refuses)
        if self._front_ends is not None:
            self._front_ends.watch(self, self._group_checks.open)
        run_client = (self._front_ends or DirectClients(self, self._group_checks.open)).run
        self.clients = Clients(
            case, self._seams, earlier, run_client, lambda: self.launcher.failure is not None, self._log_of, self._note_client
        )
        self._versions = [self.graph]
        lasting = [fault for fault in case.scenario.faults if isinstance(fault, Cut | Stall | Hang)]
        self._may_silence_start = any(fault.for_seconds >= PERMANENT_SECONDS for fault in lasting)
        self._open: dict[str, dict[str, float]] = {}  # request id -> its workers, since when an outage there may end it
        self._outage_seconds: dict[str, float] = {}  # of requests that have ended
        self._first_seconds = self._failed_seconds = world.loop.time()
        self._progress, self._progress_seconds = (0, 0), world.loop.time()
        self._sequences: dict[WorkerInternals, list[EngineSequence]] = {}  # as of the last look
        world.loop.accounts.append(self.account)
        world.loop.watchers.append(self.look)

    @staticmethod
    def _adapted(case: Case, graph: Graph) -> Graph:
        if case.exact and graph.model is not None:  # its whole numbers are float64, and the schemas of edges follow the graph's dtype
            graph = graph.replace(model=replace(graph.model, dtype="float64", kv_cache="dtype"))
        if case.front_ends:
            graph = graph.replace(serving=graph.serving.replace(front_ends=case.front_ends))
        return graph

    # The run.

    async def serve(self) -> None:
        if self.case.faults_from_launch:
            self.faults.begin()
        try:
            async with self:
                self._first_seconds = self.world.loop.time()
                if self._log_on_disk is not None:
                    self._log_on_disk.begin()
                if not self.case.faults_from_launch:
                    self.faults.begin()
                async with asyncio.TaskGroup() as clients:
                    clients.create_task(self._read_statistics(), name="reader of statistics")
                    if self.case.drain_seconds is not None:
                        clients.create_task(self._drain(self.case.drain_seconds), name="drain")
                    clients.create_task(self._change(), name="changes of the graph")
                    await self.clients.submit_all(clients)
                if self.launcher.failure is None:
                    if self._log_on_disk is not None:
                        await self._requests.drain()  # resumed requests go on without a client
                    await self._quieten()
                    async with asyncio.timeout(SETTLE_SECONDS):
                        await self.end_serving(SETTLE_SECONDS)
                        await self.drain()
        except (UserError, WorkerDiedError):
            if self.launcher.failure is None:
                raise
        self.faults.heal()
        self._checks.look([])

    @property
    def is_continued(self) -> bool:
        """Whether another launcher continues this run."""
        log = self._log_on_disk
        return log is not None and (log.died.done() or (self.launcher.failure is not None and log.is_full))

    def outcome(self) -> Served:
        failure, poison = self.launcher.failure, (self.world.num_faults["poisoned"], self._wrong_results.num_parts)
        if failure is None:
            return Served(tuple(self.clients.records), self.final_statistics, None, None, None, *poison)
        seconds = self._failed_seconds - self._first_seconds
        return Served(tuple(self.clients.records), self.final_statistics, getattr(failure, "process", ""), str(failure), seconds, *poison)

    def _open_kept_log(self, graph: Graph, seams: Seams) -> tuple[LogWriter, LogContents] | None:
        if self._log_on_disk is None:
            return None
        writer, contents = self._log_on_disk.open(seams, {"graph": graph.folder})
        self._logged = [f"request-{number}" for number in contents.requests]
        return writer, contents

    def begin_log(self) -> None:
        super().begin_log()
        for number in self.resumed:
            self._group_checks.open(f"request-{number}")
        self.clients.resumed |= {request_id for request_id in self._logged if self._log_of(request_id) is not None}
        self.world.num_faults["resumed request"] += len(self.clients.resumed)

    # What the run sees.

    def new_inside(self) -> WorkerInternals:
        return WorkerInternals(None, self._wrong_results if self.case.exact else None, self.faults.on_poison, self.on_worker)

    def on_worker(self, inside: WorkerInternals) -> None:
        super().on_worker(inside)
        self._modelled_time.watch(inside.worker)
        if self.case.trace is not None:
            self.case.trace.begin_worker(inside.name, inside.worker)

    def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.GraphVersion):
            self._outages.place(holders_of(event.graph, self._config), self.world.loop.time())
            self._check_leaving(event.graph)
            self._versions.append(event.graph)
        self._checks.on_event(event)
        self._group_checks.on_event(event)
        events.news(event)
        super().on_event(event)
        if self._front_ends is not None:
            self._front_ends.on_event(event)
        if isinstance(event, events.RunFailed):
            self._failed_seconds = self.world.loop.time()

    def on_control(self, worker: str, control: Control) -> None:
        before = self._group_checks.tokens_before(control)
        super().on_control(worker, control)
        if self._front_ends is not None:
            self._front_ends.on_control(worker, control)
        self._group_checks.check_tokens(worker, control, before)
        self._note_ends()

    def on_token(self, event: TokenEvent) -> None:
        super().on_token(event)
        if self.case.trace is not None:
            self.case.trace.collector.add_token(event)

    async def send(self, group: str, control: Control) -> None:
        if isinstance(control, Submit):
            now = self.world.loop.time()
            request = control.request
            if request.kv is None or request.kv.is_complete:  # else its prompt is still computed in the prefill worker
                self._note_outage(request.id)
            late_seconds = SLOWED_SECONDS if now < self._first_seconds + self._slow_until else NEWS_SECONDS
            self._open.setdefault(request.id, {})[group] = now - late_seconds
            self._group_checks.on_submit(group, control)
        elif isinstance(control, KvCompleted):
            self._group_checks.on_completed(group, control)
        await super().send(group, control)

    def _has_failed(self) -> bool:
        return self.launcher.failure is not None

    def _note_ends(self) -> None:
        for request_id in list(self._open):
            if not self._gateway.is_open(request_id):
                self._note_outage(request_id)
        self._group_checks.look(self._gateway.is_open)

    def _note_outage(self, request_id: str) -> None:
        """Record the longest outage of the workers that the request leaves."""
        for group, since in self._open.pop(request_id, {}).items():
            seconds = self._outages.longest(group, since, self.world.loop.time())
            self._outage_seconds[request_id] = max(seconds, self._outage_seconds.get(request_id, 0.0))

    def _log_of(self, request_id: str) -> RequestLog | None:
        """The log of a request; None when it is not kept."""
        try:
            return self._gateway.log(int(request_id.removeprefix("request-")))
        except KeyError:
            return None

    # Clients.

    def _note_client(self, client: ClientRecord) -> None:
        self._note_ends()
        self._note_outage(client.request_id)  # of a request that is open when the launcher dies, too
        client.outage_seconds = max(client.outage_seconds, self._outage_seconds.get(client.request_id, 0.0))
        client.no_group_seconds = max(client.no_group_seconds, self._group_checks.no_group_seconds.get(client.request_id, 0.0))
        client.crashes_alone = max(client.crashes_alone, len(self._group_checks.crashes_alone[client.request_id]))

    async def _read_statistics(self) -> None:
        """Read the statistics several times; they must arrive in time, whichever process is paused or dies."""
        kinds = {fault.kind for fault in self.case.scenario.faults}
        patience = PROMPT_SECONDS if kinds <= PROMPT_KINDS else STATISTICS_SECONDS + NEWS_SECONDS
        paused = any(GATEWAY in fault.processes for fault in self.case.scenario.faults)
        for _ in range(STATISTICS_READS):
            await self._seams.clock.sleep(self._seams.random.uniform(0.0, 0.1))
            began = self.world.loop.time()
            with contextlib.suppress(UserError, WorkerDiedError, NotRunningError):
                await self.launcher.statistics()
            self.launcher.health()
            if not paused and self.world.loop.time() > began + patience:
                raise InvariantError("I5", f"statistics took {self.world.loop.time() - began:.3f} s, allowed were {patience:g} s")

    async def _change(self) -> None:
        """Change the graph while requests run and faults occur. A process that does not join undoes its change."""
        for change in self.case.changes:
            await self._seams.clock.sleep(self._first_seconds + change.at_seconds - self.world.loop.time())
            target = self._adapted(self.case, change.graph)
            try:
                await self.apply(target)
            except GraphError:  # an earlier change was undone
                self.world.num_faults["change refused"] += 1
            except (UserError, WorkerDiedError, NotRunningError) as error:
                if self.launcher.failure is not None:
                    return
                if not isinstance(error, WorkerDiedError):
                    raise
                self.world.num_faults["change undone"] += 1
            else:
                self.world.num_faults["graph changed"] += 1
                if {*self.graph.process_names()} != {*target.process_names()} or self.graph.leaving:
                    raise InvariantError("I8", f"the graph has {self.graph.process_names()}, expected {target.process_names()}")

    def _check_leaving(self, graph: Graph) -> None:
        """A process that leaves gets nothing new, and ends when nothing is left there (I8), unless that takes too long."""
        now, gone = self.world.loop.time(), set(self._versions[-1].leaving) - {*graph.process_names()}
        if gone and now < self._drains_until:
            for inside in self.living_insides():
                is_current = self.launcher.incarnations.get(inside.name) == inside.worker.incarnation
                # One that has lost its control connection is about to be killed.
                is_up = self.world.is_alive(self.world.processes[inside.name]) and self.launcher.state.is_usable(inside.name)
                used = inside.uses_leaving() if inside.worker.graph.version >= self._versions[-1].version else f"{inside.name} sends there"
                if is_current and is_up and used is not None:
                    raise InvariantError("I8", f"{', '.join(sorted(gone))} ends too soon: {used}")
        if graph.leaving:
            self._drains_until = now + DRAIN_SECONDS

    async def _drain(self, seconds: float) -> None:
        """Drain while requests run and faults occur. A group that stands still for ever, and that the run cannot lose, never drains."""
        await self._seams.clock.sleep(seconds)
        with contextlib.suppress(UserError, WorkerDiedError, NotRunningError):
            await self._requests.drain()
            if self._gateway.num_unfinished:
                raise InvariantError("I5", f"{self._gateway.num_unfinished} requests are active after the drain")
            if all(fault.heals or isinstance(fault, Crash) for fault in self.case.scenario.faults):
                await self.launcher.drain()

    # Checks.

    def account(self) -> list[str]:
        """Lines for the text of a deadlock: what each process waits for."""
        lines = [f"gateway: {request_id} at {group}" for request_id, groups in self._open.items() for group in groups]
        lines += [f"{name} stays down" for name in sorted(self._checks.down)]
        return lines + [text for inside in self.living_insides() for text in inside.waiting()]

    def look(self) -> None:
        """Check the invariants that hold at any time during the run, of a process if it has had a step since the last call."""
        insides, ran = self.living_insides(), self.world.loop.ran
        for inside in insides:
            if inside.node not in ran:
                continue
            if inside.late_firings:
                raise InvariantError("I2", inside.late_firings[0])
            if kept := inside.kept_of_ended():
                raise InvariantError("I8", kept[0])
            if (leaving := inside.prefers_leaving()) is not None:
                raise InvariantError("I8", leaving)
            if faults := inside.page_faults():
                raise InvariantError("I3", "; ".join(faults))
            self._sequences[inside] = inside.sequences()
        if circle := circular_waits([each for inside in insides for each in self._sequences.get(inside, ())]):
            raise InvariantError("I5", f"these wait for pages of each other: {', '.join(circle)}")
        if self._gateway.num_unfinished > self._gateway.admission.max_requests:
            raise InvariantError("I6", f"{self._gateway.num_unfinished} requests are active, {self._gateway.admission.max_requests} may be")
        self._checks.look(insides)
        self._note_ends()
        now = self.world.loop.time()
        progress = sum(inside.num_firings for inside in insides), self._checks.counts.total()  # of living workers: the first may fall
        patience = self._lost_group_seconds + STUCK_SECONDS + (0 if self.launcher.state.starts.fork_server.is_up else IMPORT_SECONDS)
        if self._may_silence_start and self.launcher.state.restarting():  # a process that starts may be silent for so long
            patience += RESPONSE_SECONDS
        if progress != self._progress or now < self._first_seconds + self.case.scenario.ends_seconds:
            self._progress, self._progress_seconds = progress, now
        elif now > max(self._progress_seconds, self._checks.next_try_at) + patience and self._gateway.num_unfinished:
            raise DeadlockError(f"nothing for {STUCK_SECONDS:g} s at {now:.6f} s but heartbeats:\n{self.world.loop.describe_waiting()}")

    def _busy(self, until: float) -> list[str]:
        """What the run must finish before the last checks: calls, restarts, and retries that are due by `until`."""
        computing = [f"{inside.name} computes" for inside in self.living_insides() if inside.computes]
        return computing + self.launcher.state.restarting() + self._checks.due_retries(until)

    async def _quieten(self) -> None:
        """Heal all faults, wait for messages in flight and for restarts, and check for leftovers."""
        world, clock = self.world, self._seams.clock
        self.faults.heal()
        world.network.conditions = CALM
        healed = world.loop.time()
        await clock.sleep(QUIET_SECONDS)
        if self._checks.down:  # also since then; a step may still wait for a replica, although the clients of its requests have left
            healed += self.graph.reliability.unavailable_expert_seconds
            await clock.sleep(self.graph.reliability.unavailable_expert_seconds + QUIET_SECONDS)
        while busy := self._busy(healed + RETRY_SECONDS):
            if self.launcher.failure is not None:
                return
            if world.loop.time() > healed + SETTLE_SECONDS:
                raise InvariantError("I5", f"{SETTLE_SECONDS:g} s after all had healed: {'; '.join(busy)}")
            await clock.sleep(QUIET_SECONDS)
        while self.launcher.failure is None and (self._is_unsettled() or self._busy(healed + RETRY_SECONDS)):
            if world.loop.time() >= healed + SETTLE_SECONDS:
                break
            await clock.sleep(QUIET_SECONDS)  # a message on a link 300 times as slow is still in flight, or its end has been marked dead
        if self.launcher.failure is not None:
            return
        self.look()
        if (unused := self._checks.unused(self.living_insides())) is not None:
            raise InvariantError("I8", unused)
        if missing := self._checks.missing_standbys():
            raise InvariantError("I8", missing[0])
        world.num_faults.update({name: count for name, count in self._checks.counts.items() if name})
        self.check_leftovers()
        if wrong := clock_faults(world, self.launcher.workers.values()):
            raise InvariantError("I9", "; ".join(wrong))

    def _is_unsettled(self) -> bool:
        return bool(self.left_behind() or self._checks.unused(self.living_insides()))

    def leftovers(self) -> list[str]:
        return super().leftovers() if self._front_ends is None else super().leftovers() + self._front_ends.leftovers()
