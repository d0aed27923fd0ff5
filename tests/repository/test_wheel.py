"""A wheel that is built from the source distribution, without a compiler, answers the demo's prompts without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from repository.source_tree import FOLDERS, ROOT

_BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def run(*words: str | Path, folder: Path, **changes: str) -> tuple[str, str]:
    # -P: the folder of a script or of -c is not searched for modules
    done = subprocess.run(
        [sys.executable, "-P", *map(str, words)], cwd=folder, env={**os.environ, **changes}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_the_wheel_of_the_source_distribution_runs_the_demo(tmp_path: Path) -> None:
    source, built, installed, elsewhere = (tmp_path / name for name in ("source", "built", "installed", "elsewhere"))
    for folder in (source, elsewhere):
        folder.mkdir()
    for folder in (*FOLDERS, "examples"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run("-c", _BUILD, "build_sdist", built, folder=source)
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = next(path for path in tmp_path.glob("flowrt-*") if path.is_dir())
    run("-c", _BUILD, "build_wheel", built, folder=unpacked, CC="/bin/false")
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = archive.namelist()
        assert not [name for name in names if name.endswith(".so")]
        pages = {path.name for path in (ROOT / "flowrt" / "serving" / "page").iterdir()}
        assert {name.rpartition("/")[2] for name in names if name.startswith("flowrt/serving/page/")} == pages
        archive.extractall(installed)
    code = "import flowrt, flowrt.cli.app as app, sys; assert flowrt.__file__.startswith(sys.argv.pop(1)), flowrt.__file__; app.main()"
    words = ("-c", code, f"{installed}/", "demo", "--prompt", "What is 347 + 285?")
    out, err = run(*words, folder=elsewhere, PYTHONPATH=str(installed))
    assert out.split() == ["632"]
    between = err.partition("between processes")[2].partition("latency")[0]
    assert "zmq" in between
    assert "shm" not in between
