"""Reads the rotary positions from config.json, in the older and the newer spelling of its keys. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.model_config import RotaryConfig

KINDS = ("default", "linear", "yarn", "llama3")
# Kinds that turn a key by an angle that depends on the longest context, not on the key's position alone.
BY_CONTEXT = ("dynamic", "longrope")


def read_rotary(file: ConfigFile, max_positions: int, *, default_theta: float = 10000.0, interleaved: bool = False) -> RotaryConfig:
    """The rotary positions of a model. Newer writers put everything into `rope_parameters`; older ones have `rope_theta` beside
    `rope_scaling`. Scaled kinds are those of transformers; a kind that is not a function of the position alone is refused.
    """
    key = "rope_scaling" if file.mapping("rope_scaling") else "rope_parameters"
    rope = ConfigFile(file.path, file.mapping(key))
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind in BY_CONTEXT:
        why = "turns keys by the length of the context, and keys in pages are turned once"
        raise file.error(key, f"rope_type {kind!r} {why}; use one of {', '.join(KINDS)}")
    if kind not in KINDS:
        raise file.error(key, f"rope_type {kind!r} is not supported; use one of {', '.join(KINDS)}")
    for source in (rope, file):
        factor = source.values.get("partial_rotary_factor")
        if factor is not None and factor != 1.0:
            raise file.error("partial_rotary_factor", f"is {factor!r}; only 1.0 is supported")
    theta = rope.number("rope_theta", default=0.0) or file.number("rope_theta", default=default_theta)
    if kind == "default":
        return RotaryConfig(theta=theta, interleaved=interleaved)
    if kind == "linear":
        return RotaryConfig(theta=theta, kind="linear", factor=rope.number("factor"), interleaved=interleaved)
    name = "original_max_position_embeddings"
    original = (file if file.has(name) else rope).integer(name, default=max_positions)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise file.error("low_freq_factor", f"is {low}; it must be less than high_freq_factor, {high}")
        return RotaryConfig(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor"),
            original_positions=original,
            low_frequency_factor=low,
            high_frequency_factor=high,
            interleaved=interleaved,
        )
    factor = rope.number("factor", default=max_positions / original)
    return RotaryConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        attention_factor=rope.number("attention_factor", default=_attention_factor(rope.values, factor)),
        original_positions=original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.flag("truncate", default=True),
        interleaved=interleaved,
    )


def yarn_mscale(factor: float, weight: float) -> float:
    """How much sharper attention becomes in a context that is `factor` times longer (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_mscale(factor, float(mscale)) / yarn_mscale(factor, float(mscale_all))
    return yarn_mscale(factor, 1.0)
