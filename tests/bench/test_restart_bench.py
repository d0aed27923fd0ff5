"""The restart of a process: three graphs that differ in nothing but standby processes and shared weights, killed in turns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flowrt.bench.cases.restart import measure, read_graphs
from flowrt.bench.measure.benchmark import run_benchmark
from flowrt.errors import UserError

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
SMALL = ("deploy.attention.groups=1", "deploy.experts.servers=2")


def test_graph_whose_servers_cannot_be_lost_is_refused() -> None:
    with pytest.raises(UserError, match=r"the run cannot lose experts\.0"):
        read_graphs(QUICKSTART, None, ["deploy.experts.servers=0", "deploy.experts.replicas=1"])


def test_process_without_a_standby_process_is_refused() -> None:
    with pytest.raises(UserError, match=r"no standby process can replace experts\.0: "):
        read_graphs(QUICKSTART, None, [*SMALL, "deploy.attention.threads=1", "deploy.experts.threads=2"])


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes and reads /proc")
def test_processes_are_killed_in_turns() -> None:
    graphs = read_graphs(QUICKSTART, None, SMALL)
    assert all(graph.replace(reliability=graphs[0].reliability) == graphs[0] for graph in graphs)
    report = run_benchmark("restart", measure(graphs), num_pairs=1)
    assert [figure.unit for figure in report.figures] == ["s", "s", "s", "s", "GB"]
    assert all(figure.ratio is not None and figure.ratio.count == 1 for figure in report.figures)
