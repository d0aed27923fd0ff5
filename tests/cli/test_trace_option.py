"""`flowrt run --trace`: the file of a real run, read back, and what happens when it cannot be written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from cli.conftest import flowrt_here, refusal
from traces.perfetto_reader import check_flows, read_trace

NUM_TOKENS, NUM_LAYERS = 6, 2
WORDS = ("--prompt", "one and one", "--max-tokens", NUM_TOKENS, "--ignore-eos", "--set", "deploy.experts.servers=2")


def test_the_trace_of_a_run_has_every_layer_of_every_step(graph_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.pftrace"
    done = flowrt_here("run", graph_file, *map(str, WORDS), "--trace", file)
    assert done.returncode == 0, done.stderr
    trace = read_trace(file.read_bytes())
    processes = {process.split()[0]: process for process, _ in trace.tracks}
    assert set(processes) == {"attention.0", "experts.0", "experts.1", "gateway"}
    assert set(trace.tracks) == {
        (processes["gateway"], "commit"),
        *((processes[name], stream) for name in ("attention.0", "experts.0", "experts.1") for stream in ("receive", "compute", "send")),
    }
    assert not any(trace.labels.values()), "nothing was dropped"
    fired = Counter(each.name for each in trace.tracks[processes["attention.0"], "compute"] if each.category == "node")
    assert {name: fired[f"attention.0.{name}"] for name in ("attention", "gate", "dispatch", "combine", "head")} == {
        **dict.fromkeys(("attention", "gate", "dispatch", "combine"), NUM_TOKENS * NUM_LAYERS),
        "head": NUM_TOKENS,
    }
    commits = trace.tracks[processes["gateway"], "commit"]
    assert [each.values["index"] for each in commits] == list(range(NUM_TOKENS))
    for flow in check_flows(trace).values():
        assert [each.category for each in flow] == ["node", "send", "receive", "node", "send", "receive", "node"]
        assert (flow[0].name, flow[-1].name) == ("attention.0.dispatch", "attention.0.combine")
        assert len({(each.values["source"], each.values["step"], each.values["layer"]) for each in flow}) == 1
    assert "  experts          2 " in done.stderr
    assert "slowest edge: " in done.stderr


def test_a_file_that_cannot_be_written_is_refused_before_the_start(graph_file: Path, tmp_path: Path) -> None:
    assert "--trace" in refusal(flowrt_here("run", graph_file, "--trace", tmp_path / "none" / "run.pftrace"))


def test_a_trace_that_is_lost_at_the_end_is_a_failure_with_one_line(graph_file: Path) -> None:
    done = flowrt_here("run", graph_file, *map(str, WORDS), "--quiet", "--trace", "/dev/full")
    assert done.returncode == 1
    assert done.stderr == "flowrt: error: --trace /dev/full: cannot be written (No space left on device); give another path\n"
