"""The facts of a small model, for tests that need a model but no weights."""

from __future__ import annotations

from flowrt.graph.facts import ModelFacts

FACTS = ModelFacts(
    num_layers=4,
    moe_layers=(0, 1, 2, 3),
    num_experts=8,
    hidden_size=64,
    vocab_size=256,
    dtype="bfloat16",
    num_experts_per_token=2,
)
