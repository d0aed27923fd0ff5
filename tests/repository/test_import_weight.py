"""The launching process stays light: what loading flowrt, and asking for help, must not load. No clock is asked."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "zmq", "numpy", "transformers", "matplotlib", "starlette", "uvicorn")


def loaded_after(code: str) -> set[str]:
    """Names of HEAVY in sys.modules of a fresh interpreter after `code`."""
    report = f"\nimport sys\nprint('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    outcome = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    line = outcome.stdout.splitlines()[-1]
    assert line.startswith("loaded:"), outcome.stdout
    return set(line.split()[1:])


def test_import_flowrt_loads_nothing_heavy() -> None:
    assert loaded_after("import flowrt") == set()


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
sys.argv = ["flowrt", "--help"]
from flowrt.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert loaded_after(code) == set()


def test_the_message_and_the_graph_load_nothing_heavy() -> None:
    assert loaded_after("import transports.message, transports.contract, flowrt.graph.model, flowrt.actors.control") == set()
