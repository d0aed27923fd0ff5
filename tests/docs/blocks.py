"""Reads the code blocks of a page, and runs them in order in one folder. Not a test itself.

A comment directly above a block says more about it:

    <!-- not run: REASON -->    its commands are only parsed
    <!-- file: NAME -->         it is the content of a file that later blocks use
    <!-- output -->             it is what the block before it prints
    <!-- setup: CODE -->        Python that runs before a piece of a program
    <!-- background: WORD -->   it runs while later blocks do, which begin once it has printed WORD
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("sh", "console", "python", "yaml", "json", "toml", "text")
TIMEOUT_SECONDS = 240
_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_passed: set[str] = set()  # commands that have run on an earlier page, and leave no file
_OPENED = 'async with flowrt.open("examples/quickstart.yaml") as graph:\n'
# What differs from run to run: process ids, and numbers with a unit of time, memory or speed.
_VARYING = re.compile(r"\bpid \d+|\d[\d.]*(?= ?(?:us|ms|s|[KMG]iB|%|tokens per second)\b)|\d+(?= %)")


@dataclass(frozen=True)
class Block:
    page: str  # from the top of the tree
    line: int
    language: str
    text: str
    mark: str  # the comment above it

    @property
    def is_run(self) -> bool:
        return not self.mark.startswith("not run:")

    def commands(self) -> list[str]:
        """The commands of an `sh` or `console` block, comments removed and continued lines joined, also those within quotes."""
        text = self.text.replace("\\\n", " ")
        lines = [line[2:] for line in text.split("\n") if line.startswith("$ ")] if self.language == "console" else text.split("\n")
        commands: list[str] = []
        for line in lines:
            if commands and _is_open(commands[-1]):
                commands[-1] += f"\n{line}"
            elif line.strip() and not line.startswith("#"):
                commands.append(line)
        return commands


def _is_open(command: str) -> bool:
    """Whether a quotation of this command goes on in the next line."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def pages() -> list[str]:
    return ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start("language")) + 1, match["language"], match["text"], match["mark"] or "")
        for match in _BLOCK.finditer(text)
    ]


def program(block: Block) -> str:
    """A whole script: a piece of a program stands inside an `async def`, and inside an open graph when it does not open one."""
    text = block.text
    setup = block.mark.removeprefix("setup: ") if block.mark.startswith("setup: ") else ""
    if "asyncio.run(" in text or "flowrt.start(" in text or not re.search(r"\bawait |\basync |\bgraph\.", text):
        return f"import flowrt\n{setup}\n{text}"
    imports = "".join(re.findall(r"^(?:import|from) .*\n", text, re.MULTILINE))
    body = re.sub(r"^(?:import|from) .*\n", "", text, flags=re.MULTILINE)
    if re.search(r"\bgraph\b", body) and "flowrt.open(" not in body + setup:
        body = _OPENED + textwrap.indent(body, "    ")
    main = textwrap.indent(f"{setup}\n{body}", "    ")
    return f"import asyncio\nimport flowrt\n{imports}async def main():\n{main}\nasyncio.run(main())\n"


class Folder:
    """A folder with links to the tree's top entries, in which the blocks of one page run."""

    def __init__(self, path: Path) -> None:
        self.path = path / "page"
        self.path.mkdir()
        for entry in ROOT.iterdir():
            if not entry.name.startswith("."):
                (self.path / entry.name).symlink_to(entry)
        for name in ("my-model", "tiny-moe"):  # as the pages call a model of one's own
            (self.path / name).symlink_to(ROOT / "examples" / "tiny-moe")
        # Graphs on the pages name operators that they do not show; a page that shows them replaces this file.
        (self.path / "my_ops.py").write_text("def __getattr__(name):\n    return lambda **tensors: None\n", encoding="utf-8")
        programs = path / "bin"
        programs.mkdir()
        for name, module in (("flowrt", "-m flowrt"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
            (programs / name).chmod(0o755)
        self._background: list[subprocess.Popen[bytes]] = []
        self._of_shells = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "",
            "FLOWRT_RUNTIME_DIR": str(path / "run"),
        }

    def run(self, block: Block) -> str:
        """Run a block; returns what it prints. Raises AssertionError when it fails, or prints other than the page shows."""
        if block.mark.startswith("background: "):
            self._start(block, block.mark.removeprefix("background: "))
        elif block.mark.startswith("file: "):
            file = self.path / block.mark.removeprefix("file: ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
        elif block.language == "yaml" and block.text.startswith("flowrt: 1"):
            (self.path / "block.yaml").write_text(block.text)
            self._call(block, "flowrt graph validate block.yaml")
        elif block.language == "sh":
            return "".join(self._call_once(block, command) for command in block.commands())
        elif block.language == "console":
            shown: dict[str, str] = {}
            for part in re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                shown[command] = output
            for command, output in shown.items():
                check_output(block, output, self._call(block, command, is_failure_shown="error:" in output))
        elif block.language == "python":
            return self._call(block, "python", program(block))
        return ""

    def close(self) -> None:
        """End what runs in the background; it must end in order."""
        for process in self._background:
            process.terminate()
            assert process.wait(TIMEOUT_SECONDS) == 0

    def _start(self, block: Block, word: str) -> None:
        (command,) = block.commands()
        output = self.path.parent / "background.log"
        with output.open("w") as file:
            process = subprocess.Popen(**self._how(command), stdout=file, stderr=file)
        self._background.append(process)
        while word not in output.read_text():
            assert process.poll() is None, f"{block.page}:{block.line}: {command}\n{output.read_text()}"
            time.sleep(0.05)

    def _call_once(self, block: Block, command: str) -> str:
        words = shlex.split(command, comments=True)
        if words[0] != "flowrt" or {">", "init", "--json", "--plot"} & set(words):
            return self._call(block, command)
        if (key := shlex.join(words)) not in _passed:
            self._call(block, command)
            _passed.add(key)
        return ""

    def _how(self, command: str, code: str = "") -> dict[str, Any]:
        """How to start a command, or Python with code. What needs no shell gets none, so that it can be forked (zygote.py)."""
        words = ["python", "-c", code] if code else shlex.split(command, comments=True)
        if words[0] not in ("flowrt", "python") or (not code and set("|<>&;$*") & set(command)):
            return {"args": ["bash", "-c", command], "cwd": self.path, "env": self._environment | self._of_shells}
        module = ["-m", "flowrt"] if words[0] == "flowrt" else []
        return {"args": [sys.executable, *module, *words[1:]], "cwd": self.path, "env": self._environment}

    def _call(self, block: Block, command: str, code: str = "", *, is_failure_shown: bool = False) -> str:
        done = subprocess.run(
            **self._how(command, code),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if block.language == "console" else subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        assert (done.returncode == 0) != is_failure_shown, f"{block.page}:{block.line}: {command[:300]}\n{done.stdout}{done.stderr or ''}"
        return done.stdout


def check_output(block: Block, shown: str, printed: str) -> None:
    """Raises AssertionError when `printed` is not what the page shows, apart from what varies; a line `...` stands for any lines."""
    pattern = "\n".join(".*" if line == "..." else re.escape(line) for line in _masked(shown))
    assert re.fullmatch(pattern, "\n".join(_masked(printed)), re.DOTALL), f"{block.page}:{block.line} shows\n{shown}\nand not\n{printed}"


def _masked(text: str) -> list[str]:
    lines = (" ".join(_VARYING.sub("N", line).split()) for line in text.strip().split("\n"))
    return [line for line in lines if line]
