"""The functions, classes and files that docs/design.md names exist."""

from __future__ import annotations

import re

from docs.blocks import ROOT

PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
PATHS = re.findall(r"^\| \d+ \| `([^`]+)` \| `(\w+)` \|", PAGE, re.MULTILINE)
OWNERS = re.findall(r"`([A-Z]\w+)`[^|`]*\(`((?:\w+/)+\w+\.py)`", PAGE)
BARE_FILES = re.findall(r"`((?:graph|workers|launcher|reliability|actors|gateway|dataflow|exchange|engine|processes)/\w+\.py)`", PAGE)


def test_each_path_names_functions_that_exist() -> None:
    assert len(PATHS) > 20
    missing = [
        (file, name) for file, name in PATHS if not re.search(rf"^\s*(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert not missing


def test_each_owner_is_where_the_page_puts_it() -> None:
    assert len(OWNERS) > 8
    files = {file: ROOT / (file if (ROOT / file).exists() else f"flowrt/{file}") for _, file in OWNERS}
    missing = [
        (name, file)
        for name, file in OWNERS
        if not re.search(rf"^(class {name}\b|{name} =|{name}: )", files[file].read_text(), re.MULTILINE)
    ]
    assert not missing
    assert [file for file in BARE_FILES if not (ROOT / "flowrt" / file).exists()] == []


def test_the_page_is_short_enough_to_be_read_first() -> None:
    assert len(PAGE.split()) <= 2750
