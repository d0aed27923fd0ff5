"""Turns logits into tokens, greedily or by drawing with masks, penalties, temperature, top-k, top-p and min-p, and computes logprobs.

The noise of a draw is a pure function of (seed, choice, token index, vocabulary id). It does not depend on the batch, the row, the device
or earlier draws, so a token that is replayed after a failure is the same token. Noise is added to the logits and the largest sum wins
(Gumbel-max). This draws exactly from the softmax of the tokens that pass the filters.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrt.operators.sampling_inputs import SamplingInputs

# SplitMix64: its step and the two multipliers of its finalizer, as signed 64-bit numbers (products wrap, as they must).
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
FIRST_DEPTH = 256  # number of best tokens that filters sort at first
ROUGH_MARGIN = 2.0  # twice the largest error of a sum with rough noise
NO_TOKEN = -1  # stands for a token whose logits are not finite
MIN_TEMPERATURE = 0.01  # smaller ones that are not 0 count as this, as in vLLM: logits over the temperature stay finite
RANKS = 20  # the most logprobs of a request
BLOCK_ELEMENTS = 1 << 18  # of rows x vocabulary at a time on a CPU: more would leave its caches


def sample(logits_SV: Tensor, inputs: SamplingInputs) -> Tensor:
    """token_S int64; the logits (of rows `inputs.rows_S`, on the same device) are not changed.

    First biases and masks are added, which rule out forbidden tokens, and penalties taken off. A token is the largest of what is left
    (temperature 0), or drawn from the softmax of that over the temperature (at least MIN_TEMPERATURE), of the tokens that top_k, then top_p
    and then min_p leave. All keep every token that ties with the last one they keep, so that equal logits (frequent in bfloat16) are not
    cut in an undefined order.
    A row whose largest logit is not finite (it holds NaN or infinity, or every token is ruled out) gives NO_TOKEN.
    """
    logits_SV = penalized_logits(logits_SV, inputs)
    token_S = likeliest(logits_SV)
    is_finite_S = logits_SV.gather(1, token_S.unsqueeze(1)).squeeze(1).isfinite()  # NaN counts as the largest
    if inputs.unfiltered_U.numel() or inputs.filtered_F.numel():
        token_S = _draw(logits_SV, inputs, token_S)
    return token_S.masked_fill_(~is_finite_S, NO_TOKEN)


def _draw(logits_SV: Tensor, inputs: SamplingInputs, token_S: Tensor) -> Tensor:
    """`token_S` with drawn tokens in place of the samples that are not greedy."""
    _, top_k_S, seed_S, choice_S, token_index_S = inputs.integers_5S
    temperature_S, top_p_S, min_p_S = inputs.floats_6S[0].clamp(min=MIN_TEMPERATURE), inputs.floats_6S[1], inputs.floats_6S[5]
    if inputs.filtered_F.numel():
        index = inputs.filtered_F
        ids, scaled = filtered_candidates(logits_SV[index], *(each[index] for each in (temperature_S, top_k_S, top_p_S, min_p_S)))
        best = gumbel_noise(seed_S[index], choice_S[index], token_index_S[index], ids).add_(scaled).argmax(dim=-1, keepdim=True)
        token_S[index] = ids.gather(1, best).squeeze(1)
    num_rows = max(1, BLOCK_ELEMENTS // logits_SV.shape[1]) if logits_SV.device.type == "cpu" else max(1, inputs.unfiltered_U.numel())
    for index in inputs.unfiltered_U.split(num_rows):
        key_S = _noise_key(seed_S[index], choice_S[index], token_index_S[index])
        token_S[index] = _drawn_from_all(logits_SV[index], temperature_S[index], key_S)
    return token_S


def likeliest(logits_SV: Tensor) -> Tensor:
    """token_S of the largest logit, the first of equal ones. On the CPU numpy finds it in a tenth of torch's time."""
    if logits_SV.device.type == "cpu":
        return torch.from_numpy(logits_SV.numpy().argmax(axis=-1))
    return logits_SV.argmax(dim=-1)


def penalized_logits(logits_SV: Tensor, inputs: SamplingInputs) -> Tensor:
    """The logits with biases and masks added, of forbidden tokens -inf, and then penalties taken off; the same tensor when there are none.

    Repetition (Keskar et al. 2019, CTRL, section 4.1, with transformers' signs) is over prompt and output; frequency and presence (as
    in OpenAI's API) are over the output.
    """
    if not inputs.penalized_3N.shape[1] and not inputs.biased_2C.shape[1] and not inputs.masked_M.numel():
        return logits_SV
    logits_SV = logits_SV.clone()
    if inputs.masked_M.numel():
        _add_masks(logits_SV, inputs.masked_M, inputs.allowed_MB)
    if inputs.biased_2C.shape[1]:
        sample_C, id_C = inputs.biased_2C
        logits_SV[sample_C, id_C] += inputs.bias_C.to(logits_SV.dtype)
    if inputs.penalized_3N.shape[1]:
        sample_N, id_N, count_N = inputs.penalized_3N
        repetition_N, presence_N, frequency_N = inputs.floats_6S[2:5, sample_N].to(logits_SV.dtype)
        logit_N = logits_SV[sample_N, id_N]
        logit_N = torch.where(logit_N < 0, logit_N * repetition_N, logit_N / repetition_N)
        logits_SV[sample_N, id_N] = logit_N - frequency_N * count_N - presence_N * (count_N > 0)
    return logits_SV


def _add_masks(logits_SV: Tensor, masked_M: Tensor, allowed_MB: Tensor) -> None:
    """Add -inf to the logits of tokens that a mask does not allow, in place; NaN stays NaN. On the CPU numpy looks up eight at a time in a
    fraction of torch's time."""
    num_tokens = logits_SV.shape[1]
    if logits_SV.device.type == "cpu" and logits_SV.dtype in _MASK_BYTES:
        table, rows_SV = _MASK_BYTES[logits_SV.dtype], logits_SV.numpy()
        added_B8 = np.empty((allowed_MB.shape[1], 8), table.dtype)
        for sample, allowed_B in zip(masked_M.tolist(), allowed_MB.numpy(), strict=True):
            np.take(table, allowed_B, axis=0, out=added_B8, mode="clip")  # with a check of the indices it takes six times as long
            rows_SV[sample] += added_B8.reshape(-1)[:num_tokens]
        return
    bits_MV = ((allowed_MB.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=allowed_MB.device)) & 1).flatten(1)[:, :num_tokens]
    logits_SV[masked_M] += torch.where(bits_MV.bool(), 0.0, float("-inf")).to(logits_SV.dtype)


def _mask_bytes(dtype: type[np.floating[Any]]) -> NDArray[Any]:
    """[256, 8]: what each byte of a mask adds to eight logits."""
    return np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf).astype(dtype)


_MASK_BYTES = {torch.float32: _mask_bytes(np.float32), torch.float64: _mask_bytes(np.float64)}


def log_probabilities(logits_LV: Tensor, token_L: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """logprob_L of these tokens, and of the K likeliest top_id_LK int64 and top_logprob_LK, best first.

    They are the log-softmax of the logits as they are given: before penalties, temperature and filters. K is at most the vocabulary.
    """
    # Row by row: how many rows a sum over the vocabulary is taken for must not show in its last bit.
    total_L1 = torch.cat([row_1V.logsumexp(dim=-1, keepdim=True) for row_1V in logits_LV.split(1)])
    # Which of several equal logits come first depends on how many are looked for: always as many, whatever the others of the step want.
    depth = min(max(num_ranks, RANKS) if num_ranks else 0, logits_LV.shape[1])
    top_LK, id_LK = (found[:, :num_ranks] for found in logits_LV.topk(depth, dim=-1))
    chosen_L1 = logits_LV.gather(1, token_L.clamp(min=0).unsqueeze(1))  # NO_TOKEN: its logprob is not used
    return (chosen_L1 - total_L1).squeeze(1), id_LK, top_LK - total_L1


def _drawn_from_all(logits_SV: Tensor, temperature_S: Tensor, key_S: Tensor) -> Tensor:
    """Tokens drawn without filters: the largest sum of scaled logit and noise, for which only a few tokens are candidates.

    All sums are taken roughly, in float32, and those near the largest again exactly. Float32 noise is made of 1 - u, so that it is
    good where noise is large; only for u below 2^-24 is it off by as much as 0.85. Logits are taken off the largest one before they
    are scaled, so that float32 is good where they count.
    """
    num_samples, num_tokens = logits_SV.shape
    bits_SV = _shifted(_mix(_id_steps(num_tokens, logits_SV.device) + key_S.unsqueeze(1)), 12)
    rest_SV = bits_SV.bitwise_xor_((1 << 52) - 1).float().add_(0.5)  # 1 - u, times 2^52
    lost_SV = rest_SV.mul_(-(2.0**-52)).clamp_(min=2.0**-24 - 1).log1p_().neg_().log_()  # the noise, negative
    below_SV = (logits_SV - logits_SV.amax(dim=-1, keepdim=True)).float()
    rough_SV = below_SV.mul_(temperature_S.float().reciprocal().unsqueeze(1)).sub_(lost_SV)
    sample_N, id_N = (rough_SV >= rough_SV.amax(dim=-1, keepdim=True) - ROUGH_MARGIN).nonzero(as_tuple=True)
    sum_N = logits_SV[sample_N, id_N].double() / temperature_S[sample_N] + _noise(key_S[sample_N], id_N)
    best_S = sum_N.new_full((num_samples,), float("-inf")).scatter_reduce_(0, sample_N, sum_N, "amax")
    won_N = sum_N == best_S[sample_N]
    return id_N.new_zeros(num_samples).scatter_reduce_(0, sample_N[won_N], id_N[won_N], "amin", include_self=False)


def filtered_candidates(
    logits_SV: Tensor, temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor, min_p_S: Tensor
) -> tuple[Tensor, Tensor]:
    """(vocabulary ids, their logits over the temperature in float64, those that the filters drop being -inf), each [S, depth].

    Filters leave few of many tokens, so only the best `depth` are sorted, and more only if what is kept reaches the last of them.
    """
    num_tokens = logits_SV.shape[1]
    temperature_S1, top_p_S1 = temperature_S.double().unsqueeze(1), top_p_S.double().unsqueeze(1)
    log_min_p_S1 = min_p_S.double().log().unsqueeze(1)  # of the ratio to the likeliest token
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
        cutoff_S1 = cutoff_S1.maximum(scaled[:, :1] + log_min_p_S1)
        if depth == num_tokens or bool((scaled[:, -1:] < cutoff_S1).all()):
            return ids, scaled.masked_fill(scaled < cutoff_S1, float("-inf"))
        depth = min(num_tokens, 8 * depth)


def gumbel_noise(seed_S: Tensor, choice_S: Tensor, token_index_S: Tensor, ids_SN: Tensor) -> Tensor:
    """Standard Gumbel noise in float64, [S, N], for the vocabulary ids in `ids_SN` ([1, N] where all rows have the same)."""
    return _noise(_noise_key(seed_S, choice_S, token_index_S).unsqueeze(1), ids_SN)


def _noise_key(seed_S: Tensor, choice_S: Tensor, token_index_S: Tensor) -> Tensor:
    key_S = torch.zeros_like(seed_S, dtype=torch.int64)
    for number_S in (seed_S, choice_S, token_index_S):
        key_S = _mix(key_S + number_S.long() + _STEP)
    return key_S


def _noise(key: Tensor, ids: Tensor) -> Tensor:
    bits = _shifted(_mix((ids + 1) * _STEP + key), 12)
    uniform = bits.double().add_(0.5).mul_(2.0**-52)  # 52 bits and a half: never 0, never 1
    return uniform.log_().neg_().log_().neg_()


@lru_cache(maxsize=2)
def _id_steps(num_tokens: int, device: torch.device) -> Tensor:
    """(id + 1) * _STEP for the whole vocabulary. Callers must not modify it."""
    return torch.arange(1, num_tokens + 1, device=device).mul_(_STEP)


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer: a bijection of 64-bit words in which every input bit moves every output bit. In place."""
    bits.bitwise_xor_(_shifted(bits, 30)).mul_(_FIRST)
    bits.bitwise_xor_(_shifted(bits, 27)).mul_(_SECOND)
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right: torch's own keeps the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
