"""The short process that checks devices, cores and modules of operators before a start: it imports torch, which this process never does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flowrt.errors import GraphError, UserError
from flowrt.graph.model import FIRST_HOST, Graph, to_json
from flowrt.launcher.start_checks import check_engine
from flowrt.processes.import_path import import_path

CHECK_SECONDS = 120.0
MACHINE = "machine"  # its argument: check devices and cores, and import no module of the user


def check_start(graph: Graph) -> None:
    """What is checked before any process of a run starts: the host engine, and the devices and cores of processes on this machine. Takes
    the time of an import of torch where the graph names some. Raises GraphError, or UserError when the check cannot run."""
    check_engine(graph)
    here = {process for process in graph.process_names() if graph.host_of(process) == FIRST_HOST}
    devices = {process: device for process, device in graph.devices.items() if process in here and device != "cpu"}
    cores = {process: each for process, each in graph.cores.items() if process in here}
    if devices or cores:
        with start_check_process(MACHINE) as process:
            check_processes(graph.replace(devices=devices, cores=cores), process)


@contextmanager
def start_check_process(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that imports torch and then waits for a graph to check, with the import path of this one."""
    command = [sys.executable, "-P", "-m", "flowrt.workers.start_check", *words]
    environment = {**os.environ, "PYTHONPATH": import_path()}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def check_processes(graph: Graph, process: subprocess.Popen[bytes]) -> None:
    """Check the processes of the graph in `process`. Raises UserError."""
    try:
        output, errors = process.communicate(to_json(graph), timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"the imports of the operators took more than {CHECK_SECONDS:g} s; a module must not wait or compute") from None
    found = output.decode(errors="replace").strip()
    if not found:
        lines = errors.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no output"
        raise UserError(f"the process that imports the operators ended with status {process.returncode}: {last}")
    if found != "valid":
        raise GraphError("", "", found)
