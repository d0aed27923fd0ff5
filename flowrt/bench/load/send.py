"""Sends a load to a server: each request when it is due, no more at a time than allowed, and a record of each."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flowrt.bench.load.http_client import ConnectionFailedError, HttpClient, ServerAddress
from flowrt.bench.load.load_options import LoadOptions, named_values
from flowrt.bench.load.prompts import LoadPrompt
from flowrt.bench.load.record import EventReader, RequestRecord
from flowrt.errors import UserError

MAX_MODELS_BYTES = 1 << 20


@dataclass(frozen=True)
class LoadRun:
    """One run at one rate. `client_cpu_seconds`: processor time of this process during it."""

    rate: float
    records: Sequence[RequestRecord]
    seconds: float
    client_cpu_seconds: float


def open_client(options: LoadOptions, api_key: str | None) -> HttpClient:
    """Raises UserError."""
    url = options.base_url or f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{options.port}"
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return HttpClient(ServerAddress.of(url), {**key, **named_values("--header", options.header)}, options.insecure)


async def first_model(
    client: HttpClient,
    no_server: str = "start the server, or give its --base-url",
    model_option: str = "--model",
    key_option: str = "OPENAI_API_KEY",
) -> str:
    """The name of the first model of the server. The other arguments are for the errors of a command. Raises UserError."""
    body = bytearray()

    def read(_: int, data: bytes) -> None:
        if len(body) < MAX_MODELS_BYTES:
            body.extend(data)

    try:
        status = await client.request("GET", "/v1/models", b"", read)
        if status in (401, 403):
            raise UserError(f"GET /v1/models: HTTP {status}; give the key of the server by {key_option}")
        if status != 200:
            raise UserError(f"GET /v1/models: HTTP {status}; give {model_option} NAME")
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except ConnectionFailedError as error:
        raise UserError(f"{error}; {no_server}") from None
    except (msgspec.DecodeError, LookupError, TypeError):
        raise UserError(f"GET /v1/models: the server lists no models; give {model_option} NAME") from None


def arrival_offsets(num_requests: int, rate: float, burstiness: float, draw: random.Random) -> list[float]:
    """When requests are due: gamma-distributed gaps, stretched so that the last request is due after `num_requests / rate` seconds."""
    if rate == float("inf"):
        return [0.0] * num_requests
    offsets, total = [], 0.0
    for _ in range(num_requests):
        total += 1 / rate if burstiness == float("inf") else draw.gammavariate(burstiness, 1 / (rate * burstiness))
        offsets.append(total)
    scale = num_requests / rate / total if total else 0.0
    return [offset * scale for offset in offsets]


def request_body(prompt: LoadPrompt, model: str, options: LoadOptions) -> bytes:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if options.is_chat:
        body |= {"messages": [{"role": "user", "content": prompt.prompt}], "max_completion_tokens": prompt.max_tokens}
    else:
        body |= {"prompt": prompt.prompt, "max_tokens": prompt.max_tokens}
    if options.ignore_eos if options.ignore_eos is not None else options.is_drawn:
        body["ignore_eos"] = True
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    body |= {name: value for name, value in sampling.items() if value is not None}
    return msgspec.json.encode(body | (options.extra_body or {}))


async def send_request(client: HttpClient, path: str, body: bytes, num_prompt_tokens: int) -> RequestRecord:
    record = RequestRecord(num_prompt_tokens, time.perf_counter())
    reader = EventReader(record, time.perf_counter)
    try:
        reader.finish(await client.request("POST", path, body, reader.read))
    except (ConnectionFailedError, ValueError) as error:
        record.error = record.error or str(error)
    if not record.error and not record.times:
        record.error = "the response has no tokens"
    return record


async def send_load(client: HttpClient, prompts: Sequence[LoadPrompt], model: str, rate: float, options: LoadOptions) -> LoadRun:
    """Ends with the last response."""
    bodies = [request_body(prompt, model, options) for prompt in prompts]  # before the clock runs
    if rate == float("inf"):  # all at once, or as they were recorded
        offsets = [prompt.at_seconds for prompt in prompts]
    else:
        offsets = arrival_offsets(len(prompts), rate, options.burstiness, random.Random(options.seed))
    slots = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else contextlib.nullcontext()

    async def send(number: int) -> RequestRecord:
        async with slots:
            return await send_request(client, options.path, bodies[number], prompts[number].num_tokens)

    start, cpu_start = time.perf_counter(), time.process_time()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for number, offset in enumerate(offsets):
            if (wait := start + offset - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(send(number), name=f"request {number}"))
    return LoadRun(rate, [task.result() for task in tasks], time.perf_counter() - start, time.process_time() - cpu_start)
