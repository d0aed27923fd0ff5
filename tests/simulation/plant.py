"""`make plant`: each planted bug switched on in turn, and how many seeds of the simulation it takes until one fails.

Prints a table (Markdown) of bug, seed, invariant; exits with 1 when fewer than GOAL of the bugs were found within the seeds. Every
bug has a process of its own, forked from one that has loaded torch and nothing of ours. `--only NAME` for one bug, with its failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from simulation.planted import BUGS  # noqa: E402
from simulation.planting import Bug, plant  # noqa: E402

GOAL = 0.95
CONTROL_SEEDS = 100  # must all pass without a bug
SHOWN_CHARACTERS = 110
SECONDS_PER_BUG = 600  # of processor time: a bug may be an endless loop


def look_for(bug: Bug | None, graphs: Path, seeds: int) -> dict[str, Any]:
    """In this process: plant, run seeds until one fails. What is found: seed, invariant, text; seed None when none fails."""
    if bug is not None:
        plant(bug)
    from flowrt.graph.facts import ModelFacts
    from flowrt.graph.file import load_graph
    from flowrt.operators.families.registry import read_model_config
    from flowrt.simulation.campaign import campaign

    loaded = [
        load_graph(path, facts_of=lambda directory: ModelFacts.of(read_model_config(directory))) for path in sorted(graphs.glob("*.yaml"))
    ]
    tally = campaign(range(seeds), loaded, on_run=lambda case, came, tally: not tally.failures)
    found = tally.failures[0] if tally.failures else None
    if found is None:
        return {"seed": None, "invariant": "", "text": ""}
    return {"seed": found.seed, "invariant": found.invariant, "text": found.text}


def look_apart(bug: Bug | None, graphs: Path, seeds: int) -> dict[str, Any]:
    """As `look_for`, in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_BUG)
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # workers log what fails; here that is the point
            answer = look_for(bug, graphs, seeds)
        except BaseException as error:
            answer = {"seed": None, "invariant": "broken", "text": f"{type(error).__name__}: {error}"}
        with os.fdopen(writer, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"seed": None, "invariant": "broken", "text": f"no answer in {SECONDS_PER_BUG} s"}


def shown(text: str, invariant: str) -> str:
    """The failure's first line, short enough for a table."""
    line = text.split("\n")[0].removeprefix(f"{invariant}: ").replace("|", "/")
    line = re.sub(r"the run failed for .*?, which nothing befell that would allow it: ", "", line)
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[: SHOWN_CHARACTERS - 3]}..."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="plant.py", description="Plant each bug and look for it with the simulation.")
    parser.add_argument("--graphs", type=Path, default=HERE / "graphs")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--control-seeds", type=int, default=CONTROL_SEEDS, help="that must pass without a bug (default: %(default)s)")
    parser.add_argument("--only", help="names of bugs, separated by commas: these, with their failures' texts")
    given = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch  # noqa: F401  (loaded once for all)

    names = None if given.only is None else given.only.split(",")
    if unknown := sorted(set(names or ()) - {bug.name for bug in BUGS}):
        print(f"no bug is called {', '.join(unknown)}; there are {', '.join(bug.name for bug in BUGS)}", file=sys.stderr)
        return 2
    bugs = [bug for bug in BUGS if names is None or bug.name in names]
    began, found, broken = time.monotonic(), 0, []
    if (control := look_apart(None, given.graphs, given.control_seeds))["seed"] is not None or control["invariant"]:
        print(f"without any planted bug: {control['text']}; mend this first", file=sys.stderr)
        return 1
    print("| bug | what is wrong | seed | found by | seen as |")
    print("|---|---|---|---|---|", flush=True)
    for bug in bugs:
        answer = look_apart(bug, given.graphs, given.seeds)
        if answer["invariant"] == "broken":
            broken.append(f"{bug.name}: {answer['text']}")
        found += answer["seed"] is not None
        seed, seen = answer["seed"], shown(answer["text"], answer["invariant"])
        print(f"| {bug.name} | {bug.what} | {'none' if seed is None else seed} | {answer['invariant']} | {seen} |", flush=True)
        if given.only is not None:
            print(answer["text"])
    minutes = (time.monotonic() - began) / 60
    print(f"\n{found} of {len(bugs)} planted bugs found within {given.seeds} seeds, in {minutes:.0f} minutes")
    for line in broken:
        print(line, file=sys.stderr)
    return 0 if found >= GOAL * len(bugs) and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
