"""The launching process stays light: what loading flowrt, and asking for help, must not load. No clock is read."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "zmq", "numpy", "transformers", "matplotlib", "starlette", "uvicorn")


# From light to heavy: what each step loads is printed before the next.
STEPS = {
    "the message": "import flowrt.transports.wire.message, flowrt.transports.contract",
    "the graph": "import flowrt.graph.model, flowrt.actors.control",
    "the launcher": "import flowrt.launcher.launcher",
    "import flowrt": "import flowrt",
    "help": """
sys.argv = ["flowrt", "--help"]
from flowrt.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
""",
}


def test_what_the_launching_process_loads_is_light() -> None:
    report = "print('loaded after {}:', *[name for name in {!r} if name in sys.modules])"
    code = "\n".join(["import sys", *(f"{step}\n{report.format(name, HEAVY)}" for name, step in STEPS.items())])
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert [line for line in outcome.stdout.splitlines() if line.startswith("loaded after")] == [f"loaded after {name}:" for name in STEPS]
