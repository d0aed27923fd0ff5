"""Fingerprints the files of a model directory, so that a worker that loads other weights than the first is noticed.

Only metadata and the first bytes are read: the safetensors header, or most of it. A file that was written again counts as changed even if
its bytes are the same: to compare gigabytes of them would cost more than the restart that it guards.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from flowrt.operators.checkpoint_files import INDEX_NAME
from flowrt.operators.families.config_file import regular_file_bytes

HEAD_BYTES = 1 << 16


def fingerprints(directory: Path) -> dict[str, str]:
    """A digest of size and first bytes, "@" and the modification time, by path, of each file that determines the weights."""
    paths = [directory / "config.json", directory / INDEX_NAME, *sorted(directory.glob("*.safetensors"))]
    found = {}
    for path in paths:
        if path.exists():
            digest = blake2b(f"{regular_file_bytes(path)} ".encode(), digest_size=8)
            with path.open("rb") as file:
                digest.update(file.read(HEAD_BYTES))
            found[str(path)] = f"{digest.hexdigest()}@{path.stat().st_mtime_ns}"
    return found
