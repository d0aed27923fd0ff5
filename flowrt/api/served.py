"""The front ends of a graph that is served: their settings, and the responses to their queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from flowrt.actors.control import Statistics, StatisticsRequest
from flowrt.actors.front_end_messages import StateQuery, StateReport
from flowrt.api.status import process_state, read_processes
from flowrt.errors import FlowrtError, UserError
from flowrt.gateway.requests import Requests
from flowrt.graph.model import Graph, front_end_names
from flowrt.launcher.launcher import Launcher
from flowrt.launcher.worker_pool import Service
from flowrt.operators.model_config import ModelConfig
from flowrt.reliability.health import Health
from flowrt.serving.exposition import ServedState, exposition
from flowrt.serving.front_end_settings import ADMIN_LISTENER, ENTRY, LISTENER, FrontEndSettings, ServeOptions
from flowrt.serving.graph_status import GraphStatus
from flowrt.serving.live_state import live_state

STATISTICS_SECONDS = 1.0  # for all processes to respond to a scrape


def max_model_len(graph: Graph, config: ModelConfig, options: ServeOptions) -> int:
    """The largest number of tokens of a prompt and its output together. Raises UserError when --max-model-len asks for more."""
    limits, chosen = graph.group_limits(), options.max_model_len
    capacity, positions = limits.kv_pages * limits.page_size, config.max_position_embeddings
    if chosen is not None and chosen > positions:
        raise UserError(f"--max-model-len is {chosen}, the model has {positions} positions (config.json); write that number or fewer")
    if chosen is not None and chosen > capacity:
        need = -(-chosen // limits.page_size)
        text = f"a group holds {capacity} tokens (limits.kv_pages x limits.page_size)"
        raise UserError(f"--max-model-len is {chosen}, {text}; write fewer, or --set limits.kv_pages={need}")
    return min(positions, capacity, chosen or positions)


def front_end_services(
    graph: Graph, config: ModelConfig, options: ServeOptions, sampling_defaults: Mapping[str, Any]
) -> dict[str, Service]:
    assert graph.model is not None
    settings = FrontEndSettings(
        model_dir=graph.model.path,
        model_name=options.model_name,
        max_model_len=max_model_len(graph, config, options),
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(config.eos_token_ids),
        sampling_defaults=dict(sampling_defaults),
        version=options.version,
        api_key=options.api_key,
        hosts=options.listener.hosts,
        certificate=options.certificate,
        private_key=options.private_key,
        formats=options.formats,
        cors=options.cors,
    )
    descriptors = {LISTENER: options.listener.socket.fileno()}
    if options.admin is not None:
        descriptors[ADMIN_LISTENER] = options.admin.socket.fileno()
    service = Service(ENTRY, msgspec.json.encode(settings), descriptors)
    return dict.fromkeys(front_end_names(graph), service)


class StateReports:
    """The responses to queries of front ends."""

    def __init__(self, launcher: Launcher, requests: Requests, model_name: str, health: Callable[[], Health]) -> None:
        self._launcher, self._requests, self._model_name, self._health = launcher, requests, model_name, health
        self._front_ends = front_end_names(launcher.graph)

    def refresh(self) -> None:
        """Request the statistics of all processes that are at work: the counts of one that is killed later are known up to here."""
        for name in self._launcher.graph.process_names():
            if self._launcher.state.is_usable(name):
                self._launcher.workers[name].request(StatisticsRequest())

    async def report(self, query: StateQuery) -> StateReport:
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
        is_ok = health.ok and (query.topic != "ready" or self._requests.gateway.admission.refuses_all is None)
        return StateReport(query.number, is_ok, "; ".join(health.problems))

    async def _status(self) -> GraphStatus:
        gateway, health = self._requests.gateway, self._health()
        processes = await read_processes(self._launcher, await self._statistics())
        return GraphStatus(
            state="draining" if gateway.admission.refuses_all is not None else "ready" if health.ok else "unhealthy",
            problems=health.problems,
            num_active=gateway.num_unfinished,
            num_waiting=gateway.num_waiting,
            max_requests=gateway.admission.max_requests,
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
        for name in self._front_ends:
            launcher.workers[name].request(StatisticsRequest())
        workers = await self._statistics()
        for name in self._front_ends:  # their latest numbers, perhaps of the scrape before
            workers[name] = replace(launcher.workers[name].statistics, num_restarts=launcher.state.num_restarts(name))
        for name, pid in launcher.pids.items():
            if name not in workers:  # the monitor
                resident_bytes = launcher.seams.resident_bytes(pid)
                workers[name] = Statistics(resident_bytes=resident_bytes, num_restarts=launcher.state.num_restarts(name))
        return ServedState(
            model_name=self._model_name,
            is_healthy=self._health().ok,
            num_active=gateway.num_unfinished,
            num_waiting=gateway.num_waiting,
            num_routing_failures=gateway.num_routing_failures,
            metrics=metrics,
            workers=workers,
            outages=launcher.health_record.outages,
            hosts={name: host for name in workers if (host := launcher.graph.shown_host(name))},
            down=frozenset(name for name in workers if not launcher.state.is_usable(name)),
            states={name: process_state(launcher, name) for name in workers},
        )
