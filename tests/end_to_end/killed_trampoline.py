"""Workers of a graph whose trampoline experts.0 is killed once, when a message of a stage of the exchange has arrived.

The test names the stage in the file `stage` in the folder of the graph file; there the trampoline writes its `pid`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrt.dataflow.subgraph import NodeFunction
from flowrt.seams import Seams
from flowrt.transports.contract import Channel
from flowrt.workers.data_path import LoadedOperators
from flowrt.workers.process import Worker, WorkerObserver, serve

WORKER = "end_to_end.killed_trampoline:run_worker"
TRAMPOLINE = "experts.0"
OPERATORS = {"A2E": "forward", "A2E'": "experts", "E2A'": "merge", "E2A": "combine"}  # stage -> the receiver of its messages
FIRINGS_BEFORE = 20  # of the receiver, so that sequences are running


async def run_worker(control: Channel, seams: Seams) -> None:
    await serve(control, seams, Killers())


class Killers(WorkerObserver):
    def begin(self, worker: Worker) -> None:
        if worker.start.name == TRAMPOLINE:
            folder = Path(worker.graph.folder)
            (folder / "pid.new").write_text(str(os.getpid()))
            (folder / "pid.new").rename(folder / "pid")

    def load(self, worker: Worker, name: str) -> LoadedOperators:
        operators, nodes, folder = worker.load(name), worker.graph.nodes, Path(worker.graph.folder)
        functions = {node: _killing(each, nodes[node].operator, worker.start.name, folder) for node, each in operators.functions.items()}
        return replace(operators, functions=functions)


def _killing(function: NodeFunction, operator: str, name: str, folder: Path) -> NodeFunction:
    num_firings = 0

    def run(firings: Sequence[Any]) -> Any:
        nonlocal num_firings
        if (folder / "stage").exists():
            stage = (folder / "stage").read_text()
            if OPERATORS[stage] == operator and (stage != "A2E'" or name != TRAMPOLINE):
                num_firings += 1
                if num_firings > FIRINGS_BEFORE:
                    _kill_once(folder)
        return function(firings)

    return run


def _kill_once(folder: Path) -> None:
    with suppress(FileExistsError):
        (folder / "killed").touch(exist_ok=False)
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
