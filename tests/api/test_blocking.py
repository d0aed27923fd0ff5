"""`flowrt.start`: blocking calls from any thread, inside a running loop, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from left_processes import left_processes

import flowrt
from flowrt.seams import LoopThread

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-moe"
TWO_ACTORS = ROOT / "examples" / "two_actors" / "graph.yaml"
ONE: dict[str, Any] = {"flowrt": 1, "model": {"path": MODEL}, "deploy": {"processes": "one"}}
MANY: dict[str, Any] = {"flowrt": 1, "model": {"path": MODEL}, "deploy": {"experts": {"servers": 1}}}


def sums(numbers: range) -> tuple[list[str], list[str]]:
    return [f"What is {number} + 2?" for number in numbers], [f" {number + 2}" for number in numbers]


def loop_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "flowrt"]


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "ids", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(flowrt.TokenizerError, match=r"ids has no tokenizer\.json, which texts need"):
        flowrt.generate(model, ["What is 1 + 2?"])  # before anything starts
    with flowrt.start({"flowrt": 1, "model": {"path": model}, "deploy": {"processes": "one"}}) as llm:
        for arguments in ({"prompt": "What is 1 + 2?"}, {"messages": [{"role": "user", "content": "What is 1 + 2?"}]}):
            with pytest.raises(flowrt.TokenizerError, match="or give token ids"):
                llm.complete(**arguments)  # type: ignore[arg-type]
        assert len(llm.complete([222, 20], max_tokens=2).token_ids) == 2


def test_calls_return_whole_outputs() -> None:
    prompts, expected = sums(range(10, 20))
    with flowrt.start(ONE) as llm:
        assert llm.complete(prompts[0], max_tokens=8, stop=None).text == expected[0]
        assert llm.complete(prompts[0], flowrt.SamplingParams(max_tokens=1)).finish_reason == "length"
        assert [completion.text for completion in llm.generate(prompts, max_tokens=8)] == expected
        assert llm.complete(messages=[{"role": "user", "content": prompts[1]}], max_tokens=8).text == expected[1]
        assert llm.generate([[{"role": "user", "content": prompts[2]}]], max_tokens=8)[0].text == expected[2]
        with pytest.raises(flowrt.RequestError, match="prompt of 100000 tokens needs"):
            llm.complete([1] * 100_000)
        good, bad = llm.generate([prompts[0], [1] * 100_000], max_tokens=8)
        assert good.text == expected[0]
        assert (bad.finish_reason, bad.token_ids, bad.choices[0].text) == ("error", (), "")
        assert bad.error
        with pytest.raises(flowrt.RequestError) as raised:
            print(bad.text)
        assert str(raised.value) == bad.error
        with pytest.raises(flowrt.ArgumentError, match="did you mean max_tokens"):
            llm.complete("x", max_token=3)  # type: ignore[call-arg]
        assert llm.health().ok
        assert "attention.0" in llm.statistics()
        with pytest.raises(flowrt.UserError, match="no input of its own"):
            llm.call(x=torch.zeros(1))
    assert not loop_threads()
    for call in (lambda: llm.complete("x"), llm.health, llm.statistics):
        with pytest.raises(flowrt.NotRunningError, match="closed"):
            call()
    llm.close()


def test_threads_and_running_loops_share_one_graph() -> None:
    prompts, expected = sums(range(20, 36))
    with flowrt.start(ONE) as llm, ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda prompt: llm.complete(prompt, max_tokens=8).text, prompts)) == expected

        async def cell() -> str:
            return llm.complete(prompts[0], max_tokens=8).text

        assert asyncio.run(cell()) == expected[0]


def test_a_graph_of_tensors_is_called_with_its_inputs() -> None:
    with flowrt.start(TWO_ACTORS, overrides=["processes=one"]) as graph:
        with pytest.raises(flowrt.UserError, match="takes x; got y"):
            graph.call(y=torch.ones(2, 64))
        assert graph.call(x=torch.ones(2, 64)).shape == (2, 64)
        with pytest.raises(flowrt.UserError, match="serves no model"):
            graph.complete("text")


@pytest.mark.parametrize("source", [MODEL, str(MODEL), ONE])
def test_a_model_directory_and_a_dict_are_graphs(source: Any) -> None:
    overrides = ["deploy.processes=one"]
    assert flowrt.generate(source, "What is 5 + 2?", overrides=overrides, max_tokens=8)[0].text == " 7"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({}, "graph: flowrt"),
        ({"flowrt": 1}, "graph: model is missing"),
        ({"flowrt": 1, "model": {"path": "no/such/model"}}, "graph: model.path: there is no folder"),
        (ONE | {"limits": {"max_tokens": 0}}, "graph: limits.max_tokens"),
        (ONE | {"limits": {1: 2}}, "graph: limits: has the key 1; keys are texts"),
        (ONE | {"limits": {"max_tokens": object()}}, "graph: limits.max_tokens: is <object"),
        (ONE | {"limits": {"max_tokens": 1 << 70}}, "graph: limits.max_tokens"),
        ({"flowrt": 10**5000}, "graph: flowrt: a int that cannot be shown is not possible"),
        ("no\0file.yaml", r"no\x00file.yaml: cannot be read"),
        ("\udcff.yaml", r"\udcff.yaml: "),
    ],
)
def test_a_wrong_graph_is_a_graph_error_without_a_line(source: Any, text: str) -> None:
    with pytest.raises(flowrt.GraphError) as caught:
        flowrt.open(source)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_a_dict_that_holds_itself_is_refused() -> None:
    source: dict[str, Any] = {"flowrt": 1}
    source["model"] = source
    with pytest.raises(flowrt.GraphError, match="is nested more than"):
        flowrt.open(source)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"graph": 5}, "graph is 5, it must be the path"),
        ({"graph": ONE, "model": 5}, "model is 5, it must be the path"),
        ({"graph": ONE, "overrides": "a=b"}, "overrides is 'a=b', it must be a list"),
        ({"graph": ONE, "overrides": [5]}, r"overrides is \(5,\), it must be a list"),
        ({"graph": ONE, "overrides": None}, "overrides is None, it must be a list"),
        ({"graph": ONE, "log_level": "loud"}, "log_level is 'loud', it must be one of"),
        ({"graph": ONE, "on_event": 5}, "on_event is 5, it must be a function"),
        ({"graph": ONE, "on_line": 5}, "on_line is 5, it must be a function"),
        ({"graph": ONE, "on_line": asyncio.sleep}, "it must be a function, and not a coroutine function"),
    ],
)
@pytest.mark.parametrize("call", [flowrt.open, flowrt.start])
def test_wrong_arguments_raise_before_anything_starts(call: Callable[..., Any], arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(flowrt.ArgumentError, match=text):
        call(**arguments)
    assert not loop_threads()


def test_overrides_may_come_from_a_generator() -> None:
    with pytest.raises(flowrt.GraphError, match="max_tokens"):
        flowrt.open(ONE, overrides=(text for text in ["limits.max_tokens=0"]))  # type: ignore[arg-type]


def test_wrong_prompts_of_generate_raise_before_anything_starts() -> None:
    for prompts, keywords in ((None, {}), (["a", 5], {}), (["a"], {"n": 0})):
        with pytest.raises(flowrt.ArgumentError):
            flowrt.generate("no/such/file.yaml", prompts, **keywords)  # type: ignore[arg-type]


def test_an_exception_in_the_block_ends_the_graph_and_is_raised() -> None:
    pids: set[int] = set()

    def run() -> None:
        with flowrt.start(MANY) as llm:
            pids.update(llm._graph.pids.values())
            assert llm.complete("What is 5 + 2?", max_tokens=8).text == " 7"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert not loop_threads()
    assert not left_processes(pids)


def test_a_start_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    nodes = {"a": {"operator": "no_such_module:f", "process": "p"}}
    source = {"flowrt": 1, "processes": "one", "nodes": nodes, "edges": {"input.x -> a.x": None, "a.y -> output.y": None}}
    with pytest.raises(flowrt.UserError, match="cannot import 'no_such_module'"):
        flowrt.start(source, on_line=lambda process, line: None)
    assert not loop_threads()


def test_a_death_raises_in_the_call_and_in_later_calls() -> None:
    def run() -> None:
        with flowrt.start(MANY, overrides=["reliability.recovery=off"]) as llm:
            os.kill(llm._graph.pids["attention.0"], signal.SIGKILL)
            while True:
                llm.complete("What is 5 + 2?", max_tokens=8)

    with pytest.raises(flowrt.WorkerDiedError, match=r"attention\.0 was killed by SIGKILL"):
        run()
    assert not loop_threads()


def test_closing_ends_the_calls_of_other_threads() -> None:
    started = threading.Event()
    llm = flowrt.start(ONE, overrides=["limits.max_tokens=4096", "limits.kv_pages=4096"])
    params = flowrt.SamplingParams(max_tokens=64, ignore_eos=True)

    def serve() -> list[str]:
        reasons = []
        while True:
            try:
                reasons.append(llm.complete([1, 2, 3], params).finish_reason)
                started.set()
            except flowrt.NotRunningError:
                return reasons

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(serve) for _ in range(4)]
        assert started.wait(60)
        closers = [threading.Thread(target=llm.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        assert not loop_threads()
        reasons = [task.result() for task in running]
    assert any(reasons)
    assert {reason for each in reasons for reason in each} <= {"length", "abort"}


def test_a_graph_that_is_dropped_is_ended() -> None:
    llm = flowrt.start(MANY)
    pids = set(llm._graph.pids.values())
    del llm
    gc.collect()
    for thread in threading.enumerate():  # the finalizer does not wait: it runs in any thread
        if thread.name == "flowrt":
            thread.join(60)
    assert not loop_threads()
    assert not left_processes(pids)


def test_the_loop_of_the_caller_stays_its_own() -> None:
    async def loop_of_this_thread() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        thread = LoopThread("flowrt", nullcontext())
        assert thread.run(loop_of_this_thread) is not loop
        assert asyncio.get_event_loop() is loop
        thread.close()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_a_call_from_the_graphs_own_thread_is_an_error_instead_of_a_deadlock() -> None:
    """As a callback of the graph would do."""
    thread = LoopThread("flowrt", nullcontext())

    async def call_from_the_loop() -> None:
        thread.run(asyncio.sleep, 0)

    with pytest.raises(flowrt.NotRunningError, match="not from its own callbacks"):
        thread.run(call_from_the_loop)
    thread.close()
    assert not loop_threads()


def test_an_interrupt_while_the_call_begins_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread may run the call before the caller's returns from handing it over."""
    thread = LoopThread("flowrt", nullcontext())
    begun, ended = threading.Event(), threading.Event()

    async def call() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    schedule = thread._loop.call_soon_threadsafe

    def interrupted(*arguments: Any) -> None:
        schedule(*arguments)
        assert begun.wait(60)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(call)
    assert ended.wait(60)
    assert thread.run(asyncio.sleep, 0, "next") == "next"
    thread.close()
    assert not loop_threads()


def test_another_event_loop_than_the_graphs_is_an_error_instead_of_a_deadlock() -> None:
    with flowrt.start(ONE) as llm:
        graph = llm._graph

        async def close() -> None:
            await graph.__aexit__(None, None, None)

        for call in (lambda: graph.complete("a", max_tokens=1), graph.statistics, graph.drain, close):
            with pytest.raises(flowrt.NotRunningError, match="opened in another event loop"):
                asyncio.run(call())
        assert llm.complete("What is 5 + 2?", max_tokens=8).text == " 7"


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_callback_that_raises_prints_one_line_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def fail(event: Any) -> None:
        calls.append(event)
        raise ValueError("first line\nsecond line")

    with flowrt.start(MANY, on_event=fail) as llm:
        assert llm.complete("What is 5 + 2?", max_tokens=8).text == " 7"
    assert len(calls) > 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flowrt: error: on_event raised ValueError: first line second line (")
    assert f"{Path(__file__).name}:" in line

    def fail_without_text(event: Any) -> None:
        raise UnspeakableError

    with flowrt.start(ONE, on_event=fail_without_text):
        pass
    assert "on_event raised UnspeakableError: its text cannot be shown" in capsys.readouterr().err


SCRIPT = """
import os, signal, sys, threading, time
import flowrt
llm = flowrt.start({graph!r})
print(*set(llm._graph.pids.values()), flush=True)
"""
ENDS = {
    "falls off the end": "",
    "sys.exit": "sys.exit(0)",
    "an exception": "raise SystemExit(0) from ValueError()",
    "with a request running": """
def serve():
    try:
        while True:
            llm.complete([1, 2, 3], max_tokens=100, ignore_eos=True)
    except flowrt.NotRunningError:
        pass
threading.Thread(target=serve, daemon=True).start()
while not llm._graph.run.requests.gateway.num_unfinished:
    time.sleep(0.001)  # a busy loop would keep the loop's thread from its work
""",
    "in a forked child too": """
child = os.fork()
if not child:
    try:
        llm.complete("text")
    except flowrt.NotRunningError:
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert llm.complete("What is 5 + 2?", max_tokens=8).text == " 7"
""",
    "after Ctrl-C in a call": """
graph = llm._graph
def interrupt():
    while not graph.run.requests.gateway.num_unfinished:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    while True:
        llm.complete([1, 2, 3], max_tokens=100, ignore_eos=True)
except KeyboardInterrupt:
    pass
assert llm.complete("What is 5 + 2?", max_tokens=8).text == " 7"
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_when_the_interpreter_exits_without_close(end: str) -> None:
    graph = MANY | {"model": {"path": str(MODEL)}}
    script = SCRIPT.format(graph=graph) + ENDS[end]
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    assert not left_processes(pids)
