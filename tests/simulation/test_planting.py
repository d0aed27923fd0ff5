"""The planted bugs: each fits the current code, and the search works. `make plant` searches for all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from simulation.planted import BUGS
from simulation.planting import Bug, Edit, PlantError, plant, rewritten

REPOSITORY = Path(__file__).resolve().parents[2]


def test_there_are_enough_and_each_has_a_name() -> None:
    assert len(BUGS) >= 90
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


def test_the_search_finds_bugs_and_says_when_it_does_not() -> None:
    names = ["epoch-unchecked", "parts-overwrite", "credit-lost"]
    command = [sys.executable, "tests/simulation/plant.py", "--control-seeds", "3", "--seeds"]
    found = subprocess.run([*command, "40", "--only", ",".join(names)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "3 of 3 planted bugs found" in found.stdout
    rows = {row.split(" | ")[0].strip("| "): row.split(" | ")[3] for row in found.stdout.splitlines() if row.startswith("| ")}
    assert [rows[name] for name in names] == ["I2", "I1", "deadlock"]
    missed = subprocess.run([*command, "1", "--only", "epoch-unchecked"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert missed.returncode == 1
    assert "0 of 1 planted bugs found" in missed.stdout
