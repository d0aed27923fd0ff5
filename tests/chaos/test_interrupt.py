"""Ctrl-C during a chaos run: it is reported once, all processes end, and the record so far is written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from left_processes import left_processes

from flowrt.chaos.leaks import children_of

ROOT = Path(__file__).resolve().parents[2]


def test_interrupt_ends_all_processes_and_writes_the_record(tmp_path: Path) -> None:
    plan, record = tmp_path / "plan.yaml", tmp_path / "found.json"
    faults = "{fault: crash, process: experts.1, at_seconds: 0}, {fault: stall, process: attention.0, at_seconds: 0, for_seconds: 3600}"
    plan.write_text(f"scenario: 1\nfaults: [{faults}]\n")
    words = ["chaos", str(ROOT / "examples" / "quickstart.yaml"), "--plan", str(plan), "--json", str(record), "--seconds", "0.1"]
    words += ["--requests", "4", "--concurrency", "4", "--new-tokens", "8", "--set", "deploy.attention.groups=1"]
    command = [sys.executable, "-c", "from flowrt.cli.app import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        lines = []
        while "(2 of 2)" not in (line := run.stderr.readline()):
            assert line, lines
            lines.append(line)
        started = children_of(run.pid)
        run.send_signal(signal.SIGINT)
        lines.append(run.stderr.readline())
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
        lines += err.splitlines(keepends=True)
    assert run.returncode == 130
    assert lines.count("flowrt: interrupted\n") == 1
    assert "Traceback" not in "".join(lines)
    assert "note: interrupted: this is the report so far" in out
    details = json.loads(record.read_text())["details"]
    assert details["interrupted"]
    assert [fault["fault"] for fault in details["faults"]] == ["kill experts.1", "stall attention.0 for 3600 s"]
    assert started
    assert not left_processes({*started, run.pid})
