"""The leak checks of conftest.py find what they are there to find: each kind of leak is planted in a small test run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PLANTED = """
import asyncio, mmap, os, subprocess, threading, time
kept = []

async def test_task():
    kept.append(asyncio.get_running_loop().create_task(asyncio.sleep(60)))

def test_descriptor():
    os.open("/etc/hostname", os.O_RDONLY)

def test_process():
    kept.append(subprocess.Popen(["sleep", "60"]))

def test_orphan():
    subprocess.run(["sh", "-c", "sleep 60 & exit 0"], stdout=subprocess.DEVNULL)

def test_memfd():
    fd = os.memfd_create("planted")
    os.ftruncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)

def test_thread():
    threading.Thread(target=time.sleep, args=(5,), name="compute-0", daemon=True).start()

async def test_clean(loop_kind):
    await asyncio.sleep(0.001)
    assert loop_kind in ("asyncio", "uvloop")
"""
EXPECTED = {
    "test_task": "tasks left running",
    "test_descriptor": "descriptor",
    "test_process": "process",
    "test_orphan": "process",
    "test_memfd": "shared memory",
    "test_thread": "compute thread",
}


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors and orphans are counted on Linux only")
def test_each_planted_leak_fails_its_test_and_a_clean_test_passes(tmp_path: Path) -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_SECONDS = 20.0", "GRACE_SECONDS = 0.2"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    (tmp_path / "test_planted.py").write_text(PLANTED)
    command = [sys.executable, "-m", "pytest", "-rE", "--tb=short", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "COLUMNS": "300", "PYTHONPATH": str(ROOT / "tests")}
    outcome = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    errors = [line for line in outcome.stdout.splitlines() if line.startswith("ERROR")]
    for test, words in EXPECTED.items():
        assert any(f"::{test}" in line and ("left behind" in line or words in line) for line in errors), outcome.stdout
    assert len(errors) == len(EXPECTED), outcome.stdout  # the clean test is not among them
    for words in EXPECTED.values():
        assert words in outcome.stdout
