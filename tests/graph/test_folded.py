"""Folded graphs: large deployments are checked and shown by one process of each kind, and show what the whole graph shows."""

from __future__ import annotations

import random
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from graph.model_facts import FACTS
from rich.console import Console

import flowrt.graph.file
from flowrt.cli.graph import validate
from flowrt.errors import GraphError
from flowrt.graph.diagrams import is_collapsed, to_dot, to_mermaid
from flowrt.graph.file import load_graph
from flowrt.graph.folded import num_edges, num_processes
from flowrt.graph.html_page import to_html
from flowrt.graph.model import Graph
from flowrt.graph.show import print_graph, summary_of_valid
from flowrt.launcher.model_facts import config_of, facts_of
from flowrt.launcher.start_checks import MemoryNeed, check_model, needs_text, total_weight_bytes
from flowrt.simulation.drawn_graphs import draw_deploy

EXAMPLES = Path(__file__).parents[2] / "examples" / "superpod"
FACTS_61 = replace(FACTS, num_layers=61, moe_layers=tuple(range(3, 61)), num_experts=256, num_experts_per_token=8)


def load(deploy: dict[str, Any], folds: bool = True, **keys: Any) -> Graph:
    return load_graph({"flowrt": 1, "model": {"path": "."}, "deploy": deploy, **keys}, facts_of=lambda *_: FACTS_61, folds=folds)


def shown(graph: Graph) -> tuple[str, ...]:
    text = StringIO()
    print_graph(graph, "g", Console(file=text, width=200), FACTS_61)
    return text.getvalue(), summary_of_valid(graph), to_mermaid(graph), to_dot(graph), to_html(graph, "g")


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_a_folded_graph_shows_what_the_whole_graph_shows(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_shown = 0
    for seed in range(first, first + 20):
        chance = random.Random(seed)
        deploy = draw_deploy(chance, FACTS_61)
        deploy["attention"]["groups"] = chance.randint(4, 9)
        if isinstance(deploy["experts"]["servers"], int) and deploy["experts"]["servers"]:
            deploy["experts"]["servers"] = chance.randint(4, 14)
        deploy["experts"].pop("placement", None)
        found = []
        for max_whole in (10_000, 0):
            monkeypatch.setattr(flowrt.graph.file, "MAX_WHOLE", max_whole)
            try:
                found.append(load(deploy))
            except GraphError as error:
                found.append(str(error))
        whole, folded = found
        if isinstance(whole, str) or isinstance(folded, str):
            assert whole == folded, f"seed {seed}"
            continue
        assert folded.folded
        assert not whole.folded
        assert whole.tags_in_flight() == folded.tags_in_flight()
        if is_collapsed(whole):
            num_shown += 1
            assert shown(whole) == shown(folded), f"seed {seed}: {deploy}"
        assert load(deploy, folds=False) == whole
    assert num_shown > 5


LARGE = {
    "attention": {"groups": 1024, "domains": 1024, "micro_batches": 2},
    "experts": {"servers": 1024, "replicas": 4, "trampoline": "always"},
    "prefill": {"workers": 1024},
}


def test_a_thousand_processes_of_each_role_are_checked_and_shown_by_a_few() -> None:
    graph = load(LARGE)
    assert len(graph.process_names()) <= 5
    assert num_processes(graph, graph.process_names()) == 3 * 1024
    # Each group and prefill worker exchanges with each server, groups with a trampoline too, and each group pulls from each worker.
    assert num_edges(graph, (edge for edge in graph.edges.values() if graph.crosses(edge))) == 2 * (3 * 1024**2 + 1024 + 1023)
    text, summary, mermaid, _, page = shown(graph)
    assert "attention.0-1023, 1024 processes such as attention.0" in text
    assert "3072 processes" in summary
    assert "experts.0-1023" in mermaid
    assert len(page) < 20_000


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"deploy": {**LARGE, "links": {"attention-experts": {"credits": 1}}}}, "1 is too few: 2 micro-batches"),
        ({"deploy": {**LARGE, "links": {"prefill-attention": {"transport": "smoke"}}}}, "there is no transport 'smoke'"),
        ({"deploy": {**LARGE, "attention": {"groups": 1024, "domains": 1025}}}, "deploy.attention.domains"),
        ({"deploy": {**LARGE, "attention": {"groups": 1025}}}, "deploy.attention.groups"),
        ({"deploy": {**LARGE, "experts": {"servers": 1024, "replicas": 3}}}, "1024 servers are more than 256 experts x 3 replicas"),
        ({"deploy": {**LARGE, "experts": {"servers": 300, "replicas": 2, "placement": {"experts.0": "0-255"}}}}, "is left out"),
        ({"deploy": LARGE, "limits": {"roles": {"export": {"page_size": 4}}}}, "no process has the role 'export'"),
        ({"deploy": LARGE, "long_prompts": {"min_tokens": 8, "workers": 1023}, "numerics": "exact"}, "numerics"),
    ],
)
def test_errors_of_large_deployments_name_the_key(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(GraphError) as caught:
        load(**keys)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_batches_of_a_large_deployment_may_wait_for_all_tags_in_flight() -> None:
    deploy = {"attention": {"groups": 1024}, "experts": {"servers": 200, "batches": {"min_tags": 1024, "max_wait_seconds": 1e-3}}}
    assert load(deploy).tags_in_flight() == 1024
    deploy["experts"]["batches"]["min_tags"] = 1025
    with pytest.raises(GraphError, match="at most 1024"):
        load(deploy)


def test_memory_of_a_folded_graph_counts_each_process() -> None:
    needs = {"attention.0": MemoryNeed(10, 5, count=3), "experts.0": MemoryNeed(8, 0, 8, "experts 0", count=2)}
    assert total_weight_bytes(needs.values()) == 3 * 10 + 2 * 8
    assert needs_text(needs) == "attention 3 x (10 B weights + 5 B KV), experts 2 x (8 B weights)"


def test_a_file_may_say_for_each_of_1024_servers_what_it_holds_in_each_layer(tmp_path: Path) -> None:
    lines = ["flowrt: 1", "model: {path: .}", "deploy:", "  attention: {groups: 1024}", "  experts:", "    servers: 1024", "    placement:"]
    for server in range(1024):
        lines.append(f"      experts.{server}:")
        lines += [f"        '{layer}': '{(server + layer) % 256}, {(server + layer + 128) % 256}'" for layer in range(3, 61)]
    (tmp_path / "g.yaml").write_text("\n".join(lines))
    graph = load_graph(tmp_path / "g.yaml", facts_of=lambda *_: FACTS_61, folds=True)
    assert num_processes(graph, graph.process_names()) == 2048


@pytest.mark.parametrize(
    ("name", "summary"), [("dp480-ep288", "480 attention groups and 288 expert servers"), ("dp288-ep288", "288 attention groups")]
)
def test_the_deployments_of_a_superpod_are_valid(name: str, summary: str, capsys: pytest.CaptureFixture[str]) -> None:
    validate(EXAMPLES / f"{name}.yaml")
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert f"valid; {summary} for " in line
    assert "deepseek-r1" in line
    assert "the graph cannot run" in line


def test_a_tenth_of_the_superpod_has_each_process_and_edge() -> None:
    smaller = ["deploy.attention.groups=48", "deploy.experts.servers=29"]
    graph = load_graph(EXAMPLES / "dp480-ep288.yaml", smaller, facts_of=facts_of)
    assert len(graph.process_names()) == 48 + 29
    requests = sum(graph.crosses(edge) and edge.response_to is None for edge in graph.edges.values())
    assert requests == 48 * (29 + 13) + 13  # of groups to servers and to trampolines, and of these to those behind them
    assert [len(domain) for domain in graph.nodes["experts.0"].batches.domains] == [16, 16, 16]


def test_a_card_can_be_read_and_not_run() -> None:
    graph = load_graph(EXAMPLES / "dp480-ep288.yaml", facts_of=facts_of, folds=True)
    assert config_of(graph.model).num_experts == 256
    with pytest.raises(GraphError, match=r"model\.path: deepseek-r1 is a card without weights; to run the graph, give a checkpoint"):
        check_model(graph)


def test_an_unknown_model_names_the_card_that_is_near(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="did you mean 'deepseek-r1'"):
        load_graph({"flowrt": 1, "model": {"path": "deepsek-r1"}}, facts_of=facts_of)
