"""Renders docs/results/*.json into docs/results.md: `python docs/render_results.py`.

`python docs/render_results.py --add REPORT` first appends a report of `flowrt bench ... --json REPORT` to the file of its benchmark, with
the commit of this tree and the date. A file has one benchmark and its runs; remove the run that a newer one replaces:

    {"benchmark": "hop", "runs": [{"title", "command", "commit", "date", "processor", "state", "note", "columns", "figures"}]}
    a figure: {"figure", "target", "found": [{"value", "interval", "target", "verdict"} for each column]}

`commit` is the one that published the figures. `state` says what else ran, and with which model.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"

_HEAD = """# Results

After reading this page you know what was measured, on which machine, and which targets were met. It is rendered from `docs/results/*.json`:

```sh
python docs/render_results.py
```

`python docs/render_results.py --add report.json` adds the report of a benchmark that was run with `--json report.json`.
[Performance](performance.md#how-to-read-a-figure) explains medians, intervals and verdicts, and lists the commands. Brackets hold the
95 % interval of a median. The commit is the one that published the figures. Figures of different runs do not compare: the machines differ.
"""


def rendered() -> str:
    """The whole page."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))]
    return "\n".join([_HEAD, _verdicts(results), *map(_benchmark, results)])


def _verdicts(results: Sequence[Mapping[str, Any]]) -> str:
    counts = {result["benchmark"]: Counter(_verdicts_of(result)) for result in results}
    lines = []
    for verdict in ("met", "not met", "undecided"):
        each = [f"[{name}](#{name}) {count[verdict]}" for name, count in counts.items() if count[verdict]]
        total = sum(count[verdict] for count in counts.values())
        lines.append(f"- {total} {verdict}" + (f": {', '.join(each)}" if verdict != "met" else ""))
    return "Verdicts on this page:\n\n" + "\n".join(lines) + "\n"


def _verdicts_of(result: Mapping[str, Any]) -> Iterator[str]:
    for run in result["runs"]:
        for figure in run["figures"]:
            for found in figure["found"]:
                yield from found["verdict"].split(", ") if "verdict" in found else ()


def _benchmark(result: Mapping[str, Any]) -> str:
    return "\n".join([f"## {result['benchmark']}\n", *map(_run, result["runs"])])


def _run(run: Mapping[str, Any]) -> str:
    processor = run.get("processor", "processor not recorded")
    where = [processor[0].upper() + processor[1:], run.get("state"), f"{run['commit']} {run['date']}"]
    lines = [f"**{run['title']}.** " + (f"`{run['command']}`. " if "command" in run else "") + "; ".join(filter(None, where)) + ".", ""]
    has_targets = any("target" in figure for figure in run["figures"])
    head = ["figure", *run["columns"], *(["target"] if has_targets else [])]
    lines += [_row(head), "|" + "---|" * len(head)]
    for figure in run["figures"]:
        lines.append(_row([figure["figure"], *map(_cell, figure["found"]), *([figure.get("target", "")] if has_targets else [])]))
    return "\n".join([*lines, "", *([run["note"], ""] if "note" in run else [])])


def _row(cells: list[str]) -> str:
    return "|" + "|".join(cell.replace("|", "\\|") for cell in cells) + "|"


def _cell(found: Mapping[str, str]) -> str:
    text = (
        found["value"]
        + (f" ({found['interval']})" if "interval" in found else "")
        + (f", target {found['target']}" if "target" in found else "")
    )
    if "verdict" in found:
        text += f": **{found['verdict']}**" if found["verdict"] == "met" else f": *{found['verdict']}*"
    return text.removeprefix(": ")


def add(report: Mapping[str, Any], commit: str, date: str, command: str | None = None) -> dict[str, Any]:
    """The report of `flowrt bench ... --json` as a run of its file."""
    machine, figures = report["machine"], []
    for figure in report["figures"]:
        if not figure["listed"]:
            continue
        found = [{"value": f"{_amount(figure[side])} {figure['unit']}"} if figure[side] else {"value": ""} for side in ("ours", "theirs")]
        found[1]["value"] += f", {figure['peer']}" if figure["peer"] else ""
        judged = {"value": _amount(figure["ratio"])} if figure["ratio"] else {"value": ""}
        spread = figure["ratio"] or figure["ours"]
        if spread["low"] is not None and spread["high"] is not None:
            (judged if figure["ratio"] else found[0])["interval"] = f"{_rounded(spread['low'])} to {_rounded(spread['high'])}"
        if figure["verdict"]:
            judged["verdict"] = figure["verdict"]
        target = figure["target"]
        aim = {"target": f"{'<=' if target['at_most'] else '>='} {target['bound']:g}"} if target else {}
        figures.append({"figure": figure["name"], **aim, "found": [*found, judged]})
    load = f"load {machine['load_before']:.1f} before, {machine['load_after']:.1f} after"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    about: dict[str, Any] = {"title": f"flowrt bench {report['benchmark']}", **({"command": command} if command else {})}
    about |= {"commit": commit, "date": date, "processor": f"{machine['cores']} cores of {machine['cpu']}", "state": f"{load}; {versions}"}
    notes = {"note": ". ".join(report["notes"])} if report["notes"] else {}
    return {**about, **notes, "columns": ["flowrt", "peer", "ratio"], "figures": figures}


def file_text(result: Mapping[str, Any]) -> str:
    """A file of docs/results, with a line per figure."""
    runs = []
    for run in result["runs"]:
        fields = [f"   {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in run.items() if key != "figures"]
        figures = ",\n".join(f"    {json.dumps(figure, ensure_ascii=False)}" for figure in run["figures"])
        runs.append("  {\n" + ",\n".join([*fields, f'   "figures": [\n{figures}\n   ]']) + "\n  }")
    return f'{{\n "benchmark": {json.dumps(result["benchmark"])},\n "runs": [\n' + ",\n".join(runs) + "\n ]\n}\n"


def _amount(spread: Mapping[str, Any]) -> str:
    return _rounded(spread["median"])


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", metavar="REPORT", type=Path, help="a file that `flowrt bench ... --json` has written")
    parser.add_argument("--command", help="the command that was run")
    options = parser.parse_args(arguments)
    if options.add:
        report = json.loads(options.add.read_text(encoding="utf-8"))
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        file = RESULTS / f"{report['benchmark']}.json"
        result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"benchmark": report["benchmark"], "runs": []}
        result["runs"].append(add(report, commit, datetime.datetime.now(tz=datetime.UTC).date().isoformat(), options.command))
        file.write_text(file_text(result), encoding="utf-8")
    PAGE.write_text(rendered(), encoding="utf-8")


if __name__ == "__main__":
    main()
