"""`flowrt run --attach NAME`: answers prompts with a graph that is up."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

import flowrt
from flowrt.actors.outputs import EndEvent, TokenEvent
from flowrt.api import AttachedGraph, attach
from flowrt.cli.options import RunOptions
from flowrt.cli.prompts import PromptRequest
from flowrt.cli.record import Figures, Record, degraded_sentence, record_text
from flowrt.cli.run import given_requests, lost_output, prompt_arguments
from flowrt.cli.tables import new_console, print_latency
from flowrt.cli.text import OutputStream
from flowrt.cli.view import AnswerView
from flowrt.errors import FAILURE, INTERRUPTED, NO_READER, SUCCESS, NotRunningError, UserError, named_error
from flowrt.sampling_params import SamplingParams
from flowrt.seams import RealClock
from flowrt.system.output_file import STDOUT, check_writable, write_file
from flowrt.system.signals import ending_signals


def run_attached(path: Path | None, options: RunOptions, given: Mapping[str, Any]) -> int:
    """Run the command; returns the exit code. Raises UserError before anything is submitted."""
    for name, value in (
        ("a graph file", path),
        ("--model", options.model),
        ("--set", options.overrides),
        ("--trace", options.trace),
        ("--chaos", options.chaos),
        ("--generation-config", "" if options.generation_config == "auto" else options.generation_config),
    ):
        if value:
            raise UserError(f"{name} cannot be given with --attach: the graph is up already")
    if not options.prompt and options.prompts is None:
        raise UserError("there is no prompt; give --prompt TEXT or --prompts FILE")
    if options.json is not None:
        check_writable(options.json)
    try:
        graph = attach(options.attach)
    except NotRunningError as error:
        raise UserError(str(error)) from None
    requests = given_requests(options, SamplingParams(**{**graph.description.sampling_defaults, **given}))
    return AttachedRun(graph, options, requests).run()


class AttachedRun:
    """One run of the command."""

    def __init__(self, graph: AttachedGraph, options: RunOptions, requests: Sequence[PromptRequest]) -> None:
        self._graph, self._options, self._clock = graph, options, RealClock()
        self._stdout, self._stderr = OutputStream(sys.stdout), OutputStream(sys.stderr)
        if self._stdout.is_broken and options.json in (None, STDOUT):
            raise lost_output(self._stdout)
        self._records = [Record(index, each) for index, each in enumerate(requests)]
        self._view = AnswerView(self._stderr if options.json == STDOUT else self._stdout, self._stderr, has_tokenizer=True)
        self._failure: NotRunningError | None = None

    def run(self) -> int:
        code = asyncio.run(self._run())
        self._view.end()
        for record in self._records:
            record.end("abort")
        self._stdout.flush()
        if self._stdout.is_broken and self._options.json is None:
            return self._code_of_lost_output()
        figures = Figures.of(self._records)
        if self._failure is not None:
            self._stderr.write_now(f"flowrt: error: {self._failure}\n")
        elif not self._options.quiet:
            console = new_console(self._stderr)
            print_latency(figures, console)
            if (degraded := degraded_sentence(self._records)) is not None:
                console.print(Text(degraded), soft_wrap=True)
        if self._options.json is not None:
            described = self._graph.description
            summary = {"version": flowrt.__version__, "graph": described.graph, "attached": described.name, "exit_code": code}
            text = record_text({"requests": [record.as_json() for record in self._records], "summary": summary | asdict(figures)})
            write_file(self._options.json, text, self._stdout.as_file())
            if self._stdout.is_broken and self._options.json == STDOUT:
                return self._code_of_lost_output()
        return code

    def _code_of_lost_output(self) -> int:
        """Raises LostOutputError unless the reader of standard output has left."""
        if self._stdout.has_lost_output:
            raise lost_output(self._stdout)
        return NO_READER

    async def _run(self) -> int:
        body = asyncio.current_task()
        assert body is not None
        self._view.begin(self._records)
        slots = asyncio.Semaphore(self._graph.description.max_requests)

        def on_signal(number: int) -> None:
            body.cancel()

        if self._options.json is None:  # else the answers go into the record
            self._stdout.on_broken = body.cancel
        with ending_signals(on_signal):
            try:
                async with asyncio.TaskGroup() as tasks:
                    for record in self._records:
                        tasks.create_task(self._follow(record, slots), name=f"request {record.index}")
            except asyncio.CancelledError:
                return INTERRUPTED
            except ExceptionGroup as group:
                if not isinstance(error := named_error(group), NotRunningError):
                    raise
                self._failure = error
        is_failed = self._failure is not None or any(record.finish_reason == "error" for record in self._records)
        return FAILURE if is_failed else SUCCESS

    async def _follow(self, record: Record, slots: asyncio.Semaphore) -> None:
        async with slots:
            now = self._clock.now
            record.submitted_seconds = now()
            request = self._graph.request(params=record.request.params, **prompt_arguments(record.request.prompt, self._options))
            async for event in request.events():
                record.prompt_token_ids = request.prompt_token_ids
                record.add(event, now())
                if isinstance(event, EndEvent) or (event.choice == 0 and (event.text or isinstance(event, TokenEvent))):
                    self._view.on_text(record, event.text)
