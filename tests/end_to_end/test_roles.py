"""Settings of roles that reach their processes: cores, collections of garbage, warm-up, devices."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from served_models import NEW_TOKENS, Served, answers

import flowrt
from flowrt.api import read_graph
from flowrt.errors import UserError
from flowrt.graph.written import to_yaml
from flowrt.operators.families.registry import read_model_config

GREEDY = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
APART = {"prefill": {"workers": 1}, "attention": {"groups": 2}, "experts": {"servers": 0}}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")
async def test_processes_run_on_their_cores_and_a_warm_graph_gives_the_same_tokens(served: Served, tmp_path: Path) -> None:
    first, *_, last = sorted(os.sched_getaffinity(0)) * 2
    deploy = {**APART, "prefill": {"workers": 1, "cores": first}, "attention": {"groups": 2, "cores": last}}
    graph = served.write(tmp_path, deploy, jitter={"garbage_collection": "idle", "warm_up": True})
    async with flowrt.open(graph) as running:
        warm = await running.statistics()
        assert all(warm[name].num_steps for name in ("prefill.0", "attention.0", "attention.1"))
        assert await answers(running, served.prompts) == served.expected
        cores = {name: os.sched_getaffinity(running.pids[name]) for name in ("prefill.0", "attention.0", "attention.1")}
    assert cores == {"prefill.0": {first}, "attention.0": {last}, "attention.1": {last}}


async def test_pairs_of_a_graph_transfer_kv_over_different_transports(served: Served, tmp_path: Path) -> None:
    deploy = {**APART, "prefill": {"workers": 2}, "processes": "one"}
    graph = read_graph(served.write(tmp_path, deploy))
    chosen = {("prefill.0", "attention.1"): "zmq", ("prefill.1", "attention.0"): "shm"}
    ends = {name: tuple(sorted(graph.ends_of(edge), reverse=True)) for name, edge in graph.edges.items()}
    edges = {name: replace(edge, transport=chosen.get(ends[name], edge.transport)) for name, edge in graph.edges.items()}
    async with flowrt.open(graph.replace(edges=edges)) as running:
        used = {pair: {edge.transport for name, edge in running.graph.edges.items() if ends[name] == pair} for pair in {*ends.values()}}
        assert await answers(running, served.prompts) == served.expected
    assert {"prefill.0", "prefill.1", "attention.0", "attention.1"} == {process for pair in used for process in pair}
    assert [used[pair] for pair in chosen] == [{"zmq"}, {"shm"}]
    assert used["prefill.0", "attention.0"] == used["prefill.1", "attention.1"] == {"inproc"}


async def test_kv_moves_in_messages_within_their_limit(served: Served, tmp_path: Path) -> None:
    """A longer prompt needs more messages; without them the group would compute it itself."""
    limits = {"max_message_bytes": 16384, "max_num_batched_tokens": 24}
    deploy = {**APART, "prefill": {"workers": 1, "stream": False}, "processes": "one"}
    prompt, expected = served.prompts[-1], served.expected[-1]
    async with flowrt.open(served.write(tmp_path, deploy, limits=limits)) as running:
        assert list((await running.complete(prompt, GREEDY)).token_ids) == expected
        edges = [edge for each in (await running.statistics()).values() for edge in each.edges if ".chunk -> " in edge.edge]
    config = read_model_config(served.directory)
    num_bytes = config.num_layers * len(prompt) * config.kv_width * 4
    assert sum(edge.payload_bytes for edge in edges) == num_bytes
    assert num_bytes // 16384 < sum(edge.num_messages for edge in edges) < 2 * num_bytes // 16384


async def test_kv_nodes_in_a_graph_of_ones_own(served: Served, tmp_path: Path) -> None:
    """The explicit form, with other names of processes."""
    text = to_yaml(read_graph(served.write(tmp_path, {**APART, "processes": "one"})))
    path = tmp_path / "own.yaml"
    path.write_text(re.sub(r"attention\.(\d)", r"talkers.\1", text.replace("prefill.0", "prompts")))
    async with flowrt.open(path) as running:
        assert running.graph.process_names() == ["prompts", "talkers.0", "talkers.1"]
        assert await answers(running, served.prompts) == served.expected
        assert (await running.statistics())["prompts"].num_steps


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")
async def test_a_core_that_is_not_there_is_one_line(served: Served, tmp_path: Path) -> None:
    graph = served.write(tmp_path, {**APART, "attention": {"cores": 900}})
    with pytest.raises(UserError, match=r"deploy\.attention\.cores: core 900 cannot be used here; write some of"):
        async with flowrt.open(graph):
            pass


@pytest.mark.gpu
@pytest.mark.parametrize(("prefill", "attention"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
async def test_prefill_workers_and_groups_on_different_devices(served: Served, tmp_path: Path, prefill: str, attention: str) -> None:
    deploy = {**APART, "prefill": {"workers": 1, "device": prefill}, "attention": {"groups": 2, "device": attention}}
    async with flowrt.open(served.write(tmp_path, deploy)) as running:
        assert await answers(running, served.prompts) == served.expected
