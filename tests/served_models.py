"""A random checkpoint, transformers' greedy tokens for it, and graphs over it: what every end-to-end test starts from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_truth, make_checkpoint, random_prompts

NEW_TOKENS = 12
LENGTHS = (1, 3, 17, 33, 64, 100, 150, 200)


@dataclass(frozen=True)
class Served:
    """A model, eight prompts, and what greedy decoding must answer."""

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]

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
