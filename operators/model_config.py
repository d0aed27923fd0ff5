"""Defines ModelConfig: the facts of a model, read from config.json and generation_config.json.

Free of torch, so that the parent process, the planner and the checks of a graph can import it. One file per family (families/) defines
the meaning of the keys of config.json; weights.py reads the weights.

Legend of shape suffixes, one for the whole folder (README.md explains them): T rows (tokens) of a step, S sequences, H hidden,
N query heads, K key/value heads, D head width, E experts, A active experts per row (top-k), P (row, slot) pairs, R rows of a
part, F expert width, V vocabulary, G pages of a sequence, C tokens of a page, L context length, B replicas of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

DTYPES = ("float32", "bfloat16", "float16", "float64")


class ModelError(ValueError):
    """A model directory that cannot be served. Its one-line message gives the error, its place and the expected value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryConfig:
    """How positions rotate queries and keys (rotary.py has the formulas).

    `kind` names a scaling that is a pure function of the position.
    `attention_factor` multiplies cosines and sines. `original_positions` is
    the context length before scaling. `interleaved` pairs dimensions (2i, 2i + 1) instead of (i, i + D/2).
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "yarn", "llama3"] = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig:
    """Attention over compressed keys and values (DeepSeek-V2, section 2.1): per token one latent and one rotary key for all heads.

    `query_rank` None: queries are projected in one step. A head's key is `nope_width` from the latent and the `rope_width` rotary
    key. `scale` multiplies the scores; `norm_epsilon` is that of the two inner norms.
    """

    query_rank: int | None
    rank: int
    nope_width: int
    rope_width: int
    value_width: int
    scale: float
    norm_epsilon: float = 1e-6

    @property
    def key_width(self) -> int:
        """Width of a head's key, when it is expanded."""
        return self.nope_width + self.rope_width

    @property
    def page_width(self) -> int:
        """Width of a token in the pages: the latent and the rotary key."""
        return self.rank + self.rope_width


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """How a row's experts and weights follow from the gate's logits (gate.py).

    `bias`: a stored number per expert is added to the scores to choose, not to weigh. Only experts of the best `topk_groups` of
    `groups` equal groups are chosen, a group being ranked by the sum of its `group_best` best scores. `normalize`: weights are divided by
    their p-norm for this p (1: by their sum); None: they are left alone. Then `scale` multiplies them. `wide`: logits are
    products in float32, whatever the model's dtype.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    bias: bool = False
    groups: int = 1
    topk_groups: int = 1
    group_best: int = 1
    normalize: float | None = None
    scale: float = 1.0
    wide: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The facts of a model that operators, planner and graph checks use, in names that belong to no family.

    `dtype` is the type that weights are held and products are computed in; it starts as the checkpoint's own and `with_dtype`
    changes it. `moe_layers` are the layers with experts, in order; the others hold a dense MLP of `dense_width`. With `latent`
    attention `num_kv_heads` is 1 and `head_dim` is the width of an expanded key. Queries, keys and values are clipped to
    +-`clip_qkv`; a row sees the last `sliding_window` tokens, itself among them. MoE layers add an MLP of `shared_expert_width`
    that every row goes through.
    """

    family: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_token: int
    expert_width: int
    dense_width: int
    moe_layers: tuple[int, ...]
    norm_epsilon: float
    max_position_embeddings: int
    rotary: RotaryConfig = RotaryConfig()
    gate: GateConfig = GateConfig()
    latent: LatentConfig | None = None
    shared_expert_width: int = 0
    norm: Literal["rms", "layer"] = "rms"
    qk_norm: bool = False
    attention_bias: bool = False
    clip_qkv: float | None = None
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers without experts, in order."""
        moe = frozenset(self.moe_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in moe)

    @property
    def kv_elements(self) -> int:
        """Numbers that the KV of one token has, in all layers."""
        return self.num_layers * self.kv_width

    @property
    def kv_width(self) -> int:
        """Numbers that one token stores in the pages of one layer."""
        return self.latent.page_width if self.latent is not None else 2 * self.num_kv_heads * self.head_dim

    def with_dtype(self, dtype: str) -> ModelConfig:
        """The same model held and computed in `dtype`, one of DTYPES."""
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        return replace(self, dtype=dtype)
