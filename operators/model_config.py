"""Defines ModelConfig: the facts of a model, read from config.json and generation_config.json.

Free of torch, so that the parent process, the planner and the checks of a graph can import it. One file per family (families/) defines
the meaning of the keys of config.json; weights.py reads the weights.

Legend of shape suffixes, one for the whole folder (README.md explains them): T rows (tokens) of a step, S sequences, H hidden,
N query heads, K key/value heads, D head width, E experts, A active experts per row (top-k), P (row, slot) pairs, R rows of a
part, F expert width, V vocabulary, G pages of a sequence, C tokens of a page, L context length, B replicas of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypedDict

KeptWeights = Literal["dtype", "int8", "fp8"]  # `dtype`: that of the model
DtypeOrInt8 = Literal["dtype", "int8"]
KEPT_ROWS = 16  # a matrix in 8 bits has a multiple of so many
KEPT_COLUMNS = 4  # and of so many columns, for rows that become INT8
SCALE_BYTES = 4  # of such a matrix, and of a row of KV
EXPERT_PARTS = ("expert_gate_up", "expert_down")  # the two matrices of an expert
LIBRARY_EXPERT = "library_expert"  # all of an expert of a model in transformers
KEPT_PARTS = (  # the other matrices that can be held in 8 bits
    *("qkv", "attention_output", "latent_down", "query_up", "delta_in", "delta_out", "head"),
    *("dense_gate_up", "dense_down", "shared_gate_up", "shared_down"),
)
DTYPES = ("float32", "bfloat16", "float16", "float64")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int8": 1}
STATE_ALIGNMENT = 64  # bytes between the tensors of a state are multiples of this


class HeldIn(TypedDict, total=False):
    """What weights and KV are held in: the fields of a ModelConfig with these names, which say what they are."""

    weights: KeptWeights
    expert_weights: KeptWeights
    kv_cache: DtypeOrInt8
    activations: DtypeOrInt8


class ModelError(ValueError):
    """A model directory that cannot be served. Its one-line message gives the error, its place and the expected value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryConfig:
    """How positions rotate queries and keys (rotary.py has the formulas).

    `kind` names a scaling that is a pure function of the position.
    `attention_factor` multiplies cosines and sines. `original_positions` is
    the context length before scaling. `interleaved` pairs dimensions (2i, 2i + 1) instead of (i, i + D/2).
    `width`: only so many of the first dimensions of a head turn; None: all.
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
    width: int | None = None


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
class DeltaConfig:
    """Layers with a gated delta net in place of attention (Gated Delta Networks, section 3; gated_delta.py has the formulas).

    Each of the `num_value_heads` has a state of `key_width` times `value_width` numbers. A query and a key serve equally many of them.
    Queries, keys and values pass through a convolution over the last `conv_tokens` tokens. `by_key_head`: the weights of the projections
    are stored key head by key head.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_width: int
    value_width: int
    conv_tokens: int
    by_key_head: bool = False

    @property
    def keys_width(self) -> int:
        return self.num_key_heads * self.key_width

    @property
    def values_width(self) -> int:
        return self.num_value_heads * self.value_width

    @property
    def conv_width(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.keys_width + self.values_width


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
class LibraryConfig:
    """A model that runs through the module of transformers, cut at its experts (library_model.py).

    `kv_widths`: the numbers of the two tensors that a layer caches of a token, in the layer with the most: keys and values, or latents
    and rotary keys; behind them the keys of an indexer, which chooses `index_tokens` of a context for attention. `body_elements`: weights
    besides those of routed experts; `expert_elements`: those of one expert of one layer. `recurrent_layers` keep states of a sequence in
    place of that: `states` are shape and whether it is wide, float32 in a narrower model.
    """

    kv_widths: tuple[int, int]
    body_elements: int
    expert_elements: int
    recurrent_layers: tuple[int, ...] = ()
    states: tuple[tuple[tuple[int, ...], bool], ...] = ()
    index_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The facts of a model that operators, planner and graph checks use, in names that belong to no family.

    `dtype` is the type that weights are held and products are computed in; it starts as the checkpoint's own and `with_dtype`
    changes it. `moe_layers` are the layers with experts, in order; the others hold a dense MLP of `dense_width`. With `latent`
    attention `num_kv_heads` is 1 and `head_dim` is the width of an expanded key. Queries, keys and values are clipped to
    +-`clip_qkv`; a row sees the last `sliding_window` tokens, itself among them. MoE layers add an MLP of `shared_expert_width`
    that every row goes through. `wide_norms`: norms of rows round once, behind the product with their weights. The layers of `delta` have
    no attention. `attention_gate`: each query has a gate, whose sigmoid multiplies what its head gives; `shared_expert_gate`: each row has
    one for its shared experts. With `library` the module of transformers computes all but the products of experts, and of the fields about
    attention, gate and shared experts none says anything. `expert_weights`: what the weights of routed experts are held in;
    `weights`: those of the other large matrices; `kv_cache`: keys and values; `activations`: what rows become before products with
    weights in INT8. `stored_group`: the form of a checkpoint in 8 bits whose
    scales belong to so many columns; None: each belongs to a row, or there are none.
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
    delta: DeltaConfig | None = None
    library: LibraryConfig | None = None
    weights: KeptWeights = "dtype"
    expert_weights: KeptWeights = "dtype"
    kv_cache: DtypeOrInt8 = "dtype"
    activations: DtypeOrInt8 = "dtype"
    stored_group: tuple[KeptWeights, int] | None = None
    attention_gate: bool = False
    shared_expert_gate: bool = False
    shared_expert_width: int = 0
    norm: Literal["rms", "layer"] = "rms"
    wide_norms: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    clip_qkv: float | None = None
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers without experts, in order."""
        moe = frozenset(self.moe_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in moe)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers with a state of fixed size per sequence, in order."""
        if self.library is not None:
            return self.library.recurrent_layers
        return () if self.delta is None else self.delta.layers

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values of each token in pages, in order."""
        recurrent = frozenset(self.recurrent_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in recurrent)

    @property
    def kv_elements(self) -> int:
        """Numbers that the KV of one token has, in all layers."""
        return len(self.paged_layers) * self.kv_width

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV of one token takes, in all layers."""
        return len(self.paged_layers) * self.layer_kv_bytes

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes that one token takes in the pages of one layer."""
        return self.num_kv_heads * sum(self.page_columns) * _ITEM_BYTES[self.page_dtype]

    @property
    def state_tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """dtype and shape of each tensor of the state that a recurrent layer keeps of a sequence: for a gated delta net, its last inputs to
        the convolution, and the states of its heads."""
        wide = "float64" if self.dtype == "float64" else "float32"
        if self.library is not None:
            return tuple((wide if is_wide else self.dtype, shape) for shape, is_wide in self.library.states)
        if (delta := self.delta) is None:
            return ()
        heads = (delta.num_value_heads, delta.key_width, delta.value_width)
        return (self.dtype, (delta.conv_tokens - 1, delta.conv_width)), (wide, heads)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence in one recurrent layer."""
        return sum(_aligned(_ITEM_BYTES[dtype] * prod(shape)) for dtype, shape in self.state_tensors)

    @property
    def has_shared_pages(self) -> bool:
        """Whether one tensor of a page holds all that a token stores."""
        return self.latent is not None or self.library is not None

    @property
    def page_widths(self) -> tuple[int, int]:
        """Numbers of a head of a token in the pages: of its key and its value, or of the two parts of shared pages, which have one head."""
        if self.library is not None:
            return self.library.kv_widths
        return (self.head_dim, self.head_dim) if self.latent is None else (self.latent.rank, self.latent.rope_width)

    @property
    def kv_width(self) -> int:
        """Numbers that one token stores in the pages of one layer."""
        first, second = self.page_widths
        return self.num_kv_heads * (first + second)

    @property
    def page_dtype(self) -> str:
        """The dtype of the pages."""
        return self.dtype if self.kv_cache == "dtype" else "int8"

    @property
    def page_columns(self) -> tuple[int, int]:
        """Columns of `page_dtype` that the two `page_widths` take. Kept as INT8, each has its scale behind it; the part of a latent that
        depends on the position stays as it is, as bytes."""
        first, second = self.page_widths
        if self.kv_cache == "dtype":
            return first, second
        return int8_columns(first), int8_columns(second) if self.latent is None else second * self.item_bytes

    def kept(self, part: str, shape: tuple[int, ...]) -> KeptWeights:
        """What a part of this shape is held in."""
        if part in EXPERT_PARTS or part == LIBRARY_EXPERT:
            return self.expert_weights
        return self.weights if part in KEPT_PARTS and shape[0] % KEPT_ROWS == 0 else "dtype"

    def scale_group(self, part: str, columns: int) -> int:
        """Columns of a matrix in 8 bits that share a scale of their row: all, or as many as in the checkpoint, whose experts are kept."""
        if part not in EXPERT_PARTS or self.stored_group is None or self.stored_group[0] != self.expert_weights:
            return columns
        return min(columns, self.stored_group[1])

    def with_dtype(self, dtype: str) -> ModelConfig:
        """The same model held and computed in `dtype`, one of DTYPES."""
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        return replace(self, dtype=dtype)


def int8_columns(width: int) -> int:
    """Bytes of a row of `width` numbers as INT8, with its scale behind them, which is aligned."""
    return -(-width // SCALE_BYTES) * SCALE_BYTES + SCALE_BYTES


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
