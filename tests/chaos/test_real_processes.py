"""Faults on real processes: each kind affects only its targets, outputs stay correct, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from left_processes import left_processes

from flowrt.api import RunningGraph, open_graph
from flowrt.bench.report.report import Machine
from flowrt.chaos.cells import role_of
from flowrt.chaos.chaos_options import ChaosOptions
from flowrt.chaos.compare import moved_requests, usual_times
from flowrt.chaos.inject import Injector
from flowrt.chaos.leaks import children_of, is_alive
from flowrt.chaos.measure import ChaosResult, measure, prepare
from flowrt.chaos.observer import RunObserver
from flowrt.chaos.plan import parse_faults
from flowrt.chaos.report import report_of
from flowrt.chaos.run_faults import RunFaults
from flowrt.launcher import events
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Seams

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
SMALL = ("deploy.attention.groups=1", "deploy.experts.servers=2", "numerics=strict")
LOAD: dict[str, Any] = {"concurrency": 4, "prompt_tokens": 8, "new_tokens": 12}
PLENTY_SECONDS = 120.0


async def found_of(tmp_path: Path, faults: str, *overrides: str, seconds: float = 1.0, pairs: int = 1) -> ChaosResult:
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"scenario: 1\nfaults: [{faults}]\n")
    options = ChaosOptions(plan=plan, overrides=(*SMALL, *overrides), requests=4, seconds=seconds, pairs=pairs, **LOAD)
    async with asyncio.timeout(PLENTY_SECONDS):
        return await measure(prepare(QUICKSTART, options), print)


def assert_right(found: ChaosResult) -> None:
    report = report_of(found, Machine("a processor", 2, "Linux 6", {}, 0.0))
    assert report.is_success, report.notes
    assert (found.leaks, found.failure) == ([], None)
    assert len(found.answers) >= 4


async def test_short_standstills_change_no_token_and_end_no_process(tmp_path: Path) -> None:
    faults = (
        "{fault: pause, process: experts.0, at_seconds: 0.1, for_seconds: 0.2}, "
        "{fault: stall, process: experts.1, at_seconds: 0.4, for_seconds: 0.2}, "
        "{fault: hang, process: experts.0, at_seconds: 0.7, for_seconds: 0.2}, "
        "{fault: stall, process: attention.0, at_seconds: 1.0, for_seconds: 0.2}, "
        "{fault: slow, process: experts.1, at_seconds: 1.3, for_seconds: 0.2, factor: 3}"
    )
    found = await found_of(tmp_path, faults)
    assert_right(found)
    assert [injected.missed for injected in found.injected_faults] == [""] * 5
    logged = {note.what for _, note in found.observer.notes}
    assert {"stall", "hang", "slow"} <= logged
    assert not any(isinstance(event, events.WorkerLost) for _, event in found.observer.seen)


async def test_killed_servers_are_replaced_and_stretches_without_faults_alternate_with_the_plan(tmp_path: Path) -> None:
    found = await found_of(tmp_path, "{fault: crash, process: experts.1, at_seconds: 0.1}", seconds=0.3, pairs=2)
    assert_right(found)
    assert len(found.injected_faults) == len(found.stretches) == found.num_faults == 2
    for pair, injected, following in zip(found.stretches, found.injected_faults, [*found.stretches[1:], None], strict=True):
        assert pair.begun < pair.faults_begun < injected.at < pair.ended
        assert following is None or pair.ended <= following.begun
        assert found.observer.lost_seconds(injected) < math.inf
        assert found.observer.left_seconds(injected) < math.inf
        assert found.observer.back_seconds(injected) < math.inf


@asynccontextmanager
async def running() -> AsyncIterator[tuple[RunningGraph, Injector, RunObserver, list[str]]]:
    """A small graph, its fault injector, and the other output of its workers."""
    seams = Seams()
    observer = RunObserver(seams.clock)
    lines: list[str] = []

    def on_line(process: str, line: str) -> None:
        if not observer.take_line(process, line):
            lines.append(f"{process}: {line}")

    graph = open_graph(QUICKSTART, overrides=SMALL, seams=seams, on_event=observer.on_event, on_line=on_line)
    injector = Injector(graph, observer, seams.clock)
    async with asyncio.timeout(PLENTY_SECONDS), graph:
        yield graph, injector, observer, lines


async def test_each_fault_affects_its_target_alone_and_is_reported() -> None:
    """Pauses, a reset, then kills, in one graph."""
    async with running() as (graph, injector, observer, lines):
        await assert_idle_workers_hold_nothing(graph, injector, observer)
        await assert_cancelled_pause_wakes(graph, injector)
        assert [injected.text for injected in observer.injected_faults] == ["pause experts.1 for 60 s"]
        await assert_later_of_two_pauses_wakes(graph, injector)
        await assert_reset_restarts_the_server_alone(graph, injector, observer, lines)
        observer.injected_faults.clear()
        await assert_progress_shows_each_fault(graph, observer)
        observer.injected_faults.clear()
        scenario = parse_faults("kill:experts.1@0s", graph.graph)
        graph.launcher.pids["experts.1"] = 1 << 22
        await injector.run(scenario, Seams().clock.now())
        assert observer.injected_faults[0].missed == "experts.1 is not running"


async def assert_idle_workers_hold_nothing(graph: RunningGraph, injector: Injector, observer: RunObserver) -> None:
    await graph.complete([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
    await injector.collect_held(graph.graph.process_names())
    assert observer.held.keys() == set(graph.graph.process_names())
    assert observer.held["attention.0"]["pages held"] == 0
    assert all(counts["rows"] == 0 for counts in observer.held.values())


async def assert_cancelled_pause_wakes(graph: RunningGraph, injector: Injector) -> None:
    pid = graph.pids["experts.1"]
    task = asyncio.create_task(injector.run(parse_faults("pause:experts.1@0s+60s", graph.graph), Seams().clock.now()))
    await until_state(pid, "T")
    task.cancel()
    await asyncio.wait([task])
    assert state(pid) != "T"


async def assert_later_of_two_pauses_wakes(graph: RunningGraph, injector: Injector) -> None:
    pid = graph.pids["experts.1"]
    scenario = parse_faults("pause:experts.1@0s+100ms,pause:experts.1@0s+60s", graph.graph)
    task = asyncio.create_task(injector.run(scenario, Seams().clock.now()))
    await until_state(pid, "T")
    later = parse_faults("pause:experts.0@0s+200ms", graph.graph)
    await injector.run(later, Seams().clock.now())  # it ends after the first of the two
    assert state(pid) == "T"
    task.cancel()
    await asyncio.wait([task])
    assert state(pid) != "T"


async def assert_progress_shows_each_fault(graph: RunningGraph, observer: RunObserver) -> None:
    logged: list[str] = []
    injector = Injector(graph, observer, Seams().clock, logged.append)
    injector.so_far = lambda: "so far all is well"
    await injector.run(parse_faults("pause:experts.1@50ms+10ms,kill:experts.0@0s", graph.graph), Seams().clock.now())
    pids = [injected.pid for injected in observer.injected_faults]
    assert logged == [
        "2 faults, the first at 0 s, the last at 0.05 s",
        f"kill experts.0 (1 of 2), pid {pids[0]}; next at 0.05 s; so far all is well",
        f"pause experts.1 for 0.01 s (2 of 2), pid {pids[1]}; the last; so far all is well",
    ]
    assert await observer.wait_until(lambda: observer.back_seconds(observer.injected_faults[0]) < math.inf, PLENTY_SECONDS)
    logged.clear()
    await injector.run(parse_faults("kill:experts.1@0s", graph.graph), Seams().clock.now())
    assert await injector.wait_back(since=0.0)
    assert [line.partition(", pid")[0] for line in logged[:1]] == ["kill experts.1"]
    assert sorted(line.partition(" after ")[0] for line in logged[1:]) == ["experts.0 is back", "experts.1 is back"]
    await assert_incarnation_is_killed_once(graph, injector, observer)


async def assert_incarnation_is_killed_once(graph: RunningGraph, injector: Injector, observer: RunObserver) -> None:
    """Even if it dies slowly."""
    observer.injected_faults.clear()
    await injector.run(parse_faults("kill:experts.1@0s,kill:experts.1@0s,pause:experts.1@0s+60s", graph.graph), Seams().clock.now())
    assert [injected.missed for injected in observer.injected_faults] == ["", *["experts.1 is not running"] * 2]
    assert await observer.wait_until(lambda: observer.back_seconds(observer.injected_faults[0]) < math.inf, PLENTY_SECONDS)


async def test_cancelled_run_ends_its_processes_and_reports_its_record(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    faults = ", ".join(f"{{fault: crash, process: experts.1, at_seconds: {at}}}" for at in (0, 999))
    plan.write_text(f"scenario: 1\nfaults: [{faults}]\n")
    killed = asyncio.Event()

    def log(line: str) -> None:
        if line.startswith("kill experts.1"):
            killed.set()

    options = ChaosOptions(plan=plan, overrides=SMALL, requests=4, seconds=0.1, **LOAD)
    async with asyncio.timeout(PLENTY_SECONDS):
        task = asyncio.create_task(measure(prepare(QUICKSTART, options), log))
        await killed.wait()
        task.cancel()
        found = await task
    assert [injected.text for injected in found.injected_faults] == ["kill experts.1"]
    assert found.leaks == []
    assert found.ended > found.begun > 0
    assert not any(answer.ended == math.inf for answer in found.answers)
    found.interrupted = True
    assert not report_of(found, Machine("a processor", 2, "Linux 6", {}, 0.0)).is_success


async def until_state(pid: int, letter: str) -> None:
    while state(pid) != letter:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def assert_reset_restarts_the_server_alone(graph: RunningGraph, injector: Injector, observer: RunObserver, lines: list[str]) -> None:
    before = dict(graph.pids)
    await graph.complete([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))  # links open when they have something to carry
    await injector.run(parse_faults("reset:attention.0-experts.0@0s", graph.graph), Seams().clock.now())
    assert await observer.wait_until(lambda: any(note.what == "reset" for _, note in observer.notes), PLENTY_SECONDS)
    completion = await graph.complete([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(completion.token_ids) == 8
    while graph.pids["experts.0"] == before["experts.0"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert {name for name in before if graph.pids[name] != before[name]} == {"experts.0"}
    assert not any("experts.1" in line for line in lines), lines


async def test_faults_of_a_run_after_the_last_answer_are_left_out() -> None:
    seams = Seams()
    graph = open_graph(QUICKSTART, overrides=SMALL, seams=seams, on_line=lambda name, line: None)
    paused = asyncio.Event()

    def log(line: str) -> None:
        if "pid" in line:
            paused.set()

    run_faults = RunFaults("pause:experts.1@0s+50ms,kill:experts.0@1000s", graph, seams.clock, log)
    async with asyncio.timeout(PLENTY_SECONDS), graph:
        pid = graph.pids["experts.0"]
        answered = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_faults.run(answered))
            await paused.wait()
            answered.set()
        assert is_alive(pid)
    lines = run_faults.sentences(8, 8)
    assert lines[0].startswith("chaos: pause experts.1 for 0.05 s (pid ")
    assert not run_faults.all_injected
    assert lines[1:] == ["chaos: 1 of 2 faults left out: all answers had ended before their time", "chaos: all 8 answers are complete"]
    assert run_faults.sentences(8, 7)[-1] == "chaos: 7 of 8 answers are complete"
    assert not left_processes([pid])
    assert os.getpid() not in graph.pids.values()


# --- groups that are killed, stopped or hung -----------------------------------------------------------------------------------


async def group_faults_of(kills: int, *overrides: str, roles: str = "attention", fault: str = "kill", phase: str = "decode") -> ChaosResult:
    """The ten ways of sampling, four at a time."""
    keys = ("numerics=strict", "deploy.experts.servers=2", *overrides)
    options = ChaosOptions(kills=kills, roles=roles, fault=fault, phase=phase, overrides=keys, requests=10, seconds=0.2, **LOAD)
    async with asyncio.timeout(PLENTY_SECONDS):
        return await measure(prepare(QUICKSTART, options), print)


@pytest.mark.parametrize(("groups", "transport", "faults"), [(2, "shm", ["hang"]), (3, "zmq", ["kill", "pause", "hang"])])
async def test_a_lost_group_changes_no_answer(groups: int, transport: str, faults: list[str]) -> None:
    """Each fault comes when the group of the one before is back."""
    link = f"deploy.links.attention-experts.transport={transport}"
    found = await group_faults_of(len(faults), f"deploy.attention.groups={groups}", link, fault=",".join(faults))
    assert_right(found)
    assert sorted(injected.kind for injected in found.injected_faults) == sorted(each.replace("kill", "crash") for each in faults)
    moved = moved_requests(found.answers, found.injected_faults, usual_times(found.reference), 64)
    lost = [event.name for _, event in found.observer.seen if isinstance(event, events.WorkerLost)]
    assert lost == [injected.process for injected in found.injected_faults], "the servers go on without it"
    for injected in found.injected_faults:
        assert injected.phase in ("prefill", "decode")  # a group that was decoding may have taken a new request by then
        assert {each.fault.process for each in moved if each.fault is injected} == {injected.process}
    first = found.injected_faults[0]  # later all requests may be in the group that is hit
    stayed = [answer for answer in found.answers if not answer.moves and answer.submitted <= first.at <= answer.ended]
    assert stayed, "the other groups go on, too"


async def test_the_last_group_dies_and_its_requests_wait_for_it() -> None:
    found = await group_faults_of(1, "deploy.attention.groups=1")
    assert_right(found)
    assert any(answer.moves for answer in found.answers)


async def test_faults_go_through_the_phases_and_the_drain() -> None:
    found = await group_faults_of(5, "deploy.attention.groups=2", phase="start,prefill,idle,replay,drain")
    assert_right(found)
    hit = {injected.phase for injected in found.injected_faults}
    assert {"start", "idle"} <= hit, hit  # the others pass quickly, and the fault may come too late
    assert {role_of(found.graph, injected.process) for injected in found.injected_faults} == {"attention"}


async def test_all_roles_are_hit_in_one_run() -> None:
    found = await group_faults_of(4, "deploy.attention.groups=2", roles="all", phase="decode", fault="kill")
    assert_right(found)
    hit = {role_of(found.graph, injected.process) for injected in found.injected_faults}
    assert hit == {"attention", "experts", "monitor", "fork-server"}


# --- Ctrl-C ------------------------------------------------------------------------------------------------------------------


def test_interrupt_ends_all_processes_and_writes_the_record(tmp_path: Path) -> None:
    plan, record = tmp_path / "plan.yaml", tmp_path / "found.json"
    faults = "{fault: crash, process: experts.1, at_seconds: 0}, {fault: stall, process: attention.0, at_seconds: 0, for_seconds: 3600}"
    plan.write_text(f"scenario: 1\nfaults: [{faults}]\n")
    words = ["chaos", str(QUICKSTART), "--plan", str(plan), "--json", str(record), "--seconds", "0.1"]
    words += ["--requests", "4", "--concurrency", "4", "--new-tokens", "8", "--set", "deploy.attention.groups=1"]
    command = [sys.executable, "-c", "from flowrt.cli.app import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        lines = []
        while "(2 of 2)" not in (line := run.stderr.readline()):
            assert line, lines
            lines.append(line)
        started = children_of(run.pid)
        run.send_signal(signal.SIGINT)
        lines.append(run.stderr.readline())
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
        lines += err.splitlines(keepends=True)
    assert run.returncode == 130
    assert lines.count("flowrt: interrupted\n") == 1
    assert "Traceback" not in "".join(lines)
    assert "note: interrupted: this is the report so far" in out
    details = json.loads(record.read_text())["details"]
    assert details["interrupted"]
    assert [fault["fault"] for fault in details["faults"]] == ["kill experts.1", "stall attention.0 for 3600 s"]
    assert started
    assert not left_processes({*started, run.pid})
