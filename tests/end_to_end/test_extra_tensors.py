"""Extra tensors of KV transfers between real processes: operators of a user give and take them, and either side is killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from checkpoints import random_prompts
from end_to_end.test_expert_failover import Story
from served_models import NEW_TOKENS, Served

import flowrt
from flowrt.api import read_graph
from flowrt.graph.written import to_yaml

GREEDY = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
LAYERS, HIDDEN = 3, 64
LIMITS = {"chunk_tokens": 32, "max_num_batched_tokens": 64}
MODULE = '''
import os
import signal
from pathlib import Path

FOLDER = Path(__file__).parent
seen = []


def doubled(x):
    """Kills a process once, if a file has its id: rows of the first chunk of a prompt are there, and its transfer has begun."""
    if (FOLDER / "refuse").exists():
        raise ValueError("refused")
    if len(x) > 1:
        try:
            os.rename(FOLDER / "victim", FOLDER / "killed")
        except FileNotFoundError:
            pass
        else:
            os.kill(int((FOLDER / "killed").read_text()), signal.SIGKILL)
    return 2 * x


def probe(x):
    seen.append(2 * x[-1])


def take(hidden):
    if (FOLDER / "raise").exists():
        raise ValueError("no")
    with open(FOLDER / "taken", "ab", buffering=0) as file:
        file.write(hidden.numpy().tobytes())
'''


def write_graph(served: Served, folder: Path, deploy: dict[str, Any], change: Any, limits: dict[str, int] = LIMITS) -> Path:
    """The graph in the explicit form, with `change(nodes, edges, module)`."""
    module = f"operators_of_{folder.name}"
    (folder / f"{module}.py").write_text(MODULE)
    deploy = {"experts": {"servers": 1}, **deploy}
    graph = read_graph(served.write(folder, deploy, numerics="strict", limits=limits, routing="round_robin"))
    document = yaml.safe_load(to_yaml(graph))
    change(document["nodes"], document["edges"], module)
    path = folder / "own.yaml"
    path.write_text(json.dumps(document))
    return path


def add_operator(
    nodes: dict[str, Any], edges: dict[str, Any], process: str, operator: str, source: str, output: str = "", port: str = "x", **keys: Any
) -> None:
    name, rows = f"{process}.{operator.partition(':')[2]}", f"float32[rows,{HIDDEN}]"
    own: dict[str, Any] = {"operator": operator, "process": process, "keeps": "nothing", **keys}
    nodes[name] = own | ({"inputs": {port: rows}, "outputs": {"y": rows}} if output else {})
    edges[f"{source} -> {name}.{port}"] = {"layers": str(LAYERS - 1)} if source.endswith("combine.y") else {}
    if output:
        edges[f"{name}.y -> {output}"] = {}


def add_extras(nodes: dict[str, Any], edges: dict[str, Any], module: str) -> None:
    """The doubled output of the last layer travels, and an operator of the group takes it."""
    for worker in ("prefill.0", "prefill.1"):
        nodes[f"{worker}.hidden"] = {
            "operator": "kv_extra",
            "process": worker,
            "options": {"name": "hidden", "tensor": f"float32[{HIDDEN}]"},
        }
        add_operator(nodes, edges, worker, f"{module}:doubled", f"{worker}.combine.y", f"{worker}.hidden.rows")
    nodes["attention.0.kv_unpack"]["options"]["extras"] = {"hidden": f"float32[{HIDDEN}]"}
    keys = {"inputs": {"hidden": f"float32[{HIDDEN}]"}}
    add_operator(nodes, edges, "attention.0", f"{module}:take", "attention.0.kv_unpack.hidden", port="hidden", **keys)


@pytest.fixture(scope="module")
def last_hidden(served: Served, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What must travel with each prompt, from a graph without prefill workers that computes one at a time."""
    folder = tmp_path_factory.mktemp("truth")

    def add_probe(nodes: dict[str, Any], edges: dict[str, Any], module: str) -> None:
        add_operator(nodes, edges, "attention.0", f"{module}:probe", "attention.0.combine.y")

    async def run() -> list[torch.Tensor]:
        found = []
        async with flowrt.open(write_graph(served, folder, {"processes": "one"}, add_probe)) as running:
            from importlib import import_module

            seen = import_module(f"operators_of_{folder.name}").seen
            for prompt in served.prompts:
                await running.complete(prompt, flowrt.SamplingParams(max_tokens=1))
                found.append(seen[-1])
        return found

    return [each.numpy().tobytes() for each in asyncio.run(run())]


def taken(folder: Path) -> list[bytes]:
    """The tensors that operators of the group have got."""
    content = (folder / "taken").read_bytes()
    return [rows.tobytes() for rows in np.frombuffer(content, np.float32).reshape(-1, HIDDEN)]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("victim", ["", "prefill.0", "attention.0"])
async def test_they_arrive_with_each_prompt_when_a_process_is_killed(
    served: Served, last_hidden: list[bytes], tmp_path: Path, transport: str, victim: str
) -> None:
    """In the middle of a transfer. No token changes; what an operator takes has the bits of a prompt computed alone."""
    story = Story()
    deploy = {"prefill": {"workers": 2}, "links": {"prefill-attention": {"transport": transport}}}
    graph = write_graph(served, tmp_path, deploy, add_extras)
    async with asyncio.timeout(120), flowrt.open(graph, on_event=story.note) as running:
        if victim:
            (tmp_path / "pid").write_text(str(running.pids[victim]))
            (tmp_path / "pid").rename(tmp_path / "victim")
        done = await asyncio.gather(*(running.complete(prompt, GREEDY) for prompt in served.prompts))
        if victim:
            await story.until(lambda story: story.back == [victim])
        assert [list(each.token_ids) for each in done] == served.expected
        statistics = await running.statistics()
    assert story.lost == ([victim] if victim else [])
    assert {*taken(tmp_path)} == {*last_hidden}
    assert len(last_hidden) <= len(taken(tmp_path)) <= len(last_hidden) * (1 + bool(victim))
    assert not any(each.late_wakeups for each in statistics.values())


async def test_an_operator_that_raises_fails_what_it_computed(served: Served, tmp_path: Path) -> None:
    """On the side of the prompt the request, on the other side nothing of it. A full message has room for the tensor."""
    limits = {**LIMITS, "max_message_bytes": 144 * 256}  # the KV of 144 tokens of a layer
    prompts = random_prompts([144, 40])
    deploy = {"prefill": {"workers": 2, "stream": False}, "processes": "one", "links": {"prefill-attention": {"transport": "zmq"}}}
    async with asyncio.timeout(60), flowrt.open(write_graph(served, tmp_path, deploy, add_extras, limits)) as running:
        (tmp_path / "raise").touch()
        found = [await running.complete(prompt, GREEDY) for prompt in prompts]
        (tmp_path / "raise").unlink()
        later = [await running.complete(prompt, GREEDY) for prompt in prompts]
        (tmp_path / "refuse").touch()
        failed = await running.complete(prompts[0], GREEDY)
        (tmp_path / "refuse").unlink()
        last = await running.complete(prompts[1], GREEDY)
    assert [each.token_ids for each in found] == [each.token_ids for each in later]
    assert last.token_ids == found[1].token_ids
    assert len(taken(tmp_path)) == 3
    assert failed.finish_reason == "error"
    assert "a step of this request failed twice" in failed.error
    assert "refused" in failed.error
