"""Writes a checkpoint with weights in 8 bits, smoothed after texts that the model of transformers computes (xDeepServe, section 4.7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flowrt.operators.model_config import ModelError
from flowrt.operators.quantized_checkpoint import Plan, Written, factors, write_quantized

MAX_TOKENS = 2048  # of a text that is run through the model


def quantize_checkpoint(
    model: Path,
    out: Path,
    kept: Literal["int8", "fp8"],
    texts: Sequence[str | tuple[int, ...]],
    on_tensor: Callable[[int, int], None],
) -> Written:
    """Write the checkpoint `model` into the new folder `out`; without texts it is not smoothed. Raises ModelError and OSError, as
    operators.quantized_checkpoint. Texts need transformers."""
    plan = Plan.of(model)
    if texts and not plan.norms:
        raise ModelError(f"{model}: its norms are stored minus one, and are not smoothed; leave out --prompts")
    channels = factors(plan, model, _largest_values(model, plan, texts)) if texts else None
    return write_quantized(model, out, kept, plan, channels, on_tensor)


def _largest_values(model: Path, plan: Plan, texts: Sequence[str | tuple[int, ...]]) -> dict[str, Tensor]:
    """Norm -> the largest magnitude of each channel of its output [H] over the texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(model) if any(isinstance(text, str) for text in texts) else None
    found = {name: torch.zeros(plan.config.hidden_size) for name in plan.norms}

    def note(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            found[name] = torch.maximum(found[name], output.detach().float().abs().flatten(0, -2).amax(0))

        return hook

    for name in plan.norms:
        module.get_submodule(name.removesuffix(".weight")).register_forward_hook(note(name))
    with torch.inference_mode():
        for text in texts:
            token_ids = tokenizer(text).input_ids if isinstance(text, str) else text
            if token_ids:
                module(torch.tensor([token_ids[: min(MAX_TOKENS, plan.config.max_position_embeddings)]]))
    return found
