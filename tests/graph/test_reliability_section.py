"""`reliability:` in a graph file: its defaults, and that the expanded file and the wire say the same."""

from __future__ import annotations

import pytest

from flowrt.graph.model import from_json, to_json
from flowrt.graph.settings import ReliabilitySettings
from flowrt.graph.written import to_yaml

MODEL = "flowrt: 1\nmodel: {path: m}\ndeploy: {experts: {servers: 2, replicas: 2}}\n"
OWN = "flowrt: 1\nnodes: {a: {operator: ops:a}}\nedges: {input.x -> a.x: {}, a.y -> output.y: {}}\n"


def test_without_the_key_the_defaults_stand_and_expand_writes_them(load) -> None:
    graph = load(MODEL)
    assert graph.reliability == ReliabilitySettings(
        detector=True,
        recovery="fine",
        unavailable_expert_seconds=5.0,
        suspect_seconds=0.4,
        dead_seconds=1.0,
        restarts=3,
        restart_window_seconds=30.0,
        hedge=True,
        unavailable_expert="error",
    )
    assert "\nreliability: {detector: true, recovery: fine, unavailable_expert_seconds: 5.0, " in to_yaml(graph)


@pytest.mark.parametrize("text", [MODEL, OWN])
def test_graph_is_equal_expanded_and_on_the_wire(load, text: str) -> None:
    section = "{detector: false, recovery: off, unavailable_expert_seconds: 7, lost_group_seconds: 8, "
    more = "suspect_seconds: 0.5, dead_seconds: 2, restarts: 0"
    graph = load(f"{text}reliability: {section}{more}, restart_window_seconds: 9, hedge: false}}\n")
    assert graph.reliability == ReliabilitySettings(False, "off", 7.0, 8.0, 0.5, 2.0, 0, 9.0, False)
    degrading = load(f"{text}reliability: {{unavailable_expert: degrade}}\n")
    assert degrading.reliability == ReliabilitySettings(unavailable_expert="degrade")
    for each in (graph, degrading):
        assert load(to_yaml(each)).reliability == each.reliability
        assert from_json(to_json(each)).reliability == each.reliability


def test_a_setting_can_be_given_on_the_command_line(load) -> None:
    assert load(MODEL, "reliability.recovery=off").reliability.recovery == "off"
