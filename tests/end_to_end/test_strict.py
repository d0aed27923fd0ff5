"""Strict numerics: logits are bit-equal for any batch, placement of experts and preemption."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, random_prompts
from served_models import Served

import flowrt
from flowrt.engine.scheduler import Scheduler
from flowrt.operators import sampling
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.sampling_inputs import SamplingInputs

LENGTHS = (1, 17, 33, 40, 64, 70, 100, 3)
NEW_TOKENS = 8
FAMILIES = {"qwen3_moe": {"top_k": 3}, "deepseek_v3": {"top_k": 3}, "qwen3_next": {"top_k": 3}}
ALONE: dict[str, Any] = {"attention": {"groups": 1}, "experts": {"servers": 0}, "processes": "one"}
SHAPES: dict[str, dict[str, Any]] = {
    "experts inside": {},
    "1 group, 1 server": {"experts": {"servers": 1}},
    "2 groups, 3 servers, 2 copies": {"attention": {"groups": 2}, "experts": {"servers": 3, "replicas": 2}},
    "4 groups, 1 server": {"attention": {"groups": 4}, "experts": {"servers": 1}},
    "2 micro-batches": {"attention": {"micro_batches": 2}, "experts": {"servers": 2}},
}
Hashes = dict[tuple[int, int], str]
_alone: dict[tuple[Path, str], Hashes] = {}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tmp_path_factory.mktemp(request.param)
    make_checkpoint(directory, architecture=request.param, seed=7, **FAMILIES[request.param])
    return Served(directory, random_prompts(LENGTHS), [])


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Hashes:
    """(seed, token index) -> hash of the logits that the token was drawn from, of all runs with workers in this process."""
    found: Hashes = {}
    sample = sampling.sample

    def recording(logits_SV: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        _, _, seeds, _, indices = inputs.integers_5S.tolist()
        for row, seed, index in zip(logits_SV, seeds, indices, strict=True):
            found[seed, index] = hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest()
        return sample(logits_SV, inputs)

    monkeypatch.setattr(sampling, "sample", recording)
    return found


def write(family: Served, folder: Path, deploy: dict[str, Any], dtype: str = "float32", **limits: Any) -> Path:
    model = {"path": str(family.directory), "dtype": dtype}
    limits = {"max_num_batched_tokens": 128, "chunk_tokens": 32, "page_size": 8, "max_tokens": NEW_TOKENS, **limits}
    # Groups get all requests at once, so that few pages make the scheduler preempt.
    return family.write(folder, ALONE | deploy, model=model, numerics="strict", routing="round_robin", limits=limits)


async def serve(graph: Path, prompts: Sequence[Sequence[int]], numbers: Sequence[int], **settings: Any) -> list[flowrt.Completion]:
    """Serve all prompts at the same time. The index of a prompt is its seed, which identifies its logits."""

    def params_of(number: int) -> flowrt.SamplingParams:
        return flowrt.SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": number, "logprobs": 5} | settings)

    async with flowrt.open(graph) as running:
        return list(await asyncio.gather(*(running.complete(list(prompts[each]), params_of(each)) for each in numbers)))


async def each_alone(family: Served, folder: Path, hashes: Hashes, dtype: str) -> Hashes:
    """The hashes when requests run one by one, computed once for each model and type."""
    if (known := _alone.get((family.directory, dtype))) is not None:
        return known
    async with flowrt.open(write(family, folder, {}, dtype)) as running:
        for number, prompt in enumerate(family.prompts):
            await running.complete(prompt, flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=number))
    truth = _alone[family.directory, dtype] = dict(hashes)
    hashes.clear()
    return truth


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_all_logits_have_the_same_bits_in_every_shape_and_batch(family: Served, tmp_path: Path, hashes: Hashes, dtype: str) -> None:
    truth = await each_alone(family, tmp_path, hashes, dtype)
    assert len(truth) == len(set(truth.values())) == len(LENGTHS) * NEW_TOKENS
    for shape, deploy in SHAPES.items():
        await serve(write(family, tmp_path, deploy, dtype), family.prompts, range(len(LENGTHS)))
        assert hashes == truth, shape
        hashes.clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_chunks_beside_others_and_recomputing_change_no_bit(
    family: Served, tmp_path: Path, hashes: Hashes, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[str] = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, sequence: (preempted.append(sequence.name), preempt(self, sequence)))
    truth = await each_alone(family, tmp_path, hashes, dtype)
    # Prompts 1 to 3 are admitted while the first two hold at most 31 of 53 pages, and would hold 56 in the end.
    for numbers, limits in ((range(len(LENGTHS)), {}), ((1, 2, 3), {"kv_pages": 53, "page_size": 2})):
        graph = write(family, tmp_path, SHAPES["2 micro-batches"], dtype, max_num_batched_tokens=40, **limits)
        await serve(graph, family.prompts, numbers)
        assert hashes == {key: each for key, each in truth.items() if key[0] in numbers}, limits
        hashes.clear()
    assert preempted


async def test_logprobs_and_drawn_tokens_are_the_same_between_real_processes(family: Served, tmp_path: Path) -> None:
    """Logprobs hold the sum over the whole vocabulary. They are compared exactly, without a tolerance."""
    drawn = {"temperature": 1.5, "n": 2, "prompt_logprobs": 3}
    inside = write(family, tmp_path, {}, "bfloat16")
    alone = [output for number in (2, 6) for output in await serve(inside, family.prompts, [number], **drawn)]
    assert [len(each.prompt_logprobs) for each in alone] == [LENGTHS[2] - 1, LENGTHS[6] - 1]
    apart = write(family, tmp_path, {"attention": {"groups": 1}, "experts": {"servers": 2}, "processes": "many"}, "bfloat16")
    together = await serve(apart, family.prompts, range(len(LENGTHS)), **drawn)
    assert alone == [together[2], together[6]]


@pytest.mark.parametrize("deploy", [{}, {"prefill": {"workers": 1}}], ids=["group", "prefill worker"])
async def test_kv_of_the_prefix_cache_has_the_bits_of_a_prompt_alone(
    family: Served, tmp_path: Path, hashes: Hashes, deploy: dict[str, Any]
) -> None:
    long = family.prompts[6]
    prompts = [long, [*long[:70], 5, 6, 7], [*long, *family.prompts[1]], long]
    runs: list[Hashes] = []
    # Of recurrent layers a state is kept where prompts part once two have parted there, and at the end of each.
    shared = 0 if read_model_config(family.directory).recurrent_layers else 64
    for is_cached, num_hits in ((False, 0), (True, shared + 96 + 96)):
        async with flowrt.open(write(family, tmp_path, deploy, enable_prefix_caching=is_cached)) as running:
            for number, prompt in enumerate(prompts):
                await running.complete(prompt, flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=number))
            counts = await running.statistics()
        assert sum(each.num_prefix_hits for each in counts.values()) == num_hits
        runs.append(dict(hashes))
        hashes.clear()
    assert runs[0] == runs[1]
    assert len(runs[0]) == len(prompts) * NEW_TOKENS


@pytest.mark.parametrize("processes", ["one", "many"])
async def test_first_tokens_of_a_strict_prefill_worker_are_exact_before_a_fast_group(
    family: Served, tmp_path: Path, processes: str
) -> None:
    """Its prompts share steps with others, its rows the expert servers with those of the group. The group has other pages and threads."""
    settings: dict[str, Any] = {"logprobs": 5, "prompt_logprobs": 2, "max_tokens": 2}
    inside = write(family, tmp_path, {}, "bfloat16")
    alone = [output for number in (2, 6) for output in await serve(inside, family.prompts, [number], **settings)]
    deploy = {"prefill": {"workers": 1}, "attention": {"numerics": "fast", "groups": 2}, "experts": {"servers": 2}, "processes": processes}
    if processes == "many":
        deploy["attention"] |= {"threads": 2}
    roles = {"attention": {"page_size": 4, "kv_pages": 1024}}
    mixed = write(family, tmp_path, deploy, "bfloat16", roles=roles)
    together = await serve(mixed, family.prompts, range(len(LENGTHS)), **settings)
    for expected, found in zip(alone, (together[2], together[6]), strict=True):
        assert (found.token_ids[0], found.logprobs[0], found.prompt_logprobs) == (
            expected.token_ids[0],
            expected.logprobs[0],
            expected.prompt_logprobs,
        )


async def test_tokens_of_a_strict_group_depend_on_the_kv_of_their_prompt_alone(family: Served, tmp_path: Path, hashes: Hashes) -> None:
    """The fast prefill worker computes one prompt at a time here, so that the KV of each is the same beside others."""
    deploy = {"prefill": {"workers": 1, "numerics": "fast"}, "experts": {"servers": 2}}
    graph = write(family, tmp_path, deploy, roles={"prefill": {"max_num_seqs": 1}})
    async with flowrt.open(graph) as running:
        for number, prompt in enumerate(family.prompts):
            await running.complete(prompt, flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=number))
    truth = dict(hashes)
    hashes.clear()
    await serve(graph, family.prompts, range(len(LENGTHS)))
    assert len(hashes) == len(LENGTHS) * NEW_TOKENS
    assert hashes == truth
