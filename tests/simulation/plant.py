"""`make plant`: enables each planted bug in turn and reports the first seed of the simulation that fails.

Prints a Markdown table of bugs, seeds and invariants. The exit code is 1 when fewer than GOAL of the bugs are found within the seeds.
Every bug has a process of its own, forked from one that has imported torch and no module of flowrt. `--only NAME` prints the whole failure.
`--record FILE` keeps each result, so that a repeated call goes on where an interrupted one has ended. `--earlier FILE`, the record of
another commit, says which seed to try first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from flowrt.launcher.model_facts import facts_of

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from simulation.planted import BUGS  # noqa: E402
from simulation.planting import Bug, plant  # noqa: E402

GOAL = 0.95
CONTROL_SEEDS = 100  # must all pass without a bug
SHOWN_CHARACTERS = 110
SECONDS_PER_BUG = 600  # of processor time: a bug may be an endless loop


def search(bug: Bug | None, graphs: Sequence[Path], seeds: int, first: Sequence[int] = ()) -> dict[str, Any]:
    """Plant the bug in this process and run the seeds `first`, then all in their order, until one fails. Returns its `seed` (None: no seed
    fails), the `invariant` and the `text`."""
    if bug is not None:
        plant(bug)
    from flowrt.graph.file import load_graph
    from flowrt.simulation.campaign import campaign
    from flowrt.simulation.cases import draw

    graphs = graphs or [HERE / "graphs" / bug.graphs if bug is not None else HERE / "graphs"]
    files = [file for path in graphs for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    loaded = [load_graph(file, facts_of=facts_of) for file in files]
    counts = campaign(
        (draw(seed, loaded) for seed in dict.fromkeys([*first, *range(seeds)])), lambda case, outcome, counts: not counts.failures
    )
    if not counts.failures:
        return {"seed": None, "invariant": "", "text": ""}
    failure = counts.failures[0]
    return {"seed": failure.seed, "invariant": failure.invariant, "text": failure.text}


def search_in_child(bug: Bug | None, graphs: Sequence[Path], seeds: int, earlier: Mapping[str, int]) -> dict[str, Any]:
    """`search` in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_BUG)
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # workers log failures, which are expected here
            found = search(bug, graphs, seeds, [earlier[bug.name]] if bug is not None and bug.name in earlier else [])
        except BaseException as error:
            found = {"seed": None, "invariant": "broken", "text": f"{type(error).__name__}: {error}"}
        with os.fdopen(writer, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"seed": None, "invariant": "broken", "text": f"no result in {SECONDS_PER_BUG} s"}


def read_record(record: Path | None) -> list[dict[str, Any]]:
    lines = record.read_text().splitlines() if record is not None and record.exists() else []
    return [dict(json.loads(line)) for line in lines]


def search_unless_known(bug: Bug, record: Path | None, search_for: Callable[[Bug], dict[str, Any]]) -> dict[str, Any]:
    """The result in `record`, a file of one line per bug; else that of `search_for`, which is added. Results are of one commit."""
    for known in read_record(record):
        if known["bug"] == bug.name:
            return known
    found = search_for(bug)
    if record is not None:
        with record.open("a") as file:
            file.write(json.dumps({"bug": bug.name, **found}) + "\n")
    return found


def shorten(text: str, invariant: str) -> str:
    """The failure's first line, short enough for a table."""
    line = text.split("\n")[0].removeprefix(f"{invariant}: ").replace("|", "/")
    line = re.sub(r"the run failed for .*?, and no fault that permits it hit that process: ", "", line)
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 3]}..."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="plant.py", description="Plant each bug and search for it with the simulation.")
    parser.add_argument(
        "--graphs", type=Path, nargs="+", default=[], help="graph files, or folders of them (default: those that each bug names)"
    )
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--control-seeds", type=int, default=CONTROL_SEEDS, help="that must pass without a bug (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="bugs searched for at once (default: %(default)s)")
    parser.add_argument("--only", help="names of bugs, separated by commas: these, with their failures' texts")
    parser.add_argument("--record", type=Path, help="append results to this file, and search for no bug that is in it")
    parser.add_argument("--earlier", type=Path, help="a record of another commit: try its seed of each bug first")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch  # noqa: F401  (imported once for all)

    names = None if options.only is None else options.only.split(",")
    if unknown := sorted(set(names or ()) - {bug.name for bug in BUGS}):
        print(f"no bug is called {', '.join(unknown)}; there are {', '.join(bug.name for bug in BUGS)}", file=sys.stderr)
        return 2
    bugs = [bug for bug in BUGS if names is None or bug.name in names]
    began, num_found, broken = time.monotonic(), 0, []
    earlier = {known["bug"]: known["seed"] for known in read_record(options.earlier) if known["seed"] is not None}
    control = search_in_child(None, options.graphs, options.control_seeds, earlier)
    if control["seed"] is not None or control["invariant"]:
        print(f"without any planted bug: {control['text']}; mend this first", file=sys.stderr)
        return 1
    print("| bug | what is wrong | seed | found by | seen as |")
    print("|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(options.processes) as threads:
        search_for = partial(search_in_child, graphs=options.graphs, seeds=options.seeds, earlier=earlier)
        results = threads.map(partial(search_unless_known, record=options.record, search_for=search_for), bugs)
        for bug, result in zip(bugs, results, strict=True):
            seed, invariant, text = result["seed"], result["invariant"], result["text"]
            if invariant == "broken":
                broken.append(f"{bug.name}: {text}")
            num_found += seed is not None
            shown = "none" if seed is None else seed
            print(f"| {bug.name} | {bug.what} | {shown} | {invariant} | {shorten(text, invariant)} |", flush=True)
            if options.only is not None:
                print(text)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{num_found} of {len(bugs)} planted bugs found within {options.seeds} seeds, in {minutes:.0f} minutes")
    for line in broken:
        print(line, file=sys.stderr)
    return 0 if num_found >= GOAL * len(bugs) and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
