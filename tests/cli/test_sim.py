"""flowrt sim: both levels answer with their name, sweeps cover the grid, and bad input is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flowrt.bench.cases.small_model import write_small_model
from flowrt.cli.planning_options import SimOptions
from flowrt.cli.sim import sim
from flowrt.errors import UserError

GRAPH = """
flowrt: 1
model: {path: model}
deploy:
  attention: {groups: 2}
  experts: {servers: 2}
  links:
    attention-experts: {link: ub}
emulate:
  dilation: 1
  compute:
    attention: {fixed_seconds: 200e-6, row_seconds: 1e-6}
    experts: {fixed_seconds: 60e-6, row_seconds: 0.5e-6, expert_seconds: 10e-6}
limits: {max_num_seqs: 4}
"""
TRAFFIC = "in=8,out=6,concurrency=4,requests=8"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sim")
    write_small_model(folder / "model", 2, 4)
    path = folder / "graph.yaml"
    path.write_text(GRAPH, encoding="utf-8")
    return path


def test_both_levels_answer_alike_and_name_themselves(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for level in ("L1", "L2"):
        file = tmp_path / f"{level}.json"
        assert sim(graph, SimOptions(traffic=TRAFFIC, level=level, json=str(file))) == 0
        found[level] = json.loads(file.read_text())
        assert f"level {level}" in capsys.readouterr().out
    one, two = found["L1"], found["L2"]
    assert (one["level"], two["level"]) == ("L1", "L2")
    assert one["num_output_tokens"] == two["num_output_tokens"] == 48
    assert two["inter_token_p50_seconds"] == pytest.approx(one["inter_token_p50_seconds"], rel=0.1)
    assert two["output_tokens_per_second"] == pytest.approx(one["output_tokens_per_second"], rel=0.1)


def test_the_output_shows_where_the_time_goes(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sim(graph, SimOptions(traffic=TRAFFIC))
    text = capsys.readouterr().out
    assert all(word in text for word in ("time to first token", "inter-token latency", "output tokens per second", "attention", "experts"))
    assert "slowest node: " in text
    assert "slowest edge: " in text
    assert "a message of dispatch takes" in text


def test_a_sweep_covers_its_grid(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("set: {deploy.experts.servers: [1, 2], deploy.attention.micro_batches: [1, 2]}\n", encoding="utf-8")
    file = tmp_path / "sweep.json"
    sim(graph, SimOptions(traffic=TRAFFIC, sweep=sweep, json=str(file)))
    rows = json.loads(file.read_text())
    assert [[*row["set"].values()] for row in rows] == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert len({row["output_tokens_per_second"] for row in rows}) > 1
    assert "level L2" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_latencies_and_sweeps_are_drawn(graph: Path, tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps the files of its fonts open."""
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "set: {deploy.experts.servers: [1, 2]}\nfigures: [{metric: inter_token_p99_seconds, x: deploy.experts.servers}]\n", encoding="utf-8"
    )
    code = f"""
from pathlib import Path
from flowrt.cli.sim import sim
from flowrt.cli.planning_options import SimOptions
sim(Path({str(graph)!r}), SimOptions(traffic={TRAFFIC!r}, plot={str(tmp_path / "latencies.svg")!r}))
sim(Path({str(graph)!r}), SimOptions(traffic={TRAFFIC!r}, sweep=Path({str(sweep)!r}), plot={str(tmp_path / "sweep.svg")!r}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
    assert "level L2" in (tmp_path / "latencies.svg").read_text(encoding="utf-8")
    assert (tmp_path / "sweep.svg").stat().st_size > 1000


def test_a_sweep_compares_its_variants(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # fewer fold the titles
    sweep, file = tmp_path / "sweep.yaml", tmp_path / "sweep.json"
    variants = "{one: {deploy.experts.servers: 1}, two: {deploy.experts.servers: 2}}"
    figure = "{metric: output_tokens_per_second, of: {servers: two}, against: {servers: one}, at_least: 1}"
    sweep.write_text(f"set: {{servers: {variants}}}\nfigures: [{figure}]\n", encoding="utf-8")
    sim(graph, SimOptions(traffic=TRAFFIC, sweep=sweep, json=str(file)))
    found = json.loads(file.read_text())
    (compared,) = found["figures"]
    assert [row["set"] for row in found["variants"]] == [{"servers": "one"}, {"servers": "two"}]
    assert compared["theirs"]["median"] == found["variants"][0]["output_tokens_per_second"]
    assert (compared["name"], compared["verdict"]) == ("two: output tokens per second", "met")
    assert "two: output tokens per second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sweep", "error"),
    [
        ("set: {deploy.experts.servers: 2}", ":1: set.deploy.experts.servers: 2 is not a list"),
        ("set: {a: [1]}\ndecode: {}", ":2: decode: belongs to flowrt bench sweep"),
        ("set: {a: [1]}\nfigures: [{metric: busy_share}]", ":2: figures.0.metric: busy_share is a metric of decode:"),
        ("set: {deploy.experts.serves: [1]}", "--set deploy.experts.serves=1: deploy.experts.serves: unknown key"),
    ],
)
def test_wrong_sweeps_are_one_line(graph: Path, tmp_path: Path, sweep: str, error: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(sweep, encoding="utf-8")
    with pytest.raises(UserError, match=error) as raised:
        sim(graph, SimOptions(sweep=path))
    assert "\n" not in str(raised.value)


def test_graphs_without_modelled_times_are_refused(graph: Path) -> None:
    for level in ("L1", "L2"):
        with pytest.raises(UserError, match="emulate"):
            sim(graph, SimOptions(level=level, traffic=TRAFFIC, overrides=("emulate=null",)))


def test_a_scenario_shows_what_a_death_costs(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The runtime itself, in virtual time: an expert server dies and comes back, and every request gets its tokens."""
    scenario, whole, hurt = tmp_path / "scenario.yaml", tmp_path / "whole.json", tmp_path / "hurt.json"
    scenario.write_text("scenario: 1\nfaults:\n  - {fault: crash, process: experts.1, at_seconds: 0.002}\n", encoding="utf-8")
    options = SimOptions(traffic=TRAFFIC, level="L1", json=str(whole))
    assert sim(graph, options) == 0
    assert sim(graph, replace(options, scenario=scenario, restart="500ms", json=str(hurt))) == 0
    text, before, after = capsys.readouterr().out, json.loads(whole.read_text()), json.loads(hurt.read_text())
    assert "experts.1 was killed by SIGKILL" in text
    assert [event["text"].split(" ")[:3] for event in after["events"]] == [["experts.1", "was", "killed"], ["experts.1", "is", "back"]]
    assert after["num_failed_requests"] == 0
    assert after["num_output_tokens"] == before["num_output_tokens"]
    assert after["seconds"] > before["seconds"] + 0.4, "no replica: all wait for the server"


@pytest.mark.parametrize(
    ("fault", "at_most"),
    [
        ("{fault: slow, process: experts.1, factor: 30", 0.5),
        ("{fault: slow_link, between: [attention.0, experts.1], factor: 1000", 0.9),  # one group of two finds it out by itself
    ],
)
def test_what_is_slow_delays_parts_until_hedging_finds_other_replicas(graph: Path, tmp_path: Path, fault: str, at_most: float) -> None:
    scenario, file = tmp_path / "scenario.yaml", tmp_path / "found.json"
    scenario.write_text(f"scenario: 1\nfaults: [{fault}, at_seconds: 0, for_seconds: 60}}]\n")

    def seconds(*overrides: str, slow: bool = True) -> float:
        options = SimOptions(traffic=TRAFFIC, level="L1", scenario=scenario if slow else None, overrides=overrides, json=str(file))
        assert sim(graph, options) == 0
        return float(json.loads(file.read_text())["seconds"])

    replicated = "deploy.experts.replicas=2"
    healthy, slow, hedged = seconds(replicated, slow=False), seconds(replicated, "reliability.hedge=false"), seconds(replicated)
    assert slow > 5 * healthy
    assert healthy < hedged < at_most * slow


def test_a_run_that_ends_is_counted(graph: Path, tmp_path: Path) -> None:
    scenario, file = tmp_path / "scenario.yaml", tmp_path / "found.json"
    scenario.write_text("scenario: 1\nfaults:\n  - {fault: crash, process: experts.1, at_seconds: 0.006}\n", encoding="utf-8")
    sim(graph, SimOptions(traffic=TRAFFIC, level="L1", scenario=scenario, overrides=("reliability.recovery=off",), json=str(file)))
    found = json.loads(file.read_text())
    assert 0 < found["num_failed_requests"] < found["num_requests"] == 8
    assert "the run failed" in found["events"][-1]["text"]


def test_a_run_that_answers_nothing_has_failed(graph: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("scenario: 1\nfaults: [{fault: crash, process: experts.1, at_seconds: 0}]\n")
    with pytest.raises(UserError, match="no request got all of its tokens") as caught:
        sim(graph, SimOptions(traffic=TRAFFIC, level="L1", scenario=scenario, overrides=("reliability.recovery=off",)))
    assert caught.value.exit_code == 1


def test_faults_without_an_event_are_listed(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "scenario.yaml"
    late = "{fault: crash, process: experts.1, at_seconds: 5}"
    cut = "{fault: cut, between: [attention.0, experts.0], at_seconds: 0.001, for_seconds: 0.01}"
    scenario.write_text(f"scenario: 1\nfaults: [{late}, {cut}]\n", encoding="utf-8")
    sim(graph, SimOptions(traffic=TRAFFIC, level="L1", scenario=scenario))
    text = capsys.readouterr().out
    assert "crash of experts.1 at 5 s has not happened" in text
    assert "at 1.0 ms: cut of attention.0 and experts.0" in text


def test_requests_that_the_model_cannot_take_are_refused(graph: Path) -> None:
    with pytest.raises(UserError, match="a request has 100000 \\+ 6 tokens, and the model takes"):
        sim(graph, SimOptions(traffic="in=100000,out=6,concurrency=1,requests=1", level="L1"))


def test_the_runtime_needs_weights(graph: Path, tmp_path: Path) -> None:
    path = tmp_path / "card.yaml"
    path.write_text("flowrt: 1\nmodel: {path: qwen3-30b}\nemulate: {dilation: 1, devices: {attention: h20}}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"card\.yaml:2: model.path: qwen3-30b is a card without weights"):
        sim(path, SimOptions(level="L1", traffic=TRAFFIC))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_runtime_in_virtual_time_at_once(name: str) -> None:
    """No simulated worker sees it."""
    script = f"import signal; from flowrt.cli.sim import _interrupts_end\nwith _interrupts_end(): signal.raise_signal(signal.{name})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "flowrt: interrupted\n")


def test_output_that_is_lost_is_reported(graph: Path) -> None:
    command = [sys.executable, "-m", "flowrt", "sim", str(graph), "--traffic", TRAFFIC]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("standard output cannot be written (No space left on device); send it elsewhere\n")


def test_a_trace_has_the_steps(graph: Path, tmp_path: Path) -> None:
    sim(graph, SimOptions(traffic=TRAFFIC, level="L1", trace=str(tmp_path / "trace")))
    trace = (tmp_path / "trace").read_bytes()
    assert all(name in trace for name in (b"experts.1", b"attention.0", b"request 7"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scenario": Path("none.yaml"), "level": "L1"}, "no such file"),
        ({"scenario": Path("none.yaml")}, "add --level L1"),
        ({"trace": "trace.json"}, "add --level L1"),
        ({"fault": "skew", "level": "L1"}, "skew has no meaning in modelled time"),
        ({"fault": "crash", "level": "L1", "restart": "soon"}, "--restart: 'soon' is not a quantity"),
    ],
)
def test_bad_scenarios_are_one_line(options: dict[str, Any], message: str, graph: Path, tmp_path: Path) -> None:
    if (fault := options.pop("fault", None)) is not None:
        options["scenario"] = tmp_path / "scenario.yaml"
        more = ", rate: 2" if fault == "skew" else ""
        options["scenario"].write_text(f"scenario: 1\nfaults: [{{fault: {fault}, process: experts.1, at_seconds: 1{more}}}]\n")
    with pytest.raises(UserError, match=message) as caught:
        sim(graph, SimOptions(traffic=TRAFFIC, **options))
    assert "\n" not in str(caught.value)
