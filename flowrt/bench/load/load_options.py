"""Options of `flowrt bench serve`, with the names and defaults of `vllm bench serve`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from flowrt.bench.cases.case_options import FLAG, Positive, option
from flowrt.errors import UserError

LATENCIES = ("ttft", "tpot", "itl", "e2el")

_Length = Annotated[int, Parameter(validator=Number(gte=1, lte=1 << 24))]
_Natural = Annotated[int, Parameter(validator=Number(gte=0))]
_Positives = Annotated[float, Parameter(validator=Number(gt=0))]
_SEVERAL = Parameter(negative=(), consume_multiple=True, show_default=lambda values: " ".join(f"{value:g}" for value in values))
_PAIRS = Parameter(negative=(), consume_multiple=True, show_default=False)
# An option of each panel of the help, as _server("...").
_server, _prompts, _load, _sampling, _report = (
    partial(option, group=Group(name, sort_key=place)) for place, name in enumerate(("Server", "Prompts", "Load", "Sampling", "Report"), 1)
)


def _read_object(_: Any, tokens: Sequence[Token]) -> dict[str, Any]:
    try:
        value = json.loads(tokens[0].value)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{tokens[0].keyword or '--extra-body'} must be a JSON object, as in '{{\"top_k\": 5}}'")
    return value


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What is sent to which server, and what is reported."""

    backend: Annotated[Literal["openai", "vllm", "openai-chat"], _server("openai-chat sends chats, the others send texts.")] = "openai"
    base_url: Annotated[str | None, _server("URL of the server, as http://127.0.0.1:8000, instead of --host and --port.")] = None
    host: Annotated[str, _server("Host of the server.")] = "127.0.0.1"
    port: Annotated[Positive, _server("Port of the server.")] = 8000
    endpoint: Annotated[str | None, _server("Path of the API. [default: /v1/completions, or /v1/chat/completions for openai-chat]")] = None
    header: Annotated[tuple[str, ...], _PAIRS, _server("Send these headers, as NAME=VALUE.")] = ()
    insecure: Annotated[bool, FLAG, _server("Accept any certificate.")] = False
    model: Annotated[str | None, _server("Name of the model. [default: the server's first]")] = None
    tokenizer: Annotated[
        Path | None, _prompts("Model directory of the tokenizer. Without it, random prompts are token ids below 256 instead of text.")
    ] = None
    dataset_name: Annotated[
        Literal["random", "sharegpt", "mooncake", "custom", "prefix_repetition"],
        _prompts(
            "Source of the prompts. mooncake: a trace of Mooncake, BurstGPT or Azure, whose times are kept unless --request-rate is "
            'a number; custom: a line {"prompt": ...} per request; prefix_repetition: random prompts, of which many begin alike.',
        ),
    ] = "random"
    dataset_path: Annotated[Path | None, _prompts("The file of sharegpt, mooncake or custom.")] = None
    random_input_len: Annotated[_Length, _prompts("Tokens of a random prompt.")] = 1024
    random_output_len: Annotated[_Length, _prompts("Tokens of the response to it.")] = 128
    random_range_ratio: Annotated[float, _prompts("Vary both lengths by up to this share.", validator=Number(gte=0, lt=1))] = 0.0
    sharegpt_output_len: Annotated[_Length | None, _prompts("Tokens of a response. [default: those of the response in the file]")] = None
    custom_output_len: Annotated[_Length, _prompts("Tokens of a response to a custom prompt without output_tokens.")] = 256
    prefix_repetition_prefix_len: Annotated[_Length, _prompts("Tokens of a common beginning.")] = 256
    prefix_repetition_suffix_len: Annotated[_Length, _prompts("Tokens behind it, of each prompt.")] = 256
    prefix_repetition_num_prefixes: Annotated[Positive, _prompts("Number of common beginnings.")] = 10
    prefix_repetition_output_len: Annotated[_Length, _prompts("Tokens of the response.")] = 128
    num_prompts: Annotated[Positive, _load("Number of requests per rate.")] = 1000
    seed: Annotated[_Natural, _load("Seed of prompts and arrivals.")] = 0
    request_rate: Annotated[
        tuple[_Positives, ...], _SEVERAL, _load("Requests per second, a run for each; inf: all at once, a trace at its times.")
    ] = (float("inf"),)
    burstiness: Annotated[_Positives, _load("Shape of the gamma distribution of arrivals; 1: a Poisson process.")] = 1.0
    max_concurrency: Annotated[Positive | None, _load("Maximum number of requests at a time; further ones wait in the client.")] = None
    num_warmups: Annotated[_Natural, _load("Number of requests before the measured ones.")] = 0
    ignore_eos: Annotated[bool | None, _sampling("Do not end at the end-of-text token. [default: yes, but for sharegpt and custom]")] = None
    temperature: Annotated[float | None, _sampling("Sampling parameters of each request, as in the API.")] = None
    top_p: Annotated[float | None, _sampling()] = None
    top_k: Annotated[int | None, _sampling()] = None
    extra_body: Annotated[
        dict[str, Any] | None,
        _sampling("Further fields of each request, as a JSON object.", accepts_keys=False, n_tokens=1, converter=_read_object),
    ] = None
    percentile_metrics: Annotated[str, _report("Report these of ttft, tpot, itl and e2el.")] = "ttft,tpot,itl"
    metric_percentiles: Annotated[str, _report("Percentiles to report, as 50,99.")] = "99"
    goodput: Annotated[tuple[str, ...], _PAIRS, _report("Count the requests within these bounds, as ttft:MS, tpot:MS, e2el:MS.")] = ()
    save_result: Annotated[bool, FLAG, _report("Write a JSON file.")] = False
    save_detailed: Annotated[bool, FLAG, _report("Add times, texts and errors of each request to the file.")] = False
    result_dir: Annotated[Path | None, _report("Folder of the JSON file.")] = None
    result_filename: Annotated[str | None, _report("Name of the JSON file. [default: from label, rate, model and time]")] = None
    label: Annotated[str | None, _report("Name of the run in the file.")] = None
    metadata: Annotated[tuple[str, ...], _PAIRS, _report("Add these keys to the file, as NAME=VALUE.")] = ()
    plot: Annotated[
        str | None, _report("Draw time to first token and inter-token latency over the rates into this file (.svg, .png, .pdf).")
    ] = None

    @property
    def is_drawn(self) -> bool:
        """Whether prompts are random tokens."""
        return self.dataset_name in ("random", "mooncake", "prefix_repetition")

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def path(self) -> str:
        return self.endpoint or ("/v1/chat/completions" if self.is_chat else "/v1/completions")

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Raises UserError."""
        try:
            values = tuple(float(each) for each in self.metric_percentiles.split(","))
        except ValueError:
            values = (-1.0,)
        if not all(0 <= each <= 100 for each in values):
            raise UserError("--metric-percentiles must be numbers from 0 to 100, as in 50,90,99")
        return values

    @property
    def latencies(self) -> tuple[str, ...]:
        """Raises UserError."""
        names = tuple(self.percentile_metrics.split(","))
        if unknown := set(names) - set(LATENCIES):
            raise UserError(f"--percentile-metrics: unknown {', '.join(sorted(unknown))}; there are {', '.join(LATENCIES)}")
        return names

    @property
    def goodput_seconds(self) -> dict[str, float]:
        """Raises UserError."""
        bounds = {}
        for pair in self.goodput:
            name, _, milliseconds = pair.partition(":")
            try:
                bounds[name] = float(milliseconds) / 1000
            except ValueError:
                name = ""
            if name not in ("ttft", "tpot", "e2el") or not bounds[name] > 0:
                raise UserError(f"--goodput {pair}: give ttft:MS, tpot:MS or e2el:MS, as in ttft:200")
        return bounds

    def check(self) -> None:
        """Raises UserError for values that cannot be used."""
        _ = self.percentiles, self.latencies, self.goodput_seconds, named_values("--header", self.header)
        named_values("--metadata", self.metadata)
        if (self.dataset_path is None) == (self.dataset_name in ("sharegpt", "mooncake", "custom")):
            raise UserError("--dataset-path and --dataset-name sharegpt, mooncake or custom belong together")
        if self.tokenizer is None and self.is_chat and self.is_drawn:
            raise UserError("a chat is text; give --tokenizer DIR to make random text of a known length")
        if self.tokenizer is None and self.dataset_name == "sharegpt" and self.sharegpt_output_len is None:
            raise UserError("give --tokenizer DIR to count the tokens of the file's responses, or --sharegpt-output-len N")


def named_values(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE pairs. Raises UserError."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip() or not pair.isprintable():
            raise UserError(f"{option} {pair!r}: give NAME=VALUE")
        found[name.strip()] = value.strip()
    return found
