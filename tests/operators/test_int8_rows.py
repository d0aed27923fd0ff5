"""Rows as INT8: the error is at most half a step of the row's scale, and rows that are not finite stay so."""

import pytest
import torch

from flowrt.operators.int8_rows import LARGEST, dequantize_rows, packed_rows, quantize_rows, unpacked_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_is_within_half_a_step(dtype: torch.dtype) -> None:
    x = (torch.randn(50, 64) * torch.logspace(-6, 6, 50)[:, None]).to(dtype)
    q, scale = quantize_rows(x)
    assert (q.dtype, scale.dtype, q.shape, scale.shape) == (torch.int8, torch.float32, (50, 64), (50,))
    assert ((q.float() * scale[:, None] - x.float()).abs() <= 0.501 * scale[:, None]).all()
    assert dequantize_rows(q, scale, dtype).dtype is dtype
    assert q.abs().amax(dim=1).tolist() == [LARGEST] * 50


def test_zeros_and_no_rows_are_exact() -> None:
    x = torch.zeros(2, 8)
    assert torch.equal(dequantize_rows(*quantize_rows(x), torch.float32), x)
    assert dequantize_rows(*quantize_rows(x[:0]), torch.float32).shape == (0, 8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(value: float) -> None:
    x = torch.ones(3, 8)
    x[1, 2] = value
    found = dequantize_rows(*quantize_rows(x), torch.float32)
    assert not found[1].isfinite().all()
    assert torch.equal(found[::2], x[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("width", "num_kept"), [(16, 0), (17, 0), (2, 0), (32, 8), (30, 6)])
def test_packed_rows_have_scales_and_keep_the_end(dtype: torch.dtype, width: int, num_kept: int) -> None:
    x = torch.randn(5, 3, width + num_kept).to(dtype)
    packed = packed_rows(x, num_kept)
    assert packed.dtype is torch.int8
    found = unpacked_rows(packed, dtype, width, num_kept)
    assert torch.equal(found[..., :width], dequantize_rows(*quantize_rows(x[..., :width]), dtype))
    assert torch.equal(found[..., width:], x[..., width:])
    assert torch.equal(unpacked_rows(packed[1:2], dtype, width, num_kept), found[1:2])
    assert not unpacked_rows(torch.zeros_like(packed), dtype, width, num_kept).any()
