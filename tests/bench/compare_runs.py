"""`make emulated`: compares virtual time with real processes on emulated devices: step times of drawn graphs.

Each graph decodes one batch in virtual time, which is exact, and in real processes at a dilation that this machine keeps: where a run is
void, it is repeated at twice the dilation. On a machine with other load, run it at real-time priority (`chrt -f 5`). The exit code is 1
when the errors exceed their bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from flowrt.actors.emulated_links import modelled_seconds
from flowrt.api import open_graph, read_graph
from flowrt.bench.cases.small_model import write_small_model
from flowrt.bench.measure.modelled import modelled_run, simulated_run
from flowrt.emulation import EmulationReport, emulation_report, smallest_dilation
from flowrt.errors import GraphError, UserError
from flowrt.graph.model import Graph
from flowrt.timer import measure_lateness, new_timer

MEDIAN_BOUND, WORST_BOUND = 0.05, 0.12
NUM_LAYERS, NUM_EXPERTS, NEW_TOKENS = 4, 8, 6
MAX_DOUBLINGS = 3
DEVICES = ("h20", "h800", "l20", "l40s", "910c")
LINKS = ("ub", "nvlink", "roce-200g", "roce-400g", "hccs")
SIZES = {"hidden_size": (2048, 4096, 6144), "intermediate_size": (768, 1536, 4096)}


def draw_keys(chance: random.Random, folder: Path, model: Path) -> tuple[dict[str, Any], int]:
    """The keys of a graph file, and the sequences of its batch."""
    config = json.loads((model / "config.json").read_text())
    card = folder / f"card-{chance.randrange(1 << 30)}.json"
    sizes = {name: chance.choice(of) for name, of in SIZES.items()} | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    card.write_text(json.dumps(config | sizes | {"dtype": "bfloat16", "num_hidden_layers": chance.choice((1, 2)) * NUM_LAYERS}))
    groups, servers, micro_batches = chance.randint(1, 3), chance.choice((1, 2, 2, 3, 4, "colocated")), chance.choice((1, 2, 2, 3))
    experts: dict[str, Any] = {"servers": servers}
    if servers != "colocated":
        experts |= {"replicas": chance.choice((1, 1, 2)), "trampoline": chance.choice(("never", "never", "always"))}
    deploy = {
        "attention": {"groups": groups, "micro_batches": micro_batches, "domains": chance.choice((1, 1, groups))},
        "experts": experts,
        "links": {"attention-experts": {"link": chance.choice(LINKS)}},
    }
    devices = {"attention": chance.choice((chance.choice(DEVICES), [chance.choice(DEVICES), chance.choice(DEVICES)]))}
    if servers != "colocated":
        devices["experts"] = chance.choice(DEVICES)
    keys = {"flowrt": 1, "model": {"path": str(model)}, "deploy": deploy, "reliability": {"hedge": False}}
    emulate = {"dilation": 1e6, "devices": devices, "model": str(card)}
    return {**keys, "emulate": emulate, "limits": {"max_num_seqs": 16}}, groups * micro_batches * chance.randint(1, 3)


async def measured(graph: Graph, dilation: float, batch: int, apart_seconds: float) -> tuple[float, EmulationReport]:
    """The mean step in real processes, in seconds of the modelled hardware."""
    assert graph.emulation is not None
    async with open_graph(graph.replace(emulation=graph.emulation.replace(dilation=dilation))) as running:
        found = await modelled_run(running, batch, NEW_TOKENS, apart_seconds=apart_seconds)
        counters = [each.emulation for each in (await running.statistics()).values() if each.emulation is not None]
    return found.mean_step_seconds, emulation_report(dilation, counters)


async def wait_error() -> float:
    with closing(new_timer()) as timer:
        return (await measure_lateness(timer))[0]


def compare(seed: int, folder: Path, model: Path, dilation: float) -> float | None:
    """The relative error of a drawn graph's step in virtual time; None: this machine was too slow."""
    chance = random.Random(f"emulated {seed}")
    while True:
        keys, batch = draw_keys(chance, folder, model)
        try:
            graph = read_graph(keys)
            break
        except GraphError:  # an impossible draw
            continue
    dilation = max(dilation, smallest_dilation(modelled_seconds(graph), asyncio.run(wait_error()))[0])
    deploy = keys["deploy"]
    # Groups that meet at a server stay together, and others alternate: the moments of their first requests must be the same in both.
    apart_seconds = simulated_run(graph, batch, NEW_TOKENS).mean_step_seconds / NUM_LAYERS / 2 / deploy["attention"]["groups"]
    virtual = simulated_run(graph, batch, NEW_TOKENS, apart_seconds=apart_seconds).mean_step_seconds
    name = f"{deploy['attention']['groups']} groups x {deploy['attention']['micro_batches']}, servers {deploy['experts']['servers']}"
    for _ in range(MAX_DOUBLINGS + 1):
        try:
            real, report = asyncio.run(measured(graph, dilation, batch, apart_seconds))
        except UserError as refused:  # waits are off by more than a moment ago
            print(f"graph {seed}: {refused}", file=sys.stderr)
            real, report = 0.0, None
        if report is not None and not report.void:
            error = virtual / real - 1
            text = f"{1e3 * real:.3f} ms in processes at dilation {dilation:g}, {1e3 * virtual:.3f} ms in virtual time, {error:+.1%}"
            print(f"graph {seed}: {name}, batch {batch}: {text}", flush=True)
            return error
        dilation *= 2
    print(f"graph {seed}: {name}, batch {batch}: void up to dilation {dilation / 2:g}", flush=True)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="compare_runs.py", description="Compare virtual time with real processes on emulated devices.")
    parser.add_argument("--graphs", type=int, default=30)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--dilation", type=float, default=1500.0, help="the least; a graph may need more (default: %(default)g)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flowrt-emulated-") as name:
        folder = Path(name)
        model = write_small_model(folder / "model", NUM_LAYERS, NUM_EXPERTS)
        seeds = range(options.first, options.first + options.graphs)
        found = [compare(seed, folder, model, options.dilation) for seed in seeds]
    errors = [abs(error) for error in found if error is not None]
    if not errors:
        print("every run was void: close other programs", file=sys.stderr)
        return 1
    middle, worst = median(errors), max(errors)
    bounds = f"bounds {MEDIAN_BOUND:.0%} and {WORST_BOUND:.0%}"
    print(f"{len(errors)} of {len(found)} graphs: step time off by {middle:.1%} in the median, {worst:.1%} at worst; {bounds}")
    return int(middle > MEDIAN_BOUND or worst > WORST_BOUND)


if __name__ == "__main__":
    sys.exit(main())
