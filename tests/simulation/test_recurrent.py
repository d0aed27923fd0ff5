"""Graphs of a model with recurrent layers under drawn faults: each token is that of its sequence alone, whatever was rolled back,
preempted, moved to another group, found in the prefix cache or pulled."""

from __future__ import annotations

import pytest
from simulation.graph_files import load

from flowrt.simulation.campaign import campaign
from flowrt.simulation.cases import draw

SEEDS = 5


@pytest.mark.parametrize("name", ["2x3.yaml", "prefill.yaml", "strict.yaml"])
def test_drawn_faults_change_no_token(name: str) -> None:
    graph = load(f"recurrent/{name}")
    counts = campaign((draw(seed, [graph]) for seed in range(SEEDS)), lambda case, outcome, counts: True)
    assert counts.failures == []
    assert counts.branches["tokens of the prefix cache"] > 0
