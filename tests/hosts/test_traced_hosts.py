"""A trace of several hosts whose clocks differ by hours: its times are those of one clock.

Each host server of the local engine runs in a time namespace of its own, whose monotonic clock the kernel shifts. Skipped where that is
not permitted.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from flowrt.api.opening import read_graph
from flowrt.api.running_graph import RunningGraph
from flowrt.launcher.trace_collector import TraceCollector
from flowrt.processes.leftover import MARKER
from flowrt.seams import Seams
from flowrt.trace.records import RecordKind, WorkerTrace
from flowrt.trace.summary import summarize, summary_lines

GRAPH = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
OFFSETS = {"1": 40_000, "2": 90_000}  # seconds, by number of the host
SHIFTED = ("unshare", "--time", "--fork", "--kill-child", "--monotonic")


def can_shift() -> bool:
    try:
        return subprocess.run([*SHIFTED, "1", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


async def traces_of_run(monkeypatch: pytest.MonkeyPatch) -> list[WorkerTrace]:
    start = subprocess.Popen

    def shifted(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """A host server starts in a time namespace. Its mark ends with the name of its host."""
        if "flowrt.hosts.server" in command:
            command = [*SHIFTED, str(OFFSETS[options["env"][MARKER].rpartition(".")[2]]), *command]
        return start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", shifted)
    graph = read_graph(GRAPH, ["hosts={engine: local, count: 3}"])
    collector = TraceCollector(Seams().machine_now)
    async with RunningGraph(graph, Seams(), trace=collector) as running:
        for _ in range(3):
            completion = await running.complete("What is 1 + 2?", max_tokens=8)
            assert completion.error is None
    return collector.traces()


@pytest.mark.skipif(not can_shift(), reason="needs the right to make time namespaces")
async def test_times_of_all_hosts_are_those_of_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [trace for trace in await traces_of_run(monkeypatch) if trace.records]
    assert {trace.host for trace in traces} >= {"host.0", "host.1", "host.2"}
    errors = {trace.host: trace.clock_error_seconds for trace in traces}
    assert errors["host.0"] == 0.0
    assert 0.0 < errors["host.1"] < 0.1
    sent: dict[Any, tuple[float, str]] = {}
    for trace in traces:
        for each in trace.records:
            if each.kind == RecordKind.SEND:
                sent[each.name, each.tags, each.part] = each.start_seconds, trace.host
    between = []
    for trace in traces:
        for each in trace.records:
            if each.kind == RecordKind.RECEIVE and (found := sent.get((each.name, each.tags, each.part))) is not None:
                seconds, host = found
                assert -errors[host] - errors[trace.host] <= each.end_seconds - seconds < 60.0
                between.append(host != trace.host)
    assert sum(between) > 10
    lines = summary_lines(summarize(traces))
    assert [line.partition(",")[0] for line in lines if line.startswith("host.")] == [
        "host.1: times are aligned",
        "host.2: times are aligned",
    ]
