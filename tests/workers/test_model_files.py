"""Fingerprints of model files: each change that may change a weight changes the one of its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowrt.workers.model_files import fingerprints


@pytest.mark.parametrize("change", ["size", "time", "header"])
def test_a_changed_file_has_another_fingerprint(tmp_path: Path, change: str) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    for path in (tmp_path / "config.json", one, two):
        path.write_bytes(b"\x10\0\0\0\0\0\0\0header" + bytes(1 << 17))
    before, status = fingerprints(tmp_path), two.stat()
    assert list(before) == [str(tmp_path / "config.json"), str(one), str(two)]
    assert fingerprints(tmp_path) == before
    match change:
        case "size":
            two.write_bytes(two.read_bytes() + b"x")
        case "header":
            two.write_bytes(two.read_bytes().replace(b"header", b"footer"))
    os.utime(two, ns=(status.st_atime_ns, status.st_mtime_ns + (change == "time")))
    after = fingerprints(tmp_path)
    assert {path for path in before if before[path] != after[path]} == {str(two)}
