"""The table of `flowrt chaos`, its exit code, and its plot."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from flowrt.api import read_graph
from flowrt.bench.report.report import Machine
from flowrt.chaos.compare import ReceivedAnswer, ReceivedToken, StretchPair
from flowrt.chaos.measure import ChaosResult
from flowrt.chaos.observer import InjectedFault, RunObserver
from flowrt.chaos.orders import Note
from flowrt.chaos.plot import smoothed
from flowrt.chaos.report import ChaosReport, print_report, report_of
from flowrt.emulation import EmulationStatistics, Lateness, emulation_report
from flowrt.launcher import events
from flowrt.system.output_file import json_text

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine("a processor", 2, "Linux 6", {}, 0.5, 0.75)
TOKENS = (11, 12, 13, 14)
RATIO = "throughput with faults, relative to without"


class StillClock:
    def now(self) -> float:
        return 2.0

    async def sleep(self, seconds: float) -> None: ...


def make_answers(begin: float, num: int, tokens: tuple[int, ...] = TOKENS) -> list[ReceivedAnswer]:
    """One after another, a token every 10 ms."""
    made = []
    for number in range(num):
        start = begin + 0.05 * number
        received = [ReceivedToken(place, token_id, start + 0.01 * (place + 1)) for place, token_id in enumerate(tokens)]
        made.append(ReceivedAnswer(number % 2, start, received, "length", None, start + 0.04))
    return made


def found_of(answers: list[ReceivedAnswer], seconds: float = 4.0) -> ChaosResult:
    """A server is killed one second after the first request; its client notices after 5 ms, the launcher reports it at 2.0."""
    observer = RunObserver(StillClock())
    observer.injected_faults.append(InjectedFault("kill experts.1", "crash", "experts.1", 1.5, 10, "one"))
    observer.take_line("attention.0", Note("left", 1.505, "experts.1", "one").as_line())
    observer.on_event(events.WorkerLost("experts.1", "was killed by SIGKILL"))
    observer.on_event(events.WorkerRestarted("experts.1", 12, 0.5))
    graph = read_graph(ROOT / "examples" / "quickstart.yaml").replace(numerics="strict")
    stretches = [StretchPair(0.5, 1.5, 0.5 + seconds)]
    return ChaosResult(graph, 3, observer, 1, False, make_answers(-9.5, 180), 1.5, stretches, answers, 0.5, 0.5 + seconds)


def rows_of(report: ChaosReport) -> dict[str, tuple[str, str]]:
    return {row.name: (row.shown, row.verdict) for row in report.rows}


def test_a_run_in_which_nothing_was_lost_is_right() -> None:
    report = report_of(found_of(make_answers(0.5, 80)), MACHINE)
    rows = rows_of(report)
    assert report.is_success
    assert report.notes == []
    for name in ("requests failed", "tokens lost", "tokens doubled", "tokens changed", "processes lost without cause", "left behind"):
        assert rows[name][1] == "met", name
    assert rows["faults injected"] == ("1 of 1", "")
    assert rows["killed processes back"] == ("1 of 1", "met")


def test_one_value_is_no_percentile_and_resolves_nothing() -> None:
    rows = rows_of(report_of(found_of(make_answers(0.5, 80)), MACHINE))
    assert rows["kill until no process uses the server"] == ("5.0 ms (one value)", "undecided")
    assert rows["kill until the server is back"] == ("500.0 ms (one value)", "")
    assert rows[RATIO] == ("1.000 (one value)", "undecided")
    assert rows["tokens per second without faults"] == rows["tokens per second with faults"] == ("80.0", "")
    assert rows["longest extra pause in answers hit by a fault"][1] == "undecided"  # many requests, but of one kill


@pytest.mark.parametrize(
    ("num", "late", "shown", "verdict"),
    [
        (5, [], "p50 5.0 ms, worst 5.0 ms of 5", "undecided"),
        (99, [], "p50 5.0 ms, worst 5.0 ms of 99", "undecided"),
        (99, [0.5] * 9, "p50 5.0 ms, worst 500.0 ms of 99", "not met"),
        (400, [], "p50 5.0 ms, p99 5.0 ms, worst 5.0 ms of 400", "met"),
        (400, [0.5] * 3, "p50 5.0 ms, p99 5.0 ms, worst 500.0 ms of 400", "undecided"),
        (400, [math.inf] * 20, "p50 5.0 ms, p99 5.0 ms, worst 5.0 ms of 380; 20 never", "not met"),
    ],
)
def test_a_time_is_met_when_its_interval_is(num: int, late: list[float], shown: str, verdict: str) -> None:
    found = found_of(make_answers(0.5, 80))
    observer = found.observer
    names = [f"incarnation {number}" for number in range(num)]
    observer.injected_faults[:] = [InjectedFault("kill", "crash", "experts.1", 1.5, 10, name) for name in names]
    for name, seconds in zip(names, late + [0.005] * (num - len(late)), strict=True):
        if seconds < math.inf:
            observer.take_line("attention.0", Note("left", 1.5 + seconds, "experts.1", name).as_line())
    assert rows_of(report_of(found, MACHINE))["kill until no process uses the server"] == (shown, verdict)


def found_with_kills(rates: list[int], spare: bool) -> ChaosResult:
    """A kill every 20 s; before each come 10 tokens a second, after each as many as `rates` has."""
    found = found_of([])
    found.has_spare = spare
    found.injected_faults.clear()
    found.stretches.clear()
    for number, rate in enumerate(rates):
        begin = 10.0 + 20.0 * number
        found.injected_faults.append(InjectedFault("kill experts.1", "crash", "experts.1", begin + 10.0, 10, f"{number}"))
        found.stretches.append(StretchPair(begin, begin + 10.0, begin + 20.0))
        times = [begin + 0.1 * place for place in range(100)] + [begin + 10.0 + place / rate for place in range(10 * rate)]
        tokens = [ReceivedToken(place, 11, at) for place, at in enumerate(times)]
        found.answers.append(ReceivedAnswer(0, begin, tokens, "length", None, times[-1]))
    found.begun, found.ended = 0.0, 20.0 * len(rates) + 20.0
    return found


def test_throughput_is_held_against_what_the_servers_left_can_do() -> None:
    for rates, spare, verdict in (
        ([10] * 8, True, "met"),
        ([8] * 8, True, "not met"),
        ([8] * 8, False, "met"),  # two of three servers are left
        ([6] * 8, False, "not met"),
        ([10, 10, 10, 10, 8, 8, 8, 8], True, "undecided"),
        ([10] * 5, True, "undecided"),
    ):
        report = report_of(found_with_kills(rates, spare), MACHINE)
        (row,) = (row for row in report.rows if row.name == RATIO)
        assert row.verdict == verdict, (rates, spare, row)
        assert row.target.startswith(">= 0.980 (with spare servers)" if spare else ">= 0.647 (2 of 3 servers)"), row.target


def test_emulated_figures_that_are_void_resolve_nothing() -> None:
    found = found_with_kills([10] * 8, spare=True)
    found.emulation = emulation_report(100.0, [EmulationStatistics(Lateness(100, 50, 0.5))])
    report = report_of(found, MACHINE)
    assert rows_of(report)[RATIO][1] == "undecided"
    assert any("VOID" in note for note in report.notes)


def test_what_was_interrupted_claims_nothing() -> None:
    found = found_of([])
    found.reference, found.faults_begun, found.stretches, found.begun, found.ended, found.interrupted = [], math.inf, [], 0.0, 0.0, True
    found.injected_faults.clear()
    report = report_of(found, MACHINE)
    assert not report.is_success
    assert rows_of(report)["tokens lost"] == ("0 of 0", "undecided")
    assert "interrupted: this is the report so far" in report.notes
    json_text(report.record())


def test_a_plan_without_faults_proves_nothing() -> None:
    found = found_of(make_answers(0.5, 80))
    found.injected_faults.clear()
    found.num_faults = 0
    report = report_of(found, MACHINE)
    assert rows_of(report)["requests failed"][1] == "undecided"
    assert report.notes == ["lost without cause: experts.1", "no fault was planned"]


def test_each_wrong_answer_makes_the_run_wrong() -> None:
    dropped, doubled, changed, late, failed = (make_answers(0.5, 80) for _ in range(5))
    del dropped[43].tokens[1]
    doubled[43].tokens.insert(2, doubled[43].tokens[1])
    changed[43].tokens[3] = changed[43].tokens[3]._replace(token_id=99)
    late[43].num_late = 1
    failed[43].finish_reason, failed[43].error = "error", "expert 3 has no copy left"
    for answers, name in (
        (dropped, "tokens lost"),
        (doubled, "tokens doubled"),
        (changed, "tokens changed"),
        (late, "tokens after the end"),
        (failed, "requests failed"),
    ):
        report = report_of(found_of(answers), MACHINE)
        assert not report.is_success, name
        assert [row.name for row in report.rows if row.verdict == "not met"] == [name]
    assert "failed: expert 3 has no copy left" in report.notes
    assert report_of(found_of(failed), MACHINE, tolerates_errors=True).is_success
    assert not report_of(found_of(changed), MACHINE, tolerates_errors=True).is_success


def test_a_run_that_broke_off_is_wrong_and_gives_the_reason() -> None:
    found = found_of(make_answers(0.5, 80))
    found.failure = "experts.1 was killed by SIGKILL"
    report = report_of(found, MACHINE)
    assert not report.is_success
    assert report.notes == ["the run ended early: experts.1 was killed by SIGKILL"]


def test_a_stall_and_lower_throughput_are_not_met() -> None:
    answers = make_answers(0.5, 80)
    for each in answers:  # all stand still from 1.5 to 2.5
        each.tokens = [received._replace(at=received.at + 1.0) if received.at > 1.52 else received for received in each.tokens]
    rows = rows_of(report_of(found_of(answers), MACHINE))
    assert "worst 1.00 s of 20" in rows["longest extra pause in answers hit by a fault"][0]
    assert rows[RATIO] == ("0.667 (one value)", "undecided")


def test_leaks_and_unexplained_losses_are_counted_and_reported() -> None:
    found = found_of(make_answers(0.5, 80))
    found.leaks.append("launcher: 11 descriptors, 10 before")
    found.observer.on_event(events.WorkerLost("experts.2", "was killed by SIGKILL"))  # no fault hit it
    found.observer.on_event(events.WorkerLost("experts.1", "was marked dead"))  # it was killed once, and had been lost for that
    found.observer.on_event(events.WorkerLost("experts.0", "is restarted with experts.1", is_restarting=True))
    report = report_of(found, MACHINE)
    rows = rows_of(report)
    assert rows["left behind"] == ("1", "not met")
    assert rows["processes lost without cause"] == ("2", "not met")
    assert report.notes == [
        "left behind: launcher: 11 descriptors, 10 before",
        "lost without cause: experts.2",
        "lost without cause: experts.1",
    ]


def test_what_is_left_behind_and_a_loss_without_cause_are_failures() -> None:
    lost, leaking = found_of(make_answers(0.5, 80)), found_of(make_answers(0.5, 80))
    assert report_of(lost, MACHINE).is_success
    lost.observer.on_event(events.WorkerLost("experts.2", "was killed by SIGKILL"))
    leaking.leaks.append("launcher: 11 descriptors, 10 before")
    assert not any(report_of(found, MACHINE).is_success for found in (lost, leaking))


def test_failed_faults_and_processes_left_down_are_reported_once() -> None:
    found = found_of(make_answers(0.5, 80))
    missed = InjectedFault("kill experts.1", "crash", "experts.1", 3.0, missed="experts.1 is not running")
    found.injected_faults.extend([missed] * 30)
    found.observer.on_event(events.WorkerGivenUp("experts.1", "it was started again 3 times in 30 s"))
    report = report_of(found, MACHINE)
    assert not report.is_success
    assert report.notes == [
        "not injected: kill experts.1: experts.1 is not running (30 times)",
        "experts.1 stayed down: it was started again 3 times in 30 s; use --set reliability.restarts=N",
    ]


def printed(report: ChaosReport, width: int) -> str:
    out = io.StringIO()
    print_report(report, Console(width=width, file=out))
    return out.getvalue()


def test_the_record_is_json_and_the_table_can_be_printed() -> None:
    report = report_of(found_of(make_answers(0.5, 80)), MACHINE)
    record = json.loads(json_text(report.record()))
    assert record["details"]["faults"][0]["back_seconds"] == 0.5
    assert len(record["details"]["tokens_per_second"]) == 40
    text = printed(report, 140)
    assert "kill until no process uses the server" in text
    assert "role, fault and phase" not in text, "the phase of this fault is unknown"


def test_the_matrix_shows_the_phases_of_each_fault_that_was_tried() -> None:
    found = found_of(make_answers(0.5, 80))
    (kill,) = found.injected_faults
    kill.phase = "decode"
    failed = found_of(make_answers(0.5, 80))
    failed.injected_faults[0].phase = "prefill"
    failed.answers[20].finish_reason = "error"
    for each, cell in ((found, {"phase": "decode", "exact": 1}), (failed, {"phase": "prefill", "exact": 0, "failed": 1})):
        report = report_of(each, MACHINE)
        tried = [one for one in report.details["matrix"] if one["tried"]]
        assert tried == [{"role": "experts", "fault": "kill", "tried": True} | cell]
        lines = [line.split() for line in printed(report, 60).splitlines()]
        assert ["role", "fault", "start", "prefill", "decode", "idle", "replay", "drain"] in lines
        assert ["experts", "kill", *(["-", "-", "1", "ok"] if each is found else ["-", "1", "bad", "-"]), "-", "-", "-"] in lines
        assert not [line for line in lines if line[:1] == ["monitor"]]


def test_the_picture_is_written(tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps the files of its fonts open."""
    script = (
        "import sys, test_report as t; from flowrt.chaos.plot import plot_chaos; "
        "plot_chaos(t.report_of(t.found_of(t.make_answers(0.5, 80)), t.MACHINE), sys.argv[1])"
    )
    folders = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "t.svg")], env={**os.environ, "PYTHONPATH": folders}, check=True)
    text = (tmp_path / "t.svg").read_text()
    assert "kill experts.1" in text
    assert "until it was back" in text


@pytest.mark.parametrize(("rates", "mean"), [([], []), ([4.0], [4.0]), ([0.0, 3.0, 6.0], [1.5, 3.0, 4.5])])
def test_smoothing_is_a_mean_of_neighbours(rates: list[float], mean: list[float]) -> None:
    assert smoothed(rates, 3) == mean
