"""The front ends of a graph that is served: their settings, and the responses to their queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from flowrt.actors.control import Statistics, StatisticsRequest
from flowrt.actors.front_end_messages import StateQuery, StateReport
from flowrt.api.status import process_state, read_processes
from flowrt.errors import FlowrtError, UserError
from flowrt.gateway.gateway import Gateway
from flowrt.gateway.requests import Requests
from flowrt.graph.model import Graph, front_end_names
from flowrt.launcher.launcher import Launcher
from flowrt.launcher.worker_pool import Service
from flowrt.operators.model_config import ModelConfig
from flowrt.serving.exposition import ServedState, exposition
from flowrt.serving.front_end_settings import ADMIN_LISTENER, ENTRY, LISTENER, FrontEndSettings, HttpSettings, ServeOptions
from flowrt.serving.graph_status import GraphStatus
from flowrt.serving.live_state import live_state

STATISTICS_SECONDS = 1.0  # for all processes to respond to a scrape


def max_model_len(graph: Graph, config: ModelConfig, chosen: int | None = None) -> int:
    """The largest number of tokens of a prompt and its output together. `chosen`: by --max-model-len. Raises UserError when that is more
    than is possible."""
    limits = graph.group_limits()
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
        **{name: getattr(options, name) for name in HttpSettings.__struct_fields__},
        model_dir=graph.model.path,
        max_model_len=max_model_len(graph, config, options.max_model_len),
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(config.eos_token_ids),
        sampling_defaults=dict(sampling_defaults),
        hosts=options.listener.hosts,
    )
    descriptors = {LISTENER: options.listener.socket.fileno()}
    if options.admin is not None:
        descriptors[ADMIN_LISTENER] = options.admin.socket.fileno()
    service = Service(ENTRY, msgspec.json.encode(settings), descriptors)
    return dict.fromkeys(front_end_names(graph), service)


class StateReports:
    """The front ends of a graph that is served, and the responses to their queries; see Reports."""

    def __init__(self, services: Mapping[str, Service], model_name: str) -> None:
        self.services, self._model_name = services, model_name

    async def report(self, launcher: Launcher, requests: Requests, query: StateQuery) -> StateReport:
        gateway, health = requests.gateway, launcher.health()
        if query.topic == "metrics":
            text = exposition(await self._state(launcher, requests), launcher.graph.serving.vllm_metrics)
        elif query.topic == "page":
            live = live_state(launcher.graph, await self._state(launcher, requests), launcher.health().problems, launcher.seams.clock.now())
            text = msgspec.json.encode(live).decode()
        elif query.topic == "status":
            text = msgspec.json.encode(await _status(launcher, gateway)).decode()
        else:
            if query.topic == "drain":
                gateway.drain()
            refusal = gateway.admission.refuses_all if query.topic == "ready" else None
            problems = [*health.problems, *([] if refusal is None else [refusal])]
            return StateReport(query.number, health.ok and refusal is None, "; ".join(problems))
        return StateReport(query.number, True, text)

    async def _state(self, launcher: Launcher, requests: Requests) -> ServedState:
        gateway, metrics = requests.gateway, requests.metrics
        assert metrics is not None
        for name in self.services:
            launcher.workers[name].request(StatisticsRequest())
        workers = await _statistics(launcher)
        for name in self.services:  # their latest numbers, perhaps of the scrape before
            workers[name] = replace(launcher.workers[name].statistics, num_restarts=launcher.state.num_restarts(name))
        for name, pid in launcher.pids.items():
            if name not in workers:  # the monitor
                resident_bytes = launcher.seams.resident_bytes(pid)
                workers[name] = Statistics(resident_bytes=resident_bytes, num_restarts=launcher.state.num_restarts(name))
        return ServedState(
            model_name=self._model_name,
            is_healthy=launcher.health().ok,
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


async def _status(launcher: Launcher, gateway: Gateway) -> GraphStatus:
    health = launcher.health()
    return GraphStatus(
        state="draining" if gateway.admission.refuses_all is not None else "ready" if health.ok else "unhealthy",
        problems=health.problems,
        num_active=gateway.num_unfinished,
        num_waiting=gateway.num_waiting,
        max_requests=gateway.admission.max_requests,
        processes=await read_processes(launcher, await _statistics(launcher)),
    )


async def _statistics(launcher: Launcher) -> dict[str, Statistics]:
    try:
        return await launcher.statistics(STATISTICS_SECONDS)
    except FlowrtError:  # the run has ended: what is known of requests is reported all the same
        return {}
