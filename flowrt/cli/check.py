"""`flowrt check transport SCHEME`: run the conformance suite on a transport, ours or another package's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from flowrt.cli.options import Switch
from flowrt.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flowrt.transports.conformance.suite import CheckResult

check_app = App(name="check", help="Check a transport against its contract.")

_STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim", "skipped": "yellow"}


@check_app.command
def transport(
    scheme: Annotated[str, Parameter(help="A transport: inproc, shm, zmq, ucx, cuda, or one that an installed package registers.")],
    /,
    *,
    quick: Annotated[Switch, Parameter(help="Leave out 1 GiB payloads, 100 000 messages and 10 000 connections.")] = False,
    loop: Annotated[Literal["both", "asyncio", "uvloop"], Parameter(help="The event loops to run on; workers use uvloop.")] = "both",
    only: Annotated[str, Parameter(help="Run only the checks whose names contain this.", show_default=False)] = "",
    verbose: Annotated[Switch, Parameter(name=("--verbose", "-v"), help="Print a line per check, with its description.")] = False,
    json: Annotated[
        str | None, Parameter(allow_leading_hyphen=True, help='Write the results to this file; "-" for standard output.')
    ] = None,
) -> None:
    """Run the conformance suite on a transport and report each check that fails.

    Without --quick it takes some minutes and 6 GiB of memory. Exit codes: 0
    all checks pass, 1 a check fails, 2 bad input.
    """
    from rich.console import Console

    from flowrt.system.output_file import check_writable, json_text, write_file
    from flowrt.transports.conformance.suite import plan, run_suite, usable_loops
    from flowrt.transports.errors import TransportError

    if loop not in ("both", *usable_loops()):
        raise UserError(f"{loop} is not installed here; pip install {loop}")
    if json is not None:
        check_writable(json)
    try:
        if not any(only in check.name for check in plan(scheme)):
            raise UserError(f"no check has {only!r} in its name; they are {', '.join(check.name for check in plan(scheme))}")
        with Console(stderr=True).status(f"checking {scheme}") as status:
            loops = None if loop == "both" else (loop,)
            results = list(run_suite(scheme, full=not quick, loops=loops, only=only, begin=lambda name: status.update(f"{scheme}: {name}")))
    except TransportError as error:
        raise UserError(str(error)) from None
    print_results(scheme, results, Console(stderr=json == "-"), verbose=verbose)
    if json is not None:
        write_file(json, json_text([result._asdict() for result in results]))
    raise SystemExit(0 if all(result.is_ok() for result in results) else 1)


def print_results(scheme: str, results: Iterable[CheckResult], console: Console, *, verbose: bool = False) -> None:
    """Print a line per group of checks with the result on each loop; with `verbose`, a line per check and its description.

    Then print each failed check in full, and a total.
    """
    from rich.text import Text

    results = list(results)
    console.print(_table(results, console, verbose))
    for result in results:
        if result.why and result.outcome in ("failed", "skipped"):
            text = f"{result.outcome} on {result.loop}: {result.name}: {result.why}"
            if not verbose:
                text += f" (checked: {result.property})"
            console.print(Text(text, _STYLES[result.outcome]), soft_wrap=True)
    seconds = sum(result.seconds for result in results)
    more = "" if verbose else "; -v shows every check"
    console.print(Text(f"{scheme}: {_counts(results)} in {seconds:.0f} s{more}"))


def _table(results: Sequence[CheckResult], console: Console, verbose: bool) -> Table:
    from rich.table import Column
    from rich.text import Text

    from flowrt.cli.tables import new_table

    loops = list(dict.fromkeys(result.loop for result in results))
    table = new_table(console, Column("check" if verbose else "checks of", overflow="fold"))
    for loop in loops:
        table.add_column(loop, no_wrap=True)
        table.add_column("s", justify="right", no_wrap=True)
    rows: dict[str, list[CheckResult]] = {}
    for result in results:
        rows.setdefault(result.name if verbose else result.group, []).append(result)
    for title, found in rows.items():
        label = Text(title)
        if verbose:
            label = Text(title.removeprefix("check_").replace("_", " "), "bold")
            label.append(f": {found[0].property}", "not bold dim" if console.is_terminal else "")
        cells: list[Text] = []
        for loop in loops:
            on_loop = [result for result in found if result.loop == loop]
            worst = next((outcome for outcome in ("failed", "skipped", "passed") if any(each.outcome == outcome for each in on_loop)), "")
            text = on_loop[0].outcome if verbose else _counts(on_loop)
            cells += [Text(text, _STYLES.get(worst, "dim")), Text(f"{sum(each.seconds for each in on_loop):.2f}")]
        table.add_row(label, *cells)
    return table


def _counts(results: Sequence[CheckResult]) -> str:
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in _STYLES}
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
