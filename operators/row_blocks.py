"""Runs functions of rows on all rows at once, or in blocks of fixed sizes, so that the bits of a row do not depend on other rows.

`RowBlocks` is for `numerics: fast`, `StrictBlocks` for `numerics: strict`; flowrt/workers chooses one for each operator. Attention over
contexts does not use blocks: strict numerics run it sequence by sequence (attention_plan.py).

Why blocks: libraries change the order of additions with the number of rows. Loops treat rows differently that do not fill a vector or
that lie at the border between threads. In a block of a proven size the bits of a row depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flowrt.operators.model_config import ModelError
from flowrt.operators.products import Form, Panels, Product, form_for, lay_out, panel_product

SIZES = (4, 8, 16, 32, 64, 128)
PROOF_ROWS = SIZES[-1]  # rows of a proof
PROOF_ELEMENTS = 1 << 14  # minimum number of results to compare, if there are enough: another order of additions changes many of them
MIN_PROOF_ROWS = 8  # minimum number of rows to compare, even when one row has more results than that
ALIGNMENT_BYTES = 64  # alignment of torch's allocations; products may use another order for other addresses

_NOT_COMPUTED = {
    "empty",
    "empty_like",
    "new_empty",
    "chunk",
    "split",
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "unsqueeze",
    "__getitem__",
    "t",
    "copy_",
}
Function = Callable[..., Tensor | tuple[Tensor, ...]]
Result = TypeVar("Result", Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor])


class RowBlocks:
    """Runs all rows at once (numerics: fast)."""

    strict = False

    def run(self, name: str, function: Callable[..., Result], *rows: Tensor) -> Result:
        """Calls `function` with tensors of T rows each, and returns its result: one tensor of T rows, or several.

        The function must compute each row independently. `name` identifies the function and the shapes of its weights.
        """
        return function(*rows)

    def settled(self, x: Tensor) -> Tensor:
        """The tensor, or a copy whose alignment does not depend on the tensor that it is a slice of."""
        return x


WHOLE = RowBlocks()


class StrictBlocks(RowBlocks):
    """Runs rows in blocks of proven sizes: the bits of a row are the same at every place, with any neighbours, and in every size.

    The first call under a name makes the proof and must have PROOF_ROWS rows; workers make it while they load.
    """

    strict = True

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, ...]] = {}

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """The block sizes in use, ascending, by name of the function."""
        return self._sizes

    def adopt(self, sizes: Mapping[str, Sequence[int]]) -> None:
        """Use block sizes that another process of this host has proven, with the same number of threads."""
        self._sizes.update({name: tuple(each) for name, each in sizes.items()})

    def run(self, name: str, function: Callable[..., Result], *rows: Tensor) -> Result:
        """Works as RowBlocks.run. Raises ModelError when no block size passes the proof."""
        sizes = self._sizes.get(name)
        if sizes is None:
            sizes = self._sizes[name] = _proven_sizes(name, function, rows)
        num_rows = rows[0].shape[0]
        if not num_rows:
            return function(*rows)
        found = [_as_tuple(function(*(_block(x, start, size) for x in rows))) for start, size in _block_ranges(num_rows, sizes)]
        joined = tuple(_concatenated(pieces, num_rows) for pieces in zip(*found, strict=True))
        return cast("Result", joined if len(joined) > 1 else joined[0])

    def settled(self, x: Tensor) -> Tensor:
        return x if x.is_contiguous() and x.data_ptr() % ALIGNMENT_BYTES == 0 else x.clone(memory_format=torch.contiguous_format)


def describe(sizes: Mapping[str, tuple[int, ...]]) -> str:
    """One line of text that lists the block sizes of each function."""
    by_sizes: dict[tuple[int, ...], list[str]] = {}
    for name, each in sizes.items():
        by_sizes.setdefault(each, []).append(name)
    return "; ".join(f"blocks of {_range(each)} rows: {', '.join(names)}" for each, names in sorted(by_sizes.items()))


def _range(sizes: tuple[int, ...]) -> str:
    doubling = len(sizes) > 2 and all(large == 2 * small for small, large in pairwise(sizes))
    return f"{sizes[0]}, {sizes[1]} to {sizes[-1]}" if doubling else " or ".join(map(str, sizes))


def _block_ranges(num_rows: int, sizes: Sequence[int]) -> Iterable[tuple[int, int]]:
    """(start, size) of each block: the largest size while blocks are full, then the smallest size that holds the rest."""
    start = 0
    while start < num_rows:
        size = next((size for size in sizes if size >= num_rows - start), sizes[-1])
        yield start, size
        start += size


def _block(x: Tensor, start: int, size: int) -> Tensor:
    """Rows start to start + size, contiguous and aligned, padded with zeros after the last row."""
    piece = x[start : start + size]
    if piece.shape[0] == size and piece.is_contiguous() and piece.data_ptr() % ALIGNMENT_BYTES == 0:
        return piece
    block = x.new_zeros((size, *x.shape[1:]))
    block[: piece.shape[0]] = piece
    return block


def _concatenated(pieces: Sequence[Tensor], num_rows: int) -> Tensor:
    return (pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces)))[:num_rows].contiguous()


def _as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


# --- the proof ----------------------------------------------------------------------------------------------------------------


class _Recorder(TorchFunctionMode):
    """Records every intermediate result of a function, because bfloat16 rounding may hide a difference in the final result."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._seen: dict[torch.dtype, list[Tensor]] = {}  # [T, n] each
        # Of bytes too few to show an order of additions: dtype, inputs, outputs, the form in panels; None: one of the library's.
        self.products: list[tuple[torch.dtype, int, int, Form | None]] = []
        self._num_rows = num_rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _NOT_COMPUTED:
            self.note(result)
        is_product = func in (F.linear, panel_product) or getattr(func, "__name__", "") == "_linear_pointwise"
        if is_product and result.itemsize < 4:
            form: Form | None = None if func is not panel_product else "panels" if isinstance(args[1], Panels) else "wide panels"
            self.products.append((result.dtype, args[0].shape[-1], result.shape[-1], form))
        return result

    def note(self, result: Any) -> None:
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, Tensor) and each.dim() and each.shape[0] == self._num_rows and each.numel():
                with torch._C.DisableTorchFunction():
                    # A copy, because the next operation may work in place.
                    self._seen.setdefault(each.dtype, []).append(each.clone().reshape(self._num_rows, -1))

    def bits(self) -> Tensor:
        """Bytes [T, n] of everything recorded."""
        return torch.cat([torch.cat(tensors, dim=1).view(torch.uint8) for tensors in self._seen.values()], dim=1).cpu()


@torch.inference_mode()
def _proven_sizes(name: str, function: Function, rows: Sequence[Tensor]) -> tuple[int, ...]:
    """The largest set of sizes that all give the same bits, at every place and beside any neighbours."""
    if rows[0].shape[0] != PROOF_ROWS:
        raise RuntimeError(f"{name} was not proven when it was loaded: the first call must bring {PROOF_ROWS} rows, not {rows[0].shape[0]}")
    function, rows = _with_cancelling_products(function, rows)
    row_elements = _bits(function, [x[:1] for x in rows]).shape[1] // 4
    num_compared = next((size for size in SIZES if size >= MIN_PROOF_ROWS and size * row_elements >= PROOF_ELEMENTS), PROOF_ROWS)
    classes: list[tuple[Tensor, list[int]]] = []
    for size in SIZES:
        bits = _bits_in_blocks(function, rows, size, max(num_compared, size))
        if not _is_independent_of_place(function, rows, size, bits):
            continue
        for known, members in classes:
            if torch.equal(known, bits[:num_compared]):
                members.append(size)
                break
        else:
            classes.append((bits[:num_compared], [size]))
    if not classes:
        raise ModelError(
            f"strict numerics are not possible on this machine: in no block size up to {PROOF_ROWS} are a row's bits the same in every"
            f" place ({name}); write numerics: fast"
        )
    best = max((members for _, members in classes), key=lambda members: (len(members), members[-1]))
    return tuple(best)


def _with_cancelling_products(function: Function, rows: Sequence[Tensor]) -> tuple[Function, list[Tensor]]:
    """Extends the function by 16-bit products of the same shapes as its own, of rows and weights whose exact product is 0.

    The results of these products are rounding errors alone, so another order of additions changes every number, not one of ten thousand.
    """
    watch = _Recorder(PROOF_ROWS)
    with watch:
        function(*(x.clone() for x in rows))
    generator = torch.Generator().manual_seed(1)
    made: list[tuple[Tensor, Product]] = []
    device = rows[0].device
    for dtype, num_inputs, num_outputs, form in sorted(set(watch.products), key=str):
        order = torch.randperm(num_inputs, generator=generator)
        half = num_inputs // 2
        exponents = torch.randint(-8, 9, (num_outputs, half), generator=generator)
        weights = torch.ldexp(torch.randn((num_outputs, half), generator=generator).to(dtype), exponents).to(dtype)
        plus_or_minus_one = torch.randn((PROOF_ROWS, half), generator=generator).sign().to(dtype)
        odd = torch.zeros((1, num_inputs - 2 * half), dtype=dtype)
        x = torch.cat((plus_or_minus_one, plus_or_minus_one, odd.expand(PROOF_ROWS, -1)), dim=1)[:, order].to(device)
        weight = torch.cat((weights, -weights, odd.expand(num_outputs, -1)), dim=1)[:, order].to(device)
        made.append((x, lay_out(weight, form or form_for(dtype, device.type))))

    def extended(*blocks: Tensor) -> tuple[Tensor, ...]:
        products = [product(x) for x, (_, product) in zip(blocks[len(rows) :], made, strict=True)]
        return *_as_tuple(function(*blocks[: len(rows)])), *products

    return extended, [*rows, *(x for x, _ in made)]


def _is_independent_of_place(function: Function, rows: Sequence[Tensor], size: int, bits: Tensor) -> bool:
    """Whether rows keep their bits when computed in another order, beside other rows, or alone among zeros."""
    generator = torch.Generator().manual_seed(size)
    orders = [torch.arange(size).flip(0), torch.arange(size).roll(size // 2 + 1)]
    orders += [torch.randperm(bits.shape[0], generator=generator)[:size] for _ in range(2)]
    for order in orders:
        if not torch.equal(_bits(function, [x[order.to(x.device)] for x in rows]), bits[order]):
            return False
    for place in (0, size // 2, size - 1):
        alone = [torch.zeros_like(x[:size]) for x in rows]
        for block, x in zip(alone, rows, strict=True):
            block[place] = x[0]
        if not torch.equal(_bits(function, alone)[place], bits[0]):
            return False
    return True


def _bits_in_blocks(function: Function, rows: Sequence[Tensor], size: int, num_rows: int) -> Tensor:
    return torch.cat([_bits(function, [_block(x, start, size) for x in rows]) for start in range(0, num_rows, size)])


def _bits(function: Function, rows: Sequence[Tensor]) -> Tensor:
    """All results for each row, intermediate ones included, as bytes [T, n]. Inputs are copied, since it may overwrite them."""
    inputs = [x.clone(memory_format=torch.contiguous_format) for x in rows]
    watch = _Recorder(rows[0].shape[0])
    with watch:
        result = function(*inputs)
    watch.note(_as_tuple(result))
    return watch.bits()
