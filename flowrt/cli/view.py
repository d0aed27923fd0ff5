"""Shows a run in plain lines: for pipes, files and dumb terminals."""

from __future__ import annotations

from collections.abc import Sequence

from flowrt.cli.loading_line import LoadingLine
from flowrt.cli.record import Record
from flowrt.cli.text import OutputStream, one_line, visible
from flowrt.errors import shortened
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.observe import duration_text, size_text

EMPTY_ANSWER = "empty: the model ended its answer at once"
MAX_PROMPT_CHARACTERS = 200  # of a prompt above its answer


class View:
    """Shows nothing. It receives, in order: `start`, events of the start, `begin`, tokens and ends of requests, `end`. No call blocks or
    raises."""

    def start(self) -> None:
        """The processes are about to start."""

    def on_event(self, event: events.Event) -> None:
        """An event of the launcher."""

    def on_line(self, process: str, line: str) -> None:
        """A line that a process of the graph wrote."""

    def begin(self, records: Sequence[Record]) -> None:
        """The graph is up; the requests are about to be submitted."""

    def on_text(self, record: Record, new: str) -> None:
        """A token of the request, or its end; `new` is the text that came with it. The record already contains it."""

    def note(self, text: str) -> None:
        """A message on what an interrupt does."""

    def tick(self) -> None:
        """Called a few times a second."""

    def end(self) -> None:
        """The run is over: leave the answers on the screen. Idempotent; called also when nothing began."""


def ending_text(record: Record, has_tokenizer: bool) -> str:
    """How a request ended, unless it finished normally with a text: "(error: the prompt is empty)", "(aborted)"; else ""."""
    if record.finish_reason == "error":
        return f"(error: {one_line(record.error or 'unknown')})"
    if record.finish_reason == "stop" and has_tokenizer and not record.text.strip():
        return f"({EMPTY_ANSWER})" if len(record.token_ids) < 2 else f"(empty: none of {len(record.token_ids)} tokens has a text)"
    return "(aborted)" if record.finish_reason == "abort" else ""


def answer_text(record: Record, has_tokenizer: bool) -> str:
    """The answer so far, safe for a terminal; token ids where the model has no tokenizer."""
    return visible(record.text).strip() if has_tokenizer else " ".join(str(token_id) for token_id in record.token_ids)


def prompt_text(record: Record) -> str:
    """The prompt, on one line."""
    prompt = record.request.prompt
    if isinstance(prompt, str):
        return one_line(prompt)
    return f"{len(prompt)} token ids: {' '.join(str(token_id) for token_id in prompt[:64])}{' …' if len(prompt) > 64 else ''}"


class AnswerView(View):
    """Shows on `out` the only answer as it comes, or each of several when it has ended: "[3] prompt" and then the answer.

    The lines of an answer are indented, so that none of them looks like the start of another answer.
    """

    def __init__(self, out: OutputStream, err: OutputStream, has_tokenizer: bool) -> None:
        self._out, self._err, self._has_tokenizer = out, err, has_tokenizer
        self._records: Sequence[Record] = ()
        self._streamed = False  # the only answer has begun

    def begin(self, records: Sequence[Record]) -> None:
        self._records = records

    def on_text(self, record: Record, new: str) -> None:
        if len(self._records) == 1:
            self._stream(record, new)
        elif record.is_ended:
            text = " ".join(filter(None, (answer_text(record, self._has_tokenizer), ending_text(record, self._has_tokenizer))))
            prompt = shortened(prompt_text(record), MAX_PROMPT_CHARACTERS)
            self._out.write_now(f"[{record.index}] {prompt}\n    " + text.replace("\n", "\n    ") + "\n")

    def note(self, text: str) -> None:
        self._err.write_now(f"flowrt: {text}\n")

    def end(self) -> None:
        if self._streamed:  # the run ended in the middle of its only answer
            self._out.write_now("\n")
            self._streamed = False

    def _stream(self, record: Record, new: str) -> None:
        if not self._has_tokenizer:
            new = f" {record.token_ids[-1]}" if not record.is_ended else ""
        text = visible(new)
        if not self._streamed:
            text = text.lstrip()  # models like to begin with a space or an empty line
        if record.is_ended:
            if ending := ending_text(record, self._has_tokenizer):
                text += f" {ending}" if self._streamed or text else ending
            text += "\n"
        self._streamed = not record.is_ended and (self._streamed or bool(text))
        self._out.write_now(text)


class PlainView(AnswerView):
    """Shows progress on `err` too, unless `quiet`."""

    def __init__(self, out: OutputStream, err: OutputStream, graph: Graph, has_tokenizer: bool, quiet: bool = False) -> None:
        super().__init__(out, err, has_tokenizer)
        self._graph, self._quiet, self._is_ready, self._loading = graph, quiet, False, LoadingLine(self._progress)

    def start(self) -> None:
        importing = "" if self._graph.processes == "one" else "; the fork server is importing torch"
        self._progress(f"starting {len(self._graph.process_names())} workers{importing}")

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.ModelNotice(defaults, is_warning=False):
                self._progress(defaults)
            case events.WorkerStarted(name, pid) if not self._is_ready:
                self._progress(f"{name} started, {f'pid {pid}' if pid else f'on {self._graph.host_of(name)}'}")
            case events.WeightsLoading():
                self._loading.show(event)
            case events.WorkerListening(name=name, resident_bytes=resident_bytes) if not self._is_ready:
                self._progress(f"{name} loaded, {size_text(resident_bytes)}")
            case events.Ready(seconds):
                self._is_ready = True
                self._progress(f"ready after {duration_text(seconds)}: {len(self._graph.process_names())} workers connected")
            case events.Straggler(name, seconds):
                self.note(f"{name} did not stop within {duration_text(seconds)} and was killed")
            case _ if text := events.news(event):
                self.note(text)

    def on_line(self, process: str, line: str) -> None:
        self._err.write_now(f"[{process}] {visible(line)}\n")

    def _progress(self, text: str) -> None:
        if not self._quiet:
            self.note(text)
