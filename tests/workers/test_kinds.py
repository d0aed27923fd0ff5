"""The contract of the kinds of operators: each is declared whole, and its build, its exact twin and the specs of its ports agree."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from checkpoints import make_checkpoint

from flowrt.api import read_graph
from flowrt.dataflow.matching import MatchingTable
from flowrt.dataflow.payload import Payload, spec_of
from flowrt.dataflow.subgraph import part_of, plan_of
from flowrt.engine.batch import Batch, SampleSpec
from flowrt.graph.explicit import ports_of
from flowrt.graph.kinds import PACKAGE, Kind, Port, all_kinds
from flowrt.graph.model import Graph
from flowrt.graph.notation import parse_tensor_spec
from flowrt.graph.numerics import strict_exchanges
from flowrt.graph.settings import ComputeCost
from flowrt.graph.written import to_yaml
from flowrt.operators.families.family import PARTS
from flowrt.sampling_params import SamplingParams
from flowrt.transports.wire.message import Tag
from flowrt.workers.exact_nodes import build_exact_nodes
from flowrt.workers.message_schemas import schema_of_port
from flowrt.workers.model_nodes import batch_payloads, build_model_nodes, config_of, sampling_payload

ROOT = Path(__file__).parents[2]
KINDS = list(all_kinds().values())
GRAPH = """
flowrt: 1
model: {{path: {model}, dtype: float64, implementation: {implementation}}}
numerics: {numerics}
deploy:
  prefill: {{workers: 1}}
  attention: {{groups: 1}}
  experts: {{servers: 3, trampoline: {trampoline}}}
limits: {{kv_pages: 16, page_size: 4}}
"""
PROMPT = [5, 17, 3, 8, 21]
NATIVE = [("always", "native"), ("never", "native")]
CHOICES = {"fast": [*NATIVE, ("never", "transformers")], "strict": NATIVE}  # of trampoline and implementation
Sent = defaultdict[tuple[str, str], list[Payload]]  # by operator and output port


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_is_declared_whole(kind: Kind) -> None:
    for port in kind.outputs:
        for text in f"{port.tensors} {port.strict_tensors or ''} {port.optional} {port.repeated}".split():
            parse_tensor_spec(re.sub(r"^(wide|pages)?\[", "float32[", text))
        assert port.tensors or port.header is not None, f"{port.name} does not say what it sends"
    assert {*kind.gathers, *kind.gathers.values()} <= {*kind.inputs}
    assert {*kind.parts} <= {*PARTS}
    assert kind.build or kind.schedules or kind.sink, "nothing runs its nodes"
    assert (kind.compute is None) == (kind.twin is None), "the simulation computes what a checkpoint does"
    assert not kind.charges or (kind.load is not None and hasattr(ComputeCost, kind.charges))
    assert bool(kind.every_layer) <= kind.emits
    options = {"name": "mine", "tensor": "float32[4]"}
    assert ports_of(kind, options, ())[0].keys() == {*kind.inputs}


def test_each_part_of_a_checkpoint_belongs_to_one_kind() -> None:
    assert sorted(part for kind in KINDS for part in kind.parts) == sorted(PARTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a dense layer and shared experts."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), architecture="deepseek_v3", layers=2)


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_what_nodes_and_their_twins_send_fits_the_specs(model: Path, numerics: str, tmp_path: Path) -> None:
    """One step of a prompt goes through every node of a group and its servers. The ends of KV transfers send in tests/exchange, and each
    simulated run checks all its messages."""
    of_weights, of_twins = Sent(list), Sent(list)
    for trampoline, implementation in CHOICES[numerics]:
        file = tmp_path / "graph.yaml"
        file.write_text(GRAPH.format(model=model, numerics=numerics, trampoline=trampoline, implementation=implementation))
        graph = read_graph(file)
        with torch.inference_mode():
            run_step(graph, build, of_weights)
            run_step(graph, build_exact_nodes, of_twins)
    in_library = numerics == "fast"
    ports = {(kind.name, port.name) for kind, port in ports_sent() if in_library or not kind.name.startswith("transformers_")}
    assert {named(key) for key in of_weights} == {named(key) for key in of_twins} == ports
    emitters = frozenset(node.name for node in graph.nodes.values() if node.kind.emits)
    for sent in (of_weights, of_twins):
        for (operator, port), payloads in sent.items():
            declared = all_kinds()[operator].output(port)
            assert declared is not None
            schema = schema_of_port(declared, config_of(graph), bool(strict_exchanges(graph)), emitters, 1)
            for payload in payloads:
                tensors: Any = [SimpleNamespace(spec=spec_of(tensor)) for tensor in payload.tensors]
                assert schema.fault_of_tensors(tensors, {}) is None, (operator, port)
                assert type(payload.header) is (declared.header or type(None)), (operator, port)


def test_the_kind_of_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more file makes an operator that a graph file may use, with weights and exactly."""
    page = (ROOT / "docs" / "extend.md").read_text()
    (tmp_path / "damp.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1])
    monkeypatch.setattr(import_module(PACKAGE), "__path__", [*import_module(PACKAGE).__path__, str(tmp_path)])
    all_kinds.cache_clear()
    try:
        document = yaml.safe_load(to_yaml(read_graph(ROOT / "examples" / "quickstart.yaml")))
        at = "attention.0"
        document["nodes"][f"{at}.damp"] = {"operator": "damp", "process": at}
        document["edges"][f"{at}.damp.y -> {at}.attention.x"] = document["edges"].pop(f"{at}.embed.x -> {at}.attention.x")
        document["edges"][f"{at}.embed.x -> {at}.damp.x"] = {"layers": "0"}
        (tmp_path / "graph.yaml").write_text(yaml.safe_dump(document))
        graph = read_graph(tmp_path / "graph.yaml")
        for build_nodes in (build, build_exact_nodes):
            sent = Sent(list)
            with torch.inference_mode():
                run_step(graph, build_nodes, sent)
            assert [len(sent["damp", "y"]), len(sent["head", "tokens"])] == [1, 1]
    finally:
        monkeypatch.undo()
        all_kinds.cache_clear()


def ports_sent() -> Iterator[tuple[Kind, Port]]:
    """The output ports of nodes that run in a step."""
    yield from ((kind, port) for kind in KINDS for port in kind.outputs if not kind.kv)


def named(key: tuple[str, str]) -> tuple[str, str]:
    """The operator and the declared name of a port: "server*" for "server3"."""
    port = all_kinds()[key[0]].output(key[1])
    return key[0], "" if port is None else port.name


def build(graph: Graph, process: str) -> Mapping[str, Any]:
    return build_model_nodes(graph, process, "cpu", lambda: 0.0, lambda name, done, total: None)


def run_step(graph: Graph, build: Callable[[Graph, str], Mapping[str, Any]], sent: Sent) -> None:
    """Adds what every node sends in the first step of a prompt in the group. Raises what a node raises."""
    functions = {node: each for name in graph.process_names() for node, each in build(graph, name).items()}
    device, source = torch.device("cpu"), "attention.0.source"
    num_pages = -(-len(PROMPT) // 4)
    batch = Batch(
        token_ids=PROMPT,
        query_lengths=[len(PROMPT)],
        kv_lengths=[len(PROMPT)],
        page_tables=[list(range(num_pages))],
        sample_rows=[len(PROMPT) - 1],
        samples=[SampleSpec(SamplingParams(logprobs=2), 7, 0)],
        scores=[],
        sampled_requests=[("a", 1)],
        sequence_names=["a/1"],
    )
    emitted = batch_payloads(batch, 4, device) | {"sampling": sampling_payload(batch, device)}
    layers = range(graph.nodes[source].options["num_layers"])
    table = MatchingTable(graph.nodes.values(), graph.edges.values(), plan_of, part_of)
    waiting = deque(
        (source, Tag(source, layer=layer), {port: payload}, ())
        for layer in layers
        for port, payload in emitted.items()
        if graph.nodes[source].kind.emits_at(port, layer)
    )
    while waiting:
        name, tag, outputs, via = waiting.popleft()
        for port, payload in outputs.items():
            sent[graph.nodes[name].operator, port].append(payload)
            for edge in graph.edges_from(name):
                if edge.source_port != port or tag.layer not in edge.layers or edge.request_id not in (None, *via):
                    continue
                kept = via if graph.responders.get(edge.target) == name else ()
                for firing in table.arrive(edge, edge.tag.apply(tag), payload, kept).firings:
                    if callable(function := functions.get(firing.node)):
                        waiting.append((firing.node, firing.tag, function([firing])[0], firing.via))
