"""The front ends of a graph that is served: their settings, their requests at the gateway, and the responses to their queries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from flowrt.actors.control import Control, Drain, Statistics, StatisticsRequest
from flowrt.actors.front_end_messages import StateQuery, StateReport
from flowrt.api.status import read_processes
from flowrt.errors import FlowrtError
from flowrt.gateway.front_ends import FrontEnds
from flowrt.gateway.requests import Requests
from flowrt.graph.model import Graph, front_end_names
from flowrt.launcher import events
from flowrt.launcher.launcher import Launcher
from flowrt.launcher.service import Service
from flowrt.operators.model_config import ModelConfig
from flowrt.reliability.health import Health
from flowrt.serving.exposition import ServedState, exposition
from flowrt.serving.front_end_settings import ADMIN_LISTENER, ENTRY, LISTENER, FrontEndSettings, ServeOptions
from flowrt.serving.graph_status import GraphStatus
from flowrt.serving.live_state import live_state

STATISTICS_SECONDS = 1.0  # for all processes to respond to a scrape
LAST_EVENTS_SECONDS = 2.0  # for all streams to get their last event


def max_model_len(graph: Graph, config: ModelConfig, options: ServeOptions) -> int:
    """The largest number of tokens of a prompt and its output together."""
    limits = graph.group_limits()
    return min(config.max_position_embeddings, limits.kv_pages * limits.page_size, options.max_model_len or config.max_position_embeddings)


def front_end_services(graph: Graph, config: ModelConfig, options: ServeOptions) -> dict[str, Service]:
    assert graph.model is not None
    settings = FrontEndSettings(
        model_dir=graph.model.path,
        model_name=options.model_name,
        max_model_len=max_model_len(graph, config, options),
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(config.eos_token_ids),
        version=options.version,
        api_key=options.api_key,
        hosts=options.listener.hosts,
        certificate=options.certificate,
        private_key=options.private_key,
    )
    descriptors = {LISTENER: options.listener.socket.fileno()}
    if options.admin is not None:
        descriptors[ADMIN_LISTENER] = options.admin.socket.fileno()
    service = Service(ENTRY, msgspec.json.encode(settings), descriptors)
    return dict.fromkeys(front_end_names(graph), service)


class ServedRequests:
    """The requests that come by way of front ends."""

    def __init__(self, launcher: Launcher, requests: Requests, model_name: str, health: Callable[[], Health]) -> None:
        self._launcher, self._requests, self._model_name, self._health = launcher, requests, model_name, health
        self._front_ends = FrontEnds(front_end_names(launcher.graph), requests, self._send, self._post, self._report_state)

    def begin(self) -> None:
        self._front_ends.begin()

    async def aclose(self) -> None:
        await self._front_ends.aclose()

    def on_control(self, worker: str, control: Control) -> None:
        self._front_ends.on_control(worker, control)

    def note(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerLost):
            self._front_ends.lose(event.name)

    async def drain(self, seconds: float) -> None:
        """Admit no new requests and wait until all have ended. After `seconds` end those that are left; then each stream gets its end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._requests.drain()
        self._requests.end_all()
        await self._flush()

    async def fail(self, error: Exception) -> None:
        """The run has failed: each stream gets an error as its last event."""
        self._front_ends.fail(str(error))
        await self._flush()

    async def _flush(self) -> None:
        """Wait until the front ends have sent all that they were given; they take no more connections."""
        await self._front_ends.wait_sent()
        names = [name for name in self._front_ends.names if self._launcher.state.is_usable(name)]
        if drained := [self._launcher.workers[name].request(Drain()) for name in names]:
            await asyncio.wait(drained, timeout=LAST_EVENTS_SECONDS)

    async def _send(self, name: str, control: Control) -> None:
        await self._launcher.workers[name].send(control)

    def _post(self, name: str, control: Control) -> None:
        self._launcher.workers[name].post(control)

    async def _report_state(self, query: StateQuery) -> StateReport:
        if query.topic == "metrics":
            return StateReport(query.number, True, exposition(await self._state(), self._launcher.graph.serving.vllm_metrics))
        if query.topic == "page":
            live = live_state(self._launcher.graph, await self._state(), self._health().problems, self._launcher.seams.clock.now())
            return StateReport(query.number, True, msgspec.json.encode(live).decode())
        if query.topic == "status":
            return StateReport(query.number, True, msgspec.json.encode(await self._status()).decode())
        if query.topic == "drain":
            self._requests.gateway.drain()
        health = self._health()
        is_ok = health.ok and (query.topic != "ready" or self._requests.gateway.refuses_all is None)
        return StateReport(query.number, is_ok, "; ".join(health.problems))

    async def _status(self) -> GraphStatus:
        gateway, health = self._requests.gateway, self._health()
        processes = await read_processes(self._launcher, await self._statistics())
        return GraphStatus(
            state="draining" if gateway.refuses_all is not None else "ready" if health.ok else "unhealthy",
            problems=health.problems,
            num_active=gateway.num_unfinished,
            num_waiting=gateway.num_waiting,
            max_requests=gateway.max_requests,
            processes=processes,
        )

    async def _statistics(self) -> dict[str, Statistics]:
        try:
            return await self._launcher.statistics(STATISTICS_SECONDS)
        except FlowrtError:  # the run has ended: what is known of requests is reported all the same
            return {}

    async def _state(self) -> ServedState:
        launcher, gateway, metrics = self._launcher, self._requests.gateway, self._requests.metrics
        assert metrics is not None
        for name in self._front_ends.names:
            launcher.workers[name].request(StatisticsRequest())
        workers = await self._statistics()
        for name in self._front_ends.names:  # their latest numbers, perhaps of the scrape before
            workers[name] = replace(launcher.workers[name].statistics, num_restarts=launcher.state.num_restarts(name))
        return ServedState(
            model_name=self._model_name,
            is_healthy=self._health().ok,
            num_active=gateway.num_unfinished,
            num_waiting=gateway.num_waiting,
            metrics=metrics,
            workers=workers,
            outages=launcher.health_record.outages,
            down=frozenset(name for name in workers if not launcher.state.is_usable(name)),
        )
