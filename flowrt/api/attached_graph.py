"""Attaches to a graph that `flowrt up` has started: its requests go over the graph's own socket, as HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any, Unpack

import msgspec

from flowrt.actors.outputs import ChoiceEvent, ClientEvent, EndEvent, Logprobs, TokenEvent
from flowrt.api.arguments import CheckedPrompt, Messages, Prompt, RequestKeywords, TextPrompt, checked_prompt, split_keywords
from flowrt.errors import NotRunningError
from flowrt.gateway.completion import Completion
from flowrt.sampling_params import FinishReason, SamplingParams, checked_params
from flowrt.serving.graph_status import GraphStatus
from flowrt.serving.run_folder import Description, find_graph
from flowrt.serving.socket_client import SocketClient, new_client


def attach(name: str | None = None) -> AttachedGraph:
    """Attach to the graph that is up under this name; without a name, to the only one.

    Raises UserError when there is none, NotRunningError when it is dead or still starts. There is nothing to close.

        graph = flowrt.attach("quickstart")
        print((await graph.complete("What is 1 + 2?", max_tokens=8)).text)
    """
    found = find_graph(name)
    client = new_client(found)
    assert found.description is not None
    return AttachedGraph(client, found.description)


class AttachedGraph:
    """A graph that runs in other processes, made by `flowrt.attach`. Each call has a connection of its own, in any event loop.

    Each call raises NotRunningError when the graph does not respond, or has ended.
    """

    def __init__(self, client: SocketClient, description: Description) -> None:
        self._client, self.description = client, description

    async def complete(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Completion:
        """Submit one request and return its whole output, as RunningGraph.complete.

        completion = await graph.complete("What is 1 + 2?", max_tokens=8)
        """
        request = self.request(prompt, params, messages=messages, **keywords)
        events = [event async for event in request.events()]
        return Completion.of(request.prompt_token_ids, events)

    async def generate(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> AsyncGenerator[ClientEvent, None]:
        """Submit a request and yield its events, as RunningGraph.generate. Closing it early cancels the request.

        async for event in graph.generate("What is 1 + 2?", max_tokens=8):
            print(event.text, end="")
        """
        async with aclosing(self.request(prompt, params, messages=messages, **keywords).events()) as events:
            async for event in events:
                yield event

    def request(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> AttachedRequest:
        """A request that begins when its `events` are read. The arguments are those of `complete`."""
        sampling, chat = split_keywords(keywords)
        checked, defaults = checked_prompt(prompt, messages, chat=chat), self.description.sampling_defaults
        return AttachedRequest(self._client, checked, checked_params(params, sampling, defaults), defaults)

    async def status(self) -> GraphStatus:
        """The state of the graph, and of each of its processes.

        for process in (await graph.status()).processes:
            print(process.name, process.state)
        """
        return msgspec.convert(await self._client.call("GET", "/admin/status"), GraphStatus)


class AttachedRequest:
    """`prompt_token_ids`: known once its first event has come. `defaults`: the names of parameters for which the server has values of its
    own, so that the request names them all."""

    def __init__(self, client: SocketClient, prompt: CheckedPrompt, params: SamplingParams, defaults: Iterable[str] = ()) -> None:
        self._client, self._prompt, self._params, self._defaults = client, prompt, params, tuple(defaults)
        self.prompt_token_ids: tuple[int, ...] = () if isinstance(prompt, TextPrompt) else tuple(prompt)
        self._num_tokens = [0] * params.n
        self._reasons: dict[int, FinishReason] = {}
        self._prompt_logprobs: tuple[Logprobs, ...] = ()

    async def events(self) -> AsyncGenerator[ClientEvent, None]:
        path, body = self._body()
        async with self._client.open("POST", path, body) as response:
            if response.status != 200:
                error = msgspec.json.decode(await response.body())["error"]
                yield EndEvent(0, "error", error=error["message"])
                return
            async with aclosing(response.events()) as chunks:
                async for chunk in chunks:
                    if "error" in chunk:
                        yield EndEvent(0, "error", error=chunk["error"]["message"])
                        return
                    for event in self._of_chunk(chunk):
                        yield event
        if len(self._reasons) < self._params.n:
            raise NotRunningError("the graph has ended the connection before the output was complete")
        if self._params.n > 1:
            yield EndEvent(0, self._reasons[0])

    def _body(self) -> tuple[str, dict[str, Any]]:
        values = {name: value for name, value in msgspec.to_builtins(self._params).items() if value is not None}
        if self._params.logit_bias:
            values["logit_bias"] = dict(self._params.logit_bias)
        whole = {name: getattr(self._params, name) for name in self._defaults}  # also where it has the default of SamplingParams
        body = {"temperature": 0.0, "max_tokens": None, **whole, **values, "stream": True, "return_token_ids": True}
        logprobs = values.pop("logprobs", None)
        if logprobs is not None or "prompt_logprobs" in values:
            body["return_tokens_as_token_ids"] = True
        if not isinstance(self._prompt, TextPrompt):
            return "/v1/completions", body | {"prompt": tuple(self._prompt)}
        if isinstance(self._prompt.content, str):
            return "/v1/completions", body | {"prompt": self._prompt.content}
        if logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": logprobs}
        return "/v1/chat/completions", body | self._prompt.content.fields | {"parse_output": False}

    def _of_chunk(self, chunk: dict[str, Any]) -> Iterator[ClientEvent]:
        """One event per token; the text of a chunk comes with its last token."""
        for choice in chunk["choices"]:
            if (prompt := choice.get("prompt_token_ids") or chunk.get("prompt_token_ids")) is not None:
                self.prompt_token_ids = tuple(prompt)
            if (of_prompt := choice.get("prompt_logprobs") or chunk.get("prompt_logprobs")) is not None:
                self._prompt_logprobs = tuple(map(_prompt_logprobs_of, self.prompt_token_ids[1:], of_prompt[1:]))
            number, text = choice["index"], choice.get("text", choice.get("delta", {}).get("content", ""))
            token_ids, logprobs = choice["token_ids"], _logprobs_of(choice.get("logprobs"), self._params.logprobs)
            for at, token_id in enumerate(token_ids, 1):
                shown = text if at == len(token_ids) else ""
                index, is_degraded = self._num_tokens[number], choice.get("degraded", False)
                of_prompt = () if number or index else self._prompt_logprobs
                yield TokenEvent(0, index, (token_id,), shown, number, tuple(logprobs[at - 1 : at]), is_degraded, of_prompt)
                self._num_tokens[number] += 1
            if (reason := choice.get("finish_reason")) is not None:
                self._reasons[number] = reason
                rest = "" if token_ids else text
                yield EndEvent(0, reason, rest) if self._params.n == 1 else ChoiceEvent(0, number, reason, rest)


def _logprobs_of(logprobs: dict[str, Any] | None, number: int | None) -> list[Logprobs]:
    """Each token's own logprob, and those of the `number` most likely ones by token id. A completion has the token itself, too."""
    if logprobs is None:
        return []
    if (content := logprobs.get("content")) is not None:
        tops = [tuple((_token_id(top["token"]), top["logprob"]) for top in each["top_logprobs"]) for each in content]
        return [Logprobs(each["logprob"], top) for each, top in zip(content, tops, strict=True)]
    tops = [tuple((_token_id(token), logprob) for token, logprob in [*top.items()][:number]) for top in logprobs["top_logprobs"]]
    return list(map(Logprobs, logprobs["token_logprobs"], tops))


def _prompt_logprobs_of(token_id: int, ranked: dict[str, Any]) -> Logprobs:
    """A token's own logprob, and those of the most likely ones in its place, best first: all that have a rank."""
    top = sorted((each["rank"], int(key), each["logprob"]) for key, each in ranked.items() if each["rank"] is not None)
    return Logprobs(ranked[str(token_id)]["logprob"], tuple((key, logprob) for _, key, logprob in top))


def _token_id(text: str) -> int:
    return int(text.removeprefix("token_id:"))
