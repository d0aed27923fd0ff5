"""Which nodes use the matching table and which continue a firing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from flowrt.graph.fuse import fuse, fuse_all
from flowrt.graph.model import Graph

MODEL = "flowrt: 1\nmodel: {path: m}\n"


def user(edges: str, nodes: str = "a b c d") -> str:
    """One process p with these nodes; edges such as "input.x-a.x a.y-b.x:layer+1/0-3" (tag, then layers)."""
    text = "flowrt: 1\nnodes:\n" + "".join(f"  {name}: {{operator: ops:{name}, process: p}}\n" for name in nodes.split()) + "edges:\n"
    for edge in edges.split():
        ends, _, rest = edge.partition(":")
        tag, _, layers = rest.partition("/")
        source, _, target = ends.partition("-")
        keys = ([f"tag: {tag}"] if tag else []) + ([f"layers: {layers}"] if layers else [])
        text += f"  {source} -> {target}: {{{', '.join(keys)}}}\n"
    return text


def short(graph: Graph, process: str = "attention.0") -> tuple[list[str], list[str]]:
    fusion = fuse(graph, process)
    return [name.removeprefix(f"{process}.") for name in fusion.entries], [name.removeprefix(f"{process}.") for name in fusion.fused]


def test_experts_elsewhere_split_a_layer_in_two(load) -> None:
    graph = load(MODEL + "deploy: {experts: {servers: 2}}\n", moe_layers=(1, 3))
    assert short(graph) == (["embed", "combine"], ["attention", "gate", "mlp", "dispatch", "head"])
    assert fuse(graph, "experts.1").entries == ("experts.1",)


def test_a_large_model_is_fused_like_a_small_one(load) -> None:
    large = load(MODEL + "deploy: {experts: {servers: 2}}\n", num_layers=61, moe_layers=tuple(range(3, 61)))
    assert short(large) == (["embed", "combine"], ["attention", "gate", "mlp", "dispatch", "head"])


def test_experts_inside_leave_one_firing_for_the_whole_step(load) -> None:
    graph = load(MODEL)
    assert short(graph) == (["embed"], ["attention", "gate", "dispatch", "experts", "combine", "head"])
    assert fuse(graph, "attention.0").chains == (
        tuple(f"attention.0.{name}" for name in ("embed", "attention", "gate", "dispatch", "experts", "combine", "head")),
    )
    assert short(load(MODEL, moe_layers=(0, 2)))[0] == ["embed"]


def test_a_diamond_within_one_firing(load) -> None:
    graph = load(user("input.x-a.x a.y-b.x a.z-c.x b.y-d.x c.y-d.z d.y-output.y"))
    assert short(graph, "p") == (["a"], ["b", "c", "d"])
    assert fuse(graph, "p").chains == (("a", "b", "c", "d"),)


def test_inputs_of_two_firings_must_be_matched(load) -> None:
    graph = load(user("input.x-a.x input.y-b.x a.y-d.x b.y-d.z d.y-c.x c.y-output.y"))
    assert short(graph, "p") == (["a", "b", "d"], ["c"])


def test_inputs_of_one_node_on_several_ports(load) -> None:
    graph = load(user("input.x-a.x a.y-b.x a.z-b.z b.y-output.y", "a b"))
    assert short(graph, "p") == (["a"], ["b"])


def test_a_message_from_elsewhere_makes_an_entry(load) -> None:
    text = user("input.x-a.x a.y-b.x a.z-c.x c.y-b.z b.y-d.x d.y-output.y")
    assert short(load(text), "p") == (["a"], ["b", "c", "d"])
    apart = load(text.replace("ops:c, process: p", "ops:c, process: q"))
    assert short(apart, "p") == (["a", "b"], ["d"])
    assert short(apart, "q") == (["c"], [])


def test_a_layer_and_the_next_are_not_one_tag(load) -> None:
    """b waits for a of this layer and c of the one before: c's message may come first, so b is matched."""
    graph = load(user("input.x-a.x a.w-a.x:layer+1/0-2 a.y-b.x:/1-3 a.v-c.x c.y-b.z:layer+1/0-2 b.y-output.y:/3", "a b c"))
    assert short(graph, "p") == (["a", "b"], ["c"])


def test_both_inputs_from_the_same_earlier_layer(load) -> None:
    graph = load(user("input.x-a.x a.y-b.x a.z-c.x b.y-d.x:layer+1 c.y-d.z:layer+1 d.y-output.y"))
    assert short(graph, "p") == (["a"], ["b", "c", "d"])


def test_alternatives_by_layer(load) -> None:
    """d takes x from b at layer 0 and from c at layer 1, and z from a at both: one firing either way."""
    edges = "input.x-a.x a.w-a.x:layer+1/0 a.y-b.x:/0 a.y-c.x:/1 a.z-d.z b.y-d.x c.y-d.x d.y-output.y:/1"
    assert short(load(user(edges)), "p") == (["a"], ["b", "c", "d"])


def test_gather_within_one_firing(load) -> None:
    text = user("input.x-a.x a.n-d.n a.y-b.x a.z-c.x b.y-d.parts c.y-d.parts d.y-output.y")
    text = text.replace("operator: ops:d,", "operator: ops:d, inputs: {n: 'int64[]', parts: {takes: gather, count: n}},")
    assert short(load(text), "p") == (["a"], ["b", "c", "d"])
    apart = text.replace("ops:c, process: p", "ops:c, process: q")
    assert short(load(apart), "p") == (["a", "d"], ["b"])


def test_a_long_chain(load) -> None:
    names = [f"n{index}" for index in range(400)]
    edges = ["input.x-n0.x", *(f"{a}.y-{b}.x" for a, b in pairwise(names)), "n399.y-output.y"]
    graph = load(user(" ".join(edges), " ".join(names)))
    assert fuse(graph, "p").chains == (tuple(names),)


class _Name(str):
    """A node's name that counts how often it is hashed or compared."""

    num_uses = 0

    def __hash__(self) -> int:
        _Name.num_uses += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        _Name.num_uses += 1
        return super().__eq__(other)


def num_uses(load, num_nodes: int) -> int:
    """Of all names, when a chain over this many nodes, in one process and two, is fused."""
    names = [_Name(f"n{index}") for index in range(num_nodes)]
    edges = ["input.x-n0.x", *(f"{a}.y-{b}.x" for a, b in pairwise(names)), f"{names[-1]}.y-output.y"]
    graph = load(user(" ".join(edges), " ".join(names)))
    known = {name: name for name in names}
    nodes = [replace(node, name=known.get(node.name, node.name)) for node in graph.nodes.values()]
    edges = [
        replace(edge, source=known.get(edge.source, edge.source), target=known.get(edge.target, edge.target))
        for edge in graph.edges.values()
    ]
    _Name.num_uses = 0
    for graph in (Graph.of(nodes, edges), Graph.of([replace(node, process=f"p{place % 2}") for place, node in enumerate(nodes)], edges)):
        assert sum(len(chain) for fusion in fuse_all(graph).values() for chain in fusion.chains) >= num_nodes
    return _Name.num_uses


def test_work_grows_with_the_number_of_nodes(load) -> None:
    few, some, many = (num_uses(load, num_nodes) for num_nodes in (20, 40, 80))
    assert many - some <= 2 * (some - few) + few // 10


def test_all_processes_at_once(load) -> None:
    graph = load(MODEL + "deploy: {attention: {groups: 2}, experts: {servers: 2}}\n")
    assert fuse_all(graph) == {process: fuse(graph, process) for process in graph.process_names()}
