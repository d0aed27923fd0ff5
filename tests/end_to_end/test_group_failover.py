"""Loss of attention groups with real processes: requests wait for a group, and end when none returns."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
from end_to_end.test_expert_failover import Story, kill_once, tokens_of
from served_models import NEW_TOKENS, Served

import flowrt

PARAMS = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


async def test_requests_end_in_time_when_the_last_group_does_not_come_back(served: Served, tmp_path: Path) -> None:
    reliability = {"restarts": 0, "lost_group_seconds": 0.5}
    graph = served.write(tmp_path, {"experts": {"servers": 2}}, limits={"max_tokens": 64}, reliability=reliability)
    async with asyncio.timeout(100), flowrt.open(graph) as running:
        request = await running.submit(served.prompts[0], flowrt.SamplingParams(max_tokens=60, ignore_eos=True))
        ends = []
        async for event in running.follow(request):
            if isinstance(event, flowrt.TokenEvent) and event.index == 2:
                os.kill(running.pids["attention.0"], signal.SIGKILL)
            if isinstance(event, flowrt.EndEvent):
                ends.append(event)
        ends.append(await running.complete(served.prompts[1], PARAMS))
        for end in ends:
            assert end.finish_reason == "error"
            assert end.error == "no attention group is left to serve the request; attention.0 was killed by SIGKILL"
        assert not running.health().ok


@pytest.mark.parametrize("servers", [2, 0])
async def test_a_stopped_group_is_replaced_and_its_requests_move(served: Served, tmp_path: Path, servers: int) -> None:
    story, params = Story(), msgspec.structs.replace(PARAMS, prompt_logprobs=1)
    deploy = {"attention": {"groups": 2}, "experts": {"servers": servers}}
    graph = served.write(tmp_path, deploy, limits={"max_tokens": NEW_TOKENS}, numerics="strict")
    async with asyncio.timeout(120), flowrt.open(graph, on_event=story.note) as running:
        pid = running.pids["attention.1"]
        early = [asyncio.create_task(running.complete(prompt, params)) for prompt in served.prompts]
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGSTOP)
        done = [await task for task in early]
        await story.until(lambda story: story.back == ["attention.1"])
        assert story.lost == ["attention.1"]
        done += await asyncio.gather(*(running.complete(prompt, params) for prompt in served.prompts))
        assert [each.prompt_logprobs for each in done[: len(early)]] == [each.prompt_logprobs for each in done[len(early) :]]
        assert [list(each.token_ids) for each in done] == [tokens for tokens in (*served.expected, *served.expected)]
        assert running.pids["attention.1"] != pid
        assert not running.health().warnings
        statistics = await running.statistics()
        assert statistics["attention.1"].num_steps > 0


@pytest.mark.parametrize("cause", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_loss_of_a_colocated_process_is_that_of_a_group_and_of_a_server(
    served: Served, tmp_path: Path, cause: signal.Signals
) -> None:
    """Its requests move to other groups, the parts that it had to other replicas, and it is used again as both."""
    story = Story()
    deploy = {"attention": {"groups": 3}, "experts": {"servers": "colocated", "replicas": 2}}
    graph = served.write(tmp_path, deploy, limits={"max_tokens": NEW_TOKENS}, numerics="strict")

    async def num_parts() -> int:
        """Parts of other groups that process attention.1 was sent."""
        statistics = await running.statistics()
        return sum(
            edge.num_messages for each in statistics.values() for edge in each.edges if edge.edge.endswith(" -> attention.1.experts.rows")
        )

    async with asyncio.timeout(120), flowrt.open(graph, on_event=story.note) as running:
        first = running.pids["attention.1"]
        assert await tokens_of(running, served.prompts, kill_once(first, cause)) == served.expected
        await story.until(lambda story: story.back == ["attention.1"])
        assert story.lost == ["attention.1"]
        assert running.pids["attention.1"] != first
        before = await num_parts()
        assert await tokens_of(running, served.prompts, lambda count: None) == served.expected
        assert await num_parts() > before
        statistics = await running.statistics()
        assert statistics["attention.1"].num_steps > 0
        assert statistics["attention.0"].map_version == 3, "as it began, without attention.1, with it"
        assert all(0 <= each.bubble_seconds < each.working_seconds for each in statistics.values() if each.num_steps)
