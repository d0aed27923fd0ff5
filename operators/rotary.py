"""Rotary positions: their frequencies, the table of cosines and sines, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowrt.operators.model_config import RotaryConfig

FIRST_LENGTH = 4096  # rows of the first table; it doubles when a longer context comes


def inverse_frequencies(width: int, rotary: RotaryConfig) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [width / 2]."""
    plain = 1.0 / (rotary.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    match rotary.kind:
        case "default":
            return plain
        case "linear":
            return plain / rotary.factor
        case "yarn":
            return _yarn(plain, width, rotary)
        case "llama3":
            return _llama3(plain, rotary)


def _yarn(plain: Tensor, width: int, rotary: RotaryConfig) -> Tensor:
    """Slow pairs are interpolated, quick ones are left, with a ramp between them (YaRN, section 3.2)."""

    def pair_that_turns(times: float) -> float:
        return width * math.log(rotary.original_positions / (times * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low, high = pair_that_turns(rotary.beta_fast), pair_that_turns(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    unscaled = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rotary.factor * (1 - unscaled) + plain * unscaled


def _llama3(plain: Tensor, rotary: RotaryConfig) -> Tensor:
    """Scales as YaRN does, but the ramp is over the number of turns within the original context."""
    turns = rotary.original_positions * plain / (2 * math.pi)
    low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - unscaled) * plain / rotary.factor + unscaled * plain


class RotaryTable:
    """Cosines and signed sines by position, computed in float32 whatever the model's dtype, as transformers does.

    The table grows with the longest context seen, so that a model which allows a million positions does not pay for them.
    """

    def __init__(self, width: int, rotary: RotaryConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """`width` is that of what is turned: a head, or the part of it that carries the position."""
        turned = width if rotary.width is None else rotary.width
        resting = torch.zeros((width - turned) // 2)
        self._inverse_frequency = torch.cat((inverse_frequencies(turned, rotary), resting))
        self._factors = torch.cat((resting.new_full((turned // 2,), rotary.attention_factor), resting + 1))
        self._dtype, self._device = dtype, device
        self._cos, self._sin = self._table(FIRST_LENGTH)

    def rows(self, positions_T: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), [T, 1, D] each, for positions below `num_positions`."""
        if num_positions > self._cos.shape[0]:
            self._cos, self._sin = self._table(1 << (num_positions - 1).bit_length())
        return self._cos.index_select(0, positions_T).unsqueeze(1), self._sin.index_select(0, positions_T).unsqueeze(1)

    def _table(self, length: int) -> tuple[Tensor, Tensor]:
        pieces = (torch.arange(start, start + FIRST_LENGTH, dtype=torch.float32) for start in range(0, length, FIRST_LENGTH))
        angles = [piece[:, None] * self._inverse_frequency for piece in pieces]  # so that a row's bits do not depend on the length
        cos, sin = (torch.cat([turn(each) for each in angles]) * self._factors for turn in (torch.cos, torch.sin))
        return (
            torch.cat((cos, cos), dim=-1).to(dtype=self._dtype, device=self._device),
            torch.cat((-sin, sin), dim=-1).to(dtype=self._dtype, device=self._device),
        )


def rotate(x_TND: Tensor, cos_T1D: Tensor, signed_sin_T1D: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle. The sign of the sine's first half is in the table."""
    return torch.addcmul(x_TND * cos_T1D, x_TND.roll(x_TND.shape[-1] // 2, dims=-1), signed_sin_T1D)


def pairs_to_halves_(rows: Tensor, width: int) -> None:
    """Reorder, in place, weight rows that give interleaved pairs (2i, 2i + 1), so that `rotate` turns what they give.

    Of `rows` [..., rows of a head, H] the last `width` of each head become the even ones, then the odd ones. Done to queries and keys
    alike it changes no score.
    """
    turned = rows[..., -width:, :]
    turned.copy_(torch.cat((turned[..., 0::2, :], turned[..., 1::2, :]), dim=-2))


def spread_rotated(heads: Tensor, width: int, dim: int) -> Tensor:
    """Reorder the dimensions of heads of which only the first `width` turn, in pairs (i, i + width/2), so that `rotate` turns the same
    pairs: (i, i + D/2). Done to queries and keys alike it changes no score."""
    first, second, resting = heads.split((width // 2, width - width // 2, heads.shape[dim] - width), dim=dim)
    before, behind = resting.chunk(2, dim=dim)
    return torch.cat((first, before, second, behind), dim=dim)
