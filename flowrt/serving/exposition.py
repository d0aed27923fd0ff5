"""Writes the metrics of a served graph in Prometheus' text format, under flowrt's names and, if wanted, under vLLM's. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from flowrt.actors.control import LATENCY_EDGES, Statistics
from flowrt.actors.front_end_messages import RefusalKind
from flowrt.engine.scheduler import STEP_ROW_EDGES
from flowrt.gateway.request_metrics import VLLM_CHOICES_EDGES, VLLM_FIRST_TOKEN_EDGES, VLLM_REQUEST_EDGES, VLLM_TOKEN_EDGES, RequestMetrics
from flowrt.graph.model import role_of
from flowrt.histogram import Histogram
from flowrt.launcher.health_record import OutageRecord
from flowrt.launcher.totals import add_counts, add_experts
from flowrt.sampling_params import FinishReason
from flowrt.serving.graph_status import ProcessState

Labels = Mapping[str, str]


@dataclass(frozen=True)
class ServedState:
    """What is exported. `num_waiting`: requests at the gateway without a group. `workers`: statistics by process. `down`: processes that
    are not at work. `states`: what flowrt ps shows of each process. `hosts`: the host of each process, where there are several."""

    model_name: str
    is_healthy: bool
    num_active: int
    num_waiting: int
    num_routing_failures: int
    metrics: RequestMetrics
    workers: Mapping[str, Statistics]
    down: frozenset[str]
    outages: OutageRecord = field(default_factory=OutageRecord)
    hosts: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[str, ProcessState] = field(default_factory=dict)

    def labels(self, process: str, **more: str) -> Labels:
        host = {"host": self.hosts[process]} if process in self.hosts else {}
        return {"process": process, **more, **host}


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, text: str, values: Iterable[tuple[Labels, float]]) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        self._lines += [f"{name}{_written(labels)} {_number(value)}" for labels, value in values]

    def add_histogram(self, name: str, text: str, histogram: Histogram, edges: Sequence[float], labels: Labels) -> None:
        self.add_histograms(name, text, [(labels, histogram)], edges)

    def add_histograms(self, name: str, text: str, values: Iterable[tuple[Labels, Histogram]], edges: Sequence[float]) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
        for labels, histogram in values:
            counts = [(_number(edge), histogram.count_up_to(edge)) for edge in edges]
            for edge, count in (*counts, ("+Inf", histogram.count)):
                self._lines.append(f"{name}_bucket{_written({**labels, 'le': edge})} {count}")
            self._lines += [f"{name}_sum{_written(labels)} {_number(histogram.total)}", f"{name}_count{_written(labels)} {histogram.count}"]

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)


def exposition(state: ServedState, with_vllm_names: bool) -> str:
    page = _Page()
    _add_requests(page, state)
    _add_processes(page, state)
    _add_experts(page, state)
    _add_reliability(page, state)
    if with_vllm_names:
        _add_vllm(page, state)
    return page.text


def _add_requests(page: _Page, state: ServedState) -> None:
    metrics = state.metrics
    page.add("flowrt_healthy", "gauge", "1 while the work of the graph progresses, as of /health.", [({}, state.is_healthy)])
    page.add("flowrt_requests_active", "gauge", "Requests that have not ended.", [({}, state.num_active)])
    page.add("flowrt_requests_waiting", "gauge", "Requests that wait at the gateway for a group.", [({}, state.num_waiting)])
    failures: list[tuple[Labels, float]] = [({}, state.num_routing_failures)]
    page.add("flowrt_routing_failures_total", "counter", "Requests that a failing routing policy left to cache_aware.", failures)
    ended = [({"finish_reason": reason}, metrics.ended[reason]) for reason in get_args(FinishReason)]
    page.add("flowrt_requests_total", "counter", "Requests that have ended.", ended)
    refused = [({"reason": kind}, metrics.refused[kind]) for kind in get_args(RefusalKind)]
    page.add("flowrt_requests_refused_total", "counter", "Requests that were not admitted.", refused)
    page.add("flowrt_requests_moved_total", "counter", "Requests that went on in another group.", [({}, metrics.num_moved)])
    page.add("flowrt_prompt_tokens_total", "counter", "Tokens of prompts.", [({}, metrics.num_prompt_tokens)])
    page.add("flowrt_generation_tokens_total", "counter", "Tokens that were committed.", [({}, metrics.num_generation_tokens)])
    for name, text, histogram in (
        ("time_to_first_token", "From admission to the first token.", metrics.first_token_seconds),
        ("inter_token_latency", "Between two tokens of a choice.", metrics.token_seconds),
        ("request_queue", "From admission until a group has the request.", metrics.queue_seconds),
        ("request_latency", "From admission to the end.", metrics.request_seconds),
    ):
        page.add_histogram(f"flowrt_{name}_seconds", text, histogram, histogram.edges, {})


def _add_processes(page: _Page, state: ServedState) -> None:
    def add(name: str, kind: str, text: str, values: Mapping[str, float]) -> None:
        page.add(f"flowrt_{name}", kind, text, [(state.labels(each, role=role_of(each)), value) for each, value in values.items()])

    workers = state.workers
    groups = {name: each for name, each in workers.items() if each.num_pages}
    add("process_up", "gauge", "1 while the process is at work.", {name: name not in state.down for name in workers})
    add("process_restarts_total", "counter", "Restarts.", {name: each.num_restarts for name, each in workers.items()})
    add("process_resident_bytes", "gauge", "Memory.", {name: each.resident_bytes for name, each in workers.items()})
    add("process_busy_seconds_total", "counter", "Time that it computed.", {name: each.compute_seconds for name, each in workers.items()})
    add("process_firings_total", "counter", "Firings of its nodes.", {name: each.num_firings for name, each in workers.items()})
    add("redispatched_parts_total", "counter", "Parts sent again.", {name: each.num_redispatched for name, each in workers.items()})
    add("group_steps_total", "counter", "Steps.", {name: each.num_steps for name, each in groups.items()})
    add("group_rows_total", "counter", "Rows of all steps.", {name: each.num_rows for name, each in groups.items()})
    add("group_running_sequences", "gauge", "Sequences that run.", {name: each.num_running for name, each in groups.items()})
    add("group_waiting_sequences", "gauge", "Sequences that wait in the group.", {name: each.num_waiting for name, each in groups.items()})
    add("group_working_seconds_total", "counter", "Time with sequences.", {name: each.working_seconds for name, each in groups.items()})
    add("group_bubble_seconds_total", "counter", "Of it, not computing.", {name: each.bubble_seconds for name, each in groups.items()})
    add("group_micro_batches", "gauge", "Micro-batches in use.", {name: each.num_micro_batches for name, each in groups.items()})
    versions = {name: each.map_version for name, each in workers.items() if each.map_version}
    add("expert_map_version", "gauge", "Version of the expert map: it rises with each change.", versions)
    add("group_preemptions_total", "counter", "Preemptions.", {name: each.num_preemptions for name, each in groups.items()})
    add("prefix_cache_queries_total", "counter", "Tokens looked up.", {name: each.num_prefix_queries for name, each in groups.items()})
    add("prefix_cache_hits_total", "counter", "Tokens found.", {name: each.num_prefix_hits for name, each in groups.items()})
    add("kv_pages", "gauge", "Pages of the KV cache.", {name: each.num_pages for name, each in groups.items()})
    add("kv_pages_used", "gauge", "Pages in use.", {name: each.num_pages - each.num_free_pages for name, each in groups.items()})
    nodes = [(state.labels(name, node=node.node), node) for name, each in workers.items() for node in each.nodes]
    waiting = [(labels, node.num_waiting) for labels, node in nodes]
    page.add("flowrt_node_waiting_firings", "gauge", "Firings that wait for their turn.", waiting)
    page.add("flowrt_node_calls_total", "counter", "Calls of a node.", [(labels, node.num_calls) for labels, node in nodes])
    page.add("flowrt_node_firings_total", "counter", "Firings in these calls.", [(labels, node.num_firings) for labels, node in nodes])
    busy = [(labels, node.compute_seconds) for labels, node in nodes]
    page.add("flowrt_node_busy_seconds_total", "counter", "Time of these calls.", busy)
    edges = [({"edge": edge.edge, "transport": edge.transport}, edge) for each in workers.values() for edge in each.edges]
    page.add("flowrt_edge_messages_total", "counter", "Messages sent.", [(labels, edge.num_messages) for labels, edge in edges])
    page.add("flowrt_edge_bytes_total", "counter", "Payload sent.", [(labels, edge.payload_bytes) for labels, edge in edges])
    waits = [(labels, edge.wait_seconds) for labels, edge in edges]
    page.add("flowrt_edge_wait_seconds_total", "counter", "Time in which something was ready and the edge had no credit.", waits)
    measured = [(labels, edge) for labels, edge in edges if edge.latency_counts]
    latencies = [(labels, Histogram(LATENCY_EDGES, edge.latency_counts, edge.latency_seconds)) for labels, edge in measured]
    page.add_histograms("flowrt_edge_latency_seconds", "From a request to its response, of some requests.", latencies, LATENCY_EDGES)


def _add_experts(page: _Page, state: ServedState) -> None:
    layers = add_experts(each for statistics in state.workers.values() for each in statistics.experts)
    tokens = [({"layer": str(layer), "expert": str(expert)}, num) for layer, pairs in layers.items() for expert, num in pairs.items()]
    page.add("flowrt_expert_tokens_total", "counter", "Tokens that each expert of a layer has computed.", tokens)
    balance = [({"layer": str(layer)}, max(pairs.values()) * len(pairs) / max(1, sum(pairs.values()))) for layer, pairs in layers.items()]
    page.add("flowrt_layer_balance", "gauge", "Tokens of the busiest expert over their mean; 1: all have the same.", balance)


def _add_reliability(page: _Page, state: ServedState) -> None:
    record = state.outages
    deaths = [(state.labels(name, role=role_of(name)), number) for name, number in sorted(record.deaths.items())]
    page.add("flowrt_process_deaths_total", "counter", "Deaths, and hangs that count as such.", deaths)
    detection, outage = record.detection_seconds, record.outage_seconds
    page.add_histogram("flowrt_detection_seconds", "From the latest heartbeat to the notice of a death.", detection, detection.edges, {})
    page.add_histogram("flowrt_outage_seconds", "From the notice of a death until the process is back.", outage, outage.edges, {})


def _add_vllm(page: _Page, state: ServedState) -> None:
    """The series that dashboards for vLLM query, with its bucket edges; also the names that were used for two of them before."""
    metrics, workers = state.metrics, state.workers.values()
    labels = {"model_name": state.model_name, "engine": "0"}
    running, waiting = sum(each.num_running for each in workers), state.num_waiting + sum(each.num_waiting for each in workers)
    num_pages, num_free = sum(each.num_pages for each in workers), sum(each.num_free_pages for each in workers)
    used = (num_pages - num_free) / max(1, num_pages)
    for name, kind, text, value in (
        ("num_requests_running", "gauge", "Number of requests in model execution batches.", running),
        ("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", waiting),
        ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", used),
        ("gpu_cache_usage_perc", "gauge", "As kv_cache_usage_perc.", used),
        ("num_preemptions_total", "counter", "Number of preemptions.", sum(each.num_preemptions for each in workers)),
        ("prefix_cache_queries_total", "counter", "Prefix cache queries, in tokens.", sum(each.num_prefix_queries for each in workers)),
        ("prefix_cache_hits_total", "counter", "Prefix cache hits, in tokens.", sum(each.num_prefix_hits for each in workers)),
        ("prompt_tokens_total", "counter", "Number of prefill tokens processed.", metrics.num_prompt_tokens),
        ("generation_tokens_total", "counter", "Number of generation tokens processed.", metrics.num_generation_tokens),
    ):
        page.add(f"vllm:{name}", kind, text, [(labels, value)])
    ended = [({**labels, "finished_reason": reason}, metrics.ended[reason]) for reason in get_args(FinishReason)]
    page.add("vllm:request_success_total", "counter", "Count of processed requests.", ended)
    steps = Histogram(STEP_ROW_EDGES, add_counts(*(each.step_row_counts for each in workers)), sum(each.num_rows for each in workers))
    for name, histogram, edges in (
        ("time_to_first_token_seconds", metrics.first_token_seconds, VLLM_FIRST_TOKEN_EDGES),
        ("inter_token_latency_seconds", metrics.token_seconds, VLLM_TOKEN_EDGES),
        ("time_per_output_token_seconds", metrics.token_seconds, VLLM_TOKEN_EDGES),
        ("request_time_per_output_token_seconds", metrics.mean_token_seconds, VLLM_TOKEN_EDGES),
        ("e2e_request_latency_seconds", metrics.request_seconds, VLLM_REQUEST_EDGES),
        ("request_queue_time_seconds", metrics.queue_seconds, VLLM_REQUEST_EDGES),
        ("request_inference_time_seconds", metrics.group_seconds, VLLM_REQUEST_EDGES),
        ("request_prefill_time_seconds", metrics.prefill_seconds, VLLM_REQUEST_EDGES),
        ("request_decode_time_seconds", metrics.decode_seconds, VLLM_REQUEST_EDGES),
        ("request_prompt_tokens", metrics.prompt_tokens, metrics.prompt_tokens.edges),
        ("request_generation_tokens", metrics.generation_tokens, metrics.generation_tokens.edges),
        ("request_max_num_generation_tokens", metrics.choice_tokens, metrics.choice_tokens.edges),
        ("request_params_max_tokens", metrics.max_tokens, metrics.max_tokens.edges),
        ("request_params_n", metrics.num_choices, VLLM_CHOICES_EDGES),
        ("iteration_tokens_total", steps, STEP_ROW_EDGES),
    ):
        page.add_histogram(f"vllm:{name}", f"Histogram of {name.replace('_', ' ')}.", histogram, edges, labels)


def _written(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: int | float) -> str:
    return str(int(value)) if not isinstance(value, float) and abs(value) < 1 << 53 else repr(float(value))
