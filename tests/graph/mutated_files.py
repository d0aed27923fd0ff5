"""Mutates the example graph files and runs `flowrt graph validate` on each, in this process. Not a test itself: `make hostile` runs it.

    python tests/graph/mutated_files.py [--files 900] [--seed 0]

Each file must give one line: on standard output with exit code 0, or on standard error with exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from flowrt.cli.app import main  # noqa: E402 (the path comes first when this runs as a script)

HANG_SECONDS = 60
_VALUES = (
    *("", "~", "0", "-1", "1.5", "1e999", ".inf", "nan", "true", "x", "[]", "{}", "[1, 2]", "{a: b}", "'", '"', "auto", "many"),
    *("999999999999999999", "99999999999999999999", "0x10", "1" * 5000, "x" * 100_000, "a.b.c", "../" * 500, "/dev/zero", "/", "~nobody/x"),
    *(
        "*x",
        "&x 1",
        "!!python/object/apply:os.system [ls]",
        "!x y",
        "\u202eabc",
        "\x1b[31m",
        "\ud83d\ude00",
        "%s%n{0}",
        "a\\0b",
        "org/name",
    ),
    *(
        "[" * 5000,
        "{a: " * 2000,
        "[" * 20 + "]" * 20,
        "[" + "1, " * 20_000 + "1]",
        "|",
        ">",
        "? x",
        "- x",
        "--- x",
        "#",
        "cpu",
        "inproc",
        "shm",
    ),
)
_KEYS = (
    "",
    "x",
    "flowrt",
    "model",
    "nodes",
    "edges",
    "deploy",
    "limits",
    "roles",
    "a.b",
    "1",
    "true",
    "~",
    "<<",
    "\u0430ttention",
    "k" * 50_000,
)
_ENCODINGS = ("utf-16", "utf-32", "utf-8-sig", "latin-1", "utf-7", "cp037")
_ENTRY = re.compile(r"^(\s*(?:- )?)([^:#]*)(: ?)(.*)$")


def bases(folder: Path) -> list[Path]:
    """The example graph files below `folder`, and the explicit form of one of them."""
    found = [path for path in sorted(folder.rglob("*.yaml")) if path.read_text().find("flowrt: 1") >= 0]
    explicit = folder / "expanded.yaml"
    explicit.write_text(_run(["graph", "expand", str(folder / "quickstart.yaml")])[1])
    return [*found, explicit]


def _with_entry(lines: list[str], draw: random.Random, change: Callable[[re.Match[str]], str]) -> list[str]:
    places = [(index, match) for index, line in enumerate(lines) if (match := _ENTRY.match(line))]
    if places:
        index, match = draw.choice(places)
        lines[index] = change(match)
    return lines


def _flow_value(lines: list[str], draw: random.Random, value: str) -> list[str]:
    """Another value for a key within {...}."""
    places = [(index, match) for index, line in enumerate(lines) for match in re.finditer(r"(?<=: )[^,:{}\[\]]+(?=[,}])", line)]
    if places:
        index, match = draw.choice(places)
        lines[index] = lines[index][: match.start()] + value + lines[index][match.end() :]
    return lines


def mutate(text: str, draw: random.Random) -> bytes:
    """`text` after one to three random changes, encoded."""
    lines = text.split("\n")
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        index = draw.randrange(len(lines))
        value, key = draw.choice(_VALUES), draw.choice(_KEYS)
        match draw.randrange(11):
            case 0:
                del lines[index : index + draw.choice((1, 1, 3))]
            case 1:
                lines.insert(draw.randrange(len(lines) + 1), lines[index])
            case 2 | 3:
                lines = _with_entry(lines, draw, lambda entry, value=value: f"{entry[1]}{entry[2]}: {value}")
            case 4 | 5:
                lines = _flow_value(lines, draw, value)
            case 6:
                lines = _with_entry(lines, draw, lambda entry, key=key: f"{entry[1]}{key}{entry[3]}{entry[4]}")
            case 7:
                lines = _with_entry(lines, draw, lambda entry: f"{entry[1]}{entry[2]}: {{{entry[2]}: {entry[4]}}}")
            case 8:
                lines[index] = " " * draw.randrange(9) + lines[index].lstrip()
            case 9:
                cut = draw.randrange(len(lines[index]) + 1)
                lines[index] = lines[index][:cut] + draw.choice("\t\0\x07\x85\u2028\ufeff:{}[],&*!|>'\"%@`\\-?#") + lines[index][cut:]
            case 10:
                lines = [*lines[:index], key + ":", *(f"  {line}" for line in lines[index:])]
        lines = lines or [""]
    content = "\n".join(lines)
    match draw.randrange(12):
        case 0:
            return content.encode(draw.choice(_ENCODINGS), "replace")
        case 1:
            data = bytearray(content.encode("utf-8", "replace"))
            data.insert(draw.randrange(len(data) + 1), draw.randrange(256))
            return bytes(data)
        case 2:
            return content.replace("\n", draw.choice(("\r\n", "\r", "\n\n"))).encode("utf-8", "replace")
        case 3:
            return content.encode("utf-8", "replace")[: draw.randrange(len(content) + 1)]
    return content.encode("utf-8", "replace")


def _run(words: list[str]) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of the command, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["flowrt", *words]
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    return (code if isinstance(code, int) else 0), out.getvalue(), err.getvalue()


def _on_hang(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"validate has not returned for {HANG_SECONDS} s")


def failures(num_files: int, seed: int, folder: Path, codes: Counter[int]) -> Iterator[str]:
    """What is wrong with the command on each of `num_files` mutated files, which are written below `folder`; nothing when all is well.

    Counts exit codes in `codes`.
    """
    examples = folder / "examples"
    shutil.copytree(ROOT / "examples", examples)
    all_bases = bases(examples)
    before = signal.signal(signal.SIGALRM, _on_hang)
    try:
        for number in range(num_files):
            draw = random.Random(f"{seed} {number}")
            base = draw.choice(all_bases)
            path = base.with_name("mutated.yaml")
            path.write_bytes(mutate(base.read_text(), draw))
            signal.alarm(HANG_SECONDS)
            try:
                code, out, err = _run(["graph", "validate", str(path)])
            except Exception as error:
                yield f"seed {seed}, file {number}, of {base.name}: {type(error).__name__}: {error}"
                continue
            finally:
                signal.alarm(0)
            codes[code] += 1
            line, other, start = (out, err, f"{path}: valid; ") if code == 0 else (err, out, "flowrt: error: ")
            if code not in (0, 2) or other or line.count("\n") != 1 or not line.startswith(start) or not line[:-1].isprintable():
                yield f"seed {seed}, file {number}, of {base.name}: exit code {code}, {out[:300]!r}, {err[:300]!r}"
    finally:
        signal.signal(signal.SIGALRM, before)


def _main() -> int:
    parser = argparse.ArgumentParser(description="Validate mutated graph files; report those that do not give one line.")
    parser.add_argument("--files", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        codes: Counter[int] = Counter()
        found = list(failures(options.files, options.seed, Path(folder), codes))
    counts = f"{codes[0]} valid, {codes[2]} refused, {len(found)} without one line and the right exit code"
    print("\n".join([*found, f"{options.files} mutated graph files: {counts}"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(_main())
