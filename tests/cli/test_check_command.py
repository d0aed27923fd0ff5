"""`flowrt check transport`: the summary, the table, the file, the exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path

import pytest
from cli.conftest import flowrt_here, refusal
from rich.console import Console

from flowrt.cli.check import print_results
from flowrt.transports import inproc
from flowrt.transports.conformance.suite import CheckResult, plan, usable_loops


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return flowrt_here("check", "transport", *arguments)


def test_checks_results_and_seconds_are_shown(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = check("inproc", "--quick", "--only", "cancelled", "--loop", "asyncio", "-v", "--json", str(results))
    shown = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "recv cancelled at every turn: A recv that is" in shown
    found = json.loads(results.read_text())
    assert f"{len(found)} passed in" in shown
    assert {each["name"] for each in found} >= {"check_recv_cancelled_at_every_turn", "check_connect_cancelled_at_every_turn"}
    assert all(each["outcome"] == "passed" and each["loop"] == "asyncio" and each["seconds"] > 0 for each in found)


def test_failed_check_is_named_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inproc.InprocChannel, "_payload_bytes", lambda self, message: 0)
    done = check("inproc", "--quick", "--only", "check_bounds", "--loop", "asyncio")
    shown = done.stdout
    assert done.returncode == 1
    assert "failed on asyncio: check_bounds: at most 8 messages of 131072 bytes" in shown
    assert "(checked: A full channel refuses send_nowait" in shown
    assert re.search(r"channels +1 failed", shown)
    assert "inproc: 1 failed in" in shown


def test_without_v_a_line_per_group_adds_up_to_all_checks() -> None:
    results = [CheckResult(*each[:3], loop, "passed", 0.5) for loop in usable_loops() for each in plan("inproc")]
    shown = Console(width=80, file=(out := io.StringIO()))
    print_results("inproc", results, shown)
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + 4 + 1, "the head, four groups, the sum"
    per_loop = [int(number) for line in lines[1:-1] for number in re.findall(r"(\d+) passed", line)]
    assert sum(per_loop) == len(results)
    assert f"{len(results)} passed in" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nosuch",), "unknown transport 'nosuch'; known: inproc, shm, zmq"),
        (("inproc", "--only", "zzz"), "no check has 'zzz' in its name"),
        (("inproc", "--loop", "trio"), "trio"),
        (("inproc", "--json", "/no/folder/x.json"), "there is no folder"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], text: str) -> None:
    assert text in refusal(check(*arguments))
