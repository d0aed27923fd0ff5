"""Multiplies rows by the experts of one layer that a process holds, one by one or all in one product (EPS-MoE, section III-B).

*Grouped*: one product per expert that has rows, of exactly these rows. *Dense*: one batched product of all held experts, each padded to
the largest row count. Dense makes fewer, larger calls, but also computes zero rows and experts without rows. The faster kind depends on
the load, the library and the machine, so a small profile is measured once, with the weights of the first layer. The profile also measures
matrices that are laid out one by one, packed or in panels. On CUDA one grouped product computes all experts, and the row counts stay on
the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowrt.operators.dense import gated_silu
from flowrt.operators.products import COPIED, Form, InPanels, Plain, Product, form_for, lay_out, segment_products, shared_form

LOADS = (1, 3, 6, 9, 16)  # rows per expert that a profile measures; a load in between takes the time of the next larger one
MEAN_LOADS = (1, 2, 4)  # mean rows per expert in decoding, which decide how experts are held
SPREAD = (0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.5, 2.5)  # distribution of rows over experts, as multiples of the mean
PROFILE_BYTES = 64 << 20  # weights that a profile reads: enough that they come from memory, as in a step, not from a cache
ROWS_ALIKE = 16  # products of more rows than this use a multiple of it
PROFILE_SECONDS = 0.4  # time limit: no further load is measured after it


class LayerExperts(ABC):
    """The held experts of one layer, numbered in the order in which they were read."""

    @abstractmethod
    def run(self, x_PH: Tensor, counts_E: Tensor) -> Tensor:
        """y_PH: each row of x_PH through its expert. Rows are sorted by expert; `counts_E` (int64) is the row count of each held expert."""

    @abstractmethod
    def expert(self, place: int) -> Callable[[Tensor], Tensor]:
        """One expert as a function of rows."""


@dataclass(frozen=True)
class Profile:
    """Seconds per expert at each of `loads` rows, by kind of product. Its choices are pure functions of these numbers."""

    loads: tuple[int, ...]
    grouped_seconds: tuple[float, ...]
    dense_seconds: tuple[float, ...]

    def dense_pays(self, counts: Sequence[int]) -> bool:
        """Whether one batched product, padded to the largest count, takes less time than one product for each nonzero count."""
        return max(counts, default=0) <= self.loads[-1] and self.dense(counts) < self.grouped(counts)

    def grouped(self, counts: Sequence[int]) -> float:
        """Seconds of one product for each nonzero count."""
        return sum(self._at(self.grouped_seconds, count) for count in counts if count)

    def dense(self, counts: Sequence[int]) -> float:
        """Seconds of one batched product."""
        return len(counts) * self._at(self.dense_seconds, max(counts, default=0))

    def fastest(self, counts: Sequence[int]) -> float:
        """Seconds of the faster of the two kinds."""
        return self.dense(counts) if self.dense_pays(counts) else self.grouped(counts)

    def _at(self, seconds: tuple[float, ...], load: int) -> float:
        return seconds[min(bisect_left(self.loads, load), len(seconds) - 1)]


def window(start: int, count: int, num_rows: int) -> tuple[int, int]:
    """(first row, row count) of the product that covers the `count` rows from `start`, of `num_rows` rows in all.

    Counts above ROWS_ALIKE are rounded up to a multiple of it, with rows of neighbouring experts, if there are enough rows. The library
    compiles and keeps a product for each number of rows: seconds and a gigabyte for all numbers up to a few hundred. Its instructions take
    about 16 rows at a time, so the extra rows cost little; their results are ignored.
    """
    taken = -(-count // ROWS_ALIKE) * ROWS_ALIKE
    if count <= ROWS_ALIKE or taken > num_rows:
        return start, count
    return min(start, num_rows - taken), taken


NEVER_DENSE = Profile((0,), (0.0,), (0.0,))


class GroupedExperts(LayerExperts):
    """Holds a laid-out pair of matrices per expert, and computes one product per expert that has rows."""

    def __init__(self, experts: Sequence[tuple[Product, Product]]) -> None:
        self._experts = tuple(experts)

    def run(self, x_PH: Tensor, counts_E: Tensor) -> Tensor:
        return self.run_counted(x_PH, counts_E.tolist())

    def run_counted(self, x_PH: Tensor, counts: Sequence[int]) -> Tensor:
        """Works as `run` for counts that are on the host."""
        num_rows = len(x_PH)
        pieces = []
        for expert, count, end in zip(self._experts, counts, accumulate(counts), strict=True):
            if count:
                first, taken = window(end - count, count, num_rows)
                skipped = end - count - first
                y_RH = _expert(*expert, x_PH[first : first + taken])
                pieces.append(y_RH if taken == count else y_RH[skipped : skipped + count])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.empty_like(x_PH)

    def expert(self, place: int) -> Callable[[Tensor], Tensor]:
        return partial(_expert, *self._experts[place])


class PanelExperts(GroupedExperts):
    """Grouped experts in panels: one call multiplies all rows by the matrices of their experts, and one activates all rows."""

    _experts: tuple[tuple[InPanels[Any], InPanels[Any]], ...]

    def __init__(self, experts: Sequence[tuple[InPanels[Any], InPanels[Any]]]) -> None:
        """`experts` holds at least one expert."""
        super().__init__(experts)
        self._gate_up, self._down = (SegmentedProduct(each) for each in zip(*experts, strict=True))

    def run_counted(self, x_PH: Tensor, counts: Sequence[int], activate: Callable[[Tensor], Tensor] = gated_silu) -> Tensor:
        """`activate` computes gated_silu."""
        return self._down(activate(self._gate_up(x_PH, counts)), counts).to(x_PH.dtype)

    def expert(self, place: int) -> Callable[[Tensor], Tensor]:
        alone = PanelExperts([self._experts[place]])
        return lambda x_RH: alone.run_counted(x_RH, [len(x_RH)])


class StackedExperts(LayerExperts):
    """Holds the matrices in two stacks, and uses the product that the profile selects."""

    def __init__(self, gate_up: Tensor, down: Tensor, profile: Profile) -> None:
        """gate_up [n, 2F, H], down [n, H, F]."""
        self._gate_up, self._down, self._profile = gate_up, down, profile
        self._grouped = _grouped(gate_up, down, shared_form(gate_up))

    def run(self, x_PH: Tensor, counts_E: Tensor) -> Tensor:
        counts: list[int] = counts_E.tolist()
        if self._profile.dense_pays(counts):
            return dense(self._gate_up, self._down, x_PH, counts)
        return self._grouped.run_counted(x_PH, counts)

    def expert(self, place: int) -> Callable[[Tensor], Tensor]:
        return self._grouped.expert(place)


class DeviceExperts(LayerExperts):
    """Holds the matrices in two stacks on an accelerator, and uses the library's grouped product. Row counts stay on the device."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """gate_up [n, 2F, H], down [n, H, F]."""
        self._gate_up, self._down = gate_up, down

    def run(self, x_PH: Tensor, counts_E: Tensor) -> Tensor:
        ends_E = counts_E.cumsum(0).to(torch.int32)
        width = gated_silu(F.grouped_mm(x_PH, self._gate_up.transpose(1, 2), offs=ends_E))
        return F.grouped_mm(width, self._down.transpose(1, 2), offs=ends_E)

    def expert(self, place: int) -> Callable[[Tensor], Tensor]:
        return partial(_expert, Plain(self._gate_up[place]), Plain(self._down[place]))


def dense(gate_up: Tensor, down: Tensor, x_PH: Tensor, counts: Sequence[int]) -> Tensor:
    """y_PH as from GroupedExperts, by one batched product of all experts, each padded with zeros to the largest count."""
    most, num_experts = max(counts), len(counts)
    if min(counts) == most:
        return _batched(gate_up, down, x_PH.view(num_experts, most, -1)).flatten(0, 1)
    places_P = torch.tensor([place * most + row for place, count in enumerate(counts) for row in range(count)])
    padded = x_PH.new_zeros(num_experts * most, x_PH.shape[1]).index_copy_(0, places_P, x_PH)
    return _batched(gate_up, down, padded.view(num_experts, most, -1)).flatten(0, 1).index_select(0, places_P)


def one_by_one(gate_up: Sequence[Product], down: Sequence[Product]) -> GroupedExperts:
    """The experts of these laid-out matrices, as the class that suits their form."""
    pairs = [(a, b) for a, b in zip(gate_up, down, strict=True) if isinstance(a, InPanels) and isinstance(b, InPanels)]
    return PanelExperts(pairs) if pairs and len(pairs) == len(gate_up) else GroupedExperts(list(zip(gate_up, down, strict=True)))


def profile_size(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """The number of experts that a profile measures: PROFILE_BYTES of weights."""
    return max(1, PROFILE_BYTES // (sum(rows * columns for rows, columns in shapes) * dtype.itemsize))


def take_profile(gate_up: Tensor, down: Tensor, now: Callable[[], float]) -> Form | Profile:
    """Measures how experts of these shapes are best held on this machine (`profile_size` gives their number).

    Returns the form in which they are laid out one by one, or the Profile for StackedExperts. `now` is a clock in seconds.
    """
    number = len(gate_up)
    kinds: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
        "dense": partial(dense, gate_up, down),
        "grouped": _grouped(gate_up, down, shared_form(gate_up)).run_counted,
    }
    laid_out: set[Form] = {form_for(gate_up.dtype), form_for(gate_up.dtype, "cpu", *_shapes(gate_up, down))} & COPIED
    kinds |= {form: _grouped(gate_up, down, form).run_counted for form in laid_out}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    deadline = now() + PROFILE_SECONDS
    for load in LOADS:
        x_PH = gate_up.new_ones(number * load, gate_up.shape[2])
        for kind, run in kinds.items():
            seconds[kind].append(_fastest(partial(run, x_PH, [load] * number), now) / number)
        if now() > deadline:
            break
    return choose_form(LOADS[: len(seconds["dense"])], seconds["grouped"], seconds["dense"], {form: seconds[form] for form in laid_out})


def choose_form(
    loads: Sequence[int], grouped_seconds: Sequence[float], dense_seconds: Sequence[float], laid_out_seconds: Mapping[Form, Sequence[float]]
) -> Form | Profile:
    """The form whose products are faster than those of stacks over MEAN_LOADS, with equal weights; else the profile for stacks. Pure.

    Rows are spread unevenly over experts (SPREAD): one expert may get three times as many rows as its neighbour, or none. Where the clock
    stood still, as it does in a simulation, no form is faster.
    """
    stacked = Profile(tuple(loads), tuple(grouped_seconds), tuple(dense_seconds))
    if min(*grouped_seconds, *dense_seconds) <= 0:
        return stacked
    spread = [[round(share * mean) for share in SPREAD] for mean in MEAN_LOADS]
    ratios: dict[Form, float] = {}
    for form, seconds in laid_out_seconds.items():
        alone = Profile(tuple(loads), tuple(seconds), tuple(seconds))
        ratios[form] = prod(alone.grouped(counts) / stacked.fastest(counts) for counts in spread)
    best = min(ratios, key=ratios.__getitem__, default=None)
    return best if best is not None and ratios[best] < 1 else stacked


def has_grouped_product(dtype: torch.dtype, device_type: str, *widths: int) -> bool:
    """Whether the library's grouped product takes these matrices without asking the host for sizes."""
    return device_type == "cuda" and dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and all(width % 8 == 0 for width in widths)


def _grouped(gate_up: Tensor, down: Tensor, form: Form) -> GroupedExperts:
    return one_by_one(*([lay_out(matrix, form) for matrix in matrices] for matrices in (gate_up, down)))


def _shapes(*stacks: Tensor) -> list[tuple[int, int]]:
    return [(stack.shape[1], stack.shape[2]) for stack in stacks]


class SegmentedProduct:
    """Matrices of one shape, multiplied in one call. They must not change their place in memory."""

    def __init__(self, matrices: Sequence[InPanels[Any]]) -> None:
        assert len({(type(matrix), matrix.shape, matrix.num_bytes) for matrix in matrices}) == 1
        self._matrices, self._addresses = matrices, [matrix.address for matrix in matrices]

    def __call__(self, x_PK: Tensor, counts: Sequence[int]) -> Tensor:
        """y_PN: the rows of each matrix multiplied by it."""
        return segment_products(x_PK, self._matrices[0], self._addresses, counts)


def _expert(gate_up: Product, down: Product, x_RH: Tensor) -> Tensor:
    return down(gated_silu(gate_up(x_RH)))


def _batched(gate_up: Tensor, down: Tensor, x_EMH: Tensor) -> Tensor:
    return torch.bmm(gated_silu(torch.bmm(x_EMH, gate_up.transpose(1, 2))), down.transpose(1, 2))


def _fastest(run: Callable[[], Tensor], now: Callable[[], float]) -> float:
    """Seconds of the faster of two calls after a warm-up call. Interference only adds time, so the minimum is the best estimate."""
    run()
    seconds = []
    for _ in range(2):
        start = now()
        run()
        seconds.append(now() - start)
    return min(seconds)
