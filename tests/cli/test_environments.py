"""Some of the hostile environments; `make hostile` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.environments import ENVIRONMENTS, Environment, run


@pytest.mark.parametrize("environment", [each for each in ENVIRONMENTS if each.is_cheap], ids=lambda each: each.name)
def test_a_hostile_environment_gives_one_line_and_the_right_code(environment: Environment, tmp_path: Path) -> None:
    assert run(environment, tmp_path).faults == []


def test_names_are_unique() -> None:
    names = [environment.name for environment in ENVIRONMENTS]
    assert sorted(set(names)) == sorted(names)
    assert len(names) >= 45
