"""Runs a whole graph in virtual time: the real launcher, gateway, monitor and workers on simulated processes and a simulated network.

`serve` starts the launcher, sends the requests while the scenario injects its faults, waits for the end of every request, heals all
faults, checks for leftovers, and stops. invariants.py checks the results of the clients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from flowrt.actors.control import Control, KvCompleted, Statistics, Submit
from flowrt.errors import NotRunningError, UserError, WorkerDiedError
from flowrt.gateway.gateway import Gateway
from flowrt.gateway.log_writer import LogWriter
from flowrt.gateway.request_log import RequestLog
from flowrt.gateway.requests import Requests
from flowrt.gateway.routing import find_policy
from flowrt.graph.model import GATEWAY
from flowrt.graph.recovery import attention_groups, prefill_workers
from flowrt.launcher import events
from flowrt.launcher.launcher import RESPONSE_SECONDS, STATISTICS_SECONDS, WORKER, Launcher
from flowrt.launcher.served_requests import apply_group_change
from flowrt.launcher.starts import IMPORT_SECONDS
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelConfig
from flowrt.reliability.scenario import PERMANENT_SECONDS, Crash, Cut
from flowrt.seams import Seams
from flowrt.simulation.case import Case
from flowrt.simulation.clients import Clients, DirectClients, SimulatedDetokenizer
from flowrt.simulation.errors import DeadlockError, InvariantError
from flowrt.simulation.faults import Faults
from flowrt.simulation.front_ends import FrontEndClients, services_of
from flowrt.simulation.group_checks import GroupChecks
from flowrt.simulation.hosts import SimulatedEngine, clock_faults
from flowrt.simulation.inside import WorkerInternals, credit_faults
from flowrt.simulation.invariants import falls_back, fastest_clock
from flowrt.simulation.modelled_time import ModelledTimeChecks
from flowrt.simulation.network_conditions import CALM
from flowrt.simulation.outages import Outages, holders_of
from flowrt.simulation.page_waits import circular_waits
from flowrt.simulation.processes import SimulatedBackend
from flowrt.simulation.request_log import LauncherLog
from flowrt.simulation.served import ClientRecord, Served
from flowrt.simulation.server_checks import ServerChecks
from flowrt.simulation.world import World
from flowrt.simulation.wrong_results import WrongResults
from flowrt.system.process_backend import BackendOwner
from flowrt.transports.contract import Channel

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
    return simulated.served()


@lru_cache(maxsize=64)
def config_of(path: str) -> ModelConfig:
    return read_model_config(Path(path))


_latest_run: ContextVar[SimulatedRun] = ContextVar("_latest_run")


class SimulatedRun:
    """`log`: None for a run without a request log. `earlier`: the clients of the launcher that had the log before."""

    def __init__(self, world: World, case: Case, log: LauncherLog | None = None, earlier: Sequence[ClientRecord] = ()) -> None:
        graph = case.graph
        if (model := graph.model) is None:
            raise ValueError("only a graph with a model has requests to serve")
        if case.exact:  # its whole numbers are float64, and the schemas of edges follow the graph's dtype
            graph = graph.replace(model=replace(model, dtype="float64"))
        if case.front_ends:
            graph = graph.replace(serving=graph.serving.replace(front_ends=case.front_ends))
        self._world, self._case, self._log_on_disk = world, case, log
        _latest_run.set(self)
        ends = [fault.ends_seconds for fault in case.scenario.faults if fault.ends_seconds > fault.at_seconds]
        self._slow_until = max(ends) + NEWS_SECONDS if ends else 0.0
        world.one_clock = graph.emulation is not None  # the two ends of an emulated link compare times
        self._modelled_time = ModelledTimeChecks(world, graph.emulation)
        open_engine = partial(SimulatedEngine.open, world, case.processes)
        self._seams = replace(world.seams(GATEWAY), open_backend=self._open_backend, open_engine=open_engine)
        if log is not None:
            self._seams = replace(self._seams, open_log_folder=log.open_folder)
        self._insides: dict[str, WorkerInternals] = {}  # of the latest incarnation of each worker
        self._launcher = Launcher(
            graph,
            self._seams,
            on_event=self._on_event,
            on_control=self._on_control,
            on_line=lambda name, line: None,
            services=services_of(graph) if case.front_ends else {},
            farewell=self._farewell,
            worker=case.worker,
            unavailable_reason=lambda scheme: None,  # the network stands in for all of them
        )
        config, limits = config_of(model.path), graph.group_limits()
        self._gateway = Gateway(
            attention_groups(graph),
            limits,
            config.max_position_embeddings,
            config.vocab_size,
            draw_seed=self._seams.new_seed,
            new_detokenizer=SimulatedDetokenizer,
            eos_token_ids=config.eos_token_ids,
            max_requests=case.max_requests,
            now=self._seams.clock.now,
            lost_group_seconds=graph.reliability.lost_group_seconds,
            prefill_workers=prefill_workers(graph),
            routing=find_policy(graph.routing),
            limits_of=graph.limits_of,
            long_prompts=graph.long_prompts,
            kv_hold_seconds=graph.reliability.kv_hold_seconds,
        )
        on_token = None
        if (trace := case.trace) is not None:
            trace.begin(world.loop.time)
            on_token = trace.collector.add_token
        self._requests = Requests(self._gateway, self._send, self._launcher.health_record.progress, self._seams.clock, on_token)
        resolved = replace(case, graph=self._launcher.graph)
        harmless = [fault for fault in case.scenario.faults if falls_back(resolved, fault)]
        self._faults = Faults(world, case.scenario, self._living_inside, harmless, case.processes.segfault_one_in, graph)
        self._wrong_results = WrongResults(case.poison, case.glitch, lambda: world.num_faults.update(["glitch"]))
        self._lost_group_seconds = graph.reliability.lost_group_seconds
        self._group_checks = GroupChecks(world, graph, self._living_inside, self._log, self._faults)
        self._outages = Outages(holders_of(self._launcher.graph, config))
        fastest, refuses = fastest_clock(case.scenario), case.processes.refuses_first
        self._checks = ServerChecks(world, self._launcher.graph, self._launcher, self._outages, self._faults, fastest, refuses)
        clients = self._requests, lambda: self._failure is not None, self._group_checks.open
        self._front_ends = FrontEndClients(world, self._launcher, *clients, log is not None) if case.front_ends else None
        run_client = (self._front_ends or DirectClients(self._seams, *clients)).run
        self.clients = Clients(case, self._seams, earlier, run_client, lambda: self._failure is not None, self._log, self._note_client)
        self._has_permanent_cut = any(isinstance(fault, Cut) and fault.for_seconds >= PERMANENT_SECONDS for fault in case.scenario.faults)
        self._open: dict[str, dict[str, float]] = {}  # request id -> its workers, since when an outage there may end it
        self._outage_seconds: dict[str, float] = {}  # of requests that have ended
        self._statistics: dict[str, Statistics] = {}
        self._failure: UserError | WorkerDiedError | None = None
        self._first_seconds = self._failed_seconds = world.loop.time()
        self._progress, self._progress_seconds = (0, 0), world.loop.time()
        world.loop.accounts.append(self.account)
        world.loop.watchers.append(self.look)

    # The run.

    async def serve(self) -> None:
        writer = self._open_log()
        if self._case.faults_from_launch:
            self._faults.begin()
        try:
            async with self._launcher:
                self._requests.begin()
                if self._front_ends is not None:
                    self._front_ends.served.begin()
                try:
                    self._first_seconds = self._world.loop.time()
                    if self._log_on_disk is not None:
                        self._log_on_disk.begin()
                    if not self._case.faults_from_launch:
                        self._faults.begin()
                    async with asyncio.TaskGroup() as clients:
                        clients.create_task(self._read_statistics(), name="reader of statistics")
                        if self._case.drain_seconds is not None:
                            clients.create_task(self._drain(self._case.drain_seconds), name="drain")
                        await self.clients.submit_all(clients)
                    if self._failure is None:
                        if self._log_on_disk is not None:
                            await self._requests.drain()  # resumed requests go on without a client
                        await self._quieten()
                        async with asyncio.timeout(SETTLE_SECONDS):
                            await (self._requests.drain() if self._front_ends is None else self._front_ends.served.drain(SETTLE_SECONDS))
                            await self._launcher.drain()
                finally:
                    await self._requests.aclose()
                    if self._front_ends is not None:
                        await self._front_ends.served.aclose()
                self._statistics = await self._launcher.stop()
        except (UserError, WorkerDiedError) as error:
            self._failure = error
        self._faults.heal()
        if writer is None or self._failure is None:
            self._requests.end_all()
        if writer is not None:
            await writer.aclose()
        self._checks.look([])

    @property
    def is_continued(self) -> bool:
        """Whether another launcher continues this run."""
        log = self._log_on_disk
        return log is not None and (log.died.done() or (self._failure is not None and log.is_full))

    def served(self) -> Served:
        failure, poison = self._failure, (self._world.num_faults["poisoned"], self._wrong_results.num_parts)
        if failure is None:
            return Served(tuple(self.clients.records), self._statistics, None, None, None, *poison)
        seconds = self._failed_seconds - self._first_seconds
        return Served(tuple(self.clients.records), self._statistics, getattr(failure, "process", ""), str(failure), seconds, *poison)

    def _open_log(self) -> LogWriter | None:
        if self._log_on_disk is None:
            return None
        writer, contents = self._log_on_disk.open(self._seams, {"graph": self._launcher.graph.folder})
        writer.on_failure = self._launcher.end
        for number in self._requests.begin_log(writer, contents):
            self._group_checks.open(f"request-{number}")
        resumed = {request_id for number in contents.requests if self._log(request_id := f"request-{number}") is not None}
        self.clients.resumed |= resumed
        self._world.num_faults["resumed request"] += len(resumed)
        return writer

    # Callbacks of the launcher and the gateway.

    async def _open_backend(
        self, run_id: str, owner: BackendOwner, preload: Sequence[str], num_processes: int, seconds: float
    ) -> SimulatedBackend:
        return await SimulatedBackend.open(self._world, owner, self._case.processes)

    def begin_worker(self, worker: Any) -> None:
        """Called with each new Worker, before it loads."""
        inside = WorkerInternals(worker)
        inside.when_named(lambda: self._insides.update({inside.name: inside}))
        inside.when_named(lambda: self._modelled_time.watch(worker))
        if (trace := self._case.trace) is not None:
            inside.when_named(lambda: trace.begin_worker(inside.name, worker))
        if self._case.exact:
            inside.use_exact_model(self._wrong_results, self._faults.on_poison)

    def _on_event(self, event: events.Event) -> None:
        self._checks.on_event(event)
        self._group_checks.on_event(event)
        events.news(event)
        apply_group_change(event, self._requests)
        if self._front_ends is not None:
            self._front_ends.note(event)
        if isinstance(event, events.RunFailed):
            self._failed_seconds = self._world.loop.time()
            if isinstance(event.error, UserError | WorkerDiedError):
                self._failure = event.error

    def _on_control(self, worker: str, control: Control) -> None:
        before = self._group_checks.tokens_before(control)
        self._requests.on_control(worker, control)
        if self._front_ends is not None:
            self._front_ends.on_control(worker, control)
        self._group_checks.check_tokens(worker, control, before)
        self._note_ends()

    async def _farewell(self, error: Exception) -> None:
        if self._front_ends is not None:
            await self._front_ends.served.fail(error)

    async def _send(self, group: str, control: Control) -> None:
        if isinstance(control, Submit):
            now = self._world.loop.time()
            request = control.request
            if request.kv is None or request.kv.is_complete:  # else its prompt is still computed in the prefill worker
                self._note_outage(request.id)
            late_seconds = SLOWED_SECONDS if now < self._first_seconds + self._slow_until else NEWS_SECONDS
            self._open.setdefault(request.id, {})[group] = now - late_seconds
            self._group_checks.on_submit(group, control)
        elif isinstance(control, KvCompleted):
            self._group_checks.on_completed(group, control)
        await self._launcher.send(group, control)

    def _note_ends(self) -> None:
        for request_id in list(self._open):
            if not self._gateway.is_open(request_id):
                self._note_outage(request_id)
        self._group_checks.look(self._gateway.is_open)

    def _note_outage(self, request_id: str) -> None:
        """Record the longest outage of the workers that the request leaves."""
        for group, since in self._open.pop(request_id, {}).items():
            seconds = self._outages.longest(group, since, self._world.loop.time())
            self._outage_seconds[request_id] = max(seconds, self._outage_seconds.get(request_id, 0.0))

    def _log(self, request_id: str) -> RequestLog | None:
        """The log of a request; None when it is not kept."""
        try:
            return self._gateway.log(int(request_id.removeprefix("request-")))
        except KeyError:
            return None

    # Clients.

    def _note_client(self, client: ClientRecord) -> None:
        self._note_ends()
        client.outage_seconds = max(client.outage_seconds, self._outage_seconds.get(client.request_id, 0.0))
        client.no_group_seconds = max(client.no_group_seconds, self._group_checks.no_group_seconds.get(client.request_id, 0.0))
        client.ran_alone |= client.request_id in self._group_checks.ran_alone

    async def _read_statistics(self) -> None:
        """Read the statistics several times; they must arrive in time, whichever process is paused or dies."""
        kinds = {fault.kind for fault in self._case.scenario.faults}
        patience = PROMPT_SECONDS if kinds <= PROMPT_KINDS else STATISTICS_SECONDS + NEWS_SECONDS
        paused = any(GATEWAY in fault.processes for fault in self._case.scenario.faults)
        for _ in range(STATISTICS_READS):
            await self._seams.clock.sleep(self._seams.random.uniform(0.0, 0.1))
            began = self._world.loop.time()
            with contextlib.suppress(UserError, WorkerDiedError, NotRunningError):
                await self._launcher.statistics()
            self._launcher.health_record.health()
            if not paused and self._world.loop.time() > began + patience:
                raise InvariantError("I5", f"statistics took {self._world.loop.time() - began:.3f} s, allowed were {patience:g} s")

    async def _drain(self, seconds: float) -> None:
        """Drain while requests run and faults occur. A group that stands still for ever, and that the run cannot lose, never drains."""
        await self._seams.clock.sleep(seconds)
        with contextlib.suppress(UserError, WorkerDiedError, NotRunningError):
            await self._requests.drain()
            if self._gateway.num_unfinished:
                raise InvariantError("I5", f"{self._gateway.num_unfinished} requests are active after the drain")
            if all(fault.heals or isinstance(fault, Crash) for fault in self._case.scenario.faults):
                await self._launcher.drain()

    # Checks.

    def account(self) -> list[str]:
        """Lines for the text of a deadlock: what each process waits for."""
        lines = [f"gateway: {request_id} at {group}" for request_id, groups in self._open.items() for group in groups]
        lines += [f"{name} stays down" for name in sorted(self._checks.down)]
        return lines + [text for inside in self._living_insides() for text in inside.waiting()]

    def look(self) -> None:
        """Check the invariants that hold at any time during the run."""
        insides = self._living_insides()
        for inside in insides:
            if inside.late_firings:
                raise InvariantError("I2", inside.late_firings[0])
            if kept := inside.kept_of_ended():
                raise InvariantError("I8", kept[0])
            if faults := inside.page_faults():
                raise InvariantError("I3", "; ".join(faults))
        if circle := circular_waits([each for inside in insides for each in inside.sequences()]):
            raise InvariantError("I5", f"these wait for pages of each other: {', '.join(circle)}")
        if self._gateway.num_unfinished > self._gateway.admission.max_requests:
            raise InvariantError("I6", f"{self._gateway.num_unfinished} requests are active, {self._gateway.admission.max_requests} may be")
        self._checks.look(insides)
        self._note_ends()
        now = self._world.loop.time()
        progress = sum(inside.num_firings for inside in insides), self._checks.counts.total()  # of living workers: the first may fall
        patience = self._lost_group_seconds + STUCK_SECONDS + (0 if self._launcher.state.starts.fork_server.is_up else IMPORT_SECONDS)
        if self._has_permanent_cut and self._launcher.state.restarting():  # a process that starts connects to a peer for so long
            patience += RESPONSE_SECONDS
        if progress != self._progress or now < self._first_seconds + self._case.scenario.ends_seconds:
            self._progress, self._progress_seconds = progress, now
        elif now > max(self._progress_seconds, self._checks.next_try_at) + patience and self._gateway.num_unfinished:
            raise DeadlockError(f"nothing for {STUCK_SECONDS:g} s at {now:.6f} s but heartbeats:\n{self._world.loop.describe_waiting()}")

    def _living_inside(self, name: str) -> WorkerInternals | None:
        process, inside = self._world.processes.get(name), self._insides.get(name)
        if process is None or inside is None:  # without a process: a worker inside the launching one
            return inside
        return inside if inside.node == process.node and not process.exit.done() else None

    def _living_insides(self) -> list[WorkerInternals]:
        return [inside for name in self._insides if (inside := self._living_inside(name)) is not None]

    def _busy(self, until: float) -> list[str]:
        """What the run must finish before the last checks: calls, restarts, and retries that are due by `until`."""
        computing = [f"{inside.name} computes" for inside in self._living_insides() if inside.computes]
        return computing + self._launcher.state.restarting() + self._checks.due_retries(until)

    async def _quieten(self) -> None:
        """Heal all faults, wait for messages in flight and for restarts, and check for leftovers."""
        world, clock = self._world, self._seams.clock
        self._faults.heal()
        world.network.conditions = CALM
        healed = world.loop.time()
        await clock.sleep(QUIET_SECONDS)
        if self._checks.down:  # also since then; a step may still wait for a replica, although the clients of its requests have left
            healed += self._launcher.graph.reliability.unavailable_expert_seconds
            await clock.sleep(self._launcher.graph.reliability.unavailable_expert_seconds + QUIET_SECONDS)
        while busy := self._busy(healed + RETRY_SECONDS):
            if self._failure is not None:
                return
            if world.loop.time() > healed + SETTLE_SECONDS:
                raise InvariantError("I5", f"{SETTLE_SECONDS:g} s after all had healed: {'; '.join(busy)}")
            await clock.sleep(QUIET_SECONDS)
        insides = self._living_insides()
        while (credit_faults(insides) or self._checks.unused(insides)) and world.loop.time() < healed + SETTLE_SECONDS:
            await clock.sleep(QUIET_SECONDS)  # a message on a link 300 times as slow is still in flight
        if self._failure is not None:
            return
        self.look()
        if (unused := self._checks.unused(insides)) is not None:
            raise InvariantError("I8", unused)
        if missing := self._checks.missing_standbys():
            raise InvariantError("I8", missing[0])
        world.num_faults.update({name: count for name, count in self._checks.counts.items() if name})
        for inside in insides:
            world.num_faults.update(inside.branches())
        if left := [text for inside in insides for text in inside.leftovers()]:
            raise InvariantError("I8", "left when all had ended: " + "; ".join(left))
        if wrong := credit_faults(insides):
            raise InvariantError("I4", "; ".join(wrong))
        if wrong := clock_faults(world, self._launcher.workers.values()):
            raise InvariantError("I9", "; ".join(wrong))
        if self._front_ends is not None:
            self._front_ends.check_ended()
        num_kept = 0 if self._log_on_disk is None else len(self._requests._unread)
        if self._gateway.num_unfinished or self._gateway.num_logs != num_kept:
            raise InvariantError("I8", f"the gateway keeps {self._gateway.num_logs} logs when all clients have left")


async def run_worker(control: Channel, seams: Seams) -> None:
    """The entry of each worker: runs the real worker and observes its internal state."""
    run = _latest_run.get()
    await import_module(WORKER.partition(":")[0]).serve(control, seams, None, run.begin_worker)  # imported when used: it brings torch
