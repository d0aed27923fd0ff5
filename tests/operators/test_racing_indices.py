"""No kernel uses an index that changed after its check: another process writes the indices during the calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrt.operators.kernels.cpu import rows


@pytest.mark.skipif(not rows.available, reason="without a compiler there are only the library's calls")
def test_kernels_survive_indices_that_change_during_the_call() -> None:
    script = Path(__file__).with_name("racing_indices.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the package under test, wherever it is
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, f"a process ended with {ended.returncode} in {ended.stdout.splitlines()[-1:]}: {ended.stderr[-2000:]}"
    assert ended.stdout.splitlines()[-1] == "done"
