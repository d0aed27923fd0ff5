"""A running graph in the event loop of the caller: starts its processes, sends it requests, ends it.

It imports torch only for graphs of user operators, whose inputs and outputs are torch tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from flowrt.actors.control import Statistics
from flowrt.actors.emulated_links import check_machine
from flowrt.actors.outputs import ClientEvent
from flowrt.api.arguments import CheckedPrompt, Messages, Prompt, RequestKeywords, TextPrompt, checked_prompt, each_input, split_keywords
from flowrt.api.log_identity import open_request_log
from flowrt.api.opened_model import open_model
from flowrt.api.sampling_defaults import AUTO
from flowrt.api.served import StateReports, front_end_services, max_model_len
from flowrt.errors import TokenizerError, UserError
from flowrt.gateway.completion import Completion
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.launcher.launcher import LaunchOptions
from flowrt.launcher.run import Run
from flowrt.launcher.start_checks import memory_needs
from flowrt.launcher.tokenizer_files import missing_tokenizer
from flowrt.launcher.trace_collector import TraceCollector
from flowrt.reliability.health import STALL_SECONDS, Health
from flowrt.sampling_params import SamplingParams, checked_params
from flowrt.seams import Seams
from flowrt.serving.front_end_settings import ServeOptions
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tokenizer_process import TokenizerProcess
from flowrt.trace.perfetto_file import write_trace


class RunningGraph:
    """A running graph and its processes. Use `generate` for a model; call the graph or use `stream` for a graph of user operators."""

    def __init__(
        self,
        graph: Graph,
        seams: Seams,
        log_level: str = "warning",
        on_event: Callable[[events.Event], None] | None = None,
        on_line: Callable[[str, str], None] | None = None,
        trace: TraceCollector | None = None,
        serving: ServeOptions | None = None,
        resumes: bool = False,
        generation_config: str = AUTO,
    ) -> None:
        self._on_event = on_event or events.print_news
        self._model = model = open_model(graph, generation_config, has_chats=serving is not None)
        self._tokenizer_process = model.tokenizer_process if model is not None else None
        self.max_model_len = max_model_len(graph, model.config) if model is not None else 0  # tokens of a prompt and its output together
        self._trace, self._starts_tokenizer, self._opened = trace, serving is None, False
        services = {} if serving is None or model is None else front_end_services(graph, model.config, serving, model.sampling.values)
        options = LaunchOptions(log_level, is_traced=trace is not None, memory_needs=memory_needs(graph))
        self.run = Run(
            graph,
            seams,
            options if on_line is None else replace(options, on_line=on_line),
            model=model.served(graph, serving) if model is not None else None,
            reports=StateReports(services, serving.model_name) if serving is not None else None,
            open_log=partial(open_request_log, resumes=resumes),
            trace=trace,
            on_event=self._on_event,
        )
        self.launcher, self._endpoint, self._clock = self.run.launcher, self.run.endpoint, seams.clock

    @property
    def graph(self) -> Graph:
        """The graph as it runs: every edge has its transport."""
        return self.launcher.graph

    @property
    def resumed(self) -> tuple[int, ...]:
        """The numbers of the requests of an earlier launcher that this one continues, for `follow`."""
        return self.run.resumed

    @property
    def final_statistics(self) -> dict[str, Statistics]:
        """The last counters of each worker, by worker name; empty until the graph has been closed without a failure."""
        return self.run.final_statistics

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._model.tokenizer if self._model is not None else None

    def require_tokenizer(self) -> TokenizerProcess:
        """What encodes texts and messages. Raises TokenizerError when the model's directory has no tokenizer."""
        if self._tokenizer_process is None:
            raise TokenizerError(missing_tokenizer(self.graph.model.path if self.graph.model is not None else "this graph"))
        return self._tokenizer_process

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The values of sampling parameters that a call does not give: those of the model's generation_config.json."""
        return self._model.sampling.values if self._model is not None else {}

    @property
    def max_requests(self) -> int:
        """The maximum number of active requests; the gateway refuses further ones."""
        return self.run.require_requests().gateway.admission.max_requests

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by worker name."""
        return self.launcher.pids

    async def __aenter__(self) -> Self:
        if self._opened:
            raise UserError("this graph was opened before; call flowrt.open again for another run")
        self._opened = True
        for notice in self._model.notices() if self._model is not None else ():
            self._on_event(notice)
        await check_machine(self.graph, self.launcher.seams)
        if self._tokenizer_process is not None and self._starts_tokenizer:  # it loads while the workers load
            self._tokenizer_process.start()
        try:
            await self.run.__aenter__()
        except BaseException:
            self._close_tokenizer()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.launcher.opened_task()
        try:
            await self.run.__aexit__(kind, error, trace)
        finally:
            self._close_tokenizer()
            if self._trace is not None and self._trace.file:
                write_trace(self._trace.file, self._trace.traces(), self.graph)

    # --- a model --------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> AsyncGenerator[ClientEvent, None]:
        """Submit a request and yield its events; the arguments and errors are those of `complete`. Closing it early cancels the request.

        The events are a TokenEvent for each new token, with n > 1 a ChoiceEvent for each choice that ends, then exactly one EndEvent.

            async for event in graph.generate("What is 1 + 2?", max_tokens=8):
                print(event.text, end="")
        """
        return self._generate(*self._checked(prompt, params, messages, keywords))

    async def submit(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> int:
        """Submit a request and return its number for `follow`; the arguments and errors are those of `complete`.

        The request runs whether or not it is followed. Of ended requests that nothing has followed, the newest 1024 are kept.

            number = await graph.submit("What is 1 + 2?", max_tokens=8)
            events = [event async for event in graph.follow(number)]
        """
        return await self._submit(*self._checked(prompt, params, messages, keywords))

    def prompt_token_ids(self, index: int) -> tuple[int, ...]:
        """The prompt token ids of the submitted request with this number; empty when it has none. UserError after it was followed.

        number = await graph.submit("What is 1 + 2?", max_tokens=8)
        print(graph.prompt_token_ids(number))
        """
        return self.run.require_requests().prompt_token_ids(index)

    def follow(self, index: int) -> AsyncGenerator[ClientEvent, None]:
        """Yield the events of the submitted request with this number from its first. Closing it early cancels the request.

        Raises UserError for an unknown number or a second reader, WorkerDiedError when the run fails.

            number = await graph.submit("What is 1 + 2?", max_tokens=8)
            events = [event async for event in graph.follow(number)]
        """
        return self.run.require_requests().follow(index)

    async def complete(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Completion:
        """Submit a request and return its whole output.

        prompt: text, or token ids.
        messages: instead of a prompt, a chat in the form of OpenAI's API ({"role", "content"} each); the model's chat template renders it.
            Keywords beside it: tools, documents, add_generation_prompt, continue_final_message; chat_template_kwargs has further names.
        params: a SamplingParams, which is used as it is; or write its parameters as keywords (max_tokens, temperature, ...). Those that are
        not given have the values of the model's generation_config.json, else the defaults of SamplingParams, which are greedy.

        Raises ArgumentError for wrong arguments, TokenizerError for a text when the model has no tokenizer, WorkerDiedError when a death
        ends the run. A request that this graph cannot serve has finish_reason "error"; its `text` raises the reason as RequestError.

            completion = await graph.complete("What is 1 + 2?", max_tokens=8)
            completion = await graph.complete(messages=[{"role": "user", "content": "Hello"}], temperature=0.7)
        """
        index = await self.submit(prompt, params, messages=messages, **keywords)
        prompt_token_ids = self.prompt_token_ids(index)
        return Completion.of(prompt_token_ids, [event async for event in self.follow(index)])

    # --- a graph of your own -----------------------------------------------------------------------------------------------------

    async def __call__(self, **tensors: Any) -> Any:
        """Send one tensor per input through the graph. Returns the output tensor, or a dict when there are several.

        Raises OperatorError when an operator fails in this call; other calls go on. Cancelling drops the call wherever it is.
        """
        if self._endpoint is None:
            raise UserError("this graph has no input of its own; use generate()")
        self.launcher.opened_task()
        if (failure := self.launcher.failure) is not None:
            self.launcher.was_failure_raised = True
            raise failure
        progress = self.launcher.health_record.progress
        progress.opened(self._clock.now())
        try:
            outputs: dict[str, Any] = await self._endpoint.call(tensors)
        except Exception as error:
            self.launcher.was_failure_raised |= error is self.launcher.failure
            raise
        finally:
            progress.ended(self._clock.now())
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    async def stream(self, inputs: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
        """Send many inputs, keep limits.in_flight of them in flight, and yield the outputs in order.

        inputs: tensors, when the graph has one input, or dicts of tensors by input; an iterable or an asynchronous one.
        Raises as a call of the graph. Closing it early cancels the inputs in flight.

            async for out in graph.stream([torch.ones(2, 64), torch.zeros(2, 64)]):
                print(out.sum())
        """
        window: list[asyncio.Task[Any]] = []
        try:
            async for item in each_input(inputs):
                window.append(asyncio.get_running_loop().create_task(self(**self._named(item))))
                if len(window) >= self.graph.limits.in_flight:
                    yield await window[0]
                    window.pop(0)
            while window:
                yield await window[0]
                window.pop(0)
        finally:
            for task in window:
                task.cancel()
            await asyncio.gather(*window, return_exceptions=True)

    # --- the run -----------------------------------------------------------------------------------------------------------------

    async def statistics(self) -> dict[str, Statistics]:
        """The counters of each worker, by worker name. Raises NotRunningError, or the failure that ended the run.

        for name, counters in (await graph.statistics()).items():
            print(name, counters)
        """
        return await self.launcher.statistics()

    def health(self, stall_seconds: float = STALL_SECONDS) -> Health:
        """Whether work progresses: not ok when requests are open and none has progressed for `stall_seconds`, when an expert has no
        replica, and before the run is ready and after its end. Never waits.

            if not graph.health().ok:
                print(graph.health().problems)
        """
        return self.launcher.health(stall_seconds)

    async def end_serving(self, seconds: float) -> None:
        """Admit no new requests and wait until all have ended, those of front ends too. After `seconds`, end those that are left.

        await graph.end_serving(seconds=30)
        """
        await self.run.end_serving(seconds)

    async def drain(self) -> None:
        """Admit no new requests and wait until all running ones have ended. Raises NotRunningError, or the failure that ended the run.

        await graph.drain()
        print(await graph.statistics())
        """
        await self.run.drain()

    # --- inside ------------------------------------------------------------------------------------------------------------------

    def _close_tokenizer(self) -> None:
        if self._tokenizer_process is not None:
            self._tokenizer_process.close()

    def _checked(
        self, prompt: Prompt | None, params: SamplingParams | None, messages: Messages | None, keywords: RequestKeywords
    ) -> tuple[CheckedPrompt, SamplingParams]:
        self.run.require_requests()
        sampling, chat = split_keywords(keywords)
        checked = checked_prompt(prompt, messages, self.max_model_len, chat)
        if isinstance(checked, TextPrompt):
            self.require_tokenizer()
        return checked, checked_params(params, sampling, self.sampling_defaults)

    async def _generate(self, prompt: CheckedPrompt, params: SamplingParams) -> AsyncGenerator[ClientEvent, None]:
        async with aclosing(self.follow(await self._submit(prompt, params))) as events_of_request:
            async for event in events_of_request:
                yield event

    async def _submit(self, prompt: CheckedPrompt, params: SamplingParams) -> int:
        self.launcher.check_running()
        return await self.run.require_requests().submit(params, partial(self._encode, prompt, params))

    async def _encode(self, prompt: CheckedPrompt, params: SamplingParams) -> Sequence[int]:
        if params.structured_outputs is not None or params.bad_words:
            await self.require_tokenizer().check(params)
        if not isinstance(prompt, TextPrompt):
            return prompt
        return await self.require_tokenizer().encode(prompt.content, max_tokens=self.max_model_len)

    def _named(self, item: Any) -> dict[str, Any]:
        if isinstance(item, Mapping):
            return dict(item)
        if len(ports := self._endpoint.ports if self._endpoint is not None else []) != 1:
            raise UserError(f"this graph takes {', '.join(ports)}; give a dict of tensors by name")
        return {ports[0]: item}
