"""Payloads of ones, of which every byte is read and compared with a known checksum."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np


def check(data: np.ndarray[Any, Any]) -> None:
    """Reads every byte. Raises ValueError when one is not 1."""
    import xxhash

    if xxhash.xxh3_64_intdigest(data.data) != digest_of_ones(data.nbytes):
        raise ValueError(f"{data.nbytes} bytes arrived with another checksum than they were sent with")


@lru_cache(maxsize=256)
def digest_of_ones(num_bytes: int) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(np.ones(num_bytes, np.uint8).data)
