"""Failing operators beside good calls, and a cheap part of what `make hostile` runs: every kind within one process, few over processes."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from end_to_end import hostile_module as hostile
from end_to_end.hostile_runs import check_fatal, check_kinds, checks, opened, write_graph
from served_models import Served

import flowrt
from flowrt.api import read_graph
from flowrt.graph.written import to_yaml
from flowrt.simulation.inside import WorkerInternals, credit_faults
from flowrt.workers.process import Worker

NUM_CALLS, CALLERS = 4_000, 4
ROOT = Path(__file__).parents[2]


def internals() -> list[WorkerInternals]:
    return [WorkerInternals(worker) for worker in gc.get_objects() if type(worker) is Worker and worker.data_path is not None]


async def run_callers(graph: flowrt.RunningGraph, num_calls: int) -> dict[int, str]:
    """`num_calls` calls by four concurrent callers, each seventh of which fails. Returns the errors, by number of the call."""
    numbers = iter(range(num_calls))
    errors: dict[int, str] = {}
    failing = hostile.KINDS.index("text of many lines")

    async def caller() -> None:
        for number in numbers:
            x = torch.tensor([failing if number % 7 == 3 else hostile.GOOD, number])
            try:
                out = await graph(x=x)
            except flowrt.OperatorError as error:
                errors[number] = str(error)
            else:
                assert torch.equal(out, x)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return errors


async def wait_clean(workers: list[WorkerInternals]) -> None:
    """Wait until the last fences are confirmed: then no row, firing, message or credit is left."""
    for _ in range(30_000):
        left = [text for each in workers for text in each.leftovers()] + credit_faults(workers)
        if not left:
            return
        await asyncio.sleep(1e-3)
    pytest.fail("; ".join(left))


@pytest.mark.parametrize(("transport", "num_calls"), [("inproc", NUM_CALLS), ("shm", NUM_CALLS // 5)])
async def test_failing_calls_fail_alone_and_leave_nothing(tmp_path: Path, transport: str, num_calls: int) -> None:
    gc.collect()
    before = len(internals())
    async with opened(write_graph(tmp_path, transport)) as (graph, lines):
        errors = await run_callers(graph, num_calls)
        workers = internals()[before:]
        assert len(workers) == (3 if transport == "inproc" else 1)
        await wait_clean(workers if transport == "inproc" else [])
        assert graph._endpoint._waiting == {}
    assert sorted(errors) == [number for number in range(num_calls) if number % 7 == 3]
    texts = {error.partition(", layer 0")[2] for error in errors.values()}
    assert {re.sub(r"\d+", "N", text) for text in texts} == {", fed by input.x -> a.x: hostile_module.py:N: ValueError: first second third"}
    steps = sorted(int(error.split(",")[0].removeprefix("a failed at step ")) for error in errors.values())
    assert len(set(steps)) == len(errors)
    assert steps[-1] < num_calls
    assert lines == []


async def test_every_worker_fences_a_failed_or_cancelled_call_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(write_graph(tmp_path, "inproc")) as (graph, _):
        seen: list[tuple[str, str]] = []
        receive = graph.launcher._on_worker_control
        monkeypatch.setattr(
            graph.launcher._pool,
            "_on_control",
            lambda worker, control: (seen.append((worker.name, type(control).__name__)), receive(worker, control)),
        )
        with pytest.raises(flowrt.OperatorError, match="a failed"):
            await graph(x=torch.tensor([hostile.KINDS.index("text of many lines"), 0]))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await graph(x=torch.tensor([hostile.GOOD, 0]))
        await graph(x=torch.tensor([hostile.GOOD, 0]))
        for _ in range(30_000):
            if seen.count(("b", "CallsFenced")) == 2:
                break
            await asyncio.sleep(1e-3)
    calls = [message for message in seen if "Call" in message[1]]
    assert calls[0] == ("a", "CallFailed")
    assert sorted(calls[1:]) == sorted([("a", "CallsFenced"), ("b", "CallsFenced"), ("gateway", "FenceCalls")] * 2)


@pytest.mark.parametrize("name", [name for name in checks() if name.startswith("inproc")])
async def test_every_kind_within_one_process(tmp_path: Path, name: str) -> None:
    await checks()[name](tmp_path)


async def test_kinds_over_shared_memory(tmp_path: Path) -> None:
    await check_kinds(tmp_path, "shm", ["KeyboardInterrupt", "SystemExit", "no text", "meta tensor", "too large", "complex", "thread"])


@pytest.mark.parametrize("kind", ["os._exit", "closed descriptors", "hang"])
async def test_fatal_kinds_end_the_run_and_leave_nothing(tmp_path: Path, kind: str) -> None:
    await check_fatal(tmp_path, "shm", kind)


async def test_error_raised_by_a_call_is_not_raised_again_at_the_end(tmp_path: Path) -> None:
    async with flowrt.open(write_graph(tmp_path, "shm"), on_line=lambda process, line: None) as graph:
        with pytest.raises(flowrt.WorkerDiedError, match="a exited with status 5 unexpectedly"):
            await graph(x=torch.tensor([hostile.KINDS.index("os._exit")]))


async def test_cancelled_call_that_never_completes_frees_its_place(tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(
        f"flowrt: 1\nfolder: {Path(hostile.__file__).parent}\nprocesses: one\nlimits: {{in_flight: 2}}\nnodes:\n"
        '  a: {operator: "hostile_module:drop_zero", process: a}\n'
        '  b: {operator: "hostile_module:add", process: b}\n'
        "edges:\n  input.x -> a.x:\n  input.x -> b.left:\n  a.y -> b.right:\n  b.y -> output.y:\n"
    )
    async with flowrt.open(path) as graph:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await graph(x=torch.zeros(1))
        async with asyncio.timeout(30):
            assert (await graph(x=torch.ones(1))).item() == 2.0


@pytest.mark.parametrize(("operator", "code", "text"), [("pass_on", 0, ""), ("fail", 1, "mine failed at step"), ("leave", 3, "status 5")])
def test_exit_code_of_flowrt_run(served: Served, tmp_path: Path, operator: str, code: int, text: str) -> None:
    """A user's operator within a model's graph."""
    graph = served.write(tmp_path, {"experts": {"servers": 0}, "attention": {"groups": 1}})
    expanded = to_yaml(read_graph(graph), graph.name)
    edge = "attention.0.embed.x -> attention.0.attention.x:"
    lines = []
    for line in expanded.splitlines():
        if line.startswith("folder:"):
            line = f"folder: {Path(hostile.__file__).parent}"
        if edge in line:
            lines.append(line.split("attention.0.embed.x ->")[0] + "attention.0.embed.x -> mine.x:")
            line = line.replace("attention.0.embed.x ->", "mine.y ->")
        lines.append(line)
        if line == "nodes:":
            lines.append(f'  mine: {{operator: "hostile_module:{operator}", process: attention.0}}')
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3], "max_tokens": 2}\n')
    command = [sys.executable, "-m", "flowrt", "run", path, "--prompts", prompts]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == code, done.stderr
    found = [line for line in (done.stdout + done.stderr).splitlines() if text and text in line and not line.startswith("[")]
    assert len(found) == (code != 0)
