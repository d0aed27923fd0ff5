"""The matching table as a table of events: arrivals in, firings out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.dataflow.matching import Arrival, Firing, MatchingTable, arrives_at
from flowrt.graph.model import Edge, Node, PortSpec
from flowrt.graph.notation import LayerSet, TagStep
from flowrt.transports.wire.message import Tag


def fired(arrival: Arrival) -> Firing | None:
    """The one firing of an arrival, if there is one."""
    assert len(arrival.firings) <= 1
    return arrival.firings[0] if arrival.firings else None


def node(name, *ports, stateful=False):
    return Node(name, "m:f", "p", {port.name: port for port in ports}, stateful=stateful)


def one(name):
    return PortSpec(name)


def tag(step=0, layer=0, micro_batch=0, source="s", epoch=0):
    return Tag(source, epoch, micro_batch, step, layer)


JOIN = node("join", one("a"), one("b"))
A, B = Edge("x", "o", "join", "a"), Edge("y", "o", "join", "b")


def table(nodes, edges):
    """A response is (part id, value), or a value alone without an id."""
    return MatchingTable(nodes, edges, lambda plan: plan, lambda response: response[0] if isinstance(response, tuple) else None)


def test_a_node_fires_when_its_inputs_for_one_tag_are_there():
    matching = table([JOIN], [A, B])
    assert fired(matching.arrive(A, tag(0), "a0")) is None
    assert fired(matching.arrive(B, tag(1), "b1")) is None
    firing = fired(matching.arrive(B, tag(0), "b0"))
    assert firing is not None
    assert (firing.node, firing.tag, firing.inputs, firing.via) == ("join", tag(0), {"a": "a0", "b": "b0"}, (A.id, B.id))
    assert len(matching) == 1
    assert matching.waiting() == [("join", tag(1), ["a"])]


def test_a_second_message_for_a_port_that_takes_one_is_a_fault():
    matching = table([JOIN], [A, B])
    matching.arrive(A, tag(), 1)
    with pytest.raises(ValueError, match="second message"):
        matching.arrive(A, tag(), 2)


@given(st.permutations([(edge, step, batch) for edge in (A, B) for step in range(3) for batch in range(2)]))
def test_any_order_of_arrival_gives_the_same_firings(arrivals):
    matching = table([JOIN], [A, B])
    results = [fired(matching.arrive(edge, tag(step, 0, batch), (edge.id, step, batch))) for edge, step, batch in arrivals]
    done = {firing.tag: firing.inputs for firing in results if firing}
    expected = {
        tag(step, 0, micro_batch): {"a": (A.id, step, micro_batch), "b": (B.id, step, micro_batch)}
        for step in range(3)
        for micro_batch in range(2)
    }
    assert done == expected
    assert len(matching) == 0


def test_a_port_is_needed_only_at_the_layers_its_edges_reach():
    block = node("block", one("x"), one("layout"))
    first = Edge("embed", "x", "block", "x", layers=LayerSet(frozenset({0})))
    layout = Edge("source", "layout", "block", "layout", layers=LayerSet(frozenset({0})))
    later = Edge("combine", "y", "block", "x", layers=LayerSet(frozenset({0, 1})), tag=TagStep("next_layer"))
    matching = table([block], [first, layout, later])
    assert fired(matching.arrive(first, tag(layer=0), "x")) is None
    assert fired(matching.arrive(layout, tag(layer=0), "l")) is not None
    assert fired(matching.arrive(later, tag(layer=1), "y")) is not None
    assert len(matching) == 0


@pytest.mark.parametrize(
    ("step", "layers", "reached"),
    [
        (TagStep(), {0, 2}, {0, 2}),
        (TagStep("next_layer"), {0, 2}, {1, 3}),
        (TagStep("next_step"), {3}, {0}),
        (TagStep("to_layer", 2), {0}, {2}),
    ],
)
def test_where_an_edge_arrives(step, layers, reached):
    edge = Edge("a", "o", "b", "i", layers=LayerSet(frozenset(layers)), tag=step)
    assert {layer for layer in range(6) if arrives_at(edge, layer)} == reached


GATHER = node("combine", one("plan"), PortSpec("parts", takes="gather", count="plan"))
PLAN = Edge("dispatch", "plan", "combine", "plan")
RESPONSES = [Edge(f"e{s}", "results", "combine", "parts", response_to=f"dispatch.server{s} -> e{s}.rows") for s in range(3)]


@pytest.fixture
def matching():
    return table([GATHER], [PLAN, *RESPONSES])


@given(st.permutations([0, 1, 2]))
def test_gather_takes_the_number_in_the_plan_in_its_order(order):
    matching = table([GATHER], [PLAN, *RESPONSES])
    assert fired(matching.arrive(PLAN, tag(), (0, 1, 2))) is None
    firings = [fired(matching.arrive(RESPONSES[part], tag(), (part, f"v{part}"))) for part in order]
    assert firings[:2] == [None, None]
    assert firings[2].inputs["parts"] == [(0, "v0"), (1, "v1"), (2, "v2")]


def test_a_plan_without_parts_fires_at_once():
    firing = fired(table([GATHER], [PLAN, *RESPONSES]).arrive(PLAN, tag(), ()))
    assert firing is not None
    assert firing.inputs["parts"] == []


def test_response_to_a_finished_tag_is_dropped_and_leaves_no_row(matching):
    matching.arrive(PLAN, tag(), (0,))
    assert fired(matching.arrive(RESPONSES[0], tag(), (0, "v"))) is not None
    assert matching.arrive(RESPONSES[1], tag(), (0, "late")).dropped
    assert len(matching) == 0


def test_replacements_complete_a_superseded_part(matching):
    matching.arrive(PLAN, tag(), (0, 1))
    matching.arrive(RESPONSES[0], tag(), (0, "v0"))
    assert matching.supersede("combine", "parts", tag(), 1, (2,))
    assert not matching.supersede("combine", "parts", tag(5), 1, (2,))
    firing = fired(matching.arrive(RESPONSES[2], tag(), (2, "v2")))
    assert firing.inputs["parts"] == [(0, "v0"), (2, "v2")]


def test_anonymous_parts_may_come_before_their_count(matching):
    assert fired(matching.arrive(RESPONSES[0], tag(), "a")) is None
    assert fired(matching.arrive(RESPONSES[1], tag(), "b")) is None
    assert fired(matching.arrive(PLAN, tag(), 2)).inputs["parts"] == ["a", "b"]


def test_rollback_while_a_row_completes_fires_nothing():
    """The compute thread completes a row of a fused node while the loop rolls the tag back."""

    def plan_of(plan):
        dropped.append(matching.drop(lambda tag: True)[0])
        return plan

    dropped: list[int] = []
    matching = MatchingTable([GATHER], [PLAN, *RESPONSES], plan_of, lambda response: None)
    assert fired(matching.arrive(PLAN, tag(), ())) is None
    assert dropped == [1]
    assert len(matching) == 0


def test_rolling_back_deletes_the_rows_of_older_epochs():
    matching = table([JOIN], [A, B])
    for epoch, source in itertools.product((0, 1), ("s", "t")):
        matching.arrive(A, tag(source=source, epoch=epoch), None)
    assert matching.drop(lambda old: old.source == "s" and old.epoch < 1) == (1, [A.id])
    assert len(matching) == 3


STATE, IN = node("state", one("a"), stateful=True), Edge("x", "o", "state", "a")


@given(st.permutations(range(5)))
def test_stateful_node_fires_in_step_order_per_micro_batch(order):
    matching = table([STATE], [IN])
    released = []
    for step in order:
        released += matching.arrive(IN, tag(step), step).firings
    assert [firing.tag.step for firing in released] == list(range(5))
    assert len(matching) == 0


def test_micro_batches_of_a_stateful_node_do_not_wait_for_each_other():
    matching = table([STATE], [IN])
    assert fired(matching.arrive(IN, tag(1, micro_batch=0), None)) is None
    assert fired(matching.arrive(IN, tag(0, micro_batch=1), None)) is not None
    assert len(matching) == 1


def test_more_anonymous_parts_than_were_counted_open_no_new_row(matching):
    matching.arrive(PLAN, tag(), 1)
    assert fired(matching.arrive(RESPONSES[0], tag(), "a")) is not None
    assert matching.arrive(RESPONSES[1], tag(), "late").dropped
    assert len(matching) == 0


def test_rolling_back_drops_held_firings_and_returns_their_messages():
    matching = table([STATE], [IN])
    matching.arrive(IN, tag(2), None)
    assert matching.drop(lambda old: old.epoch < 1) == (1, [IN.id])
    assert len(matching) == 0
    assert fired(matching.arrive(IN, tag(7, epoch=1), None)) is not None  # a new epoch begins where its first step is
