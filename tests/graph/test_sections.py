"""`reliability:` and `emulate:` in a graph file: their defaults and meaning, and that the expanded file and the wire say the same."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flowrt.graph.model import from_json, to_json
from flowrt.graph.settings import ComputeCost, Emulation, ReliabilitySettings
from flowrt.graph.show import print_graph
from flowrt.graph.written import to_yaml

MODEL = "flowrt: 1\nmodel: {path: m}\ndeploy: {experts: {servers: 2, replicas: 2}}\n"
OWN = "flowrt: 1\nnodes: {a: {operator: ops:a}}\nedges: {input.x -> a.x: {}, a.y -> output.y: {}}\n"


def test_without_reliability_the_defaults_stand_and_expand_writes_them(load) -> None:
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
def test_reliability_is_equal_expanded_and_on_the_wire(load, text: str) -> None:
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


LINKED = "flowrt: 1\nmodel: {path: m}\ndeploy:\n  experts: {servers: 2}\n  links: {attention-experts: {link: ub}}\n"


@pytest.mark.parametrize(
    ("section", "emulation"),
    [
        ("{dilation: 100}", Emulation(100.0)),
        ("{dilation: 1.5e3, processes_per_nic: 8}", Emulation(1500.0, processes_per_nic=8)),
        ("{dilation: 2, compute: {attention: {fixed_seconds: 250e-6}}}", Emulation(2.0, {"attention": ComputeCost(250e-6)})),
        (
            "{dilation: 2, compute: {gate: {row_seconds: 1}, experts: {expert_seconds: 3}, attention: {kv_token_seconds: 4}}}",
            Emulation(
                2.0,
                {"gate": ComputeCost(row_seconds=1.0), "experts": ComputeCost(0.0, 0.0, 3.0), "attention": ComputeCost(0.0, 0.0, 0.0, 4.0)},
            ),
        ),
    ],
)
def test_emulated_graph_is_equal_expanded_and_on_the_wire(load, section: str, emulation: Emulation) -> None:
    graph = load(f"{LINKED}emulate: {section}\n")
    assert graph.emulation == emulation
    assert load(to_yaml(graph), name="again.yaml") == graph
    assert from_json(to_json(graph)).emulation == emulation


def test_without_the_key_nothing_is_emulated(load) -> None:
    graph = load(LINKED)
    assert graph.emulation is None
    assert "emulate" not in to_yaml(graph)


def test_show_names_the_dilation(load) -> None:
    out = io.StringIO()
    print_graph(load(f"{LINKED}emulate: {{dilation: 250}}\n"), "g.yaml", Console(file=out, width=400))
    assert "emulated at dilation 250" in out.getvalue().splitlines()[0]


def test_computing_alone_can_be_emulated(load) -> None:
    graph = load("flowrt: 1\nmodel: {path: m}\nemulate: {dilation: 3, compute: {experts: {fixed_seconds: 1e-3}}}\n")
    assert graph.emulation is not None
    assert graph.emulation.compute == {"experts": ComputeCost(1e-3)}
