"""Signals that end a command while it starts, also for process 1 of a container, for which the kernel drops signals without a handler."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from flowrt.errors import INTERRUPTED
from flowrt.system import signals

_WHILE_IMPORTING = """
import sys, threading
from flowrt.__main__ import main
class Finder:
    def find_spec(self, name, *_):
        if name == "flowrt.cli.app":
            print("ready", flush=True)
            threading.Event().wait()
sys.meta_path.insert(0, Finder())
main()
"""
_BEFORE_THE_LOOP = """
import threading
import flowrt.cli.app
from flowrt.__main__ import main
def run(*_, **__):
    print("ready", flush=True)
    threading.Event().wait()
flowrt.cli.app.app = run
main()
"""
_BEHIND_THE_LOOP = """
import asyncio, threading
import flowrt.cli.app, flowrt.system.signals
from flowrt.__main__ import main
async def run_loop():
    with flowrt.system.signals.ending_signals(print):
        pass
def run(*_, **__):
    asyncio.run(run_loop())
    print("ready", flush=True)
    threading.Event().wait()
flowrt.cli.app.app = run
main()
"""
_BEFORE_A_LOOP_THAT_IS_IMPORTED = """
import asyncio, os, signal, sys
import flowrt.cli.app, flowrt.system.signals
from flowrt.__main__ import main
async def run_loop():
    with flowrt.system.signals.ending_signals(lambda number: loop_ends.set()):
        loop_ends = asyncio.Event()
        await loop_ends.wait()
        raise KeyboardInterrupt
class Finder:
    def find_spec(self, name, *_):
        if name == "a_loop":
            print("ready", flush=True)
            try:
                sys.stdin.read()
            except KeyboardInterrupt:
                pass
def run(*_, **__):
    with flowrt.system.signals.kept_signals():
        sys.meta_path.insert(0, Finder())
        try:
            import a_loop
        except ImportError:
            pass
        asyncio.run(run_loop())
flowrt.cli.app.app = run
main()
"""
_CAN_MAKE_PID_1 = (
    sys.platform == "linux"
    and shutil.which("unshare") is not None
    and not subprocess.run(["unshare", "-pf", "--mount-proc", "true"], check=False, capture_output=True).returncode
)


@pytest.mark.parametrize(
    ("code", "number"),
    [
        pytest.param(_WHILE_IMPORTING, signal.SIGINT, id="SIGINT while importing"),
        pytest.param(_WHILE_IMPORTING, signal.SIGTERM, id="SIGTERM while importing"),
        pytest.param(_WHILE_IMPORTING, signal.SIGHUP, id="SIGHUP while importing"),
        pytest.param(_BEFORE_THE_LOOP, signal.SIGTERM, id="before the loop"),
        pytest.param(_BEFORE_A_LOOP_THAT_IS_IMPORTED, signal.SIGTERM, id="in an import that swallows it"),
        pytest.param(_BEHIND_THE_LOOP, signal.SIGTERM, id="behind the loop"),
    ],
)
@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="process"),
        pytest.param(
            ["unshare", "-pf", "--mount-proc"], id="process 1", marks=pytest.mark.skipif(not _CAN_MAKE_PID_1, reason="needs root")
        ),
    ],
)
def test_a_signal_ends_a_command_that_starts(code: str, number: signal.Signals, before: list[str]) -> None:
    words = [*before, sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            command = psutil.Process(process.pid).children()[0].pid if before else process.pid
            os.kill(command, number)
            _, err = process.communicate(timeout=60)
        finally:
            for child in psutil.Process(process.pid).children() if process.poll() is None else []:
                child.kill()
            process.kill()
    assert (process.returncode, err) == (INTERRUPTED, "flowrt: interrupted\n")


async def test_handlers_of_the_caller_are_back_when_a_command_ends() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with signals.ending_signals(lambda number: None):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_signals_that_nothing_takes_end_the_command_behind_the_block() -> None:
    before, steps = signal.getsignal(signal.SIGTERM), []

    def keep_one() -> None:
        with signals.kept_signals(), signals.kept_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("behind the signal")

    with pytest.raises(KeyboardInterrupt):
        keep_one()
    assert steps
    with signals.kept_signals() as kept:
        os.kill(os.getpid(), signal.SIGTERM)
        assert kept.pop() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_takes_the_signals_that_were_kept_with_it() -> None:
    def fail() -> None:
        with signals.kept_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    with signals.kept_signals() as kept:
        assert not kept


def test_ignored_signals_stay_ignored() -> None:
    """As a shell leaves SIGINT to what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.kept_signals() as kept:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert not kept
    finally:
        signal.signal(signal.SIGINT, before)


async def test_kept_signals_reach_the_loop_which_leaves_the_handlers_of_before() -> None:
    before, taken = signal.getsignal(signal.SIGTERM), asyncio.Event()
    with signals.kept_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        with signals.ending_signals(lambda number: taken.set()):
            await taken.wait()
        assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGTERM) == before
