"""The recovery benchmark: graphs that differ in the policy alone, the tokens that a kill loses, and the figures."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flowrt.chaos.chaos_options import RecoveryOptions
from flowrt.chaos.recovery import POLICIES, LostTokens, RecoverySide, figures_of, read_graphs
from flowrt.errors import UserError

GRAPH = Path(__file__).resolve().parents[2] / "examples" / "chaos" / "graphs" / "recovery.yaml"


def lost(tokens: float, back_seconds: float = 0.5) -> LostTokens:
    return LostTokens(300.0, tokens, 2.0, back_seconds, [300.0] * 50, 0)


def test_graphs_differ_in_the_policy_alone() -> None:
    prepared = read_graphs(GRAPH, None, RecoveryOptions())
    assert [graph.reliability.recovery for graph in prepared.graphs] == list(POLICIES)
    first = prepared.graphs[0]
    assert all(graph.replace(reliability=first.reliability) == first for graph in prepared.graphs)
    assert prepared.victims == {"expert server": "experts.0", "group": "attention.0"}


@pytest.mark.parametrize("override", ["deploy.attention.groups=1", "deploy.experts.servers=0"])
def test_graph_that_cannot_lose_both_is_refused(override: str) -> None:
    with pytest.raises(UserError, match="kills an expert server and one of several groups"):
        read_graphs(GRAPH, None, RecoveryOptions(overrides=(override, "deploy.experts.replicas=1")))


def test_figures_compare_policies_and_the_share_of_a_group() -> None:
    found = {(policy, role): [lost(600.0)] * 20 for role in ("expert server", "group") for policy in POLICIES}
    found["fine", "expert server"] = [lost(tokens) for tokens in (-3.0, 0.0, 6.0, 12.0)] * 5
    found["fine", "group"] = [lost(44.0)] * 20  # its share: a third of 300 tokens/s in half a second
    with_target = [figure for figure in figures_of(found, num_groups=3) if figure.target is not None]
    assert [(figure.name, figure.verdict) for figure in with_target] == [
        ("expert server killed, fine: lost tokens", "met"),
        ("group killed, fine: lost tokens", "met"),
    ]
    assert with_target[1].ratio is not None
    assert with_target[1].ratio.median == pytest.approx(0.88)


@pytest.mark.parametrize(("num_without", "count"), [(2, 18), (20, None)])
def test_pairs_in_which_the_peer_lost_nothing_are_left_out(num_without: int, count: int | None) -> None:
    found = {(policy, role): [lost(60.0)] * 20 for role in ("expert server", "group") for policy in POLICIES}
    found["restart_all", "expert server"] = [lost(0.0), lost(-3.0)] * (num_without // 2) + [lost(600.0)] * (20 - num_without)
    (fine,) = [figure for figure in figures_of(found, num_groups=3) if figure.name.startswith("expert server killed, fine")]
    assert f"without {num_without} of 20 pairs" in fine.name
    assert (fine.ratio and fine.ratio.count) == count
    assert (fine.ratio and fine.ratio.median) == (None if count is None else 0.1)


SCRIPT = """
import sys
from flowrt.bench.report.report import BenchmarkReport, Machine, ReportSection
from flowrt.chaos.recovery import POLICIES, LostTokens, plot_recovery
runs = [LostTokens(300.0, 6.0, 2.0, 0.5, [300.0] * 50, 0)] * 2
kills = [{"policy": policy, "victim": role, "runs": runs} for role in ("expert server", "group") for policy in POLICIES]
plot_recovery(BenchmarkReport("recovery", Machine.here(), [], sections=[ReportSection("kills", kills)]), sys.argv[1])
"""


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plot_has_a_diagram_for_each_victim(tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps the files of its fonts open."""
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "found.svg")], check=True)
    assert "<svg" in (tmp_path / "found.svg").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes")
async def test_lost_tokens_are_counted_until_the_rate_is_back() -> None:
    options = RecoveryOptions(seconds=1.0, concurrency=4, overrides=("deploy.attention.groups=2", "emulate.dilation=400"))
    prepared = read_graphs(GRAPH, None, options)
    side = RecoverySide(prepared.graphs[1], prepared.requests, options)
    async with side.running:
        found = await side.lose("experts.0")
    assert found.num_failed == 0
    assert found.usual > 0
    assert 0 < found.back_seconds <= found.window_seconds
    assert found.lost <= found.usual * found.window_seconds
