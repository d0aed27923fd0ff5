"""From logits to tokens: greedy, or drawn with temperature, top-k and top-p. Called by the worker that ends a step.

The noise of a draw is a pure function of (seed, choice, token index, vocabulary id): it does not depend on the batch, the row, the
device or on what was drawn before, so that a token replayed after a failure is the same token. Noise is added to the logits and
the largest sum wins (Gumbel-max), which draws exactly from the softmax of what the filters leave.
"""

from __future__ import annotations

import torch
from torch import Tensor

# SplitMix64: its step and the two multipliers of its finalizer, as signed 64-bit numbers (products wrap, as they must).
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def sample(
    logits_SV: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    seed_S: Tensor,
    choice_S: Tensor,
    token_index_S: Tensor,
) -> tuple[Tensor, Tensor]:
    """(token_S int64, logprob_S float32), the logprob being the token's under the unchanged logits.

    temperature 0 takes the largest logit. top_k 0 and top_p 1 are off. top_k comes first; both keep every token that ties with the last
    one they keep, so that equal logits (frequent in bfloat16) are not cut in an order that nobody defined. `seed_S`, `choice_S`
    (which of a request's n answers) and `token_index_S` (index among the generated tokens) are int64. All tensors are on the device
    of the logits. One wait for the device.
    """
    token_S = logits_SV.argmax(dim=-1)
    drawn = (temperature_S > 0).nonzero().flatten()
    if drawn.numel():
        scaled = logits_SV.index_select(0, drawn).double() / temperature_S[drawn].double().unsqueeze(1)
        kept = filter_logits(scaled, top_k_S[drawn], top_p_S[drawn])
        noise = gumbel_noise(seed_S[drawn], choice_S[drawn], token_index_S[drawn], logits_SV.shape[1])
        token_S[drawn] = noise.add_(kept).argmax(dim=-1)
    chosen_S = logits_SV.gather(1, token_S.unsqueeze(1)).squeeze(1)
    return token_S, (chosen_S - logits_SV.logsumexp(dim=-1)).float()


def filter_logits(scaled_SV: Tensor, top_k_S: Tensor, top_p_S: Tensor) -> Tensor:
    """The logits that top-k, then top-p keep; all others are -inf."""
    num_tokens = scaled_SV.shape[1]
    rank_S = torch.where(top_k_S > 0, top_k_S, num_tokens).clamp(max=num_tokens).long().unsqueeze(1) - 1
    deepest = int(rank_S.max())
    if bool((top_p_S < 1).any()):
        sorted_SV = scaled_SV.sort(dim=-1, descending=True).values
        cutoff_S1 = sorted_SV.gather(1, rank_S)
        probability = sorted_SV.masked_fill(sorted_SV < cutoff_S1, float("-inf")).softmax(dim=-1)
        before = probability.cumsum(dim=-1) - probability  # the mass of the better ones: the token that reaches top_p is kept
        num_kept_S1 = (before < top_p_S.double().unsqueeze(1)).sum(dim=-1, keepdim=True).clamp(min=1)
        nucleus_S1 = sorted_SV.gather(1, num_kept_S1 - 1).maximum(cutoff_S1)
        cutoff_S1 = torch.where(top_p_S.unsqueeze(1) < 1, nucleus_S1, cutoff_S1)
    elif deepest + 1 < num_tokens:
        cutoff_S1 = scaled_SV.topk(deepest + 1, dim=-1).values.gather(1, rank_S)
    elif bool((top_k_S > 0).any()):
        cutoff_S1 = scaled_SV.sort(dim=-1, descending=True).values.gather(1, rank_S)
    else:
        return scaled_SV
    return scaled_SV.masked_fill(scaled_SV < cutoff_S1, float("-inf"))


def gumbel_noise(seed_S: Tensor, choice_S: Tensor, token_index_S: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise, [S, V] float64: row s is a function of seed, choice and token index alone."""
    key_S = _mix(_mix(_mix(seed_S.long() + _STEP) + choice_S.long() + _STEP) + token_index_S.long() + _STEP)
    counter_V = torch.arange(1, num_tokens + 1, device=key_S.device) * _STEP
    bits_SV = _shift_right(_mix(key_S.unsqueeze(1) + counter_V), 12)
    uniform_SV = bits_SV.double().add_(0.5).mul_(2.0**-52)  # 52 bits and a half: never 0, never 1
    return uniform_SV.log_().neg_().log_().neg_()


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer: a bijection of 64-bit words in which every input bit moves every output bit."""
    bits = (bits ^ _shift_right(bits, 30)) * _FIRST
    bits = (bits ^ _shift_right(bits, 27)) * _SECOND
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
