"""Plots a chaos run: throughput over time, with each fault, its process, and its recovery. Needs matplotlib."""

from __future__ import annotations

import math

from flowrt.bench.report.plots import new_picture, save_picture
from flowrt.chaos.report import ChaosReport

_SMOOTH_BINS = 5
_MAX_LABELS = 12
_RED = "#b5443a"


def plot_chaos(report: ChaosReport, path: str) -> None:
    """Raises UserError when the file cannot be written."""
    details = report.details
    width, rates = details["bin_seconds"], details["tokens_per_second"]
    picture, axes = new_picture((9, 3.6))
    times = [(place + 0.5) * width for place in range(len(rates))]
    axes.plot(times, rates, color="#b9c6cf", linewidth=0.8, label=f"in {1000 * width:.0f} ms")
    axes.plot(times, smoothed(rates), color="#22577a", linewidth=1.6, label=f"mean of {1000 * width * _SMOOTH_BINS:.0f} ms")
    for number, (begin, end, _) in enumerate(details["stretches"]):
        usual = rates[int(begin / width) : int(end / width)]
        mean = sum(usual) / max(1, len(usual))
        label = "mean without faults" if not number else None
        axes.plot([begin, end], [mean, mean], color="grey", linewidth=1.2, linestyle=":", label=label)
    top = 1.18 * max([*rates, 1.0])
    faults = [fault for fault in details["faults"] if fault["missed"] is None]
    for number, fault in enumerate(faults):
        at, back = fault["seconds"], fault["back_seconds"]
        axes.axvline(at, color=_RED, linewidth=1.0, label=None if number else "fault")
        if math.isfinite(back):
            axes.axvspan(at, at + back, color=_RED, alpha=0.10, linewidth=0, label=None if number else "until it was back")
        if len(faults) <= _MAX_LABELS:
            axes.text(at, 0.98 * top, fault["fault"], rotation=90, verticalalignment="top", fontsize="x-small", color=_RED)
    axes.set(xlabel="seconds from the first request", ylabel="tokens per second", ylim=(0, top), xlim=(0, len(rates) * width))
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=5, frameon=False)
    axes.set_title(str(report.machine), fontsize="x-small", loc="left")
    save_picture(picture, path)


def smoothed(rates: list[float], num: int = _SMOOTH_BINS) -> list[float]:
    """The mean of `num` bins around each; fewer at the ends."""
    half = num // 2
    windows = [rates[max(0, place - half) : place + half + 1] for place in range(len(rates))]
    return [sum(window) / len(window) for window in windows]
