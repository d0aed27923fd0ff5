"""Runs every architecture in every shape: `make architectures`, which prints a line for each and writes docs/results/architectures.json.

A tiny random checkpoint that the library makes, in float32, by flowrt's own operators or by the library's module. Its greedy tokens must be
those of the library, which computes the whole context for each. They may differ where two tokens are equally likely up to rounding, as the
library's own decoding with a cache does: look into a line with fewer equal tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "docs")]

import render_results  # noqa: E402 (the paths come first)
from end_to_end.test_library_models import LIMITS, NEW_TOKENS, PROMPTS, SHAPES, Library  # noqa: E402
from served_models import answers  # noqa: E402

import flowrt  # noqa: E402
from flowrt.operators.families.architectures import that_run  # noqa: E402
from flowrt.operators.families.registry import known_families  # noqa: E402

FILE = render_results.RESULTS / "architectures.json"
OWN = ", flowrt's operators"  # ends the name of a row


def rows() -> list[str]:
    """Each architecture by the library's module; flowrt's own families by its operators, too."""
    works = that_run()
    return [*(name + OWN for name in works if name in known_families()), *works]


async def equal_tokens(model: Library, shape: str, is_own: bool) -> tuple[int, int]:
    """How many tokens of all prompts are those of the library, up to the first other one of each prompt; and how many there are."""
    with tempfile.TemporaryDirectory() as folder:
        implementation = "native" if is_own else "transformers"
        graph = model.graph(Path(folder), SHAPES[shape], implementation=implementation, limits=LIMITS)
        async with flowrt.open(graph) as running:
            found = await answers(running, PROMPTS, NEW_TOKENS)
    firsts = [
        next((place for place, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b), len(wanted))
        for tokens, wanted in zip(found, model.expected, strict=True)
    ]
    return sum(firsts), sum(map(len, model.expected))


async def cell(model: Library, name: str, shape: str) -> str:
    start = time.monotonic()
    try:
        equal, num = await equal_tokens(model, shape, name.endswith(OWN))
        text = f"{equal}/{num}"
    except Exception as error:  # the others go on
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    print(f"{name:<40} {shape:<20} {text}  {time.monotonic() - start:.0f} s", flush=True)
    return text


async def row(name: str, at_once: int) -> dict[str, Any]:
    places = asyncio.Semaphore(at_once)

    async def found(shape: str) -> dict[str, str]:
        async with places:
            return {"value": await cell(model, name, shape)}

    with tempfile.TemporaryDirectory() as folder:
        model = Library(Path(folder), name.removesuffix(OWN))
        return {"figure": name, "found": await asyncio.gather(*map(found, SHAPES))}


def with_rows(new: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The result that is published, with these rows in place of its own."""
    old = json.loads(FILE.read_text(encoding="utf-8"))["runs"][0]["figures"][1:] if FILE.exists() else []
    by_name = {each["figure"]: each for each in old} | new
    figures = [by_name[name] for name in rows() if name in by_name]
    counts = [sum(_is_whole(each["found"][place]["value"]) for each in figures) for place in range(len(SHAPES))]
    verdicts = [{"value": f"{count} of {len(rows())}", "verdict": "met" if count == len(rows()) else "not met"} for count in counts]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    run = {
        "title": "Greedy tokens equal to those of the library: tiny random checkpoints of all architectures, float32",
        "command": "make architectures",
        "commit": commit,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "note": "5 prompts of 3 to 80 tokens, 16 new ones each; at most 24 tokens and 4 sequences in a step. Of tokens behind one "
        "that differs none is counted. At the one that differs in nemotron_h the logits of two tokens are 0.00005 apart, and the "
        "library's own decoding with a cache gives that of flowrt.",
        "columns": list(SHAPES),
        "figures": [{"figure": "all tokens equal", "target": "all", "found": verdicts}, *figures],
    }
    return {"benchmark": "architectures", "runs": [run]}


def _is_whole(value: str) -> bool:
    equal, _, num = value.partition("/")
    return equal == num


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="an architecture; the other rows of the file stay")
    parser.add_argument("--at-once", type=int, default=1, help="so many shapes at the same time")
    options = parser.parse_args()
    chosen = [name for name in rows() if not options.only or name.removesuffix(OWN) in options.only]
    are_whole = True
    for name in chosen:
        result = with_rows({name: (figure := asyncio.run(row(name, options.at_once)))})
        FILE.write_text(render_results.file_text(result), encoding="utf-8")
        are_whole &= all(_is_whole(each["value"]) for each in figure["found"])
    render_results.main([])
    return 0 if are_whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
