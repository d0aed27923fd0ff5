"""`flowrt fleet`: how many devices a day of traffic needs, and what failures cost, for the deployment of a graph file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from flowrt.api.opening import read_graph
from flowrt.cli.planning_options import FleetOptions
from flowrt.cli.sim import note_shortage
from flowrt.cli.tables import new_console, new_table, print_table
from flowrt.cli.text import OutputStream
from flowrt.costs.quantities import read_quantity
from flowrt.errors import SUCCESS, UserError
from flowrt.launcher.model_facts import config_of
from flowrt.observe import duration_text
from flowrt.operators.model_config import ModelError
from flowrt.planner.deployment import Deployment, deployment_of
from flowrt.planner.fleet import (
    Capacity,
    HourNeed,
    PolicyResult,
    RecoveryTimes,
    ScalePoint,
    compare_policies,
    daily_needs,
    devices_by_hour,
    lost_one_by_one,
    read_daily,
    weak_scaling,
)
from flowrt.planner.traffic import parse_traffic
from flowrt.system.output_file import check_writable, json_text, write_file


def run(path: Path, options: FleetOptions) -> int:
    """Returns the exit code. Raises UserError for bad input."""
    _check(options)
    if options.json is not None:
        check_writable(options.json)
    day = None if options.daily is None else read_daily(options.daily)
    restart, operator = (read_quantity(getattr(options, name), "s", f"--{name}") for name in ("restart", "operator"))
    num_input, num_output = parse_traffic(options.traffic).tokens
    graph = read_graph(path, options.overrides)
    if graph.model is None:
        raise UserError(f"{path}: serves no model; a fleet needs model:")
    try:
        deployment = deployment_of(graph, config_of(graph.model))
    except ModelError as error:
        raise UserError(str(error)) from None
    if deployment.is_local:
        advice = "a fleet needs expert servers: give --set deploy.experts.servers=NUMBER"
        raise graph.error("deploy.experts", f"each group holds all experts; {advice}")
    note_shortage(deployment)
    batch = float(deployment.max_num_seqs) if options.batch is None else options.batch
    output = OutputStream(sys.stderr if options.json == "-" else sys.stdout)
    console = new_console(output)
    capacity = Capacity(deployment, batch, num_input + num_output / 2, options.seed)
    carried, points = capacity.requests_per_second(num_input, num_output), weak_scaling(capacity)
    recovery = RecoveryTimes(graph.reliability.dead_seconds, restart, operator)
    weeks, policies = compare_policies(capacity, recovery, options.failures / 4096, options.seed)
    lost = lost_one_by_one(capacity, min(options.lost, deployment.num_ranks - 1), options.seed)
    needs = None if day is None else daily_needs(day, carried, points)
    _print_instance(console, path, capacity, carried)
    _print_scaling(console, points, deployment)
    if needs is not None:
        _print_day(console, needs)
    _print_lost(console, lost, options.lost)
    _print_policies(console, policies, weeks, recovery, options, capacity)
    if options.json is not None:
        result: dict[str, Any] = {
            "level": "L2",
            "devices": deployment.num_ranks,
            "output_tokens_per_second": capacity.whole,
            "requests_per_second": carried,
            "weak_scaling": [{"devices": each.devices, "output_tokens_per_second": each.tokens_per_second} for each in points],
            "lost": [{"device": name, "throughput_share": share} for name, share in lost],
            "policies": [
                {
                    "recovery": each.policy,
                    "availability": each.availability,
                    "throughput_share": each.throughput,
                    "lost_seconds_per_failure": each.lost_per_failure,
                }
                for each in policies
            ],
        }
        if needs is not None:
            rows = [{"hour": each.hour, "requests_per_second": each.rate, "fixed": each.fixed, "single": each.single} for each in needs]
            result["daily"] = {"devices": rows, "device_hours": devices_by_hour(needs)}
        write_file(options.json, json_text(result))
    output.check()
    return SUCCESS


def _check(options: FleetOptions) -> None:
    if options.batch is not None and not 0 < options.batch <= 4096:
        raise UserError(f"--batch is {options.batch:g}; give a number above 0 and up to 4096")
    if not 0 < options.failures <= 1e6:
        raise UserError(f"--failures is {options.failures:g}; give failures per week of 4096 devices, above 0")
    if not 0 <= options.lost <= 4096:
        raise UserError(f"--lost is {options.lost}; give a number from 0 to 4096")
    if options.seed < 0:
        raise UserError(f"--seed is {options.seed}; give a number from 0 up")


def _print_instance(console: Console, path: Path, capacity: Capacity, carried: float) -> None:
    console.print(
        Text(
            f"{path}: {capacity.num_devices} devices, {capacity.whole:.0f} output tokens/s at {capacity.batch:g} sequences per group, "
            f"{carried:.3g} requests/s with their prompts (L2)"
        ),
        soft_wrap=True,
    )


def _print_scaling(console: Console, points: Sequence[ScalePoint], deployment: Deployment) -> None:
    if not points:
        return
    base, hidden = points[-1], deployment.model.hidden_size
    names = ("devices", "groups", "servers", "tokens/s", "per device", "of linear", "collectives")
    table = new_table(console, *(Column(name, justify="right") for name in names))
    for point in points:
        linear = point.tokens_per_second / point.devices / (base.tokens_per_second / base.devices)
        row = f"{point.tokens_per_second:.0f}", f"{point.tokens_per_second / point.devices:.1f}", f"{100 * linear:.0f} %"
        possible = "yes" if hidden % point.devices == 0 else "no"
        table.add_row(str(point.devices), str(point.groups), str(point.servers), *row, possible)
    console.print(Text("\nweak scaling: equally many sequences per group", "bold"))
    print_table(table, console)
    console.print(
        Text(f"collectives: systems whose collectives need a number of devices that divides the hidden size, {hidden}"), soft_wrap=True
    )


def _print_day(console: Console, needs: Sequence[HourNeed]) -> None:
    table = new_table(console, *(Column(name, justify="right") for name in ("hour", "requests/s", "whole instances", "single steps")))
    for each in needs:
        table.add_row(f"{each.hour:g}", f"{each.rate:.4g}", f"{each.fixed} devices", f"{each.single} devices")
    total = devices_by_hour(needs)
    console.print(Text("\ndevices by hour", "bold"))
    print_table(table, console)
    sums = f"{total['peak']:.0f} for the peak all day, {total['fixed']:.0f} in whole instances, {total['single']:.0f} in single steps"
    console.print(Text(f"device-hours: {sums}: {100 * total['saved']:.1f} % less than in whole instances"), soft_wrap=True)


def _print_lost(console: Console, lost: Sequence[tuple[str, float]], num_wanted: int) -> None:
    if not lost:
        return
    table = new_table(console, Column("lost", justify="right"), Column("device"), Column("throughput left", justify="right"))
    for place, (name, share) in enumerate(lost, 1):
        table.add_row(str(place), name, f"{100 * share:.1f} %")
    console.print(Text("\ndevices lost one by one, without return", "bold"))
    print_table(table, console)
    mean = sum(share for _, share in lost) / len(lost)
    console.print(Text(f"mean throughput left: {100 * mean:.1f} %; a deployment in one communication group has 0 % until it restarts"))
    if len(lost) < num_wanted:
        console.print(Text(f"{num_wanted} were wanted; one device must be left"))
    if not all(share for _, share in lost):
        text = "0.0 %: an expert has no server left; more replicas (--set deploy.experts.replicas=2) let more servers die"
        console.print(Text(text), soft_wrap=True)


def _print_policies(
    console: Console, policies: Sequence[PolicyResult], weeks: float, recovery: RecoveryTimes, options: FleetOptions, capacity: Capacity
) -> None:
    names = ("availability", "throughput", "availability x throughput", "lost per failure", "in tokens")
    table = new_table(console, Column("recovery"), *(Column(name, justify="right") for name in names))
    for each in policies:
        shares = (f"{100 * share:.4f} %" for share in (each.availability, each.throughput, each.availability * each.throughput))
        table.add_row(each.policy, *shares, duration_text(each.lost_per_failure), f"{each.lost_per_failure * capacity.whole:.3g}")
    per_week = options.failures / 4096 * capacity.num_devices
    console.print(Text(f"\nfailures: {per_week:.3g} per week, {weeks:.0f} weeks of virtual time, seed {options.seed}", "bold"))
    print_table(table, console)
    parts = ", ".join(f"{name} {duration_text(getattr(recovery, name))}" for name in ("detect", "restart", "operator"))
    console.print(Text(f"{parts}; throughput: while tokens come; lost per failure: time of full throughput"))
