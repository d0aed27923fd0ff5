"""`flowrt up`, `ps`, `logs`, `drain` and `down`, metrics and the state of the live page of a graph on several hosts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from left_processes import left_processes

import flowrt
from flowrt.cli import graphs
from flowrt.serving.run_folder import VARIABLE, find_graph

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("--set", "hosts={engine: local, count: 3}", "--port", "0")
SECONDS = 60.0


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=SECONDS) as response:
        return str(response.read().decode())


def test_processes_are_shown_with_their_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    command = [sys.executable, "-m", "flowrt", "up", str(ROOT / "examples" / "quickstart.yaml"), "--name", "a", *HOSTS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    description = find_graph("a").description
    assert description is not None
    pids = [description.pid, *(each.pid for each in psutil.Process(description.pid).children(recursive=True))]
    try:
        assert graphs.ps(is_json=True) == 0
        (shown,) = json.loads(capsys.readouterr().out)
        hosts = {process["name"]: process["host"] for process in shown["processes"]}
        assert set(hosts.values()) == {"host.0", "host.1", "host.2"}
        assert hosts["launcher"] == hosts["front_end.0"] == "host.0"
        graphs.ps(is_json=False)
        listed, host = {}, ""
        for line in capsys.readouterr().out.splitlines()[1:]:
            first, *rest = line.split() or [""]
            if first == "on":
                host = rest[0]
            elif first and first not in ("process", "model"):
                listed["fork server" if first == "fork" else first] = host
        assert listed == hosts
        assert asyncio.run(flowrt.attach("a").complete("What is 1 + 2?", max_tokens=4)).error is None
        check_metrics(get(f"{shown['url']}/metrics"), hosts)
        state: Any = json.loads(get(f"{shown['url']}/page/state"))
        assert {each["name"]: each["host"] for each in state["processes"]}.items() <= hosts.items()
        graphs.logs("a", follows=False, tail=None)
        assert "attention.1 on host.1" in capsys.readouterr().out
        assert graphs.drain("a") == 0
    finally:
        assert graphs.down("a", at_once=False) == 0
    assert not left_processes(pids)


def check_metrics(page: str, hosts: dict[str, str]) -> None:
    series = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in page.splitlines() if 'process="' in line]
    assert {labels["process"] for labels in series} >= {"attention.0", "experts.0", "front_end.0"}
    assert all(labels["host"] == hosts[labels["process"]] for labels in series)
