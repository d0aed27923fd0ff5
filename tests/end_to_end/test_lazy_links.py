"""Lazy links with real processes: opened by the first message only, in order under load, and with a peer that died before."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from served_models import Served

import flowrt
from flowrt.launcher import events
from flowrt.transports.registry import unavailable_reason

SCHEMES = [scheme for scheme in ("shm", "zmq") if unavailable_reason(scheme) is None]
NEW_TOKENS = 8
PARAMS = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)

OPERATORS = """
import torch

class Numbered:
    def __init__(self):
        self.seen = 0

    def __call__(self, x):
        self.seen += 1
        return torch.cat([x, torch.tensor([float(self.seen)])])

numbered = Numbered()

def same(x):
    return x
"""


def deploy(transport: str, **link: str) -> dict[str, object]:
    links = {"attention-experts": {"transport": transport} | link}
    return {"attention": {"groups": 2}, "experts": {"servers": 2, "replicas": 2}, "links": links}


def descriptors(running: flowrt.RunningGraph) -> dict[str, int]:
    """Open descriptors of each worker of a role; each open shm or zmq link has several."""
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in running.pids.items() if "." in name}


@pytest.mark.parametrize("transport", SCHEMES)
async def test_unused_link_is_never_opened(served: Served, tmp_path: Path, transport: str) -> None:
    """One request uses one group; the links of the other group stay closed."""
    async with flowrt.open(served.write(tmp_path, deploy(transport))) as running:
        before = descriptors(running)
        done = await running.complete(served.prompts[0], PARAMS)
        after = descriptors(running)
        both = await asyncio.gather(*(running.complete(prompt, PARAMS) for prompt in served.prompts))
    assert list(done.token_ids) == served.expected[0][:NEW_TOKENS]
    assert [list(each.token_ids) for each in both] == [tokens[:NEW_TOKENS] for tokens in served.expected]
    more = sorted(after[name] - before[name] for name in before if name.startswith("attention."))
    assert more[0] == 0 < more[1]
    assert all(after[f"experts.{server}"] > before[f"experts.{server}"] for server in range(2))


@pytest.mark.parametrize("transport", SCHEMES)
async def test_links_can_be_opened_at_the_start(served: Served, tmp_path: Path, transport: str) -> None:
    """The fork server has imported what the workers need, transports included: a module that each would import costs more to start."""
    graph = flowrt.open(served.write(tmp_path, deploy(transport, open="start")))
    graph.launcher.worker = "end_to_end.noted_imports:run_worker"
    async with graph as running:
        before = descriptors(running)
        await asyncio.gather(*(running.complete(prompt, PARAMS) for prompt in served.prompts[:4]))
        after = descriptors(running)
    assert after == before
    assert {file.name: file.read_text() for file in tmp_path.glob("imports of *")} == {
        f"imports of {name}": "" for name in ("attention.0", "attention.1", "experts.0", "experts.1")
    }


@pytest.mark.parametrize("transport", SCHEMES)
async def test_link_opened_under_load_delivers_in_order(tmp_path: Path, transport: str) -> None:
    """The client posts as many messages as the credits allow before the link is open."""
    (tmp_path / f"ops_{transport}.py").write_text(OPERATORS)
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        "flowrt: 1\nlimits: {in_flight: 64}\nnodes:\n"
        f"  a: {{operator: 'ops_{transport}:same', process: p}}\n  b: {{operator: 'ops_{transport}:numbered', process: q}}\n"
        f"edges:\n  input.x -> a.x: {{transport: {transport}}}\n  a.result -> b.x: {{transport: {transport}}}\n"
        f"  b.result -> output.y: {{transport: {transport}}}\n"
    )
    async with asyncio.timeout(60), flowrt.open(graph) as running:
        found = [out async for out in running.stream(torch.tensor([float(number)]) for number in range(1, 201))]
    assert [out.tolist() for out in found] == [[float(number)] * 2 for number in range(1, 201)]


@pytest.mark.parametrize("transport", [*SCHEMES[1:], "auto"])  # auto is the first one
async def test_server_that_dies_before_its_first_request(served: Served, tmp_path: Path, transport: str) -> None:
    """No link was open: the launcher notifies the groups, which use the other server and open links to the new incarnation."""
    back = asyncio.Event()
    lost: list[str] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.WorkerLost):
            lost.append(event.name)
        elif isinstance(event, events.WorkerRestarted):
            back.set()

    graph = served.write(tmp_path, deploy(transport), numerics="strict")
    async with asyncio.timeout(120), flowrt.open(graph, on_event=note) as running:
        os.kill(running.pids["experts.1"], signal.SIGKILL)
        done = await asyncio.gather(*(running.complete(prompt, PARAMS) for prompt in served.prompts[:4]))
        await back.wait()
        repeated = await asyncio.gather(*(running.complete(prompt, PARAMS) for prompt in served.prompts[:4]))
    expected = [tokens[:NEW_TOKENS] for tokens in served.expected[:4]]
    assert [list(each.token_ids) for each in done] == [list(each.token_ids) for each in repeated] == expected
    assert lost == ["experts.1"]


@pytest.mark.parametrize("transport", SCHEMES)
async def test_death_of_a_stateful_worker_before_its_first_message_ends_the_run(tmp_path: Path, transport: str) -> None:
    (tmp_path / f"ops_{transport}.py").write_text(OPERATORS)
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        f"flowrt: 1\nnodes:\n  a: {{operator: 'ops_{transport}:same', process: p}}\n"
        f"edges:\n  input.x -> a.x: {{transport: {transport}}}\n  a.result -> output.y: {{transport: {transport}}}\n"
    )
    async with asyncio.timeout(60):
        with pytest.raises(flowrt.WorkerDiedError, match="p was killed"):
            await _kill_and_call(graph, "p")


async def _kill_and_call(graph: Path, process: str) -> None:
    async with flowrt.open(graph) as running:
        os.kill(running.pids[process], signal.SIGKILL)
        await running(x=torch.ones(1))
