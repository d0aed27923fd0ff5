"""Rows and KV as INT8 between workers: they take fewer bytes, on the edges that were chosen, over one hop and over two."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from end_to_end.int8_answers import answers
from served_models import NEW_TOKENS, Served

import flowrt
from examples.training.questions import KINDS, held_out

GREEDY = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "servers": {"experts": {"servers": 2}},
    "trampolines": {"experts": {"servers": 3, "trampoline": "always"}},
    "colocated": {"attention": {"groups": 2}, "experts": {"servers": "colocated"}},
}


async def row_bytes(graph: Path, prompts: list[list[int]]) -> tuple[float, float]:
    """Bytes per message on the edges from dispatch and back."""
    async with flowrt.open(graph) as running, asyncio.timeout(60):
        done = await asyncio.gather(*(running.complete(prompt, GREEDY) for prompt in prompts))
        edges = [edge for each in (await running.statistics()).values() for edge in each.edges]
    assert [each.finish_reason for each in done] == ["length"] * len(prompts)
    there = [edge for edge in edges if ".dispatch." in edge.edge.partition(" -> ")[0]]
    back = [edge for edge in edges if edge.edge.partition(" -> ")[2].endswith(".parts") and edge not in there]
    sent, received = (sum(edge.payload_bytes for edge in each) / sum(edge.num_messages for edge in each) for each in (there, back))
    return sent, received


@pytest.mark.parametrize("kind", DEPLOYMENTS)
async def test_rows_take_fewer_bytes_where_they_are_int8(served: Served, tmp_path: Path, kind: str) -> None:
    deploy = {**DEPLOYMENTS[kind], "processes": "one"}
    found = {}
    for choice in ("none", "dispatch", "combine"):
        experts = {**deploy["experts"], "int8": choice}
        # Late parts would pass their trampoline, in messages of another size.
        graph = served.write(tmp_path, {**deploy, "experts": experts}, reliability={"hedge": False})
        found[choice] = await row_bytes(graph, served.prompts[:2])
    (sent, received), (sent_int8, received_exact), (sent_exact, received_int8) = (found[each] for each in ("none", "dispatch", "combine"))
    assert sent_int8 < 0.5 * sent
    assert received_int8 < 0.4 * received
    assert sent_exact == pytest.approx(sent, rel=0.2)  # other tokens, other parts
    assert received_exact == pytest.approx(received, rel=0.2)


async def test_answers_with_int8_rows_are_those_without() -> None:
    """`int8_answers.py` counts this over many questions; a margin between two tokens may be smaller than the error of INT8."""
    prompts = [question.prompt for kind in KINDS for question in held_out(kind, 8)]
    async with asyncio.timeout(120):
        exact, _, _ = await answers(["deploy.processes=one"], prompts, [], "server")
        both, _, _ = await answers(["deploy.processes=one", "deploy.experts.int8=both"], prompts, [], "server")
    alike = sum(one.token_ids == other.token_ids for one, other in zip(exact, both, strict=True))
    assert alike >= 0.95 * len(prompts)


async def test_kv_takes_fewer_bytes_where_it_is_int8(served: Served, tmp_path: Path) -> None:
    num_bytes = []
    for int8 in (False, True):
        graph = served.write(tmp_path, {"prefill": {"workers": 1, "int8": int8}, "processes": "one"})
        async with flowrt.open(graph) as running, asyncio.timeout(60):
            done = await running.complete(served.prompts[0], GREEDY)
            edges = [edge for each in (await running.statistics()).values() for edge in each.edges if ".chunk -> " in edge.edge]
        assert done.finish_reason == "length"
        num_bytes.append(sum(edge.payload_bytes for edge in edges))
    assert 0 < num_bytes[1] < 0.8 * num_bytes[0]
