"""A request that its model cannot be computed for: it ends with an error, and neither the others nor the processes suffer.

One token of the vocabulary has an embedding of NaN. A `sitecustomize` makes the real processes fail, die or hang on rows with NaN.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from end_to_end.test_expert_failover import Story
from served_models import Served

import flowrt

FAULTS = {"raise": "raise MemoryError('no room for this part')", "abort": "os.abort()", "hang": "time.sleep(3600)"}
CUSTOM = """
import os, time
from flowrt.operators.attention_block import AttentionBlock
from flowrt.operators.experts import Experts

def poisoned(function, is_hit):
    def run(self, layer, x_RH, *more, **options):
        if is_hit(x_RH, *more):
            {fault}
        return function(self, layer, x_RH, *more, **options)
    return run

"""
POISONED = {
    "attention": "AttentionBlock.forward = poisoned(AttentionBlock.forward, lambda x_TH, *more: x_TH.isnan().any())\n",
    # the pair with expert 0, which the gate chooses for each such row, as it chooses 1: other servers may get that pair
    "experts": "Experts._run = poisoned(Experts._run, lambda x_RH, row_P, expert_P: x_RH[row_P[expert_P == 0]].isnan().any())\n",
}
NUM_TOKENS = 6
PARAMS = flowrt.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
def poison(served: Served, tmp_path: Path) -> tuple[Path, list[int]]:
    """The served model with a poisoned token, and a prompt that ends with it."""
    token = served.poisoned(tmp_path / "poisoned")
    return tmp_path / "poisoned", [*served.prompts[1], token]


@pytest.fixture
def fail_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def write(role: str, fault: str) -> None:
        folder = tmp_path / "custom"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(CUSTOM.format(fault=FAULTS[fault]) + POISONED[role])
        monkeypatch.syspath_prepend(folder)

    return write


async def test_a_part_that_cannot_be_computed_ends_its_request_and_no_process(
    served: Served, tmp_path: Path, poison: tuple[Path, list[int]], fail_with: Callable[[str, str], None]
) -> None:
    """The request runs among good ones, which must be answered exactly, and one more when it has ended."""
    fail_with("experts", "raise")
    story, (directory, prompt) = Story(), poison
    deploy = {"attention": {"groups": 1, "micro_batches": 2}, "experts": {"servers": 3, "replicas": 2}}
    graph = served.write(tmp_path, deploy, limits={"max_tokens": 64}, numerics="strict")
    async with asyncio.timeout(100), flowrt.open(graph, model=directory, on_event=story.note) as running:
        good = [asyncio.create_task(running.complete(each, PARAMS)) for each in served.prompts[:4]]
        bad = await running.complete(prompt, PARAMS)
        done = [*await asyncio.gather(*good), await running.complete(served.prompts[0], PARAMS)]
    assert [each.error for each in done] == [None] * 5
    assert [list(each.token_ids) for each in done] == [tokens[:NUM_TOKENS] for tokens in (*served.expected[:4], served.expected[0])]
    assert bad.finish_reason == "error"
    assert "a step of this request failed twice: experts." in (bad.error or "")
    assert "MemoryError: no room for this part" in (bad.error or "")
    assert story.lost == []


@pytest.mark.parametrize(("role", "fault"), [("attention", "abort"), ("attention", "hang"), ("experts", "abort"), ("experts", "hang")])
async def test_a_request_has_few_victims(
    served: Served, tmp_path: Path, poison: tuple[Path, list[int]], fail_with: Callable[[str, str], None], role: str, fault: str
) -> None:
    """Four where suspects of the other group run meanwhile, and one more where servers hang: one that hangs is late first, so that another
    one gets the part, too. The poison is one row: it spoils all rows of a prompt."""
    fail_with(role, fault)
    story, (directory, prompt) = Story(), poison
    servers = 3 if role == "experts" else 2  # one more than victims
    deploy = {"attention": {"groups": 2, "micro_batches": 2}, "experts": {"servers": servers, "replicas": servers}}
    graph = served.write(tmp_path, deploy, limits={"max_tokens": 64}, numerics="strict")
    async with asyncio.timeout(200), flowrt.open(graph, model=directory, on_event=story.note) as running:
        prompts = [*served.prompts[:5], prompt[-1:], *served.prompts, *served.prompts]
        done = await asyncio.gather(*(running.complete(each, PARAMS) for each in prompts))
        bad = done.pop(5)
        expected = [*served.expected[:5], *served.expected, *served.expected]
        assert [each.error for each in done] == [None] * 21
        assert [list(each.token_ids) for each in done] == [tokens[:NUM_TOKENS] for tokens in expected]
        assert bad.finish_reason == "error"
        assert bad.error is not None
        assert bad.error.endswith(" while it computed this request alone; the request is not tried again")
        assert 1 <= len(story.lost) <= (5 if (role, fault) == ("experts", "hang") else 4)
        assert {name.partition(".")[0] for name in story.lost} == {role}
        await story.until(lambda story: len(story.back) == len(story.lost))
        assert (await running.complete(served.prompts[0], PARAMS)).token_ids == tuple(served.expected[0][:NUM_TOKENS])
