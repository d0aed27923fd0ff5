"""`flowrt check transport SCHEME`: hold a transport, ours or another package's, to the contract's promises.

Here: the subcommand as a cyclopts App, which the main command line mounts, and its table. Not here: the promises and the suite
(transports/checks_suite.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from flowrt.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from transports.checks_suite import Result

check_app = App(name="check", help="Hold parts that may come from other packages to their contracts.")

_MARKS = {"kept": "green", "broken": "bold red", "not promised": "dim", "left out": "yellow"}


@check_app.command
def transport(
    scheme: Annotated[str, Parameter(help="A transport: inproc, shm, zmq, or one that an installed package registers.")],
    /,
    *,
    quick: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Leave out 1 GiB payloads, 100 000 messages and 10 000 connections.")
    ] = False,
    loop: Annotated[Literal["both", "asyncio", "uvloop"], Parameter(help="The event loops to run on; workers use uvloop.")] = "both",
    only: Annotated[str, Parameter(help="Only the checks whose names contain this.", show_default=False)] = "",
    json: Annotated[
        str | None, Parameter(allow_leading_hyphen=True, help='Write the results to this file; "-" for standard output.')
    ] = None,
) -> None:
    """Run the suite of checks on a transport and show, per promise and event loop, whether it is kept.

    Without --quick it takes some minutes and 6 GiB of memory. Exit codes: 0 every promise is kept, 1 one is broken, 2 bad input.
    """
    from rich.console import Console

    from transports.checks_suite import plan, run_suite, usable_loops
    from transports.errors import TransportError

    if loop not in ("both", *usable_loops()):
        raise UserError(f"{loop} is not installed here; pip install {loop}")
    console = Console(stderr=json == "-")
    shown = Console(stderr=True)
    try:
        if not any(only in check.name for check in plan(scheme)):
            raise UserError(f"no check has {only!r} in its name; they are {', '.join(check.name for check in plan(scheme))}")
        with shown.status(f"checking {scheme}") as status:
            loops = None if loop == "both" else (loop,)
            results = list(run_suite(scheme, full=not quick, loops=loops, only=only, begin=lambda name: status.update(f"{scheme}: {name}")))
    except TransportError as error:
        raise UserError(str(error)) from None
    print_results(results, console)
    if json is not None:
        _write(results, json)
    raise SystemExit(0 if all(result.ok for result in results) else 1)


def print_results(results: Iterable[Result], console: Console) -> None:
    """One line per check: the verdict and the seconds on each loop, the promise; then what is broken, and a sum."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    results = list(results)
    loops = list(dict.fromkeys(result.loop for result in results))
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("promise", overflow="fold", ratio=1)
    for kind in loops:
        table.add_column(kind, no_wrap=True)
        table.add_column("s", justify="right", no_wrap=True)
    by_name: dict[str, dict[str, Result]] = {}
    for result in results:
        by_name.setdefault(result.name, {})[result.loop] = result
    for name, found in by_name.items():
        cells: list[Text] = []
        for kind in loops:
            result = found[kind]
            cells += [Text(result.verdict, _MARKS[result.verdict]), Text(f"{result.seconds:.2f}")]
        promise = Text(name.removeprefix("check_").replace("_", " "), "bold")
        promise.append(f": {next(iter(found.values())).promise}", "not bold dim" if console.is_terminal else "")
        table.add_row(promise, *cells)
    console.print(table)
    for result in results:
        if result.why and result.verdict in ("broken", "left out"):
            console.print(Text(f"{result.verdict} on {result.loop}: {result.name}: {result.why}", _MARKS[result.verdict]), soft_wrap=True)
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in _MARKS}
    seconds = sum(result.seconds for result in results)
    console.print(Text(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) + f" in {seconds:.0f} s"))


def _write(results: list[Result], name: str) -> None:
    import sys
    from pathlib import Path

    import msgspec

    text = msgspec.json.format(msgspec.json.encode([result._asdict() for result in results])).decode() + "\n"
    if name == "-":
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise UserError(f"--json {name}: {error.strerror}") from None
