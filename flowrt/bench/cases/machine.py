"""This machine against its own device card: decode and prefill of real runs beside what level L2 predicts, and the plan that it picks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowrt.api import open_graph
from flowrt.bench.cases.small_model import write_small_model
from flowrt.bench.machine.constants import RUN_CONSTANTS
from flowrt.bench.machine.shapes import COMPARED_MODEL, TINY_MODEL, RunLoad, RunSpeeds, predicted_run, read_shape, run_tries, speeds_of
from flowrt.bench.measure.benchmark import Results
from flowrt.bench.measure.decoding import DecodeRun
from flowrt.bench.report.figures import Figure, Spread, Target
from flowrt.bench.report.report import ReportSection, new_table, print_progress
from flowrt.costs.devices import FIELDS, Device
from flowrt.errors import UserError

GROUPS_AND_SERVERS = ((1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3))
BATCHES = (3, 8, 16)
ROUNDS, TRIES = 3, 2  # the machine is slower for seconds at times: so all shapes are measured several times, one after the other
MAX_MEDIAN, MAX_LOSS = 10.0, 5.0  # per cent: of the errors; of the best speed, what the plan that is picked may lose


@dataclass(frozen=True)
class ComparedRun:
    """One shape, as predicted and as measured."""

    groups: int
    servers: int
    batch: int
    predicted: RunSpeeds
    measured: RunSpeeds

    @property
    def name(self) -> str:
        return f"{self.groups} x {self.servers}, batch {self.batch}"

    @property
    def errors(self) -> tuple[float, float]:
        """Of the time of a decode step and of the prefill, in per cent."""
        measured, predicted = self.measured, self.predicted
        return 100 * (measured.decode / predicted.decode - 1), 100 * (predicted.prefill_seconds / measured.prefill_seconds - 1)


async def measure(device: Device, threads: int, dtype: str, num_shapes: int, is_tiny: bool = False) -> Results:
    """Figures in per cent, which have targets, and a table of all shapes."""
    chosen = [*shapes()][:num_shapes]
    rounds = 1 if is_tiny else ROUNDS
    with TemporaryDirectory(prefix="flowrt-bench-") as folder:
        model = write_small_model(Path(folder), **(TINY_MODEL if is_tiny else COMPARED_MODEL))
        graphs = {(groups, servers): read_shape(model, groups, servers, threads, dtype) for groups, servers, _ in chosen}
        runs: dict[tuple[int, int, int], list[DecodeRun]] = {shape: [] for shape in chosen}
        for number in range(rounds):
            for (groups, servers), graph in graphs.items():
                print_progress(f"{groups} groups, {servers} servers, {number + 1} of {rounds}")
                async with open_graph(graph) as running:
                    for shape in (each for each in chosen if each[:2] == (groups, servers)):
                        runs[shape] += await run_tries(running, RunLoad(shape[2]), 1 if is_tiny else TRIES)
        found = [
            ComparedRun(*shape, predicted_run(graphs[shape[:2]], device, RunLoad(shape[2])), speeds_of(own)) for shape, own in runs.items()
        ]
    yield ReportSection("shapes", [asdict(each) for each in found], [_table(found)])
    for figure in figures(found):
        yield figure


def shapes() -> Iterator[tuple[int, int, int]]:
    """Groups, servers and sequences in all: first one batch of every deployment, so that fewer shapes still differ in kind."""
    for batch in BATCHES[1:] + BATCHES[:1]:
        for groups, servers in GROUPS_AND_SERVERS:
            yield groups, servers, batch


def figures(found: Sequence[ComparedRun]) -> list[Figure]:
    decode, prefill = ([abs(each.errors[number]) for each in found] for number in (0, 1))
    losses = []
    for batch in dict.fromkeys(each.batch for each in found):
        own = [each for each in found if each.batch == batch]
        picked = max(own, key=lambda each: each.predicted.decode)
        losses.append(100 * (1 - picked.measured.decode / max(each.measured.decode for each in own)))
    values = (
        ("decode, median error", statistics.median(decode), Target(MAX_MEDIAN)),
        ("decode, worst error", max(decode), None),
        ("prefill, median error", statistics.median(prefill), Target(MAX_MEDIAN)),
        ("prefill, worst error", max(prefill), None),
        ("tokens/s lost by the deployment that is picked, worst batch", max(losses), Target(MAX_LOSS)),
    )
    return [Figure(name, "%", Spread(value, value, value, 1), target=target) for name, value, target in values]


def _table(found: Sequence[ComparedRun]) -> Any:
    rows = [
        (
            each.name,
            *(f"{each.batch / speeds.decode * 1e3:.1f}" for speeds in (each.predicted, each.measured)),
            f"{each.errors[0]:+.0f} %",
            *(f"{1e3 * speeds.prefill_seconds:.0f}" for speeds in (each.predicted, each.measured)),
            f"{each.errors[1]:+.0f} %",
        )
        for each in found
    ]
    title = "groups x servers (0: each group computes its own experts); ms of a decode step, and of the prefill"
    return new_table(title, "shape", "decode predicted", "measured", "error", "prefill predicted", "measured", "error", rows=rows)


def check_card(device: Device) -> None:
    """Raises UserError for a card of another kind of device."""
    if not any(getattr(device, FIELDS[name]) for name in RUN_CONSTANTS):  # some may fit as 0
        raise UserError(f"device {device.name} says nothing of processes of this machine; give a card of flowrt profile")
