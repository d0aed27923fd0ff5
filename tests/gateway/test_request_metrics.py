"""Counters and histograms of a gateway's requests."""

from __future__ import annotations

import pytest

from flowrt.gateway.request_metrics import VLLM_TOKEN_EDGES, Histogram, RequestMetrics, token_edges


def test_a_histogram_counts_a_value_on_an_edge_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert [histogram.count_up_to(edge) for edge in histogram.edges] == [2, 4]
    assert (histogram.count, histogram.total) == (5, 14.0)


def test_times_run_from_admission_and_between_tokens_of_a_choice() -> None:
    metrics = RequestMetrics()
    metrics.admit(1, 10.0)
    metrics.place(1, 7, 2, 20, 10.5)
    metrics.add_tokens(1, 0, 11.0)
    metrics.add_tokens(1, 1, 11.0)
    metrics.place(1, 7, 2, 20, 11.5)
    metrics.add_tokens(1, 0, 13.0)
    metrics.end(1, "stop", 14.0)
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens, metrics.num_moved) == (7, 3, 1)
    times = metrics.queue_seconds, metrics.first_token_seconds, metrics.token_seconds, metrics.request_seconds
    assert [(each.count, each.total) for each in times] == [(1, 0.5), (1, 1.0), (1, 2.0), (1, 4.0)]
    assert metrics.ended == {"stop": 1}


def test_a_request_that_ends_is_divided_into_its_phases() -> None:
    """Tokens of both choices count. A request that no group has had counts in none."""
    metrics = RequestMetrics()
    for request in (1, 2):
        metrics.admit(request, 10.0)
    metrics.place(1, 7, 2, 20, 10.5)
    for choice, now in ((0, 12.0), (1, 12.5), (0, 14.0), (0, 16.0)):
        metrics.add_tokens(1, choice, now)
    metrics.end(1, "stop", 17.0)
    metrics.end(2, "abort", 17.0)
    phases = metrics.group_seconds, metrics.prefill_seconds, metrics.decode_seconds, metrics.mean_token_seconds
    assert [(each.count, each.total) for each in phases] == [(1, 6.5), (1, 1.5), (1, 4.0), (1, 2.0)]
    numbers = metrics.prompt_tokens, metrics.generation_tokens, metrics.choice_tokens, metrics.max_tokens, metrics.num_choices
    assert [(each.count, each.total) for each in numbers] == [(1, 7), (1, 4), (1, 3), (1, 20), (1, 2)]


@pytest.mark.parametrize(
    ("longest", "edges"), [(1, [1]), (9, [1, 2, 5]), (100, [1, 2, 5, 10, 20, 50, 100]), (450, [1, 2, 5, 10, 20, 50, 100, 200])]
)
def test_edges_of_token_counts_end_at_the_longest_request(longest: int, edges: list[float]) -> None:
    assert list(token_edges(longest)) == edges


def test_requests_that_were_not_admitted_here_are_not_counted() -> None:
    metrics = RequestMetrics()
    metrics.place(1, 7, 1, 20, 1.0)
    metrics.add_tokens(1, 0, 1.0)
    metrics.end(1, "stop", 1.0)
    metrics.refuse("overloaded")
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens, metrics.request_seconds.count) == (0, 0, 0)
    assert (metrics.ended, metrics.refused) == ({}, {"overloaded": 1})


def test_edges_of_vllm_are_among_ours() -> None:
    assert set(VLLM_TOKEN_EDGES) < set(RequestMetrics().token_seconds.edges)
