"""The Python API: open a graph, send it requests, close it.

It imports torch only for graphs of user operators, whose inputs and outputs are torch tensors.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from flowrt.actors.control import Control, Statistics
from flowrt.actors.emulated_links import check_machine
from flowrt.errors import UserError, shown
from flowrt.gateway.completion import Choice, Completion
from flowrt.gateway.gateway import ClientEvent, Gateway
from flowrt.gateway.requests import Requests
from flowrt.graph.builtin import SOURCE
from flowrt.graph.facts import ModelFacts
from flowrt.graph.file import load_graph
from flowrt.graph.model import GATEWAY, INPUT, OUTPUT, Graph
from flowrt.launcher import events
from flowrt.launcher.launcher import Launcher
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelConfig
from flowrt.reliability.health import STALL_SECONDS, Health
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Seams
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tokenizer_process import TokenizerProcess

__all__ = ["Choice", "Completion", "Prompt", "RunningGraph", "generate", "open_graph", "read_graph"]

Prompt = str | Sequence[int]


def read_graph(path: Path | str, overrides: Iterable[str] = (), model: Path | str | None = None) -> Graph:
    """Read, check and expand a graph file. Raises GraphError of one line."""
    return load_graph(path, overrides, model, lambda directory: ModelFacts.of(read_model_config(directory)))


def open_graph(
    graph: Path | str | Graph,
    *,
    overrides: Iterable[str] = (),
    model: Path | str | None = None,
    seams: Seams | None = None,
    log_level: str = "warning",
    on_event: Callable[[events.Event], None] | None = None,
    on_line: Callable[[str, str], None] | None = None,
) -> RunningGraph:
    """Open a graph: `async with flowrt.open("graph.yaml") as graph:` starts its processes on entry and ends them on exit.

    `overrides` are "path=value" as for --set; `model` replaces the file's model directory. `on_event` receives events of the start and of
    deaths (flowrt.launcher.events; by default deaths go to stderr), `on_line` (process, line) of each process's output. Raises GraphError.
    """
    loaded = graph if isinstance(graph, Graph) else read_graph(graph, overrides, model)
    return RunningGraph(loaded, seams or Seams(), log_level, on_event, on_line)


class RunningGraph:
    """A running graph and its processes. Use `generate` for a model; call the graph or use `stream` for a graph of user operators."""

    def __init__(
        self,
        graph: Graph,
        seams: Seams,
        log_level: str = "warning",
        on_event: Callable[[events.Event], None] | None = None,
        on_line: Callable[[str, str], None] | None = None,
    ) -> None:
        self._on_event = on_event or events.print_news
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_process: TokenizerProcess | None = None
        self._config: ModelConfig | None = None
        self._endpoint: Any = None
        hosted: dict[str, Any] = {}
        gateway = self._open_model(graph, seams) if graph.model is not None else None
        if INPUT in graph.nodes or OUTPUT in graph.nodes:
            self._endpoint = importlib.import_module("flowrt.workers.endpoint").Endpoint(graph)
            hosted[GATEWAY] = self._endpoint.run
        self.launcher = Launcher(
            graph, seams, log_level=log_level, on_event=self._note, on_control=self._on_control, on_line=on_line, hosted=hosted
        )
        self._clock = seams.clock
        self._progress = self.launcher.health_record.progress
        self._requests = Requests(gateway, self.launcher.send, self._progress, seams.clock) if gateway is not None else None
        self._opened = False
        self._failure: Exception | None = None
        self.final_statistics: dict[str, Statistics] = {}

    @property
    def graph(self) -> Graph:
        """The graph as it runs: every edge has its transport."""
        return self.launcher.graph

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def max_requests(self) -> int:
        """The maximum number of active requests; the gateway refuses further ones."""
        return self._of_model().gateway.max_requests

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by worker name."""
        return self.launcher.pids

    async def __aenter__(self) -> Self:
        if self._opened:
            raise UserError("this graph was opened before; call flowrt.open again for another run")
        self._opened = True
        await check_machine(self.graph, self.launcher.seams)
        try:
            if self._tokenizer_process is not None:  # it loads while the workers load
                self._tokenizer_process.start()
            await self.launcher.__aenter__()
        except BaseException:
            self._close_tokenizer()
            raise
        if self._requests is not None:  # ended in __aexit__
            self._requests.begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._requests is not None:
                await self._requests.aclose()
            if error is None and self._failure is None:
                self.final_statistics = await self.launcher.stop()
            await self.launcher.__aexit__(kind, error, trace)
        finally:
            self._close_tokenizer()
            if self._endpoint is not None:
                self._endpoint.fail(ConnectionError("the graph was closed"))
            if self._requests is not None and self._failure is None:
                self._requests.end_all()

    # --- a model --------------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        n: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        chat: bool = False,
    ) -> AsyncGenerator[ClientEvent, None]:
        """Submit a request and yield its events. Closing the generator early cancels the request.

        The events are a TokenEvent per token, with n > 1 a ChoiceEvent for each choice that ends, then exactly one EndEvent.

        `prompt` is text or token ids; `chat` applies the model's chat template to text. A request that cannot be served ends with
        finish_reason "error" and the reason. Raises WorkerDiedError when the death of a process ends the run.
        """
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=cast(Any, stop),  # the gateway converts both to tuples
            stop_token_ids=cast(Any, stop_token_ids),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        async with aclosing(self.follow(await self.submit(prompt, params, chat=chat))) as events_of_request:
            async for event in events_of_request:
                yield event

    async def submit(self, prompt: Prompt, params: SamplingParams = SamplingParams(), *, chat: bool = False) -> int:
        """Submit a request and return its number for `follow`. The request runs whether or not it is followed."""
        requests = self._of_model()
        self._raise_failure()
        return await requests.submit(params, partial(self._encode, prompt, chat))

    def prompt_token_ids(self, index: int) -> tuple[int, ...]:
        """The prompt token ids of a submitted request; empty when it has none. KeyError after the request was followed to its end."""
        return self._of_model().gateway.log(index).prompt_token_ids

    def follow(self, index: int) -> AsyncGenerator[ClientEvent, None]:
        """Yield the events of a submitted request from its first. Closing it early cancels the request. UserError for a second reader."""
        return self._of_model().follow(index)

    async def complete(self, prompt: Prompt, params: SamplingParams = SamplingParams(), *, chat: bool = False) -> Completion:
        """Submit a request and return its whole output."""
        index = await self.submit(prompt, params, chat=chat)
        prompt_token_ids = self.prompt_token_ids(index)
        return Completion.of(prompt_token_ids, [event async for event in self.follow(index)])

    # --- a graph of your own -----------------------------------------------------------------------------------------------------

    async def __call__(self, **tensors: Any) -> Any:
        """Send one tensor per input through the graph. Returns the output tensor, or a dict when there are several."""
        if self._endpoint is None:
            raise UserError("this graph has no input of its own; use generate()")
        self._raise_failure()
        self._progress.opened(self._clock.now())
        try:
            outputs: dict[str, Any] = await self._endpoint.call(tensors)
        finally:
            self._progress.ended(self._clock.now())
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    async def stream(self, inputs: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
        """Send many inputs, keep limits.in_flight of them in flight, and yield the outputs in order.

        Each item is a dict of tensors, or one tensor when the graph has one input. Closing it early cancels the inputs in flight.
        """
        window: list[asyncio.Task[Any]] = []
        try:
            async for item in _each(inputs):
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
        """The counters of each worker, by worker name."""
        return await self.launcher.statistics()

    def health(self, stall_seconds: float = STALL_SECONDS) -> Health:
        """Whether work progresses: not ok when requests are open and none has progressed for `stall_seconds`, when an expert has no
        replica, and before the run is ready and after its end. Never waits."""
        health = self.launcher.health_record.health(stall_seconds)
        if health.ok and not self.launcher.is_running:
            return replace(health, ok=False, problems=("the graph is not open",))
        return health

    async def drain(self) -> None:
        """Admit no new requests and wait until all running ones have ended."""
        await self.launcher.drain()

    # --- inside ------------------------------------------------------------------------------------------------------------------

    def _open_model(self, graph: Graph, seams: Seams) -> Gateway:
        assert graph.model is not None
        directory = Path(graph.model.path)
        config = self._config = read_model_config(directory)
        self._tokenizer = Tokenizer.open(directory)
        self._tokenizer_process = TokenizerProcess(directory) if self._tokenizer is not None else None
        groups = [node.process for node in graph.nodes.values() if node.operator == SOURCE]
        return Gateway(
            groups,
            graph.group_limits(),
            config.max_position_embeddings,
            config.vocab_size,
            draw_seed=seams.new_seed,
            new_detokenizer=self._tokenizer.stream if self._tokenizer is not None else None,
            eos_token_ids=config.eos_token_ids,
        )

    def _close_tokenizer(self) -> None:
        if self._tokenizer_process is not None:
            self._tokenizer_process.close()

    def _of_model(self) -> Requests:
        if self._requests is None:
            raise UserError("this graph serves no model; call it with its inputs: await graph(x=tensor)")
        return self._requests

    async def _encode(self, prompt: Prompt, chat: bool) -> Sequence[int]:
        if not isinstance(chat, bool):
            raise UserError(f"chat is {shown(chat)}, it must be True or False")
        if not isinstance(prompt, str):
            return prompt  # the gateway checks its type
        if self._tokenizer_process is None or self._config is None:
            raise UserError("a text prompt needs a tokenizer, and the model's directory has none; give token ids")
        limits = self.graph.group_limits()
        max_tokens = min(self._config.max_position_embeddings, limits.kv_pages * limits.page_size)
        return await self._tokenizer_process.encode(prompt, chat=chat, max_tokens=max_tokens)

    def _note(self, event: events.Event) -> None:
        if isinstance(event, events.RunFailed):
            self._failure = event.error
            if self._endpoint is not None:
                self._endpoint.fail(event.error)
            if self._requests is not None:
                self._requests.fail(event.error)
        elif self._requests is not None and isinstance(event, events.WorkerMarkedDead):
            self._requests.fence_group(event.name, event.why)
        elif self._requests is not None and isinstance(event, events.WorkerCleared):
            self._requests.readmit_group(event.name)
        self._on_event(event)

    def _on_control(self, worker: str, control: Control) -> None:
        if self._requests is not None:
            self._requests.on_control(control)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _named(self, item: Any) -> dict[str, Any]:
        if isinstance(item, Mapping):
            return dict(item)
        if len(ports := self._endpoint.ports if self._endpoint is not None else []) != 1:
            raise UserError(f"this graph takes {', '.join(ports)}; give a dict of tensors by name")
        return {ports[0]: item}


def generate(
    graph: Path | str | Graph,
    prompts: Prompt | Sequence[Prompt],
    *,
    overrides: Iterable[str] = (),
    model: Path | str | None = None,
    chat: bool = False,
    **parameters: Any,
) -> list[Completion]:
    """Start the graph, answer all prompts, stop the graph. It blocks; it also works inside a running loop, such as a notebook's.

    All prompts are submitted at once, up to the gateway's limit. `parameters` are those of RunningGraph.generate. The completions are in
    the order of the prompts.
    """
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts is {shown(prompts)}, it must be a text, a sequence of token ids, or a sequence of these")
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    many: list[Any] = [prompts] if single else list(prompts)
    params = SamplingParams(**parameters)

    async def run() -> list[Completion]:
        async with open_graph(graph, overrides=overrides, model=model) as running:
            places = asyncio.Semaphore(running.max_requests)

            async def answer(prompt: Prompt) -> Completion:
                async with places:
                    return await running.complete(prompt, params, chat=chat)

            return list(await asyncio.gather(*(answer(prompt) for prompt in many)))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    with ThreadPoolExecutor(1, "flowrt generate") as executor:
        return executor.submit(asyncio.run, run()).result()


async def _each(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
