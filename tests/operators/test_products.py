"""Forms of matrices, kinds of expert products, and the profile that chooses between them."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.expert_products import (
    LOADS,
    NEVER_DENSE,
    DeviceExperts,
    GroupedExperts,
    Profile,
    StackedExperts,
    choose,
    has_grouped_product,
    take_profile,
)
from operators.products import FORMS, Form, form_for, lay_out, shared_form

ALWAYS_DENSE = Profile((64,), (1.0,), (0.0,))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 65])
def test_every_form_gives_what_the_plain_one_gives(form: Form, dtype: torch.dtype, num_rows: int) -> None:
    if form == "packed" and form_for(torch.float32) != "packed":
        pytest.skip("this build of torch packs no matrices")
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((1300, 70), (1300,), (num_rows, 70)))
    product = lay_out(weight.clone(), form)
    assert (product.shape, product.nbytes) == ((1300, 70), weight.nbytes)
    for given_bias in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if given_bias is None else bias.double())
        tolerance = 1e-4 if dtype == torch.float32 else 0.25
        torch.testing.assert_close(product(x, given_bias).double(), expected, rtol=2e-2, atol=tolerance)
        assert product(x, given_bias).dtype == dtype


def test_what_is_read_by_others_is_never_packed() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert shared_form(torch.zeros(2, 2, dtype=dtype)) in ("plain", "widened")
    assert form_for(torch.float64) == "plain"
    assert form_for(torch.bfloat16, "cuda") == "plain"


def drawn_experts(number: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 2 * 24, 16, generator=generator), torch.randn(number, 16, 24, generator=generator)


@settings(max_examples=40)
@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_all_kinds_give_the_same(counts: list[int], seed: int) -> None:
    gate_up, down = drawn_experts(len(counts), seed)
    x_PH = torch.randn(sum(counts), 16, generator=torch.Generator().manual_seed(seed))
    counts_E = torch.tensor(counts)
    expected = GroupedExperts([(lay_out(a, "plain"), lay_out(b, "plain")) for a, b in zip(gate_up, down, strict=True)]).run(x_PH, counts_E)
    kinds = [StackedExperts(gate_up, down, NEVER_DENSE), StackedExperts(gate_up, down, ALWAYS_DENSE)]
    for experts in kinds:
        assert experts.nbytes == gate_up.nbytes + down.nbytes
        torch.testing.assert_close(experts.run(x_PH, counts_E), expected, rtol=1e-4, atol=1e-4)
        for place, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            rows = slice(end - count, end)
            torch.testing.assert_close(experts.expert(place)(x_PH[rows]), expected[rows], rtol=1e-4, atol=1e-4)


def test_the_grouped_product_of_devices_gives_the_same() -> None:
    """On the CPU, where the library has it too."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped product")
    gate_up, down = (each.bfloat16() for each in drawn_experts(4))
    counts_E = torch.tensor([3, 0, 5, 1])
    x_PH = torch.randn(9, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    expected = StackedExperts(gate_up.float(), down.float(), NEVER_DENSE).run(x_PH.float(), counts_E)
    experts = DeviceExperts(gate_up, down)
    torch.testing.assert_close(experts.run(x_PH, counts_E).float(), expected, rtol=5e-2, atol=0.5)
    torch.testing.assert_close(experts.expert(2)(x_PH[3:8]).float(), expected[3:8], rtol=5e-2, atol=0.5)
    assert has_grouped_product(torch.bfloat16, "cuda", 16, 24)
    for dtype, device, width in ((torch.float32, "cuda", 16), (torch.bfloat16, "cpu", 16), (torch.bfloat16, "cuda", 20)):
        assert not has_grouped_product(dtype, device, width)


@pytest.mark.gpu
def test_a_layer_on_the_gpu_asks_the_host_for_nothing() -> None:
    gate_up, down = (each.bfloat16().cuda() for each in drawn_experts(4))
    experts, counts_E = DeviceExperts(gate_up, down), torch.tensor([3, 0, 5, 1]).cuda()
    x_PH = torch.randn(9, 16, device="cuda", dtype=torch.bfloat16)
    experts.run(x_PH, counts_E)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = experts.run(x_PH, counts_E)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = StackedExperts(gate_up.float().cpu(), down.float().cpu(), NEVER_DENSE).run(x_PH.float().cpu(), counts_E.cpu())
    torch.testing.assert_close(found.float().cpu(), expected, rtol=5e-2, atol=0.5)


def test_the_profile_chooses_by_load() -> None:
    profile = Profile((1, 4, 16), (1.0, 2.0, 8.0), (0.8, 1.0, 9.0))
    assert profile.dense_pays([1, 1, 1, 1])  # 3.2 against 4
    assert not profile.dense_pays([1, 0, 0, 0])  # three experts are computed for nothing
    assert profile.dense_pays([3, 4, 2, 4])  # in between, the next larger load counts
    assert not profile.dense_pays([4, 1, 1, 0])  # padded to 4: 4 against 4
    assert not profile.dense_pays([16, 16, 16, 16])
    assert not profile.dense_pays([17, 17, 17, 17])  # beyond what was measured
    assert not profile.dense_pays([0, 0])
    assert not profile.dense_pays([])


def test_how_experts_are_held_follows_from_all_decode_loads() -> None:
    flat = [1.0] * len(LOADS)
    assert choose(LOADS, flat, flat, None) == Profile(LOADS, tuple(flat), tuple(flat))
    assert choose(LOADS, flat, flat, [0.9] * len(LOADS)) is None
    assert choose(LOADS, flat, flat, [1.1] * len(LOADS)) is not None
    assert choose(LOADS, [9.0] * len(LOADS), flat, [1.7] * len(LOADS)) is not None  # dense is faster than either
    assert choose(LOADS, [1.0, 1.0, 3.0, 4.0, 9.0], [9.0] * len(LOADS), [1.1, 1.1, 1.1, 1.1, 1.2]) is None


def test_a_profile_is_taken_within_its_time() -> None:
    ticks = iter(range(10_000))
    found = take_profile(*drawn_experts(3), lambda: next(ticks) / 10)  # each look at the clock is a tenth of a second later
    assert found is None or len(found.loads) == 1
