"""The difference of two graphs leads from one to the other, in the versions in which a run goes there, and names what cannot change."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from flowrt.errors import GraphError
from flowrt.graph.delta import apply, check_change, delta_of, from_json, joined, require_valid, to_json
from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph
from flowrt.launcher.model_facts import facts_of
from flowrt.launcher.transport_choice import choose_transports
from flowrt.simulation.changes import add_copy, draw_changes, remove_process

GRAPHS = Path(__file__).parents[1] / "simulation" / "graphs"


FACTS = facts_of(GRAPHS / "model")


def load(file: str, *overrides: str) -> Graph:
    return load_graph(GRAPHS / file, overrides, facts_of=facts_of)


def check(old: Graph, new: Graph) -> None:
    require_valid(new, FACTS)
    check_change(resolved(old), resolved(new))


def resolved(graph: Graph) -> Graph:
    return choose_transports(graph, lambda scheme: None)


@pytest.mark.parametrize("file", ["2x3.yaml", "strict.yaml", "together.yaml", "colocated/colocated.yaml", "prefill.yaml", "uneven.yaml"])
def test_each_version_is_reached_by_the_delta_from_the_one_before(file: str) -> None:
    graph, num_changes = resolved(load(file)), 0
    for seed in range(20):
        old = graph
        for change in draw_changes(random.Random(seed), graph, lambda: FACTS):
            new = resolved(change.graph)
            versions = [old, joined(old, new), new]
            leaving = tuple(name for name in old.process_names() if name not in new.process_names())
            versions.insert(2, versions[1].replace(leaving=leaving))
            for before, after in itertools.pairwise(versions):
                assert apply(before, from_json(to_json(delta_of(before, after)))) == after
            assert delta_of(new, new).nodes == delta_of(new, new).edges == {}
            old, num_changes = new, num_changes + 1
    assert num_changes


def test_server_that_is_copied_and_removed_leaves_the_graph_as_it_was() -> None:
    graph = load("2x3.yaml")
    grown = add_copy(graph, "experts.1", "experts.9")
    check(graph, grown)
    assert {edge.name for edge in grown.edges.values()} - {*graph.edges} == {
        *(f"attention.{group}.dispatch.server9 -> experts.9.rows" for group in range(2)),
        *(f"experts.9.results -> attention.{group}.combine.parts" for group in range(2)),
    }
    assert remove_process(grown, "experts.9") == graph


CHANGES = {
    ("limits.page_size", "limits.page_size=8"): "limits.page_size: cannot change from 4 to 8",
    ("model.dtype", "model.dtype=float32"): "model.dtype: cannot change from float64 to float32",
    ("numerics", "numerics=strict", "limits.chunk_tokens=8"): "numerics: cannot change from fast to strict",
    ("micro-batches", "deploy.attention.micro_batches=1"): "micro_batches: cannot change from 2 to 1",
    ("even placement", "deploy.experts.servers=4"): "nodes.experts.0: cannot change while experts.0 runs",
    ("int8", "deploy.experts.int8=both"): "edges.attention.0.dispatch.server0 -> experts.0.rows: cannot change while",
}


@pytest.mark.parametrize(("override", "error"), [(key[1:], error) for key, error in CHANGES.items()], ids=[key[0] for key in CHANGES])
def test_what_cannot_change_is_refused_in_one_line_with_its_key(override: tuple[str, ...], error: str) -> None:
    with pytest.raises(GraphError) as refused:
        check(load("2x3.yaml", *override[1:]), load("2x3.yaml", *override))
    assert error in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("reliability.recovery=off", "reliability.recovery"),
        ("reliability.standby=1", "reliability.standby"),
        ("deploy.processes=2", "processes"),
    ],
)
def test_graphs_in_which_no_process_can_join_say_which_key_is_why(override: str, key: str) -> None:
    graph = load("2x3.yaml", override)
    with pytest.raises(GraphError, match=rf"{key}: .*can (n?either )?join"):
        check(graph, add_copy(graph, "experts.1", "experts.9"))


def test_no_process_joins_where_trampolines_forward() -> None:
    graph = load("trampoline.yaml")
    num_groups = sum(node.kind.schedules for node in graph.nodes.values())
    with pytest.raises(GraphError, match="no process in a graph with trampolines can join"):
        check(graph, load("trampoline.yaml", f"deploy.attention.groups={num_groups + 1}"))


def test_a_port_cannot_lead_to_another_process_while_both_are_there() -> None:
    graph = load("2x3.yaml")
    renumbered = add_copy(remove_process(graph, "experts.2"), "experts.1", "others.2")
    with pytest.raises(GraphError, match=r"server2 leads to experts.2; use another port for others.2"):
        check(graph, renumbered)


def test_the_last_replica_of_an_expert_cannot_leave() -> None:
    graph = load("uneven.yaml")
    with pytest.raises(GraphError, match="has no replica"):
        check(graph, remove_process(graph, "experts.0"))
