"""Products of rows with matrices in panels: whether the bits of a row are its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def product(matrix: Any, rows: Tensor, dtype: torch.dtype, num_threads: int = 1) -> Tensor:
    """By the function in C, which must write nothing behind the last row."""
    y = torch.full((len(rows) + 1, matrix.shape[0]), 7.0, dtype=dtype)
    matrix.into(rows.data_ptr(), y.data_ptr(), len(rows), [matrix.address], [len(rows)], num_threads)
    assert (y[-1] == 7.0).all()
    return y[:-1]


def check_rows(matrix: Any, rows: Tensor, alone: Tensor, counts: Iterable[int]) -> None:
    """Rows have the results that they have alone, whatever number comes, wherever they stand, and with any number of threads."""
    for num_rows in counts:
        for start, num_threads in ((0, 1), (9, 2), (3, 3)):
            found = product(matrix, rows[start : start + num_rows], alone.dtype, num_threads)
            assert torch.equal(found, alone[start : start + num_rows])
