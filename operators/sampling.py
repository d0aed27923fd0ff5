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
FIRST_DEPTH = 256  # how many of the best tokens are looked at first when filters are on


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
    of the logits. It waits for the device a few times; what it returns is read right after.
    """
    token_S = logits_SV.argmax(dim=-1)
    filtered_S = (top_k_S > 0) | (top_p_S < 1)
    drawn_S = temperature_S > 0
    for rows, find in (((drawn_S & filtered_S), filtered_candidates), ((drawn_S & ~filtered_S), _all_candidates)):
        index = rows.nonzero().flatten()
        if index.numel():
            ids, scaled = find(logits_SV[index], temperature_S[index], top_k_S[index], top_p_S[index])
            best = gumbel_noise(seed_S[index], choice_S[index], token_index_S[index], ids).add_(scaled).argmax(dim=-1, keepdim=True)
            token_S[index] = ids.expand_as(scaled).gather(1, best).squeeze(1)
    chosen_S = logits_SV.gather(1, token_S.unsqueeze(1)).squeeze(1)
    return token_S, (chosen_S - logits_SV.logsumexp(dim=-1)).float()


def _all_candidates(logits_SV: Tensor, temperature_S: Tensor, _top_k: Tensor, _top_p: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.arange(logits_SV.shape[1], device=logits_SV.device).unsqueeze(0)
    return ids, logits_SV.double().div_(temperature_S.double().unsqueeze(1))


def filtered_candidates(logits_SV: Tensor, temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor) -> tuple[Tensor, Tensor]:
    """(vocabulary ids, their logits over the temperature in float64, those that the filters drop being -inf), each [S, depth].

    Filters leave few of many tokens, so only the best `depth` are sorted, and more only if what is kept reaches the last of them.
    """
    num_tokens = logits_SV.shape[1]
    temperature_S1, top_p_S1 = temperature_S.double().unsqueeze(1), top_p_S.double().unsqueeze(1)
    limited_S1 = (top_k_S > 0).unsqueeze(1)
    last_rank_S1 = torch.where(limited_S1, top_k_S.long().unsqueeze(1), 1).clamp(max=num_tokens) - 1
    total_S1 = (logits_SV.double() / temperature_S1).logsumexp(dim=-1, keepdim=True) if not bool(limited_S1.all()) else None
    depth = min(num_tokens, max(FIRST_DEPTH, 2 * int(last_rank_S1.max())))
    while True:
        best, ids = logits_SV.topk(depth, dim=-1)
        scaled = best.double() / temperature_S1
        cutoff_S1 = torch.where(limited_S1, scaled.gather(1, last_rank_S1), float("-inf"))
        kept = scaled.masked_fill(scaled < cutoff_S1, float("-inf"))
        kept_total_S1 = kept.logsumexp(dim=-1, keepdim=True)
        probability = (kept - (kept_total_S1 if total_S1 is None else torch.where(limited_S1, kept_total_S1, total_S1))).exp()
        before = probability.cumsum(dim=-1) - probability  # the mass of the better ones: the token that reaches top_p is kept
        num_kept_S1 = (before < top_p_S1).sum(dim=-1, keepdim=True).clamp(min=1)
        nucleus_S1 = scaled.gather(1, num_kept_S1 - 1).maximum(cutoff_S1)
        cutoff_S1 = torch.where(top_p_S1 < 1, nucleus_S1, cutoff_S1)
        if depth == num_tokens or bool((scaled[:, -1:] < cutoff_S1).all()):
            return ids, scaled.masked_fill(scaled < cutoff_S1, float("-inf"))
        depth = min(num_tokens, 8 * depth)


def gumbel_noise(seed_S: Tensor, choice_S: Tensor, token_index_S: Tensor, ids_SN: Tensor) -> Tensor:
    """Standard Gumbel noise in float64, [S, N], for the vocabulary ids in `ids_SN` ([1, N] where all rows have the same)."""
    key_S = torch.zeros_like(seed_S, dtype=torch.int64)
    for number_S in (seed_S, choice_S, token_index_S):
        key_S = _mix(key_S + number_S.long() + _STEP)
    bits_SN = _shift_right(_mix((ids_SN + 1) * _STEP + key_S.unsqueeze(1)), 12)
    uniform_SN = bits_SN.double().add_(0.5).mul_(2.0**-52)  # 52 bits and a half: never 0, never 1
    return uniform_SN.log_().neg_().log_().neg_()


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer: a bijection of 64-bit words in which every input bit moves every output bit. In place."""
    bits.bitwise_xor_(_shift_right(bits, 30)).mul_(_FIRST)
    bits.bitwise_xor_(_shift_right(bits, 27)).mul_(_SECOND)
    return bits.bitwise_xor_(_shift_right(bits, 31))


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
