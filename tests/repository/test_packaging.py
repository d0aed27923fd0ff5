"""pyproject.toml, constraints.txt and the package agree with each other."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from repository.source_tree import FOLDERS, ROOT, sources
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


_MODULES = {"pyzmq": "zmq", "pyyaml": "yaml", "ucxx-cu13": "ucxx"}  # where it is not the distribution's name


def test_the_package_needs_what_it_imports() -> None:
    """Each dependency, also of an extra for users, is imported; each import is in one, except peers of benchmarks that have no extra."""
    described = project()["project"]
    groups = {"": described["dependencies"], **described["optional-dependencies"]}
    named = {Requirement(text).name for name, texts in groups.items() if name != "dev" for text in texts}
    needed = {_MODULES.get(canonicalize_name(name), canonicalize_name(name)) for name in named}
    imported = {each.target.split(".")[0] for source in sources() for each in source.imports} - sys.stdlib_module_names - {"flowrt"}
    assert needed <= imported
    indirect = {"libucxx"}  # by ucxx
    assert imported - needed == indirect | {"xoscar"}


def test_each_file_is_valid_in_the_oldest_python() -> None:
    oldest = (3, 11)
    described = project()
    assert described["project"]["requires-python"] == f">={oldest[0]}.{oldest[1]}"
    assert described["tool"]["ruff"]["target-version"] == "py{}{}".format(*oldest)
    assert described["tool"]["mypy"]["python_version"] == "{}.{}".format(*oldest)
    for source in sources():
        ast.parse(source.text, filename=source.path, feature_version=oldest)
    for folder in ("tests", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=oldest)


def test_one_set_of_pins_suits_torch_with_and_without_cuda() -> None:
    """torch of PyPI needs cuda-bindings 13; a pin of another kind makes every install without the index of CPU builds fail."""
    found = pins()
    assert found["cuda-bindings"].major == 13
    assert not [name for name in found if name.endswith("-cu12")]


def test_the_demo_is_in_the_wheel() -> None:
    described = project()["tool"]["setuptools"]["package-data"]["flowrt"]
    held = {path for pattern in described for path in (ROOT / "flowrt").glob(pattern) if path.is_file()}
    demo = ROOT / "flowrt" / "demo"
    assert {path for path in demo.glob("**/*") if path.is_file()} | set((demo / "tiny-moe").iterdir()) <= held
    assert all(path.resolve().is_relative_to(ROOT / "examples") for path in held if path.is_relative_to(demo))


def test_pins_are_public_versions() -> None:
    assert all(version.local is None for version in pins().values())
    assert pins()["torch"] == Version("2.13.0")


def test_the_wheel_holds_one_package_with_every_folder() -> None:
    include = project()["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = find_packages(str(ROOT), include=include)
    assert {package.split(".")[0] for package in packages} == {"flowrt"}
    assert {"flowrt.transports.wire", "flowrt.operators.families"} <= set(packages)
    for folder in FOLDERS:
        assert (ROOT / folder / "py.typed").exists()
        folders = {file.parent for file in (ROOT / folder).rglob("*.py")}
        missing = [folder for folder in folders if not (folder / "__init__.py").exists()]
        assert not missing, f"without __init__.py these would be left out of the wheel: {missing}"


@pytest.mark.parametrize("name", ["transports", "operators"])
def test_a_folder_linked_into_the_package_has_one_import_name(name: str) -> None:
    link = ROOT / "flowrt" / name
    assert os.readlink(link) == f"../{name}"
    outcome = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"ImportError: import flowrt.{name}, not {name}" in outcome.stderr


def test_a_users_module_of_the_same_name_is_not_in_the_way(tmp_path: Path) -> None:
    for name in ("operators", "transports"):
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    code = (
        "import operators, transports, flowrt.operators.model_config, flowrt.transports.contract; assert operators.MINE and transports.MINE"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
