"""Processes are placed on hosts by their rules, and what cannot be placed is one error."""

from __future__ import annotations

import io

import pytest
from graph.conftest import Load
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flowrt.errors import GraphError
from flowrt.graph.hosts import check_hosts, host_resources, place_processes
from flowrt.graph.model import Edge, Graph, Node
from flowrt.graph.notation import format_ids
from flowrt.graph.placement import even_placement
from flowrt.graph.settings import HostSettings
from flowrt.graph.show import print_graph
from flowrt.graph.written import to_yaml

HEAD = "flowrt: 1\nmodel: {path: m}\n"
TWO = (
    HEAD + "deploy: {prefill: {workers: 2}, attention: {groups: 2}, experts: {servers: 4, replicas: 2}}\nhosts: {engine: local, count: 2}\n"
)


def test_without_hosts_there_is_no_placement(load: Load) -> None:
    assert load(HEAD).process_hosts == {}


def test_replicas_are_on_two_hosts_and_each_role_is_spread(load: Load) -> None:
    graph = load(TWO)
    servers = [graph.host_of(f"experts.{number}") for number in range(4)]
    assert servers[0] != servers[2]
    assert servers[1] != servers[3]
    for role in ("prefill", "attention"):
        assert {graph.host_of(f"{role}.0"), graph.host_of(f"{role}.1")} == {"host.0", "host.1"}
    assert graph.host_of("monitor") == "host.0"


def test_a_role_is_near_another_or_apart_from_it_or_on_given_hosts(load: Load) -> None:
    near = load(TWO + "place: {prefill: {near: attention}, attention: {hosts: [1]}}\n")
    assert {near.host_of(f"{role}.{number}") for role in ("prefill", "attention") for number in range(2)} == {"host.1"}
    apart = load(TWO + "place: {prefill: {apart: attention}, attention: {hosts: [0]}}\n")
    assert [apart.host_of(f"prefill.{number}") for number in range(2)] == ["host.1", "host.1"]


def test_the_resources_of_a_host_are_those_of_its_processes(load: Load) -> None:
    graph = load(TWO + "place: {attention: {hosts: [1], resources: {CPU: 2, GPU: 1}}, prefill: {hosts: [0]}}\n")
    assert host_resources(graph, "host.0") == {"CPU": 4.0}
    assert host_resources(graph, "host.1") == {"CPU": 6.0, "GPU": 2.0}


def test_an_expanded_graph_has_the_same_placement_and_show_prints_it(load: Load) -> None:
    graph = load(TWO.replace("count: 2", "count: 2, trusted: [10.1.0.0/16]") + "place: {attention: {hosts: [1]}}\n")
    again_loaded = load(to_yaml(graph))
    assert (again_loaded.hosts, again_loaded.place, again_loaded.process_hosts) == (graph.hosts, graph.place, graph.process_hosts)
    text = io.StringIO()
    print_graph(graph, "g", Console(file=text))
    assert "process attention.0, on host.1\n" in text.getvalue()


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("place: {experts: {spread: false}}\n", "place.experts", "there is one host only"),
        ("hosts: {engine: slurm}\n", "hosts.engine", "write ray or local"),
        ("hosts: {engine: local}\ndeploy: {processes: 2}\n", "hosts", "write processes: many"),
        ("hosts: {engine: local}\nplace: {expert: {}}\n", "place.expert", "did you mean 'experts'?"),
        ("hosts: {engine: local}\nplace: {experts: {near: prefil}}\n", "place.experts.near", "no process has the role 'prefil'"),
        ("hosts: {engine: local}\nplace: {experts: {hosts: [2]}}\n", "place.experts.hosts", "hosts 0 to 1"),
        (
            "deploy: {attention: {groups: 2}, experts: {servers: 1}}\nhosts: {engine: local}\nplace: {experts: {apart: attention}}\n",
            "place.experts.apart",
            "no host is left for experts.0: attention.",
        ),
        (
            "deploy: {experts: {servers: 3, replicas: 2}}\nhosts: {engine: local}\n",
            "place.experts.spread",
            "have two replicas on one host (experts.",
        ),
        ("hosts: {engine: local, trusted: [10.1.0.5/16]}\n", "hosts.trusted", "'10.1.0.5/16' is not an IPv4 network; write one such as"),
        ("hosts: {engine: local, trusted: [10.1.0.5]}\n", "hosts.trusted", "'10.1.0.5' is not an IPv4 network; write one such as"),
        ("deploy: {hosts: 2}\n", "deploy.hosts", "hosts belong at the top of the file"),
    ],
)
def test_what_cannot_be_placed_is_one_error(load: Load, text: str, where: str, what: str) -> None:
    with pytest.raises(GraphError) as raised:
        load(HEAD + ("" if "deploy" in text else "deploy: {experts: {servers: 2}}\n") + text)
    assert where in str(raised.value)
    assert what in str(raised.value)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 4))
def test_a_multiple_of_the_replicas_can_always_be_spread(replicas: int, multiple: int, count: int) -> None:
    num_servers = replicas * multiple
    held = even_placement(12 * multiple, num_servers, replicas)
    nodes = [
        Node(f"experts.{number}", "experts", f"experts.{number}", options={"experts": format_ids(ids)}) for number, ids in enumerate(held)
    ]
    nodes.append(Node("client", "nothing", "client"))
    edges = [Edge("client", "out", node.name, "in") for node in nodes[:-1]]
    hosts = HostSettings(engine="local", count=count)
    graph = Graph.of(nodes, edges, hosts=hosts)
    placed = place_processes(graph, hosts)
    assert sorted(placed) == sorted(graph.process_names())
    assert not list(check_hosts(graph.replace(process_hosts=placed)))
