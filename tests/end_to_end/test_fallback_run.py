"""A transport that breaks during a run: tokens are unchanged, and the statistics count the fallback."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from served_models import Served

import flowrt
from flowrt.cli.report import report_of
from flowrt.transports.registry import unavailable_reason

NEW_TOKENS = 24

pytestmark = pytest.mark.skipif(
    unavailable_reason("shm") is not None or unavailable_reason("zmq") is not None, reason="needs shm and zmq to fall back between"
)


@pytest.mark.parametrize("plan", ["drop@40", "out.drop@25,truncate@60"])
async def test_tokens_are_the_same_when_every_channel_breaks(served: Served, tmp_path: Path, plan: str) -> None:
    deploy = {
        "attention": {"groups": 1, "micro_batches": 2},
        "experts": {"servers": 2},
        "links": {"attention-experts": {"transport": f"faulty+auto?{plan}"}},
        "processes": "many",
    }
    graph = served.write(tmp_path, deploy)
    parameters = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    async with flowrt.open(graph) as running:
        done = await asyncio.gather(*(running.complete(prompt, parameters) for prompt in served.prompts))
        statistics = await running.statistics()
    assert [list(each.token_ids) for each in done] == [tokens[:NEW_TOKENS] for tokens in served.expected]
    report = report_of(running.graph, {}, statistics, {}, None, None)
    assert len(report.fallbacks) >= 4  # two links, both ends
    assert all("faulty+shm" in text and "zmq carried on" in text for text in report.fallbacks)
    assert report.transport_reasons == ("shm, the fastest that both ends have; when it breaks, zmq carries on",)
