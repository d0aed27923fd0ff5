"""The facts of a model that a graph depends on, as plain values, so that the graph package needs no model code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

FindStored = Callable[[], Literal["dtype", "int8", "fp8"]]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """`moe_layers` are the layers with routed experts, in order; the others are dense. `dtype` is the checkpoint's. `eos_token_ids`
    end an answer.

    `shared_experts`: MoE layers also have experts that every row passes through. `in_library`: the module of transformers computes it.
    `stored_expert_weights` reads from its files what the checkpoint holds routed experts in, if flowrt can keep it.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    hidden_size: int
    vocab_size: int
    dtype: str
    num_experts_per_token: int
    shared_experts: bool = False
    in_library: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stored_expert_weights: FindStored = field(default=lambda: "dtype", compare=False)

    @classmethod
    def of(cls, config: Any, stored_expert_weights: FindStored = lambda: "dtype") -> ModelFacts:
        """The facts of any object that has them as attributes, such as flowrt.operators.model_config.ModelConfig."""
        found: dict[str, Any] = {
            "shared_experts": bool(config.shared_expert_width),
            "in_library": config.library is not None,
            "stored_expert_weights": stored_expert_weights,
        }
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls) if field.name not in found}, **found)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in set(self.moe_layers))
