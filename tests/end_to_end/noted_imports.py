"""A worker that notes in the folder of its graph which modules of flowrt it imports itself."""

from __future__ import annotations

import sys
from pathlib import Path

from flowrt.seams import Seams
from flowrt.transports.contract import Channel
from flowrt.workers.process import Worker, WorkerObserver, serve


async def run_worker(control: Channel, seams: Seams) -> None:
    noter = Noter()
    try:
        await serve(control, seams, noter)
    finally:
        noter.file.write_text("\n".join(sorted(each for each in sys.modules.keys() - noter.before if each.startswith("flowrt."))))


class Noter(WorkerObserver):
    def __init__(self) -> None:
        self.before = frozenset(sys.modules)

    def begin(self, worker: Worker) -> None:
        self.file = Path(worker.graph.folder, f"imports of {worker.start.name}")
