"""When an expert had no replica, computed from the down times of its servers."""

from __future__ import annotations

from pathlib import Path

from flowrt.graph.file import load_graph
from flowrt.launcher.model_facts import facts_of
from flowrt.operators.families.registry import read_model_config
from flowrt.simulation.outages import Outages, holders_of

GRAPHS = Path(__file__).resolve().parent / "graphs"
HOLDERS = {"one": frozenset({frozenset({"a", "b"}), frozenset({"b", "c"})}), "other": frozenset({frozenset({"c"})})}


def test_an_expert_is_lost_while_all_its_servers_are_down() -> None:
    outages = Outages(HOLDERS)
    outages.down("a", 1.0)
    outages.down("b", 3.0)
    outages.down("b", 4.0)  # repeated
    assert outages.intervals("one", 5.0) == [(3.0, 5.0)]
    outages.up("one", "a", 6.0)
    assert outages.intervals("one", 9.0) == [(3.0, 6.0)]
    outages.down("c", 8.0)
    assert outages.intervals("one", 9.0) == [(3.0, 6.0), (8.0, 9.0)]
    assert outages.longest("one", 0.0, 9.0) == 3.0
    assert outages.longest("one", 7.0, 9.0) == 1.0
    assert outages.intervals("other", 9.0) == [(8.0, 9.0)]


def test_one_expert_after_another_is_one_outage() -> None:
    outages = Outages(HOLDERS)
    for server, when in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        outages.down(server, when)
    outages.up("one", "a", 3.0)
    assert outages.intervals("one", 5.0) == [(1.0, 5.0)]


def test_each_group_has_its_own_view() -> None:
    outages = Outages(HOLDERS)
    outages.down("c", 1.0)
    outages.up("one", "c", 2.0)
    outages.down("b", 3.0, by="one")
    outages.down("a", 3.5, by="one")
    assert outages.is_down("one", "b")
    assert not outages.is_down("other", "b")
    assert outages.intervals("one", 4.0) == [(3.5, 4.0)]
    assert outages.intervals("other", 4.0) == [(1.0, 4.0)]
    assert outages.longest("unknown", 0.0, 4.0) == 0.0


def test_holders_are_those_of_the_graph() -> None:
    def holders(name: str) -> dict[str, frozenset[frozenset[str]]]:
        graph = load_graph(GRAPHS / name, facts_of=facts_of)
        assert graph.model is not None
        return holders_of(graph, read_model_config(Path(graph.model.path)))

    pairs = holders("2x3.yaml")
    assert set(pairs) == {"attention.0", "attention.1"}
    assert {len(each) for each in pairs["attention.0"]} == {2}
    assert frozenset.union(*pairs["attention.0"]) == {"experts.0", "experts.1", "experts.2"}
    assert holders("tight.yaml")["attention.0"] == {frozenset({"experts.0"}), frozenset({"experts.1"})}
    assert set(holders("together.yaml").values()) == {frozenset()}
