"""Shows a run on a terminal: a table of the starting processes, then all answers as they grow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flowrt.cli.record import Record
from flowrt.cli.text import OutputStream, visible
from flowrt.cli.view import View, answer_text, ending_text, prompt_text
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.launcher.load_record import loading_text
from flowrt.observe import duration_text, size_text

MAX_RUNNING_LINES = 8  # of the live part when there are more requests than blocks fit
MAX_WORKER_LINES = 16
_BAR_CELLS = 16
_MARGIN = 4  # of an answer: it stands under its prompt
_STYLES = {"waiting": "dim", "started": "dim", "loading": "yellow", "connecting": "cyan", "connected": "green"}
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass(frozen=True)
class LoadingWorker:
    """What is shown of a worker while it starts."""

    state: str = "waiting"
    done: int = 0  # operators that have their weights
    total: int = 0
    resident_bytes: int = 0


class LiveView(View):
    """`console` draws on a terminal; lines of processes go to `err` unless that is the same terminal."""

    def __init__(self, console: Console, err: OutputStream, graph: Graph, has_tokenizer: bool, title: str) -> None:
        self._console, self._err = console, err
        self._graph, self._has_tokenizer, self._title = graph, has_tokenizer, visible(title)
        self._workers = defaultdict(LoadingWorker, {name: LoadingWorker() for name in graph.process_names()})
        self._fork_server = "importing torch" if graph.processes != "one" else ""
        self._loading = ""
        self._records: Sequence[Record] = ()
        self._num_ticks = 0
        self._note = ""
        self._num_ended = 0
        self._fits_screen = False  # every request has its block on the screen
        self._live: Live | None = None

    def start(self) -> None:
        self._start_live()

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.ModelNotice(text, is_warning=False):
                self._print(Text(text, "dim"))
            case events.ForkServerReady():
                self._fork_server = ""
            case events.WorkerStarted(name):
                self._workers[name] = LoadingWorker("started")
            case events.WorkerLoading(name, _, done, total):
                self._workers[name] = LoadingWorker("loading", done, total)
            case events.WeightsLoading(num_bytes, total_bytes):
                self._loading = loading_text(event) if num_bytes < total_bytes else ""
            case events.WorkerListening(name=name, resident_bytes=resident_bytes):
                self._workers[name] = replace(self._workers[name], state="connecting", resident_bytes=resident_bytes)
            case events.WorkerConnected(name):
                self._workers[name] = replace(self._workers[name], state="connected")
            case events.Ready(seconds):
                self._stop_live()
                ready = f"{self._title}: {self._size_text()} ready after {duration_text(seconds)}"
                self._console.print(Text.assemble(("✓ ", "green"), ready))
            case events.Straggler(name, seconds):
                self._print(Text(f"{name} did not stop within {duration_text(seconds)} and was killed", "yellow"))
            case _ if news := events.news(event):
                self._print(Text(news, "yellow"))

    def on_line(self, process: str, line: str) -> None:
        if self._err.isatty():
            self._print(Text.assemble((f"[{process}] ", "yellow"), visible(line)))
        else:
            self._err.write_now(f"[{process}] {visible(line)}\n")

    def begin(self, records: Sequence[Record]) -> None:
        self._records = records
        self._fits_screen = 2 * len(records) <= self._num_lines  # a prompt and at least one line of the answer each
        self._console.print()
        self._start_live()

    def on_text(self, record: Record, new: str) -> None:
        if record.is_ended:
            self._num_ended += 1
            if not self._fits_screen:
                self._console.print(self._block(record, None))

    def note(self, text: str) -> None:
        self._note = text
        if self._live is None:
            self._console.print(Text(text, "yellow"))

    def tick(self) -> None:
        self._num_ticks += 1
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)

    def end(self) -> None:
        if self._live is not None:
            self._stop_live()
            if self._fits_screen:
                self._console.print(Group(*(self._block(record, None) for record in self._records)))
            if self._note:
                self._console.print(Text("interrupted", "yellow"))

    # The live part.

    def _start_live(self) -> None:
        """The live part disappears when it stops; lines that are to stay are printed."""
        self._live = Live(
            self._picture(), console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _picture(self) -> RenderableType:
        if not self._records:
            return self._start_picture()
        rows: list[RenderableType] = [*(self._blocks() if self._fits_screen else self._counts())]
        if self._note:
            rows.append(Text(self._note, "yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*rows, "")  # the cursor rests on an empty line, where the terminal's echo of ^C moves nothing

    def _print(self, what: RenderableType) -> None:
        """Prints above the live part. The terminal breaks long lines, so that they can be copied whole."""
        self._console.print(what, soft_wrap=True)

    # The start.

    def _size_text(self) -> str:
        num = len(self._graph.process_names())
        return f"{num} workers in this process" if self._graph.processes == "one" else f"{num} processes"

    def _start_picture(self) -> RenderableType:
        spin = _SPINNER[self._num_ticks % len(_SPINNER)]
        states = [worker.state for worker in self._workers.values()]
        doing = self._loading or f"{states.count('connected')} of {len(states)} connected"
        if self._fork_server:
            doing = f"fork server is {self._fork_server}"
        head = Text.assemble((f"{spin} ", "cyan"), f"{self._title}: starting {self._size_text()}", (f"  {doing}", "dim"))
        head.no_wrap, head.overflow = True, "ellipsis"
        table = Table.grid(padding=(0, 2))
        for number, (name, worker) in enumerate(self._workers.items()):
            if number >= min(MAX_WORKER_LINES, self._console.size.height - 4):
                table.add_row("", Text(f"… and {len(self._workers) - number} more", "dim"))
                break
            bar = ProgressBar(worker.total, worker.done, _BAR_CELLS) if worker.total else ""
            progress = f"{worker.done}/{worker.total}" if worker.total else ""
            size = size_text(worker.resident_bytes) if worker.resident_bytes else ""
            table.add_row(f"  {name}", Text(worker.state, _STYLES[worker.state]), bar, Text(progress, "dim"), size)
        return Group(head, table, "")

    # Answers.

    @property
    def _width(self) -> int:
        return self._console.size.width

    @property
    def _num_lines(self) -> int:
        return self._console.size.height - 2

    def _blocks(self) -> list[RenderableType]:
        """The blocks of all requests. When the answers are longer than the screen, each block shows its last lines in an equal share."""
        num_free = self._num_lines - len(self._records)
        wanted = [len(self._lines(record)) for record in self._records]
        share = max(wanted, default=1)
        while share > 1 and sum(min(num, share) for num in wanted) > num_free:
            share -= 1
        return [self._block(record, share) for record in self._records]

    def _block(self, record: Record, max_lines: int | None) -> RenderableType:
        lines = self._lines(record)
        shown = lines if max_lines is None else lines[-max_lines:]
        return Group(self._head(record), *shown)

    def _head(self, record: Record) -> Text:
        """The first line of a block: number, prompt and progress."""
        number = f"[{record.index}] "
        state, style = self._status(record)
        prompt = prompt_text(record)
        shown = Text(prompt, "bold")
        width = self._width - len(number) - len(state)
        shown.truncate(max(8, width - 2) if state else max(8, width), overflow="ellipsis")
        gap = " " * max(0, width - shown.cell_len) if state else ""
        return Text.assemble((number, "cyan"), shown, gap, (state, style), no_wrap=True, overflow="crop")

    def _lines(self, record: Record) -> list[Text]:
        """The answer, wrapped and indented; at least one line before any text arrives, so that blocks do not move."""
        answer = Text(answer_text(record, self._has_tokenizer))
        if ending := ending_text(record, self._has_tokenizer):
            answer.append((" " if answer.plain else "") + ending, "red" if record.finish_reason == "error" else "yellow")
        if not answer.plain:
            answer = Text("…" if not record.is_ended else "(nothing)", "dim")
        wrapped = answer.wrap(self._console, max(8, self._width - _MARGIN), overflow="fold")
        return [Text(" " * _MARGIN).append_text(line) for line in wrapped]

    def _status(self, record: Record) -> tuple[str, str]:
        num = len(record.token_ids)
        tokens = f"{num} token{'s' if num != 1 else ''}"
        match record.finish_reason:
            case None if record.submitted_seconds is None:
                return "", "dim"
            case None:
                return (f"{tokens} {_SPINNER[self._num_ticks % len(_SPINNER)]}" if num else "waiting"), "cyan"
            case "stop" | "length" as reason:
                return f"{tokens}, {reason} ✓", "green"
            case "error":
                return f"{tokens} ✗", "red"
            case _:
                return f"{tokens} –", "yellow"

    def _counts(self) -> list[Text]:
        running = [record for record in self._records if not record.is_ended and record.token_ids]
        num_waiting = len(self._records) - self._num_ended - len(running)
        num_tokens = sum(len(record.token_ids) for record in self._records)
        spin = _SPINNER[self._num_ticks % len(_SPINNER)]
        counts = f"{self._num_ended} ended, {len(running)} answering, {num_waiting} waiting; {num_tokens} tokens"
        rows = [Text.assemble((f"{spin} ", "cyan"), f"{len(self._records)} requests: {counts}")]
        for record in running[: max(1, min(MAX_RUNNING_LINES, self._num_lines - 3))]:
            rows.append(Text.assemble((f"[{record.index}] ", "cyan"), self._lines(record)[-1].plain.strip()))
        for row in rows:
            row.no_wrap, row.overflow = True, "ellipsis"
        return rows
