"""The result of a load: figures under the keys of `vllm bench serve`, of the whole run and of its steady state, and their table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

import numpy as np

from flowrt.bench.load.load_options import LATENCIES, LoadOptions, named_values
from flowrt.bench.load.record import RequestRecord
from flowrt.bench.load.send import LoadRun

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def result_of(run: LoadRun, options: LoadOptions, model: str, date: datetime) -> dict[str, Any]:
    """What the JSON file has, without details of each request."""
    done, bounds = [record for record in run.records if not record.error], options.goodput_seconds
    num_input, num_output = (sum(getattr(record, name) for record in done) for name in ("num_prompt_tokens", "num_tokens"))
    return {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": str(options.tokenizer) if options.tokenizer else None,
        "num_prompts": options.num_prompts,
        **named_values("--metadata", options.metadata),
        "request_rate": "inf" if math.isinf(run.rate) else run.rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "duration": run.seconds,
        "client_cpu_seconds": run.client_cpu_seconds,
        "completed": len(done),
        "failed": len(run.records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        **_throughput(len(done), num_input, num_output, run.seconds),
        "request_goodput": sum(_is_good(record, bounds) for record in done) / run.seconds if bounds else None,
        "max_output_tokens_per_s": max_tokens_per_second(done),
        "max_concurrent_requests": max_concurrency(done),
        **latency_figures(done, options.latencies, options.percentiles),
        "steady_state": steady_state(done, options),
    }


def details_of(run: LoadRun) -> dict[str, Any]:
    """What --save-detailed adds: of each request its times, text and error."""
    return {
        "input_lens": [record.num_prompt_tokens for record in run.records],
        "output_lens": [0 if record.error else record.num_tokens for record in run.records],
        "ttfts": [record.first_token_seconds if record.times else 0.0 for record in run.records],
        "itls": [record.gaps for record in run.records],
        "start_times": [record.start for record in run.records],
        "generated_texts": ["".join(record.texts) for record in run.records],
        "errors": [record.error for record in run.records],
    }


def file_name(options: LoadOptions, model: str, date: datetime) -> str:
    """The path of the JSON file: vLLM's, with all rates of the command."""
    rates = "-".join(f"{rate}qps" for rate in options.request_rate)
    concurrency = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
    default = f"{options.label or options.backend}-{rates}{concurrency}-{model.rpartition('/')[2]}-{date:%Y%m%d-%H%M%S}.json"
    name = options.result_filename or default
    return str(options.result_dir / name) if options.result_dir else name


def steady_state(done: Sequence[RequestRecord], options: LoadOptions) -> dict[str, Any] | None:
    """Figures between the first end of a request and the last start of one: after the ramp-up and before the drain. None without that."""
    if not done:
        return None
    first, low, high = min(each.start for each in done), min(each.end for each in done), max(each.start for each in done)
    if low >= high:
        return None
    started = [each for each in done if low <= each.start < high]
    num_ended = sum(low <= each.end < high for each in done)
    # An event may bring several tokens.
    num_tokens = sum(each.num_tokens / len(each.times) * sum(low <= time < high for time in each.times) for each in done)
    return {
        "window": {
            "start_s": low - first,
            "end_s": high - first,
            "duration_s": high - low,
            "requests_started_in_window": len(started),
            "requests_completed_in_window": num_ended,
            "requests_total": len(done),
        },
        **_throughput(num_ended, sum(each.num_prompt_tokens for each in started), num_tokens, high - low),
        **latency_figures(started, options.latencies, options.percentiles),
    }


def _throughput(num_requests: int, num_input: int, num_output: float, seconds: float) -> dict[str, float]:
    return {
        "request_throughput": num_requests / seconds,
        "input_throughput": num_input / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
    }


def latency_figures(done: Sequence[RequestRecord], names: Sequence[str], percentiles: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    values = {
        "ttft": [each.first_token_seconds for each in done],
        "tpot": [each.seconds_per_token for each in done if each.num_tokens > 1],
        "itl": [gap for each in done for gap in each.gaps],
        "e2el": [each.seconds for each in done],
    }
    figures: dict[str, float] = {}
    for name in (name for name in LATENCIES if name in names):
        milliseconds = np.array(values[name] or [0.0]) * 1e3
        figures |= {f"{word}_{name}_ms": float(getattr(np, word)(milliseconds)) for word in ("mean", "median", "std")}
        figures |= {f"p{each:g}_{name}_ms": float(np.percentile(milliseconds, each)) for each in percentiles}
    return figures


def _is_good(record: RequestRecord, bounds: Mapping[str, float]) -> bool:
    seconds = {"ttft": record.first_token_seconds, "tpot": record.seconds_per_token, "e2el": record.seconds}
    return all(seconds[name] <= bound for name, bound in bounds.items())


def max_tokens_per_second(done: Sequence[RequestRecord]) -> float:
    """The most tokens of one second, counted from the first start."""
    if not done:
        return 0.0
    first = min(record.start for record in done)
    seconds = [int(time - first) for record in done for time in record.times]
    weights = [record.num_tokens / len(record.times) for record in done for _ in record.times]
    return float(np.bincount(seconds, weights).max())


def max_concurrency(done: Sequence[RequestRecord]) -> int:
    changes = sorted([(record.start, 1) for record in done] + [(record.end, -1) for record in done])
    return max(accumulate(change for _, change in changes), default=0)


def table(result: Mapping[str, Any], options: LoadOptions) -> Iterator[str]:
    """The lines that users of vLLM know."""
    yield f"{' Serving Benchmark Result ':=^50}"
    yield from _rows(
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Maximum request concurrency:", options.max_concurrency),
        ("Request rate configured (RPS):", None if result["request_rate"] == "inf" else float(result["request_rate"])),
        ("Benchmark duration (s):", result["duration"]),
        ("Client CPU time (s):", result["client_cpu_seconds"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(result["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    )
    yield from _latency_table(result, options)
    steady = result["steady_state"]
    if steady is not None:
        window = steady["window"]
        yield f"{' Steady State ':=^50}"
        yield f"{'Window:':<40} {window['start_s']:.1f} s to {window['end_s']:.1f} s"
        yield from _rows(
            ("Requests started in it:", window["requests_started_in_window"]),
            ("Request throughput (req/s):", steady["request_throughput"]),
            ("Output token throughput (tok/s):", steady["output_throughput"]),
            ("Total token throughput (tok/s):", steady["total_token_throughput"]),
        )
        yield from _latency_table(steady, options)
    yield "=" * 50


def _latency_table(figures: Mapping[str, float], options: LoadOptions) -> Iterator[str]:
    for name in (name for name in LATENCIES if name in options.latencies):
        yield f"{TITLES[name]:-^50}"
        words = ("mean", "median", *(f"p{each:g}" for each in options.percentiles))
        yield from _rows(*((f"{word.capitalize()} {name.upper()} (ms):", figures[f"{word}_{name}_ms"]) for word in words))


def _rows(*rows: tuple[str, float | int | None]) -> Iterator[str]:
    for title, value in rows:
        if value is not None:
            yield f"{title:<40} {f'{value:.2f}' if isinstance(value, float) else value:<10}"
