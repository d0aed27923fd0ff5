"""Extra tensors of KV transfers under drawn faults: an operator takes those of prompts that were computed, and no others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import pytest
import torch
import yaml
from simulation.graph_files import GRAPHS, load

from flowrt.actors.control import KvPulled
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.schemas import Spec
from flowrt.document import parse_document
from flowrt.exchange import kv_transfer
from flowrt.exchange.extra_tensors import Key, SentExtras, Step
from flowrt.exchange.kv_transfer import KvUnpack
from flowrt.gateway.gateway import Gateway
from flowrt.graph.file import build_graph
from flowrt.graph.model import Graph
from flowrt.graph.written import to_yaml
from flowrt.launcher.model_facts import facts_of
from flowrt.operators.exact import ExactModel
from flowrt.reliability.scenario import Crash
from flowrt.simulation.campaign import failure_of
from flowrt.simulation.case import Case
from flowrt.simulation.cases import draw, run_case
from flowrt.workers.exact_nodes import _residuals
from flowrt.workers.model_nodes import config_of

SEEDS = 8
HIDDEN = 32
TENSOR = f"float64[{HIDDEN}]"


@lru_cache
def graph() -> Graph:
    """That of prefill.yaml. The output of the last layer travels."""
    document = yaml.safe_load(to_yaml(load("prefill.yaml")))
    nodes, edges = document["nodes"], document["edges"]
    for worker in ("prefill.0", "prefill.1"):
        nodes[f"{worker}.hidden"] = {"operator": "kv_extra", "process": worker, "options": {"name": "hidden", "tensor": TENSOR}}
        edges[f"{worker}.combine.y -> {worker}.hidden.rows"] = {"layers": "1"}
    for group in ("attention.0", "attention.1"):
        nodes[f"{group}.kv_unpack"]["options"]["extras"] = {"hidden": TENSOR}
        nodes[f"{group}.take"] = {"operator": "taking_operators:take", "process": group, "keeps": "nothing"}
        edges[f"{group}.kv_unpack.hidden -> {group}.take.hidden"] = {}
    return build_graph(parse_document(json.dumps(document), "extras.yaml"), GRAPHS, None, facts_of, ("zmq",))


def expected(prompt: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(_residuals(ExactModel(config_of(graph())), prompt)[-1].tolist())


def taken_in(case: Case) -> tuple[list[tuple[float, ...]], set[tuple[float, ...]], int]:
    """What operators took, what they may have taken, and the number of prompts that groups have pulled."""
    pulled: list[str] = []
    on_transfer = Gateway.on_transfer

    def noted(gateway: Gateway, group: str, control: Any) -> Any:
        pulled.extend([control.request_id] if isinstance(control, KvPulled) else ())
        return on_transfer(gateway, group, control)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gateway, "on_transfer", noted)
        patch.syspath_prepend(str(GRAPHS))
        operators = import_module("taking_operators")  # as workers import it
        operators.taken.clear()
        run_case(case)
    return operators.taken, {expected(request.prompt_token_ids) for request in case.requests}, len(pulled)


def cases() -> list[Case]:
    """Without experts that may be missing, which change what travels as they change the KV."""
    drawn = [draw(seed, [graph()]) for seed in range(SEEDS)]
    settings = [case.graph.reliability.replace(unavailable_expert="error") for case in drawn]
    return [replace(case, graph=case.graph.replace(reliability=each)) for case, each in zip(drawn, settings, strict=True)]


@pytest.mark.timeout(300)
def test_an_operator_takes_those_of_computed_prompts_alone() -> None:
    num_taken = num_pulled = 0
    for case in cases():
        taken, possible, pulled = taken_in(case)
        assert {*taken} <= possible, case.seed
        if not any(isinstance(fault, Crash) for fault in case.scenario.faults):
            assert len(taken) >= pulled, case.seed
        num_taken, num_pulled = num_taken + len(taken), num_pulled + pulled
    assert num_taken > 2 * SEEDS
    assert num_pulled > 2 * SEEDS


def _another_row(extras: SentExtras, step: Step, last_rows: Mapping[Key, int]) -> None:
    BEGIN_STEP(extras, step, {key: row - 1 for key, row in last_rows.items()})


def _changed(unpack: KvUnpack, firing: Firing) -> None:
    """A bit flips on the way."""
    chunk = firing.inputs["chunk"]
    *kv, last = chunk.tensors
    changed = (*kv, last + 1) if len(kv) == len(unpack._pages.parts(0)) else chunk.tensors
    ON_CHUNK(unpack, Firing(firing.node, firing.tag, {"chunk": Payload(changed, chunk.header)}, firing.via))


def _unchecked(specs: Mapping[str, Spec], tensors: Sequence[torch.Tensor], digest: int) -> tuple[dict[str, torch.Tensor], str]:
    return dict(zip(specs, tensors, strict=True)), ""


BEGIN_STEP, ON_CHUNK = SentExtras.begin_step, KvUnpack.on_chunk
PLANTED: dict[str, tuple[tuple[tuple[Any, str, Any], ...], str]] = {
    "a row of another token": (((SentExtras, "begin_step", _another_row),), "wrong"),
    "a bit that flips": (((KvUnpack, "on_chunk", _changed),), "the bytes of its extra tensors do not match their hash"),
    "a bit that flips, without a hash": (((KvUnpack, "on_chunk", _changed), (kv_transfer, "received", _unchecked)), "wrong"),
    "tensors of ended attempts": (((SentExtras, "forget_ended", lambda extras, is_alive: None),), "extra tensors of request-0"),
    "pulled without them": (((SentExtras, "of", lambda extras, key: ()),), "it has 0 extra tensors, expected 1"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, text = PLANTED[name]
    for owner, attribute, change in changes:
        monkeypatch.setattr(owner, attribute, change)
    found = set()
    for case in cases():
        try:
            taken, possible, _ = taken_in(case)
        except Exception as error:
            found.add(failure_of(case.seed, error).text)
        else:
            found |= {"wrong"} if not {*taken} <= possible else set()
        if any(text in each for each in found):
            return
    raise AssertionError(f"{name} was not found: {found}")
