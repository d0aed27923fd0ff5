"""A random checkpoint, transformers' greedy tokens for it, and graphs over it: what every end-to-end test starts from."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_truth, make_checkpoint, random_prompts
from safetensors.torch import load_file, save_file

import flowrt

NEW_TOKENS = 12
LENGTHS = (1, 3, 17, 33, 64, 100, 150, 200)


@dataclass(frozen=True)
class Served:
    """A model, eight prompts, and what greedy decoding must answer."""

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]

    def poisoned(self, folder: Path) -> int:
        """Makes a copy of the model in which the embedding of a token is NaN that no prompt or answer has. Returns the token."""
        folder.mkdir(exist_ok=True)
        for path in self.directory.iterdir():
            (folder / path.name).symlink_to(path)
        used = {token for tokens in (*self.prompts, *self.expected) for token in tokens}
        token = next(token for token in range(512) if token not in used)
        (weights,) = folder.glob("*.safetensors")
        tensors = load_file(weights)
        tensors["model.embed_tokens.weight"][token] = torch.nan
        weights.unlink()
        save_file(tensors, weights)
        return token

    def write(self, folder: Path, deploy: dict[str, Any] | None = None, **top: Any) -> Path:
        """A graph file over this model."""
        document = {"flowrt": 1, "model": {"path": str(self.directory), "dtype": "float32"}, "deploy": deploy or {}, **top}
        path = folder / "graph.yaml"
        path.write_text(json.dumps(document))
        return path


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own greedy tokens, not stopping at the end of a text."""
    out = model(torch.tensor([prompt]), use_cache=True)
    tokens = [int(out.logits[0, -1].argmax())]
    for _ in range(num_tokens - 1):
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        tokens.append(int(out.logits[0, -1].argmax()))
    return tokens


def make_served(directory: Path, **options: Any) -> Served:
    make_checkpoint(directory, **options)
    truth = load_truth(directory)
    prompts = random_prompts(LENGTHS)
    return Served(directory, prompts, [greedy(truth, prompt, NEW_TOKENS) for prompt in prompts])


async def answers(
    running: flowrt.RunningGraph, prompts: list[list[int]], num_tokens: int = NEW_TOKENS, victim: str = ""
) -> list[list[int]]:
    """The greedy tokens of all prompts, served at the same time; a process may be killed meanwhile."""
    params = flowrt.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    serving = asyncio.gather(*(running.complete(prompt, params) for prompt in prompts))
    if victim:
        await asyncio.sleep(0.05)
        os.kill(running.pids[victim], signal.SIGKILL)
    return [list(each.token_ids) for each in await serving]
