"""Mutated graph files give one line and the right exit code; `make hostile` runs more of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from graph.mutated_files import failures


def test_mutated_files_give_one_line(tmp_path: Path) -> None:
    codes: Counter[int] = Counter()
    assert list(failures(150, 0, tmp_path, codes)) == []
    assert codes[0] >= 3
    assert codes[2] >= 50
