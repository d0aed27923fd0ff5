"""Makes the proofs of strict blocks (row_blocks.py): runs every row function of a module once, on random rows.

`prove` takes a loaded module. `prove_model` takes a model directory and reads the first layer of each kind, for `flowrt doctor --model`.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrt.operators.attention import MixedLayers, attention_for
from flowrt.operators.attention_block import TokenMixer
from flowrt.operators.dense import DenseMlp, SharedExperts
from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.gate import Gate
from flowrt.operators.head import Head
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import ModelConfig, ModelError
from flowrt.operators.row_blocks import PROOF_ROWS, StrictBlocks
from flowrt.operators.state_slots import NO_STATE
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint, torch_dtype


@lru_cache(maxsize=8)
def blocks_of(config: ModelConfig, num_threads: int) -> StrictBlocks:
    """The blocks of a model, shared by the workers of an OS process. A proof depends only on shapes, dtype and number of threads."""
    return StrictBlocks()


@torch.inference_mode()
def prove(
    module: TokenMixer[Any] | MixedLayers | Gate | DenseMlp | SharedExperts | Experts | Head,
    config: ModelConfig,
    device: torch.device | str = "cpu",
) -> None:
    """Runs the functions of the module once on PROOF_ROWS rows. Raises ModelError when no block size passes the proof on this machine."""
    x_TH = _drawn_rows(config, device)
    match module:
        case Experts():
            module.prove()
        case Head():
            module.forward(x_TH, torch.arange(PROOF_ROWS, device=device))
        case Gate():
            module.forward(config.moe_layers[0], x_TH)
        case DenseMlp():
            if config.dense_layers:
                module.forward(config.dense_layers[0], x_TH, x_TH)
        case SharedExperts():
            module.forward(config.moe_layers[0], x_TH, x_TH)
        case _:
            states = [(NO_STATE, 0)] if config.recurrent_layers else []
            layout = StepLayout.from_lists([PROOF_ROWS], [PROOF_ROWS], [[0]], PROOF_ROWS, device, states)
            for kind in module.kinds if isinstance(module, MixedLayers) else (module,):
                kind.forward(kind.layers[0], x_TH, layout, KvPages.for_model(config, 1, PROOF_ROWS, device, num_slots=1))


def prove_model(directory: Path, dtype: str | None = None) -> StrictBlocks:
    """The blocks that strict numerics use for this model on this machine, with the current number of torch threads."""
    config, checkpoint, blocks = read_model_config(directory, dtype), Checkpoint(directory), StrictBlocks()
    if config.library is not None:
        raise ModelError("the modules of transformers compute rows of a batch together")
    first = [layer for layers in (config.paged_layers, config.recurrent_layers) for layer in layers[:1]]
    prove(attention_for(config, checkpoint, first, blocks=blocks), config)
    prove(Gate(config, checkpoint, config.moe_layers[:1], blocks=blocks), config)
    prove(DenseMlp(config, checkpoint, config.dense_layers[:1], blocks=blocks), config)
    if config.shared_expert_width:
        prove(SharedExperts(config, checkpoint, config.moe_layers[:1], blocks=blocks), config)
    prove(Experts(config, checkpoint, {}, blocks=blocks), config)
    prove(Head(config, checkpoint, blocks=blocks), config)
    return blocks


def _drawn_rows(config: ModelConfig, device: torch.device | str) -> Tensor:
    generator = torch.Generator().manual_seed(config.hidden_size + 1)
    return torch.randn((PROOF_ROWS, config.hidden_size), generator=generator).to(device, torch_dtype(config))
