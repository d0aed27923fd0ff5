"""The picture of the quickstart, from a real run: `make picture`, which writes quickstart.svg beside this file.

Here: a run in a terminal of WIDTH columns (a pseudo-terminal, as a person's), and what stands on that screen at the end, as rich draws it.
Not here: what is shown (flowrt/cli/live.py, flowrt/cli/tables.py). The figures are those of the machine and the moment: run it on a
quiet one.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
COMMAND = ("demo",)
WIDTH, HEIGHT = 110, 60  # high enough that every answer keeps its place
_PIECE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+")
_FONT = re.compile(r"\s*@font-face \{.*?\n    \}\n", re.DOTALL)


def run_in_terminal() -> tuple[str, int]:
    """All that `flowrt COMMAND` wrote to a terminal, and its exit status."""
    pid, terminal = pty.fork()
    if pid == 0:
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        os.chdir(ROOT)
        size = struct.pack("HHHH", HEIGHT, WIDTH, 0, 0)
        fcntl.ioctl(0, termios.TIOCSWINSZ, size)
        os.execve(sys.executable, [sys.executable, "-m", "flowrt", *COMMAND], {**kept, "TERM": "xterm-256color"})
    written = b""
    while piece := _read(terminal):
        written += piece
    return written.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux's way of saying that the other end is closed
        return b""


def screen(written: str) -> list[str]:
    """The lines that stand at the end, with their colours; knows the few movements that rich's live display makes."""
    lines, row = [""], 0
    for piece in _PIECE.findall(written):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece.endswith("A") and piece.startswith("\x1b["):
            row -= int(piece[2:-1] or 1)
        elif piece.endswith("K") and piece.startswith("\x1b["):
            lines[row] = ""
        elif not piece.startswith(("\r", "\x1b[")) or piece.endswith("m"):
            lines[row] += piece
    return lines


def draw(lines: list[str]) -> str:
    """An SVG that needs no font from elsewhere."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, crop=False)
    svg = console.export_svg(title=f"flowrt {' '.join(COMMAND)}")
    return _FONT.sub("\n", svg).replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace")


def main() -> None:
    written, status = run_in_terminal()
    if status != 0:
        sys.exit(f"flowrt ended with exit code {status}:\n{written}")
    lines = screen(written)
    while not lines[-1]:
        lines.pop()
    target = Path(__file__).with_suffix(".svg")
    target.write_text(draw(lines), encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
