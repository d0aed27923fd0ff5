"""The whole model, slow, in one process: the truth that the fast operators are tested against.

Written to be read beside the model's definition and to share no arithmetic with the fast files: one sequence at a time, no pages,
one head and one expert after another. Only the reading of config and weights is common. Called by tests and by people who doubt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from operators.model_config import ModelConfig, read_model_config
from operators.weights import Checkpoint


class ReferenceModel:
    """One sequence being read: `extend` takes its next tokens. Keys and values seen so far are kept, [tokens, D] per layer and head."""

    def __init__(self, directory: Path, dtype: str | None = None) -> None:
        """`dtype` is the one to load and compute in; None: the checkpoint's own."""
        self.config = read_model_config(Path(directory), dtype)
        self.checkpoint = Checkpoint(Path(directory))
        self._weights: dict[tuple[str, int, int], Tensor] = {}
        self._keys: list[list[Tensor]] = []
        self._values: list[list[Tensor]] = []
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        config = self.config
        empty = self._weight("embedding", config.vocab_size, config.hidden_size).new_zeros(0, config.head_dim)
        self._keys = [[empty] * config.num_kv_heads for _ in range(config.num_layers)]
        self._values = [[empty] * config.num_kv_heads for _ in range(config.num_layers)]

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int]) -> Tensor:
        """logits_TV after each of the sequence's next tokens, in the model's dtype."""
        config = self.config
        embedding = self._weight("embedding", config.vocab_size, config.hidden_size)
        x = torch.stack([embedding[token] for token in token_ids])
        for layer in range(config.num_layers):
            normed = self._norm(x, self._weight("attention_norm", config.hidden_size, layer=layer))
            x = x + self._attention(layer, normed)
            normed = self._norm(x, self._weight("mlp_norm", config.hidden_size, layer=layer))
            x = x + (self._experts(layer, normed) if layer in config.moe_layers else self._dense(layer, normed))
        x = self._norm(x, self._weight("final_norm", config.hidden_size))
        return x @ self._weight("embedding" if config.tie_word_embeddings else "head", config.vocab_size, config.hidden_size).T

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        config = self.config
        head_dim, num_heads, num_kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        rows = (num_heads + 2 * num_kv_heads) * head_dim
        projected = x @ self._weight("qkv", rows, config.hidden_size, layer=layer).T
        if config.attention_bias:
            projected = projected + self._weight("qkv_bias", rows, layer=layer)
        heads = list(projected.split(head_dim, dim=1))
        queries, keys, values = heads[:num_heads], heads[num_heads : num_heads + num_kv_heads], heads[num_heads + num_kv_heads :]
        if config.qk_norm:
            queries = [self._norm(query, self._weight("query_norm", head_dim, layer=layer)) for query in queries]
            keys = [self._norm(key, self._weight("key_norm", head_dim, layer=layer)) for key in keys]
        first = self._keys[layer][0].shape[0]
        for head in range(num_kv_heads):
            self._keys[layer][head] = torch.cat((self._keys[layer][head], self._rotated(keys[head], first)))
            self._values[layer][head] = torch.cat((self._values[layer][head], values[head]))
        mixed = []
        for head, query in enumerate(queries):
            shared = head // (num_heads // num_kv_heads)
            key, value = self._keys[layer][shared], self._values[layer][shared]
            scores = self._rotated(query, first) @ key.T / math.sqrt(head_dim)
            for row in range(scores.shape[0]):
                scores[row, first + row + 1 :] = float("-inf")
            mixed.append(_softmax(scores).to(x.dtype) @ value)
        out = torch.cat(mixed, dim=1) @ self._weight("attention_output", config.hidden_size, num_heads * head_dim, layer=layer).T
        return out + self._weight("attention_output_bias", config.hidden_size, layer=layer) if config.attention_bias else out

    def _rotated(self, x: Tensor, first_position: int) -> Tensor:
        """Each pair (x[i], x[i + D/2]) turned by position / theta^(2i/D), an angle taken in float32 whatever the dtype."""
        half = x.shape[1] // 2
        frequency = 1.0 / self.config.rope_theta ** (torch.arange(half, dtype=torch.float32) * 2 / x.shape[1])
        angle = torch.arange(first_position, first_position + x.shape[0], dtype=torch.float32)[:, None] * frequency[None, :]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[:, :half], x[:, half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=1)

    def _experts(self, layer: int, x: Tensor) -> Tensor:
        config = self.config
        probability = _softmax(x @ self._weight("gate", config.num_experts, config.hidden_size, layer=layer).T)
        rows = []
        for row in range(x.shape[0]):
            best = probability[row].topk(config.num_experts_per_token).indices.tolist()
            share = probability[row, best]
            if config.normalize_topk:
                share = share / share.sum()
            answer = torch.zeros_like(x[row])
            for expert, weight in zip(best, share.to(x.dtype), strict=True):
                gate_up = self._weight("expert_gate_up", 2 * config.expert_width, config.hidden_size, layer=layer, expert=expert)
                down = self._weight("expert_down", config.hidden_size, config.expert_width, layer=layer, expert=expert)
                answer += weight * _gated(x[row], gate_up, down)
            rows.append(answer)
        return torch.stack(rows)

    def _dense(self, layer: int, x: Tensor) -> Tensor:
        config = self.config
        gate_up = self._weight("dense_gate_up", 2 * config.dense_width, config.hidden_size, layer=layer)
        return _gated(x, gate_up, self._weight("dense_down", config.hidden_size, config.dense_width, layer=layer))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.pow(2).mean(dim=-1, keepdim=True) + self.config.norm_epsilon).rsqrt()
        return weight * (wide * scale).to(x.dtype)

    def _weight(self, part: str, *shape: int, layer: int = 0, expert: int = 0) -> Tensor:
        key = (part, layer, expert)
        if key not in self._weights:
            self._weights[key] = self.checkpoint.read_part(self.config, part, shape, layer=layer, expert=expert)
        return self._weights[key]


def reference_logits(directory: Path, token_ids: Sequence[int], dtype: str | None = None) -> Tensor:
    """logits_TV of one sequence."""
    return ReferenceModel(directory, dtype).extend(token_ids)


def reference_generate(
    directory: Path, prompt_ids: Sequence[int], max_new_tokens: int, dtype: str | None = None, *, ignore_eos: bool = False
) -> list[int]:
    """The greedy continuation of a prompt: at most `max_new_tokens` ids, ending with an end-of-sequence id if one comes."""
    model = ReferenceModel(directory, dtype)
    return generate_greedily(model, prompt_ids, max_new_tokens, ignore_eos=ignore_eos)


def generate_greedily(model: ReferenceModel, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """As reference_generate, with a model that is already loaded; what it read before is forgotten."""
    config: ModelConfig = model.config
    model.reset()
    logits = model.extend(prompt_ids)
    generated: list[int] = []
    while len(generated) < max_new_tokens:
        generated.append(int(logits[-1].argmax()))
        if generated[-1] in config.eos_token_ids and not ignore_eos:
            break
        logits = model.extend(generated[-1:])
    return generated


def _softmax(scores: Tensor) -> Tensor:
    """Softmax in float32 at least; the result is not rounded back."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = (wide - wide.amax(dim=-1, keepdim=True)).exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def _gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ down.T
