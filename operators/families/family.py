"""Defines the contract of a model family: how its config.json is read, and the names under which its weights are stored.

A family file builds one `Family`. Parts are the pieces of a model under family-independent names; weights.py looks up where the family
stores a part, and reads it. Free of torch. docs/operators.md explains how to add a family, also from another package.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.model_config import LIBRARY_EXPERT, SCALE_BYTES, ModelConfig, ModelError

# The parts, each with the shape that the operators expect after the pieces have been joined along the first dimension.
PARTS: Mapping[str, str] = {
    "embedding": "[V, H]",
    "final_norm": "[H]",
    "head": "[V, H]",
    "attention_norm": "[H], before attention",
    "mlp_norm": "[H], after attention",
    "qkv": "[(N + 2K) * D, H], queries then keys then values; a query may have its gate of as many rows behind it",
    "qkv_bias": "[(N + 2K) * D]",
    "query_norm": "[D]",
    "key_norm": "[D]",
    "attention_output": "[H, N * D]",
    "attention_output_bias": "[H]",
    "latent_down": "[query rows + kv rank + rotary width, H]: query latent (or queries of all heads), latent, rotary key",
    "query_down_bias": "[query rank]",
    "kv_down_bias": "[kv rank + rotary width]",
    "query_latent_norm": "[query rank]",
    "kv_latent_norm": "[kv rank]",
    "query_up": "[N * key width, query rank]",
    "kv_up": "[N * (key width without rotary + value width), kv rank], head by head, keys then values",
    "gate": "[E, H]",
    "gate_bias": "[E], added to scores to choose experts",
    "expert_gate_up": "[2F, H] of one expert, gate rows then up rows",
    "expert_down": "[H, F] of one expert",
    "dense_gate_up": "[2 * dense width, H], gate rows then up rows",
    "dense_down": "[H, dense width]",
    "shared_gate_up": "[2 * shared width, H], gate rows then up rows",
    "shared_down": "[H, shared width]",
    "shared_gate": "[1, H]",
    "delta_in": "[2 * key heads * key width + 2 * value heads * value width + 2 * value heads, H]: queries, keys, values, gates of the "
    "output, strengths, decays; or key head by key head: queries, keys, values and gates, then strengths and decays",
    "delta_conv": "[queries, keys and values, 1, tokens of the convolution]",
    "delta_rate": "[value heads], logarithm of the rate of the decay",
    "delta_bias": "[value heads], of the decay",
    "delta_norm": "[value width]",
    "delta_out": "[H, value heads * value width]",
    "library_body": "[numbers], of all but the routed experts, of a model in transformers",
    LIBRARY_EXPERT: "[numbers] of one expert, of a model in transformers",
}


def part_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes that PARTS describes, in numbers of this model; of an expert part that of one expert."""
    if (library := config.library) is not None:
        return {"library_body": (library.body_elements,), LIBRARY_EXPERT: (library.expert_elements,)}
    hidden, heads, experts = config.hidden_size, config.num_heads, config.num_experts
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("embedding", "head"), (config.vocab_size, hidden)),
        **dict.fromkeys(("final_norm", "attention_norm", "mlp_norm", "attention_output_bias"), (hidden,)),
        "gate": (experts, hidden),
        "gate_bias": (experts,),
    }
    shapes["shared_gate"] = (1, hidden)
    if (delta := config.delta) is not None:
        num_inputs = delta.conv_width + delta.values_width + 2 * delta.num_value_heads
        shapes |= {"delta_in": (num_inputs, hidden), "delta_conv": (delta.conv_width, 1, delta.conv_tokens)}
        shapes |= dict.fromkeys(("delta_rate", "delta_bias"), (delta.num_value_heads,))
        shapes |= {"delta_norm": (delta.value_width,), "delta_out": (hidden, delta.values_width)}
    for kind, width in (("expert", config.expert_width), ("dense", config.dense_width), ("shared", config.shared_expert_width)):
        shapes |= {f"{kind}_gate_up": (2 * width, hidden), f"{kind}_down": (hidden, width)}
    if (latent := config.latent) is None:
        qkv = (heads + 2 * config.num_kv_heads) * config.head_dim
        gates = heads * config.head_dim if config.attention_gate else 0
        shapes |= {"qkv": (qkv + gates, hidden), "qkv_bias": (qkv,), "attention_output": (hidden, heads * config.head_dim)}
        return shapes | dict.fromkeys(("query_norm", "key_norm"), (config.head_dim,))
    queries, key_rows = latent.query_rank or heads * latent.key_width, heads * latent.key_width
    return shapes | {
        "latent_down": (queries + latent.page_width, hidden),
        "query_down_bias": (queries,),
        "kv_down_bias": (latent.page_width,),
        "query_latent_norm": (queries,),
        "kv_latent_norm": (latent.rank,),
        "query_up": (key_rows, queries),
        "kv_up": (heads * (latent.nope_width + latent.value_width), latent.rank),
        "attention_output": (hidden, heads * latent.value_width),
    }


def part_bytes(config: ModelConfig, part: str, shape: tuple[int, ...]) -> int:
    """The bytes in which a process holds a part of this shape."""
    if config.kept(part, shape) == "dtype":
        return prod(shape) * config.item_bytes
    if part == LIBRARY_EXPERT:
        return prod(shape)  # the scales are not known here; they are less than a hundredth
    rows, columns = shape
    if not columns:  # a part that the model lacks
        return 0
    return rows * (columns + SCALE_BYTES * -(-columns // config.scale_group(part, columns)))


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored tensor, or one expert's share of it.

    `name` may hold {layer} and {expert}. `expert` selects how a tensor that holds all experts is cut: "index" takes [expert] of
    its first dimension, "rows" takes the expert's equal share of the rows, None takes the whole tensor. `transpose` swaps the
    two dimensions of what was taken. `added` is added to each number.
    """

    name: str
    expert: Literal["index", "rows"] | None = None
    transpose: bool = False
    added: float = 0.0

    def tensor(self, layer: int, expert: int) -> str:
        """The name of the stored tensor."""
        return self.name.format(layer=layer, expert=expert)


Layout = tuple[Piece, ...]


class About(NamedTuple):
    """What `flowrt models` and the page of models say of a family."""

    models: str
    attention: str
    gate: str
    experts: str


@dataclass(frozen=True, slots=True)
class Family:
    """`name` is the model_type of config.json. `parts` maps a part to the layouts it may have, the first found being taken.

    A layout is the pieces that make up the part when joined along the first dimension. `also` are other model types that mean this
    family; `architectures` are entries of that key by which it is known when a model_type is not.
    """

    name: str
    read_config: Callable[[ConfigFile], ModelConfig]
    parts: Mapping[str, tuple[Layout, ...]]
    also: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    about: About | None = None

    def has_part(self, part: str, names: Container[str], layer: int = 0, expert: int = 0) -> bool:
        """Whether the tensors of a part are all among `names`."""
        return any(all(piece.tensor(layer, expert) in names for piece in layout) for layout in self.parts.get(part, ()))

    def find_layout(self, part: str, layer: int, expert: int, names: Container[str], where: str) -> Layout:
        """The layout whose tensors are all among `names`. Raises ModelError, naming the first missing tensor of `where`."""
        layouts = self.parts.get(part)
        if not layouts:
            raise ModelError(f"model family {self.name} does not define the tensors of part {part!r} ({PARTS.get(part, 'unknown part')})")
        for layout in layouts:
            if all(piece.tensor(layer, expert) in names for piece in layout):
                return layout
        missing = next(name for piece in layouts[0] if (name := piece.tensor(layer, expert)) not in names)
        raise ModelError(f"tensor {missing} ({part}) is missing from {where}; copy the model's files again, or correct config.json")


def parts_to_read(config: ModelConfig) -> dict[str, Iterable[int]]:
    """Part -> the layers of which the operators read it; (0,) for a part of the whole model."""
    if config.library is not None:
        return {"library_body": (0,), LIBRARY_EXPERT: config.moe_layers}
    whole = ["embedding", "final_norm", *([] if config.tie_word_embeddings else ["head"])]
    block = ["attention_output"]
    latent, bias = config.latent, config.attention_bias
    block += ["attention_output_bias"] if bias else []
    if latent is None:
        block += ["qkv", *(["query_norm", "key_norm"] if config.qk_norm else []), *(["qkv_bias"] if bias else [])]
    else:
        block += ["latent_down", "kv_latent_norm", "kv_up", *(["kv_down_bias"] if bias else [])]
        if latent.query_rank is not None:
            block += ["query_latent_norm", "query_up", *(["query_down_bias"] if bias else [])]
    moe = ["gate", "expert_gate_up", "expert_down", *(["gate_bias"] if config.gate.bias else [])]
    moe += ["shared_gate_up", "shared_down"] if config.shared_expert_width else []
    moe += ["shared_gate"] if config.shared_expert_width and config.shared_expert_gate else []
    delta_parts = ("delta_in", "delta_conv", "delta_rate", "delta_bias", "delta_norm", "delta_out") if config.delta is not None else ()
    found: dict[str, Iterable[int]] = dict.fromkeys(whole, (0,))
    found |= dict.fromkeys(("attention_norm", "mlp_norm"), range(config.num_layers))
    found |= dict.fromkeys(block, config.paged_layers) if config.paged_layers else {}
    found |= dict.fromkeys(delta_parts, config.recurrent_layers) | dict.fromkeys(moe, config.moe_layers)
    return found | dict.fromkeys(("dense_gate_up", "dense_down") if config.dense_layers else (), config.dense_layers)


def stored_as(*names: str) -> tuple[Layout, ...]:
    """The common case: one layout of whole tensors."""
    return (tuple(Piece(name) for name in names),)
