"""Records in a file which seeds were run, so that ranges of seeds add up, and a range that was interrupted goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from flowrt.errors import UserError

BLOCK_SEEDS = 100


class SeedBlock(msgspec.Struct, frozen=True):
    """A line of the file: `seeds` seeds from `first` on have run, of which those in `failed` failed."""

    first: int
    seeds: int
    failed: list[int] = []


class SeedRecord:
    """Several processes may append to one file. The seeds in it must be of one commit, as the seeds of another one are other runs."""

    def __init__(self, path: Path) -> None:
        """Raises UserError for a file that is not a record."""
        self._path, self._block = path, SeedBlock(0, 0)
        self._seeds, self._failed = set[int](), set[int]()
        try:
            for line in path.read_bytes().splitlines() if path.exists() else ():
                self._add(msgspec.json.decode(line, type=SeedBlock))
        except (OSError, msgspec.MsgspecError) as error:
            raise UserError(f"{path} is not a record of seeds: {error}; name another file") from None

    def missing(self, seeds: Iterable[int]) -> Iterator[int]:
        return (seed for seed in seeds if seed not in self._seeds)

    def has_failed(self, seeds: range) -> bool:
        """Whether one of these seeds has failed, now or when it was run before."""
        return any(seed in seeds for seed in self._failed)

    def note(self, seed: int, has_failed: bool) -> None:
        """A seed has run. Call `flush` after the last one."""
        block = self._block
        if seed != block.first + block.seeds or block.seeds == BLOCK_SEEDS:
            self.flush()
            block = SeedBlock(seed, 0)
        self._block = SeedBlock(block.first, block.seeds + 1, block.failed + [seed] * has_failed)

    def flush(self) -> None:
        if self._block.seeds:
            self._add(self._block)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(self._block) + b"\n")
        self._block = SeedBlock(0, 0)

    def total(self) -> str:
        return f"{self._path}: {len(self._seeds)} seeds, failed: {', '.join(map(str, sorted(self._failed))) or 'none'}"

    def _add(self, block: SeedBlock) -> None:
        self._seeds.update(range(block.first, block.first + block.seeds))
        self._failed.update(block.failed)
