"""`flowrt run`: start a graph, answer prompts, report the run, end it.

Answers go to standard output, progress and tables to standard error. Exit codes: 0 all requests finished; 1 a failure after the start;
2 bad input, and nothing was started; 3 a worker died; 130 interrupted; 141 the reader of standard output left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import flowrt
from flowrt.actors.control import Statistics
from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.api import RunningGraph, read_graph
from flowrt.bench.peers.child import new_event_loop
from flowrt.chaos.run_faults import RunFaults
from flowrt.cli.live import LiveView
from flowrt.cli.options import RunOptions
from flowrt.cli.prompts import PromptRequest, checked_template_kwargs, checked_text, read_prompts
from flowrt.cli.record import Figures, Record, cut_sentence, degraded_sentence, record_text
from flowrt.cli.report import RunReport, report_of
from flowrt.cli.tables import new_console, print_tables
from flowrt.cli.text import OutputStream, visible
from flowrt.cli.view import PlainView, View
from flowrt.errors import BAD_INPUT, FAILURE, INTERRUPTED, NO_READER, SUCCESS, NotRunningError, UserError, WorkerDiedError
from flowrt.launcher import events
from flowrt.launcher.launcher import STOP_SECONDS
from flowrt.launcher.start_check_process import check_start
from flowrt.launcher.trace_collector import TraceCollector
from flowrt.observe import set_log_level
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Seams
from flowrt.system.output_file import STDOUT, LostOutputError, check_writable, write_file
from flowrt.system.signals import ending_signals, kept_signals
from flowrt.trace.perfetto_file import check_trace_file, write_trace
from flowrt.trace.summary import summarize, summary_lines

TICK_SECONDS = 0.1
STUCK_SECONDS = STOP_SECONDS + 5.0  # after a request to end at once: longer than the time that workers have to stop and be killed


def run(graph: Path, options: RunOptions, given: Mapping[str, Any]) -> int:
    """Run the command; returns the exit code. `given`: the sampling parameters of the command line. Raises UserError for mistakes that are
    found before anything has started."""
    set_log_level(options.log_level)
    if options.json is not None:
        check_writable(options.json)
    if options.trace is not None:
        check_trace_file(options.trace)
    stdout, stderr = OutputStream(sys.stdout), OutputStream(sys.stderr)
    if stdout.is_broken and options.json in (None, STDOUT):
        raise lost_output(stdout)
    session = RunSession(graph, options, given, stdout, stderr)
    with kept_signals(), asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(session.run())
    return session.finish()


def given_requests(options: RunOptions, params: SamplingParams) -> list[PromptRequest]:
    """The requests of --prompt and --prompts. Raises UserError."""
    if options.chat_template_kwargs is not None and not options.chat:
        raise UserError("--chat-template-kwargs needs --chat")
    checked_template_kwargs("{}" if options.chat_template_kwargs is None else options.chat_template_kwargs)
    requests = [PromptRequest(checked_text(prompt), params) for prompt in options.prompt]
    return requests if options.prompts is None else requests + read_prompts(options.prompts, params)


def prompt_arguments(prompt: str | tuple[int, ...], options: RunOptions) -> dict[str, Any]:
    """The prompt as arguments of a call, with --chat a text as a chat."""
    if not options.chat or not isinstance(prompt, str):
        return {"prompt": prompt}
    kwargs = checked_template_kwargs("{}" if options.chat_template_kwargs is None else options.chat_template_kwargs)
    return {"messages": [{"role": "user", "content": prompt}], "chat_template_kwargs": kwargs}


class RunSession:
    """One run of the command: `run` in the loop, then `finish`."""

    def __init__(self, path: Path, options: RunOptions, given: Mapping[str, Any], stdout: OutputStream, stderr: OutputStream) -> None:
        self._path, self._options, self._seams = path, options, Seams()
        self._stdout, self._stderr = stdout, stderr
        self._failure: UserError | WorkerDiedError | None = None
        self._interrupt_code: int | None = None
        self._has_started = self._draining = False
        self._requests: dict[int, asyncio.Task[None]] = {}  # by index of the record
        self._body: asyncio.Task[None] | None = None
        self._ready_seconds = 0.0
        self._start_seconds: float | None = None
        self._loaded_bytes: dict[str, int] = {}
        self._statistics: dict[str, Statistics] = {}
        self._up_seconds: float | None = None
        loaded = read_graph(path, options.overrides, options.model)
        check_start(loaded)
        self._trace = TraceCollector(self._seams.machine_now) if options.trace is not None else None
        self._graph = RunningGraph(
            loaded, self._seams, options.log_level, self._on_event, self._on_line, self._trace, generation_config=options.generation_config
        )
        graph = self._graph.graph
        if graph.model is None:
            raise UserError(f"{path}: this graph serves no model; call it from Python: await graph(name=tensor)")
        params = SamplingParams(**{**self._graph.sampling_defaults, **given})
        requests = given_requests(options, params) or [PromptRequest(prompt, params) for prompt in graph.prompts]
        if not requests:
            raise UserError(f"{path}: there is no prompt; give --prompt TEXT or --prompts FILE, or write prompts: in a graph file")
        if any(isinstance(request.prompt, str) for request in requests):
            self._graph.require_tokenizer()
            if options.chat and self._graph.tokenizer is not None:
                self._graph.tokenizer.check_chat_template()
        if self._graph.tokenizer is not None and not options.chat and not all(map(self._graph.tokenizer.encode, options.prompt)):
            raise UserError("a --prompt is empty: the model's tokenizer makes no token of it; give it a text")
        self._records = [Record(index, each) for index, each in enumerate(requests)]
        self._chaos = RunFaults(options.chaos, self._graph, self._seams.clock, self._log_fault) if options.chaos is not None else None
        self._completed = asyncio.Event()  # all requests have ended
        answers = stderr if options.json == STDOUT else stdout  # with --json - standard output is the file
        console, has_tokenizer = new_console(answers), self._graph.tokenizer is not None
        self._view: View
        if console.is_terminal and not options.quiet:
            self._view = LiveView(console, stderr, graph, has_tokenizer, path.name)
        else:
            self._view = PlainView(answers, stderr, graph, has_tokenizer, options.quiet)

    async def run(self) -> None:
        """Run the graph until all its processes have ended. Raises only bugs."""
        before = signal.signal(signal.SIGALRM, self._on_stuck)  # not a handler of the loop, which may itself be stuck
        self._stdout.on_broken = self._on_no_reader
        try:
            with ending_signals(self._on_signal):
                self._view.start()
                async with asyncio.TaskGroup() as tasks:
                    self._body = tasks.create_task(self._serve(), name="run")
                    ticker = tasks.create_task(self._tick(), name="ticker")
                    self._body.add_done_callback(lambda _: ticker.cancel())
        finally:
            for record in [record for record in self._records if not record.is_ended]:
                if self._failure is not None:
                    record.end("error", str(self._failure))
                else:
                    record.end("abort")
                    if self._start_seconds is not None:
                        self._view.on_text(record, "")
            self._view.end()
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    def finish(self) -> int:
        """Write the trace and the record, and print the tables; returns the exit code."""
        trace_lines = self._write_trace()
        code = self._code()
        figures = Figures.of(self._records)
        report = report_of(self._graph.graph, self._graph.pids, self._statistics, self._loaded_bytes, self._start_seconds, self._up_seconds)
        if self._options.json is not None and code != BAD_INPUT:
            try:
                write_file(self._options.json, record_text(self._json(figures, report, code)), self._stdout.as_file())
            except LostOutputError as error:
                self._failure = self._failure or error
        if self._statistics:
            self._print_report(report, figures)
        if trace_lines and not self._options.quiet:
            new_console(self._stderr).print("", *trace_lines, sep="\n", markup=False, soft_wrap=True)
        self._stdout.flush()
        if self._stdout.has_lost_output and self._failure is None and self._options.json in (None, STDOUT):
            self._failure = lost_output(self._stdout)
        elif self._stdout.is_broken and self._options.json == STDOUT:
            self._interrupt_code = self._interrupt_code or NO_READER
        if self._failure is not None:
            self._print_failure(self._failure)
        return self._code()

    def _print_report(self, report: RunReport, figures: Figures) -> None:
        """The tables, unless --quiet is given; what is wrong with answers or faults in any case."""
        console = new_console(self._stderr)
        if not self._options.quiet:
            print_tables(report, figures, console)
        limits = self._graph.graph.group_limits()
        for sentence in (degraded_sentence(self._records), cut_sentence(self._records, self._graph.max_model_len, limits.max_tokens)):
            if sentence is not None:
                console.print(sentence, markup=False, soft_wrap=True)
        if self._chaos is not None and not (self._options.quiet and self._chaos.all_injected):
            num_complete = sum(record.finish_reason in ("stop", "length") for record in self._records)
            console.print("\n".join(self._chaos.sentences(len(self._records), num_complete)), markup=False, soft_wrap=True)

    def _write_trace(self) -> list[str]:
        """Write the trace, also that of a run which has failed or was interrupted. Returns its summary."""
        if self._options.trace is None or self._trace is None or not self._has_started:
            return []
        traces = self._trace.traces()
        try:
            write_trace(self._options.trace, traces, self._graph.graph)
        except LostOutputError as error:
            self._failure = self._failure or error
        return summary_lines(summarize(traces))

    # In the loop.

    async def _serve(self) -> None:
        try:
            async with self._graph as graph:
                self._view.begin(self._records)
                slots = asyncio.Semaphore(graph.max_requests)
                async with asyncio.TaskGroup() as all_tasks:
                    if self._chaos is not None:
                        all_tasks.create_task(self._chaos.run(self._completed), name="chaos")
                    async with asyncio.TaskGroup() as tasks:
                        for record in self._records:
                            task = tasks.create_task(self._follow(graph, record, slots), name=f"request {record.index}")
                            self._requests[record.index] = task
                    self._completed.set()
                if self._failure is None:
                    self._up_seconds = self._seams.clock.now() - self._ready_seconds
            self._statistics = self._graph.final_statistics
        except (UserError, WorkerDiedError) as error:
            self._failure = self._failure or error

    async def _follow(self, graph: RunningGraph, record: Record, slots: asyncio.Semaphore) -> None:
        """Run one request from submission to its end. A failure of the whole run is kept for `_serve`."""
        now = self._seams.clock.now
        async with slots:
            if self._draining or self._failure is not None:
                return
            try:
                record.submitted_seconds = now()
                index = await graph.submit(params=record.request.params, **prompt_arguments(record.request.prompt, self._options))
                record.prompt_token_ids = graph.prompt_token_ids(index)
                async for event in graph.follow(index):
                    record.add(event, now())
                    if isinstance(event, EndEvent) or (event.choice == 0 and (event.text or isinstance(event, TokenEvent))):
                        self._view.on_text(record, event.text)
            except (UserError, WorkerDiedError) as error:
                self._failure = self._failure or error
            except NotRunningError:  # another call raises the run's failure
                pass

    async def _tick(self) -> None:
        while True:
            self._view.tick()
            await self._seams.clock.sleep(TICK_SECONDS)

    def _on_event(self, event: events.Event) -> None:
        self._has_started = True
        if self._chaos is not None:
            self._chaos.observer.on_event(event)
        match event:
            case events.WorkerListening(name=name, resident_bytes=resident_bytes):
                self._loaded_bytes[name] = resident_bytes
            case events.Ready(seconds):
                self._start_seconds, self._ready_seconds = seconds, self._seams.clock.now()
        self._view.on_event(event)

    def _on_line(self, process: str, line: str) -> None:
        if self._chaos is not None and self._chaos.observer.take_line(process, line):
            return
        self._view.on_line(process, line)

    def _log_fault(self, text: str) -> None:
        self._view.on_line("chaos", text)

    # Interrupts.

    def _on_signal(self, number: int) -> None:
        """The first Ctrl-C lets requests that have a token finish and ends the others; any other signal ends the run at once."""
        num_running = sum(record.is_running for record in self._records)
        waiting = [record for record in self._records if not record.is_running and not record.is_ended]
        self._interrupt_code = INTERRUPTED
        if number == signal.SIGINT and not self._draining and num_running:
            self._draining = True
            for record in waiting:
                self._requests[record.index].cancel()
            text = "1 running request finishes" if num_running == 1 else f"{num_running} running requests finish"
            text += f", {len(waiting)} waiting {'is' if len(waiting) == 1 else 'are'} refused" if waiting else ""
            self._view.note(f"interrupted: {text}; press Ctrl-C again to end at once")
        else:
            self._view.note("interrupted: ending at once")
            self._end_now()

    def _on_no_reader(self) -> None:
        """Handle a closed standard output; the --json file may still be written."""
        if self._options.json is None and self._stdout.has_lost_output:
            self._failure = self._failure or lost_output(self._stdout)
            self._end_now()
        elif self._options.json is None:
            self._interrupt_code = self._interrupt_code or NO_READER
            self._end_now()

    def _end_now(self) -> None:
        if self._body is not None:
            self._body.cancel()
            signal.setitimer(signal.ITIMER_REAL, STUCK_SECONDS)

    def _on_stuck(self, number: int, frame: FrameType | None) -> None:
        """A call in a compute thread of this process does not return, and threads cannot be stopped: exit without it."""
        code = self._code()
        try:
            self._view.note(f"a computation has not returned for {STUCK_SECONDS:g} s; leaving without it")
            self._view.end()
            self._stdout.flush()
            self._stderr.flush()
        finally:
            os._exit(code)

    # After the run.

    def _code(self) -> int:
        if self._failure is not None:
            return FAILURE if self._has_started and isinstance(self._failure, UserError) else self._failure.exit_code
        if self._interrupt_code is not None:
            return self._interrupt_code
        if self._chaos is not None and not self._chaos.all_injected:
            return FAILURE
        return FAILURE if any(record.finish_reason == "error" for record in self._records) else SUCCESS

    def _json(self, figures: Figures, report: RunReport, code: int) -> dict[str, object]:
        failure, died = self._failure, None
        if isinstance(failure, WorkerDiedError):
            died = {"process": failure.process, "reason": failure.reason, "output_tail": list(failure.output_tail)}
        return {
            "requests": [record.as_json() for record in self._records],
            "summary": {
                "version": flowrt.__version__,
                "graph": str(self._path),
                "exit_code": code,
                "interrupted": self._interrupt_code is not None,
                "died": died,
                **({"chaos": self._chaos.as_json()} if self._chaos is not None else {}),
                **asdict(figures),
                **asdict(report),
            },
        }

    def _print_failure(self, failure: UserError | WorkerDiedError) -> None:
        lines = [f"flowrt: error: {visible(str(failure))}"]
        if isinstance(failure, WorkerDiedError) and failure.output_tail:
            lines += [f"flowrt: the last lines of {failure.process}:", *(f"  {visible(line)}" for line in failure.output_tail)]
        self._stderr.write_now("\n".join(lines) + "\n")


def lost_output(stdout: OutputStream) -> LostOutputError:
    reason = stdout.error.strerror if isinstance(stdout.error, OSError) else stdout.error
    return LostOutputError(f"standard output cannot be written ({reason}); give --json FILE, or send it elsewhere")
