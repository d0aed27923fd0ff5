"""What a call of an operator computes: its load, the bytes and flops of that, and the least time in which a machine does it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class FiringLoad(NamedTuple):
    """What a call computes in one layer: rows (of experts: pairs of a row and an expert), experts that have rows, and tokens of context of
    all sequences. `num_scores`: pairs of a row and a token that it attends to; 0: each row is the newest token of its sequence, so that
    there are as many as tokens of context. Numbers of a typical call may be fractions."""

    num_rows: float
    num_experts: float = 0
    num_kv_tokens: float = 0
    num_scores: float = 0


class Work(NamedTuple):
    """What a load needs in one layer: every weight, input and result is read or written once; a multiplication and its addition are two
    flops."""

    num_bytes: float
    num_flops: float = 0

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)


class KernelWork(NamedTuple):
    """Work of one kernel of a call, in `dtype`, with so many rows in each matrix product. `attends`: it is attention over cached
    tokens."""

    work: Work
    dtype: str
    rows: float
    attends: bool = False


@dataclass(frozen=True)
class MachineLimits:
    """What a machine does at most with so many threads. `flops_per_second`: by dtype."""

    num_threads: int
    read_bytes_per_second: float
    flops_per_second: dict[str, float]

    def seconds(self, work: Work, dtype: str) -> float:
        """The minimum for this work: the roofline (Williams et al., CACM 2009)."""
        return max(work.num_bytes / self.read_bytes_per_second, work.num_flops / self.flops_per_second[dtype])
