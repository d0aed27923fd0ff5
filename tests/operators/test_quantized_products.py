"""Products with weights that are kept in 8 bits: those of the restored matrix, with bits of a row that depend on that row alone."""

from __future__ import annotations

from dataclasses import replace
from operator import sub
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import loading_growth, make_large_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from panels import check_rows, product
from quantized_checkpoints import SCHEMES
from quantized_checkpoints import quantize as store_quantized
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrt.operators import products, quantized_products
from flowrt.operators.checkpoint_files import WHOLE_NAME, stored_expert_weights
from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.int8_rows import packed_rows, quantize_rows
from flowrt.operators.kernels.cpu import rows as cpu_rows
from flowrt.operators.model_config import KeptWeights, ModelError
from flowrt.operators.products import InPanels, form_for, lay_out
from flowrt.operators.quantized_products import IntegerPanels, QuantizedPanels, quantize
from flowrt.operators.restored_weights import QuantizedMatrix
from flowrt.operators.row_blocks import StrictBlocks
from flowrt.operators.weights import Checkpoint

KEPT: tuple[KeptWeights, ...] = ("int8", "fp8")
SHAPES = [(16, 32, 32), (48, 100, 33), (176, 96, 32), (80, 1000, 128), (272, 288, 288)]  # outputs, inputs, columns of a group
CODES = torch.arange(256, dtype=torch.int16).to(torch.uint8)

pytestmark = pytest.mark.skipif(not products.wide_levels, reason="this processor has no AVX2, or there was no compiler")


def drawn(shape: tuple[int, int, int], kept: KeptWeights) -> QuantizedMatrix:
    num_outputs, num_inputs, group = shape
    generator = torch.Generator().manual_seed(num_inputs)
    whole = torch.randint(-127, 128, (num_outputs, num_inputs), generator=generator)
    codes = whole.to(torch.int8) if kept == "int8" else (whole * 3.5).to(torch.float8_e4m3fn)
    return QuantizedMatrix(codes, torch.rand(num_outputs, -(-num_inputs // group), generator=generator) / 100 + 0.001, group)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_a_row_are_its_own(shape: tuple[int, int, int], kept: KeptWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of rows comes, wherever the row stands, with any number of threads, and at every level of instructions."""
    given = drawn(shape, kept)
    x = torch.randn(70, shape[1], generator=torch.Generator().manual_seed(1))
    alone: Tensor | None = None
    for level in products.wide_levels:
        monkeypatch.setattr(products.WidePanels, "_level", level)
        matrix = QuantizedPanels(given)
        if alone is None:
            alone = torch.cat([product(matrix, row, x.dtype) for row in x.split(1)])
            torch.testing.assert_close(alone.double(), x.double() @ given.restored().double().t(), rtol=1e-5, atol=1e-4)
        check_rows(matrix, x, alone, (*range(1, 27), 48, 61))


@pytest.mark.parametrize("shape", [(16, 4, 4), (32, 64, 64), (48, 100, 20), (304, 260, 260), (1040, 1536, 128)])
def test_products_of_integers_are_exact_sums(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a row are its own, for any number of rows and of threads, and the same at every level of instructions."""
    given = drawn(shape, "int8")
    given.codes_NK[0] = -128  # in files of others
    x = torch.randn(70, shape[1], generator=torch.Generator().manual_seed(1))
    x[5], x[6, 1:] = 0.0, 0.0
    codes, scale = quantize_rows(x)
    groups = zip(codes.double().split(shape[2], 1), given.codes_NK.double().split(shape[2], 1), strict=True)
    sums = torch.stack([a @ b.t() for a, b in groups])
    expected = (sums * given.scales_NC.double().t()[:, None]).sum(0) * scale.double()[:, None]
    alone: Tensor | None = None
    for level in products.wide_levels:
        monkeypatch.setattr(products.WidePanels, "_level", level)
        matrix = IntegerPanels(given)
        assert torch.equal(matrix.restored().codes_NK, given.codes_NK)
        if alone is None:
            alone = torch.cat([matrix(row) for row in x.split(1)])
            torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=1e-4)
        check_rows(matrix, matrix.checked(x), alone, (*range(1, 27), 48, 61))


@pytest.mark.parametrize("kind", ["integers", "int8", "own", "wide"])
@settings(max_examples=15, deadline=None)
@given(counts=st.lists(st.one_of(st.just(0), st.integers(0, 30), st.integers(600, 700)), min_size=1, max_size=9), threads=st.integers(1, 4))
def test_groups_of_rows_give_what_each_gives_alone(kind: str, counts: list[int], threads: int) -> None:
    """Also in several threads, with more rows than are taken together, and where a matrix has no rows."""
    shape = (528, 256)
    generator = torch.Generator().manual_seed(len(counts))
    matrices: list[InPanels[Any]] = []
    for _ in counts:
        weight = torch.randn(shape, generator=generator)
        if kind in ("own", "wide"):
            product = lay_out(weight, form_for(torch.float32, "cpu", shape) if kind == "own" else "wide panels")
            if not isinstance(product, InPanels):
                return  # this processor has none
            matrices.append(product)
        else:
            matrices.append((IntegerPanels if kind == "integers" else QuantizedPanels)(quantize(weight, "int8")))
    x = torch.randn(sum(counts), shape[1], generator=generator)
    rows, y = matrices[0].checked(x), x.new_full((len(x) + 1, shape[0]), 7.0)
    matrices[0].into(rows.data_ptr(), y.data_ptr(), len(rows), [each.address for each in matrices], counts, threads)
    assert torch.equal(y[:-1], torch.cat([matrix(part) for matrix, part in zip(matrices, x.split(counts), strict=True)]))
    assert (y[-1] == 7.0).all()


def test_a_row_that_is_not_finite_has_a_product_that_is_not() -> None:
    x = torch.ones(3, 64)
    x[1, 3], x[2, 4] = float("inf"), float("nan")
    assert IntegerPanels(drawn((32, 64, 64), "int8"))(x).isfinite().all(dim=1).tolist() == [True, False, False]


def test_rows_as_integers_need_columns_in_fours() -> None:
    for shape in ((16, 33, 33), (16, 32, 6)):
        with pytest.raises(ModelError, match=r"multiple of 4, not .*remove model\.activations"):
            IntegerPanels(drawn(shape, "int8"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 31, 64, 1000])
def test_rows_in_c_are_those_of_torch(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    x[3] = 0.0
    if cpu_rows.fits(dtype, "cpu"):
        assert torch.equal(cpu_rows.int8_rows(x), packed_rows(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_dtype_of_the_rows(dtype: torch.dtype) -> None:
    given = drawn((32, 64, 64), "int8")
    x, bias = torch.randn(3, 64).to(dtype), torch.randn(32).to(dtype)
    found, expected = QuantizedPanels(given)(x, bias), (x.float() @ given.restored().t()).to(dtype) + bias
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    for wrong in (torch.zeros(3, 63), torch.zeros(64)):
        with pytest.raises(ValueError, match="takes rows of 64"):
            QuantizedPanels(given)(wrong)


@pytest.mark.parametrize("kept", KEPT)
def test_every_code_has_its_value(kept: KeptWeights) -> None:
    dtype = torch.int8 if kept == "int8" else torch.float8_e4m3fn
    codes = CODES if kept == "int8" else CODES[(CODES & 127) != 127]
    column = torch.cat([codes, codes.new_zeros(-len(codes) % 16)])
    matrix = QuantizedPanels(QuantizedMatrix(column.view(dtype)[:, None], torch.ones(len(column), 1), 1))
    assert torch.equal(matrix(torch.ones(1, 1))[0, : len(codes)], codes.view(dtype).float())


def test_weights_that_are_no_numbers_are_refused() -> None:
    for code in (0x7F, 0xFF):
        codes = torch.zeros(16, 4, dtype=torch.uint8)
        codes[3, 1] = code
        with pytest.raises(ModelError, match="is NaN"):
            QuantizedPanels(QuantizedMatrix(codes.view(torch.float8_e4m3fn), torch.ones(16, 1), 4))


def test_invalid_arguments_of_c_are_refused() -> None:
    product = products._wide_panels.products
    right = [products.wide_levels[-1], 0, 0, 0, 0, 16, 16, 16, 1]
    product(*right, [0], [0])  # no rows, nothing to do
    with pytest.raises(ValueError, match="number"):
        product(*right, [0], [-1])
    wrong_at = ((0, 9), (0, -1), (1, 6), (1, -1), (5, 15), (5, -16), (6, 0), (7, 0), (7, -4), (8, 0), (8, 1 << 32))
    for place, wrong in wrong_at:
        with pytest.raises(ValueError, match="unknown level"):
            product(*right[:place], wrong, *right[place + 1 :], [0], [0])
    with pytest.raises(TypeError):
        product(0, 0)


def test_without_the_module_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_products, "wide_levels", [])
    with pytest.raises(ModelError, match=r"need a processor with AVX2, and a compiler when flowrt is installed; remove model\.weights"):
        QuantizedPanels(drawn((16, 32, 32), "int8"))


@pytest.mark.parametrize("kept", KEPT)
def test_quantized_weights_are_near_their_values(kept: KeptWeights) -> None:
    weight = torch.randn(32, 200)
    weight[7] = 0
    weight[8] *= 1e-6
    found = quantize(weight.to(torch.bfloat16), kept)
    weight = weight.to(torch.bfloat16).float()
    error = (found.restored() - weight).abs()
    largest = weight.abs().amax(1, keepdim=True)
    bound = largest / 127 / 2 if kept == "int8" else torch.maximum(weight.abs() / 16, largest / 448 / 512)
    assert (error <= bound * 1.001).all()
    assert found.scales_NC.shape == (32, 1)


def experts_of(directory: Path, kept: KeptWeights, dtype: str = "float32", **more: Any) -> Experts:
    config = replace(read_model_config(directory, dtype), expert_weights=kept)
    return Experts(config, Checkpoint(directory), {1: range(config.num_experts)}, **more)


def outputs(experts: Experts, num_rows: int = 24) -> Tensor:
    config, generator = experts.config, torch.Generator().manual_seed(num_rows)
    x_RH = torch.randn(num_rows, config.hidden_size, generator=generator).to(getattr(torch, config.dtype))
    return experts.forward_pairs(1, x_RH, torch.arange(num_rows), torch.arange(num_rows) % config.num_experts)


@pytest.mark.parametrize("name", ["plain", "deepseek_v3"])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "E5M2" not in name and "packed" not in name and "INT4" not in name])
def test_codes_of_a_checkpoint_are_kept(models: Any, tmp_path: Path, scheme: str, name: str) -> None:
    plain = store_quantized(models[name], tmp_path, *SCHEMES[scheme])
    directory = tmp_path / "quantized"
    config = read_model_config(directory)
    kept = stored_expert_weights(directory, config)
    assert kept == ("int8" if "INT8" in scheme else "fp8")
    config, shape = replace(config, expert_weights=kept), (config.hidden_size, config.expert_width)
    found = Checkpoint(directory).read_codes(config, "expert_down", shape, layer=1, expert=5)
    assert found is not None
    assert torch.equal(found.restored(), Checkpoint(plain).read_part(config, "expert_down", shape, layer=1, expert=5, dtype=torch.float32))
    torch.testing.assert_close(outputs(experts_of(directory, kept)), outputs(experts_of(plain, "dtype")), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("whole", [1, 2])
def test_a_layer_may_be_stored_in_another_form(models: Any, tmp_path: Path, whole: int) -> None:
    """Before the others, or after them. Its codes have one scale for each row, and the others one for each block."""
    plain = store_quantized(models["plain"], tmp_path, *SCHEMES["FP8 by blocks"])
    directory = tmp_path / "quantized"
    stored, unchanged, place = load_file(directory / WHOLE_NAME), load_file(plain / WHOLE_NAME), f"layers.{whole}.mlp.experts."
    mixed = {name: tensor for name, tensor in stored.items() if place not in name}
    save_file(mixed | {name: tensor for name, tensor in unchanged.items() if place in name}, directory / WHOLE_NAME)
    config = replace(read_model_config(directory, "float32"), expert_weights="fp8")
    held = {layer: range(config.num_experts) for layer in (1, 2)}
    experts, restored = Experts(config, Checkpoint(directory), held), Experts(read_model_config(plain, "float32"), Checkpoint(plain), held)
    x_RH = torch.randn(8, config.hidden_size, generator=torch.Generator().manual_seed(8))
    for layer in (1, 2):
        found, wanted = (each.forward_pairs(layer, x_RH, torch.arange(8), torch.arange(8)) for each in (experts, restored))
        bound = 0.1 if layer == whole else 1e-5  # that of E4M3, and of another order of sums
        assert 0 < (found - wanted).norm() < bound * wanted.norm()


@pytest.mark.parametrize("scheme", ["FP8 E5M2", "INT4 by groups", "INT8 packed"])
def test_other_checkpoints_are_quantized_from_what_they_stand_for(models: Any, tmp_path: Path, scheme: str) -> None:
    plain = store_quantized(models["plain"], tmp_path, *SCHEMES[scheme])
    assert stored_expert_weights(tmp_path / "quantized", read_model_config(tmp_path / "quantized")) == "dtype"
    for kept in KEPT:
        assert torch.equal(outputs(experts_of(tmp_path / "quantized", kept)), outputs(experts_of(plain, kept)))


@pytest.mark.parametrize("kept", KEPT)
def test_rows_of_experts_are_their_own_in_strict_numerics(models: Any, kept: KeptWeights) -> None:
    experts = experts_of(models["plain"], kept, "bfloat16", blocks=StrictBlocks())
    experts.prove()
    many = outputs(experts)
    assert many.dtype == torch.bfloat16
    generator = torch.Generator().manual_seed(24)
    x_RH = torch.randn(24, experts.config.hidden_size, generator=generator).to(torch.bfloat16)
    for row in range(24):
        alone = experts.forward_pairs(1, x_RH[row : row + 1], torch.tensor([0]), torch.tensor([row % experts.config.num_experts]))
        assert torch.equal(alone[0], many[row])
    fast = outputs(experts_of(models["plain"], kept, "bfloat16"))
    torch.testing.assert_close(fast, many, rtol=0.02, atol=0.03)  # strict numerics round between the two products


def test_weights_in_8_bits_take_half_the_memory_of_bfloat16(tmp_path: Path) -> None:
    directory = make_large_checkpoint(tmp_path / "large")
    half = 4 * 11 * 3 * 768 * 512
    plain = loading_growth(str(directory), "bfloat16", "dtype")
    for kept in KEPT:
        found = loading_growth(str(directory), "bfloat16", kept)
        assert all(saved > 0.4 * half for saved in map(sub, plain, found))  # the rest is code, and buffers of one matrix
