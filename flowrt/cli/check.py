"""`flowrt check transport SCHEME`: run the conformance suite on a transport, ours or another package's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from flowrt.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flowrt.transports.conformance.suite import Result

check_app = App(name="check", help="Check that plug-ins keep their contracts.")

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
    only: Annotated[str, Parameter(help="Run only the checks whose names contain this.", show_default=False)] = "",
    verbose: Annotated[
        bool, Parameter(name=("--verbose", "-v"), negative=(), show_default=False, help="A line for every check, with its promise.")
    ] = False,
    json: Annotated[
        str | None, Parameter(allow_leading_hyphen=True, help='Write the results to this file; "-" for standard output.')
    ] = None,
) -> None:
    """Run the conformance suite on a transport and report each check that fails.

    Without --quick it takes some minutes and 6 GiB of memory. Exit codes: 0
    every promise is kept, 1 one is broken, 2 bad input.
    """
    from rich.console import Console

    from flowrt.cli.record import check_writable
    from flowrt.transports.conformance.suite import plan, run_suite, usable_loops
    from flowrt.transports.errors import TransportError

    if loop not in ("both", *usable_loops()):
        raise UserError(f"{loop} is not installed here; pip install {loop}")
    if json is not None:
        check_writable(json)
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
    print_results(scheme, results, console, every=verbose)
    if json is not None:
        _write(results, json)
    raise SystemExit(0 if all(result.ok for result in results) else 1)


def print_results(scheme: str, results: Iterable[Result], console: Console, *, every: bool = False) -> None:
    """Print a line per group of checks with the result on each loop; with `every`, a line per check and the property that it checks.

    Then print each failed check in full, and a total.
    """
    from rich.text import Text

    results = list(results)
    loops = list(dict.fromkeys(result.loop for result in results))
    console.print(_every_check(results, loops, console) if every else _groups(results, loops, console))
    for result in results:
        if result.why and result.verdict in ("broken", "left out"):
            told = f"{result.verdict} on {result.loop}: {result.name}: {result.why}"
            if not every:
                told += f" (promised: {result.promise})"
            console.print(Text(told, _MARKS[result.verdict]), soft_wrap=True)
    seconds = sum(result.seconds for result in results)
    more = "" if every else "; -v shows every check"
    console.print(Text(f"{scheme}: {_counts(results)} in {seconds:.0f} s{more}"))


def _table(console: Console, first: str, loops: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for kind in loops:
        table.add_column(kind, no_wrap=True)
        table.add_column("s", justify="right", no_wrap=True)
    return table


def _groups(results: Sequence[Result], loops: Sequence[str], console: Console) -> Table:
    from rich.text import Text

    table = _table(console, "checks of", loops)
    for title, names in _group_names().items():
        cells: list[Text] = []
        for kind in loops:
            found = [result for result in results if result.loop == kind and result.name in names]
            worst = next((verdict for verdict in ("broken", "left out", "kept") if any(each.verdict == verdict for each in found)), "")
            cells += [Text(_counts(found), _MARKS.get(worst, "dim")), Text(f"{sum(each.seconds for each in found):.1f}")]
        if any(cell.plain for cell in cells[::2]):
            table.add_row(title, *cells)
    return table


def _group_names() -> dict[str, set[str]]:
    """The name of each group -> the names of its checks."""
    from flowrt.transports.conformance.channel_checks import CHANNEL_CHECKS, TRANSPORT_CHECKS
    from flowrt.transports.conformance.connection_checks import PROCESS_CHECKS
    from flowrt.transports.conformance.long_checks import LONG_CHANNEL_CHECKS, LONG_TRANSPORT_CHECKS
    from flowrt.transports.conformance.window_checks import WINDOW_CHECKS

    groups = {
        "channels": CHANNEL_CHECKS,
        "windows": WINDOW_CHECKS,
        "other processes": PROCESS_CHECKS,
        "listening, connecting": [check for check in TRANSPORT_CHECKS if check not in PROCESS_CHECKS],
        "very long, very many": (*LONG_CHANNEL_CHECKS, *LONG_TRANSPORT_CHECKS),
    }
    return {title: {check.__name__ for check in checks} for title, checks in groups.items()}


def _every_check(results: Sequence[Result], loops: Sequence[str], console: Console) -> Table:
    from rich.text import Text

    table = _table(console, "promise", loops)
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
    return table


def _counts(results: Sequence[Result]) -> str:
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in _MARKS}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


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
