"""Composes one run of a graph: launcher, gateway with its requests and their log, front ends, and the endpoint of a user's graph.

The Python API and the simulation run the same composition. Each event of the launcher and each message of a worker reaches every part.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flowrt.actors.control import Control, Statistics, TraceRecords
from flowrt.actors.outputs import TokenEvent
from flowrt.errors import NotRunningError, UserError
from flowrt.gateway.gateway import Gateway, ServedModel
from flowrt.gateway.log_contents import LogContents
from flowrt.gateway.log_writer import LogWriter
from flowrt.gateway.request_metrics import RequestMetrics
from flowrt.gateway.requests import Requests
from flowrt.graph.model import GATEWAY, INPUT, OUTPUT, Graph
from flowrt.launcher import events
from flowrt.launcher.launcher import Launcher, LaunchOptions
from flowrt.launcher.model_facts import facts_of
from flowrt.launcher.served_requests import Reports, ServedRequests
from flowrt.launcher.trace_collector import TraceCollector
from flowrt.launcher.warm_up import warm_up
from flowrt.seams import Seams

ENDPOINT = "flowrt.workers.endpoint"  # imported for a user's graph only: it brings torch

OpenLog = Callable[[Graph, Seams], tuple[LogWriter, LogContents] | None]


class Run:
    """`async with Run(...) as run:` enters when every worker is connected and requests may come. It runs once.

    model: what the gateway must know of the model that the graph serves. reports: the front ends that serve it; None: it has none.
    open_log: opens the request log that the graph asks for; None if it asks for none. trace: collects what workers record, see
    LaunchOptions.is_traced. on_event: called with each event, after all parts. Raises as Launcher.
    """

    def __init__(
        self,
        graph: Graph,
        seams: Seams,
        options: LaunchOptions = LaunchOptions(),
        *,
        model: ServedModel | None = None,
        reports: Reports | None = None,
        open_log: OpenLog = lambda graph, seams: None,
        trace: TraceCollector | None = None,
        on_event: Callable[[events.Event], None] = lambda event: None,
    ) -> None:
        self._open_log, self._trace, self._on_event = open_log, trace, on_event
        self.endpoint: Any = import_module(ENDPOINT).Endpoint(graph) if INPUT in graph.nodes or OUTPUT in graph.nodes else None
        hosted = {} if self.endpoint is None else {GATEWAY: self.endpoint.run}
        self.launcher = Launcher(graph, seams, self, options, hosted, {} if reports is None else reports.services)
        self.requests: Requests | None = None
        if model is not None:
            metrics = RequestMetrics(model.max_model_len) if reports is not None else None
            gateway = Gateway.of(self.launcher.graph, model, seams)
            self.requests = Requests(gateway, self.send, self.launcher.health_record.progress, seams.clock, self.on_token, metrics)
        self.served = ServedRequests(self.launcher, self.requests, reports) if self.requests is not None and reports is not None else None
        self._log: LogWriter | None = None
        self.resumed: tuple[int, ...] = ()  # open requests of an earlier launcher
        self._is_open = False  # until then they stay open for the next one
        self.final_statistics: dict[str, Statistics] = {}

    @property
    def graph(self) -> Graph:
        """The graph as it runs: every edge has its transport."""
        return self.launcher.graph

    def require_requests(self) -> Requests:
        """Raises UserError for a graph that serves no model."""
        if self.requests is None:
            raise UserError("this graph serves no model; call it with its inputs: await graph(x=tensor)")
        return self.requests

    async def __aenter__(self) -> Self:
        try:
            self.begin_log()
            await self.launcher.__aenter__()
        except BaseException:
            await self._close_log()
            raise
        if self.requests is not None:
            self.requests.begin()
            if self.graph.jitter.warm_up:
                try:
                    await warm_up(self.graph, self.requests)
                except BaseException as error:
                    await self.__aexit__(type(error), error, error.__traceback__)
                    raise
        if self.served is not None:
            self.served.begin()
        if self._trace is not None:
            self._trace.begin(self.launcher.workers)
        self._is_open = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._trace is not None:
            self._trace.end()
        try:
            try:
                await self._close_requests()
            except BaseException as cancelled:  # the processes end all the same
                await self.launcher.__aexit__(type(cancelled), cancelled, cancelled.__traceback__)
                raise
            if error is None and self.launcher.failure is None:
                self.final_statistics = await self.launcher.stop()
            await self.launcher.__aexit__(kind, error, trace)
        finally:
            if self.endpoint is not None:
                self.endpoint.fail(NotRunningError("the graph was closed"))
            if self.requests is not None and self.launcher.failure is None and self._is_open:
                self.requests.end_all()
            await self._close_log()

    def begin_log(self) -> None:
        """Continue what an earlier launcher has left in the request log, if there is one, before any other request."""
        if self.requests is not None and (opened := self._open_log(self.graph, self.launcher.seams)) is not None:
            self._log, contents = opened
            self._log.on_failure = self.launcher.end
            self.resumed = self.requests.begin_log(self._log, contents)

    async def apply(self, graph: Graph) -> None:
        """Make `graph`, expanded and checked, the graph of the run: see Launcher.apply."""
        model = graph.model
        await self.launcher.apply(graph, None if model is None else facts_of(Path(model.path), model.implementation))

    async def end_serving(self, seconds: float) -> None:
        """Admit no new requests and wait until all have ended, those of front ends too. After `seconds`, end those that are left."""
        self.launcher.check_running()
        if self.served is not None:
            await self.served.drain(seconds)

    async def drain(self) -> None:
        """Admit no new requests and wait until all running ones have ended. Raises NotRunningError, or the failure that ended the run."""
        self.launcher.check_running()
        if self.requests is not None:
            await self.requests.drain()
        await self.launcher.drain()

    def leftovers(self) -> list[str]:
        """What is left here when all clients have left, and no message is in flight."""
        parts = self.requests, None if self.served is None else self.served.front_ends, self.endpoint
        return [f"{GATEWAY}: {line}" for part in parts if part is not None for line in part.leftovers()]

    # What the launcher and the requests call.

    def on_event(self, event: events.Event) -> None:
        """Give every part an event of the launcher."""
        if self.endpoint is not None and isinstance(event, events.RunFailed):
            self.endpoint.fail(event.error)
        if self.requests is not None:
            apply_group_change(event, self.requests)
        if self.served is not None:
            self.served.note(event)
        self._on_event(event)

    def on_control(self, worker: str, control: Control) -> None:
        """Give every part a message of a worker."""
        if self.endpoint is not None:
            self.endpoint.on_control(worker, control)
        if self._trace is not None and isinstance(control, TraceRecords):
            self._trace.add(worker, control, self.graph.shown_host(worker), self.launcher.workers[worker].clock_offset())
        if self.requests is not None:
            self.requests.on_control(worker, control)
        if self.served is not None:
            self.served.on_control(worker, control)

    async def on_failing(self, error: Exception) -> None:
        """The run has failed, and its processes are killed after this: each stream gets its last event."""
        if self.served is not None:
            await self.served.fail(error)

    async def send(self, worker: str, control: Control) -> None:
        """Send a message about a request to its group; wait while its control connection is full. Raises as Launcher.send."""
        await self.launcher.send(worker, control)

    def on_token(self, event: TokenEvent) -> None:
        """A token may reach its client."""
        if self._trace is not None:
            self._trace.add_token(event)

    async def _close_requests(self) -> None:
        if self.requests is not None:
            self.launcher.was_failure_raised |= self.requests.has_raised_failure
            await self.requests.aclose()
        if self.served is not None:
            await self.served.aclose()

    async def _close_log(self) -> None:
        if self._log is not None:
            await self._log.aclose()


def apply_group_change(event: events.Event, requests: Requests) -> None:
    """The requests of a lost group move, and a returned group gets new ones."""
    match event:
        case events.GraphVersion(graph):
            requests.use(graph)
        case events.WorkerLost(name, how, while_loading=False, may_recur=may_recur):
            first, *beside = event.process or (name,)
            if name == first:  # one death is one crash, whatever was in the process
                if may_recur and event.ends_groups:  # otherwise the groups know whose parts it had
                    requests.lose_server(name, how)
                blames = may_recur and not event.ends_groups
                requests.lose_group(name, how, beside=beside, may_recur=blames, is_restarting=event.is_restarting)
        case events.WorkerGivenUp(name):
            requests.give_up_group(name)
        case events.WorkerMarkedDead(name, why, is_killed, may_recur) if not is_killed:
            requests.lose_group(name, f"was marked dead: {why}", may_recur=may_recur, is_alive=True)
        case events.WorkerJoined(name) | events.WorkerRestarted(name) | events.WorkerCleared(name):
            requests.readmit_group(name)
        case events.RunFailed(error):
            requests.fail(error)
