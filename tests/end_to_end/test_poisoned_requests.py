"""A request that its model cannot be computed for: it ends with an error, and neither the others nor the processes suffer.

One token of the vocabulary has an embedding of NaN. A `sitecustomize` makes the real processes fail, die or hang on rows with NaN:
expert servers here, attention groups in test_group_failover.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from served_models import Served

import flowrt
from flowrt.launcher import events

OF_EXPERTS = {"raise": "raise MemoryError('no room for this part')", "die": "os.abort()"}
OF_ATTENTION = {"abort": "os.abort()", "hang": "time.sleep(3600)"}
CUSTOM = """
import os, time
from flowrt.operators.attention_block import AttentionBlock
from flowrt.operators.experts import Experts

def poisoned(function):
    def run(self, layer, x_RH, *more, **options):
        if x_RH.isnan().any():
            {fault}
        return function(self, layer, x_RH, *more, **options)
    return run

"""
POISON_EXPERTS = "Experts.forward, Experts.forward_pairs = poisoned(Experts.forward), poisoned(Experts.forward_pairs)\n"
POISON_ATTENTION = "AttentionBlock.forward = poisoned(AttentionBlock.forward)\n"
NUM_SERVERS = 3
PARAMETERS = flowrt.SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def poison(served: Served, tmp_path: Path) -> tuple[Path, list[int]]:
    """The served model with a poisoned token, and a prompt that ends with it."""
    directory = tmp_path / "poisoned"
    directory.mkdir()
    for path in served.directory.iterdir():
        (directory / path.name).symlink_to(path)
    used = {token for tokens in (*served.prompts, *served.expected) for token in tokens}
    token = next(token for token in range(512) if token not in used)
    (weights,) = directory.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][token] = torch.nan
    weights.unlink()
    save_file(tensors, weights)
    return directory, [*served.prompts[1], token]


@pytest.fixture
def fail_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def write(fault: str) -> None:
        folder = tmp_path / "custom"
        folder.mkdir()
        poison = POISON_EXPERTS if fault in OF_EXPERTS else POISON_ATTENTION
        (folder / "sitecustomize.py").write_text(CUSTOM.format(fault=(OF_EXPERTS | OF_ATTENTION)[fault]) + poison)
        monkeypatch.syspath_prepend(folder)

    return write


async def run(served: Served, tmp_path: Path, poison: tuple[Path, list[int]], seen_events: list[events.Event]) -> flowrt.Completion:
    """The poisoned request among good ones, which must be answered exactly, and one more when it has ended. Returns its completion."""
    directory, prompt = poison
    deploy = {"attention": {"groups": 1, "micro_batches": 2}, "experts": {"servers": NUM_SERVERS, "replicas": 2}}
    graph = served.write(tmp_path, deploy, limits={"max_tokens": 64}, numerics="strict")
    async with asyncio.timeout(100), flowrt.open(graph, model=directory, on_event=seen_events.append) as running:
        good = [asyncio.create_task(running.complete(each, PARAMETERS)) for each in served.prompts[:4]]
        bad = await running.complete(prompt, PARAMETERS)
        done = [*await asyncio.gather(*good), await running.complete(served.prompts[0], PARAMETERS)]
    for each, expected in zip(done, [*served.expected[:4], served.expected[0]], strict=True):
        assert each.error is None
        assert list(each.token_ids) == expected[:24]
    assert bad.finish_reason == "error"
    assert bad.error is not None
    return bad


async def test_a_part_that_cannot_be_computed_ends_its_request_and_no_process(
    served: Served, tmp_path: Path, poison: tuple[Path, list[int]], fail_with: Callable[[str], None]
) -> None:
    fail_with("raise")
    seen_events: list[events.Event] = []
    bad = await run(served, tmp_path, poison, seen_events)
    assert "a step of this request failed twice: experts." in (bad.error or "")
    assert "MemoryError: no room for this part" in (bad.error or "")
    assert not [event for event in seen_events if isinstance(event, events.WorkerLost)]


async def test_a_request_whose_parts_kill_servers_is_ended(
    served: Served, tmp_path: Path, poison: tuple[Path, list[int]], fail_with: Callable[[str], None]
) -> None:
    fail_with("die")
    seen_events: list[events.Event] = []
    bad = await run(served, tmp_path, poison, seen_events)
    lost = [event.name for event in seen_events if isinstance(event, events.WorkerLost)]
    assert bad.error == f"{lost[-1]} was killed by SIGABRT while it computed this request alone; the request is not tried again"
    assert 2 <= len(lost) <= NUM_SERVERS + 1, "among others it ends each server that gets a part with its row; alone one"
