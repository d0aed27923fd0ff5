"""The short form of graph files: its nodes and edges, and that its written form loads back to the same graph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from graph.model_facts import FACTS
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowrt.actors.link_plan import plan_links
from flowrt.errors import GraphError
from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph, edge_name, from_json, to_json
from flowrt.graph.notation import LayerSet, TagStep, parse_ids
from flowrt.graph.placement import expert_map_of, held_experts, servers_behind
from flowrt.graph.settings import JitterSettings, LongPrompts
from flowrt.graph.written import to_yaml
from flowrt.launcher.transport_choice import num_threads

QUICK = "flowrt: 1\nmodel: {path: m}\ndeploy:\n  attention: {groups: 2, micro_batches: 3}\n  experts: {servers: 3, replicas: 2}\n"


def lines(graph: Graph, group: int = 0) -> list[str]:
    """The edges of one group, short: "source.tokens -> embed.tokens", then layers and tag if there are some."""
    at = f"attention.{group}."
    found = []
    for edge in graph.edges.values():
        if edge.source.startswith(at) or edge.target.startswith(at):
            words = [str(edge).replace(at, ""), str(edge.layers) and f"layers {edge.layers}", str(edge.tag)]
            found.append(" ".join(word for word in words if word))
    return found


def test_the_edges_of_a_group(load) -> None:
    assert lines(load(QUICK)) == [
        "source.tokens -> embed.tokens",
        "source.layout -> attention.layout",
        "source.sampling -> head.sampling layer=3",
        "embed.x -> attention.x layers 0",
        "attention.normed -> gate.x",
        "attention.normed -> dispatch.x",
        "gate.routing -> dispatch.routing",
        "attention.residual -> combine.residual",
        "dispatch.plan -> combine.plan",
        "dispatch.server0 -> experts.0.rows",
        "experts.0.results -> combine.parts",
        "dispatch.server1 -> experts.1.rows",
        "experts.1.results -> combine.parts",
        "dispatch.server2 -> experts.2.rows",
        "experts.2.results -> combine.parts",
        "combine.y -> attention.x layers 0-2 layer+1",
        "combine.y -> head.x layers 3",
        "head.tokens -> source.tokens step+1",
    ]


def test_dense_layers_go_through_the_mlp(load) -> None:
    found = lines(load("flowrt: 1\nmodel: {path: m}\n", moe_layers=(1, 2)))
    assert "attention.normed -> mlp.x layers 0,3" in found
    assert "attention.residual -> mlp.residual layers 0,3" in found
    assert "attention.normed -> gate.x layers 1-2" in found
    assert "mlp.y -> attention.x layers 0 layer+1" in found
    assert "combine.y -> attention.x layers 1-2 layer+1" in found
    assert "mlp.y -> head.x layers 3" in found
    assert not any(line.startswith("combine.y -> head") for line in found)


def test_a_model_of_one_layer(load) -> None:
    found = lines(load("flowrt: 1\nmodel: {path: m}\n", num_layers=1, moe_layers=(0,)))
    assert "source.sampling -> head.sampling" in found
    assert "combine.y -> head.x layers 0" in found
    assert not any("layer+1" in line for line in found)


def test_defaults(load) -> None:
    graph = load("flowrt: 1\nmodel: {path: m}\n")
    assert graph.process_names() == ["attention.0"]
    assert (graph.processes, graph.micro_batches, graph.numerics) == ("many", 1, "fast")
    assert graph.model is not None
    assert graph.model.dtype == "bfloat16", "of the checkpoint"
    assert graph.nodes["attention.0.experts"].options == {"experts": "0-7"}
    assert (graph.devices, graph.threads) == ({"attention.0": "cpu"}, {"attention.0": "auto"})
    assert all(edge.credits == 0 for edge in graph.edges.values()), "within a process nothing is counted"


def test_processes_credits_transport_link_and_responses(load) -> None:
    graph = load(QUICK + "  links: {attention-experts: {transport: shm, link: ub}}\n  processes: 2\n")
    assert graph.process_names() == ["attention.0", "attention.1", "experts.0", "experts.1", "experts.2"]
    assert graph.processes == 2
    crossing = [edge for edge in graph.edges.values() if graph.nodes[edge.source].process != graph.nodes[edge.target].process]
    assert len(crossing) == 12
    for edge in crossing:
        assert (edge.transport, edge.link) == ("shm", "ub")
        if edge.response_to is None:
            assert edge.credits == 4, "one more than micro-batches"
            assert edge.target_port == "rows"
        else:
            request = graph.edges[edge.response_to]
            assert (request.target, edge.credits) == (edge.source, 0)
            assert graph.nodes[request.source].process == graph.nodes[edge.target].process
    assert all(edge.name == f"{edge.source}.{edge.source_port} -> {edge.target}.{edge.target_port}" for edge in crossing)
    assert len({edge.id for edge in graph.edges.values()}) == len(graph.edges)
    assert graph.nodes["attention.0.attention"].stateful
    assert graph.nodes["experts.1"].batches
    parts = graph.nodes["attention.1.combine"].inputs["parts"]
    assert (parts.takes, parts.count) == ("gather", "plan")


def test_roles_have_devices_and_threads(load) -> None:
    text = "flowrt: 1\nmodel: {path: m}\ndeploy:\n  attention: {device: 'cuda:1', threads: 3}\n  experts: {servers: 1, device: cuda}\n"
    graph = load(text)
    assert graph.devices == {"attention.0": "cuda:1", "experts.0": "cuda"}
    assert graph.threads == {"attention.0": 3, "experts.0": "auto"}


def test_the_processes_of_a_role_share_out_its_cores(load) -> None:
    text = "flowrt: 1\nmodel: {path: m}\ndeploy:\n  prefill: {workers: 2, cores: 0}\n  attention: {groups: 2, cores: '1-3,5,7'}\n"
    graph = load(text + "  experts: {servers: 1}\n")
    assert graph.cores == {"prefill.0": "0", "prefill.1": "0", "attention.0": "1-2", "attention.1": "3,5,7"}
    assert num_threads(graph, ["attention.1"], [[name] for name in graph.process_names()], 8) == 3, "a thread for each"
    assert num_threads(graph, ["experts.0"], [[name] for name in graph.process_names()], 10) == 2
    assert load(to_yaml(graph), name="again.yaml") == graph


def test_roles_of_a_graph_may_use_different_devices_and_links(load) -> None:
    deploy = "  prefill: {workers: 1, device: 'cuda:1'}\n  attention: {device: cpu}\n  experts: {servers: 1, device: cuda}\n"
    links = "  links: {prefill-attention: {transport: shm, link: roce-200g}, attention-experts: {transport: zmq, link: ub}}\n"
    graph = load("flowrt: 1\nmodel: {path: m}\ndeploy:\n" + deploy + links)
    assert graph.devices == {"prefill.0": "cuda:1", "attention.0": "cpu", "experts.0": "cuda"}
    used = {graph.ends_of(edge): (edge.transport, edge.link) for edge in graph.edges.values() if graph.crosses(edge)}
    assert used["prefill.0", "attention.0"] == used["attention.0", "prefill.0"] == ("shm", "roce-200g")
    assert used["attention.0", "experts.0"] == used["prefill.0", "experts.0"] == ("zmq", "ub")
    assert load(to_yaml(graph), name="again.yaml") == graph


def test_settings_against_jitter_and_for_long_prompts_are_written_out(load) -> None:
    keys = "jitter: {garbage_collection: idle, warm_up: true}\nlong_prompts: {min_tokens: 100}\n"
    graph = load("flowrt: 1\nmodel: {path: m}\ndeploy: {attention: {groups: 2}}\nlimits: {target_step_seconds: 0.02}\n" + keys)
    assert graph.jitter == JitterSettings("idle", warm_up=True)
    assert graph.long_prompts == LongPrompts(100, workers=1)
    assert load(to_yaml(graph), name="again.yaml") == graph


def test_uneven_placement(load) -> None:
    text = "flowrt: 1\nmodel: {path: m}\ndeploy:\n  experts:\n    servers: 2\n    placement:\n"
    text += "      experts.0: '0-5'\n      experts.1: {0-1: '6-7,0', 2-3: '0-7'}\n"
    graph = load(text)
    assert graph.nodes["experts.0"].options == {"experts": "0-5"}
    assert graph.nodes["experts.1"].options == {"experts": {"0-1": "0,6-7", "2-3": "0-7"}}
    assert graph.nodes["attention.0.dispatch"].options == {"servers": {"0": "0-5", "1": {"0-1": "0,6-7", "2-3": "0-7"}}}
    experts = expert_map_of(graph, "attention.0.dispatch", FACTS.moe_layers, FACTS.num_experts)
    assert experts.servers_of(0, layer=0) == (0, 1)
    assert experts.servers_of(1, layer=0) == (0,)
    assert experts.servers_of(1, layer=2) == (0, 1)
    assert held_experts(graph.nodes["experts.1"].options["experts"], FACTS.moe_layers)[1] == (0, 6, 7)


@pytest.mark.parametrize("numbers", ["bandwidth_bytes_per_second: 1e9, latency_seconds: 2e-6", "bandwidth: 8 Gbit/s, latency: 2 us"])
def test_link_with_custom_numbers_is_a_label(load, numbers: str) -> None:
    rest = f"  links: {{attention-experts: {{link: {{{numbers}}}}}}}\n"
    graph = load(QUICK + rest)
    links = {edge.link for edge in graph.edges.values() if edge.link is not None}
    assert links == {"latency_seconds=2e-06,bandwidth_bytes_per_second=1000000000.0,message_seconds=0.0"}
    assert load(to_yaml(graph), name="again.yaml") == graph


def test_the_written_form_names_what_is_fused(load) -> None:
    text = to_yaml(load(QUICK), "quick.yaml")
    assert text.startswith("# Expanded from quick.yaml\n")
    assert "#   attention.1: combine -> attention -> gate -> dispatch -> head\n" in text
    assert "#   experts.2: experts.2\n" in text


def test_an_expanded_file_is_refused_for_another_model(load) -> None:
    text = to_yaml(load(QUICK))
    with pytest.raises(Exception, match=r"num_layers: expected 6 layers, got 4; expand the graph again"):
        load(text, num_layers=6, moe_layers=(0, 1, 2, 3, 4, 5))


def test_an_expanded_file_is_checked_like_any_other(load) -> None:
    text = to_yaml(load(QUICK))
    for old, new, message in (
        ("credits: 4}", "credits: 2}", r"server0 -> experts\.0\.rows\.credits: 2 is too few: 3 micro-batches keep 3 messages"),
        ('experts.1, options: {experts: "0-1,5-7"}', 'experts.1, options: {experts: "1,5-7"}', "experts.1 does not hold expert 0"),
        ('"1": "0-1,5-7"', '"1": "0-1,5-9"', "there is no expert 9"),
        ('{"0": 0-4, "1": "0-1,5-7", "2": 2-7}', '{"0": 0-4, "1": "0-1", "2": 2-6}', "expert 7 has no replica"),
        (', "2": 2-7}', "}", "server2 leads to a server without experts"),
        (', "2": 2-7}', ', "2": 2-7, "3": "0"}', "0 edges lead from attention.0.dispatch.server3"),
        ("operator: gate,", "operator: gate, stateful: true,", "'gate' is built in"),
        ("options: {num_layers: 4}", "options: {layers: 4}", "has no option 'layers'"),
        (", options: {num_layers: 4}", "", "needs the option 'num_layers'"),
        ("{num_layers: 4}", "{num_layers: 1000000000}", "is not a number of layers"),
        ("attention.0.gate.routing", "attention.0.gate.route", "'gate' has no output 'route'; did you mean 'routing'"),
        ("-> attention.0.gate.x:", "-> attention.0.gate.y:", "'gate' has no input 'y'"),
        ('{layers: "3"}', '{layers: "2"}', "the node never fires: its ports x, sampling"),
        (', tag: layer+1}', "}", "does not advance the tag"),
    ):  # fmt: skip
        assert old in text
        with pytest.raises(Exception, match=message):
            load(text.replace(old, new, 1))


SHAPES = st.fixed_dictionaries(
    {
        "groups": st.integers(1, 3),
        "micro_batches": st.integers(1, 4),
        "servers": st.integers(0, 4),
        "replicas": st.integers(1, 4),
        "processes": st.sampled_from(["one", "many", "2"]),
        "transport": st.sampled_from(["auto", "shm", "zmq"]),
        "open": st.sampled_from(["lazy", "start"]),
        "link": st.sampled_from(["null", "ub", "vpc", "{bandwidth_bytes_per_second: 1.5e10}"]),
        "threads": st.sampled_from(["auto", "2"]),
    }
)
LAYERS = st.integers(1, 5).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1).map(lambda s: tuple(sorted(s))))
)
PROMPTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=3)


@settings(max_examples=25, deadline=None)
@given(SHAPES, LAYERS, PROMPTS, st.data())
def test_every_shape_written_out_loads_back_equal(shape, layers, prompts, data) -> None:
    num_layers, moe_layers = layers
    servers = shape["servers"]
    assume(shape["replicas"] <= max(servers, 1))
    placement = ""
    if servers and data.draw(st.booleans()):
        held = [data.draw(st.sets(st.integers(0, 7))) for _ in range(servers)]
        for expert in range(8):
            held[expert % servers].add(expert)
        placement = ", placement: {" + ", ".join(f'experts.{s}: "{LayerSet(frozenset(ids))}"' for s, ids in enumerate(held)) + "}"
        shape["replicas"] = 1
    link = f"{{transport: {shape['transport'] if servers else 'auto'}, link: {shape['link']}, open: {shape['open']}}}"
    text = (
        f"flowrt: 1\nmodel: {{path: m}}\ndeploy:\n"
        f"  attention: {{groups: {shape['groups']}, micro_batches: {shape['micro_batches']}, threads: {shape['threads']}}}\n"
        f"  experts: {{servers: {servers}, replicas: {shape['replicas']}{placement}}}\n"
        f"  links: {{attention-experts: {link}}}\n  processes: {shape['processes']}\n"
    )
    facts = replace(FACTS, num_layers=num_layers, moe_layers=moe_layers)
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "m").mkdir()
        (path / "short.yaml").write_text(text, encoding="utf-8")
        graph = load_graph(path / "short.yaml", facts_of=lambda *_: facts).replace(prompts=tuple(prompts))
        (path / "long.yaml").write_text(to_yaml(graph, "short.yaml"), encoding="utf-8")
        assert load_graph(path / "long.yaml", facts_of=lambda *_: facts) == graph
        assert from_json(to_json(graph)) == graph
        assert to_json(from_json(to_json(graph))) == to_json(graph)


def test_layer_sets_and_tag_steps_print_as_they_are_read() -> None:
    from flowrt.graph.notation import parse_layers, parse_tag

    for layers in (LayerSet(), LayerSet(frozenset({0})), LayerSet(frozenset({0, 1, 2, 5, 9, 10}))):
        assert parse_layers(str(layers)) == layers
    for step in (TagStep(), TagStep("next_layer"), TagStep("next_step"), TagStep("to_layer", 12)):
        assert parse_tag(str(step)) == step


def test_limits_of_roles_differ_where_given_and_survive_being_written(load) -> None:
    text = QUICK + "limits: {kv_pages: 100, max_num_seqs: 9, roles: {attention: {kv_pages: 7, max_message_bytes: 99999999}}}\n"
    graph = load(text)
    assert (graph.limits_of("attention.1").kv_pages, graph.limits_of("attention.1").max_num_seqs) == (7, 9)
    assert (graph.limits_of("experts.0").kv_pages, graph.limits_of("experts.0").max_message_bytes) == (100, 1 << 26)
    assert graph.group_limits() == graph.limits_of("attention.0")
    assert load(to_yaml(graph)) == graph
    assert from_json(to_json(graph)) == graph
    (plan, *_) = plan_links(graph, "experts.0")
    assert plan.limits.max_message_bytes == 99999999, "the wider of both ends"


def test_roles_with_pages_of_other_sizes_grant_the_tokens_of_the_smaller_cache(load) -> None:
    roles = "{prefill: {page_size: 4, kv_pages: 60}, attention: {page_size: 32, kv_pages: 9}}"
    graph = load(PREFILL + f"limits: {{roles: {roles}}}\n")
    assert [graph.limits_of(f"{role}.0").page_size for role in ("prefill", "attention", "experts")] == [4, 32, 16]
    granted, widest = graph.group_limits(), graph.group_limits(widest=True)
    assert (granted.page_size, granted.kv_pages, widest.page_size, widest.kv_pages) == (4, 60, 32, 9)


def test_micro_batches_need_sequences_of_their_role(load) -> None:
    with pytest.raises(GraphError, match="3 micro-batches share 2 sequences"):
        load(QUICK + "limits: {roles: {attention: {max_num_seqs: 2}}}\n")


@pytest.mark.parametrize(("groups", "domains", "found"), [(4, 2, ["01", "23"]), (5, 2, ["012", "34"]), (3, 3, ["0", "1", "2"]), (2, 1, [])])
def test_domains_are_neighbouring_groups_and_survive_being_written(load, groups: int, domains: int, found: list[str]) -> None:
    graph = load(QUICK, f"deploy.attention.groups={groups}", f"deploy.attention.domains={domains}")
    for server in ("experts.0", "experts.1"):
        batches = graph.nodes[server].batches
        assert batches is not None
        assert ["".join(source.split(".")[1] for source in domain) for domain in batches.domains] == found
    assert load(to_yaml(graph)) == graph
    assert from_json(to_json(graph)) == graph


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["deploy.attention.groups=2", "deploy.attention.domains=3"], "3 domains need as many groups, there are 2; write at most 2"),
        (["deploy.attention.domains=2", "deploy.experts.servers=0"], "domains take turns at expert servers"),
    ],
)
def test_impossible_domains_are_refused(load, overrides: list[str], text: str) -> None:
    with pytest.raises(GraphError, match=text):
        load(QUICK, *overrides)


@pytest.mark.parametrize(
    ("domains", "text"),
    [
        ("[[attention.0.source]]", "attention.1.source is in no domain, and its rows arrive here; add it to one"),
        ("[[attention.0.source, attention.1.source], [attention.1.source]]", "attention.1.source is named twice; keep one"),
        ("[[attention.0.source, attention.1.sauce], [attention.1.source]]", "there is no source 'attention.1.sauce'; did you mean"),
    ],
)
def test_each_source_is_in_one_domain(load, domains: str, text: str) -> None:
    written = to_yaml(load(QUICK, "deploy.attention.domains=2"))
    wrong = re.sub(r"domains: \[\[.*?\]\]", f"domains: {domains}", written)
    assert wrong != written
    with pytest.raises(GraphError, match=re.escape(text)):
        load(wrong)


def served_through(graph: Graph) -> Mapping[str, list[str]]:
    """Trampoline -> the servers that it forwards to."""
    return {
        node.process: [edge.target for edge in graph.edges_from(node.name) if edge.source_port != "plan"]
        for node in graph.nodes.values()
        if node.operator == "forward"
    }


@pytest.mark.parametrize(
    ("groups", "domains", "servers", "found"),
    [(2, 1, 5, {0: [0, 2, 4], 1: [1, 3]}), (4, 2, 5, {0: [0, 2, 4], 1: [1, 3]}), (3, 1, 4, {0: [0, 3]}), (1, 1, 3, {0: [0, 1, 2]})],
)
def test_as_many_servers_forward_as_a_domain_has_groups(load, groups: int, domains: int, servers: int, found: dict[int, list[int]]) -> None:
    graph = load(
        QUICK,
        f"deploy.attention.groups={groups}",
        f"deploy.attention.domains={domains}",
        f"deploy.experts.servers={servers}",
        "deploy.experts.trampoline=always",
    )
    named = {f"experts.{trampoline}": [f"experts.{server}" for server in behind] for trampoline, behind in found.items()}
    assert served_through(graph) == named
    numbers = {edge.target: edge.source_port.removeprefix("server") for edge in graph.edges_from("attention.0.dispatch")}
    assert servers_behind(graph, "attention.0.dispatch") == {
        int(numbers[f"experts.{number}.forward"]): {*behind} for number, behind in found.items()
    }
    known = graph.nodes["attention.0.dispatch"].options["servers"]
    for number, behind in found.items():
        own = {*parse_ids(known[numbers[f"experts.{number}.forward"]])}
        assert own == {expert for server in behind for expert in parse_ids(known[str(server)])}
    assert load(to_yaml(graph)) == graph
    assert from_json(to_json(graph)) == graph


@pytest.mark.parametrize(
    ("servers", "groups", "domains", "text"),
    [
        (64, 8, 1, "auto chose always: 15 messages one after another in place of 64 saves at least 18; there are 8 groups"),
        (64, 16, 2, "auto chose always: 15 messages one after another in place of 64 saves at least 18; a domain has 8 groups"),
        (32, 2, 1, "auto chose never: 17 messages one after another in place of 32 saves fewer than 18; there are 2 groups"),
        (96, 1, 1, "auto chose never: 96 messages one after another in place of 96 saves fewer than 18; there is 1 group"),
        (0, 2, 1, "auto chose never: 1 messages one after another in place of 0 saves fewer than 18; there are 2 groups"),
    ],
)
def test_auto_counts_the_messages_that_a_group_of_a_domain_saves(load, servers: int, groups: int, domains: int, text: str) -> None:
    short = (
        "flowrt: 1\nmodel: {path: m}\ndeploy:\n"
        f"  attention: {{groups: {groups}, domains: {domains}}}\n  experts: {{servers: {servers}, trampoline: auto}}\n"
    )
    graph = load(short, num_experts=1024)
    assert graph.choices == {"deploy.experts.trampoline": text}
    assert bool(served_through(graph)) == ("always" in text)
    assert not load(to_yaml(graph), num_experts=1024).choices


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (r"(merge.results -> attention.0.combine.parts: {)", r"\1credits: 9, ", "a response needs no credits"),
        (r"  experts.0.merge.results -> attention.0.combine.*\n", "", "no edge leads from experts.0.merge.results"),
        (r"  experts.2.results -> attention.0.combine.*\n", "", "no response to attention.0.dispatch.server2 -> experts.2.rows leads back"),
        (r"  experts.2.results -> experts.0.merge.*\n", "", "no response to experts.0.forward.server2 -> experts.2.rows leads back"),
        (r"(forward, process: experts.0, options: {servers: {.*)}}}", r'\1, "3": "7"}}}', "0 edges lead from experts.0.forward.server3"),
        (r"(forward, process: experts.0, options: {servers: {).*}}}", r'\1"0": 0-6, "1": "7"}}}', "experts.0 does not hold expert"),
        (r'(dispatch, process: attention.0, .*"3": ).*}}}', r"\g<1>0-99}}}", "there is no expert 99"),
        (
            r"experts.0.merge.results -> (.*response_to: ).*forward.rows",
            r"experts.0.merge.results -> \1attention.0.dispatch.server1 -> experts.1.rows",
            "does not lead to experts.0.merge",
        ),
    ],
)
def test_trampoline_that_cannot_respond_is_refused(load, old: str, new: str, text: str) -> None:
    written = to_yaml(load(QUICK, "deploy.experts.trampoline=always", "deploy.attention.groups=1"))
    wrong = re.sub(old, new, written, count=1)
    assert wrong != written, written
    with pytest.raises(GraphError, match=re.escape(text)):
        load(wrong)


def test_servers_behind_a_trampoline_are_servers_of_the_dispatch(load) -> None:
    document = yaml.safe_load(to_yaml(load(QUICK, "deploy.experts.trampoline=always", "deploy.attention.groups=1")))
    direct = "attention.0.dispatch.server1 -> experts.1.rows"
    at = document["nodes"]["attention.0.dispatch"]["options"]["servers"]
    edges = document["edges"]
    number = next(name for name in edges if name.endswith("forward.rows")).partition(" ")[0][-1]
    at["1"] = at.pop(number)
    edges[edge_name("attention.0.dispatch.server1", "experts.0.forward.rows")] = edges.pop(
        f"attention.0.dispatch.server{number} -> experts.0.forward.rows"
    )
    edges["experts.0.merge.results -> attention.0.combine.parts"]["response_to"] = "attention.0.dispatch.server1 -> experts.0.forward.rows"
    del edges[direct], edges["experts.1.results -> attention.0.combine.parts"]
    with pytest.raises(GraphError, match=r"dispatch has no port that leads to experts\.1, behind"):
        load(yaml.safe_dump(document))


@pytest.mark.parametrize("operator", ["return", "collect"])
def test_operators_of_former_trampolines_are_refused_in_one_line(load, operator: str) -> None:
    written = to_yaml(load(QUICK, "deploy.experts.trampoline=always"))
    with pytest.raises(GraphError, match=f"{operator}") as refused:
        load(written.replace("operator: merge", f"operator: {operator}"))
    assert "\n" not in str(refused.value)


def test_trampolines_are_off_unless_chosen(load) -> None:
    assert not served_through(load(QUICK, "deploy.experts.servers=8"))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["deploy.attention.groups=3"], "no server of 3 forwards to others, as there are 3 groups; write more servers"),
        (["deploy.attention.groups=6", "deploy.attention.domains=2"], "no server of 3 forwards to others, as a domain has 3 groups"),
        (["deploy.experts.servers=0", "deploy.experts.replicas=1"], "no server of 0 forwards to others, as there are 2 groups"),
    ],
)
def test_trampolines_without_servers_to_forward_to_are_refused(load, overrides: list[str], text: str) -> None:
    with pytest.raises(GraphError, match=text):
        load(QUICK, "deploy.experts.trampoline=always", *overrides)


PREFILL = "flowrt: 1\nmodel: {path: m}\ndeploy:\n  prefill: {workers: 2}\n  attention: {groups: 2}\n  experts: {servers: 3, replicas: 2}\n"


def test_each_group_pulls_from_each_prefill_worker(load) -> None:
    graph = load(PREFILL + "  links: {prefill-attention: {link: roce-200g}}\n")
    pulls = [edge for edge in graph.edges.values() if edge.target_port == "pull"]
    assert [edge.name for edge in pulls] == [
        f"attention.{group}.kv_unpack.pull{worker} -> prefill.{worker}.kv_pack.pull" for group in range(2) for worker in range(2)
    ]
    responses = {edge.response_to: edge for edge in graph.edges.values() if edge.target_port == "chunk"}
    assert sorted(responses) == sorted(edge.name for edge in pulls)
    assert {edge.link for edge in (*pulls, *responses.values())} == {"roce-200g"}
    assert [name for name in graph.process_names() if name.startswith("prefill")] == ["prefill.0", "prefill.1"]


@pytest.mark.parametrize(
    "keys",
    [
        "attention: {groups: 2, domains: 2, micro_batches: 3}",
        "attention: {groups: 1}\n  experts: {servers: 0}",
        "attention: {groups: 2}\n  experts: {servers: 5, trampoline: always}",
        "processes: one",
    ],
)
def test_prefill_workers_beside_other_patterns(load, keys: str) -> None:
    rest = "" if "experts" in keys else "\n  experts: {servers: 3, replicas: 2}"
    graph = load(f"flowrt: 1\nmodel: {{path: m}}\ndeploy:\n  prefill: {{workers: 2}}\n  {keys}{rest}\n")
    assert sum(node.operator == "kv_pack" for node in graph.nodes.values()) == 2
    with TemporaryDirectory() as folder:
        file = Path(folder) / "expanded.yaml"
        file.write_text(to_yaml(graph))
        assert load_graph(file, facts_of=lambda *_: FACTS).nodes == graph.nodes


TRANSFERS = "flowrt: 1\nmodel: {path: m}\ndeploy: {prefill: {workers: 2}, attention: {groups: 2}}\n"


@pytest.mark.parametrize(
    ("nodes", "edges", "text"),
    [
        ((), "attention.1.kv_unpack.pull1", "group attention.1 does not pull from prefill worker prefill.1, whose prompts it may get"),
        (("attention.1.kv_unpack",), "attention.1.kv_unpack", "group attention.1 has no kv_unpack, so it cannot pull the prompts of"),
    ],
)
def test_a_group_that_does_not_pull_from_a_prefill_worker_is_refused(load, nodes: tuple[str, ...], edges: str, text: str) -> None:
    """Its requests would wait for ever."""
    written = yaml.safe_load(to_yaml(load(TRANSFERS)))
    written["nodes"] = {name: node for name, node in written["nodes"].items() if name not in nodes}
    removed = {name for name in written["edges"] if edges in name}
    assert removed
    kept = {name: edge for name, edge in written["edges"].items() if name not in removed and edge.get("response_to") not in removed}
    with pytest.raises(GraphError, match=text):
        load(yaml.safe_dump(written | {"edges": kept}))
