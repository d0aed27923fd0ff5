"""Properties of a running graph: no barrier between groups, isolated failures, bounded memory while loading."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from checkpoints import make_large_checkpoint
from served_models import NEW_TOKENS, Served

import flowrt
from flowrt.launcher import events


async def test_stopped_group_does_not_stop_the_other(served: Served, tmp_path: Path) -> None:
    """While one group is stopped, the other commits 50 more tokens; the stopped one, which no monitor watches, then completes exactly."""
    deploy = {"attention": {"groups": 2}, "experts": {"servers": 3, "replicas": 2}}
    graph = served.write(tmp_path, deploy, limits={"max_tokens": 200}, reliability={"detector": False})
    params = flowrt.SamplingParams(max_tokens=200, ignore_eos=True)
    async with flowrt.open(graph) as running:
        requests = [await running.submit(prompt, params) for prompt in served.prompts[:2]]
        tokens: dict[int, list[int]] = {request: [] for request in requests}
        grown = asyncio.Condition()

        async def follow(request: int) -> None:
            async for event in running.follow(request):
                if isinstance(event, flowrt.TokenEvent):
                    async with grown:
                        tokens[request].append(event.token_id)
                        grown.notify_all()

        async def reached(request: int, count: int) -> None:
            async with asyncio.timeout(60):
                async with grown:
                    await grown.wait_for(lambda: len(tokens[request]) >= count)

        async def until_stopped(pid: int) -> None:
            """Every thread of the process stands still, and every token it has sent before is read."""
            threads = Path(f"/proc/{pid}/task")
            async with asyncio.timeout(60):
                while {(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads.iterdir()} != {"T"}:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            counts: list[int] = []
            while len(counts) < 100 or counts[-1] != counts[-100]:  # each turn of the loop reads what there is to read
                await asyncio.sleep(0)
                counts.append(len(tokens[first]))

        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(follow(request))
            first, second = requests
            await reached(first, 5)
            os.kill(running.pids["attention.0"], signal.SIGSTOP)
            try:
                await until_stopped(running.pids["attention.0"])
                stopped_at = len(tokens[first])
                await reached(second, len(tokens[second]) + 50)
                assert len(tokens[first]) == stopped_at < 200
            finally:
                os.kill(running.pids["attention.0"], signal.SIGCONT)
    assert [tokens[request][:NEW_TOKENS] for request in requests] == served.expected[:2]
    assert [len(tokens[request]) for request in requests] == [200, 200]


async def test_refused_request_affects_no_other(served: Served, tmp_path: Path) -> None:
    graph = served.write(tmp_path, {"processes": "one"}, limits={"kv_pages": 8, "max_tokens": 64})
    good = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [[5, 6, 7], [], [3] * 150, [5, 100_000], [-1], served.prompts[1]]
    async with flowrt.open(graph) as running:
        results = await asyncio.gather(*(running.complete(prompt, good) for prompt in prompts))
        shortened = await running.complete([5], flowrt.SamplingParams(max_tokens=100_000, ignore_eos=True))
    assert [each.finish_reason for each in results] == ["length", "error", "error", "error", "error", "length"]
    assert (len(shortened.token_ids), shortened.finish_reason) == (64, "length")
    for result in results[1:5]:
        assert result.error
        assert result.token_ids == ()
        assert "\n" not in result.error
    assert list(results[5].token_ids) == served.expected[1]


async def test_leaving_a_stream_cancels_its_request(served: Served, tmp_path: Path) -> None:
    graph = served.write(tmp_path, {"processes": "one"}, limits={"kv_pages": 20, "max_tokens": 200})
    async with flowrt.open(graph) as running:
        for _ in range(3):  # each would hold 13 of 20 pages
            stream = running.generate(served.prompts[2], max_tokens=190, ignore_eos=True)
            async for _ in stream:
                break
            await stream.aclose()
        result = await running.complete(served.prompts[7], flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    assert list(result.token_ids) == served.expected[7]


async def test_closing_the_graph_ends_every_open_stream(served: Served, tmp_path: Path) -> None:
    graph = served.write(tmp_path, {"processes": "one"}, limits={"max_tokens": 200})
    ends: list[flowrt.EndEvent] = []
    async with asyncio.TaskGroup() as group, flowrt.open(graph) as running:
        request = await running.submit(served.prompts[2], flowrt.SamplingParams(max_tokens=200, ignore_eos=True))
        started = asyncio.Event()

        async def follow() -> None:
            async for event in running.follow(request):
                started.set()
                if isinstance(event, flowrt.EndEvent):
                    ends.append(event)

        group.create_task(follow())
        await started.wait()
    assert [end.finish_reason for end in ends] == ["abort"]


async def test_run_ends_when_its_exit_is_cancelled(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, is_closing = flowrt.open(served.write(tmp_path, {"processes": "one"})), asyncio.Event()
    requests = running.run.requests
    assert requests is not None

    async def close() -> None:
        is_closing.set()
        await asyncio.Event().wait()

    async def open_and_close() -> None:
        async with running:
            monkeypatch.setattr(requests, "aclose", close)

    task = asyncio.create_task(open_and_close())
    await is_closing.wait()
    run = running.launcher.opened_task()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert run.done()
    monkeypatch.undo()
    await requests.aclose()


async def test_seeded_sampling_does_not_depend_on_shape(served: Served, tmp_path: Path) -> None:
    params = [flowrt.SamplingParams(max_tokens=12, temperature=0.9, top_k=40, top_p=0.95, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    outcomes = []
    for deploy in ({"processes": "one"}, {"attention": {"groups": 2, "micro_batches": 2}, "experts": {"servers": 2}, "processes": "one"}):
        async with flowrt.open(served.write(tmp_path, deploy)) as running:
            results = await asyncio.gather(*(running.complete(served.prompts[3], parameters) for parameters in params))
            outcomes.append([each.token_ids for each in results])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == outcomes[0][2]
    assert outcomes[0][0] != outcomes[0][1]


async def test_server_loads_only_its_experts(tmp_path: Path) -> None:
    """Three servers, two replicas: each holds two thirds of 300 MB of experts, and grows by at most 1.2 times that."""
    model = make_large_checkpoint(tmp_path / "large")
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    deploy, alone = {"experts": {"servers": 3, "replicas": 2}}, {"share_weights": False}  # shared memory counts for no process alone
    graph = Served(model, [], []).write(tmp_path, deploy, limits={"kv_pages": 16}, reliability=alone)
    grown: dict[str, int] = {}

    def note(event: events.Event) -> None:
        if isinstance(event, events.WorkerListening):
            grown[event.name] = event.resident_bytes - event.imported_bytes

    async with flowrt.open(graph, on_event=note) as running:
        maps = Path(f"/proc/{running.pids['experts.0']}/maps").read_text()
    assert ".safetensors" not in maps  # a mapped file would hold memory that is not counted
    assert size > 300e6
    for server in ("experts.0", "experts.1", "experts.2"):
        assert 0.85 * size * 2 / 3 < grown[server] <= 1.2 * size * 2 / 3
