"""Renders the tables of docs/models.md from what `flowrt models` knows. Rewrites the page when it is run.

    python tests/docs/model_tables.py

A table stands between `<!-- models: NAME -->` and `<!-- end of models -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from flowrt.operators.families.architectures import refused, that_run  # noqa: E402 (the path comes first when this runs as a script)
from flowrt.operators.families.registry import BUILT_IN, known_families  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
TABLE = re.compile(r"(<!-- models: (.+?) -->\n).*?(<!-- end of models -->)", re.DOTALL)


def _families() -> list[str]:
    lines = ["| model_type | models | attention | gate | experts |", "|---|---|---|---|---|"]
    for name, family in BUILT_IN.items():
        if name == family.name and family.about is not None:
            lines.append("| " + " | ".join((_names((family.name, *family.also)), *family.about)) + " |")
    return lines


def _runs() -> list[str]:
    return ["| runs |", "|---|", f"| {_names(name for name in that_run() if name not in known_families())} |"]


def _refused() -> list[str]:
    return ["| reason | architectures |", "|---|---|", *(f"| {reason} | {_names(names)} |" for reason, names in refused().items())]


TABLES = {"families": _families, "runs": _runs, "refused": _refused}


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def rendered(page: str) -> str:
    """The text of the page with its tables as they should be. Raises KeyError for an unknown table."""
    return TABLE.sub(lambda match: f"{match[1]}{chr(10).join(TABLES[match[2]]())}\n{match[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
