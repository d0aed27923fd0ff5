"""Counters and histograms of a gateway's requests."""

from __future__ import annotations

from flowrt.gateway.request_metrics import VLLM_TOKEN_EDGES, Histogram, RequestMetrics


def test_a_histogram_counts_a_value_on_an_edge_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert [histogram.count_up_to(edge) for edge in histogram.edges] == [2, 4]
    assert (histogram.count, histogram.total) == (5, 14.0)


def test_times_run_from_admission_and_between_tokens_of_a_choice() -> None:
    metrics = RequestMetrics()
    metrics.admit(1, 10.0)
    metrics.place(1, 7, 10.5)
    metrics.add_token(1, 0, 11.0)
    metrics.add_token(1, 1, 11.0)
    metrics.place(1, 7, 11.5)
    metrics.add_token(1, 0, 13.0)
    metrics.end(1, "stop", 14.0)
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens, metrics.num_moved) == (7, 3, 1)
    times = metrics.queue_seconds, metrics.first_token_seconds, metrics.token_seconds, metrics.request_seconds
    assert [(each.count, each.total) for each in times] == [(1, 0.5), (1, 1.0), (1, 2.0), (1, 4.0)]
    assert metrics.ended == {"stop": 1}


def test_requests_that_were_not_admitted_here_are_not_counted() -> None:
    metrics = RequestMetrics()
    metrics.place(1, 7, 1.0)
    metrics.add_token(1, 0, 1.0)
    metrics.end(1, "stop", 1.0)
    metrics.refuse("overloaded")
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens, metrics.request_seconds.count) == (0, 0, 0)
    assert (metrics.ended, metrics.refused) == ({}, {"overloaded": 1})


def test_edges_of_vllm_are_among_ours() -> None:
    assert set(VLLM_TOKEN_EDGES) < set(RequestMetrics().token_seconds.edges)
