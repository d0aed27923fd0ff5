"""pyproject.toml, constraints.txt and the package agree with each other."""

from __future__ import annotations

import tomllib
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from repository.source_tree import PACKAGES, ROOT
from setuptools import find_packages

import flowrt


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 and "@" not in line for line in lines)
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


def test_one_version() -> None:
    assert project()["project"]["version"] == flowrt.__version__
    assert f"## [{flowrt.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_everything_the_tests_need_is_pinned_within_its_bounds() -> None:
    found, described = pins(), project()["project"]
    for text in [*described["dependencies"], *described["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        pin = found.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(pin), f"{requirement.name} is pinned to {pin}, which {requirement.specifier} excludes"
        assert not any(part.operator in ("==", "<", "<=") for part in requirement.specifier), f"{text}: lower bounds only"


def test_pins_are_public_versions() -> None:
    assert all(version.local is None for version in pins().values())
    assert pins()["torch"] == Version("2.13.0")


def test_the_wheel_holds_the_three_packages_only() -> None:
    include = project()["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = find_packages(str(ROOT), include=include)
    assert {package.split(".")[0] for package in packages} == set(PACKAGES)
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").exists()
        folders = {file.parent for file in (ROOT / package).rglob("*.py")}
        missing = [folder for folder in folders if not (folder / "__init__.py").exists()]
        assert not missing, f"without __init__.py these would be left out of the wheel: {missing}"
