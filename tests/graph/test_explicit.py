"""The explicit form, as users write it: ports, defaults, prompts, folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrt.errors import GraphError
from flowrt.graph.file import load_graph
from flowrt.graph.model import GATEWAY, Edge, PortSpec
from flowrt.graph.notation import LayerSet, TagStep
from flowrt.graph.settings import Batching
from flowrt.graph.written import to_yaml

DESIGN = """flowrt: 1
nodes:
  scale: {operator: my_ops:scale, process: left, inputs: {x: "float32[rows,64]"}, outputs: {y: "float32[rows,64]"}}
  add:   {operator: my_ops:add, process: right}
edges:
  input.x -> scale.x:
  scale.y -> add.a: {transport: shm, credits: 4}
  input.x -> add.b:
  add.sum -> output.sum:
"""


def test_the_example_of_the_design(load, tmp_path: Path) -> None:
    graph = load(DESIGN)
    assert graph.process_names() == ["left", "right"]
    assert graph.nodes["scale"].inputs == {"x": PortSpec("x", ("float32[rows,64]",))}
    assert graph.nodes["add"].inputs == {"a": PortSpec("a"), "b": PortSpec("b")}
    assert graph.nodes["input"].process == graph.nodes["output"].process == GATEWAY
    assert graph.nodes["input"].outputs == {"x": PortSpec("x")}
    assert [edge.credits for edge in graph.edges.values()] == [8, 4, 8, 8]
    assert [edge.transport for edge in graph.edges.values()] == ["auto", "shm", "auto", "auto"]
    assert (graph.folder, graph.model, graph.processes) == (str(tmp_path), None, "many")
    assert graph.places["edges.scale.y -> add.a.transport"] == (f"{tmp_path / 'g.yaml'}:7", "edges.scale.y -> add.a.transport")


def test_when_a_link_opens(load) -> None:
    graph = load(DESIGN.replace("credits: 4", "credits: 4, open: start"))
    assert [edge.open for edge in graph.edges.values()] == ["lazy", "start", "lazy", "lazy"]
    assert load(to_yaml(graph), name="again.yaml") == graph


def test_every_key_of_the_form_survives_being_written(load) -> None:
    text = """flowrt: 1
processes: one
micro_batches: 3
devices: {left: "cuda:0"}
threads: {left: 2}
limits: {in_flight: 3}
prompts: ["null", "1e5", " x: y ", "tab\\there", "\\U0001F600 \\u2028 \\x85 \\\\ \\"", "-", "", "a:"]
nodes:
  split: {operator: ops.deep:split.fast, process: left, inputs: {x: "int64[]"}, outputs: {count: "int64[]", y: ["int8[n]", "float32[n,4]"]}}
  work: {operator: ops:work, process: far-away, batches: true}
  join: {operator: ops:join, process: left, inputs: {count: "int64[]", parts: {takes: gather, count: count}}, stateful: true}
edges:
  input.x -> split.x: {transport: inproc}
  split.count -> join.count: {layers: 0-4}
  split.y -> work.y: {link: roce-200g}
  work.z -> join.parts: {response_to: split.y -> work.y}
  join.out -> output.out: {layers: "4"}
  join.next -> split.x: {layers: 0-3, tag: layer+1}
"""
    graph = load(text)
    assert graph.nodes["join"].inputs["parts"] == PortSpec("parts", (), "gather", "count")
    assert (graph.nodes["join"].stateful, graph.nodes["work"].batches) == (True, Batching())
    assert graph.edges["join.next -> split.x"].tag == TagStep("next_layer")
    assert graph.edges["join.next -> split.x"].layers == LayerSet(frozenset({0, 1, 2, 3}))
    assert (graph.edges["split.y -> work.y"].credits, graph.edges["split.y -> work.y"].link) == (3, "roce-200g")
    assert (graph.edges["work.z -> join.parts"].response_to, graph.edges["work.z -> join.parts"].credits) == ("split.y -> work.y", 0)
    assert [edge.credits for edge in graph.edges.values()] == [3, 0, 3, 0, 3, 0]
    assert load(to_yaml(graph), name="again.yaml") == graph


def test_a_written_graph_finds_its_functions_from_elsewhere(load, tmp_path: Path) -> None:
    graph = load(DESIGN)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "written.yaml").write_text(to_yaml(graph))
    assert load_graph(tmp_path / "far" / "written.yaml") == graph


def test_prompts_come_from_a_list_or_a_file(load, tmp_path: Path) -> None:
    model = "flowrt: 1\nmodel: {path: m}\nprompts: "
    assert load(model + "[a, b]\n").prompts == ("a", "b")
    (tmp_path / "p.txt").write_text("one\r\n\n two \n", encoding="utf-8")
    assert load(model + "p.txt\n").prompts == ("one", " two ")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one\\ntwo"}\n\n{"prompt": "three"}\n', encoding="utf-8")
    assert load(model + "p.jsonl\n").prompts == ("one\ntwo", "three")
    wrong = {"{": "is not JSON", "[" * 100_000: "is not JSON", '{"prompt_token_ids": [1]}': "has no text", "3": "has no text"}
    for line, message in wrong.items():
        (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n' + line, encoding="utf-8")
        with pytest.raises(GraphError, match=rf"g\.yaml:3: prompts: .*p\.jsonl:2 {message}"):
            load(model + "p.jsonl\n")


def test_paths_are_looked_for_beside_the_file_then_in_the_working_directory(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "n").mkdir(parents=True)
    (tmp_path / "here" / "m").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    beside, here = load("flowrt: 1\nmodel: {path: m}\n"), load("flowrt: 1\nmodel: {path: ./n}\n")
    assert beside.model is not None
    assert beside.model.path == str(tmp_path / "m")
    assert here.model is not None
    assert here.model.path == str(tmp_path / "here" / "n")


def test_edges_of_several_groups_may_share_a_port(load) -> None:
    """Messages of different sources have different tags, so they do not meet on a port that takes one."""
    graph = load("flowrt: 1\nmodel: {path: m}\ndeploy:\n  attention: {groups: 3}\n  experts: {servers: 1}\n")
    assert len([edge for edge in graph.edges.values() if (edge.target, edge.target_port) == ("experts.0", "rows")]) == 3


def test_transports_of_installed_packages_may_be_named(load, tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(DESIGN.replace("transport: shm", "transport: pigeon"))
    assert load_graph(tmp_path / "g.yaml", schemes=("shm", "pigeon")).edges["scale.y -> add.a"].transport == "pigeon"
    with pytest.raises(
        GraphError, match=r"edges\.scale\.y -> add\.a\.transport: there is no transport 'pigeon'; known: auto, cuda, inproc, shm, ucx, zmq"
    ):
        load_graph(tmp_path / "g.yaml")


def test_links_hold_for_pairs_of_roles_in_both_directions_unless_an_edge_has_its_own(load) -> None:
    nodes = "flowrt: 1\nnodes:\n  a: {operator: ops:a, process: left.0}\n  b: {operator: ops:b, process: right}\n"
    edges = "edges:\n  input.x -> a.x:\n  a.y -> b.x:\n  a.w -> b.z: {credits: 9}\n"
    edges += "  b.z -> a.x: {tag: layer+1, layers: 0-2}\n  b.y -> output.y: {layers: 3}\n"
    graph = load(
        nodes + edges + "links: {left-right: {transport: shm, link: ub, open: start, credits: 8}, right-gateway: {transport: zmq}}\n"
    )
    found = {name: (edge.transport, edge.link, edge.credits, edge.open) for name, edge in graph.edges.items()}
    assert found == {
        "input.x -> a.x": ("auto", None, 8, "lazy"),
        "a.y -> b.x": ("shm", "ub", 8, "start"),
        "a.w -> b.z": ("shm", "ub", 9, "start"),
        "b.z -> a.x": ("shm", "ub", 8, "start"),
        "b.y -> output.y": ("zmq", None, 8, "lazy"),
    }
    assert load(to_yaml(graph), name="again.yaml") == graph


def test_parallel_edges_have_names_of_their_own(load) -> None:
    text = "flowrt: 1\nnodes: {a: {operator: ops:a, process: left}, b: {operator: ops:b, process: right}}\nedges:\n  input.x -> a.x:\n"
    text += "  early: {from: a.y, to: b.x, layers: 0-1}\n  late: {from: a.y, to: b.x, layers: 2, credits: 12}\n"
    text += "  b.y -> a.x: {tag: layer+1, layers: 0-1}\n  b.y -> output.y: {layers: 2}\n"
    graph = load(text, "edges.early.credits=11")
    assert [(edge.name, edge.credits) for edge in graph.edges.values() if edge.target == "b"] == [("early", 11), ("late", 12)]
    assert load(to_yaml(graph), name="again.yaml") == graph
    assert graph.edges["early"].id == Edge("c", "y", "d", "x", "early").id, "the id follows from the name alone"
