"""`flowrt up`: serves a graph in the background, and returns when it is ready or with the reason why it is not."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from flowrt.cli.loading_line import LoadingLine
from flowrt.cli.options import ServeCommandOptions
from flowrt.cli.resume import find_options
from flowrt.cli.serve import ServeSession, open_session
from flowrt.cli.text import OutputStream
from flowrt.errors import INTERRUPTED, SUCCESS, WorkerDiedError
from flowrt.launcher.events import WeightsLoading
from flowrt.observe import print_line
from flowrt.system.signals import ENDING, end_with_parent, kept_signals

_ERROR = "flowrt: error: "
_READY = b"\n"  # the last line of a process that serves to the one that waits for it


def up(path: Path, options: ServeCommandOptions) -> int:
    """Returns the exit code, in the process that was called and in the one that serves. Raises UserError before anything starts. With
    `--resume` the path may be the name of a dead graph."""
    if options.resume:
        path, options = find_options(str(path), options)
    started = start(path, options, options.name or name_of(path))
    if started.url:
        name = started.name
        print(f"flowrt: {name} is up, {started.sentence} (pid {started.pid}); flowrt down {name} stops it", file=sys.stderr)
    return started.code


def name_of(path: Path) -> str:
    """The name of a graph that is given none: that of its file or model directory, for a graph.yaml that of its folder."""
    whole = path.absolute()
    return whole.parent.name if whole.stem == "graph" and whole.suffix and whole.parent.name else whole.stem


@dataclass(frozen=True)
class Started:
    """A graph that was started in the background. `url` "": it is not up, or this is the process that has served it; `code` is the exit
    code then."""

    name: str
    code: int = SUCCESS
    pid: int = 0
    url: str = ""
    sentence: str = ""


def start(path: Path, options: ServeCommandOptions, name: str, ends_with_parent: bool = False) -> Started:
    """Fork a process that serves; returns in both: here once the graph is ready or has failed, there once it has ended. Raises UserError
    before anything starts."""
    with ExitStack() as stack:
        session = open_session(path, options, name, stack)
        assert session.folder is not None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        reading, writing = os.pipe()
        log = session.folder.open_log()
        parent = os.getpid()
        with kept_signals() as kept:
            child = os.fork()
            if child:
                stack.pop_all()  # the child closes what was opened
                os.close(writing)
                code = _await_ready(session, child, reading, log, kept)
                session.leave()
                return Started(name, code) if code != SUCCESS else Started(name, code, child, session.url, session.sentence)
            os.close(reading)
            if ends_with_parent:
                end_with_parent(signal.SIGTERM)
                if os.getppid() != parent:
                    return Started(name, INTERRUPTED)
            return Started(name, _serve(session, writing, log))


def _serve(session: ServeSession, writing: int, log: int) -> int:
    """Serves in the child, without a terminal."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)

    def on_loading(loading: WeightsLoading) -> None:
        with suppress(BrokenPipeError):
            os.write(writing, msgspec.json.encode(loading) + b"\n")

    def on_ready() -> None:
        with suppress(BrokenPipeError):  # the one that waits was killed: the graph is up all the same
            os.write(writing, _READY)
        os.close(writing)

    session.on_loading, session.on_ready, session.has_log = on_loading, on_ready, True
    return session.run()


def _await_ready(session: ServeSession, child: int, reading: int, log: int, kept: list[int]) -> int:
    """A signal meanwhile ends the child, too. `kept`: those since before the fork."""
    assert session.folder is not None
    name = session.folder.name
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    former = {number: signal.signal(number, on_signal) for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        while kept:
            on_signal(kept.pop(), None)
        print(f"flowrt: starting {name}; flowrt logs {name} shows its progress", file=sys.stderr, flush=True)
        if show_loading(reading) and not signals:
            return SUCCESS
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    session.folder.remove()  # it is still there when the child was killed
    if signals:
        sys.stderr.write("flowrt: interrupted\n")
        return INTERRUPTED
    reason = _reason(log)
    sys.stderr.write(reason)
    if (code := os.waitstatus_to_exitcode(status)) >= 0:
        if not reason:
            print(
                f"{_ERROR}{name} ended with code {code} and could not write its log; is {session.folder.path.parent} full?", file=sys.stderr
            )
        return code
    print(f"{_ERROR}{name} was killed by {signal.Signals(-code).name} while it started; flowrt up starts it again", file=sys.stderr)
    return WorkerDiedError.exit_code


def show_loading(reading: int) -> bool:
    """Show what the child loads until it is ready. False: it has ended before."""
    loading_line = LoadingLine(lambda text: print_line(f"flowrt: {text}"), OutputStream(sys.stderr))
    is_ready = False
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if is_ready := line == _READY:
                break
            loading_line.show(msgspec.json.decode(line, type=WeightsLoading))
    loading_line.clear()
    return is_ready


def _reason(log: int) -> str:
    """The error in the log, and what follows it; all of the log when there is none."""
    with os.fdopen(log, "rb") as file:
        file.seek(0)
        text = file.read().decode(errors="replace")
    return text[max(0, text.rfind(_ERROR)) :]
