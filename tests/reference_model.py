"""Computes the whole model slowly, in one process: the reference that the fast operators are tested against.

It is written to be read beside the model's definition, and shares no arithmetic with the fast files: it computes one sequence, one head
and one expert at a time, without pages. Only the reading of config and weights is shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import LatentConfig, RotaryConfig
from flowrt.operators.weights import Checkpoint


class ReferenceModel:
    """Computes one sequence: `extend` takes its next tokens. Keeps keys and values of past tokens, [tokens, D] per layer and head."""

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
        num_heads = config.num_heads if config.latent is not None else config.num_kv_heads
        value_width = config.latent.value_width if config.latent is not None else config.head_dim
        embedding = self._weight("embedding", config.vocab_size, config.hidden_size)
        self._keys = [[embedding.new_zeros(0, config.head_dim)] * num_heads for _ in range(config.num_layers)]
        self._values = [[embedding.new_zeros(0, value_width)] * num_heads for _ in range(config.num_layers)]
        self._inputs = {layer: list[Tensor]() for layer in config.recurrent_layers}  # of the convolution, all tokens
        self._states: dict[tuple[int, int], Tensor] = {}  # by layer and value head

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int]) -> Tensor:
        """logits_TV after each of the sequence's next tokens, in the model's dtype."""
        config = self.config
        embedding = self._weight("embedding", config.vocab_size, config.hidden_size)
        x = torch.stack([embedding[token] for token in token_ids])
        for layer in range(config.num_layers):
            normed = self._norm(x, self._weight("attention_norm", config.hidden_size, layer=layer))
            x = x + (self._delta_net(layer, normed) if layer in config.recurrent_layers else self._attention(layer, normed))
            normed = self._norm(x, self._weight("mlp_norm", config.hidden_size, layer=layer))
            x = x + (self._experts(layer, normed) if layer in config.moe_layers else self._mlp("dense", config.dense_width, layer, normed))
        x = self._norm(x, self._weight("final_norm", config.hidden_size))
        return (
            x
            @ self._weight(
                "embedding" if config.tie_word_embeddings and not self.checkpoint.has_part(config, "head") else "head",
                config.vocab_size,
                config.hidden_size,
            ).T
        )

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """The greedy continuation of a prompt: at most `max_new_tokens` ids, ending with an end-of-sequence id if one comes.

        Forgets the sequence computed before.
        """
        self.reset()
        logits = self.extend(prompt_ids)
        generated: list[int] = []
        while len(generated) < max_new_tokens:
            generated.append(int(logits[-1].argmax()))
            if generated[-1] in self.config.eos_token_ids and not ignore_eos:
                break
            logits = self.extend(generated[-1:])
        return generated

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        config = self.config
        first = self._keys[layer][0].shape[0]
        if config.latent is None:
            queries, keys, values = self._grouped_heads(layer, x, first)
            scale = config.head_dim**-0.5
        else:
            queries, keys, values = self._latent_heads(layer, x, first, config.latent)
            scale = config.latent.scale
        for head in range(len(keys)):
            self._keys[layer][head] = torch.cat((self._keys[layer][head], keys[head]))
            self._values[layer][head] = torch.cat((self._values[layer][head], values[head]))
        row, column = torch.arange(first, first + x.shape[0]).unsqueeze(1), torch.arange(first + x.shape[0])
        hidden = column > row
        if config.sliding_window is not None:
            hidden |= column <= row - config.sliding_window
        mixed = []
        for head, query in enumerate(queries):
            shared = head // (len(queries) // len(keys))
            key, value = self._keys[layer][shared], self._values[layer][shared]
            scores = (query @ key.T * scale).masked_fill(hidden, float("-inf"))
            mixed.append(_softmax(scores).to(x.dtype) @ value)
        joined = torch.cat(mixed, dim=1)
        if config.attention_gate:
            gates = x @ self._queries_and_gates(layer)[:, config.head_dim :].flatten(0, 1).T
            joined = joined / (1 + (-gates).exp())
        return self._biased(
            joined @ self._weight("attention_output", config.hidden_size, joined.shape[1], layer=layer).T, "attention_output_bias", layer
        )

    def _biased(self, x: Tensor, part: str, layer: int) -> Tensor:
        """x plus its bias, in models with attention biases."""
        return x + self._weight(part, x.shape[1], layer=layer) if self.config.attention_bias else x

    def _grouped_heads(self, layer: int, x: Tensor, first: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Queries, keys and values of the new tokens, head by head."""
        config = self.config
        head_dim, num_heads, num_kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        rows = (num_heads * (2 if config.attention_gate else 1) + 2 * num_kv_heads) * head_dim
        weight = self._weight("qkv", rows, config.hidden_size, layer=layer)
        if config.attention_gate:
            weight = torch.cat((self._queries_and_gates(layer)[:, :head_dim].flatten(0, 1), weight[2 * num_heads * head_dim :]))
        projected = self._biased(x @ weight.T, "qkv_bias", layer)
        if config.clip_qkv is not None:
            projected = projected.clamp(-config.clip_qkv, config.clip_qkv)
        heads = list(projected.split(head_dim, dim=1))
        queries, keys, values = heads[:num_heads], heads[num_heads : num_heads + num_kv_heads], heads[num_heads + num_kv_heads :]
        if config.qk_norm:
            queries = [self._rms_norm(query, self._weight("query_norm", head_dim, layer=layer), config.norm_epsilon) for query in queries]
            keys = [self._rms_norm(key, self._weight("key_norm", head_dim, layer=layer), config.norm_epsilon) for key in keys]
        return [self._rotated(query, first) for query in queries], [self._rotated(key, first) for key in keys], values

    def _latent_heads(self, layer: int, x: Tensor, first: int, latent: LatentConfig) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The same from latents: each head has its own key and value, and all heads share the rotary part of the key."""
        config, num_heads = self.config, self.config.num_heads
        query_rows = num_heads * latent.key_width if latent.query_rank is None else latent.query_rank
        down = self._weight("latent_down", query_rows + latent.page_width, config.hidden_size, layer=layer)
        projected = x @ down.T
        query, latent_and_key = projected.split((query_rows, latent.page_width), dim=1)
        compressed, rotary_key = self._biased(latent_and_key, "kv_down_bias", layer).split((latent.rank, latent.rope_width), dim=1)
        if latent.query_rank is not None:
            query = self._biased(query, "query_down_bias", layer)
            query = self._rms_norm(query, self._weight("query_latent_norm", query_rows, layer=layer), latent.norm_epsilon)
            query = query @ self._weight("query_up", num_heads * latent.key_width, query_rows, layer=layer).T
        compressed = self._rms_norm(compressed, self._weight("kv_latent_norm", latent.rank, layer=layer), latent.norm_epsilon)
        width = latent.nope_width + latent.value_width
        up = compressed @ self._weight("kv_up", num_heads * width, latent.rank, layer=layer).T
        rotary_key = self._rotated(rotary_key, first)
        queries, keys, values = [], [], []
        for head_query, head_up in zip(query.split(latent.key_width, dim=1), up.split(width, dim=1), strict=True):
            plain, turned = head_query.split((latent.nope_width, latent.rope_width), dim=1)
            queries.append(torch.cat((plain, self._rotated(turned, first)), dim=1))
            keys.append(torch.cat((head_up[:, : latent.nope_width], rotary_key), dim=1))
            values.append(head_up[:, latent.nope_width :])
        return queries, keys, values

    def _rotated(self, x: Tensor, first_position: int) -> Tensor:
        """Each pair turned by position * frequency, an angle taken in float32 whatever the dtype. Pairs are (x[i], x[i + D/2]), or
        (x[2i], x[2i + 1]) where the model interleaves them."""
        rotary = self.config.rotary
        x, resting = x[:, : rotary.width], x[:, rotary.width or x.shape[1] :]
        frequency = torch.stack([_frequency(rotary, pair, x.shape[1]) for pair in range(x.shape[1] // 2)])
        angle = torch.arange(first_position, first_position + x.shape[0], dtype=torch.float32)[:, None] * frequency[None, :]
        cos, sin = (angle.cos() * rotary.attention_factor).to(x.dtype), (angle.sin() * rotary.attention_factor).to(x.dtype)
        a, b = (x[:, 0::2], x[:, 1::2]) if rotary.interleaved else x.chunk(2, dim=1)
        turned = a * cos - b * sin, b * cos + a * sin
        return torch.cat((torch.stack(turned, dim=2).flatten(1) if rotary.interleaved else torch.cat(turned, dim=1), resting), dim=1)

    def _queries_and_gates(self, layer: int) -> Tensor:
        """The rows of each head's query, then those of its gate: [N, 2 D, H]."""
        config = self.config
        rows = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        weight = self._weight("qkv", rows, config.hidden_size, layer=layer)
        return weight[: 2 * config.num_heads * config.head_dim].view(config.num_heads, 2 * config.head_dim, -1)

    def _delta_net(self, layer: int, x: Tensor) -> Tensor:
        """Token by token and head by head. The weights of the projections are stored key head by key head."""
        config, delta = self.config, self.config.delta
        assert delta is not None
        shared, num_heads, key_width = delta.num_value_heads // delta.num_key_heads, delta.num_value_heads, delta.key_width
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self._weight("delta_in", delta.conv_width + delta.values_width + 2 * num_heads, config.hidden_size, layer=layer)
        filters = self._weight("delta_conv", delta.conv_width, 1, delta.conv_tokens, layer=layer)[:, 0]
        rate, bias = (self._weight(part, num_heads, layer=layer).to(wide) for part in ("delta_rate", "delta_bias"))
        sizes = [key_width, key_width, shared * delta.value_width, shared * delta.value_width]
        rows = []
        for token in x:
            projected = weight @ token
            main, small = projected.split((delta.conv_width + delta.values_width, 2 * num_heads))
            heads = [head.split(sizes) for head in main.split(sum(sizes))]
            pairs = [head.split(shared) for head in small.split(2 * shared)]
            self._inputs[layer].append(torch.cat([head[kind] for kind in range(3) for head in heads]))
            convolved = torch.zeros_like(self._inputs[layer][-1], dtype=wide)
            for back, past in enumerate(reversed(self._inputs[layer][-delta.conv_tokens :]), 1):
                convolved = convolved + filters[:, -back].to(wide) * past
            convolved = convolved * torch.sigmoid(convolved)
            queries, keys, values = convolved.to(wide).split((delta.keys_width, delta.keys_width, delta.values_width))
            gates = torch.cat([head[3] for head in heads])
            strengths, decays = (torch.cat([pair[kind] for pair in pairs]) for kind in range(2))
            outputs = []
            for head in range(num_heads):
                query, key = (each[head // shared * key_width :][:key_width] for each in (queries, keys))
                query, key = (each / (each.dot(each) + 1e-6).sqrt() for each in (query, key))
                value = values[head * delta.value_width :][: delta.value_width]
                decay = (-rate[head].exp() * torch.log1p((decays[head].to(wide) + bias[head]).exp())).exp()
                state = self._states.get((layer, head), torch.zeros(key_width, delta.value_width, dtype=wide)) * decay
                change = (value - key @ state) * strengths[head].sigmoid().to(wide)
                state = self._states[layer, head] = state + key[:, None] * change
                output = (query / key_width**0.5 @ state).to(x.dtype)
                normed = self._rms_norm(output, self._weight("delta_norm", delta.value_width, layer=layer), config.norm_epsilon)
                gate = gates[head * delta.value_width :][: delta.value_width].to(wide)
                outputs.append((normed * gate * gate.sigmoid()).to(x.dtype))
            rows.append(torch.cat(outputs))
        return torch.stack(rows) @ self._weight("delta_out", config.hidden_size, delta.values_width, layer=layer).T

    def _experts(self, layer: int, x: Tensor) -> Tensor:
        config = self.config
        rows = []
        for row in range(x.shape[0]):
            total = torch.zeros_like(x[row])
            for expert, weight in self._chosen(layer, x[row]):
                gate_up = self._weight("expert_gate_up", 2 * config.expert_width, config.hidden_size, layer=layer, expert=expert)
                down = self._weight("expert_down", config.hidden_size, config.expert_width, layer=layer, expert=expert)
                total += weight.to(x.dtype) * _gated(x[row], gate_up, down)
            rows.append(total)
        routed = torch.stack(rows)
        if not config.shared_expert_width:
            return routed
        shared = self._mlp("shared", config.shared_expert_width, layer, x)
        if config.shared_expert_gate:
            shared = shared * torch.sigmoid(x @ self._weight("shared_gate", 1, config.hidden_size, layer=layer).T)
        return routed + shared

    def _chosen(self, layer: int, row: Tensor) -> list[tuple[int, Tensor]]:
        """The experts of one row, best first, and their weights."""
        config, gate = self.config, self.config.gate
        weight = self._weight("gate", config.num_experts, config.hidden_size, layer=layer)
        wide = torch.promote_types(row.dtype, torch.float32)
        logits = weight.to(wide) @ row.to(wide) if gate.wide else weight @ row
        scores = _softmax(logits) if gate.scores == "softmax" else 1 / (1 + (-logits.to(wide)).exp())
        choosing = scores.tolist()
        if gate.bias:
            choosing = (scores + self._weight("gate_bias", config.num_experts, layer=layer, dtype=wide)).tolist()
        size = config.num_experts // gate.groups
        group_scores = [sum(sorted(choosing[group * size : (group + 1) * size])[-gate.group_best :]) for group in range(gate.groups)]
        allowed = sorted(range(gate.groups), key=group_scores.__getitem__)[-gate.topk_groups :]
        experts = [expert for expert in range(config.num_experts) if expert // size in allowed]
        best = sorted(experts, key=choosing.__getitem__, reverse=True)[: config.num_experts_per_token]
        share = scores[best]
        if gate.normalize is not None:
            share = share / share.pow(gate.normalize).sum().pow(1 / gate.normalize)
        return list(zip(best, share * gate.scale, strict=True))

    def _mlp(self, part: str, width: int, layer: int, x: Tensor) -> Tensor:
        gate_up = self._weight(f"{part}_gate_up", 2 * width, self.config.hidden_size, layer=layer)
        return _gated(x, gate_up, self._weight(f"{part}_down", self.config.hidden_size, width, layer=layer))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of whole rows."""
        if self.config.norm == "layer":
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            wide = wide - wide.mean(dim=-1, keepdim=True)
            return (wide * (wide.pow(2).mean(dim=-1, keepdim=True) + self.config.norm_epsilon).rsqrt() * weight).to(x.dtype)
        return self._rms_norm(x, weight, self.config.norm_epsilon)

    def _rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return weight * (wide * (wide.pow(2).mean(dim=-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)

    def _weight(self, part: str, *shape: int, layer: int = 0, expert: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        key = (part, layer, expert)
        if key not in self._weights:
            self._weights[key] = self.checkpoint.read_part(self.config, part, shape, layer=layer, expert=expert, dtype=dtype)
        return self._weights[key]


def _frequency(rotary: RotaryConfig, pair: int, width: int) -> Tensor:
    """Radians per position of one pair of dimensions out of `width`, in float32."""
    plain = 1.0 / rotary.theta ** (torch.tensor(2 * pair, dtype=torch.float32) / width)
    if rotary.kind == "default":
        return plain
    if rotary.kind == "linear":
        return plain / rotary.factor
    turns = rotary.original_positions * plain.item() / (2 * math.pi)  # full turns within the original context
    if rotary.kind == "llama3":
        share = (turns - rotary.low_frequency_factor) / (rotary.high_frequency_factor - rotary.low_frequency_factor)
    else:
        # The pair, as a real number, that makes beta turns; between the two for beta_slow and beta_fast the share falls linearly.
        quick, slow = (
            math.log(rotary.original_positions / (2 * math.pi * beta)) / math.log(rotary.theta) * width / 2
            for beta in (rotary.beta_fast, rotary.beta_slow)
        )
        if rotary.truncate:
            quick, slow = math.floor(quick), math.ceil(slow)
        quick, slow = max(quick, 0), min(slow, width - 1)
        share = (slow - pair) / (slow - quick) if slow > quick else float(pair <= quick)
    share = min(1.0, max(0.0, share))  # of the pair that is not slowed down
    return plain * share + plain / rotary.factor * (1 - share)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax in float32 at least; the result is not rounded back."""
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def _gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ down.T
