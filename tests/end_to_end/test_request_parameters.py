"""Request parameters against transformers: logprobs, penalties, n, min_tokens, stop ids; and many requests with few pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_truth, truth_logits
from served_models import Served

import flowrt
from flowrt.gateway import gateway
from flowrt.gateway.admission import Admission
from flowrt.operators.sampling import sample
from flowrt.operators.sampling_inputs import Draw, SamplingInputs

DEPLOY: dict[str, Any] = {"attention": {"micro_batches": 2}, "experts": {"servers": 2}, "processes": "one"}
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def truth(served: Served) -> Any:
    return load_truth(served.directory)


async def complete(graph: Path, *requests: tuple[list[int], dict[str, Any]]) -> list[flowrt.Completion]:
    """Serve all prompts at the same time."""
    async with flowrt.open(graph) as running:
        requests = (
            running.complete(prompt, flowrt.SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True} | more))
            for prompt, more in requests
        )
        return list(await asyncio.gather(*requests))


def continued(truth: Any, prompt: Sequence[int], num_tokens: int, draw: Callable[[list[int]], Draw]) -> list[int]:
    """Tokens that `draw` selects from transformers' logits, one at a time."""
    output: list[int] = []
    for _ in range(num_tokens):
        logits = truth_logits(truth, [*prompt, *output])[-1:]
        output.append(int(sample(logits, SamplingInputs.from_draws([draw(output)]))))
    return output


def counts(prompt: Sequence[int], output: Sequence[int]) -> dict[int, int]:
    return {token: output.count(token) for token in (*prompt, *output)}


def generated(truth: Any, prompt: list[int], **settings: Any) -> list[int]:
    """Greedy tokens of transformers' generate."""
    from transformers import GenerationConfig

    config = GenerationConfig(**{"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0} | settings)
    tokens = truth.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config)
    output: list[int] = tokens[0, len(prompt) :].tolist()
    return output


def check_prompt_logprobs(truth: Any, prompt: list[int], result: flowrt.Completion, number: int) -> None:
    expected = truth_logits(truth, prompt)[:-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor([each.token for each in result.prompt_logprobs]), own, atol=1e-4, rtol=0)
    for place, each in enumerate(result.prompt_logprobs):
        assert len(each.top) == number
        torch.testing.assert_close(torch.tensor([top for _, top in each.top]), expected[place].topk(number).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("deploy", [{}, {"prefill": {"workers": 1}}], ids=["groups", "a prefill worker"])
async def test_prompt_logprobs_do_not_depend_on_caches_chunks_and_choices(
    served: Served, truth: Any, tmp_path: Path, deploy: dict[str, Any]
) -> None:
    """The second request of each prompt finds all of it in the prefix cache."""
    graph = served.write(tmp_path, DEPLOY | deploy, limits={"max_num_batched_tokens": 24})
    params = flowrt.SamplingParams(max_tokens=2, n=2, prompt_logprobs=2)
    async with flowrt.open(graph) as running:
        for prompt in served.prompts[:5]:
            for _ in range(2):
                check_prompt_logprobs(truth, prompt, await running.complete(prompt, params), 2)


async def test_logprobs_and_penalties_are_those_of_transformers(served: Served, truth: Any, tmp_path: Path) -> None:
    prompts = served.prompts[:5]
    alike = {"presence_penalty": 1.5, "frequency_penalty": -0.7}
    requests = [(prompt, {"logprobs": number, "prompt_logprobs": number}) for number, prompt in zip((0, 1, 5, 20, 3), prompts, strict=True)]
    requests += [(prompt, {"repetition_penalty": 1.4}) for prompt in prompts[1:4]]
    requests += [(prompts[2], alike), (prompts[3], alike | {"logprobs": 2, "temperature": 0.8, "seed": 5})]
    results = await complete(served.write(tmp_path, DEPLOY), *requests)
    for (prompt, more), result in zip(requests, results, strict=True):
        assert result.finish_reason == "length"
        if (number := more.get("logprobs")) is None:
            assert result.logprobs == result.top_logprobs == result.prompt_logprobs == ()
            continue
        if "prompt_logprobs" in more:
            check_prompt_logprobs(truth, prompt, result, number)
        logits = truth_logits(truth, [*prompt, *result.token_ids])[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)  # also with penalties and a temperature: they are of the logits as the model gives them
        own = expected.gather(1, torch.tensor(result.token_ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(result.logprobs), own, atol=1e-4, rtol=0)
        assert [len(top) for top in result.top_logprobs] == [number] * NUM_TOKENS
        if number:
            ids, reported = torch.tensor(result.top_logprobs, dtype=torch.float64).unbind(-1)
            torch.testing.assert_close(reported.float(), expected.topk(number).values, atol=1e-4, rtol=0)
            torch.testing.assert_close(reported.float(), expected.gather(1, ids.long()), atol=1e-4, rtol=0)
    for result, expected in zip(results[:5], served.expected, strict=False):
        assert list(result.token_ids) == expected[:NUM_TOKENS]
    for result, prompt in zip(results[5:8], prompts[1:4], strict=True):
        assert list(result.token_ids) == generated(truth, prompt, repetition_penalty=1.4)
    assert [list(result.token_ids) for result in results[5:8]] != [tokens[:NUM_TOKENS] for tokens in served.expected[1:4]]
    greedy = continued(truth, prompts[2], NUM_TOKENS, lambda output: Draw(0, **alike, output_counts=counts(prompts[2], output)))
    assert list(results[8].token_ids) == greedy != served.expected[2][:NUM_TOKENS]
    drawn = continued(
        truth,
        prompts[3],
        NUM_TOKENS,
        lambda output: Draw(0, 0.8, seed=5, token_index=len(output), **alike, output_counts=counts(prompts[3], output)),
    )
    assert list(results[9].token_ids) == drawn


async def test_choices_sample_independently_with_shared_pages(served: Served, truth: Any, tmp_path: Path) -> None:
    """Prompts of 33 and 64 tokens: two full pages and one token; four full pages."""
    settings = {"temperature": 0.9, "top_k": 40, "seed": 7, "logprobs": 0}
    requests = [(served.prompts[3], settings | {"n": 3}), (served.prompts[4], settings | {"n": 5}), (served.prompts[3], settings)]
    expected = [
        [
            continued(truth, prompt, NUM_TOKENS, lambda output, c=choice: Draw(0, 0.9, 40, seed=7, choice=c, token_index=len(output)))
            for choice in range(more.get("n", 1))
        ]
        for prompt, more in requests
    ]
    for limits in ({}, {"kv_pages": 8, "max_num_batched_tokens": 24, "max_num_seqs": 6}):
        results = await complete(served.write(tmp_path, DEPLOY, limits=limits), *requests)
        assert [[list(choice.token_ids) for choice in result.choices] for result in results] == expected
        assert all(len(choice.logprobs) == NUM_TOKENS for result in results for choice in result.choices)
        assert all(choice.finish_reason == "length" for result in results for choice in result.choices)
    assert len({tuple(output) for output in expected[1]}) == 5


async def test_min_tokens_and_stop_ids(served: Served, truth: Any, tmp_path: Path) -> None:
    stops = [tokens[3] for tokens in served.expected[:3]]
    requests: list[tuple[list[int], dict[str, Any]]] = []
    for prompt, stop in zip(served.prompts, stops, strict=False):
        requests += [(prompt, {"stop_token_ids": (stop,), "min_tokens": least}) for least in (0, 10)]
    requests.append((served.prompts[4], {"stop_token_ids": (served.expected[4][2],), "n": 2, "temperature": 1.0, "min_tokens": NUM_TOKENS}))
    *results, both = await complete(served.write(tmp_path, DEPLOY), *requests)
    for (prompt, more), result in zip(requests, results, strict=False):
        (stop,) = more["stop_token_ids"]
        assert list(result.token_ids) == generated(truth, prompt, eos_token_id=stop, min_new_tokens=more["min_tokens"])
        assert result.finish_reason == ("stop" if result.token_ids[-1] == stop else "length")
        assert len(result.token_ids) >= (more["min_tokens"] or 1)
    assert any(len(result.token_ids) <= 4 for result in results[::2])
    assert [choice.finish_reason for choice in both.choices] == ["length", "length"]
    assert all(served.expected[4][2] not in choice.token_ids for choice in both.choices)


async def test_few_pages_complete_every_request_that_fits_alone(served: Served, tmp_path: Path) -> None:
    """80 positions; the longest needs 75 of them."""
    graph = served.write(tmp_path, DEPLOY, limits={"kv_pages": 10, "page_size": 8})
    results = await complete(graph, *((prompt, {"max_tokens": NUM_TOKENS}) for prompt in served.prompts[:5]))
    assert [list(result.token_ids) for result in results] == served.expected[:5]


def test_prompts_beyond_the_active_limit_wait(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "Admission", lambda max_requests, max_prompt_tokens: Admission(2, max_prompt_tokens))
    graph = served.write(tmp_path, {"processes": "one", "experts": {"servers": 0}})
    results = flowrt.generate(graph, served.prompts[:5], max_tokens=4, ignore_eos=True)
    assert [list(result.token_ids) for result in results] == [tokens[:4] for tokens in served.expected[:5]]
