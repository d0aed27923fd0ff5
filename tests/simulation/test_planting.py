"""The planted bugs: each fits the current code, and the search works. `make plant` searches for all of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.planted import BUGS
from simulation.planting import Bug, Edit, PlantError, plant, rewritten

REPOSITORY = Path(__file__).resolve().parents[2]


def test_there_are_enough_and_each_has_a_name() -> None:
    assert len(BUGS) >= 130
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_fits_the_code(bug: Bug) -> None:
    for module in {edit.module for edit in bug.edits}:
        source = REPOSITORY.joinpath(*module.split(".")).with_suffix(".py").read_text()
        compile(rewritten(source, [edit for edit in bug.edits if edit.module == module]), module, "exec")


SOURCE = """
class Box:
    def put(self, item):
        # a comment that says x += 1
        if item:
            self.x += 1
        self.y += 1
"""


def test_an_edit_changes_its_function_and_nothing_else() -> None:
    namespace: dict[str, type] = {}
    exec(compile(rewritten(SOURCE, [Edit("box", "Box.put", "self.x += 1", "self.x += 2")]), "box", "exec"), namespace)
    box = namespace["Box"]()
    box.x = box.y = 0
    box.put(1)
    assert (box.x, box.y) == (2, 1)


@pytest.mark.parametrize(
    ("function", "old"), [("Box.take", "x"), ("Bag.put", "x"), ("Box.put", "self.z += 1"), ("Box.put", "+= 1"), ("Box.put", "a comment")]
)
def test_an_edit_that_does_not_fit_is_an_error(function: str, old: str) -> None:
    with pytest.raises(PlantError, match="mend the planted bug"):
        rewritten(SOURCE, [Edit("box", function, old, "")])


def test_a_module_that_is_loaded_already_cannot_be_planted() -> None:
    with pytest.raises(PlantError, match="imported already"):
        plant(Bug("late", "", (Edit("pathlib", "Path.exists", "", ""),)))


def run_search(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tests/simulation/plant.py", "--control-seeds", "0", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_search_finds_bugs_by_different_invariants() -> None:
    """The last six are of modelled time, in graphs of their own."""
    names = ["epoch-unchecked", "parts-overwrite", "credit-lost", "modelled-wait-short", "last-request-charged", "bandwidth-unshared"]
    names += ["early-output-at-once", "bytes-of-checkpoint", "first-layer-charged"]
    found = run_search("--control-seeds", "3", "--seeds", "40", "--only", ",".join(names))
    assert found.returncode == 0, found.stdout + found.stderr
    assert "9 of 9 planted bugs found" in found.stdout
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ")[3] for row in found.stdout.splitlines() if row.startswith("| ")}
    assert [rows[name] for name in names[:3]] in (["I2", "I1", "deadlock"], ["I8", "I1", "deadlock"])
    assert [rows[name] for name in names[3:]] == ["I10"] * 6


def test_search_finds_a_kept_claim_where_pages_are_few() -> None:
    found = run_search("--graphs", "tests/simulation/graphs/tight.yaml", "--seeds", "40", "--only", "claim-kept")
    assert found.returncode == 0, found.stdout + found.stderr
    (row,) = [row for row in found.stdout.splitlines() if row.startswith("| claim-kept |")]
    assert row.split(" | ")[3] == "I3", row


def test_search_reports_bugs_that_it_does_not_find_and_those_on_record(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text('{"bug": "never-full", "seed": 41, "invariant": "I6", "text": "I6: as recorded"}\n')
    missed = run_search("--seeds", "1", "--only", "epoch-unchecked,never-full", "--record", str(record))
    assert missed.returncode == 1
    assert "1 of 2 planted bugs found" in missed.stdout
    assert re.search(r"\| never-full \| .* \| 41 \| I6 \| as recorded \|", missed.stdout)
    assert [json.loads(line)["bug"] for line in record.read_text().splitlines()] == ["never-full", "epoch-unchecked"]
