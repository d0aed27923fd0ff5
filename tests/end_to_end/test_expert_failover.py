"""Death of expert servers during requests, with real processes: no token is lost, doubled or changed, and servers rejoin."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from left_processes import left_processes
from served_models import NEW_TOKENS, Served

import flowrt
from flowrt.launcher import events, starts

COPIES = {"attention": {"groups": 2}, "experts": {"servers": 3, "replicas": 2}}
ALONE = {"attention": {"groups": 1}, "experts": {"servers": 2, "replicas": 1}}
MAX_TOKENS = 200
SHORT_WAIT = {"unavailable_expert_seconds": 0.05, "detector": False}  # the detector would replace a stopped fork server
PARAMS = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
LONG = flowrt.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)  # still running when its first tokens have been read


class Story:
    """Events about the expert servers."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.back: list[str] = []
        self.news: list[str] = []
        self.seen: list[events.Event] = []
        self._notified = asyncio.Event()

    def note(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerLost):
            self.lost.append(event.name)
        elif isinstance(event, events.WorkerRestarted):
            self.back.append(event.name)
        self.news.append(events.news(event) or "")
        self.seen.append(event)
        self._notified.set()

    async def until(self, holds: Callable[[Story], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds(self):
                self._notified.clear()
                await self._notified.wait()

    async def next(self, kind: type[events.WorkerRestarted | events.WorkerListening], name: str) -> None:
        """Wait for an event of this kind after the last one that was waited for so."""
        await self.until(lambda story: any(isinstance(event, kind) and event.name == name for event in story.seen))
        self.seen.clear()


def kill_once(pid: int, cause: int = signal.SIGKILL) -> Callable[[int], None]:
    """For tokens_of: the process gets the signal when there are 20 tokens."""
    killed: list[int] = []

    def kill(count: int) -> None:
        if count >= 20 and not killed:
            killed.append(pid)
            os.kill(pid, cause)

    return kill


def write(served: Served, folder: Path, deploy: dict[str, object], **more: object) -> Path:
    return served.write(folder, deploy, limits={"max_tokens": MAX_TOKENS}, numerics="strict", **more)


async def tokens_of(running: flowrt.RunningGraph, prompts: Sequence[Sequence[int]], kill_at: Callable[[int], None]) -> list[list[int]]:
    """Serve all prompts at the same time; calls `kill_at` with the number of tokens so far, over all prompts."""
    tokens: list[list[int]] = [[] for _ in prompts]

    async def follow(place: int, prompt: Sequence[int]) -> None:
        async for event in running.follow(await running.submit(list(prompt), PARAMS)):
            if isinstance(event, flowrt.TokenEvent):
                assert event.index == len(tokens[place])
                tokens[place].append(event.token_id)
                kill_at(sum(map(len, tokens)))
            elif isinstance(event, flowrt.EndEvent):
                assert event.finish_reason == "length", event.error

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for place, prompt in enumerate(prompts):
            group.create_task(follow(place, prompt))
    return tokens


@contextmanager
def without_restarts(running: flowrt.RunningGraph) -> Iterator[None]:
    """The fork server is stopped meanwhile, and has time: a server that dies stays down."""
    fork_server = running.launcher.fork_server_pid()
    os.kill(fork_server, signal.SIGSTOP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(starts, "FORK_SECONDS", 3600.0)
            yield
    finally:
        os.kill(fork_server, signal.SIGCONT)


@pytest.mark.parametrize(("transport", "attention"), [("zmq", {"groups": 2}), ("auto", {"groups": 2, "domains": 2, "micro_batches": 2})])
async def test_killed_servers_change_no_token_and_rejoin(served: Served, tmp_path: Path, transport: str, attention: dict[str, int]) -> None:
    """Each of three servers dies once, while every expert keeps a replica. One is stopped first, so that parts certainly wait for it."""
    deploy = COPIES | {"attention": attention, "links": {"attention-experts": {"transport": transport}}}
    story = Story()
    async with flowrt.open(write(served, tmp_path, deploy, reliability={"hedge": False}), on_event=story.note) as running:
        expected = await tokens_of(running, served.prompts[:4], lambda count: None)
        first = dict(running.pids)
        for server, cause in enumerate((signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)):
            kill = kill_once(running.pids[f"experts.{server}"], cause)
            assert await tokens_of(running, served.prompts[:4], kill) == expected
            await story.until(lambda story, server=server: len(story.back) == server + 1)
        assert story.lost == story.back == ["experts.0", "experts.1", "experts.2"]
        assert {name for name in first if running.pids[name] != first[name]} == set(story.back)
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == expected
        statistics = await running.launcher.statistics()
        assert sum(each.num_redispatched for each in statistics.values())
    assert not left_processes(first.values())


@pytest.mark.parametrize("cause", [signal.SIGKILL, signal.SIGSTOP])
async def test_last_replica_that_rejoins_in_time_only_delays(served: Served, tmp_path: Path, cause: signal.Signals) -> None:
    """The signal comes before the requests, so that parts of a stopped server certainly wait for it."""
    story = Story()
    graph = write(served, tmp_path, ALONE, reliability={"unavailable_expert_seconds": 60, "hedge": False})
    async with flowrt.open(graph, on_event=story.note) as running:
        expected = await tokens_of(running, served.prompts[:2], lambda count: None)
        first = running.pids["experts.1"]
        os.kill(first, cause)
        assert await tokens_of(running, served.prompts[:2], lambda count: None) == expected
        await story.until(lambda story: story.back == ["experts.1"])
        assert running.pids["experts.1"] != first


async def test_loss_of_the_last_replica_ends_requests_and_service_resumes(served: Served, tmp_path: Path) -> None:
    story = Story()
    graph = write(served, tmp_path, ALONE, reliability=SHORT_WAIT)
    async with flowrt.open(graph, on_event=story.note) as running:
        expected = await running.complete(served.prompts[0], PARAMS)
        request = await running.submit(served.prompts[0], LONG)
        with without_restarts(running):
            async for event in running.follow(request):
                if isinstance(event, flowrt.TokenEvent) and event.index == 2:
                    os.kill(running.pids["experts.1"], signal.SIGKILL)
                if isinstance(event, flowrt.EndEvent):
                    assert event.finish_reason == "error"
                    assert "no replica is left of experts" in (event.error or "")
                    assert "experts.1" in (event.error or "")
        await story.until(lambda story: story.back == ["experts.1"] and running.health().ok)
        assert (await running.complete(served.prompts[0], PARAMS)).token_ids == expected.token_ids


async def test_degraded_output_is_marked_until_the_last_replica_rejoins(served: Served, tmp_path: Path) -> None:
    story = Story()
    graph = write(served, tmp_path, ALONE, reliability=SHORT_WAIT | {"unavailable_expert": "degrade", "hedge": False})
    async with flowrt.open(graph, on_event=story.note) as running:
        expected = await running.complete(served.prompts[0], PARAMS)
        assert not expected.degraded
        with without_restarts(running):
            os.kill(running.pids["experts.1"], signal.SIGKILL)
            while not (marked := await running.complete(served.prompts[0], PARAMS)).degraded:
                assert marked.token_ids == expected.token_ids
        assert (marked.finish_reason, len(marked.token_ids)) == ("length", NEW_TOKENS)
        first = marked.choices[0].degraded_tokens[0]
        assert marked.token_ids[:first] == expected.token_ids[:first]
        await story.until(lambda story: story.back == ["experts.1"] and not running.health().warnings)
        assert any("it goes on without, and marks what it answers as degraded" in line for line in story.news)
        repeated = await running.complete(served.prompts[0], PARAMS)
        assert (repeated.degraded, repeated.token_ids) == (False, expected.token_ids)


async def test_server_killed_while_loading_weights_fails_no_request(served: Served, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(event: events.Event) -> None:
        if isinstance(event, events.WorkerLoading) and event.name == "experts.1" and not killed:
            killed.append(running.pids["experts.1"])
            os.kill(killed[0], signal.SIGKILL)

    running = flowrt.open(write(served, tmp_path, COPIES), on_event=kill)
    async with running:
        assert killed
        assert running.pids["experts.1"] != killed[0]
        assert (await running.complete(served.prompts[0], PARAMS)).finish_reason == "length"
        assert not running.health().warnings


async def test_server_stays_down_while_its_weights_are_others(served: Served, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(served.directory, directory)
    (weights,) = directory.glob("*.safetensors")
    times, story, text = weights.stat(), Story(), "model.safetensors has changed since the run began; restore the file"
    graph = write(served, tmp_path, COPIES, reliability={"restart_window_seconds": 1.0})
    async with flowrt.open(graph, model=directory, on_event=story.note) as running:
        os.utime(weights, ns=(0, 0))
        os.kill(running.pids["experts.1"], signal.SIGKILL)
        await story.until(lambda story: any(text in line for line in story.news))
        assert story.back == []
        assert await tokens_of(running, served.prompts[:2], lambda count: None) == [each[:NEW_TOKENS] for each in served.expected[:2]]
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
        await story.until(lambda story: story.back == ["experts.1"])


@pytest.mark.parametrize("victim", ["experts.1", "attention.1"])
async def test_without_recovery_a_death_ends_the_run_with_its_name(served: Served, tmp_path: Path, victim: str) -> None:
    story = Story()

    async def run() -> None:
        async with flowrt.open(write(served, tmp_path, COPIES, reliability={"recovery": "off"}), on_event=story.note) as running:
            os.kill(running.pids[victim], signal.SIGKILL)
            async with asyncio.timeout(30):
                await running.complete(served.prompts[5], PARAMS)

    with pytest.raises(flowrt.WorkerDiedError, match=rf"{victim} was killed by SIGKILL") as caught:
        await run()
    assert caught.value.process == victim
    assert story.lost == []
