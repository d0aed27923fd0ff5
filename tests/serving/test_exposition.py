"""The page that Prometheus reads."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from flowrt.actors.control import EdgeStatistics, ExpertStatistics, NodeStatistics, Statistics
from flowrt.gateway.request_metrics import RequestMetrics
from flowrt.serving.exposition import ServedState, exposition

ROOT = Path(__file__).resolve().parents[2]
# What vLLM's own dashboards for Grafana query, present and former.
VLLM_SERIES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc", "request_success_total"),
    *("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "time_per_output_token_seconds", "request_time_per_output_token_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "iteration_tokens_total"),
    *("request_params_n", "request_params_max_tokens", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
)
_SAMPLE = re.compile(r'[a-z0-9_:]+(\{([a-z_]+="(\\.|[^"\\\n])*",?)+\})? (\d+|[\d.e+-]+)')


def state() -> ServedState:
    metrics = RequestMetrics(max_model_len=64)
    metrics.admit(0, 0.0)
    metrics.place(0, 5, 1, 8, 0.0)
    for now in (0.05, 0.052, 1.0):
        metrics.add_tokens(0, 0, now)
    metrics.end(0, "stop", 1.0)
    group = Statistics(
        (EdgeStatistics('a "b" -> c', "shm", 3, 100, 0.5, 1.5, (1, *[0] * 12, 1)), EdgeStatistics("d -> e", "shm", 1, 1)),
        (NodeStatistics("gate", 2, 6, 0.5, 3),),
        (ExpertStatistics(0, (0, 1, 2), (1, 2, 6)),),
        num_running=2,
        num_steps=3,
        num_rows=21,
        step_row_counts=(1, 1, 1, *[0] * 11),
        num_waiting=1,
        num_pages=10,
        num_free_pages=4,
        compute_seconds=1.5,
        working_seconds=2.0,
        bubble_seconds=0.5,
        map_version=3,
        num_micro_batches=2,
    )
    server = Statistics(experts=(ExpertStatistics(0, (2, 3), (2, 1)),), num_restarts=2)
    return ServedState("tiny", True, 3, 1, 2, metrics, {"attention.0": group, "experts.0": server}, frozenset({"experts.0"}))


def test_each_name_is_in_the_docs_in_full() -> None:
    text = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    names = re.findall(r"# TYPE (\S+)", exposition(state(), with_vllm_names=True))
    assert len(names) > 60
    assert [name for name in names if f"`{name}`" not in text] == []


def test_each_line_is_a_comment_or_a_sample_and_each_family_comes_once() -> None:
    page = exposition(state(), with_vllm_names=True)
    lines = page.splitlines()
    assert [line for line in lines if not line.startswith("# ") and not _SAMPLE.fullmatch(line)] == []
    families = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(families) == len(set(families))


def test_values_are_those_of_the_state() -> None:
    lines = exposition(state(), with_vllm_names=True).splitlines()
    for line in (
        'flowrt_requests_total{finish_reason="stop"} 1',
        "flowrt_routing_failures_total 2",
        "flowrt_generation_tokens_total 3",
        'flowrt_process_up{process="experts.0",role="experts"} 0',
        'flowrt_process_restarts_total{process="experts.0",role="experts"} 2',
        'flowrt_process_busy_seconds_total{process="attention.0",role="attention"} 1.5',
        'flowrt_node_firings_total{process="attention.0",node="gate"} 6',
        'flowrt_kv_pages_used{process="attention.0",role="attention"} 6',
        'flowrt_group_working_seconds_total{process="attention.0",role="attention"} 2.0',
        'flowrt_group_bubble_seconds_total{process="attention.0",role="attention"} 0.5',
        'flowrt_group_micro_batches{process="attention.0",role="attention"} 2',
        'flowrt_expert_map_version{process="attention.0",role="attention"} 3',
        'flowrt_node_waiting_firings{process="attention.0",node="gate"} 3',
        'flowrt_expert_tokens_total{layer="0",expert="2"} 8',
        'flowrt_layer_balance{layer="0"} 2.6666666666666665',
        'flowrt_edge_wait_seconds_total{edge="a \\"b\\" -> c",transport="shm"} 0.5',
        'flowrt_edge_latency_seconds_bucket{edge="a \\"b\\" -> c",transport="shm",le="1.0"} 1',
        'flowrt_edge_latency_seconds_count{edge="a \\"b\\" -> c",transport="shm"} 2',
        'flowrt_edge_bytes_total{edge="a \\"b\\" -> c",transport="shm"} 100',
        'flowrt_inter_token_latency_seconds_bucket{le="0.003"} 1',
        'vllm:num_requests_running{model_name="tiny",engine="0"} 2',
        'vllm:num_requests_waiting{model_name="tiny",engine="0"} 2',
        'vllm:kv_cache_usage_perc{model_name="tiny",engine="0"} 0.6',
        'vllm:time_to_first_token_seconds_bucket{model_name="tiny",engine="0",le="0.06"} 1',
        'vllm:inter_token_latency_seconds_bucket{model_name="tiny",engine="0",le="0.01"} 1',
        'vllm:inter_token_latency_seconds_bucket{model_name="tiny",engine="0",le="+Inf"} 2',
        'vllm:request_success_total{model_name="tiny",engine="0",finished_reason="stop"} 1',
        'vllm:request_prefill_time_seconds_sum{model_name="tiny",engine="0"} 0.05',
        'vllm:request_decode_time_seconds_bucket{model_name="tiny",engine="0",le="1.0"} 1',
        'vllm:request_prompt_tokens_bucket{model_name="tiny",engine="0",le="5.0"} 1',
        'vllm:request_prompt_tokens_bucket{model_name="tiny",engine="0",le="50.0"} 1',
        'vllm:request_params_max_tokens_bucket{model_name="tiny",engine="0",le="10.0"} 1',
        'vllm:iteration_tokens_total_bucket{model_name="tiny",engine="0",le="8.0"} 2',
        'vllm:iteration_tokens_total_sum{model_name="tiny",engine="0"} 21',
    ):
        assert line in lines


def test_processes_have_their_host_where_there_are_several() -> None:
    lines = exposition(replace(state(), hosts={"attention.0": "host.0", "experts.0": "host.1"}), with_vllm_names=False).splitlines()
    for line in (
        'flowrt_process_restarts_total{process="experts.0",role="experts",host="host.1"} 2',
        'flowrt_kv_pages_used{process="attention.0",role="attention",host="host.0"} 6',
        'flowrt_node_firings_total{process="attention.0",node="gate",host="host.0"} 6',
    ):
        assert line in lines


def test_names_of_vllm_are_there_only_if_wanted() -> None:
    assert "vllm:" not in exposition(state(), with_vllm_names=False)
    lines = exposition(state(), with_vllm_names=True).splitlines()
    assert {line.split()[2] for line in lines if line.startswith("# TYPE vllm:")} == {f"vllm:{name}" for name in VLLM_SERIES}


def test_dashboard_shows_each_series_that_is_exported_and_no_other() -> None:
    exported = {line.split()[2] for line in exposition(state(), with_vllm_names=False).splitlines() if line.startswith("# TYPE ")}
    board = json.loads((ROOT / "examples" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queried = {name.removesuffix("_bucket") for expression in expressions for name in re.findall(r"flowrt_\w+", expression)}
    assert queried == exported
