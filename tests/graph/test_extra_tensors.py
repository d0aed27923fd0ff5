"""Extra tensors of KV transfers in a graph file: `kv_extra`, the outputs of `kv_unpack`, and operators that keep nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from graph.conftest import Load
from graph.model_facts import FACTS

from flowrt.errors import GraphError
from flowrt.graph.fuse import fuse
from flowrt.graph.model import Graph
from flowrt.graph.recovery import Recovery, rule_of, survives
from flowrt.graph.written import to_yaml

SHORT = "flowrt: 1\nmodel: {path: m}\ndeploy: {prefill: {workers: 1}, experts: {servers: 1}}\n"
LAST, HIDDEN = FACTS.num_layers - 1, FACTS.hidden_size
TENSOR = f"bfloat16[{HIDDEN}]"
ROWS = f"bfloat16[rows,{HIDDEN}]"
Document = dict[str, Any]


@pytest.fixture
def document(load: Load) -> Document:
    """The output of the last layer travels, through an operator of the user, to another one."""
    found: Document = yaml.safe_load(to_yaml(load(SHORT, "model.dtype=bfloat16")))
    nodes, edges = found["nodes"], found["edges"]
    own = {"process": "prefill.0", "keeps": "nothing"}
    nodes["scale"] = {"operator": "my_ops:scale", **own, "inputs": {"x": ROWS}, "outputs": {"y": ROWS}}
    nodes["hidden"] = {"operator": "kv_extra", "process": "prefill.0", "options": {"name": "hidden", "tensor": TENSOR}}
    nodes["attention.0.kv_unpack"]["options"]["extras"] = {"hidden": TENSOR}
    nodes["take"] = {"operator": "my_ops:take", "process": "attention.0", "keeps": "nothing", "inputs": {"x": TENSOR}}
    edges["prefill.0.combine.y -> scale.x"] = {"layers": str(LAST)}
    edges["scale.y -> hidden.rows"] = {}
    edges["attention.0.kv_unpack.hidden -> take.x"] = {}
    return found


@pytest.fixture
def build(load: Load) -> Callable[[Document], Graph]:
    return lambda document: load(json.dumps(document))


def test_a_graph_with_an_extra_tensor_is_written_as_it_was_read(document: Document, build: Callable[[Document], Graph], load: Load) -> None:
    graph = build(document)
    assert load(to_yaml(graph)) == graph
    assert graph.nodes["hidden"].inputs["rows"].tensors == (ROWS,)
    assert graph.nodes["attention.0.kv_unpack"].outputs["hidden"].tensors == (TENSOR,)
    assert "scale" in fuse(graph, "prefill.0").fused, "it is part of the step, and fails with it"


def test_processes_recover_when_their_operators_keep_nothing(document: Document, build: Callable[[Document], Graph]) -> None:
    graph = build(document)
    assert {process: survives(graph, process) for process in graph.process_names()} == {
        "prefill.0": True,
        "attention.0": True,
        "experts.0": True,
    }
    for name in ("scale", "take"):
        del document["nodes"][name]["keeps"]
    kept = build(document)
    assert [survives(kept, process) for process in ("prefill.0", "attention.0")] == [False, False]


def test_a_process_of_such_operators_alone_ends_the_run(load: Load) -> None:
    """No client holds what was sent to it."""
    graph = load("flowrt: 1\nnodes: {a: {operator: 'my_ops:a', keeps: nothing}}\nedges: {input.x -> a.x: , a.y -> output.y: }\n")
    assert rule_of(graph, "main").recovery == Recovery.FATAL


def _node(node: str, /, **keys: Any) -> Callable[[Document], object]:
    return lambda document: document["nodes"][node].update(keys)


def _options(node: str, /, **keys: Any) -> Callable[[Document], object]:
    return lambda document: document["nodes"][node]["options"].update(keys)


def _edge(old: str, new: str = "", **keys: Any) -> Callable[[Document], object]:
    def change(document: Document) -> None:
        own = document["edges"].pop(old)
        if new:
            document["edges"][new] = keys or own

    return change


def _dropped(node: str) -> Callable[[Document], object]:
    def change(document: Document) -> None:
        del document["nodes"][node]
        edges = document["edges"]
        document["edges"] = {
            name: edge for name, edge in edges.items() if node not in {end.rpartition(".")[0] for end in name.split(" -> ")}
        }

    return change


def _all(*changes: Callable[[Document], object]) -> Callable[[Document], object]:
    return lambda document: [change(document) for change in changes]


PULL = "attention.0.kv_unpack.pull0 -> prefill.0.kv_pack.pull"
WRONG: dict[str, tuple[Callable[[Document], object], str]] = {
    "a free dimension": (_options("hidden", tensor="float32[rows,8]"), r"float32\[rows,8\] has a dimension that is free or 0; write the"),
    "no number": (_options("hidden", tensor="float32[0]"), "has a dimension that is free or 0"),
    "no tensor": (_options("hidden", tensor=5), "5 is not a tensor; write the tensor of one prompt"),
    "a name": (_options("hidden", name="pull0"), "'pull0' is not a name of an extra tensor"),
    "no mapping": (_options("attention.0.kv_unpack", extras=["hidden"]), "is not a mapping; write a tensor per name"),
    "an option": (_options("hidden", shape=3), "'kv_extra' has no option 'shape'"),
    "another tensor": (
        _options("attention.0.kv_unpack", extras={"hidden": "bfloat16[5]"}),
        r"expected dimension",
    ),
    "another name": (
        _all(_options("hidden", name="other")),
        r"extras: expected the extra tensors of prefill.0 \(other: .*\), got hidden: .*; write the same",
    ),
    "no sender": (_all(_dropped("hidden"), _dropped("scale")), r"expected the extra tensors of prefill.0 \(none\), got hidden: "),
    "dtype of the sender": (
        _all(_node("scale", outputs={"y": ROWS.replace("bfloat16", "float32")})),
        "expected bfloat16, got float32",
    ),
    "shape at the reader": (_node("take", inputs={"x": "bfloat16[3]"}), "expected dimension 3"),
    "a built-in sender": (
        _all(_dropped("scale"), lambda document: document["edges"].update({"prefill.0.attention.normed -> hidden.rows": {"layers": "0"}})),
        "attention.normed does not have a row per row of the step; connect one of attention.residual, combine.y",
    ),
    "dtype of a built-in sender": (
        _all(
            _dropped("scale"),
            lambda document: document["edges"].update({"prefill.0.combine.y -> hidden.rows": {"layers": str(LAST)}}),
            _options("hidden", tensor=f"float32[{HIDDEN}]"),
            _options("attention.0.kv_unpack", extras={"hidden": f"float32[{HIDDEN}]"}),
            _node("take", inputs={"x": f"float32[{HIDDEN}]"}),
        ),
        "expected float32, got bfloat16",
    ),
    "every layer": (_edge("prefill.0.combine.y -> scale.x", "prefill.0.combine.y -> scale.x", tag="layer+1"), "rows of several layers"),
    "from another process": (_node("scale", process="side"), "expected rows of a step of prefill.0"),
    "of a step of another process": (
        _edge("prefill.0.combine.y -> scale.x", "attention.0.combine.y -> scale.x", layers=str(LAST)),
        "scale.y -> hidden.rows: expected rows of a step of prefill.0",
    ),
    "in a group": (_node("hidden", process="attention.0"), "process attention.0 has no kv_pack"),
    "to another process": (
        _node("take", process="side"),
        "an extra tensor is for operators of its group; put take into process attention.0",
    ),
    "too large": (
        _all(
            _options("hidden", tensor="bfloat16[99999999]"),
            _options("attention.0.kv_unpack", extras={"hidden": "bfloat16[99999999]"}),
            _node("scale", outputs={"y": "bfloat16[rows,99999999]"}),
            _node("take", inputs={"x": "bfloat16[99999999]"}),
        ),
        "limits.max_message_bytes: the extra tensors of prefill.0 have 199999998 bytes",
    ),
    "INT8": (
        lambda document: document["edges"]["prefill.0.kv_pack.chunk -> attention.0.kv_unpack.chunk"].update(int8=True),
        "a transfer with extra tensors carries no INT8",
    ),
    "two of a name": (
        lambda document: (
            document["nodes"].update(other=dict(document["nodes"]["hidden"])),
            document["edges"].update({"scale.y -> other.rows": {}}),
        ),
        "prefill.0 has two extra tensors 'hidden'; choose another name",
    ),
    "no reader": (_dropped("take"), "no edge leads from attention.0.kv_unpack.hidden; connect it"),
    "keeps of a built-in operator": (_node("hidden", keeps="nothing"), "'kv_extra' is built in and has its own; remove the key"),
    "keeps something": (_node("take", keeps="all"), "'all' is not possible; write nothing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str, document: Document, build: Callable[[Document], Graph]) -> None:
    change, text = WRONG[name]
    change(document)
    with pytest.raises(GraphError, match=text):
        build(document)
