"""Numerics per role: which processes are strict, what that demands of them, and what is refused."""

from __future__ import annotations

import json

import pytest
import yaml
from graph.conftest import Load

from flowrt.errors import GraphError
from flowrt.graph.numerics import is_exact, numerics_text, strict_exchanges, strict_processes
from flowrt.graph.written import to_yaml

MODEL = "flowrt: 1\nmodel: {path: m}\n"
STRICT_PREFILL = "deploy.prefill={workers: 1, numerics: strict}"
FAST_PREFILL = ("numerics=strict", "deploy.prefill={workers: 1, numerics: fast}")


@pytest.mark.parametrize(
    ("overrides", "text", "strict"),
    [
        ([], "fast", set()),
        (["numerics=strict"], "strict", {"prefill.0", "attention.0", "experts.0"}),
        (["deploy.prefill.numerics=strict"], "attention fast and prefill strict", {"prefill.0", "experts.0"}),
        (["deploy.attention.numerics=strict"], "attention strict and prefill fast", {"attention.0", "experts.0"}),
        (["numerics=strict", "deploy.prefill.numerics=fast"], "attention strict and prefill fast", {"attention.0", "experts.0"}),
        (["deploy.prefill.numerics=strict", "deploy.attention.numerics=strict"], "strict", {"prefill.0", "attention.0", "experts.0"}),
        (["deploy.experts.servers=0", "deploy.prefill.numerics=strict"], "attention fast and prefill strict", {"prefill.0"}),
        (
            ["deploy.experts.servers=colocated", "deploy.prefill.numerics=strict"],
            "attention fast and prefill strict",
            {"prefill.0", "attention.0"},  # whose experts serve the prefill worker
        ),
        (["numerics=strict", "deploy.prefill.numerics=fast", "deploy.attention.numerics=fast"], "fast", set()),
    ],
)
def test_expert_servers_follow_a_strict_client(load: Load, overrides: list[str], text: str, strict: set[str]) -> None:
    graph = load(MODEL, "deploy.prefill.workers=1", "deploy.experts.servers=1", *overrides)
    assert (numerics_text(graph), strict_processes(graph), is_exact(graph)) == (text, strict, text == "strict")
    assert {name for name, number in graph.threads.items() if number == 1} == strict, "the others have a share of the cores"
    assert load(to_yaml(graph)) == graph


def test_clients_of_one_server_use_one_form_of_messages_and_others_their_own(load: Load) -> None:
    mixed = load(MODEL, STRICT_PREFILL, "deploy.experts.servers=3", "deploy.experts.trampoline=always")
    assert strict_exchanges(mixed) == {"prefill.0", "attention.0", "experts.0", "experts.1", "experts.2"}
    assert strict_exchanges(load(MODEL, STRICT_PREFILL)) == {"prefill.0"}


def test_demands_of_strict_roles_leave_fast_ones_alone(load: Load) -> None:
    limits = "limits={chunk_tokens: 32, roles: {attention: {page_size: 4, max_num_batched_tokens: 8}}}"
    free = ("deploy.attention={device: cuda, threads: 3}", limits, "deploy.prefill.threads=2")
    graph = load(MODEL, STRICT_PREFILL, *free)
    assert dict(graph.threads) == {"prefill.0": 2, "attention.0": 3}
    assert load(to_yaml(graph)) == graph
    equal = load(MODEL, "numerics=strict", "deploy.prefill.workers=1", "limits.roles={prefill: {page_size: 4}, attention: {page_size: 4}}")
    assert equal.limits_of("prefill.0").page_size == equal.limits_of("attention.0").page_size == 4


def test_int8_is_refused_where_strict_bits_would_change(load: Load) -> None:
    with pytest.raises(GraphError, match="INT8 changes the numbers, and numerics are attention fast and prefill strict; write fast"):
        load(MODEL, STRICT_PREFILL, "deploy.experts={servers: 1, int8: dispatch}")
    for overrides in ((STRICT_PREFILL,), FAST_PREFILL):  # the tokens of the group are not exact in any case
        assert any(edge.int8 for edge in load(MODEL, *overrides, "deploy.prefill.int8=true").edges.values())


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ([STRICT_PREFILL, "deploy.prefill.device=cuda"], "deploy.prefill.device: strict numerics need CPUs, process prefill.0 computes"),
        ([STRICT_PREFILL, "limits.roles={prefill: {max_num_batched_tokens: 8}}"], "a chunk of 64 tokens exceeds"),
        ([*FAST_PREFILL, "deploy.attention.threads=2", "deploy.experts={servers: 1, threads: 3}"], "the same number of threads everywhere"),
        (["deploy.experts={servers: 1, numerics: strict}"], "deploy.experts.numerics"),
        (["role_numerics={prefill: strict}"], "role_numerics: the short form has deploy.prefill.numerics and deploy.attention.numerics"),
        ([STRICT_PREFILL, "deploy.processes=one", "deploy.prefill.threads=1", "deploy.attention.threads=2"], "the same number of threads"),
    ],
)
def test_what_strict_roles_lack_is_refused(load: Load, overrides: list[str], error: str) -> None:
    with pytest.raises(GraphError, match=error.replace("(", r"\(")):
        load(MODEL, *overrides)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("", "", "no process with the role 'experts' computes sequences, and expert servers follow their clients"),
        (
            "attention.1",
            "other.0",
            "any of the attention groups attention.0 and other.0 may get a request, and one is strict, the other fast",
        ),
        ("prefill.1", "other.0", "any of the prefill workers prefill.0 and other.0 may get a request"),
    ],
)
def test_roles_among_which_a_request_may_choose_have_the_same_numerics(load: Load, old: str, new: str, error: str) -> None:
    text = to_yaml(load(MODEL, "deploy={prefill: {workers: 2}, attention: {groups: 2}, experts: {servers: 1}}"))
    document = yaml.safe_load(text.replace(old, new) if old else text)
    with pytest.raises(GraphError, match=error):
        load(json.dumps(document | {"role_numerics": {"other" if old else "experts": "strict"}}))


def test_a_pipeline_in_two_processes_has_one_kind_of_numerics(load: Load) -> None:
    document = yaml.safe_load(to_yaml(load(MODEL, "deploy.experts.servers=1")))
    document["nodes"]["attention.0.head"]["process"] = "heads"
    with pytest.raises(GraphError, match=r"role_numerics: attention\.0 and heads compute the same sequences, and one is strict"):
        load(json.dumps(document | {"role_numerics": {"attention": "strict"}}))
