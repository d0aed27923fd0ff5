"""The Python on docs/python-api.md and in README runs as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_OPENED = 'async with flowrt.open("examples/quickstart.yaml") as graph:\n'


def runnable(block: str) -> str:
    """A script of its own: pieces stand inside an `async def`, as on the page, and inside the graph of the piece before."""
    if "asyncio.run(" in block or ("await" not in block and "async" not in block):
        return f"import flowrt\n{block}"
    imports = "".join(re.findall(r"^import .*\n", block, re.MULTILINE))
    body = re.sub(r"^import .*\n", "", block, flags=re.MULTILINE)
    if "flowrt.open(" not in body:
        body = _OPENED + textwrap.indent(body, "    ")
    return f"import asyncio\nimport flowrt\n{imports}async def main():\n{textwrap.indent(body, '    ')}\nasyncio.run(main())\n"


def blocks() -> list[tuple[str, int, str]]:
    return [
        (name, number, block)
        for name in ("docs/python-api.md", "README.md")
        for number, block in enumerate(_BLOCK.findall((ROOT / name).read_text(encoding="utf-8")))
    ]


def test_the_page_has_its_examples() -> None:
    assert [name for name, _, _ in blocks()] == ["docs/python-api.md"] * 4 + ["README.md"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number", "block"), blocks(), ids=[f"{name}-{number}" for name, number, _ in blocks()])
def test_example_runs_as_written(name: str, number: int, block: str) -> None:
    ran = subprocess.run([sys.executable, "-c", runnable(block)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip(), f"{name}, example {number} prints what came out"
