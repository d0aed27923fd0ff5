"""Forms of matrices, kinds of expert products, and the profile that chooses between them."""

from __future__ import annotations

from itertools import accumulate
from itertools import count as counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from panels import check_rows, product

from flowrt.operators import products
from flowrt.operators.expert_products import (
    LOADS,
    NEVER_DENSE,
    DeviceExperts,
    GroupedExperts,
    PanelExperts,
    Profile,
    StackedExperts,
    choose_form,
    has_grouped_product,
    one_by_one,
    take_profile,
)
from flowrt.operators.products import FORMS, FloatPanels, Form, InPanels, Panels, fits_panels, form_for, lay_out, shared_form
from flowrt.operators.row_blocks import _Recorder

ALWAYS_DENSE = Profile((64,), (1.0,), (0.0,))


OWN = [dtype for dtype in (torch.float32, torch.bfloat16) if form_for(dtype, "cpu", (16, 32)) == "panels"]  # what the processor can do


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 65])
def test_every_form_gives_what_the_plain_one_gives(form: Form, dtype: torch.dtype, num_rows: int) -> None:
    if form == "packed" and form_for(torch.float32) != "packed":
        pytest.skip("this build of torch packs no matrices")
    if form == "packed" and dtype == torch.bfloat16 and form_for(dtype) == "widened":
        pytest.skip("this processor computes no product in bfloat16")
    if form == "panels" and dtype not in OWN:
        pytest.skip("this processor has no instructions for panels of the dtype, or there was no compiler")
    if form == "wide panels" and dtype not in products.wide_kinds():
        pytest.skip("this processor has no AVX2, or there was no compiler")
    generator = torch.Generator().manual_seed(num_rows)
    num_outputs, num_inputs = {"panels": (1296, 96), "wide panels": (1296, 70)}.get(form, (1300, 70))
    shapes = ((num_outputs, num_inputs), (num_outputs,), (num_rows, num_inputs))
    weight, bias, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    product = lay_out(weight.clone(), form)
    assert product.shape == (num_outputs, num_inputs)
    for given_bias in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if given_bias is None else bias.double())
        tolerance = 1e-4 if dtype == torch.float32 else 0.25
        torch.testing.assert_close(product(x, given_bias).double(), expected, rtol=2e-2, atol=tolerance)
        assert product(x, given_bias).dtype == dtype


@pytest.mark.parametrize("dtype", OWN)
@pytest.mark.parametrize("shape", [(16, 32), (48, 64), (176, 96), (80, 1024), (32, 288)])
def test_bits_of_a_row_in_panels_are_its_own(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Whatever number of rows comes, wherever the row stands among them, and with any number of threads."""
    generator = torch.Generator().manual_seed(shape[0])
    weight, x = (torch.randn(shape, generator=generator).to(dtype) for shape in (shape, (210, shape[1])))
    matrix = lay_out(weight, "panels")
    assert isinstance(matrix, Panels)
    alone = torch.cat([product(matrix, row, dtype) for row in x.split(1)])
    torch.testing.assert_close(alone.double(), x.double() @ weight.double().t(), rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-3)
    check_rows(matrix, x, alone, (*range(1, 40), 64, 96, 97, 131, 200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 33), (48, 64), (176, 100), (80, 1024), (272, 288)])
def test_bits_of_a_row_in_wide_panels_are_its_own(dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, and at every level of instructions."""
    generator = torch.Generator().manual_seed(shape[0])
    weight, x = torch.randn(shape, generator=generator).to(dtype), torch.randn(150, shape[1], generator=generator)
    alone: torch.Tensor | None = None
    for level in products.wide_levels:
        monkeypatch.setattr(products.WidePanels, "_level", level)
        matrix = FloatPanels(weight)
        if alone is None:
            alone = torch.cat([product(matrix, row, x.dtype) for row in x.split(1)])
            torch.testing.assert_close(alone.double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-4)
        check_rows(matrix, x, alone, (*range(1, 27), 64, 131))


@pytest.mark.parametrize("dtype", OWN)
def test_rows_beyond_what_the_cache_holds_are_taken_in_parts(dtype: torch.dtype) -> None:
    weight, x = torch.randn(32, 8192).to(dtype), torch.randn(250, 8192).to(dtype)
    matrix = lay_out(weight, "panels")
    assert torch.equal(matrix(x), torch.cat([matrix(row) for row in x.split(1)]))


def test_rows_beyond_the_cache_are_taken_in_parts_by_wide_panels() -> None:
    if torch.float32 not in products.wide_kinds():
        pytest.skip("this processor has no AVX2, or there was no compiler")
    for num_rows, num_inputs in ((50, 8192), (250, 8192), (3, 1 << 18)):
        matrix, x = FloatPanels(torch.randn(32, num_inputs)), torch.randn(num_rows, num_inputs)
        assert torch.equal(matrix(x), torch.cat([matrix(row) for row in x.split(1)]))


def test_invalid_arguments_of_c_are_refused() -> None:
    if not products.has_panels:
        pytest.skip("there was no compiler")
    right = [0, 0, 0, 0, 16, 16, 1]
    if torch.float32 in OWN:
        products._panels.products(*right, [0], [0])  # no rows, nothing to do
        for counts in ([], [0, 0], [-1], [1], [1 << 41]):
            with pytest.raises(ValueError, match="number"):
                products._panels.products(*right, [0], counts)
        for wrong in (([0], 3), (None, [0]), (["a"], [0]), ([0], ["a"]), ([0], [True])):
            with pytest.raises(TypeError):
                products._panels.products(*right, *wrong)
    for place, number in ((0, 9), (0, -1), (0, 1 << 32), (4, 15), (4, -16), (5, 8), (5, 0), (5, -16), (6, 0), (6, 1 << 32)):
        numbers = [*right[:place], number, *right[place + 1 :]]
        with pytest.raises(ValueError, match="multiples of 16"):
            products._panels.products(*numbers, [0], [0])
    with pytest.raises(TypeError):
        products._panels.products(0, 0)


@pytest.mark.parametrize("dtype", OWN)
def test_rows_that_do_not_fit_a_matrix_in_panels_are_refused(dtype: torch.dtype) -> None:
    matrix = lay_out(torch.randn(16, 32).to(dtype), "panels")
    other = torch.float64 if dtype == torch.float32 else torch.float32
    for x in (torch.zeros(3, 31), torch.zeros(3, 64), torch.zeros(32), torch.zeros(1, 3, 32)):
        with pytest.raises(ValueError, match="takes rows of 32"):
            matrix(x.to(dtype))
    with pytest.raises(ValueError, match="takes rows of 32"):
        matrix(torch.zeros(3, 32, dtype=other))
    x = torch.randn(32, 6).to(dtype)
    assert torch.equal(matrix(x.t()), matrix(x.t().contiguous()))
    experts = one_by_one([lay_out(torch.randn(64, 32).to(dtype), "panels")], [lay_out(torch.randn(32, 32).to(dtype), "panels")])
    for wrong in (torch.zeros(3, 31).to(dtype), torch.zeros(3, 32, dtype=other)):
        with pytest.raises(ValueError, match="takes rows of 32"):
            experts.run(wrong, torch.tensor([3]))


def test_panels_are_taken_where_they_fit() -> None:
    assert fits_panels((16, 32))
    assert not fits_panels((24, 32))
    assert not fits_panels((16, 48))
    for dtype in OWN:
        assert form_for(dtype, "cpu", (16, 32), (64, 64)) == "panels"
        assert form_for(dtype, "cpu", (16, 32), (64, 48)) == form_for(dtype)
        assert form_for(dtype, "cuda", (16, 32)) == "plain"
    assert form_for(torch.float64, "cpu", (16, 32)) == "plain"
    assert form_for(torch.float16, "cpu", (16, 33)) == ("wide panels" if products.wide_levels else "widened")
    assert form_for(torch.float16, "cpu", (24, 32)) == "widened"
    if products.wide_levels and torch.float32 not in OWN:
        assert form_for(torch.float32, "cpu", (16, 33), (32, 7)) == "wide panels"


@pytest.mark.parametrize("dtype", [*products.wide_kinds().keys() & {torch.float16}, *OWN], ids=str)
@settings(max_examples=40)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_experts_in_panels_give_what_each_gives_alone(dtype: torch.dtype, counts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up, down = (torch.randn(len(counts), *shape, generator=generator).to(dtype) / 8 for shape in ((64, 32), (32, 32)))
    x_PH = torch.randn(sum(counts), 32, generator=generator).to(dtype)
    form: Form = "panels" if dtype in OWN else "wide panels"
    experts = one_by_one([lay_out(each, form) for each in gate_up], [lay_out(each, form) for each in down])
    assert isinstance(experts, PanelExperts)
    found = experts.run(x_PH, torch.tensor(counts))
    alone = torch.cat([experts.expert(place)(rows) for place, rows in enumerate(x_PH.split(counts))])
    assert torch.equal(found, alone)
    expected = StackedExperts(gate_up.float(), down.float(), NEVER_DENSE).run(x_PH.float(), torch.tensor(counts))
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=1e-4 if dtype == torch.float32 else 2e-2)


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
def test_a_layer_on_the_gpu_never_waits_for_the_host() -> None:
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
    stacked = Profile(LOADS, tuple(flat), tuple(flat))
    assert choose_form(LOADS, [0.0] * len(LOADS), flat, {"packed": [0.9] * len(LOADS)}) == Profile(LOADS, (0.0,) * len(LOADS), tuple(flat))
    assert choose_form(LOADS, flat, flat, {}) == stacked
    assert choose_form(LOADS, flat, flat, {"packed": [0.9] * len(LOADS)}) == "packed"
    assert choose_form(LOADS, flat, flat, {"packed": [1.1] * len(LOADS)}) == stacked
    assert choose_form(LOADS, flat, flat, {"packed": [0.9] * len(LOADS), "panels": [0.8] * len(LOADS)}) == "panels"
    assert isinstance(choose_form(LOADS, [9.0] * len(LOADS), flat, {"packed": [1.7] * len(LOADS)}), Profile)  # dense is faster than either
    assert choose_form(LOADS, [1.0, 1.0, 3.0, 4.0, 9.0], [9.0] * len(LOADS), {"packed": [1.1, 1.1, 1.1, 1.1, 1.2]}) == "packed"


@pytest.mark.parametrize(("seconds_per_look", "num_loads"), [(0.0, len(LOADS)), (0.1, 1)])
def test_a_profile_is_taken_within_its_time(seconds_per_look: float, num_loads: int) -> None:
    """No further load is measured once the time is over. In float64 no other form is tried, so the result is a profile."""
    looks = counter()
    found = take_profile(*(matrix.double() for matrix in drawn_experts(3)), lambda: next(looks) * seconds_per_look)
    assert isinstance(found, Profile)
    assert found.loads == LOADS[:num_loads]


@pytest.mark.parametrize("shape", [(16, 32), (16, 64), (48, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matrix_is_copied_out_of_its_panels(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(dtype)
    for form in {form_for(dtype, "cpu", shape), "wide panels" if products.wide_levels else "plain"} - {"plain", "packed", "widened"}:
        product = lay_out(weight, form)
        assert isinstance(product, InPanels)
        assert torch.equal(product.restored(), weight)
        assert product.restored().is_contiguous()


@pytest.mark.parametrize("dtype", OWN)
def test_a_proof_sees_products_in_panels(dtype: torch.dtype) -> None:
    matrix, x, watch = lay_out(torch.randn(16, 32).to(dtype), "panels"), torch.randn(5, 32).to(dtype), _Recorder(5)
    with watch:
        matrix(x)
    assert watch.bits().shape == (5, 16 * dtype.itemsize)
    assert watch.products == ([(dtype, 32, 16, "panels")] if dtype == torch.bfloat16 else [])
