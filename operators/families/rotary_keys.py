"""Reads the rotary positions from config.json, in the older and the newer spelling of its keys. Free of torch."""

from __future__ import annotations

import math
from typing import Any

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.model_config import RotaryConfig

KINDS = ("default", "linear", "yarn", "llama3")
# Kinds that turn a key by an angle that depends on the longest context, not on the key's position alone.
BY_CONTEXT = ("dynamic", "longrope")


def read_rotary(
    file: ConfigFile,
    max_positions: int,
    *,
    default_theta: float = 10000.0,
    interleaved: bool = False,
    partial: tuple[int, float] | None = None,
) -> RotaryConfig:
    """The rotary positions of a model. Newer writers put everything into `rope_parameters`; older ones have `rope_theta` beside
    `rope_scaling`. Scaled kinds are those of transformers; a kind that is not a function of the position alone is refused.
    `partial`: the width of a head of which a part may turn, and the default for the part; None: all of it does.
    """
    key, rope = rope_keys(file)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind in BY_CONTEXT:
        why = "turns keys by the length of the context, and keys in pages are turned once"
        raise file.error(key, f"rope_type {kind!r} {why}; use one of {', '.join(KINDS)}")
    if kind not in KINDS:
        raise file.error(key, f"rope_type {kind!r} is not supported; use one of {', '.join(KINDS)}")
    width = None
    if partial is not None:
        source = rope if rope.has("partial_rotary_factor") else file
        width = int(partial[0] * source.number("partial_rotary_factor", default=partial[1]))
        if not 0 < width <= partial[0] or width % 2:
            raise file.error("partial_rotary_factor", f"turns {width} of the {partial[0]} dimensions of a head; an even part is needed")
    for source in () if partial is not None else (rope, file):
        factor = source.values.get("partial_rotary_factor")
        if factor is not None and factor != 1.0:
            raise file.error("partial_rotary_factor", f"is {factor!r}; only 1.0 is supported")
    theta = (rope if "rope_theta" in rope.values else file).number("rope_theta", default=default_theta)
    scaling = _SCALINGS[kind](file, rope, max_positions) if kind in _SCALINGS else {}
    return RotaryConfig(theta=theta, kind=kind, interleaved=interleaved, width=width, **scaling)


def rope_keys(file: ConfigFile) -> tuple[str, ConfigFile]:
    """The mapping that holds the kind of scaling and its numbers, and its key."""
    key = "rope_scaling" if file.mapping("rope_scaling") else "rope_parameters"
    return key, ConfigFile(file.path, file.mapping(key))


def yarn_mscale(factor: float, weight: float) -> float:
    """How much sharper attention becomes in a context that is `factor` times longer (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def scaled_positions(rotary: RotaryConfig) -> int:
    """The context that YaRN makes of the one before."""
    return int(rotary.original_positions * rotary.factor)


def _linear(file: ConfigFile, rope: ConfigFile, max_positions: int) -> dict[str, Any]:
    return {"factor": rope.number("factor")}


def _llama3(file: ConfigFile, rope: ConfigFile, max_positions: int) -> dict[str, Any]:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise file.error("low_freq_factor", f"is {low}; it must be less than high_freq_factor, {high}")
    return {
        "factor": rope.number("factor"),
        "original_positions": _original_positions(file, rope, max_positions),
        "low_frequency_factor": low,
        "high_frequency_factor": high,
    }


def _yarn(file: ConfigFile, rope: ConfigFile, max_positions: int) -> dict[str, Any]:
    original = _original_positions(file, rope, max_positions)
    factor = rope.number("factor", default=max_positions / original, null=max_positions / original)
    attention_factor = yarn_mscale(factor, 1.0)
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        attention_factor = yarn_mscale(factor, rope.number("mscale")) / yarn_mscale(factor, rope.number("mscale_all_dim"))
    return {
        "factor": factor,
        "attention_factor": rope.number("attention_factor", default=attention_factor, null=attention_factor),
        "original_positions": original,
        "beta_fast": rope.number("beta_fast", default=32.0, null=32.0),
        "beta_slow": rope.number("beta_slow", default=1.0, null=1.0),
        "truncate": rope.flag("truncate", default=True, null=False),
    }


def _original_positions(file: ConfigFile, rope: ConfigFile, max_positions: int) -> int:
    key = "original_max_position_embeddings"
    return (file if key in file.values else rope).integer(key, default=max_positions)


_SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
