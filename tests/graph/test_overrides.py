"""`--set path=value`: what it changes, and that errors name it."""

from __future__ import annotations

import pytest

from flowrt.errors import GraphError

MODEL = "flowrt: 1\nmodel: {path: m}\ndeploy:\n  experts: {servers: 1}\n"
USER = "flowrt: 1\nnodes:\n  a.b: {operator: ops:a}\n  a: {operator: ops:a}\nedges:\n"
USER += "".join(f"  input.x{n} -> {n}.x:\n  {n}.y -> output.y{n}:\n" for n in ("a", "a.b")).replace("xa.b", "xb")
USER = USER.replace("ya.b", "yb")


def test_values_are_read_as_yaml(load) -> None:
    overrides = ("deploy.experts.servers=2", "deploy.attention={groups: 3, micro_batches: 2}", "prompts=['a: b', c]")
    graph = load(MODEL, *overrides, "deploy.processes=one")
    assert len(graph.process_names()) == 5
    assert (graph.micro_batches, graph.prompts, graph.processes) == (2, ("a: b", "c"), "one")


def test_the_last_one_wins_and_nothing_else_changes(load) -> None:
    assert load(MODEL, "deploy.experts.servers=2", "deploy.experts.servers=3") == load(MODEL.replace("servers: 1", "servers: 3"))


def test_a_section_that_is_not_there_is_made(load) -> None:
    assert load("flowrt: 1\nmodel: {path: m}\n", "limits.kv_pages=7", "limits.max_num_seqs=3").limits.kv_pages == 7


def test_names_with_dots_and_places_in_lists(load) -> None:
    graph = load(USER, "nodes.a.b.process=left", "nodes.a.process=right", "edges.input.xa -> a.x.credits=5")
    assert (graph.nodes["a.b"].process, graph.nodes["a"].process) == ("left", "right")
    assert graph.edges["input.xa -> a.x"].credits == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "deploy.experts.servers=two",
            "--set deploy.experts.servers=two: deploy.experts.servers: 'two' is not possible; write colocated, or a number from 0 to 1024",
        ),
        ("deploy.experts.server=2", "--set deploy.experts.server=2: deploy.experts.server: unknown key 'server'; did you mean 'servers'?"),
        (
            "deploy.experts={servers: 1, replicas: 2}",
            "--set deploy.experts={servers: 1, replicas: 2}: deploy.experts.replicas: 2 replicas need",
        ),
        (
            "deploy.experts.replicas=2",
            "--set deploy.experts.replicas=2: deploy.experts.replicas: 2 replicas need as many servers, there are 1;",
        ),
        ("model.path=nowhere", "--set model.path=nowhere: model.path: there is no folder 'nowhere'"),
        ("deploy.experts.servers", "--set deploy.experts.servers: is not an override; write path=value"),
        ("=2", "--set =2: is not an override"),
        ("flowrt.x=2", "--set flowrt.x=2: flowrt.x: flowrt holds no keys to set 'x' in"),
        ("limits=[", "--set limits=[: limits: is not YAML"),
        ("limits=&a {}", "--set limits=&a {}: limits: '&a' is an anchor"),
        ("limits={a: 1, a: 2}", "--set limits={a: 1, a: 2}: limits: the key exists twice"),
    ],
)
def test_errors_name_the_override(load, override: str, message: str) -> None:
    with pytest.raises(GraphError) as caught:
        load(MODEL, override)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_error_of_the_file_still_names_the_file(load) -> None:
    with pytest.raises(GraphError, match=r"g\.yaml:4: deploy\.experts\.servers: -1 is not possible"):
        load(MODEL.replace("servers: 1", "servers: -1"), "limits.kv_pages=7")


def test_a_path_of_any_length_is_refused_at_once_and_not_repeated(load) -> None:
    with pytest.raises(GraphError, match="at most 1000") as error:
        load(MODEL, f"{'.'.join('a' for _ in range(5000))}=1")
    assert len(str(error.value)) < 400
    with pytest.raises(GraphError) as error:
        load(MODEL, f"deploy.experts.servers={'x' * 5000}")
    assert len(str(error.value)) < 400
