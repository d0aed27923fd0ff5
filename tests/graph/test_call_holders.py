"""The processes that must fence a call after one of its firings has failed: all that may hold a message of it, and few more."""

from __future__ import annotations

from flowrt.graph.call_holders import CallHolders


def holders(load, nodes: str, edges: str, **keys: str) -> CallHolders:
    """A node such as a:p has this process; `keys` are more keys of a node's line, by name. Edges: "a.y-b.x a.y-c.x/layers: 0"."""
    text = "flowrt: 1\nnodes:\n"
    for each in nodes.split():
        name, _, process = each.partition(":")
        text += f"  {name}: {{operator: 'ops:f', process: {process}{keys.get(name, '')}}}\n"
    text += "edges:\n"
    for each in edges.split(";"):
        ends, _, options = each.strip().partition("/")
        source, _, target = ends.partition("-")
        text += f"  {source} -> {target}: {{{options}}}\n"
    return CallHolders(load(text))


CHAIN = "input.x-a.x; a.y-b.x; b.y-c.x; c.y-output.y"


def test_no_other_process_of_a_chain_holds_a_message(load) -> None:
    chain = holders(load, "a:p b:q c:r", CHAIN)
    assert [chain.after_failure(node) for node in "abc"] == [frozenset()] * 3


def test_cancelled_call_may_be_anywhere(load) -> None:
    assert holders(load, "a:p b:q c:r", CHAIN).after_failure("") == {"p", "q", "r"}


def test_stateful_node_waits_for_the_step(load) -> None:
    assert holders(load, "a:p b:q c:r", CHAIN, c=", stateful: true").after_failure("a") == {"r"}


def test_branches_beside_the_failed_node(load) -> None:
    """The sender of the other branch may still wait for a credit, its receivers may hold a row."""
    graph = holders(load, "a:p b:q c:r d:s e:t", "input.x-a.x; a.y-b.x; a.z-c.x; b.y-d.left; c.y-d.right; d.y-e.x; e.y-output.y")
    assert graph.after_failure("b") == {"p", "r", "s"}
    assert graph.after_failure("d") == frozenset()
    assert graph.after_failure("a") == frozenset()


def test_input_beside_the_failed_node(load) -> None:
    graph = holders(load, "a:p b:q", "input.x-a.x; input.x-b.right; a.y-b.left; b.y-output.y")
    assert graph.after_failure("a") == {"q"}
    assert graph.after_failure("b") == frozenset()


def test_output_that_may_wait_for_a_credit_beside_the_failed_node(load) -> None:
    graph = holders(load, "a:p b:q", "input.x-a.x; a.y-b.x; a.z-output.z; b.y-output.y")
    assert graph.after_failure("b") == {"p"}


def test_gather_may_fire_before_its_senders(load) -> None:
    graph = holders(
        load,
        "a:p b:q c:r",
        "input.x-a.x; a.n-c.n; a.y-b.x; b.y-c.parts; c.y-output.y",
        c=", inputs: {n: 'int64[]', parts: {takes: gather, count: n}}",
    )
    assert graph.after_failure("c") == {"p", "q"}


def test_node_that_fires_several_times_may_have_sent_before(load) -> None:
    graph = holders(load, "a:p b:q c:r", "input.x-a.x; a.y-b.x; b.w-b.x/tag: layer+1, layers: 0-2; b.y-c.x/layers: 3; c.y-output.y")
    assert graph.after_failure("a") == frozenset()
    assert graph.after_failure("b") == {"p", "q", "r"}
    assert graph.after_failure("c") == {"p", "q", "r"}


def test_request_to_the_failed_node_stays_without_a_response(load) -> None:
    graph = holders(load, "a:p b:q c:p", "input.x-a.x; a.y-b.x; b.y-c.x/response_to: a.y -> b.x; c.y-output.y")
    assert graph.after_failure("b") == {"p"}
    assert graph.after_failure("a") == frozenset()


def test_unknown_node_counts_as_any(load) -> None:
    assert holders(load, "a:p b:q c:r", CHAIN).after_failure("stranger") == {"p", "q", "r"}
