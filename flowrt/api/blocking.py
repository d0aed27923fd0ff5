"""Runs a graph for callers without an event loop: its loop runs in a thread of its own.

It serves scripts, several threads at once, and notebooks, whose own loop is running already.
"""

from __future__ import annotations

import asyncio
import atexit
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

from flowrt.actors.control import Statistics
from flowrt.api.arguments import Messages, Prompt, RequestKeywords, checked_prompts, split_keywords
from flowrt.api.opening import open_graph
from flowrt.api.running_graph import RunningGraph
from flowrt.api.sampling_defaults import AUTO
from flowrt.gateway.completion import Completion
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.reliability.health import STALL_SECONDS, Health
from flowrt.sampling_params import SamplingParams, checked_params
from flowrt.seams import LoopThread

_Request = tuple[Prompt | None, SamplingParams | None, Messages | None, RequestKeywords]


def start(
    graph: Path | str | Mapping[str, Any] | Graph,
    *,
    overrides: Sequence[str] = (),
    model: Path | str | None = None,
    log_level: str = "warning",
    on_event: Callable[[events.Event], None] | None = None,
    on_line: Callable[[str, str], None] | None = None,
    trace: Path | str | None = None,
    generation_config: Path | str = AUTO,
) -> BlockingGraph:
    """Start a graph and return when it is ready; the result has blocking methods and is closed by `with` or `close`.

    The arguments are those of `flowrt.open`. The callbacks are called in another thread.
    Raises GraphError, ArgumentError, TokenizerError, or WorkerDiedError when a process cannot start.

        with flowrt.start("graph.yaml") as llm:
            print(llm.complete("What is 1 + 2?", max_tokens=8).text)
    """
    opened = open_graph(
        graph,
        overrides=overrides,
        model=model,
        log_level=log_level,
        on_event=on_event,
        on_line=on_line,
        trace=trace,
        generation_config=generation_config,
    )
    return BlockingGraph(opened)


class BlockingGraph:
    """A running graph with blocking methods, made by `flowrt.start`. All threads may call it, and it also works in a notebook.

    A graph that is neither closed nor used any more is ended when it is collected, at the latest when the interpreter exits: then its
    requests end at once and its processes are killed. After `close`, and from its own callbacks, each method raises NotRunningError.
    """

    def __init__(self, graph: RunningGraph) -> None:
        self._graph = graph
        self._slots = asyncio.Semaphore(graph.max_requests if graph.graph.model is not None else graph.graph.limits.in_flight)
        self._thread = LoopThread("flowrt", graph)
        self._end = weakref.finalize(self, self._thread.end_soon)
        self._end.atexit = False
        atexit.register(self._thread.close, at_once=True)  # at exit, wait until the processes have ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(at_once=error is not None)

    def close(self) -> None:
        """Stop the graph and wait until nothing of it is left. Requests of other threads end with finish_reason "abort". Idempotent.

        Raises the failure that ended the run, unless a call has raised it.

            llm = flowrt.start("graph.yaml")
            llm.close()
        """
        self._close()

    def complete(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Completion:
        """Submit one request and return its whole output, as RunningGraph.complete. Waits while too many requests are active.

        Raises RequestError with the reason when the request fails, or this graph cannot serve it.

        llm.complete("What is 1 + 2?", max_tokens=8).text
        llm.complete(messages=[{"role": "user", "content": "What is 1 + 2?"}], temperature=0.7).text
        """
        completion = self._thread.run(self._complete, prompt, params, messages, keywords)
        completion.check()
        return completion

    def generate(self, prompts: Any, params: SamplingParams | None = None, **keywords: Unpack[RequestKeywords]) -> list[Completion]:
        """Submit all prompts at once and return their completions in the same order.

        `prompts`: a text, a list of token ids, a list of messages, or a sequence of these. `params` or `sampling`: see SamplingParams.
        Raises as RunningGraph.complete. Of a request that failed, `text` raises RequestError; the others have theirs.

            for completion in llm.generate(["What is 1 + 2?", "Count from 3 to 11"], max_tokens=40):
                print(completion.text)
        """
        sampling, chat = split_keywords(keywords)
        checked, requests = checked_params(params, sampling, self._graph.sampling_defaults), checked_prompts(prompts, chat)
        return self._thread.run(
            self._complete_all, [(prompt, checked, messages, cast(RequestKeywords, chat)) for prompt, messages in requests]
        )

    def call(self, **tensors: Any) -> Any:
        """Send one tensor per input through a graph of your own. Returns the output tensor, or a dict of them when there are several.

        Raises as RunningGraph.__call__.

            with flowrt.start("examples/two_actors/graph.yaml") as graph:
                print(graph.call(x=torch.ones(2, 64)))
        """
        return self._thread.run(self._call, tensors)

    def health(self, stall_seconds: float = STALL_SECONDS) -> Health:
        """Whether work progresses, as RunningGraph.health. `stall_seconds`: time without progress after which open requests are a problem.

        if not llm.health().ok:
            print(llm.health().problems)
        """
        return self._thread.run(self._health, stall_seconds)

    def statistics(self) -> dict[str, Statistics]:
        """The counters of each worker, by worker name. Raises NotRunningError, or the failure that ended the run.

        for name, counters in llm.statistics().items():
            print(name, counters)
        """
        return self._thread.run(self._graph.statistics)

    def _close(self, at_once: bool = False) -> None:
        self._end.detach()
        atexit.unregister(self._thread.close)
        self._thread.close(at_once)

    async def _complete(
        self, prompt: Prompt | None, params: SamplingParams | None, messages: Messages | None, keywords: RequestKeywords
    ) -> Completion:
        async with self._slots:
            return await self._graph.complete(prompt, params, messages=messages, **keywords)

    async def _complete_all(self, requests: Iterable[_Request]) -> list[Completion]:
        return list(await asyncio.gather(*(self._complete(*request) for request in requests)))

    async def _call(self, tensors: Mapping[str, Any]) -> Any:
        async with self._slots:
            return await self._graph(**tensors)

    async def _health(self, stall_seconds: float) -> Health:
        return self._graph.health(stall_seconds)


def generate(
    graph: Path | str | Mapping[str, Any] | Graph,
    prompts: Any,
    params: SamplingParams | None = None,
    *,
    overrides: Sequence[str] = (),
    model: Path | str | None = None,
    generation_config: Path | str = AUTO,
    **keywords: Unpack[RequestKeywords],
) -> list[Completion]:
    """Start the graph, answer all prompts, stop the graph: the completions are in the order of the prompts.

    `graph`, `overrides`, `model` and `generation_config` are those of `flowrt.open`; `prompts`, `params` and `keywords` those of
    BlockingGraph.generate.
    All prompts are submitted at once, up to the gateway's limit. Raises as `flowrt.start`; for wrong arguments before anything starts.

        for completion in flowrt.generate("graph.yaml", ["What is 1 + 2?", "Count from 3 to 11"], max_tokens=40):
            print(completion.text)
    """
    sampling, chat = split_keywords(keywords)
    checked_params(params, sampling)  # before the files of the model are read
    requests = checked_prompts(prompts, chat)
    opened = open_graph(graph, overrides=overrides, model=model, generation_config=generation_config)
    if any(messages is not None or isinstance(prompt, str) for prompt, messages in requests):
        opened.require_tokenizer()
    with BlockingGraph(opened) as running:
        return running.generate(prompts, params, **keywords)
