"""`flowrt bench serve`: one run per request rate, its table, and the files of all runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from flowrt.bench.load.load_options import LoadOptions
from flowrt.bench.load.prompts import make_prompts
from flowrt.bench.load.result import details_of, file_name, result_of, table
from flowrt.bench.load.send import first_model, open_client, send_load
from flowrt.bench.peers.child import new_event_loop
from flowrt.bench.report.plots import check_plot, new_picture, save_picture
from flowrt.bench.report.report import print_progress
from flowrt.system.output_file import check_writable, write_file

MAX_SHOWN_ERRORS = 10


def bench_serve(options: LoadOptions, api_key: str | None) -> bool:
    """Prints a table for each rate. Returns whether a request of each rate succeeded. Raises UserError."""
    options.check()
    check_plot(options.plot)
    if options.result_dir is not None:
        options.result_dir.mkdir(parents=True, exist_ok=True)
    if options.save_result and options.result_filename:
        check_writable(file_name(options, "", datetime.now()), "--result-filename")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        results = runner.run(_measure(options, api_key))
    if options.save_result:
        path = file_name(options, results[0]["model_id"], datetime.now())
        write_file(path, "\n".join(msgspec.json.encode(result).decode() for result in results))
        print_progress(f"wrote {path}")
    if options.plot is not None:
        plot_rates(results, options.plot)
    return all(result["completed"] for result in results)


async def _measure(options: LoadOptions, api_key: str | None) -> list[dict[str, Any]]:
    prompts = make_prompts(options)
    results = []
    async with open_client(options, api_key) as client:
        model = options.model or await first_model(client)
        if options.num_warmups:
            await send_load(client, (prompts[:1] * options.num_warmups), model, float("inf"), options)
        for rate in options.request_rate:
            print_progress(f"{len(prompts)} requests to {model}, {rate:g} per second")
            run = await send_load(client, prompts, model, rate, options)
            errors = [record.error for record in run.records if record.error]
            for text in dict.fromkeys(errors[:MAX_SHOWN_ERRORS]):
                print_progress(f"{errors.count(text)} failed: {text}")
            results.append(result_of(run, options, model, datetime.now()) | (details_of(run) if options.save_detailed else {}))
            print("\n".join(table(results[-1], options)), flush=True)
    return results


def plot_rates(results: Sequence[dict[str, Any]], path: str) -> None:
    """Times to the first token and between tokens over the request rate. Raises LostOutputError."""
    picture, diagrams = new_picture((10, 4.5), 2)
    ordered = sorted(results, key=lambda result: float(result["request_rate"]))
    # Without a rate, all requests are sent at once: then the rate is that of the responses.
    rates = [result["request_throughput"] if result["request_rate"] == "inf" else result["request_rate"] for result in ordered]
    for axes, name, title in zip(diagrams, ("ttft", "itl"), ("time to first token", "inter-token latency"), strict=True):
        for key in (key for key in ordered[0] if key.endswith(f"_{name}_ms") and not key.startswith("std")):
            axes.plot(rates, [result[key] for result in ordered], marker="o", markersize=4, label=key.partition("_")[0])
        axes.set(title=title, xlabel="requests per second", ylabel="ms")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    picture.suptitle(f"flowrt bench serve: {ordered[0]['model_id']}")
    picture.legend(*diagrams[0].get_legend_handles_labels(), fontsize="small", loc="outside right center")
    save_picture(picture, path)
