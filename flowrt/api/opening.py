"""Reads a graph and opens it: checks the arguments of `flowrt.open` before anything starts."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from flowrt.api.running_graph import RunningGraph
from flowrt.api.sampling_defaults import AUTO, NONE
from flowrt.errors import ArgumentError, error_text, shortened, shown
from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.launcher.model_facts import facts_of
from flowrt.launcher.start_check_process import check_start
from flowrt.launcher.trace_collector import TraceCollector
from flowrt.observe import LEVELS, print_line
from flowrt.seams import Seams
from flowrt.trace.perfetto_file import check_trace_file


def read_graph(source: Path | str | Mapping[str, Any], overrides: Sequence[str] = (), model: Path | str | None = None) -> Graph:
    """Read, check and expand a graph: a graph file, a model directory, or a mapping as in a file. Raises GraphError of one line."""
    return load_graph(source, overrides, model, facts_of)


def open_graph(
    graph: Path | str | Mapping[str, Any] | Graph,
    *,
    overrides: Sequence[str] = (),
    model: Path | str | None = None,
    seams: Seams | None = None,
    log_level: str = "warning",
    on_event: Callable[[events.Event], None] | None = None,
    on_line: Callable[[str, str], None] | None = None,
    trace: Path | str | None = None,
    resume: bool = False,
    generation_config: Path | str = AUTO,
) -> RunningGraph:
    """Open a graph: `async with` starts its processes on entry and ends them on exit.

    graph: the path of a graph file, the path of a model directory (a folder with config.json), or a dict with the keys of a graph file,
    whose paths are relative to the working directory.
    overrides: "path=value" texts, as for --set on the command line.
    model: a model directory that replaces the file's.
    log_level: of the processes on stderr: debug, info, warning, error.
    on_event: called with events of the start and of deaths (flowrt.launcher.events); by default deaths go to stderr.
    on_line: called with (process, line) for each line that a process writes; by default it goes to stderr.
    An exception of a callback is printed once, and the run goes on.
    trace: a file for a Perfetto trace of the run, written on exit (docs/slow.md); LostOutputError when that fails.
    resume: continue the open requests in the request log of the graph, whose launcher has died; `graph.resumed` has their numbers, for
    `follow`.
    generation_config: where calls take the sampling parameters from that they do not give: "auto", generation_config.json of the model;
    "none", nowhere; or another folder with that file.

    Raises GraphError, ArgumentError or TokenizerError; entering raises UserError, or WorkerDiedError when a process cannot start.

        async with flowrt.open("graph.yaml", overrides=["deploy.experts.servers=2"]) as graph:
            print((await graph.complete("What is 1 + 2?", max_tokens=8)).text)
    """
    if not isinstance(graph, str | PathLike | Mapping | Graph):
        raise ArgumentError(
            f"graph is {shown(graph)}, it must be the path of a graph file or model directory, or a dict as in a graph file"
        )
    if not isinstance(model, str | PathLike | None):
        raise ArgumentError(f"model is {shown(model)}, it must be the path of a model directory")
    overrides = overrides if isinstance(overrides, str) or not isinstance(overrides, Iterable) else tuple(overrides)
    if not isinstance(overrides, tuple) or not all(isinstance(override, str) for override in overrides):
        raise ArgumentError(f"overrides is {shown(overrides)}, it must be a list of texts such as 'deploy.experts.servers=2'")
    if not isinstance(generation_config, str | PathLike):
        raise ArgumentError(f"generation_config is {shown(generation_config)}, it must be {AUTO!r}, {NONE!r} or the path of a folder")
    if log_level not in LEVELS:
        raise ArgumentError(f"log_level is {shown(log_level)}, it must be one of {', '.join(LEVELS)}")
    if isinstance(graph, Graph) and (overrides or model is not None):
        raise ArgumentError("overrides and model cannot change a loaded graph; pass them with its file")
    seams, collector = seams or Seams(), None
    if trace is not None:
        check_trace_file(str(trace), "trace")
        collector = TraceCollector(seams.machine_now, str(trace))
    loaded = graph if isinstance(graph, Graph) else read_graph(graph, overrides, model)
    if seams.open_engine is None:
        check_start(loaded)
    callbacks = guarded("on_event", on_event), guarded("on_line", on_line)
    return RunningGraph(loaded, seams, log_level, *callbacks, collector, resumes=resume, generation_config=str(generation_config))


def guarded(name: str, function: Callable[..., None] | None) -> Callable[..., None] | None:
    return None if function is None else Callback(name, function)


class Callback:
    """A user's function. Its first exception is printed in one line; later ones are ignored, and the run goes on."""

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ArgumentError(f"{name} is {shown(function)}, it must be a function, and not a coroutine function")
        self._name, self._function, self._has_failed = name, function, False

    def __call__(self, *arguments: Any) -> None:
        try:
            self._function(*arguments)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{shortened(error_text(error), 400)} ({frame.filename}:{frame.lineno})"
                text = f"{self._name} raised {where}; the run goes on, and its later errors are not printed"
                print_line(f"flowrt: error: {text}")
