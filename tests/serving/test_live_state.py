"""The state that the live page shows, and the files of the page."""

from __future__ import annotations

from pathlib import Path

import msgspec
from serving.served_app import served_app

from flowrt.actors.control import EdgeStatistics, ExpertStatistics, Statistics
from flowrt.api.opening import read_graph
from flowrt.gateway.request_metrics import MAX_ENDED, RequestMetrics
from flowrt.serving.exposition import ServedState
from flowrt.serving.live_state import LiveState, LiveTimes, live_state

GRAPH = read_graph(Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml", ())


def state(metrics: RequestMetrics, **workers: Statistics) -> LiveState:
    named = {name.replace("_", "."): each for name, each in workers.items()}
    served = ServedState("tiny", False, 2, 1, 0, metrics, named, frozenset({"experts.1"}), states={"attention.0": "suspect"})
    made = live_state(GRAPH, served, ("one expert is lost",), 9.0)
    assert msgspec.json.decode(msgspec.json.encode(made), type=LiveState) == made
    return made


def test_edges_are_summed_between_processes_and_experts_over_them() -> None:
    across = [edge.name for edge in GRAPH.edges.values() if GRAPH.ends_of(edge) == ("attention.0", "experts.1")]
    sent = tuple(EdgeStatistics(name, "shm", 2, 100) for name in across)
    experts = (ExpertStatistics(0, (0, 2), (5, 6)),)
    found = state(
        RequestMetrics(),
        attention_0=Statistics(sent, num_pages=8),
        experts_1=Statistics(experts=experts),
        experts_2=Statistics(experts=experts),
    )
    assert [(each.source, each.target, each.num_bytes) for each in found.edges] == [("attention.0", "experts.1", 100 * len(across))]
    assert [(each.name, each.role, each.is_up, each.state) for each in found.processes][:2] == [
        ("attention.0", "attention", True, "suspect"),
        ("experts.1", "experts", False, "down"),
    ]
    assert [(each.layer, each.num_pairs) for each in found.experts] == [(0, (10, 0, 12))]
    assert found.problems == ("one expert is lost",)


def test_requests_are_those_that_run_and_the_latest_that_ended() -> None:
    metrics = RequestMetrics()
    for number in range(MAX_ENDED + 5):
        metrics.admit(number, 1.0)
        metrics.place(number, 7, 1, 8, 2.0)
        metrics.add_tokens(number, 0, 3.0)
        metrics.end(number, "stop", 4.0)
    metrics.admit(999, 5.0)
    requests = state(metrics).requests
    assert [each.number for each in requests] == [*range(5, MAX_ENDED + 5), 999]
    times = [(each.arrived, each.placed, each.first_token, each.ended, each.reason, each.num_tokens) for each in requests]
    assert (state(metrics).first_tokens, state(metrics).later_tokens) == (
        LiveTimes(MAX_ENDED + 5, 2.0 * (MAX_ENDED + 5)),
        LiveTimes(0, 0.0),
    )
    assert times[-2:] == [(1.0, 2.0, 3.0, 4.0, "stop", 1), (5.0, None, None, None, None, 0)]


async def test_page_needs_no_key_but_its_data_do() -> None:
    async with served_app(api_key="secret") as served:
        for path, kind in (
            ("/", "text/html"),
            ("/page/page.js", "text/javascript"),
            ("/page/state.js", "text/javascript"),
            ("/page/page.css", "text/css"),
            ("/page/grafana-dashboard.json", "application/json"),
        ):
            response = await served.call("GET", path)
            assert (response.status, response.headers["content-type"].partition(";")[0]) == (200, kind)
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self';" in policy
            assert "unsafe" not in policy
            assert b"http:" not in response.body.replace(b"http://www.w3.org/2000/svg", b""), "nothing from elsewhere"
        assert (await served.call("GET", "/page/state")).status == 401
        assert (await served.call("GET", "/page/state", authorization="Bearer secret")).status == 200
        assert (await served.call("GET", "/page/../http_app.py")).status == 401
    async with served_app() as served:
        assert (await served.call("GET", "/", host="evil.example")).status == 403
