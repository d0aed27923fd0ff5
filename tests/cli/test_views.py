"""Plain lines and the live view, rendered into memory, with texts that are wide, long, many, or contain terminal control codes."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from cli.conftest import Terminal
from rich.cells import cell_len
from rich.console import Console

from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.api import read_graph
from flowrt.cli.doctor import Check, report
from flowrt.cli.graphs import ListedGraph, print_graph
from flowrt.cli.live import LiveView
from flowrt.cli.loading_line import LoadingLine
from flowrt.cli.prompts import PromptRequest
from flowrt.cli.record import Durations, Figures, Record, record_text
from flowrt.cli.report import ProcessReport, report_of
from flowrt.cli.tables import print_tables
from flowrt.cli.text import OutputStream, one_line, visible
from flowrt.cli.up import show_loading
from flowrt.cli.view import PlainView, View
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.sampling_params import SamplingParams
from flowrt.serving.graph_status import GraphStatus, ProcessStatus
from flowrt.serving.run_folder import Description
from flowrt.system.output_file import check_writable, write_file

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
EVIL = "\x1b[2J\x07\x9b31m\r\u202eX\nsecond [bold]line[/bold] \u4f60\u597d :smile:\ttab"


@pytest.fixture
def graph(graph_file: Path) -> Graph:
    return read_graph(graph_file, ["deploy.processes=many"])


def record(index: int = 0, prompt: str = "what?") -> Record:
    return Record(index, PromptRequest(prompt, SamplingParams()), submitted_seconds=0.0)


def feed(view: View, each: Record, *texts: str, end: str = "stop", error: str | None = None) -> None:
    """A token per text, then the end."""
    for number, text in enumerate(texts):
        each.add(TokenEvent(0, number, (65 + number,), text), float(number))
        view.on_text(each, text)
    each.add(EndEvent(0, end, "", error), 9.0)
    view.on_text(each, "")


def plain_view(graph: Graph, has_tokenizer: bool = True) -> tuple[PlainView, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return PlainView(OutputStream(out), OutputStream(err), graph, has_tokenizer), out, err


def live_view(graph: Graph, width: int = 80, height: int = 24) -> tuple[LiveView, Terminal, Console]:
    out = Terminal()
    console = Console(file=out, force_terminal=True, width=width, height=height, highlight=False, color_system="standard")
    view = LiveView(console, OutputStream(Terminal()), graph, True, "g.yaml")
    view.start()
    return view, out, console


def test_nothing_that_drives_a_terminal_gets_through() -> None:
    shown = visible(EVIL)
    assert shown == "\\x1b[2J\\x07\\x9b31m\\x0d\\u202eX\nsecond [bold]line[/bold] \u4f60\u597d :smile:    tab"
    assert one_line(" a\n\n b\x00 ") == "a b\\x00"


def test_plain_answers_come_in_order_of_completion(graph: Graph) -> None:
    view, out, err = plain_view(graph)
    first, second, third = record(0), record(1), record(2)
    view.begin([first, second, third])
    feed(view, second, " ", EVIL)
    feed(view, third, end="error", error="the prompt\nis empty")
    feed(view, first, "half", end="abort")
    assert out.getvalue().split("\n") == [
        "[1] what?",
        "    \\x1b[2J\\x07\\x9b31m\\x0d\\u202eX",
        "    second [bold]line[/bold] \u4f60\u597d :smile:    tab",
        "[2] what?",
        "    (error: the prompt is empty)",
        "[0] what?",
        "    half (aborted)",
        "",
    ]
    view.on_line("experts.0", "\x1b]0;title\x07")
    assert err.getvalue() == "[experts.0] \\x1b]0;title\\x07\n"


def test_an_empty_answer_has_a_reason(graph: Graph) -> None:
    view, out, _ = plain_view(graph)
    records = [record(0), record(1), record(2)]
    view.begin(records)
    feed(view, records[0], "")
    feed(view, records[1], "", "", "")
    feed(view, records[2], "x")
    assert out.getvalue().splitlines()[1::2] == [
        "    (empty: the model ended its answer at once)",
        "    (empty: none of 3 tokens has a text)",
        "    x",
    ]


@pytest.mark.parametrize("host", ["", "gpu-node-13.example"])
def test_graphs_that_are_up_fit_80_columns(host: str) -> None:
    names = {"launcher": "up", "attention.12": "given up", "trampoline.0": "suspect"}
    figures = {"heartbeat_age_seconds": 12.3, "cpu_percent": 100.0, "resident_bytes": 10**11, "num_running": 128, "num_waiting": 100}
    statuses = tuple(
        ProcessStatus(name=name, role=name.partition(".")[0], pid=4194303 + number, host=host, state=state, **figures)
        for number, (name, state) in enumerate(names.items())
    )
    status = GraphStatus(state="ready", problems=(), num_active=1, num_waiting=0, max_requests=1024, processes=statuses)
    out = Terminal()
    described = Description(
        name="quick",
        pid=4194303,
        graph="graph.yaml",
        model="a-model-with-a-long-name",
        url="http://127.0.0.1:65535",
        started=-1e6,
        drain_seconds=30.0,
        max_requests=1024,
    )
    console = Console(file=out, force_terminal=True, width=80)
    print_graph(ListedGraph("quick", "ready", described, status), console, 0.0)
    print_graph(ListedGraph("quick", "dead", described, None), console, 0.0)
    lines = ESCAPE.sub("", out.getvalue()).splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert all(any(name in line and state in line and "128 + 100" in line for line in lines) for name, state in names.items())
    assert (f"on {host}" in lines) == bool(host)


def test_plain_start_is_announced_before_the_first_process_starts(graph: Graph) -> None:
    view, out, err = plain_view(graph)
    view.start()
    assert out.getvalue() == ""
    assert err.getvalue() == f"flowrt: starting {len(graph.process_names())} workers; the fork server is importing torch\n"


def test_one_plain_answer_streams(graph: Graph) -> None:
    view, out, _ = plain_view(graph)
    only = record()
    view.begin([only])
    only.add(TokenEvent(0, 0, (65,), " He"), 0.0)
    view.on_text(only, " He")
    assert out.getvalue() == "He"
    feed(view, only, "llo", "\x1b")
    view.end()
    assert out.getvalue() == "Hello\\x1b\n"


def test_without_a_tokenizer_token_ids_are_shown(graph: Graph) -> None:
    view, out, _ = plain_view(graph, has_tokenizer=False)
    view.begin([record(0), each := record(1)])
    feed(view, each, "", "", "")
    assert out.getvalue() == "[1] what?\n    65 66 67\n"
    view, out, _ = plain_view(graph, has_tokenizer=False)
    view.begin([each := record()])
    feed(view, each, "", "")
    assert out.getvalue() == "65 66\n"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 8)])
@pytest.mark.parametrize("num_requests", [1, 2, 8, 100])
def test_the_live_view_keeps_inside_the_screen(graph: Graph, width: int, height: int, num_requests: int) -> None:
    view, out, console = live_view(graph, width, height)
    for event in (
        events.ForkServerReady(1),
        events.WorkerStarted("attention.0", 7),
        events.WorkerLoading("attention.0", "x", 2, 6),
        events.WorkerListening("experts.0", 1 << 28),
        events.WorkerConnected("experts.1"),
    ):
        view.on_event(event)
        view.tick()
    view.on_event(events.Ready(1.5))
    records = [record(index, "why " * 60 if index % 2 else "\u4f60\u597d" * 40) for index in range(num_requests)]
    view.begin(records)
    view.tick()
    for index, each in enumerate(records):
        each.add(TokenEvent(0, 0, (1,), "word " * 5), 0.1)
        view.on_text(each, "word " * 5)
        view.tick()
        if index % 3 == 0:
            feed(view, each, "\u754c" * 300, "x" * 500, EVIL)
        elif index % 3 == 1:
            feed(view, each, end="error", error="no room\x1b[2J")
        view.tick()
    for text in ("note", "[experts.0]"):
        view.note(text)
        view.on_line("experts.0", EVIL.replace("\n", " "))
        view.tick()
    for each in records:
        each.end("abort")
    view.end()
    view.end()
    console.print("the end")
    seen = out.getvalue()
    shown = ESCAPE.sub("", seen)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]", shown), "only what rich itself writes"
    drawn = [line for line in re.split(r"[\r\n]", shown) if not line.startswith("[experts.0]")]  # those are the terminal's to break
    assert max(map(cell_len, drawn)) <= width
    for index in range(0, num_requests, 3):
        assert f"[{index}] " in shown
    assert "\\x1b[2J" in shown


def test_a_live_start_shows_how_much_is_loaded_until_all_is(graph: Graph) -> None:
    view, out, _ = live_view(graph)
    view.on_event(events.ForkServerReady(1))
    for num_bytes, shown in ((12_300_000_000, "loading weights 12.3 of 57.1 GB, 1.2 GB/s"), (57_100_000_000, "0 of 3 connected")):
        view.on_event(events.WeightsLoading(num_bytes, 57_100_000_000, 10.0))
        out.truncate(0)
        view.tick()
        assert shown in ESCAPE.sub("", out.getvalue())


def test_plain_lines_of_loading_are_sparse(graph: Graph) -> None:
    view, out, err = plain_view(graph)
    for seconds in (3.0, 4.0, 12.0, 13.0, 14.0, 23.0):
        view.on_event(events.WeightsLoading(int(seconds * 1e9), 57_100_000_000, seconds))
    assert out.getvalue() == ""
    assert err.getvalue().splitlines() == [f"flowrt: loading weights {loaded} of 57.1 GB, 1.0 GB/s" for loaded in ("3.0", "13.0", "23.0")]


def test_a_loading_line_changes_in_place_on_a_terminal_and_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    lines: list[str] = []
    out = Terminal()
    line = LoadingLine(lines.append, OutputStream(out))
    line.clear()
    for loaded in (1, 2):
        line.show(events.WeightsLoading(loaded * 10**9, 5 * 10**9, float(loaded)))
    line.clear()
    line.clear()
    steps = out.getvalue().split("\r\x1b[K")
    assert steps == ["", "flowrt: loading weights 1.0 of 5.0 GB, 1.0 GB/s", "flowrt: loading weights 2.0 of 5.0 GB, 1.0 GB/s", ""]
    assert not lines


def test_the_process_that_waits_for_a_graph_shows_its_loading(capfd: pytest.CaptureFixture[str]) -> None:
    """The process that serves sends lines; `ready` is an empty one. Without it, it has ended."""
    lines = [msgspec.json.encode(events.WeightsLoading(loaded * 10**9, 5 * 10**9, 4.0)) + b"\n" for loaded in (1, 2)]
    for end, is_ready in ((b"\n", True), (b"", False)):
        reading, writing = os.pipe()
        os.write(writing, b"".join(lines) + end)
        os.close(writing)
        assert show_loading(reading) == is_ready
        assert capfd.readouterr().err == "flowrt: loading weights 1.0 of 5.0 GB, 0.2 GB/s\n", "the second line follows too soon"


def test_a_live_start_names_every_worker_and_its_progress(graph: Graph) -> None:
    view, out, _ = live_view(graph)
    view.on_event(events.ForkServerReady(1))
    view.on_event(events.WorkerLoading("attention.0", "x", 2, 6))
    view.on_event(events.WorkerListening("experts.1", 3 << 20))
    view.tick()
    shown = ESCAPE.sub("", out.getvalue())
    assert "0 of 3 connected" in shown
    assert re.search(r"attention\.0 +loading +\S+ +2/6", shown)
    assert re.search(r"experts\.1 +connecting +3\.0 MiB", shown)
    assert re.search(r"experts\.0 +waiting", shown)
    view.end()


def test_tables_are_the_same_figures_plain_and_framed(graph: Graph) -> None:
    report = report_of(graph, {"attention.0": 11}, {}, {"experts.0": 5 << 20}, 1.25, None)
    assert [process.holds for process in report.processes] == ["embed, attention, gate, head", "experts 0-3", "experts 4-7"]
    shown = []
    for terminal in (False, True):
        out = io.StringIO()
        print_tables(report, Figures.of([]), Console(file=out, force_terminal=terminal, width=80, color_system=None))
        shown.append(re.sub(r"[ ─]+", " ", out.getvalue()))
        assert max(map(cell_len, out.getvalue().split("\n"))) <= 80
    for text in ("experts.0 - experts 0-3 ", "5.0 MiB", "attention.0 experts.1", "time to first token - - -", "start: 1.25 s"):
        assert text in shown[0]
        assert text in shown[1]


def test_tables_break_between_words_only(graph: Graph) -> None:
    """The widest process that fits no line of 80: full pids, two transports, hundreds of gibibytes, many ranges of experts."""
    ids = "0-4,9-12,17,33,41-44,60,71,80,91,100-107,128-255"
    process = ProcessReport("attention.0", 4194303, f"embed, attention, experts {ids}", ("shm", "zmq"), 123 << 30, 1.0, 1, 1)
    report = replace(report_of(graph, {}, {}, {}, 1.25, None), processes=(process,))
    for width in (80, 100):
        out = io.StringIO()
        print_tables(report, Figures.of([]), Console(file=out, force_terminal=True, width=width, color_system=None))
        shown = out.getvalue().split("between processes")[0]
        words = set(re.split(r"[\s,]+", shown))
        assert {*ids.split(","), "embed", "attention", "shm", "zmq", "attention.0", "4194303", "GiB"} <= words
        assert max(map(cell_len, shown.split("\n"))) <= width


def test_the_table_of_processes_names_hosts_where_there_are_several(graph: Graph) -> None:
    known = ProcessReport("experts.0", 42, "experts 0-3", ("zmq",), 1 << 20, 0.5, 1, 1, "host.0")
    processes = (known, replace(known, name="experts.1", pid=0, host="host.11"))
    report = replace(report_of(graph, {}, {}, {}, 1.25, None), processes=processes)
    for width, rows in (
        (80, ["process pid host holds", "experts.0 42 host.0 experts 0-3", "experts.1 - host.11 experts 0-3"]),
        (60, ["process holds", "experts.0 experts 0-3", "experts.1 experts 0-3"]),
    ):
        out = io.StringIO()
        print_tables(report, Figures.of([]), Console(file=out, force_terminal=False, width=width))
        lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
        assert [next(line for line in lines if line.startswith(row)) for row in rows]


def test_doctor_breaks_between_words_on_a_terminal_and_nowhere_else() -> None:
    text = "needs an NVIDIA GPU and its driver (libcuda.so.1: cannot open shared object file); without one, use shm"
    checks = [Check("transport cuda", False, text, "install torch with CUDA"), Check("memory", True, "[1] GiB")]
    for terminal in (True, False):
        out = io.StringIO()
        report(checks, Console(file=out, force_terminal=terminal, width=60, color_system=None))
        lines = out.getvalue().split("\n")
        assert " ".join(f"no transport cuda {text} install torch with CUDA ok memory [1] GiB flowrt can run here".split()) == " ".join(
            out.getvalue().split()
        )
        if terminal:
            assert max(map(cell_len, lines)) <= 60
            assert lines[1].startswith(" " * 20)
        else:
            assert lines[0] == f"no   transport cuda  {text}"


def test_figures() -> None:
    first, second, third = record(0), record(1), record(2)
    for seconds in (1.0, 2.0, 4.0):
        first.add(TokenEvent(0, 0, (1,), "a"), seconds)
    first.add(EndEvent(0, "length"), 4.5)
    second.add(TokenEvent(1, 0, (1,), "b"), 3.0)
    third.end("error", "no")
    assert first.ttft_seconds == 1.0
    assert first.itl_seconds == [1.0, 2.0]
    figures = Figures.of([first, second, third])
    assert figures.ttft_seconds == Durations(mean=2.0, p50=2.0, p99=pytest.approx(2.98))
    assert figures.itl_seconds == Durations(mean=1.5, p50=1.5, p99=pytest.approx(1.99))
    assert (figures.num_tokens, figures.seconds, figures.tokens_per_second) == (4, 4.5, 4 / 4.5)
    first.end("abort")
    assert first.finish_reason == "length", "a request ends once"


def test_the_record_replaces_a_file_whole(tmp_path: Path) -> None:
    target = tmp_path / "real.json"
    target.write_text("before")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    value = {"requests": [record().as_json()], "summary": {"x": 1}}
    write_file(str(link), record_text(value))
    written = json.loads(target.read_text())
    assert written["requests"][0]["itl_seconds"] == {"mean": None, "p50": None, "p99": None}
    assert written["summary"] == {"x": 1}
    assert link.is_symlink()
    with pytest.raises(TypeError):
        record_text({"requests": [{"x": object()}], "summary": {}})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_an_output_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "real.json"
    target.write_text("before")

    def fill_disk(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fill_disk)
        with pytest.raises(UserError, match="No space left on device"):
            write_file(str(target), "after")
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["real.json"]
    stdout = io.StringIO()
    write_file("-", "text", stdout)
    assert stdout.getvalue() == "text"
    with pytest.raises(UserError, match="is a folder"):
        check_writable(str(tmp_path))


def test_output_without_reader_goes_silent_once() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    calls: list[int] = []
    output = OutputStream(Gone(), lambda: calls.append(1))
    output.write("a")
    output.write("b")
    output.flush()
    assert calls == [1]
    assert output.is_broken
    assert not output.has_lost_output  # its reader did not want it


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("I/O operation on closed file")])
def test_an_output_that_cannot_be_written_gives_the_reason_and_does_not_raise(error: Exception) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise error

    output = OutputStream(Full())
    output.write("a")
    output.flush()
    assert output.error is error
    assert output.has_lost_output


def test_an_output_that_was_closed_from_the_start() -> None:
    output = OutputStream(None)
    output.write("a")
    output.flush()
    assert (output.is_broken, output.has_lost_output, output.isatty()) == (True, True, False)
