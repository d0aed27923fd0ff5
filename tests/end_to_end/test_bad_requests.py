"""Invalid requests and a second reader of a stream: each gets a one-line error, and the graph keeps serving."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from served_models import Served

import flowrt
from flowrt.api import RunningGraph
from flowrt.sampling_params import SamplingParams

USER = {"role": "user", "content": "hi"}


async def end(running: RunningGraph, prompt: Any = None, **parameters: Any) -> flowrt.EndEvent:
    events = [event async for event in running.generate(prompt, **parameters)]
    assert len(events) == 1
    assert isinstance(events[0], flowrt.EndEvent)
    return events[0]


async def test_bad_request_affects_no_other(served: Served, tmp_path: Path) -> None:
    graph = served.write(tmp_path, {"processes": "one", "experts": {"servers": 0}})
    async with flowrt.open(graph) as running:
        for prompt in ([1.5], None, 5, ["a"], "half \ud800", b"ab"):
            with pytest.raises(flowrt.ArgumentError, match=r"^(the prompt|prompt token) "):
                running.generate(prompt)
        bad: list[dict[str, Any]] = [
            {"stop": 5},
            {"temperature": "x"},
            {"params": SamplingParams(n=0)},
            {"messages": "hi"},
            {"max_token": 4},
        ]
        for parameters in bad:
            for call in (running.complete, running.submit):
                with pytest.raises(flowrt.ArgumentError):
                    await call([1, 2], **parameters)
        refused = await end(running, [5, 100_000])
        assert refused.finish_reason == "error"
        assert refused.error

        with pytest.raises(flowrt.UserError, match="opened before"):
            await running.__aenter__()
        with pytest.raises(flowrt.UserError, match="there is no request 999 to follow"):
            await anext(running.follow(999))
        index = await running.submit(served.prompts[0], flowrt.SamplingParams(max_tokens=3, ignore_eos=True))
        first = running.follow(index)
        tokens = [await anext(first)]
        with pytest.raises(flowrt.UserError, match="is followed already"):
            await anext(running.follow(index))
        tokens += [event async for event in first]
        assert [event.token_id for event in tokens if isinstance(event, flowrt.TokenEvent)] == served.expected[0][:3]
        with pytest.raises(flowrt.UserError, match="it can be followed once"):
            await anext(running.follow(index))


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("numerics", ["fast", "strict"])
async def test_logits_that_are_not_finite_end_their_request_with_an_error(
    served: Served, tmp_path: Path, logprobs: int | None, numerics: str
) -> None:
    """One token of the vocabulary has an embedding of NaN; requests without it, in the same batches, keep their tokens."""
    prompt, poisoned = served.prompts[2], served.poisoned(tmp_path / "poisoned")
    graph = served.write(tmp_path, {"processes": "one", "experts": {"servers": 2}}, numerics=numerics)
    async with flowrt.open(graph, model=tmp_path / "poisoned") as running:
        good = flowrt.SamplingParams(max_tokens=8, ignore_eos=True)
        bad = [msgspec.structs.replace(good, logprobs=logprobs, temperature=temperature) for temperature in (0.0, 0.7)]
        done = await asyncio.gather(*(running.complete([*prompt, poisoned], each) for each in bad), running.complete(prompt, good))
    for each in done[:2]:
        assert each.finish_reason == "error"
        assert each.error is not None
        assert "not finite (NaN or infinity)" in each.error
        assert each.token_ids == ()
    assert list(done[2].token_ids) == served.expected[2][:8]


@pytest.mark.parametrize("prompts", [None, 5])
def test_empty_prompts_are_refused(served: Served, tmp_path: Path, prompts: Any) -> None:
    with pytest.raises(flowrt.UserError, match=r"prompts is .*, it must be a text"):
        flowrt.generate(served.write(tmp_path), prompts)
