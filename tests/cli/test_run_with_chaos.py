"""`flowrt run --chaos` as a user runs it: a server dies during the requests, and the outputs are still complete."""

from __future__ import annotations

import json
from pathlib import Path

from cli.conftest import ROOT, flowrt


def test_a_server_dies_and_returns_while_answers_are_given(tmp_path: Path) -> None:
    record, undisturbed = tmp_path / "run.json", tmp_path / "undisturbed.json"
    graph = (ROOT / "examples" / "quickstart.yaml", "--set", "numerics=strict", "--set", "deploy.attention.groups=1")
    prompt = ("--prompt", "Count from 3 to 40", "--max-tokens", "60")
    outcome = flowrt("run", *graph, *prompt, "--chaos", "kill:experts.1@50ms", "--json", record)
    assert outcome.returncode == 0, outcome.stderr
    assert "[chaos] kill experts.1, pid " in outcome.stderr
    assert "@chaos" not in outcome.stderr
    last = outcome.stderr.splitlines()[-2:]
    assert last[0].startswith("chaos: kill experts.1 (pid ")
    assert "back after" in last[0]
    assert last[1] == "chaos: the answer is complete"
    assert flowrt("run", *graph, *prompt, "--json", undisturbed).returncode == 0
    chaotic, calm = (json.loads(path.read_text()) for path in (record, undisturbed))
    assert chaotic["requests"][0]["token_ids"] == calm["requests"][0]["token_ids"]
    (fault,) = chaotic["summary"]["chaos"]
    assert fault["fault"] == "kill experts.1"
    assert fault["back_seconds"] > 0
    assert "chaos" not in calm["summary"]


def test_fault_that_is_not_injected_makes_the_run_fail() -> None:
    prompt = ("--prompt", "What is 3 + 4?", "--max-tokens", "4")
    outcome = flowrt("run", ROOT / "examples" / "quickstart.yaml", *prompt, "--chaos", "kill:experts.1@1000s")
    assert outcome.returncode == 1, outcome.stderr
    assert outcome.stderr.splitlines()[-2:] == [
        "chaos: 1 of 1 faults left out: all answers had ended before their time",
        "chaos: the answer is complete",
    ]
