"""Bad input to `flowrt chaos`: one line, exit code 2, nothing started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flowrt.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"


def test_unmeasurable_input_is_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], graph_file: Path, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr("flowrt.launcher.launcher.Launcher.__aenter__", refuse)
    plan = tmp_path / "plan.yaml"
    plan.write_text("scenario: 1\nfaults:\n  - {fault: crash, process: experts.9}\n")
    for words, text in (
        ((QUICKSTART,), "either --plan FILE or --kills N is needed"),
        ((QUICKSTART, "--kills", "1", "--plan", plan), "either --plan FILE or --kills N is needed"),
        ((QUICKSTART, "--kills", "-1"), 'Invalid value "-1" for --kills. Must be >= 0'),
        ((QUICKSTART, "--kills", "100001"), 'Invalid value "100001" for --kills. Must be <= 100000'),
        ((QUICKSTART, "--kills", "1", "--roles", "servers"), "--roles servers: unknown here; one of: all, attention, experts, monitor"),
        ((QUICKSTART, "--kills", "1", "--fault", "murder"), "--fault murder: unknown here; one of: all, kill, pause, stall, hang"),
        ((QUICKSTART, "--kills", "1", "--phase", "noon"), "--phase noon: unknown here; one of: all, start, prefill"),
        ((QUICKSTART, "--kills", "1", "--pairs", "0"), 'Invalid value "0" for --pairs'),
        ((QUICKSTART, "--kills", "1", "--seconds", "inf"), 'Invalid value "inf" for --seconds'),
        ((QUICKSTART, "--kills", "1", "--requests", "0"), 'Invalid value "0" for --requests'),
        ((QUICKSTART, "--kills", "1", "--new-tokens", "1000"), "a sequence has room for 512"),
        (
            (QUICKSTART, "--kills", "1", "--new-tokens", "100", "--set", "limits.max_tokens=20"),
            "limits.max_tokens is 20 and each answer is to have 100 tokens",
        ),
        ((QUICKSTART, "--kills", "1", "--set", "reliability.recovery=off"), "none to kill"),
        ((QUICKSTART, "--plan", plan), f"{plan}:3: faults.0: no process is called 'experts.9'"),
        ((QUICKSTART, "--plan", tmp_path / "none.yaml"), "no such file"),
        ((QUICKSTART, "--kills", "1", "--json", "no/such.json"), "there is no folder"),
        ((graph_file, "--kills", "1"), "workers share processes"),
    ):
        monkeypatch.setattr(sys, "argv", ["flowrt", "chaos", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert (end.value.code, out) == (2, ""), words
        assert text in err, words
        assert err.count("\n") == 1, words
