"""The norms of rows against their definition, in float64."""

from __future__ import annotations

import pytest
import torch

from flowrt.operators.kernels.choice import kernels_for
from flowrt.operators.normalization import layer_norm

EPSILON = 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 96), (1, 96), (700, 96), (5, 3, 32)])
def test_rms_norm_is_a_row_over_its_root_mean_square(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    wide = torch.randn((*shape[:-1], 2 * shape[-1]), generator=generator).to(dtype) * 3
    weight = torch.rand(shape[-1:] if len(shape) == 2 else shape[1:], generator=generator).to(dtype)
    for x in (wide[..., : shape[-1]], wide[..., : shape[-1]] * 0):  # rows with a gap between them, and zeros
        before = x.clone()
        found = kernels_for(x.dtype, x.device).rms_norm(x, weight, EPSILON)
        exact = x.double() / (x.double().square().mean(dim=-1, keepdim=True) + EPSILON).sqrt() * weight.double()
        torch.testing.assert_close(found.double(), exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        assert (found.dtype, found.shape) == (dtype, x.shape)
        assert torch.equal(x, before)


def test_layer_norm_is_a_row_less_its_mean_over_its_deviation() -> None:
    x, weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)), torch.linspace(0, 1, 96)
    exact = (x - x.mean(dim=1, keepdim=True)) / (x.var(dim=1, correction=0, keepdim=True) + EPSILON).sqrt() * weight
    torch.testing.assert_close(layer_norm(x, weight, EPSILON), exact, rtol=1e-4, atol=1e-5)
